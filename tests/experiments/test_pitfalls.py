"""The pitfalls tell right from wrong, and attnlab passes them all."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import deep

from experiments.benchmarks import pitfalls

KNOWN = pitfalls.systems()
OURS = [name for name in KNOWN if name.startswith("attnlab")]
# Said by the system itself: it has no such option, or refuses and names the way out.
LACKS = {
    ("attnlab xla", pitfalls.empty_row_float16),
    ("attnlab xla", pitfalls.head_counts),
    ("attnlab xla", pitfalls.residual_dtype),
    ("attnlab in Flax", pitfalls.residual_dtype),
    ("attnlab in Flax", pitfalls.decode_overflow),
}


@pytest.mark.parametrize("name", deep(pitfalls.PITFALLS, *list(pitfalls.PITFALLS)[::3]))
def test_ours_pass(name):
    pitfall = pitfalls.PITFALLS[name]
    for system in OURS:
        finding = pitfalls.check(pitfall, KNOWN[system])
        passes = finding.is_right or (finding.is_right is None and (system, pitfall) in LACKS)
        assert passes, (system, finding)


def test_every_backend_of_this_device_is_asked():
    assert {"attnlab dense", "attnlab xla", "attnlab in Flax"} <= set(OURS)
    assert {"jax.nn", "linen", "nnx"} <= set(KNOWN)


@pytest.mark.parametrize("peer", ["jax.nn", "linen", "nnx"])
def test_peers_agree_where_all_are_right(peer):
    for pitfall in (pitfalls.huge_scores, pitfalls.causal_alignment, pitfalls.initial_scale):
        assert pitfalls.check(pitfall, KNOWN[peer]).is_right is not False


def test_attention_without_rules_fails():
    """Textbook attention: the mean of what is hidden, NaN let through, float masks inverted."""

    def textbook(q, k, v, *, bias=0.0, mask=True):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        return jnp.einsum("bnts,bsnv->btnv", probs, v)

    system = pitfalls.System(textbook, with_probs=lambda *a: textbook(*a) + 1)
    wrong = {
        name for name, p in pitfalls.PITFALLS.items() if pitfalls.check(p, system).is_right is False
    }
    assert wrong == {
        "row with nothing to attend to",
        "the same in float16",
        "row of bias -inf",
        "NaN at hidden positions",
        "float mask (0, -1e9) as mask",
        "asking for probabilities, bfloat16",
    }
    assert pitfalls.check(pitfalls.value_width, system).is_right
    assert pitfalls.check(pitfalls.causal_alignment, system) == pitfalls.Finding("–")
    assert str(pitfalls.check(pitfalls.head_counts, system)) == "refuses (ValueError)"


def test_an_additive_mask_of_minus_1e5_loses():
    """What the pitfall of huge scores is there for."""

    def additive(q, k, v, *, mask):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) + jnp.where(mask, 0.0, -1e5)
        return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores), v)

    assert pitfalls.huge_scores(pitfalls.System(additive)) == pitfalls.Finding("output 9", False)


def test_each_pitfall_can_be_found():
    """Causal from the bottom right, a coarse residual, heads that are not treated alike."""

    def wrong(q, k, v, *, is_causal=False, return_residual=False):
        offset = k.shape[1] - q.shape[1]
        mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool), offset) if is_causal else None
        out = nn.dot_product_attention(q, k, v, mask=mask) * jnp.arange(1, 5)[:, None]
        return (out, jnp.zeros(out.shape[:3], out.dtype)) if return_residual else out

    system = pitfalls.System(wrong)
    assert pitfalls.check(pitfalls.causal_alignment, system) == ("query 0 of 5 sees 3 of 7", False)
    assert pitfalls.check(pitfalls.residual_dtype, system) == ("bfloat16", False)
    for pitfall in (pitfalls.value_width, pitfalls.identical_heads):
        assert pitfalls.check(pitfall, system).is_right is False


def test_a_cache_that_clamps_is_found():
    def clamps(x, size):
        held = [x[0, min(t, size - 1)] for t in range(x.shape[1])]
        return jnp.stack(held)

    finding = pitfalls.decode_overflow(pitfalls.System(np.add, decode=clamps))
    assert finding == ("goes on, last place written over", False)
    assert pitfalls.check(pitfalls.decode_overflow, pitfalls.System(np.add)) == pitfalls.Finding(
        "–"
    )


def test_wider_heads_under_xavier_start_smaller():
    """The fan of Xavier's rule counts outputs too."""

    def xavier(key, width, heads, head_dim):
        shapes = (width, heads * head_dim), (heads * head_dim, width)
        return tuple(jax.nn.initializers.glorot_normal()(key, shape) for shape in shapes)

    text, right = pitfalls.initial_scale(pitfalls.System(np.add, init=xavier))
    assert not right
    # q: sqrt(2 / (64 + 64)) * sqrt(64) = 1, then sqrt(2 / (64 + 512)) * sqrt(64) = 0.47
    numbers = [float(n) for n in re.findall(r"\d\.\d\d", text)]
    np.testing.assert_allclose(numbers, [1, 0.47, 1, 1.33], atol=0.03)


def test_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(pitfalls, "PITFALLS", {"V = 3 H": pitfalls.value_width})
    lines = pitfalls.table({"attnlab dense": KNOWN["attnlab dense"], "jax.nn": KNOWN["jax.nn"]})
    head, rule, row = lines.split("\n")
    assert (head, rule) == ("| | attnlab dense | jax.nn |", "|---|---|---|")
    assert row.startswith("| V = 3 H | ✓ error ")


@pytest.mark.slow
def test_the_command(tmp_path):
    done = command("experiments.benchmarks.pitfalls", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pitfalls.md").read_text() in done.stdout
    assert all(f"| {name} |" in done.stdout for name in pitfalls.PITFALLS)
