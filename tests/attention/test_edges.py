"""A mask that is a list of edges, apart from the contract of the backends, which draws it too."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, value_and_grads
from definition import make

from attnlab import ModelConfig, dot_product_attention, masks
from attnlab.heads import Standard
from attnlab.models import FFN, NoPositions

# B=2 nodes: T=5 receive, S=7 send; N=6 K=3 H=4 Kv=2 V=8


def by(mask, **options):
    """Attention under this mask: (q, k, v, bias) -> output."""
    return functools.partial(dot_product_attention, mask=mask, **options)


@pytest.mark.slow
def test_through_a_model():
    """Two layers see two hops; the list costs no [T, S] array."""
    config = ModelConfig(
        kind="encoder", vocab_size=11, max_len=64, width=8, num_layers=2,
        heads=Standard(num_heads=2), ffn=FFN(width=8), positions=NoPositions(),
    )  # fmt: skip
    model, tokens = config.build(), jnp.arange(64)[None] % 11
    params = model.init(jax.random.key(0), tokens)["params"]
    senders = np.arange(64)
    line = masks.Edges(senders[:-1], senders[1:])  # node t sees node t - 1 alone
    run = jax.jit(lambda tokens, mask: model.apply({"params": params}, tokens, mask=mask).logits)
    assert_close(run(tokens, line), run(tokens, line.matrix(64)), loosen=10)
    moved = np.any(run(tokens.at[0, 9].add(1), line) != run(tokens, line), axis=-1)[0]
    assert np.flatnonzero(moved).tolist() == [9, 10, 11]
    text = jax.jit(lambda m: run(tokens, m)).lower(line).as_text()
    assert "64x64" not in text
    with pytest.raises(TypeError, match="Edges cannot be combined"):
        model.apply({"params": params}, tokens, mask=line, padding_mask=jnp.ones((1, 64), bool))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_and_strangers_reach_nothing(poison, cap, x64):
    """Padding edges, under jit any bad index, nodes without edges and the bias of pairs without
    one, whatever they hold.

    The same bits as with numbers in their place; up to rounding those of the graph without them.
    """
    q, k, v = make("float64", heads=(6, 3, 2), scale=3.0)
    rng = np.random.default_rng(7)
    bias, connected = jnp.asarray(rng.normal(size=(6, 5, 7))), rng.random((5, 7)) < 0.4
    connected[4] = connected[:, 6] = False
    receivers, senders = np.nonzero(connected)

    @jax.jit
    def run(senders, receivers, *arrays):
        mask = masks.Edges(senders, receivers)
        return value_and_grads(by(mask, logits_soft_cap=cap, implementation="edges"), *arrays)

    # The last nodes: where an index that is only clipped would land.
    poisoned = q.at[:, 4].set(poison), k.at[:, 6].set(poison), v.at[:, 6].set(poison)
    pads = np.array([[7, 7, 0, -1, -3, 99], [5, 0, 5, -1, 0, 99]])
    longer = np.append(senders, pads[0]), np.append(receivers, pads[1])
    got = run(*longer, *poisoned, jnp.where(connected, bias, poison))
    jax.tree.map(np.testing.assert_array_equal, got, run(*longer, q, k, v, bias))
    assert not np.asarray(got[1][3][:, ~connected]).any()
    assert_close(got, value_and_grads(by(connected, logits_soft_cap=cap), q, k, v, bias))


def test_no_array_of_all_pairs():
    """O(edges): no array is larger than the values of all nodes."""
    q, k, v = (a[0] for a in make(heads=(2, 2, 2), t=500, s=600))
    run = by(masks.Edges(np.arange(9), np.arange(9)))
    grad = jax.grad(lambda *arrays: jnp.sum(run(*arrays)), (0, 1, 2, 3))
    text = jax.jit(grad).lower(q, k, v, jnp.zeros((2, 1, 600))).as_text()
    shapes = re.findall(r"tensor<((?:\d+x)+)", text)
    assert max(np.prod([int(n) for n in shape.split("x")[:-1]]) for shape in shapes) == 600 * 2 * 8


@pytest.mark.parametrize("implementation", ["edges", "dense"])
def test_without_edges_every_node_gives_zeros(implementation):
    none, x = jnp.zeros(0, int), jnp.ones((2, 5, 3, 4))
    run = by(masks.Edges(none, none), sink=jnp.zeros((3, 1, 1)), implementation=implementation)
    total, slope = jax.value_and_grad(lambda x: jnp.sum(jnp.cos(run(x, x, x))))(x)
    assert float(total) == x.size
    assert not slope.any()
