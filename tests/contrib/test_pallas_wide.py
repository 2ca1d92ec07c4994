"""Heads 64 to 1024 wide in Pallas, interpreted: every value and gradient is that of `dense`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import dot_product_attention, explain
from attnlab.attention import SoftCap
from attnlab.attention.mask_spec import MaskSpec
from attnlab.contrib import interpreted, pallas_wide_kernels
from attnlab.contrib.pallas_wide import place_of
from attnlab.contrib.pallas_wide_kernels import Tiling
from attnlab.heads import HeadInputs, Wide, attend_heads, weight_shapes
from attnlab.tap import Tap


@pytest.fixture(autouse=True)
def anywhere(request):
    """On any device, but where the device is the question."""
    if request.node.originalname == "test_it_is_for_a_gpu":
        yield
    else:
        with interpreted():
            yield


@pytest.fixture
def small(monkeypatch):
    """Blocks of 16 rows, steps of 8, 32 columns: several of all, and padded, at small sizes."""
    cut = Tiling(1024, block=16, step=8, chunk=32, own=2, warps=4, stages=2)
    monkeypatch.setattr(pallas_wide_kernels, "TILINGS", {2: (cut,), 4: (cut,)})


def make(*shapes, dtype=jnp.float32, seed=5):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(2 * rng.normal(size=shape), dtype) for shape in shapes]


def qkv(heads, lengths, widths, **options):
    """Two batch rows; None for the values: the keys."""
    (n, k, kv), (t, s), (h, v) = heads, lengths, widths
    value = [] if v is None else [(2, s, kv, v)]
    return make((2, t, n, h), (2, s, k, h), *value, **options)


def values_and_gradients(name, arrays, bias=None, **call):
    """Output, exp of log sum exp, and the gradients of a number that moves with every entry."""
    one = len(arrays) == 2

    def run(arrays, bias):
        q, k, v = (*arrays, arrays[1]) if one else arrays
        call_ = {"return_residual": True, "implementation": name, **call}
        out, residual = dot_product_attention(q, k, v, bias, **call_)
        out, shift = out.astype(jnp.float32), jnp.cos(jnp.arange(out.size).reshape(out.shape))
        seen = jnp.where(jnp.isfinite(residual), residual, 0)
        return jnp.sum(jnp.sin(out) * shift) + jnp.sum(jnp.cos(seen)), (out, jnp.exp(residual))

    (_, made), gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(arrays, bias)
    return made, gradients


def compare(arrays, bias=None, loosen=0.5, **call):
    """One program for both; to 1e-5 in float32."""
    both = lambda *a: [values_and_gradients(name, *a, **call) for name in ("pallas_wide", "dense")]
    got, expected = jax.jit(both)(arrays, bias)
    assert_close(got, expected, loosen=loosen)
    assert all(np.asarray(a).any() for a in jax.tree.leaves(expected))
    return got


def equations(primitive, f, *args):
    """Those of one primitive in the program of f(*args), wherever they stand."""

    def inside(jaxpr):
        for e in jaxpr.eqns:
            if e.primitive.name == primitive:
                yield e
            for leaf in jax.tree.leaves(e.params, is_leaf=lambda x: hasattr(x, "eqns")):
                leaf = getattr(leaf, "jaxpr", leaf)
                if hasattr(leaf, "eqns"):
                    yield from inside(leaf)

    return list(inside(jax.make_jaxpr(f)(*args).jaxpr))


# Neither lengths nor widths are multiples of the blocks; V is not H; heads come in groups.
CASES = {
    "causal, other value heads": (((6, 2, 3), (21, 37), (72, 40)), None, {"is_causal": True}),
    "one array, a window, bias of a row": (
        ((3, 1, 1), (37, 21), (96, None)),
        (3, 1, 21),
        {"local_window_size": (7, 5)},
    ),
    "lengths, masked keys, sink": (
        ((4, 2, 2), (21, 37), (64, 72)),
        (2, 1, 1, 37),
        {
            "query_seq_lengths": np.array([19, 0]),
            "key_value_seq_lengths": np.array([30, 37]),
            "mask": np.random.default_rng(1).random((2, 1, 1, 37)) < 0.5,
            "sink": np.linspace(-1, 1, 4)[:, None, None],
        },
    ),
}


@pytest.mark.parametrize("case", deep(CASES, "one array, a window, bias of a row"))
def test_every_value_and_gradient_is_that_of_dense(case, small):
    """Rows that see nothing among them: the window leaves the last queries without a key."""
    sizes, bias, call = CASES[case]
    (out, _), _ = compare(qkv(*sizes), bias and make(bias)[0], **call)
    empty = {"one array, a window, bias of a row": 28, "lengths, masked keys, sink": 19}.get(case)
    if empty is not None:
        assert np.asarray(out[:, empty - 1]).any()
        assert not np.asarray(out[:, empty:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(64, 96), (96, 64), (256, 256), (320, 256), (512, 320)])
def test_widths(widths):
    """As an accelerator would cut them."""
    compare(qkv((2, 1, 1), (70, 90), widths), is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("width", [(1024, 1024), (1024, None), (576, 512)])
def test_heads_that_several_programs_share(width):
    compare(qkv((2, 1, 1), (70, 90), width), make((90,))[0], local_window_size=(40, 10))


def test_bfloat16_sums_in_float32(small):
    """As `dense` of the same numbers in float32."""
    arrays = qkv((2, 1, 1), (21, 19), (64, 64), dtype=jnp.bfloat16)

    @jax.jit
    def both(arrays):
        widened = [a.astype(jnp.float32) for a in arrays]
        return [
            values_and_gradients(n, a) for n, a in (("pallas_wide", arrays), ("dense", widened))
        ]

    (made, (got, _)), (expected_made, (expected, _)) = both(arrays)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 3
    assert_close(made[0].astype(jnp.bfloat16), expected_made[0])
    assert_close(made[1], expected_made[1])  # which is not rounded at the end
    assert_close(got, expected)
    # On a CPU XLA may leave out a rounding that the program asks for.
    products = equations(
        "dot_general", functools.partial(values_and_gradients, "pallas_wide"), arrays
    )
    assert {str(e.outvars[0].aval.dtype) for e in products} == {"float32"}


sizes = st.integers(1, 40)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    """Lengths, widths, heads, cuts and what hides, all drawn."""
    draw = data.draw
    t, s, k, group = draw(sizes), draw(sizes), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    h = draw(st.integers(64, 200))
    v = draw(st.one_of(st.none(), st.integers(1, 200)))
    rows = st.sampled_from([8, 16, 32])
    block, step, chunk = draw(rows), draw(rows), draw(st.sampled_from([32, 64]))
    cut = Tiling(1024, block, step, chunk, own=draw(st.integers(1, 3)), warps=4, stages=2)
    call = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        call["local_window_size"] = (draw(sizes), draw(sizes))
    if draw(st.booleans()):
        lengths = st.lists(st.integers(0, 40), min_size=2, max_size=2)
        call["key_value_seq_lengths"] = np.array(draw(lengths))
        call["query_seq_lengths"] = np.array(draw(lengths))
    bias = draw(st.sampled_from([None, (1, 1, 1, s), (2, k * group, 1, s), (2, 1, 1, 1)]))
    arrays = qkv((k * group, k, k), (t, s), (h, v), seed=draw(st.integers(0, 9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_wide_kernels, "TILINGS", {4: (cut,)})
        run = jax.jit(
            lambda *a: [values_and_gradients(n, *a, **call) for n in ("pallas_wide", "dense")]
        )
        got, expected = run(arrays, bias and make(bias)[0])
    # What is 0 in `dense` may be rounding here: one scale for outputs and one for gradients.
    for a, b in zip(got, expected, strict=True):
        flat = [jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(y)]) for y in (a, b)]
        assert_close(*flat, loosen=0.5)


def test_wide_heads_without_keys_of_their_own_are_read_once():
    """The order "absorbed": one array, one gradient, in a layer as in a call."""
    layout = Wide(width=64, num_heads=2)
    x = jnp.ones((1, 5, 64))
    w = {n: jax.ShapeDtypeStruct(a, "float32") for n, a in weight_shapes(layout).items()}

    def operands(order, padding_mask=None, **options):
        def run(w, x):
            inputs = HeadInputs(order=order, padding_mask=padding_mask)
            options_ = dict(implementation="pallas_wide", **options)
            return jnp.sum(attend_heads(w, x, layout, inputs, **options_).output)

        return [len(e.invars) for e in equations("pallas_call", jax.grad(run, (0, 1)), w, x)]

    # q, x, the row, who sees whom (2); going back four more: dO, top, share and delta.
    for call in ({}, {"is_causal": True}, {"padding_mask": jnp.ones((1, 5), bool)}):
        assert operands("absorbed", **call) == [5, 9, 9]
    assert operands("factored") == [6, 10, 10, 10]


@pytest.mark.parametrize(
    ("visible", "shape"),
    [
        (MaskSpec(21, 37), (3, 5)),
        (MaskSpec(21, 37, is_causal=True), (3, 5)),
        (MaskSpec(37, 21, window=(3, 2)), (5, 3)),
        (MaskSpec(37, 37, is_causal=True, window=(9, 0)), (5, 5)),
        (MaskSpec(21, 37, key_lengths=jnp.array([9, 0]), query_lengths=jnp.array([21, 4])), (3, 5)),
    ],
)
def test_a_block_meets_the_steps_that_it_sees_and_no_other(visible, shape):
    """T and S in blocks of 8 and steps of 4, by the whole matrix."""
    t, s = 8 * shape[0], 8 * shape[1]
    cut = Tiling(1024, block=8, step=4, chunk=32, own=2, warps=4, stages=2)
    place = place_of(visible, jnp.zeros((1, 1, s)), cut, t - visible.num_queries)
    allowed = np.ones((1, visible.num_queries, visible.num_keys), bool)
    if visible.ranges() is not None:
        allowed = np.asarray(visible.allowed())[:, 0]
    rows, keys = t - allowed.shape[1], s - allowed.shape[2]
    allowed = np.pad(allowed, ((0, 0), (0, rows), (0, keys)))
    for reach, matrix in ((place.of_queries, allowed), (place.of_keys, allowed.swapaxes(1, 2))):
        seen = matrix.reshape(len(matrix), -1, 8, matrix.shape[2] // 4, 4).any((2, 4))
        for b, i in np.ndindex(seen.shape[:2]):
            first, end = np.asarray(reach)[b, :, i]
            step = np.arange(seen.shape[2])
            np.testing.assert_array_equal(seen[b, i], (first <= step) & (step < end))


def test_no_array_of_all_scores_exists():
    """T = S = 4096, forward and backward: the largest array is q."""
    from test_blockwise import largest

    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    run = functools.partial(dot_product_attention, implementation="pallas_wide", is_causal=True)
    gradient = jax.grad(lambda *a: jnp.sum(run(*a)), (0, 1, 2))
    assert largest(jax.make_jaxpr(gradient)(x, x, x).jaxpr) == 4096 * 2 * 64


BOOLEANS = jnp.ones((1, 1, 5, 7), bool)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 63}, "it is for heads 64 to 1024 wide, not 63"),
        ({"width": 1025}, "it is for heads 64 to 1024 wide, not 1025"),
        ({"mask": BOOLEANS}, r"a mask that is the same for all queries, not \(1, 1, 5, 7\)"),
        ({"bias": jnp.ones((5, 1))}, r"a bias that is the same for all queries, not \(1, 1, 5, 1"),
        ({"logits_soft_cap": 2.0}, "it has no logits_soft_cap"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "it has no dropout_rate"),
        ({"talking_heads": (jnp.eye(2), None)}, "it has no talking_heads"),
        ({"score_mods": [SoftCap(2.0)]}, "it has no score_mods"),
        ({"scale": jnp.float32(0.3)}, "its scale must be a Python number"),
        ({"tap": Tap(patch={"probs": lambda a, layer: a})}, "it has no probs to patch"),
        ({"key": jnp.bfloat16}, "one dtype of float32, bfloat16 and float16, not float32, bfl"),
    ],
)
def test_what_it_refuses(changes, reason):
    changes, widths = dict(changes), (changes.get("width", 64),) * 2
    changes.pop("width", None)
    q, k, v = qkv((2, 1, 1), (5, 7), widths)
    k = k.astype(changes.pop("key", k.dtype))
    with pytest.raises(ValueError, match=reason):
        dot_product_attention(q, k, v, implementation="pallas_wide", **changes)


def test_it_is_for_a_gpu(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 6, 2, 512), jnp.bfloat16)
    assert explain(x, x, x)["pallas_wide"].startswith("it is written for a GPU, this is a cpu")
    with interpreted():
        assert explain(x, x, x)["pallas_wide"] == "could run"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert explain(x, x, x)["pallas_wide"].startswith("it is written for a GPU, this is a tpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (
        explain(x, x, x)["pallas_wide"] == "could run"
    )  # and is never chosen before it is measured


@pytest.mark.slow
def test_transforms(small):
    """vmap with lengths of its own, scan with remat, shard_map with a bias that devices share."""
    q, k, v, bias = make((2, 5, 2, 64), (2, 7, 1, 64), (2, 7, 1, 72), (2, 1, 7))
    lengths = jnp.array([3, 7])

    def total(name, q, k, v, bias, lengths):
        call = {"key_value_seq_lengths": lengths, "implementation": name}
        return jnp.sum(jnp.sin(dot_product_attention(q, k, v, bias, **call)))

    gradient = jax.grad(functools.partial(total, "pallas_wide"), (0, 1, 2, 3))
    expected = jax.jit(jax.grad(functools.partial(total, "dense"), (0, 1, 2, 3)))(
        q, k, v, bias, lengths
    )
    *mapped, mapped_bias = jax.jit(jax.vmap(gradient, (0, 0, 0, None, 0)))(q, k, v, bias, lengths)
    assert_close((*mapped, jnp.sum(mapped_bias, axis=0)), expected)

    def scanned(q, k, v, bias, lengths):
        body = jax.checkpoint(lambda c, x: (c + total("pallas_wide", *x[:3], bias, x[3]), None))
        xs = (q[:, None], k[:, None], v[:, None], lengths[:, None])
        return jax.lax.scan(body, 0.0, xs)[0]

    assert_close(jax.jit(jax.grad(scanned, (0, 1, 2, 3)))(q, k, v, bias, lengths), expected)
