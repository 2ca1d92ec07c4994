"""Capture and patch: every value by hand in NumPy, and patches under transformations and plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from random_models import PLANS, random_params
from test_models import SMALL, SOURCE, TOKENS, change

from attnlab import capture, heads, run_model
from attnlab.models import FFN, Attention, Compute, Dropout, EncoderConfig, Norm, model_values

LAYOUT = heads.Standard(
    num_heads=4, num_kv_heads=2, head_dim=5, value_dim=3, biases=("q", "k", "v", "o")
)
CONFIG = change(
    SMALL, kind="encoder_decoder", encoder=EncoderConfig(num_layers=2, sharing="separate"),
    heads=LAYOUT, ffn=FFN(width=10, activation="relu"), sharing="cycle:2",
)  # fmt: skip
DECODER = change(CONFIG, kind="decoder", encoder=None)


def make(config):
    """(run, params) with run(params, **inputs) on the texts of its kind."""
    model = config.build()
    given = {} if config.encoder is None else {"source": SOURCE}
    params = random_params(config, scale=0.5)
    return lambda p, **inputs: model.apply({"params": p}, TOKENS, **(given | inputs)), params


def norm(w, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w["scale"] + w["bias"]


def heads_by_hand(w, x, y, allowed):
    """Every value of multi-head attention from x to y."""
    q = np.einsum("btd,dnh->btnh", x, w["q"]) + w["q_bias"]
    k = np.einsum("bsd,dkh->bskh", y, w["k"]) + w["k_bias"]
    v = np.einsum("bsd,dkv->bskv", y, w["v"]) + w["v_bias"]
    values = {"q": q, "k": k, "v": v}
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    p = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    probs = p / p.sum(-1, keepdims=True)
    per_head = np.einsum("bnts,bsnv->btnv", probs, v)
    outputs = np.einsum("btnv,nvo->bnto", per_head, w["o"])
    values |= {"scores": scores, "probs": probs, "heads": per_head, "outputs": outputs}
    return values | {"attention_in": x, "attention_out": outputs.sum(1) + w["o_bias"]}


def ffn_by_hand(w, x):
    hidden = np.maximum(x @ w["up"] + w["up_bias"], 0)
    return {"ffn_in": x, "ffn_hidden": hidden, "ffn_out": hidden @ w["down"] + w["down_bias"]}


def layers_by_hand(config, stacked, plan, x, allowed, source=None):
    """Every value of every layer, and x after them."""
    layers = []
    pre = config.norm.position == "pre"
    for i in range(plan.num_layers):
        at = {p: jax.tree.map(lambda a, p=p, i=i: a[plan[p][i]], stacked[p]) for p in plan}
        values = {}

        def sublayer(x, name, run, prefix="", at=at, values=values):
            made = run(at[name], norm(at[name]["norm"], x) if pre else x)
            values |= {prefix + n: a for n, a in made.items()}
            x = x + made["ffn_out" if name == "ffn" else "attention_out"]
            return x if pre else norm(at[name]["norm"], x)

        x = sublayer(x, "attention", lambda w, y: heads_by_hand(w, y, y, allowed))
        if source is not None:
            x = sublayer(x, "cross", lambda w, y: heads_by_hand(w, y, source, True), "cross.")
        x = sublayer(x, "ffn", ffn_by_hand)
        layers.append(values | {"residual": x})
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}, x


@pytest.mark.parametrize("position", ["pre", "post"])
def test_every_value_by_hand(position, x64):
    config = change(CONFIG, norm=Norm(position=position), compute=Compute(dtype="float64"))
    run, params = make(config)
    values = model_values(config)
    captured = jax.jit(functools.partial(run, capture=tuple(values)))(params).captured

    def embed(a):
        return params["embedding"][a] + params["positions"][: a.shape[1]]

    embedded = {"encoder.embeddings": embed(SOURCE), "embeddings": embed(TOKENS)}
    of_encoder, x = layers_by_hand(
        config, params["encoder_layers"], config.encoder_model.plan, embed(SOURCE), True
    )
    source = norm(params["encoder_final_norm"], x) if position == "pre" else x
    of_decoder, _ = layers_by_hand(
        config, params["layers"], config.plan, embed(TOKENS), np.tri(7, dtype=bool), source
    )
    expected = embedded | {f"encoder.{n}": a for n, a in of_encoder.items()} | of_decoder
    assert set(captured) == set(expected) == set(values)
    sizes = dict(B=2, T=7, S=7, D=12, N=4, K=2, Kv=2, H=5, V=3, O=12, F=10)
    for name, a in expected.items():
        assert_close(captured[name], a, loosen=100)
        is_encoder = name.startswith("encoder.")
        own = sizes | ({"S": 5} if "." in name else {}) | ({"T": 5} if is_encoder else {})
        layers = () if "embeddings" in name else (2,) if is_encoder else (3,)
        assert captured[name].shape == (*layers, *(own[axis] for axis in values[name].split()))


def test_capture_names_the_way_of_a_model():
    """Its values leave with its outputs: it takes no tap."""
    model = DECODER.build()
    params = random_params(DECODER)
    calls = (model.apply, ({"params": params}, TOKENS)), (run_model, (params, TOKENS, DECODER))
    for call, given in calls:
        with pytest.raises(TypeError, match=r"capture=\('probs',\)"):
            capture(call, *given, names=("probs",))


WIDE = change(DECODER, heads=heads.Wide(num_heads=4), width=32)


@pytest.mark.parametrize("implementation", deep([None, "blockwise"], "blockwise"))
def test_capturing_changes_no_bit(implementation, optimized):
    """With dropout, in bfloat16, in another form of the heads; see also the random models. A call
    outside of `jit` gives the same bits."""
    config = change(
        WIDE, compute=Compute(dtype="bfloat16"), attention=Attention(implementation=implementation),
        dropout=Dropout(rate=0.2, attention=0.2, ffn=0.2),
    )  # fmt: skip
    run, params = make(config)
    run = functools.partial(run, deterministic=False, rngs={"dropout": jax.random.key(1)})
    plain = jax.jit(lambda p: run(p).logits)(params)
    outputs = jax.jit(functools.partial(run, capture=tuple(model_values(config))))(params)
    np.testing.assert_array_equal(plain, outputs.logits)
    np.testing.assert_array_equal(plain, run(params).logits)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", PLANS)
def test_patched_values_have_gradients(sharing, x64):
    """Every value times a number a of its layer, at a = 1. Scores are bilinear in q and k, outputs
    in probs and v: so some gradients are equal."""
    config = change(
        CONFIG, sharing=sharing, num_layers=4, encoder=EncoderConfig(),
        compute=Compute(dtype="float64"),
    )  # fmt: skip
    seed = np.random.default_rng(2).normal(size=(2, 7, 19))
    names = [name for name in model_values(config) if "embeddings" not in name]
    run, params = make(config)

    def loss(a):
        patch = {name: lambda value, layer, name=name: value * a[name][layer] for name in names}
        return jnp.sum(run(params, patch=patch).logits * seed)

    value, gradients = jax.jit(jax.value_and_grad(loss))({name: jnp.ones(4) for name in names})
    assert_close(value, jnp.sum(run(params).logits * seed), loosen=100)
    for prefix in ("", "cross.", "encoder."):
        for equal in (("q", "k", "scores"), ("v", "probs", "heads", "outputs")):
            first, *rest = (gradients[prefix + name] for name in equal)
            for other in rest:
                assert_close(first, other, loosen=1e4)
    assert all(np.abs(a).max() > 1e-4 for a in gradients.values())


@pytest.mark.parametrize(
    ("kind", "sharing"),
    [("decoder", "cla:2"), ("encoder", "albert"), ("encoder_decoder", "relaxed:2")],
)
def test_the_program_with_captures_is_as_long_at_every_depth(kind, sharing):
    def lines(depth):
        config = change(DECODER, kind=kind, num_layers=depth, sharing=sharing)
        names = tuple(model_values(config))
        run, params = make(config)
        patch = {
            name: lambda value, layer: value * jnp.asarray(layer, value.dtype) for name in names
        }
        look = functools.partial(run, capture=names, patch=patch)
        return jax.jit(look).lower(params).as_text().count("\n")

    assert lines(4) == lines(12)
