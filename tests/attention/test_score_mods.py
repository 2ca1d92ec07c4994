"""Score modifications apart from the contract of the backends, which draws them too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from definition import make

from attnlab import dot_product_attention
from attnlab.attention import ALiBi, alibi_slopes


def test_bfloat16_and_a_leaf_of_its_own_dtype():
    arrays, slopes = make(jnp.bfloat16), jnp.linspace(-2, 2, 6, dtype=jnp.bfloat16)

    def gradient(name):
        def loss(slopes):
            out = dot_product_attention(*arrays, score_mods=[ALiBi(slopes)], implementation=name)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss))(slopes)

    assert gradient("blockwise").dtype == jnp.bfloat16
    assert_close(gradient("blockwise"), gradient("dense"), loosen=2)


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (2, [1 / 16, 1 / 256]),
        (1, [1 / 256]),
        (12, [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_as_published(num_heads, expected):
    """The numbers of get_slopes in github.com/ofirpress/attention_with_linear_biases."""
    np.testing.assert_allclose(alibi_slopes(num_heads), expected, rtol=1e-6)
