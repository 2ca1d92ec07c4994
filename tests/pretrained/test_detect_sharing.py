"""`load(detect_sharing=True)` shares layers whose weights are the same bits, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.heads import Standard
from attnlab.models import FFN, ModelConfig
from attnlab.transforms import detect_sharing

CONFIG = ModelConfig(
    width=8, num_layers=3, heads=Standard(num_heads=2), ffn=FFN(width=4), vocab_size=7, max_len=5
)


def alike(value):
    """Three equal layers; the first query weight of each is `value`."""
    params = CONFIG.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    layers = jax.tree.map(lambda a: jnp.stack([a[0]] * 3), params["layers"])
    layers["attention"]["q"] = layers["attention"]["q"].at[:, 0, 0, 0].set(value)
    return params | {"layers": layers}


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0])
def test_equal_bits_are_shared(value):
    params = alike(value)
    config, once = detect_sharing(CONFIG, params)
    assert config.sharing == "albert"
    assert np.asarray(once["layers"]["attention"]["q"]).tobytes() == (
        np.asarray(params["layers"]["attention"]["q"][:1]).tobytes()
    )


@pytest.mark.parametrize("bits", [[0, 1 << 31, 0], [0x7FC00000, 0x7FC00001, 0x7FC00000]])
def test_other_bits_are_not_shared(bits):
    """Zeros of different sign, and NaNs of different bits."""
    params = alike(0.0)
    q = np.array(params["layers"]["attention"]["q"])
    q.view(np.uint32)[:, 0, 0, 0] = bits
    params["layers"]["attention"]["q"] = jnp.asarray(q)
    config, once = detect_sharing(CONFIG, params)
    assert (config.plan["attention"], config.plan["ffn"]) == ((0, 1, 0), (0, 0, 0))
    found = np.asarray(once["layers"]["attention"]["q"]).view(np.uint32)
    assert found[:, 0, 0, 0].tolist() == bits[:2]
