"""One more score in every row, whose probability goes nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import dot_product_attention, explain
from attnlab.tap import capture

B, T, S, N, K, H, V = 2, 5, 7, 4, 2, 3, 6
RNG = np.random.default_rng(0)
DRAW = lambda *shape: 2 * RNG.normal(size=shape)
QUERY, KEY, VALUE = DRAW(B, T, N, H), DRAW(B, S, K, H), DRAW(B, S, K, V)
SINK = DRAW(N, 1, 1)
SEEN = RNG.random((B, 1, T, S)) < 0.5
SEEN[0, :, 2] = False  # a row with nothing but the sink


def by_hand(seen):
    """Softmax over the keys and one more column, which is then left out; and log sum exp."""
    each = lambda a: np.repeat(a, N // K, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", QUERY, each(KEY)) * H**-0.5
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + np.exp(SINK)
    probs = weights / total
    out = np.einsum("bnts,bsnv->btnv", probs, each(VALUE))
    return out, probs, np.log(total[..., 0]).swapaxes(1, 2)


def test_what_is_captured_patched_and_dropped(x64):
    """Probs sum to less than one; in blocks dropout takes the same ones; no sink is no change."""
    q, k, v, sink, mask = map(jnp.asarray, (QUERY, KEY, VALUE, SINK, SEEN))
    key = jax.random.key(1)

    @jax.jit
    def run(q, k, v, sink):
        call = lambda **more: dot_product_attention(q, k, v, mask=mask, **more)
        dropped = [
            call(sink=sink, dropout_rate=0.4, dropout_key=key, implementation=name)
            for name in ("dense", "blockwise")
        ]
        probs = capture(call, names=("probs",), sink=sink)[1]["probs"]
        patched, _ = capture(call, names=(), patch={"probs": lambda p, layer: 2 * p}, sink=sink)
        mixed = call(sink=sink, talking_heads=(jnp.eye(N)[::-1], jnp.eye(N)[::-1]))
        return dropped, probs, patched, mixed, call(sink=-jnp.inf), call()

    dropped, probs, patched, mixed, nothing, plain = run(q, k, v, sink)
    out, expected, _ = by_hand(SEEN)
    assert_close(*dropped)
    assert_close(probs, expected)
    assert_close(patched, 2 * out)
    # The heads turn over before the softmax and back after: each meets another's sink.
    turned = dot_product_attention(q, k, v, mask=mask, sink=sink[::-1])
    assert_close(mixed, turned)
    assert_close(nothing, plain)


def test_what_a_sink_may_be():
    q = jnp.ones((1, 3, 2, 4))
    assert explain(q, q, q, sink=0.0)["xla"] == "could run"
    with pytest.raises(ValueError, match=r"sink \(3, 1, 1\) must broadcast"):
        dot_product_attention(q, q, q, sink=jnp.zeros((3, 1, 1)))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_the_gradient_of_a_small_sink_keeps_its_digits(implementation):
    """-share times the output, where the share of the sink is 2e-6."""
    q, v = np.ones((1, 1, 1, 3), "float32"), np.full((1, 1, 1, 2), 3.0, "float32")
    sink = np.float32(np.sqrt(3) - 13)
    call = lambda s: jnp.sum(dot_product_attention(q, q, v, sink=s, implementation=implementation))
    share = 1 / (1 + np.exp(np.sqrt(3) - sink))
    assert_close(jax.grad(call)(sink), jnp.float32(-6 * share * (1 - share)))
