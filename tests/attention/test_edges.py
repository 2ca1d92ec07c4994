"""Attention over a list of edges is dense attention with the mask of the graph."""

import functools
import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import ModelConfig, dot_product_attention, explain, masks
from attnlab.attention import attention_over_edges
from attnlab.tap import capture

# B=2 nodes: T=5 receive, S=7 send; N=6 K=3 H=4 Kv=2 V=8


def make(dtype=np.float64, batch=(2,), heads=(6, 3, 2), t=5, s=7):
    rng, (n, k, kv) = np.random.default_rng(4), heads
    shapes = (t, n, 4), (s, k, 4), (s, kv, 8)
    return tuple(jnp.asarray(3 * rng.normal(size=(*batch, *a)), dtype) for a in shapes)


def graph(t=5, s=7, lonely=2, degree=0.4):
    """Edges of a random graph without repeats; nobody reaches node `lonely`."""
    allowed = np.random.default_rng(7).random((t, s)) < degree
    allowed[lonely] = False
    receivers, senders = np.nonzero(allowed)
    order = np.random.default_rng(8).permutation(len(senders))
    return senders[order], receivers[order]


def attend(*arrays, **options):
    """Under jit; the options are constants of it."""
    return jax.jit(functools.partial(attention_over_edges, **options))(*arrays)


def value_and_grads(run, *arrays):
    """Output, and the gradient of a loss that weighs every entry differently."""

    def loss(*arrays):
        out = run(*arrays)
        return jnp.sum(jnp.sin(out)), out

    numbers = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True))(*arrays)
    return out, grads


OPTIONS = {"plain": {}, "scale": {"scale": 0.2}, "soft cap": {"logits_soft_cap": 2.0}}


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_dense_attention_with_the_mask(batch, options, x64):
    """In value and gradient, with grouped heads, V != H, a bias and a node that sees nobody."""
    q, k, v = make(batch=batch)
    senders, receivers = graph()
    bias = jnp.asarray(np.random.default_rng(5).normal(size=(*batch, len(senders), 6)))
    mask = masks.from_edges(senders, receivers, 5, 7)

    def sparse(q, k, v, bias):
        return attention_over_edges(
            q, k, v, masks.Edges(senders, receivers), bias, **OPTIONS[options]
        )

    def dense(q, k, v, bias):
        wide = jnp.zeros((*batch, 6, 5, 7)).at[..., receivers, senders].set(bias.swapaxes(-1, -2))
        run = functools.partial(dot_product_attention, mask=mask, **OPTIONS[options])
        for _ in range(max(len(batch) - 1, 0)):
            run = jax.vmap(run)
        return run(q, k, v, wide)

    got, expected = value_and_grads(sparse, q, k, v, bias), value_and_grads(dense, q, k, v, bias)
    assert_close(got, expected)
    out, (q_grad, *_) = got
    assert not np.asarray(out[..., 2, :, :]).any()
    assert not np.asarray(q_grad[..., 2, :, :]).any()
    assert np.asarray(q_grad[..., 1, :, :]).all()


MASKED = {
    "plain": {},
    "bias and soft cap": {
        "bias": jnp.linspace(-3, 3, 6 * 7).reshape(6, 1, 7),
        "logits_soft_cap": 2.0,
    },
    "dropout": {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)},
    "with a rule besides": {"is_causal": True, "local_window_size": (3, 3)},
}


@pytest.mark.parametrize("own", deep([False, True], True))
@pytest.mark.parametrize("options", deep(MASKED, "plain"))
def test_as_a_mask(options, own, x64):
    """`Edges` where a mask goes, one graph for all rows or one each: value, gradient, the same
    probabilities dropped; the backend is the cheap one where edges say it all."""
    q, k, v = make()
    bias = MASKED[options].get("bias", jnp.zeros((1, 7)))
    rest = {name: a for name, a in MASKED[options].items() if name != "bias"}
    one, two = graph(), graph(lonely=4)
    pad = lambda ends, size: np.pad(ends, (0, 30 - len(ends)), constant_values=size)
    edges = masks.Edges(*one)
    matrix = masks.from_edges(*one, 5, 7)
    if own:
        edges = masks.Edges(
            np.stack([pad(g[0], 7) for g in (one, two)]),
            np.stack([pad(g[1], 5) for g in (one, two)]),
        )
        matrix = jnp.stack([matrix, masks.from_edges(*two, 5, 7)])[:, None]
    by = lambda mask: lambda q, k, v, bias: dot_product_attention(q, k, v, bias, mask, **rest)
    got, expected = (value_and_grads(by(mask), q, k, v, bias) for mask in (edges, matrix))
    assert_close(got, expected)
    told = explain(q, k, v, bias=bias, mask=edges, **rest)
    alone = "is_causal" not in rest
    assert told["edges" if alone else "dense"].startswith("chosen")
    assert "nothing else that hides" in told["edges"] or alone
    assert explain(q, k, v, bias=bias, mask=matrix)["edges"].startswith(
        "it needs a mask that is masks.Edges"
    )
    probs = functools.partial(
        capture, dot_product_attention, q, k, v, bias, names=("probs",), **rest
    )
    assert_close(probs(mask=edges)[1], probs(mask=matrix)[1])


def test_through_a_model():
    """Two layers see two hops; the list costs no [T, S] array."""
    config = ModelConfig(kind="encoder", vocab_size=11, max_len=64, width=8, num_heads=2,
                         num_layers=2, ffn_width=8, positions="none")  # fmt: skip
    model, tokens = config.build(), jnp.arange(64)[None] % 11
    params = model.init(jax.random.key(0), tokens)["params"]
    senders = np.arange(64)
    line = masks.Edges(senders[:-1], senders[1:])  # node t sees node t - 1 alone
    run = jax.jit(lambda tokens, mask: model.apply({"params": params}, tokens, mask=mask))
    assert_close(run(tokens, line), run(tokens, line.matrix(64)), loosen=10)
    moved = np.any(run(tokens.at[0, 9].add(1), line) != run(tokens, line), axis=-1)[0]
    assert np.flatnonzero(moved).tolist() == [9, 10, 11]
    text = jax.jit(lambda m: run(tokens, m)).lower(line).as_text()
    assert "64x64" not in text
    with pytest.raises(TypeError, match="combined with no other mask"):
        model.apply({"params": params}, tokens, mask=line, padding_mask=jnp.ones((1, 64), bool))


def test_lists_of_edges_that_do_not_fit():
    q, k, v = make(np.float32)
    senders, receivers = graph()
    three = masks.Edges(np.stack([senders] * 3), np.stack([receivers] * 3))
    with pytest.raises(ValueError, match=r"must be \[edges\], or \[B, edges\] with B = 2"):
        dot_product_attention(q, k, v, mask=three)
    with pytest.raises(ValueError, match="senders holds 8, which is no index of 7 nodes"):
        dot_product_attention(q, k, v, mask=masks.Edges(senders + 2, receivers))
    edges = masks.Edges(senders, receivers)
    with pytest.raises(ValueError, match="implementation='blockwise' cannot run"):
        dot_product_attention(q, k, v, mask=edges, implementation="blockwise")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_low_precision(dtype):
    q, k, v = make(dtype)
    senders, receivers = graph()
    out = attend(q, k, v, edges=masks.Edges(senders, receivers))
    assert out.dtype == dtype
    mask = masks.from_edges(senders, receivers, 5, 7)
    assert_close(out, dot_product_attention(q, k, v, mask=mask))


def test_the_complete_graph_is_plain_attention(x64):
    q, k, v = make()
    receivers, senders = np.nonzero(np.ones((5, 7), bool))
    got = attend(q, k, v, edges=masks.Edges(senders, receivers))
    assert_close(got, jax.jit(dot_product_attention)(q, k, v))


def test_equal_scores_give_the_mean_of_the_neighbours(x64):
    q, k, v = make(heads=(6, 6, 6))
    senders, receivers = graph()
    mask = np.asarray(masks.from_edges(senders, receivers, 5, 7), float)
    mean = mask / np.maximum(mask.sum(1, keepdims=True), 1)
    expected = np.einsum("ts,bsnv->btnv", mean, v)
    for bias in (None, jnp.full(len(senders), 3.0), jnp.full((1, len(senders), 1), -3.0)):
        got = attend(0 * q, k, v, edges=masks.Edges(senders, receivers), bias=bias)
        assert_close(got, jnp.asarray(expected))


def test_an_edge_listed_twice_counts_twice(x64):
    """Scores are equal, so 2/3 of the sum is what came twice; the boolean mask has it once."""
    q, v = jnp.zeros((1, 1, 2)), jnp.array([[[3.0]], [[9.0]]])
    twice = np.array([0, 1, 1]), np.array([0, 0, 0])
    run = functools.partial(attention_over_edges, edges=masks.Edges(*twice))
    out, values = capture(run, q, jnp.zeros((2, 1, 2)), v, names=("probs",))
    probs = values["probs"]
    assert_close(out, jnp.array([[[7.0]]]))
    assert_close(probs, jnp.full((3, 1), 1 / 3))
    once = dot_product_attention(q, jnp.zeros((2, 1, 2)), v, mask=masks.from_edges(*twice, 1, 2))
    assert_close(once, jnp.array([[[6.0]]]))


def test_capture_returns_the_probabilities_and_changes_no_bit(optimized):
    q, k, v = make(np.float32)
    senders, receivers = np.append(graph(), [[7], [5]], axis=1)
    run = functools.partial(attention_over_edges, edges=masks.Edges(senders, receivers))
    out, values = jax.jit(functools.partial(capture, run, names=("probs",)))(q, k, v)
    probs = values["probs"]
    np.testing.assert_array_equal(out, jax.jit(run)(q, k, v))
    mask = masks.from_edges(senders, receivers, 5, 7)
    _, dense = capture(dot_product_attention, q, k, v, mask=mask, names=("probs",))
    expected = dense["probs"][:, :, receivers[:-1], senders[:-1]].swapaxes(1, 2)
    assert_close(probs[:, :-1], expected)
    assert not np.asarray(probs[:, -1]).any()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_and_strangers_reach_nothing(poison, cap, x64):
    """Padding edges, under jit any bad index, and nodes without edges, whatever they hold.

    The same bits as with numbers in their place; up to rounding those of the graph without them.
    """
    q, k, v = make()
    senders, receivers = graph(lonely=4)
    keep = senders != 6
    senders, receivers = senders[keep], receivers[keep]
    bias = jnp.asarray(np.random.default_rng(5).normal(size=(len(senders), 6)))

    def run(senders, receivers):
        return lambda q, k, v, bias: attention_over_edges(
            q, k, v, masks.Edges(senders, receivers), bias, logits_soft_cap=cap
        )

    out, grads = value_and_grads(run(senders, receivers), q, k, v, bias)
    # The last nodes: where an index that is only clipped would land.
    poisoned = q.at[:, 4].set(poison), k.at[:, 6].set(poison), v.at[:, 6].set(poison)
    pads = np.array([[7, 7, 0, -1, -3, 99], [5, 0, 5, -1, 0, 99]])
    more = jnp.concatenate([bias, jnp.full((6, 6), poison)])

    @jax.jit
    def traced(senders, receivers, *arrays):
        return value_and_grads(run(senders, receivers), *arrays)

    longer = np.append(senders, pads[0]), np.append(receivers, pads[1])
    got, got_grads = traced(*longer, *poisoned, more)
    clean = traced(*longer, q, k, v, jnp.nan_to_num(more, nan=0.0, posinf=0.0))
    jax.tree.map(np.testing.assert_array_equal, (got, got_grads), clean)
    assert not np.asarray(got_grads[3][-6:]).any()
    assert_close((got, (*got_grads[:3], got_grads[3][:-6])), (out, grads))


def test_a_bias_of_minus_infinity_takes_an_edge_out(x64):
    q, k, v = make()
    senders, receivers = graph()
    keep = receivers != receivers[0]
    bias = jnp.where(keep, 0.0, -jnp.inf)
    got = value_and_grads(
        lambda q, k, v: attention_over_edges(q, k, v, masks.Edges(senders, receivers), bias),
        q,
        k,
        v,
    )
    less = masks.Edges(senders[keep], receivers[keep])
    expected = value_and_grads(lambda q, k, v: attention_over_edges(q, k, v, less), q, k, v)
    assert_close(got, expected)


def test_no_array_of_all_pairs():
    """O(edges): the largest array that is made has edges * N * V entries, not T * S."""
    q, k, v = make(np.float32, heads=(2, 2, 2), batch=(), t=500, s=600)
    senders, receivers = np.arange(9), np.arange(9)
    grad = jax.grad(
        lambda q: jnp.sum(attention_over_edges(q, k, v, masks.Edges(senders, receivers)))
    )
    jaxpr = jax.make_jaxpr(grad)(q)
    sizes = [v.aval.size for e in jaxpr.jaxpr.eqns for v in e.outvars]
    assert max(sizes) <= 600 * 2 * 8


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5, 2, 4), (7, 2, 3), (7, 2, 8)), "do not fit together"),
        (((5, 2, 4), (7, 2, 4), (6, 2, 8)), "do not fit together"),
        (((5, 4), (7, 4), (7, 8)), "do not fit together"),
        (((5, 2, 4), (7, 3, 4), (7, 2, 8)), "3 key heads .* must divide 2 query heads"),
    ],
)
def test_bad_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        attention_over_edges(*map(jnp.ones, shapes), masks.Edges(jnp.array([0]), jnp.array([0])))


def test_bad_indices():
    with pytest.raises(ValueError, match="senders holds 8, which is no index of 7 nodes"):
        attention_over_edges(*make(np.float32), masks.Edges(jnp.array([8]), jnp.array([0])))


def test_cora(shared_data):
    """The citation graph: mean aggregation, and on a corner of it dense attention with its mask."""
    folder = shared_data / "cora"
    read = lambda name: gzip.decompress((folder / name).read_bytes()).decode().splitlines()
    ids = {line.split("\t", 1)[0]: i for i, line in enumerate(read("cora.content.gz"))}
    links = {tuple(ids[p] for p in line.split()) for line in read("cora.cites.gz")}
    links |= {(b, a) for a, b in links}
    senders, receivers = np.array(sorted(links)).T
    assert (len(ids), len(links)) == (2708, 2 * 5278)
    q, k, v = make(np.float32, batch=(), heads=(2, 2, 1), t=2708, s=2708)
    mean = attend(0 * q, k, v, edges=masks.Edges(senders, receivers))
    sums, degree = np.zeros((2708, 8)), np.zeros((2708, 1))
    np.add.at(sums, receivers, np.asarray(v[:, 0])[senders])
    np.add.at(degree, receivers, 1)
    assert_close(mean[:, 1], jnp.asarray(sums / degree, np.float32))
    few = (senders < 400) & (receivers < 400)  # a corner of it, where many papers are alone
    senders, receivers = senders[few], receivers[few]
    mask = masks.from_edges(senders, receivers, 400)
    assert 0 < np.sum(~np.any(mask, axis=1)) < 400
    sparse = lambda q, k, v: attention_over_edges(q, k, v, masks.Edges(senders, receivers))
    dense = lambda q, k, v: dot_product_attention(q, k, v, mask=mask)
    corner = [a[:400] for a in (q, k, v)]
    assert_close(value_and_grads(sparse, *corner), value_and_grads(dense, *corner))


def test_dropout_divides_what_it_keeps_by_the_share_that_it_keeps():
    """A node with one edge has probability 1: its output is 0, or the value / (1 - rate)."""
    nodes, rate = 60, 0.75
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, nodes, 2, 3)), jnp.float32)
    edges = masks.Edges(jnp.arange(nodes), jnp.arange(nodes))
    options = {"dropout_rate": rate, "dropout_key": jax.random.key(0)}
    out = np.asarray(dot_product_attention(x, x, x, mask=edges, implementation="edges", **options))
    is_kept = np.any(out != 0, axis=-1, keepdims=True)
    assert 10 < is_kept.sum() < 50  # of 120, a quarter
    assert_close(out, np.where(is_kept, x / (1 - rate), 0))
