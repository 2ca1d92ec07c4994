"""The pitfalls distinguish right from wrong, and attnlab passes them all."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep

from experiments.benchmarks import pitfalls
from experiments.benchmarks.pitfalls import PITFALLS, Finding, System, check

OURS = pitfalls.systems()["attnlab"]


@pytest.mark.parametrize("name", deep(PITFALLS, *list(PITFALLS)[::3]))
def test_ours_pass(name):
    assert check(PITFALLS[name], OURS).is_right


def test_attention_without_rules_fails():
    """Textbook attention: the mean of what is hidden, NaN let through, float masks inverted."""

    def textbook(q, k, v, *, mask=True, return_residual=False):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        out = jnp.einsum("bnts,bsnv->btnv", probs, v)
        return (out, jnp.zeros(out.shape[:3], out.dtype)) if return_residual else out

    def clamps(x, size):
        return jnp.stack([x[0, min(t, size - 1)] for t in range(x.shape[1])])

    system = System(textbook, lambda *a: textbook(*a) + 1, clamps)
    found = {name: check(pitfall, system) for name, pitfall in PITFALLS.items()}
    right = {name for name, finding in found.items() if finding.is_right}
    assert right == {"values wider than keys"}
    assert found["6 query, 3 key, 2 value heads"] == Finding("raises ValueError")
    assert check(pitfalls.probabilities, System(textbook)) == Finding("–")
    wrong = lambda q, k, v: nn.dot_product_attention(q, k, v) * jnp.arange(1, 5)[:, None]
    assert check(PITFALLS["values wider than keys"], System(wrong)).is_right is False
    assert check(pitfalls.decode_overflow, System(np.add)) == Finding("–")
