"""Flax's attention modules with attnlab inside, their weights as weights of a layout, and the page
for who comes from Flax."""

import dataclasses
import functools
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, assert_close, value_and_gradient
from flax import nnx

import attnlab
from attnlab import heads, multi_head_attention
from attnlab.adapters import attention_fn, heads_from_linen, heads_from_nnx, heads_to_linen

# B=2 T=5 S=7, inputs of width 6 (queries), 10 (keys) and 9 (values), N=4 H=3, O=11


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def random_like(tree, seed=1):
    """The same tree with random leaves; zeros would hide biases."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [draw(*a.shape, seed=seed + i) for i, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, arrays)


@functools.cache
def linen_params(module, *widths):
    init = functools.partial(module.init, deterministic=True)
    inputs = [jnp.ones((1, 3, width)) for width in widths]
    return random_like(jax.eval_shape(init, jax.random.key(0), *inputs)["params"])


def padding_mask():
    """Ragged rows, none of them empty: there Flax's own attention is right."""
    mask = np.random.default_rng(2).random((2, 1, 5, 7)) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


CAUSAL = np.tri(5, dtype=bool)[None, None]


LINEN = nn.MultiHeadDotProductAttention
WIDE = functools.partial(LINEN, 4, qkv_features=12, out_features=11)


NNX = functools.partial(nnx.MultiHeadAttention, 4, 6, 12, 11, decode=False)
HAS = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
TAKES_CAUSAL = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters


def nnx_module(**options):
    module = NNX(rngs=nnx.Rngs(0), **options)
    nnx.update(module, random_like(nnx.state(module, nnx.Param)))
    return module


THEIRS = {"linen": nn.dot_product_attention, "nnx": nnx.dot_product_attention}


def build(kind, fn, *widths, **options):
    """(params, run) of Flax's module with this attention_fn: run(params, *inputs, **call)."""
    if kind == "linen":
        module = WIDE(attention_fn=fn, **options)
        params = linen_params(module, *widths)
        return params, lambda p, *x, **call: module.apply({"params": p}, *x, **call)
    graph, state = nnx.split(nnx_module(attention_fn=fn, **options))
    return state, lambda s, *x, **call: nnx.merge(graph, s)(*x, **call)


MASK = {"mask": jnp.asarray(CAUSAL)}
CALLS = {
    # kind of module, its options, shapes of the inputs, options of the call
    "self": ("linen", {}, [(2, 5, 6)], {}),
    "causal": ("linen", {}, [(2, 5, 6)], MASK),
    "cross": ("linen", {}, [(2, 5, 6), (2, 7, 10), (2, 7, 9)], {"mask": padding_mask()}),
    "two batch axes": ("linen", {}, [(3, 2, 5, 6), (3, 2, 7, 10)], {"mask": padding_mask()[None]}),
    "no batch axis": ("linen", {}, [(5, 6)], {"mask": np.tri(5, dtype=bool)[None]}),
    "normalised": ("linen", {"normalize_qk": True}, [(2, 5, 6)], {}),
    "bfloat16": ("linen", {"dtype": jnp.bfloat16}, [(2, 5, 6)], {}),
    "nnx mask": ("nnx", {}, [(2, 5, 6)], MASK),
    "nnx cross": ("nnx", {"in_kv_features": 10}, [(2, 5, 6), (2, 7, 10)], {"mask": padding_mask()}),
    "nnx grouped": ("nnx", {"num_kv_heads": 2}, [(2, 5, 6)], MASK),
    "nnx is_causal": ("nnx", {}, [(2, 5, 6)], {"is_causal": True}),
}


@pytest.mark.parametrize("case", CALLS)
def test_modules_take_our_attention(case):
    """The same output and gradient, for weights and inputs, as with their own attention."""
    kind, options, shapes, call = CALLS[case]
    if ("num_kv_heads" in options and "num_kv_heads" not in HAS) or (
        "is_causal" in call and not TAKES_CAUSAL
    ):
        pytest.skip("not in this Flax")
    inputs, results = [draw(*shape) for shape in shapes], []
    for fn in (attention_fn, THEIRS[kind]):
        params, run = build(kind, fn, *(shape[-1] for shape in shapes), **options)
        results.append(value_and_gradient(functools.partial(run, **call), params, *inputs))
    dtype = options.get("dtype", jnp.float32)
    assert results[0][0].dtype == dtype
    assert_close(*results, loosen=5 if dtype == jnp.float32 else 2)


@pytest.mark.parametrize("use_mask", [False, True])
def test_linen_decodes_with_it(use_mask):
    """Token by token, as the whole sequence under a causal mask; Flax's cache mask is float32."""
    x, mask = draw(2, 5, 6), jnp.asarray(CAUSAL)
    seen = padding_mask()[:, :, :1, :5] if use_mask else np.ones((2, 1, 1, 5), bool)
    model = WIDE(attention_fn=attention_fn, decode=True)
    params = linen_params(WIDE(), 6)
    expected = jax.jit(WIDE().apply)({"params": params}, x, mask=mask & seen)
    cache = model.init(jax.random.key(0), x)["cache"]

    given = jnp.asarray(seen) if use_mask else None

    def step(cache, token):
        variables = {"params": params, "cache": cache}
        out, new = model.apply(variables, token[:, None], mask=given, mutable=["cache"])
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
    model.init_cache(x.shape)
    if TAKES_CAUSAL:
        with pytest.raises(ValueError, match="is_causal"):  # it would hide all keys but the first
            model(x[:, :1], decode=True, is_causal=True)


@pytest.mark.parametrize("broadcast", [True, False])
def test_every_row_and_head_has_a_dropout_of_its_own(broadcast):
    """That of `dot_product_attention`."""
    q, k, v, key = draw(2, 5, 4, 2), draw(2, 64, 2, 2), draw(2, 64, 2, 7), jax.random.key(0)
    run = functools.partial(attention_fn, dropout_rate=0.25, broadcast_dropout=broadcast)
    same = attnlab.dot_product_attention(q, k, v, dropout_rate=0.25, dropout_key=key)
    np.testing.assert_array_equal(run(q, k, v, dropout_rng=key), same)
    still = run(q, k, v, deterministic=True)
    np.testing.assert_array_equal(still, attnlab.dot_product_attention(q, k, v))


@pytest.mark.parametrize("kind", THEIRS)
def test_modules_drop_and_keep_what_they_should(kind):
    """Linen leaves out every keyword that a plug does not name, dropout among them: not here."""
    x = draw(2, 5, 6)
    params, run = build(kind, attention_fn, 6, dropout_rate=0.5)
    noise = {"rngs": {"dropout": jax.random.key(0)}} if kind == "linen" else {}
    loud = run(params, x, **MASK, deterministic=False, **noise)
    still = run(params, x, **MASK, deterministic=True)
    params, run = build(kind, THEIRS[kind], 6)
    assert_close(still, run(params, x, **MASK))
    assert np.abs(loud - still).max() > 0.1


def nnx_sown(module, x):
    """What the module sows, which older versions of Flax leave in it."""
    if hasattr(nnx, "capture"):
        return nnx.capture(module, nnx.Intermediate)(x, sow_weights=True)[1]
    module(x, sow_weights=True)
    return nnx.pop(module, nnx.Intermediate)


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
    modules = [nnx_module(attention_fn=fn) for fn in (attention_fn, nnx.dot_product_attention)]
    assert_close(*(jax.tree.leaves(nnx_sown(module, x))[0] for module in modules))


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


PRECISIONS = {"highest": "HIGHEST", ("float32", "float32"): "HIGHEST", "high": "HIGH", None: None}
PRECISIONS["BF16_BF16_F32"] = "BF16_BF16_F32"  # an algorithm


@pytest.mark.parametrize("implementation", ["dense", "xla", "blockwise"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_reaches_every_product_of(implementation, precision):
    """Those of the gradient too."""
    if implementation not in attnlab.BACKENDS:
        pytest.skip(f"no backend {implementation!r}")
    a, name = draw(2, 5, 4, 4), PRECISIONS[precision]
    options = dict(precision=precision, implementation=implementation)
    run = lambda q, k, v: jnp.sum(attention_fn(q, k, v, **options))
    text = str(jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(a, a, a))
    products = len(re.findall(r"dot_general\[", text))
    assert products >= 6
    asked = rf"precision={name}\b|precision=\(Precision\.{name}, Precision\.{name}\)"
    assert len(re.findall(asked, text)) == (products if name else 0)
    assert name or "precision=" not in text


A = draw(2, 5, 4, 3)
ADDITIVE = jnp.where(np.tri(5, dtype=bool), 0, -1e9)
REFUSED = [
    ({"qk_attn_weights_einsum": jnp.einsum}, ValueError, "without einsum classes"),
    ({"attn_weights_value_einsum": jnp.einsum}, ValueError, "without einsum classes"),
    ({"input_positions": np.arange(5)}, ValueError, "multi_head_attention.rotary"),
    ({"precision": ("highest", "default")}, ValueError, "one precision for all products"),
    ({"dropout_rate": 0.1}, ValueError, "needs a dropout_rng or deterministic=True"),
    ({"mask": jnp.ones((5, 5), jnp.int32)}, TypeError, "must be boolean"),
    ({"mask": nn.make_causal_mask(jnp.ones(5))}, TypeError, r"make_causal_mask\(x, dtype=bool"),
    ({"mask": ADDITIVE}, TypeError, "numbers that are added to the scores are a bias"),
    ({"implementation": "flash"}, ValueError, "known: dense"),
    ({"query": A[None]}, ValueError, r"batch axes \(1, 2\), \[\(2,\), \(2,\)\]"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_refused(options, error, message):
    """Asked without jaxtyping, which says some of it first in the tests."""
    plain = getattr(attention_fn, "__wrapped__", attention_fn)
    with pytest.raises(error, match=message):
        plain(**{"query": A, "key": A, "value": A} | options)


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
    "plain": (LINEN(3), (6,)),
    "no bias, wide, cross": (WIDE(use_bias=False), (6, 10, 9)),
    "normalised": (LINEN(3, qkv_features=12, normalize_qk=True), (6, 10)),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_heads_from_linen_and_back(sizes):
    module, widths = SIZES[sizes]
    params = linen_params(module, *widths)
    inputs = [draw(2, 5 if i == 0 else 7, w) for i, w in enumerate(widths)]
    w, layout = heads_from_linen(params)
    assert type(layout) is heads.Standard
    assert sum(a.size for a in w.values()) == sum(a.size for a in jax.tree.leaves(params))

    def ours(params, x, *context):
        w, layout = heads_from_linen(params)
        context = context[0] if len(context) == 1 else context or None
        return multi_head_attention(w, x, layout, context)

    theirs = lambda params, *inputs: module.apply({"params": params}, *inputs)
    got, expected = (value_and_gradient(run, params, *inputs) for run in (ours, theirs))
    assert_close(got, expected, loosen=5)
    back = heads_to_linen(w, layout)
    jax.tree.map(np.testing.assert_array_equal, back, dict(params))


def test_heads_from_nnx_and_back():
    grouped = {"num_kv_heads": 2} if "num_kv_heads" in HAS else {}
    for options in ({"normalize_qk": True, "dropout_rate": 0.1}, {"use_bias": False, **grouped}):
        module = nnx_module(in_kv_features=10, **options)
        w, layout = heads_from_nnx(nnx.state(module))
        sizes = (layout.num_heads, layout.head_dim, layout.key_width, layout.out_width)
        assert sizes == (4, 3, 10, 11)
        assert layout.num_kv_heads == options.get("num_kv_heads")
        x, y = draw(2, 5, 6), draw(2, 7, 10)
        expected = module(x, y, deterministic=True)
        run = jax.jit(lambda w, x, y, layout=layout: multi_head_attention(w, x, layout, y))
        assert_close(run(w, x, y), expected)
        fresh = NNX(in_kv_features=10, **options, rngs=nnx.Rngs(1))
        nnx.update(fresh, heads_to_linen(w, layout))
        np.testing.assert_array_equal(fresh(x, y, deterministic=True), expected)
    module.init_cache((2, 5, 6))
    assert heads_from_nnx(nnx.state(module))[1] == layout


def test_our_weights_in_flax():
    """Wide heads with one bias: Flax has all four, so the others are zeros."""
    layout = heads.Wide(width=6, num_heads=3, biases=("q",))
    w = random_like(jax.eval_shape(lambda k: heads.init(k, layout), jax.random.key(0)))
    x, module = draw(2, 5, 6), LINEN(3, qkv_features=18)
    got = jax.jit(module.apply)({"params": heads_to_linen(w, layout)}, x)
    assert_close(got, jax.jit(lambda w, x: multi_head_attention(w, x, layout))(w, x))
    del w["k"]
    with pytest.raises(ValueError, match="'k' is missing"):
        heads_to_linen(w, layout)


PARAMS, ONE = linen_params(LINEN(3), 6), jnp.ones(3)
TREES = [
    ({}, "found nothing; expected key.kernel, out.kernel, query.kernel, value.kernel"),
    ({"params": {"query": {"kernel": ONE}}}, "found params.query.kernel; expected key.kernel"),
    ({"q": ONE}, "found q; expected"),
    ({"kernel": {"shape": ONE, "none": None}}, "found kernel.shape; expected"),
    ([PARAMS], "not the parameters of one attention module of Flax: a l|expected nnx.state"),
    (jax.tree.map(lambda a: jnp.stack([a, a]), PARAMS), "takes one of a stack"),
    (PARAMS | {"value": {"kernel": jnp.ones((6, 3, 5))}}, "do not fit together"),
    (nnx_module(), "not the parameters of one .*Flax: a M|expected nnx.state.*not MultiHeadAttent"),
]


@pytest.mark.parametrize(("tree", "message"), TREES)
def test_other_trees_are_refused(tree, message):
    for read in (heads_from_linen, heads_from_nnx):
        with pytest.raises(ValueError, match=message):
            getattr(read, "__wrapped__", read)(tree)


STANDARD = functools.partial(heads.Standard, num_heads=3)
NOT_FLAX = [
    (heads.Narrow(num_heads=3), "no layout 'narrow'"),
    (STANDARD(value_dim=5), "no value_dim 5 beside head_dim 2"),
    (STANDARD(scale=1.0), "no scale 1.0"),
    (STANDARD(output_projection=False), "no output_projection=False"),
    (STANDARD(qk_norm=heads.HeadNorm("rms")), "no qk_norm HeadNorm"),
    (STANDARD(qk_norm=heads.HeadNorm("layer", bias=True)), "no qk_norm"),
    (STANDARD(qk_norm=heads.HeadNorm("layer"), norm_eps=0.5), "norm_eps 0.5"),
    (STANDARD(tie="kv"), "no tie='kv'"),
    (STANDARD(extras=(heads.Sink(),)), "no extra 'sink'"),
]


@pytest.mark.parametrize(("layout", "message"), NOT_FLAX)
def test_what_flax_cannot_be(layout, message):
    layout = layout.with_width(6)
    with pytest.raises(ValueError, match=message):
        heads_to_linen(heads.init(jax.random.key(0), layout), layout)


def test_our_linen_module_in_nnx():
    """`nnx.bridge.ToNNX`: the same output, and dropout from its random streams."""
    layout = heads.Narrow(width=6, num_heads=3, biases=("q", "o"))
    linen, x = attnlab.MultiHeadAttention(layout, dropout_rate=0.5), draw(2, 5, 6)
    module = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(params=0, dropout=1))
    nnx.bridge.lazy_init(module, x)
    nnx.update(module, random_like(nnx.state(module, nnx.Param)))
    pure = jax.tree.map(jnp.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    assert_close(module(x), linen.apply({"params": pure}, x))
    loud = [np.asarray(module(x, deterministic=False)) for _ in range(2)]
    assert not np.array_equal(*loud)


PAGE = (ROOT / "docs" / "howto" / "coming_from.md").read_text()


@pytest.mark.slow
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
    assert named - {"Standard"} <= {field.name for field in dataclasses.fields(heads.Standard)}
