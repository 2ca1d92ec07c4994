"""Sums that are exact: the residual stream, logits and scores as terms; single terms by NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from interpreted_models import config_of, random_params

from attnlab import heads
from attnlab.interpret import (
    decompose_final,
    decompose_input,
    decompose_residual,
    decompose_scores,
    direct_logit_attribution,
    flatten_terms,
    linearize_at,
    record,
    sum_terms,
)
from attnlab.models import (
    FFN,
    Attention,
    Compute,
    Embedding,
    EncoderConfig,
    LayerOverrides,
    ModelInputs,
    Norm,
    OutputHead,
    Relative,
    Rotary,
)
from attnlab.models.positionwise import normalize

NO_BIAS = {"biases": (), "norm": Norm(kind="rms")}
FAMILIES = {
    "gpt2": {"output": OutputHead(bias=True, scale=0.7)},
    "bert": {
        "kind": "encoder",
        "norm": Norm(position="post"),
        "embedding": Embedding(norm=True, width=5, token_types=2),
        "output": OutputHead(kind="own"),
        "ffn": FFN(width=10, residual_scale=2.0),
        "attention": Attention(output_scale=0.3),
    },
    "t5": {
        "kind": "encoder_decoder",
        "encoder": EncoderConfig(num_layers=2, sharing="albert"),
        "positions": Relative(buckets=8),
        "scale": 1.0,
        "ffn": FFN(width=10, bias=False, activation="gated_gelu"),
        **NO_BIAS,
    },
    "llama": {
        "positions": Rotary(),
        "output": OutputHead(kind="own"),
        "ffn": FFN(width=10, bias=False, activation="gated_silu"),
        **NO_BIAS,
    },
    "gptj": {
        "norm": Norm(position="parallel"),
        "positions": Rotary(scaling="linear:4"),
        "attention": Attention(window=2),
    },
    "gemma": {
        "norm": Norm(position="sandwich", kind="rms_plus_one"),
        "positions": Rotary(),
        "attention": Attention(layer_scales=(0.5, 1.0, 2.0), position_scale=(0.7, 2.0)),
    },
}
KV_SHARED = "attention=0,1,2 kv=0,1,@0 ffn=0,0,1"
PRODUCTS = ("tensor_product",)
"""Layouts whose queries are products of two functions of the input."""
CASES = [
    (f, layout, plan) for f in FAMILIES for layout in heads.LAYOUTS for plan in ("albert", "cla:2")
]
CASES += [(f, "standard", plan) for f in FAMILIES for plan in ("relaxed:2", KV_SHARED)]
KEPT = [
    ("bert", "latent", "cla:2"),
    ("t5", "two_stage", "albert"),
    ("llama", "standard", "relaxed:2"),
    ("gemma", "standard", "albert"),
]
SOURCE = jnp.asarray([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8]])
IS_TOKEN = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)


def case_config(family, layout, plan):
    fields = dict(FAMILIES[family]) | {"sharing": plan, "compute": Compute(dtype="float64")}
    known = heads.LAYOUTS[layout].__dataclass_fields__
    fields = {n: a for n, a in fields.items() if n != "scale" or n in known}
    if family == "gemma" and "qk_norm" in known:
        fields["qk_norm"] = heads.HeadNorm("rms_plus_one")
    try:
        return config_of(layout, **fields)
    except ValueError as error:  # no rotary positions, no keys to share
        pytest.skip(str(error))


def sum_of(scores):
    total = jnp.sum(scores.terms, axis=tuple(range(scores.terms.ndim - 3)))
    return total if scores.bias is None else total + scores.bias


@pytest.mark.parametrize("case", deep(CASES, *KEPT), ids="-".join)
def test_terms_sum_to_the_logits_and_scores(case, x64):
    """In float64, for every layout, sharing plan and position of norms."""
    family, layout, _ = case
    config = case_config(*case)
    is_t5 = family == "t5"
    inputs = ModelInputs(source=SOURCE, source_padding_mask=IS_TOKEN) if is_t5 else ModelInputs()
    splits = {"self": "query", "cross": "key", "encoder": "both"} if is_t5 else {"self": "both"}
    splits = {} if layout in PRODUCTS else splits

    @jax.jit
    def run(params):
        recording = record(config, params, TOKENS, inputs)
        outputs, chosen = recording.outputs, TOKENS[:, ::-1]
        one = sum_terms(direct_logit_attribution(recording, chosen), 2)
        pairs = [
            (sum_terms(direct_logit_attribution(recording)), outputs.logits),
            (one, jnp.take_along_axis(outputs.logits, chosen[..., None], 2)[..., 0]),
            (sum_terms(decompose_residual(recording)), outputs.captured["residual"][-1]),
            (sum_terms(decompose_residual(recording, layer=2)), outputs.captured["residual"][1]),
            (sum_terms(decompose_input(recording, 1)), outputs.captured["attention_in"][1]),
            (sum_terms(decompose_input(recording, 1, "ffn")), ffn_input(recording)),
        ]
        if is_t5:
            pairs += [(sum_terms(decompose_final(recording, encoder=True)), outputs.encoded)]
        for attention, split in splits.items():
            prefix = "" if attention == "self" else f"{attention}."
            found = sum_of(decompose_scores(recording, 1, 2, attention=attention, split=split))
            # Keys that are masked everywhere are zeros where attention runs.
            kept = IS_TOKEN[:, None] if prefix else True
            expected = outputs.captured[f"{prefix}scores"][1, :, 2]
            pairs.append([jnp.where(kept, a, 0) for a in (found, expected)])
        return pairs

    for got, expected in run(random_params(config)):
        assert expected.dtype == np.float64
        assert_close(got, expected, loosen=10)


def ffn_input(recording):
    """Of layer 1, from captured values."""
    captured, c = recording.outputs.captured, recording.config
    weights = recording.layer_weights(1)
    x = captured["residual"][0]
    written = c.attention.output_scale * captured["attention_out"][1]
    if c.norm.position == "sandwich":
        written = normalize(weights["attention"]["norm_after"], written, c.norm)
    if c.norm.position != "parallel":
        x = x + written
    if c.norm.position == "post":
        return normalize(weights["attention"]["norm"], x, c.norm)
    x = x + captured["cross.attention_out"][1] if "cross.attention_out" in captured else x
    return normalize(weights["ffn"]["norm"], x, c.norm)


def normed(w, x, at=None):
    """A layer norm without its bias, divided by the standard deviation of `at`."""
    at = x if at is None else at
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(at.var(-1, keepdims=True) + 1e-5) * w["scale"]


def run_recorded(config, params, f, **inputs):
    """(f(recording), captured values), as one program."""

    def run(params):
        recording = record(config, params, TOKENS, ModelInputs(**inputs))
        return f(recording), recording.outputs.captured

    return jax.tree.map(np.asarray, jax.jit(run)(params))


@pytest.mark.parametrize("position", ["pre", "post"])
def test_single_terms_by_hand(position):
    """What head 2 of layer 0 and the attention bias of layer 1 add to every logit."""
    config = config_of(
        num_layers=2, norm=Norm(position=position), ffn=FFN(width=10, residual_scale=2.0),
        attention=Attention(output_scale=0.5), sharing="ffn_only",
    )  # fmt: skip
    params = random_params(config)
    got, out = run_recorded(config, params, direct_logit_attribution)
    x, w = out["embeddings"], jax.tree.map(np.asarray, params)
    head = 0.5 * out["outputs"][0][:, 2]
    bias = np.broadcast_to(0.5 * w["layers"]["attention"]["o_bias"][1], (2, 6, 12))
    if position == "pre":
        x, last = out["residual"][1], w["final_norm"]
        head, bias = 4 * normed(last, head, x), 2 * normed(last, bias, x)
        added = np.broadcast_to(last["bias"], x.shape)
    else:
        attention, ffn = (w["layers"][p]["norm"] for p in ("attention", "ffn"))
        first = jax.tree.map(lambda a: a[0], ffn)
        for i in range(2):
            own = jax.tree.map(lambda a, i=i: a[i], attention)
            x = x + 0.5 * out["attention_out"][i]
            head = normed(own, head, x)
            bias = normed(own, bias, x) if i else bias
            x = normed(own, x) + own["bias"]
            before = x = 2 * x + out["ffn_out"][i]
            head = normed(first, 2 * head, x)
            bias = normed(first, 2 * bias, x) if i else bias
            x = normed(first, x) + first["bias"]
        added = normed(first, 2 * np.broadcast_to(own["bias"], x.shape), before) + first["bias"]
    table = w["embedding"].T
    assert_close(got["heads"][0, 2], head @ table)
    assert_close(got["attention_bias"][1], bias @ table)
    assert_close(
        got["final_norm_bias"] if position == "pre" else got["norm_bias"][1], added @ table
    )
    assert ("norm_bias" in got) == (position == "post")


def test_pairs_of_score_terms_by_hand():
    config = config_of(ffn=FFN(width=0), num_layers=2)
    params = random_params(config)
    names = []

    def f(recording):
        both = decompose_scores(recording, 1, 2)
        by_key = decompose_scores(recording, 1, 2, split="key")
        names[:] = both.queries, both.keys, by_key.queries
        return both.terms, by_key.terms

    (terms, by_key), out = run_recorded(config, params, f)
    queries, keys, whole = names
    w = jax.tree.map(np.asarray, params)
    own = jax.tree.map(lambda a: a[1], w["layers"]["attention"])
    x, head = out["residual"][0], out["outputs"][0][:, 1]
    q = normed(own["norm"], head, x) @ own["q"][:, 2]
    k = normed(own["norm"], out["embeddings"], x) @ own["k"][:, 2]
    at = queries.index(("heads", 0, 1)), keys.index(("embedding",))
    assert_close(terms[at], q @ k.swapaxes(1, 2) / 2)
    at = queries.index(("input_norm_bias",)), keys.index(("projection_bias",))
    one = (own["norm"]["bias"] @ own["q"][:, 2]) @ own["k_bias"][2] / 2
    assert_close(terms[at], np.full((2, 6, 6), one))
    assert whole == []
    assert_close(by_key, terms.sum(0))


def test_masked_heads_have_zero_terms():
    config = config_of(sharing="albert")
    mask = jnp.ones((3, 3)).at[1, 2].set(0)
    params = random_params(config)
    terms, captured = run_recorded(config, params, decompose_residual, head_mask=mask)
    names, rows = flatten_terms(terms)
    assert ("embedding",) in names
    assert not np.any(rows[names.index(("heads", 1, 2))])
    assert np.any(rows[names.index(("heads", 0, 2))])
    assert_close(jnp.sum(rows, axis=0), captured["residual"][-1])


def with_extra(extra):
    config = config_of(num_layers=1, ffn=FFN(width=0))
    return dataclasses.replace(config, heads=dataclasses.replace(config.heads, extras=(extra,)))


ONE = {"num_layers": 1, "ffn": FFN(width=0)}
REFUSED = {
    "a transform": (
        config_of(output=OutputHead(transform="gelu"), **ONE), direct_logit_attribution,
        "decompose_final",
    ),
    "no logits": (
        config_of(output=OutputHead(kind="none"), **ONE), direct_logit_attribution, "no logits",
    ),
    "products": (
        config_of("tensor_product", biases=(), **ONE), lambda r: decompose_scores(r, 0, 0),
        "'tensor_product' is not linear",
    ),
    "mixed": (
        with_extra(heads.TalkingHeads()), lambda r: decompose_scores(r, 0, 0), "talking_heads",
    ),
    "capped": (with_extra(heads.SoftCap(5.0)), lambda r: decompose_scores(r, 0, 0), "soft_cap"),
    "no encoder": (config_of(**ONE), lambda r: decompose_residual(r, encoder=True), "one stack"),
    "no such layer": (
        config_of(**ONE), lambda r: decompose_residual(r, layer=1), "layers are 0 to 0",
    ),
    "no such head": (
        config_of(**ONE), lambda r: decompose_scores(r, 0, 3), "1 layers of 3 heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_a_sum_raises(case):
    config, f, message = REFUSED[case]
    params = random_params(config)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: f(record(config, params, TOKENS)))


def test_calls_that_cannot_be_recorded():
    config, tokens = config_of(), TOKENS
    params = random_params(config)
    patched = ModelInputs(patch={"residual": lambda x, layer: x})
    with pytest.raises(ValueError, match="'residual' would break the sum"):
        record(config, params, tokens, patched)
    with pytest.raises(ValueError, match="cache"):
        record(config, params, tokens, ModelInputs(cache=config.init_cache(2, 8)))
    types = ((1, LayerOverrides(window=2)), (1, LayerOverrides()))
    with pytest.raises(ValueError, match="layer_types"):
        record(config_of(layer_types=types), params, tokens)


def test_linearize_at():
    x = jnp.arange(1.0, 4)
    root = lambda x: x / jnp.sqrt(jnp.sum(x * x)) * 2 + 1
    found = linearize_at(root, x)
    np.testing.assert_allclose(found.linear(jnp.eye(3)[0]), [2 / 14**0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.constant, 1, rtol=1e-6)
    assert linearize_at(lambda x: x @ jnp.ones((3, 2)), x).constant is None
    assert linearize_at(lambda x: jnp.pad(x, 1), x).apply(jnp.ones((4, 3))).shape == (4, 5)
    for f in (lambda x: x * x, lambda x: jnp.sqrt(x) + x**3, lambda x: 1 / x):
        with pytest.raises(ValueError, match="not linear"):
            linearize_at(f, x)
    with pytest.raises(ValueError, match="rsqrt"):
        linearize_at(lambda x: x * jax.lax.rsqrt(jnp.sum(x)), x, hold_norms=False)
