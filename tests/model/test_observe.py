"""Show and edit: every value by hand in NumPy, and edits under every transform, plan and stack."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import (
    HeadSpec,
    ModelConfig,
    init_cache,
    init_heads,
    init_stacked,
    multi_head_attention,
    run_layers,
    transformer_block,
)
from attnlab.model.block import BlockSpec, init_block
from attnlab.observe import NAMES, OF_CROSS, OF_ENCODER, OF_HEADS, OF_LAYER, check_names
from attnlab.sharing.plan import Plan

CONFIG = ModelConfig(
    kind="encoder_decoder", vocab_size=11, max_len=8, width=12, num_layers=3, encoder_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=5, value_dim=3, ffn_width=10, plan="cycle:2",
    activation="relu",
)  # fmt: skip
SOURCE = jnp.asarray([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0, 9], [10, 3, 5, 6, 1, 8, 8]])
TEXTS = {"decoder": (TOKENS,), "encoder": (TOKENS,), "encoder_decoder": (SOURCE, TOKENS)}
DECODER = dataclasses.replace(CONFIG, kind="decoder", encoder_layers=None)


@functools.cache
def draw_params(config, dtype="float32"):
    """Large random numbers in every weight."""
    init = lambda key: config.build().init(key, *TEXTS[config.kind])["params"]
    shapes, rng = jax.eval_shape(init, jax.random.key(0)), np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.normal(size=a.shape).astype(dtype) * 0.5, shapes)


def make(config, dtype="float32"):
    """(run, params) with run(params, **options) on the texts of its kind."""
    model, texts = config.build(), TEXTS[config.kind]
    given = lambda params: {"params": jax.tree.map(jnp.asarray, params)}
    run = lambda params, **options: model.apply(given(params), *texts, **options)
    return run, draw_params(config, dtype)


def norm(w, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w["scale"] + w["bias"]


def heads_by_hand(w, x, y, allowed):
    """Every value of multi-head attention from x to y."""
    q = np.einsum("btd,dnh->btnh", x, w["q"]) + w["q_bias"]
    k = np.einsum("bsd,dkh->bskh", y, w["k"]) + w["k_bias"]
    v = np.einsum("bsd,dkv->bskv", y, w["v"]) + w["v_bias"]
    seen = {"q": q, "k": k, "v": v}
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    seen["scores"] = scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    seen["probs"] = weights / weights.sum(-1, keepdims=True)
    seen["heads"] = np.einsum("bnts,bsnv->btnv", seen["probs"], v)
    seen["outputs"] = np.einsum("btnv,nvo->bnto", seen["heads"], w["o"])
    return seen | {"attention_in": x, "attention_out": seen["outputs"].sum(1) + w["o_bias"]}


def ffn_by_hand(w, x):
    hidden = np.maximum(x @ w["up"] + w["up_bias"], 0)
    out = hidden @ w["down"] + w["down_bias"]
    return {"ffn_in": x, "ffn_hidden": hidden, "ffn_out": out}


def layers_by_hand(config, pool, plan, x, allowed, context=None):
    """[every value of every layer], and x after them."""
    layers = []
    for i in range(plan.num_layers):
        at = {p: jax.tree.map(lambda a, p=p, i=i: a[plan[p][i]], pool[p]) for p in plan}
        layers.append({})

        def sublayer(x, part, run, prefix="", at=at, seen=layers[-1]):
            made = run(at[part], norm(at[part]["norm"], x) if config.norm == "pre" else x)
            seen |= {prefix + name: a for name, a in made.items()}
            x = x + made["ffn_out" if part == "ffn" else "attention_out"]
            return x if config.norm == "pre" else norm(at[part]["norm"], x)

        x = sublayer(x, "attention", lambda w, y: heads_by_hand(w, y, y, allowed))
        if context is not None:
            cross = lambda w, y: heads_by_hand(w, y, context, True)
            x = sublayer(x, "cross", cross, "cross.")
        x = sublayer(x, "ffn", ffn_by_hand)
        layers[-1]["residual"] = x
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}, x


@pytest.mark.parametrize("order", ["pre", "post"])
def test_every_name_is_a_value_by_hand(order, x64):
    config = dataclasses.replace(CONFIG, norm=order, dtype="float64")
    run, params = make(config, "float64")
    shown = jax.jit(functools.partial(run, show=tuple(NAMES)))(params)[1]
    embed = lambda a: params["embedding"][np.asarray(a)] + params["positions"][: a.shape[1]]
    finish = lambda name, x: norm(params[name], x) if order == "pre" else x
    expected, x = layers_by_hand(
        config, params["encoder_layers"], config.encoder_layer_plan, embed(SOURCE), True
    )
    expected = {f"encoder.{name}": a for name, a in expected.items()}
    context = finish("encoder_final_norm", x)
    causal = np.tri(7, dtype=bool)
    of_decoder, _ = layers_by_hand(
        config, params["layers"], config.layer_plan, embed(TOKENS), causal, context
    )
    expected |= of_decoder
    assert set(shown) == set(expected) == set(NAMES)
    sizes = dict(B=2, T=7, S=7, D=12, N=4, K=2, H=5, V=3, O=12, F=10)
    for name, a in expected.items():
        assert_close(shown[name], a, loosen=100)
        own = sizes | ({"S": 5} if "." in name else {}) | ({"T": 5} if "encoder" in name else {})
        layers = 2 if "encoder" in name else 3
        assert shown[name].shape == (layers, *(own[axis] for axis in NAMES[name].axes.split()))


SPEC = HeadSpec("standard", width=12, num_heads=4, num_kv_heads=2, value_dim=5, biases="qkvo")
BLOCK = BlockSpec(SPEC, ffn_width=10, is_causal=True)
PLAN = Plan(attention=(0, 1, 0), ffn=(0, 0, 1))
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 12)), jnp.float32)


def levels():
    """name -> (function of weights and options, weights)"""
    key = jax.random.key(0)
    parts = {part: make(key) for part, make in init_block(BLOCK).items()}
    yield "heads", lambda w, **o: multi_head_attention(w, X, spec=SPEC, **o), init_heads(key, SPEC)
    yield "layer", lambda w, **o: transformer_block(w, X, spec=BLOCK, **o), parts
    pool = init_stacked(init_block(BLOCK), key, PLAN)
    yield "stack", lambda w, **o: run_layers(w, PLAN, X, spec=BLOCK, **o), pool
    for kind in TEXTS:
        encoder = 2 if kind == "encoder_decoder" else None
        yield kind, *make(dataclasses.replace(CONFIG, kind=kind, encoder_layers=encoder))


KNOWN = {"heads": OF_HEADS, "encoder_decoder": NAMES}


def test_nothing_asked_is_the_same_program():
    for level, run, w in levels():
        lower = lambda run=run, w=w, **o: jax.jit(functools.partial(run, **o)).lower(w).as_text()
        plain = lower()
        assert lower(show=[], edit={}) == plain
        assert len(lower(show=("probs",)).splitlines()) > len(plain.splitlines()), level


def test_every_level_has_the_names():
    """Each shows all that it has; an unknown name is refused with the known ones."""
    for level, run, w in levels():
        known = tuple(KNOWN.get(level, OF_LAYER))
        shown = jax.eval_shape(functools.partial(run, show=known), w)
        shown = shown.shown if hasattr(shown, "shown") else shown[-1]
        assert set(shown) == set(known)
        for asked in ({"show": ("porbs",)}, {"edit": {"porbs": abs}}):
            with pytest.raises(ValueError, match=r"did you mean 'probs'\? known: .*scores"):
                jax.eval_shape(functools.partial(run, **asked), w)
        with pytest.raises(TypeError, match=r"show must be a tuple of names"):
            run(w, show="probs")
        with pytest.raises(ValueError, match="edit of 'probs' gave shape"):
            jax.eval_shape(functools.partial(run, edit={"probs": lambda a, layer: a[..., 1:]}), w)
    with pytest.raises(TypeError, match="edit of 'probs' must be a function"):
        check_names((), {"probs": 0.0}, OF_HEADS)
    with pytest.raises(ValueError, match=r"unknown value 'cross\.q'"):
        make(DECODER)[0](draw_params(DECODER), show=("cross.q",))
    run, params = make(CONFIG)
    with pytest.raises(ValueError, match=r"unknown value 'encoder\.q'"):
        run(params, encoded=jnp.ones((2, 5, 12)), show=("encoder.q",))


WIDE = dataclasses.replace(
    DECODER, layout="wide", num_kv_heads=None, head_dim=None, value_dim=None, width=32
)
DROPS = dict(dropout_rate=0.2, attention_dropout_rate=0.2, ffn_dropout_rate=0.2)


ABSORBED = ("absorbed", "bfloat16", "blockwise")
OTHERS = itertools.product(["both", "absorbed"], ["float32", "bfloat16"], [None, "blockwise"])


@pytest.mark.parametrize(  # of smaller parts: test_attention.py, test_models.py
    ("stacks", "dtype", "implementation"),
    [ABSORBED, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS if o != ABSORBED)],
)
def test_showing_changes_no_bit(stacks, dtype, implementation, optimized):
    """Whatever is shown, of any backend and order of contraction; and the names are the order's."""
    config, names = (CONFIG, tuple(NAMES)) if stacks == "both" else (WIDE, tuple(OF_LAYER))
    changed = dataclasses.replace(config, dtype=dtype, implementation=implementation, **DROPS)
    run, params = make(changed)
    run = functools.partial(run, deterministic=False, rngs={"dropout": jax.random.key(1)})
    plain = jax.jit(run)(params)
    shown = jax.jit(functools.partial(run, show=names, return_probs=True))(params)
    np.testing.assert_array_equal(plain, shown[0])


PLANS = (
    "albert", "cla:2", "relaxed:2", "separate", "sandwich", "cycle_rev:2", "attention_only",
    "ffn_only", "pizza_bottom:2", "groups:2", "sequence:2", "dictionary:2",
)  # fmt: skip


@pytest.mark.parametrize("plan", deep(PLANS, "relaxed:2"))
def test_edits_under_transforms(plan, x64):
    """Every value times a number a of its layer: its gradient, and the same under remat and vmap.

    The scores are bilinear in q and k, the outputs in probs and v: so some gradients are equal.
    """
    config = dataclasses.replace(
        CONFIG, plan=plan, num_layers=4, encoder_layers=4, max_len=7, dtype="float64"
    )

    seed = np.random.default_rng(2).normal(size=(2, 7, 11))

    def loss(a, remat):
        edit = {name: lambda value, layer, name=name: value * a[name][layer] for name in a}
        run, params = make(dataclasses.replace(config, remat=remat), "float64")
        return jnp.sum(run(params, edit=edit) * seed)

    rng = np.random.default_rng(3)
    rows = {name: np.stack([np.ones(4), rng.normal(size=4)]) for name in NAMES}
    run, params = make(config, "float64")

    @jax.jit
    def several(rows):
        one = jax.tree.map(lambda a: a[0], rows)
        mapped = jax.vmap(jax.value_and_grad(lambda a: loss(a, True)))(rows)
        return mapped, jax.value_and_grad(lambda a: loss(a, False))(one), run(params)

    mapped, (value, grads), plain = several(rows)
    assert_close(jax.tree.map(lambda a: a[0], mapped), (value, grads), loosen=100)
    assert_close(value, jnp.sum(plain * seed), loosen=100)
    assert np.abs(mapped[0][1] - value) > 0.01
    for prefix in ("", "cross.", "encoder."):
        for equal in (("q", "k", "scores"), ("v", "probs", "heads", "outputs")):
            first, *rest = (grads[prefix + name] for name in equal)
            for other in rest:
                assert_close(first, other, loosen=1e4)
    assert all(np.abs(a).max() > 1e-4 for a in grads.values())


def test_a_gate_of_zero_is_an_edit_to_zero():
    run, params = make(DECODER)
    gate = jnp.ones((3, 4)).at[1, 2].set(0)
    remove = lambda heads, layer: jnp.where(layer == 1, heads.at[:, :, 2].set(0), heads)
    gated, edited, plain = jax.jit(
        lambda params: (
            run(params, head_gate=gate, show=("heads",)),
            run(params, edit={"heads": remove}, show=("heads",)),
            run(params, show=("heads",)),
        )
    )(params)
    assert_close(gated, edited)
    assert not gated[1]["heads"][1, :, :, 2].any()
    assert np.abs(gated[0] - plain[0]).max() > 0.01
    # Both: the gate comes after the edit.
    double = {"heads": lambda heads, layer: 2 * heads}
    w = init_heads(jax.random.key(0), SPEC)
    both = multi_head_attention(w, X, spec=SPEC, head_gate=0.5 * jnp.ones(4), edit=double)
    assert_close(both, multi_head_attention(w, X, spec=SPEC))


def test_patching_a_layer_makes_the_rest_of_the_run():
    """The residual of another text put in after layer 1: from there on it is that text's run."""
    run, params = make(DECODER)
    names, model = ("residual", "heads"), DECODER.build()

    @jax.jit
    def patch(params):
        logits, shown = model.apply({"params": params}, TOKENS[::-1], show=names)
        put = lambda value, layer: jnp.where(layer == 1, shown["residual"][1], value)
        return run(params, edit={"residual": put}, show=("heads",)), logits, shown["heads"]

    (got, heads), logits, expected = patch(params)
    assert_close(got, logits)
    assert_close(heads["heads"][2], expected[2])
    assert np.abs(heads["heads"][:2] - expected[:2]).max() > 0.1


def test_decoding_shows_and_edits_what_the_whole_call_does():
    run, params = make(DECODER)
    model, names = DECODER.build(), ("q", "heads", "outputs", "residual")
    edit = {"heads": lambda heads, layer: heads * (1.0 + layer), "k": lambda k, layer: k * 0.5}
    look = dict(edit=edit, show=names)
    logits, whole = jax.jit(lambda params: run(params, **look))(params)

    @jax.jit
    def step(params, cache, token):
        return model.apply({"params": params}, token, cache=cache, **look)

    cache = DECODER.empty_cache(2, 8)
    for i in range(7):
        got, cache, shown = step(params, cache, TOKENS[:, i : i + 1])
        assert_close(got[:, 0], logits[:, i])
        for name in names:
            axis = 2 if name in ("q", "heads", "residual") else 3
            assert_close(shown[name], jnp.take(whole[name], jnp.array([i]), axis=axis))


def test_a_cache_of_another_order_says_what_it_cannot_show():
    spec = HeadSpec("standard", width=12, num_heads=4)
    w, cache = init_heads(jax.random.key(0), spec), init_cache(spec, 2, 8, order="absorbed")
    with pytest.raises(ValueError, match="q, heads cannot be shown: the cache holds x"):
        multi_head_attention(w, X, spec=spec, cache=cache, show=("q", "heads"))
    out, _, shown = multi_head_attention(w, X, spec=spec, cache=cache, show=("outputs",))
    assert_close(shown["outputs"].sum(1), out)


@pytest.mark.parametrize("kind", TEXTS)
def test_one_program_at_every_depth(kind):
    names = {"encoder_decoder": NAMES}.get(kind, OF_LAYER)

    def lines(depth):
        encoder = depth if kind == "encoder_decoder" else None
        config = dataclasses.replace(
            CONFIG, kind=kind, num_layers=depth, encoder_layers=encoder, plan="albert"
        )
        run, params = make(config)
        edit = {name: lambda value, layer: value * layer.astype(value.dtype) for name in names}
        look = functools.partial(run, show=tuple(names), edit=edit)
        return len(jax.jit(look).lower(params).as_text().splitlines())

    assert lines(2) == lines(12)


def test_return_outputs_is_made_of_shown_values():
    run, params = make(CONFIG)
    outputs, shown = jax.jit(
        lambda params: (
            run(params, return_outputs=True, return_probs=True),
            run(params, show=("residual", "encoder.residual", "probs", *OF_CROSS))[1],
        )
    )(params)
    assert_close(outputs.hidden[1:], shown["residual"])
    assert_close(outputs.encoder_hidden[1:], shown["encoder.residual"])
    assert_close(outputs.cross_probs, shown["cross.probs"])
    assert set(outputs.shown) == {
        "residual", "probs", "cross.probs", "encoder.residual", "encoder.probs"
    }  # fmt: skip
    assert set(OF_ENCODER) == {f"encoder.{n}" for n in OF_LAYER}
