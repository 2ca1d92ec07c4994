"""Flax's attention modules with attnlab inside."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from flax_modules import (
    CAUSAL,
    HAS,
    TAKES_CAUSAL,
    WIDE,
    draw,
    linen_params,
    nnx_module,
    padding_mask,
    value_and_grads,
)

import attnlab
from attnlab.adapters import attention_fn

THEIRS = {"linen": nn.dot_product_attention, "nnx": nnx.dot_product_attention}
both = pytest.mark.parametrize("kind", THEIRS)


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
        results.append(value_and_grads(functools.partial(run, **call), params, *inputs))
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
    model.init_cache(x.shape)
    if TAKES_CAUSAL:
        with pytest.raises(ValueError, match="is_causal"):  # it would hide all keys but the first
            model(x[:, :1], decode=True, is_causal=True)


@pytest.mark.parametrize("broadcast", [True, False])
def test_every_row_and_head_has_a_dropout_of_its_own(broadcast):
    """That of `dot_product_attention`; the identity as values shows the probabilities."""
    q, k = draw(2, 5, 4, 2), draw(2, 64, 2, 2)
    v, key = jnp.broadcast_to(jnp.eye(64)[None, :, None], (2, 64, 2, 64)), jax.random.key(0)
    run = functools.partial(attention_fn, dropout_rate=0.25, broadcast_dropout=broadcast)
    probs = run(q, k, v, dropout_rng=key)
    same = attnlab.dot_product_attention(q, k, v, dropout_rate=0.25, dropout_key=key)
    np.testing.assert_array_equal(probs, same)
    assert len(np.unique(probs.swapaxes(1, 2).reshape(40, 64) > 0, axis=0)) == 40
    still = run(q, k, v, deterministic=True)
    np.testing.assert_array_equal(still, attnlab.dot_product_attention(q, k, v))


@both
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
