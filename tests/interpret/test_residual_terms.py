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
    Alibi,
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
    run_model,
)
from attnlab.models.params import param_shapes

NO_BIAS = {"biases": (), "norm": Norm(kind="rms")}
FAMILIES = {
    "gpt2": {"output": OutputHead(bias=True, scale=0.7), "norm": Norm(layer_scale=0.5)},
    "bert": {
        "kind": "encoder", "norm": Norm(position="post"), "output": OutputHead(kind="own"),
        "embedding": Embedding(norm=True, width=5, token_types=2),
        "ffn": FFN(width=10, residual_scale=2.0), "attention": Attention(output_scale=0.3),
    },
    "t5": {
        "kind": "encoder_decoder", "positions": Relative(buckets=8, per_layer=True), "scale": 1.0,
        "encoder": EncoderConfig(num_layers=2, num_heads=4, sharing="albert"),
        "ffn": FFN(width=10, bias=False, activation="gated_gelu"), **NO_BIAS,
    },
    "llama": {
        "positions": Rotary(), "output": OutputHead(kind="own"),
        "ffn": FFN(width=10, bias=False, activation="gated_silu"), **NO_BIAS,
    },
    "gptj": {
        "norm": Norm(position="parallel"), "positions": Rotary(scaling="linear:4"),
        "attention": Attention(window=2),
    },
    "gemma": {
        "norm": Norm(position="sandwich", kind="rms_plus_one"), "positions": Rotary(),
        "attention": Attention(layer_scales=(0.5, 1.0, 2.0), position_scale=(0.7, 2.0)),
    },
}  # fmt: skip
KV_SHARED = "attention=0,1,2 kv=0,1,@0 ffn=0,0,1"
KV_DELTAS = "attention=0,1,2 kv=0,@0,@0 ffn=0,0,1 delta=0,1,2"
PRODUCTS = ("tensor_product",)
"""Layouts whose queries are products of two functions of the input."""
CASES = [
    (f, layout, plan) for f in FAMILIES for layout in heads.LAYOUTS for plan in ("albert", "cla:2")
]
CASES += [(f, "standard", plan) for f in FAMILIES for plan in ("relaxed:2", KV_SHARED)]
CASES += [("bert", "latent", KV_DELTAS)]
KEPT = [
    ("bert", "latent", KV_DELTAS),
    ("t5", "two_stage", "albert"),
    ("llama", "standard", "relaxed:2"),
    ("gpt2", "wide", "albert"),
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
    beside = dataclasses.replace(inputs, capture=("ffn_in",))

    @jax.jit
    def run(params):
        recording = record(config, params, TOKENS, inputs)
        outputs, chosen = recording.outputs, TOKENS[:, ::-1]
        ffn_in = run_model(params, TOKENS, config, beside).captured["ffn_in"]
        one = sum_terms(direct_logit_attribution(recording, chosen), 2)
        pairs = [
            (sum_terms(direct_logit_attribution(recording)), outputs.logits),
            (one, jnp.take_along_axis(outputs.logits, chosen[..., None], 2)[..., 0]),
            (sum_terms(decompose_residual(recording)), outputs.captured["residual"][-1]),
            (sum_terms(decompose_residual(recording, layer=2)), outputs.captured["residual"][1]),
            (sum_terms(decompose_input(recording, 1)), outputs.captured["attention_in"][1]),
            (sum_terms(decompose_input(recording, 1, "ffn")), ffn_in[1]),
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


def silent(params, sublayer, layer, *names):
    """Params in which these weights of a layer are zeros."""
    own = params["layers"][sublayer]
    own = own | {name: own[name].at[layer].set(0) for name in names}
    return params | {"layers": params["layers"] | {sublayer: own}}


PARAMS = random_params(config_of(num_layers=2))
NOTHING = {"embeddings": lambda x, layer: 0 * x}
SILENT = {
    # what writes nothing -> (params, inputs) with which it does
    ("heads", 0, 2): (PARAMS, {"head_mask": jnp.ones((2, 3)).at[0, 2].set(0)}),
    ("heads", 1, 0): (PARAMS, {"head_mask": jnp.ones((2, 3)).at[1, 0].set(0)}),
    ("attention_bias", 1): (silent(PARAMS, "attention", 1, "o_bias"), {}),
    ("ffn", 0): (silent(PARAMS, "ffn", 0, "down", "down_bias"), {}),
    ("embedding",): (PARAMS, {"patch": NOTHING}),
    ("projection_bias",): (silent(PARAMS, "attention", 1, "q_bias", "k_bias"), {}),
}


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("name", SILENT, ids=str)
def test_what_writes_nothing_has_zero_terms(name, position):
    """And nothing else has: with their sum, each term is then that of its source."""
    config, (params, inputs) = config_of(num_layers=2, norm=Norm(position=position)), SILENT[name]
    params = {n: a for n, a in params.items() if n != "final_norm" or position == "pre"}
    names = {}

    @jax.jit
    def run(params):
        recording = record(config, params, TOKENS, ModelInputs(**inputs))
        names["logits"], logits = flatten_terms(direct_logit_attribution(recording))
        scores = decompose_scores(recording, 1, 2)
        names["queries"], names["keys"] = scores.queries, scores.keys
        by_key = decompose_scores(recording, 1, 2, split="key")
        names["by key"] = by_key.keys
        return {
            "logits": logits, "queries": scores.terms, "keys": scores.terms.swapaxes(0, 1),
            "by key": by_key.terms,
        }  # fmt: skip

    for what, rows in jax.tree.map(np.asarray, run(params)).items():
        sizes = np.abs(rows).reshape(len(rows), -1).max(1)
        is_zero = dict(zip(names[what], sizes < 1e-6 * sizes.max(), strict=True))
        assert [n for n in is_zero if is_zero[n]] == [name] * (name in is_zero)


PACKED = jnp.asarray([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 2]])
ORDER = jnp.asarray([[5, 3, 1, 0, 2, 4], [2, 0, 4, 7, 1, 3]])
SCALED = Attention(position_scale=(0.7, 2.0))
TABLE = {"positions": Relative(buckets=8, max_distance=20, table=True)}
POSITIONS = {
    "rotary of packed texts": ({"positions": Rotary()}, {"segments": PACKED}),
    "scale of packed texts": ({"positions": Rotary(), "attention": SCALED}, {"segments": PACKED}),
    "learned of packed texts": ({"attention": SCALED}, {"segments": PACKED}),
    "given": ({"positions": Rotary(), "attention": SCALED}, {"positions": ORDER}),
    "a table beside distances": (TABLE, {"positions": ORDER}),
    "a table that counts tokens": (
        {"positions": Relative(buckets=8, max_distance=20, table=True, pad_token=2), "max_len": 12,
         "kind": "encoder"}, {},
    ),
    "two maps of a head": (
        {"layout": "differential", "num_heads": 4, "num_kv_heads": 2, "head_dim": 5,
         "positions": Alibi()}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONS)
def test_scores_have_the_positions_of_the_model(name):
    """The sum of terms and bias is the captured score of each map, within a text."""
    fields, inputs = POSITIONS[name]
    config, inputs = config_of(**{"num_layers": 2} | fields), ModelInputs(**inputs)

    @jax.jit
    def run(params):
        recording = record(config, params, TOKENS, inputs)
        scores = recording.outputs.captured["scores"][1]
        found = [sum_of(decompose_scores(recording, 1, i)) for i in range(scores.shape[1])]
        return jnp.stack(found, axis=1), scores

    found, scores = run(random_params(config))
    same = (
        PACKED[:, None, :, None] == PACKED[:, None, None] if inputs.segments is not None else True
    )
    assert_close(*(jnp.where(same, a, 0) for a in (found, scores)), loosen=10)


def scores_of(head):
    return lambda recording: decompose_scores(recording, 0, head)


def logits_of(tokens):
    return lambda recording: direct_logit_attribution(recording, tokens)


ONE = {"num_layers": 1, "ffn": FFN(width=0)}
REFUSED = [
    (config_of(output=OutputHead(transform="gelu"), **ONE), direct_logit_attribution, "decompose_"),
    (config_of(output=OutputHead(kind="none"), **ONE), direct_logit_attribution, "no logits"),
    (config_of(output=OutputHead(soft_cap=2.0), **ONE), direct_logit_attribution, "soft_cap=2.0"),
    (config_of(**ONE), logits_of(TOKENS + 1), r"token id 11 at \[1, 0\]"),
    (config_of(**ONE), logits_of(-TOKENS), r"token id -4 at \[0, 0\]"),
    (config_of(**ONE), logits_of(TOKENS[:, :5]), r"tokens \(2, 5\) must be \[B, T\] = \(2, 6\)"),
    (config_of(**ONE), lambda r: decompose_input(r, 0, "math:pi"), "unknown sublayer 'math:pi'"),
    (config_of("tensor_product", biases=(), **ONE), scores_of(0), "'tensor_product' is not linear"),
    (config_of(extras=(heads.TalkingHeads(),), **ONE), scores_of(0), "talking_heads"),
    (config_of(extras=(heads.SoftCap(5.0),), **ONE), scores_of(0), "soft_cap"),
    (config_of(**ONE), lambda r: decompose_residual(r, encoder=True), "one stack"),
    (config_of(**ONE), lambda r: decompose_scores(r, 0, 0, attention="encoder"), "s, no encoder"),
    (config_of(**ONE), lambda r: decompose_residual(r, layer=1), "layers are 0 to 0"),
    (config_of(**ONE), scores_of(3), "1 layers of 3 heads"),
]


@pytest.mark.parametrize(("config", "f", "message"), REFUSED)
def test_what_is_not_a_sum_raises(config, f, message):
    params = random_params(config)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: f(record(config, params, TOKENS)))


BOTH = config_of(
    kind="encoder_decoder", encoder=EncoderConfig(num_layers=1), sharing="albert", num_layers=1
)


@pytest.mark.parametrize(
    ("patched", "f"),
    [
        ("attention_in", decompose_input),
        ("ffn_in", lambda r, layer: decompose_input(r, layer, "ffn")),
        ("cross.attention_in", lambda r, layer: decompose_input(r, layer, "cross")),
        ("attention_in", lambda r, layer: decompose_scores(r, layer, 1)),
        ("q", lambda r, layer: decompose_scores(r, layer, 1)),
        ("k", lambda r, layer: decompose_scores(r, layer, 1)),
        ("scores", lambda r, layer: decompose_scores(r, layer, 1)),
        ("cross.k", lambda r, layer: decompose_scores(r, layer, 1, attention="cross")),
        ("encoder.q", lambda r, layer: decompose_scores(r, layer, 1, attention="encoder")),
    ],
)
def test_what_a_patch_replaces_is_no_sum_of_terms(patched, f):
    inputs = ModelInputs(source=SOURCE, patch={patched: lambda a, layer: 2 * a})

    def run(params):
        recording = record(BOTH, params, TOKENS, inputs)
        direct_logit_attribution(recording)  # what a sublayer writes is as it was
        with pytest.raises(ValueError, match=f"patch of '{patched.removeprefix('encoder.')}'"):
            f(recording, 0)
        return decompose_scores(recording, 0, 1).terms if "." in patched else 0

    jax.eval_shape(run, param_shapes(BOTH))


@pytest.mark.parametrize("kind", ["tied", "own"])
def test_weights_of_numpy_may_be_closed_over(kind):
    config = config_of(output=OutputHead(kind=kind, bias=True), **ONE)
    params = jax.tree.map(np.asarray, random_params(config))
    run = lambda tokens: direct_logit_attribution(record(config, params, tokens), tokens)
    assert jax.eval_shape(run, TOKENS)["heads"].shape == (1, 3, 2, 6)


def test_variables_of_a_module_are_parameters_too():
    config = config_of(**ONE)
    params = random_params(config)
    run = jax.jit(lambda params: direct_logit_attribution(record(config, params, TOKENS), TOKENS))
    jax.tree.map(np.testing.assert_array_equal, run({"params": params}), run(params))


def test_calls_that_cannot_be_recorded():
    config, types = config_of(), ((1, LayerOverrides(window=2)), (1, LayerOverrides()))
    patched = ModelInputs(patch={"residual": lambda x, layer: x})
    for given, inputs, message in (
        (config, patched, "'residual' would break the sum"),
        (config, ModelInputs(cache=config.init_cache(2, 8)), "cache"),
        (config_of(layer_types=types), ModelInputs(), "layer_types"),
    ):
        with pytest.raises(ValueError, match=message):
            record(given, random_params(config), TOKENS, inputs)


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
