"""The traps tell right from wrong, and attnlab passes them all."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import deep

from experiments.benchmarks import traps

KNOWN = traps.systems()
OURS = [name for name in KNOWN if name.startswith("attnlab")]
# Said by the system itself: it has no such option, or refuses and names the way out.
LACKS = {
    ("attnlab xla", traps.empty_row_float16),
    ("attnlab xla", traps.head_counts),
    ("attnlab xla", traps.residual_dtype),
    ("attnlab in Flax", traps.residual_dtype),
    ("attnlab in Flax", traps.decode_overflow),
}


@pytest.mark.parametrize("name", deep(traps.TRAPS, *list(traps.TRAPS)[::3]))
def test_ours_pass(name):
    trap = traps.TRAPS[name]
    for system in OURS:
        finding = traps.ask(trap, KNOWN[system])
        passes = finding.right or (finding.right is None and (system, trap) in LACKS)
        assert passes, (system, finding)


def test_every_backend_of_this_device_is_asked():
    assert {"attnlab dense", "attnlab xla", "attnlab in Flax"} <= set(OURS)
    assert {"jax.nn", "linen", "nnx"} <= set(KNOWN)


@pytest.mark.parametrize("peer", ["jax.nn", "linen", "nnx"])
def test_peers_agree_where_all_are_right(peer):
    for trap in (traps.huge_scores, traps.causal_alignment, traps.initial_scale):
        assert traps.ask(trap, KNOWN[peer]).right is not False


def test_attention_without_rules_fails():
    """Textbook attention: the mean of what is hidden, NaN let through, float masks inverted."""

    def textbook(q, k, v, *, bias=0.0, mask=True):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        return jnp.einsum("bnts,bsnv->btnv", probs, v)

    system = traps.System(textbook, looks=lambda *a: textbook(*a) + 1)
    wrong = {name for name, p in traps.TRAPS.items() if traps.ask(p, system).right is False}
    assert wrong == {
        "row with nothing to attend to",
        "the same in float16",
        "row of bias -inf",
        "NaN at hidden positions",
        "float mask (0, -1e9) as mask",
        "asking for probabilities, bfloat16",
    }
    assert traps.ask(traps.value_width, system).right
    assert traps.ask(traps.causal_alignment, system) == traps.Finding("–")
    assert str(traps.ask(traps.head_counts, system)) == "refuses (ValueError)"


def test_an_additive_mask_of_minus_1e5_loses():
    """What the trap of huge scores is there for."""

    def additive(q, k, v, *, mask):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) + jnp.where(mask, 0.0, -1e5)
        return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores), v)

    assert traps.huge_scores(traps.System(additive)) == traps.Finding("output 9", False)


def test_each_trap_can_fail():
    """Causal from the bottom right, a coarse residual, heads that are not treated alike."""

    def wrong(q, k, v, *, is_causal=False, return_residual=False):
        offset = k.shape[1] - q.shape[1]
        mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool), offset) if is_causal else None
        out = nn.dot_product_attention(q, k, v, mask=mask) * jnp.arange(1, 5)[:, None]
        return (out, jnp.zeros(out.shape[:3], out.dtype)) if return_residual else out

    system = traps.System(wrong)
    assert traps.ask(traps.causal_alignment, system) == ("query 0 of 5 sees 3 of 7", False)
    assert traps.ask(traps.residual_dtype, system) == ("bfloat16", False)
    for trap in (traps.value_width, traps.identical_heads):
        assert traps.ask(trap, system).right is False


def test_a_cache_that_clamps_is_found():
    def clamps(x, size):
        held = [x[0, min(t, size - 1)] for t in range(x.shape[1])]
        return jnp.stack(held)

    finding = traps.decode_overflow(traps.System(np.add, decode=clamps))
    assert finding == ("goes on, last place written over", False)
    assert traps.ask(traps.decode_overflow, traps.System(np.add)) == traps.Finding("–")


def test_wider_heads_under_xavier_start_smaller():
    """The fan of Xavier's rule counts outputs too."""

    def xavier(key, width, heads, head_dim):
        shapes = (width, heads * head_dim), (heads * head_dim, width)
        return tuple(jax.nn.initializers.glorot_normal()(key, shape) for shape in shapes)

    text, right = traps.initial_scale(traps.System(np.add, fresh=xavier))
    assert not right
    # q: sqrt(2 / (64 + 64)) * sqrt(64) = 1, then sqrt(2 / (64 + 512)) * sqrt(64) = 0.47
    numbers = [float(n) for n in re.findall(r"\d\.\d\d", text)]
    np.testing.assert_allclose(numbers, [1, 0.47, 1, 1.33], atol=0.03)


def test_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(traps, "TRAPS", {"V = 3 H": traps.value_width})
    lines = traps.table({"attnlab dense": KNOWN["attnlab dense"], "jax.nn": KNOWN["jax.nn"]})
    head, rule, row = lines.split("\n")
    assert (head, rule) == ("| | attnlab dense | jax.nn |", "|---|---|---|")
    assert row.startswith("| V = 3 H | ✓ error ")


@pytest.mark.slow
def test_the_command(tmp_path):
    done = command("experiments.traps", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "traps.md").read_text() in done.stdout
    assert all(f"| {name} |" in done.stdout for name in traps.TRAPS)
