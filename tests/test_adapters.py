"""Flax's attention modules with attnlab inside, their weights in a HeadSpec, and the docs of it."""

import functools
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, assert_close
from flax import nnx

import attnlab
from attnlab import HeadSpec, multi_head_attention
from attnlab.adapters import attention_fn, heads_from_linen, heads_from_nnx, heads_to_linen

# B=2 T=5 S=7, inputs of width 6 (queries), 10 (keys) and 9 (values), N=4 H=3, O=11


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def random_like(tree, seed=1):
    """The same tree with random leaves; zeros would hide biases."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [draw(*a.shape, seed=seed + i) for i, a in enumerate(leaves)]
    )


@functools.cache
def linen_params(module, *widths):
    shapes = jax.eval_shape(
        lambda key: module.init(key, *(jnp.ones((1, 3, w)) for w in widths)), jax.random.key(0)
    )
    return random_like(shapes["params"])


def value_and_grads(run, *arrays):
    """Output, and all gradients as one vector: that of a key bias is zero but for rounding."""

    def loss(*arrays):
        out = run(*arrays)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    numbers = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True))(*arrays)
    return out, jnp.concatenate([jnp.ravel(g) for g in jax.tree.leaves(grads)]).astype(out.dtype)


def padding_mask():
    """Ragged rows, none of them empty: there Flax's own attention is right."""
    mask = np.random.default_rng(2).random((2, 1, 5, 7)) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


CAUSAL = np.tri(5, dtype=bool)[None, None]


LINEN = nn.MultiHeadDotProductAttention
WIDE = functools.partial(LINEN, 4, qkv_features=12, out_features=11)
CALLS = {
    "self": (functools.partial(LINEN, 3), [(2, 5, 6)], {}),
    "causal": (WIDE, [(2, 5, 6)], {"mask": jnp.asarray(CAUSAL)}),
    "cross": (WIDE, [(2, 5, 6), (2, 7, 10), (2, 7, 9)], {"mask": padding_mask()}),
    "two batch axes": (WIDE, [(3, 2, 5, 6), (3, 2, 7, 10)], {"mask": padding_mask()[None]}),
    "no batch axis": (WIDE, [(5, 6)], {"mask": np.tri(5, dtype=bool)[None]}),
    "normalised": (functools.partial(WIDE, normalize_qk=True), [(2, 5, 6)], {}),
    "bfloat16": (functools.partial(WIDE, dtype=jnp.bfloat16), [(2, 5, 6)], {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_linen_takes_our_attention(call):
    """The same output and gradient, for weights and inputs, as with its own attention."""
    build, shapes, options = CALLS[call]
    inputs = [draw(*shape) for shape in shapes]
    theirs, ours = build(), build(attention_fn=attention_fn)
    params = linen_params(theirs, *(shape[-1] for shape in shapes))
    got, expected = (
        value_and_grads(lambda p, *x, m=m: m.apply({"params": p}, *x, **options), params, *inputs)
        for m in (ours, theirs)
    )
    out_dtype = jnp.bfloat16 if call == "bfloat16" else jnp.float32
    assert got[0].dtype == out_dtype
    assert_close(got, expected, loosen=5 if out_dtype == jnp.float32 else 2)


NNX = functools.partial(nnx.MultiHeadAttention, 4, 6, 12, 11, decode=False)
HAS = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
TAKES_CAUSAL = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters


def nnx_module(**options):
    module = NNX(rngs=nnx.Rngs(0), **options)
    nnx.update(module, random_like(nnx.state(module, nnx.Param)))
    return module


@pytest.mark.parametrize("call", ["mask", "cross", "grouped", "causal"])
def test_nnx_takes_our_attention(call):
    if (call == "grouped" and "num_kv_heads" not in HAS) or (call == "causal" and not TAKES_CAUSAL):
        pytest.skip(f"this Flax has no {call} attention in NNX")
    options = {"num_kv_heads": 2} if call == "grouped" else {}
    options |= {"in_kv_features": 10} if call == "cross" else {}
    inputs = [draw(2, 5, 6), draw(2, 7, 10)][: 1 + (call == "cross")]
    mask = padding_mask() if call == "cross" else jnp.asarray(CAUSAL)
    asked = {"is_causal": True} if call == "causal" else {"mask": jnp.asarray(mask)}
    results = []
    for fn in (attention_fn, nnx.dot_product_attention):
        graph, state = nnx.split(nnx_module(attention_fn=fn, **options))
        run = lambda s, *x, g=graph: nnx.merge(g, s)(*x, **asked)
        results.append(value_and_grads(run, state, *inputs))
    assert_close(*results, loosen=5)


@pytest.mark.parametrize("use_mask", [False, True])
def test_linen_decodes_with_it(use_mask):
    """Token by token, as the whole sequence under a causal mask; Flax's cache mask is float32."""
    x, mask = draw(2, 5, 6), jnp.asarray(CAUSAL)
    seen = padding_mask()[:, :, :1, :5] if use_mask else np.ones((2, 1, 1, 5), bool)
    model = WIDE(attention_fn=attention_fn, decode=True)
    params = linen_params(WIDE(), 6)
    expected = jax.jit(WIDE().apply)({"params": params}, x, mask=mask & seen)
    cache = model.init(jax.random.key(0), x)["cache"]

    def step(cache, token):
        out, new = model.apply(
            {"params": params, "cache": cache},
            token[:, None],
            mask=jnp.asarray(seen) if use_mask else None,
            mutable=["cache"],
        )
        return new["cache"], out[:, 0]

    _, out = jax.jit(lambda c, x: jax.lax.scan(step, c, x))(cache, x.swapaxes(0, 1))
    assert_close(out.swapaxes(0, 1), expected)


def test_nnx_decodes_with_it():
    x = draw(2, 5, 6)
    model = nnx_module(attention_fn=attention_fn)
    expected = model(x, mask=jnp.asarray(CAUSAL))
    model.init_cache(x.shape)
    tokens = [model(x[:, t : t + 1], decode=True) for t in range(5)]
    assert_close(jnp.concatenate(tokens, axis=1), expected)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_falls_on_probabilities(broadcast, implementation):
    """One value per key, all scores equal: the output shows how many of 64 keys were dropped."""
    q, k = jnp.zeros((3, 50, 4, 2)), jnp.zeros((3, 64, 2, 2))
    v = jnp.broadcast_to(jnp.eye(64)[None, :, None], (3, 64, 2, 64))
    run = functools.partial(attention_fn, implementation=implementation)
    run = functools.partial(run, dropout_rate=0.25, broadcast_dropout=broadcast)
    drop = jax.jit(lambda key: run(q, k, v, dropout_rng=key))
    probs = np.asarray(drop(jax.random.key(0)))  # [B, T, N, S]
    assert set(np.unique(np.round(probs * 64, 4))) == {0.0, np.float32(1.3333)}
    np.testing.assert_allclose(np.mean(probs == 0), 0.25, atol=0.02)
    same = [
        np.array_equal(probs[0, :, 0], probs[b, :, n]) for b in range(3) for n in range(4) if b + n
    ]
    assert all(same) if broadcast else not any(same)
    assert not np.array_equal(probs[0, 0, 0], probs[0, 1, 0])
    assert not np.array_equal(probs, drop(jax.random.key(1)))
    np.testing.assert_array_equal(probs, drop(jax.random.key(0)))
    still = jax.jit(lambda: run(q, k, v, deterministic=True))()
    np.testing.assert_array_equal(still, np.full_like(still, 1 / 64))


@pytest.mark.parametrize("broadcast", [True, False])
def test_modules_drop_and_keep_what_they_should(broadcast):
    """Linen leaves out every keyword that a plug does not name, dropout among them: not here."""
    x, mask = draw(2, 5, 6), jnp.asarray(CAUSAL)
    model = WIDE(attention_fn=attention_fn, dropout_rate=0.5, broadcast_dropout=broadcast)
    params = {"params": linen_params(WIDE(), 6)}

    @jax.jit
    def run(key):
        loud = model.apply(params, x, mask=mask, deterministic=False, rngs={"dropout": key})
        return loud, model.apply(params, x, mask=mask, deterministic=True)

    loud, still = run(jax.random.key(0))
    assert_close(still, jax.jit(WIDE().apply)(params, x, mask=mask))
    assert np.abs(loud - still).max() > 0.1
    many = jax.jit(lambda keys: jax.lax.map(lambda k: run(k)[0], keys))
    mean = np.mean(many(jax.random.split(jax.random.key(1), 4000)), axis=0)
    np.testing.assert_allclose(mean, still, atol=0.15 * np.abs(still).max())
    assert np.mean(np.abs(mean - still)) < 0.05 * np.mean(np.abs(loud - still))

    module = nnx_module(attention_fn=attention_fn, dropout_rate=0.5, broadcast_dropout=broadcast)
    calls = [np.asarray(module(x, deterministic=flag)) for flag in (False, False, True, True)]
    assert not np.array_equal(calls[0], calls[1])
    np.testing.assert_array_equal(calls[2], calls[3])


def test_broadcast_dropout_keeps_masks_biases_and_groups():
    """A dropout too small to hit anything leaves the call as it was."""
    q, k, v = draw(2, 5, 4, 3), draw(2, 7, 2, 3), draw(2, 7, 1, 8)
    bias, mask = draw(1, 4, 5, 7), padding_mask()
    run = functools.partial(attention_fn, bias=bias, mask=mask, scale=0.3, logits_soft_cap=2.0)
    drops = functools.partial(run, dropout_rate=1e-9, dropout_rng=jax.random.key(0))
    assert_close(jax.jit(drops)(q, k, v), jax.jit(run)(q, k, v))


def test_sown_probabilities_change_no_bit(optimized):
    x, mask = draw(2, 5, 6), jnp.asarray(CAUSAL)
    model, params = WIDE(attention_fn=attention_fn), {"params": linen_params(WIDE(), 6)}
    sees = lambda x: model.apply(params, x, mask=mask, sow_weights=True, mutable=["intermediates"])
    out, seen = jax.jit(sees)(x)
    plain = jax.jit(lambda x: model.apply(params, x, mask=mask))(x)
    np.testing.assert_array_equal(out, plain)
    (probs,) = seen["intermediates"]["attention_weights"]
    theirs = WIDE().apply(params, x, mask=mask, sow_weights=True, mutable=["intermediates"])
    assert_close(probs, theirs[1]["intermediates"]["attention_weights"][0])


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_options_reach_the_function(implementation):
    q, k, v = draw(2, 5, 4, 3), draw(2, 7, 2, 3), draw(2, 7, 1, 8)
    options = {"scale": 0.3, "logits_soft_cap": 2.0, "implementation": implementation}
    expected = jax.jit(functools.partial(attnlab.dot_product_attention, **options))(q, k, v)
    assert_close(jax.jit(functools.partial(attention_fn, **options))(q, k, v), expected)
    small = functools.partial(attention_fn, dtype=jnp.bfloat16, **options)
    assert jax.eval_shape(small, q, k, v).dtype == jnp.bfloat16
    assert_close(jax.jit(small)(q, k, v), expected)
    assert jax.eval_shape(attention_fn, q, k, v.astype(jnp.bfloat16)).dtype == jnp.float32


def nnx_sown(module, x):
    """What the module sows, which older versions of Flax leave in it."""
    if hasattr(nnx, "capture"):
        return nnx.capture(module, nnx.Intermediate)(x, sow_weights=True)[1]
    module(x, sow_weights=True)
    return nnx.pop(module, nnx.Intermediate)


def test_nnx_sows_probabilities():
    sown = []
    for fn in (attention_fn, nnx.dot_product_attention):
        sown.append(jax.tree.leaves(nnx_sown(nnx_module(attention_fn=fn), draw(2, 5, 6)))[0])
    assert_close(*sown)


@pytest.mark.parametrize("implementation", ["dense", "xla", "blockwise"])
@pytest.mark.parametrize("precision", ["highest", "high", ("float32", "float32"), None])
def test_precision_reaches_every_product_of(implementation, precision):
    """Those of the gradient too."""
    if implementation not in attnlab.BACKENDS:
        pytest.skip(f"no backend {implementation!r}")
    a = draw(2, 5, 4, 4)
    run = lambda q, k, v: jnp.sum(
        attention_fn(q, k, v, precision=precision, implementation=implementation)
    )
    text = str(jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(a, a, a))
    products = len(re.findall(r"dot_general\[", text))
    assert products >= 6
    if precision is None:
        assert "precision=" not in text
    else:
        name = "HIGH" if precision == "high" else "HIGHEST"
        asked = rf"precision={name}\b|precision=\(Precision\.{name}, Precision\.{name}\)"
        assert len(re.findall(asked, text)) == products


def test_precision_changes_no_result():
    """On a CPU all precisions are one; with a mask, a bias, dropout and probabilities too."""
    q, k, v, bias = draw(2, 5, 4, 3), draw(2, 7, 2, 3), draw(2, 7, 2, 8), draw(1, 4, 5, 7)
    key, results = jax.random.key(0), []
    for precision in (None, "highest", jax.lax.DotAlgorithmPreset.F32_F32_F32):
        run = functools.partial(attention_fn, mask=padding_mask(), precision=precision)
        drops = functools.partial(run, dropout_rate=0.3, dropout_rng=key)
        both = lambda *a, run=run, drops=drops: run(*a) + drops(*a)
        results.append(value_and_grads(both, q, k, v, bias))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"qk_attn_weights_einsum": jnp.einsum}, ValueError, "without einsum classes"),
        ({"attn_weights_value_einsum": jnp.einsum}, ValueError, "without einsum classes"),
        ({"input_positions": np.arange(5)}, ValueError, "multi_head_attention.rotary"),
        ({"precision": ("highest", "default")}, ValueError, "one precision for all products"),
        ({"dropout_rate": 0.1}, ValueError, "needs a dropout_rng or deterministic=True"),
        ({"mask": jnp.ones((5, 5), jnp.int32)}, TypeError, "must be boolean"),
        ({"mask": nn.make_causal_mask(jnp.ones(5))}, TypeError, r"make_causal_mask\(x, dtype=bool"),
        ({"implementation": "flash"}, ValueError, "known: dense"),
    ],
)
def test_refused(options, error, message):
    a = draw(2, 5, 4, 3)
    with pytest.raises(error, match=message):
        attention_fn(a, a, a, **options)


def test_other_batches_are_refused():
    """Asked without jaxtyping, which says so first in the tests."""
    a, plain = draw(2, 3, 5, 4, 3), getattr(attention_fn, "__wrapped__", attention_fn)
    with pytest.raises(ValueError, match=r"batch axes \(2, 3\), \[\(3, 2\), \(3, 2\)\]"):
        plain(a, a.reshape(3, 2, 5, 4, 3), a.reshape(3, 2, 5, 4, 3))


def test_modules_pass_refused_masks_on():
    x, additive = draw(2, 5, 6), np.where(np.tri(5, dtype=bool), 0, -1e9)[None, None]
    for mask in (nn.make_causal_mask(x[..., 0]), jnp.asarray(additive, jnp.float32)):
        with pytest.raises(TypeError, match="numbers that are added to the scores are a bias"):
            WIDE(attention_fn=attention_fn).apply({"params": linen_params(WIDE(), 6)}, x, mask=mask)
        with pytest.raises(TypeError, match="must be boolean"):
            nnx_module(attention_fn=attention_fn)(x, mask=mask)


def test_one_query_takes_zeros_and_ones_alone():
    """What Flax's decode hands over; a mask to be added is refused, and under jit gives NaN."""
    q, k, v = draw(2, 1, 4, 3), draw(2, 7, 4, 3), draw(2, 7, 4, 8)
    mask = padding_mask()[:, :, :1]
    expected = attention_fn(q, k, v, mask=mask)
    assert_close(attention_fn(q, k, v, mask=jnp.asarray(mask, jnp.float32)), expected)
    additive = jnp.where(mask, 0, -1e9)
    with pytest.raises(TypeError, match="are a bias"):
        attention_fn(q, k, v, mask=additive)
    assert np.isnan(jax.jit(lambda m: attention_fn(q, k, v, mask=m))(additive)).all()


SIZES = {
    "plain": ((LINEN, (3,), {}), (6,)),
    "no bias, wide, cross": (
        (LINEN, (4,), {"qkv_features": 12, "out_features": 11, "use_bias": False}),
        (6, 10, 9),
    ),
    "normalised": ((LINEN, (3,), {"qkv_features": 12, "normalize_qk": True}), (6, 10)),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_heads_from_linen_and_back(sizes):
    (build, args, options), widths = SIZES[sizes]
    module = build(*args, **options)
    params = linen_params(module, *widths)
    inputs = [draw(2, 5 if i == 0 else 7, w) for i, w in enumerate(widths)]
    w, spec = heads_from_linen(params)
    assert spec.layout == "standard"
    assert sum(a.size for a in w.values()) == sum(a.size for a in jax.tree.leaves(params))

    def ours(params, x, *context):
        w, spec = heads_from_linen(params)
        more = dict(zip(("context", "value_context"), context, strict=False))
        return multi_head_attention(w, x, spec=spec, **more)

    got = value_and_grads(ours, params, *inputs)
    expected = value_and_grads(lambda p, *x: module.apply({"params": p}, *x), params, *inputs)
    assert_close(got, expected, loosen=5)
    back = heads_to_linen(w, spec)
    jax.tree.map(np.testing.assert_array_equal, back, dict(params))


def test_heads_from_nnx_and_back():
    grouped = {"num_kv_heads": 2} if "num_kv_heads" in HAS else {}
    for options in ({"normalize_qk": True, "dropout_rate": 0.1}, {"use_bias": False, **grouped}):
        module = nnx_module(in_kv_features=10, **options)
        w, spec = heads_from_nnx(nnx.state(module))
        assert (spec.num_heads, spec.head_dim, spec.key_width, spec.out_width) == (4, 3, 10, 11)
        assert spec.num_kv_heads == options.get("num_kv_heads")
        x, y = draw(2, 5, 6), draw(2, 7, 10)
        expected = module(x, y, deterministic=True)
        run = jax.jit(lambda w, x, y, spec=spec: multi_head_attention(w, x, y, spec=spec))
        assert_close(run(w, x, y), expected)
        fresh = NNX(in_kv_features=10, **options, rngs=nnx.Rngs(1))
        nnx.update(fresh, heads_to_linen(w, spec))
        np.testing.assert_array_equal(fresh(x, y, deterministic=True), expected)
    module.init_cache((2, 5, 6))
    assert heads_from_nnx(nnx.state(module))[1] == spec


def test_our_weights_in_flax():
    """Wide heads with one bias: Flax has all four, so the others are zeros."""
    spec = HeadSpec("wide", width=6, num_heads=3, biases="q")
    w = random_like(jax.eval_shape(lambda k: attnlab.init_heads(k, spec), jax.random.key(0)))
    x, module = draw(2, 5, 6), LINEN(3, qkv_features=18)
    got = jax.jit(module.apply)({"params": heads_to_linen(w, spec)}, x)
    assert_close(got, jax.jit(lambda w, x: multi_head_attention(w, x, spec=spec))(w, x))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "found nothing; expected key/kernel, out/kernel, query/kernel, value/kernel"),
        ({"params": {"query": {"kernel": jnp.ones(3)}}}, "found params/query; expected key/kernel"),
        ({"q": jnp.ones(3)}, "found q; expected"),
        ({"kernel": {"shape": jnp.ones(3), "none": None}}, "found kernel/shape; expected"),
    ],
)
def test_other_trees_are_refused(tree, message):
    for read in (heads_from_linen, heads_from_nnx):
        with pytest.raises(ValueError, match=message):
            read(tree)


def test_other_shapes_are_refused():
    params = linen_params(LINEN(3), 6)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), params)
    with pytest.raises(ValueError, match="takes one of a stack"):
        heads_from_linen(stacked)
    with pytest.raises(ValueError, match="do not fit together"):
        heads_from_linen(params | {"value": {"kernel": jnp.ones((6, 3, 5))}})
    with pytest.raises(ValueError, match=r"expected nnx.state\(module\), not MultiHeadAttention"):
        getattr(heads_from_nnx, "__wrapped__", heads_from_nnx)(nnx_module())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "narrow"}, "no layout 'narrow'"),
        ({"value_dim": 5}, "no value_dim 5 beside head_dim 2"),
        ({"scale": 1.0}, "no scale 1.0"),
        ({"output": False}, "no output=False"),
        ({"qk_norm": "rms"}, "no qk_norm 'rms'"),
    ],
)
def test_what_flax_cannot_be(changes, message):
    spec = HeadSpec(**{"layout": "standard", "width": 6, "num_heads": 3} | changes)
    with pytest.raises(ValueError, match=message):
        heads_to_linen(attnlab.init_heads(jax.random.key(0), spec), spec)


def test_our_linen_module_in_nnx():
    """`nnx.bridge.ToNNX`: the same output and gradient, and dropout from its random streams."""
    spec = HeadSpec("narrow", width=6, num_heads=3, biases="qo")
    linen, x = attnlab.MultiHeadAttention(spec, dropout_rate=0.5), draw(2, 5, 6)
    module = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(params=0, dropout=1))
    nnx.bridge.lazy_init(module, x)
    nnx.update(module, random_like(nnx.state(module, nnx.Param)))
    pure = jax.tree.map(jnp.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    run = lambda module, x: jnp.sum(jnp.sin(module(x)))
    got = nnx.jit(nnx.value_and_grad(run, argnums=(0, 1)))(module, x)
    run = lambda params, x: jnp.sum(jnp.sin(linen.apply({"params": params}, x)))
    expected = jax.jit(jax.value_and_grad(run, (0, 1)))(pure, x)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(expected))
    loud = [np.asarray(module(x, deterministic=False)) for _ in range(2)]
    assert not np.array_equal(*loud)
    np.testing.assert_array_equal(module(x), module(x))


PAGE = (ROOT / "docs" / "coming_from.md").read_text()


def test_the_page_for_newcomers_runs():
    """Its blocks, one after the other, as a reader would paste them."""
    blocks, names = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), {}
    assert len(blocks) == 7
    for block in blocks:
        exec(block, names)


def test_the_page_for_newcomers_names_fields_that_exist():
    table = PAGE.split("## Names")[1].split("## Calls")[0]
    named = set(re.findall(r"`(\w+)", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))))
    assert len(named) > 10
    assert named - {"HeadSpec"} <= set(HeadSpec.__dataclass_fields__)
