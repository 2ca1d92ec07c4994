"""Sums that are exact: the residual stream, logits and scores as terms; single terms by NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from hypothesis import HealthCheck, Phase, given, settings
from interpreted_models import TOKENS, config_of, random_params
from random_models import configs

from attnlab import heads, interpret, models
from attnlab.interpret import decompose_scores, direct_logit_attribution, record, sum_terms
from attnlab.models import FFN, EncoderConfig, ModelInputs, Norm, OutputHead, Relative, Rotary
from attnlab.models.params import param_shapes

KV_DELTAS = "attention=0,1,2 kv=0,@0,@0 ffn=0,0,1 delta=0,1,2"
CHOSEN = {
    "scaled logits": {"output": OutputHead(bias=True, scale=0.7), "norm": Norm(layer_scale=0.5)},
    "a latent that deltas read": {
        "layout": "latent", "kind": "encoder", "sharing": KV_DELTAS, "norm": Norm(position="post"),
        "ffn": FFN(width=10, residual_scale=2.0, output_scale=0.5),
        "attention": models.Attention(output_scale=0.3, layer_scales=(0.5, 1.5, 2.0)),
    },
    "an encoder of other heads": {
        "kind": "encoder_decoder", "positions": Relative(buckets=8, per_layer=True),
        "encoder": EncoderConfig(num_layers=2, num_heads=4, sharing="albert"),
        "attention": models.Attention(position_scale=(0.7, 2.0)),
    },
}  # fmt: skip
"""What `random_models` does not draw, or not every time."""
PRODUCTS = ("tensor_product", "talking_heads", "soft_cap")
"""Layouts whose queries are products of two functions of the input, and extras of heads whose
scores are no sums."""
SOURCE = jnp.asarray([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
IS_TOKEN = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)


def sum_of(scores):
    total = jnp.sum(scores.terms, axis=tuple(range(scores.terms.ndim - 3)))
    return total if scores.bias is None else total + scores.bias


def check_sums(config):
    """In float64."""
    config = dataclasses.replace(config, compute=models.Compute(dtype="float64"))
    has_encoder, has_ffn = config.encoder is not None, "ffn_in" in models.model_values(config)
    inputs, splits = ModelInputs(), {"self": "both"}
    if has_encoder:
        inputs = ModelInputs(source=SOURCE, source_padding_mask=IS_TOKEN)
        splits = {"self": "query", "cross": "key", "encoder": "both"}
    if {config.heads.name, *(extra.name for extra in config.heads.extras)} & {*PRODUCTS}:
        splits = {}

    @jax.jit
    def run(params):
        recording = record(config, params, TOKENS, inputs)
        outputs, captured = recording.outputs, recording.outputs.captured
        chosen = TOKENS[:, ::-1]
        one = sum_terms(direct_logit_attribution(recording, chosen), 2)
        pairs = [
            (sum_terms(direct_logit_attribution(recording)), outputs.logits),
            (one, jnp.take_along_axis(outputs.logits, chosen[..., None], 2)[..., 0]),
            (sum_terms(interpret.decompose_residual(recording)), captured["residual"][-1]),
            (sum_terms(interpret.decompose_residual(recording, layer=2)), captured["residual"][1]),
            (sum_terms(interpret.decompose_input(recording, 1)), captured["attention_in"][1]),
        ]
        if has_ffn:
            beside = dataclasses.replace(inputs, capture=("ffn_in",))
            ffn_in = models.run_model(params, TOKENS, config, beside).captured["ffn_in"][1]
            pairs += [(sum_terms(interpret.decompose_input(recording, 1, "ffn")), ffn_in)]
        if has_encoder:
            encoded = interpret.decompose_final(recording, encoder=True)
            pairs += [(sum_terms(encoded), outputs.encoded)]
        for attention, split in splits.items():
            prefix = "" if attention == "self" else f"{attention}."
            found = sum_of(decompose_scores(recording, 1, 1, attention=attention, split=split))
            # Keys that are masked everywhere are zeros where attention runs.
            kept = IS_TOKEN[:, None] if prefix else True
            expected = captured[f"{prefix}scores"][1, :, 1]
            pairs.append([jnp.where(kept, a, 0) for a in (found, expected)])
        return pairs

    for got, expected in run(random_params(config)):
        assert expected.dtype == np.float64
        assert_close(got, expected, loosen=10)


@pytest.mark.parametrize("name", CHOSEN)
def test_terms_sum_to_the_logits_and_scores(name, x64):
    check_sums(config_of(**CHOSEN[name]))


DRAWS = dict(deadline=None, derandomize=True, database=None, phases=[Phase.generate])
# Other test files register layouts of their own.
LAYOUTS = [n for n, cls in heads.LAYOUTS.items() if cls.__module__.startswith("attnlab.")]


@pytest.mark.parametrize("count", deep([4, 10], 4))
@pytest.mark.parametrize("layout", deep(LAYOUTS, "standard", "wide", "two_stage", "absorbed"))
def test_terms_of_random_models_sum_to_the_logits_and_scores(layout, count, x64):
    """For every layout, sharing plan and position of norms."""
    are_sums = lambda config: not config.output.transform and not config.layer_types

    @settings(max_examples=count, suppress_health_check=list(HealthCheck), **DRAWS)
    @given(configs(layouts=(layout,)).filter(are_sums))
    def run(config):
        check_sums(config)

    run()


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
        names["logits"], logits = interpret.flatten_terms(direct_logit_attribution(recording))
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
SCALED = models.Attention(position_scale=(0.7, 2.0))
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
         "positions": models.Alibi()}, {},
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
    (config_of(**ONE), lambda r: interpret.decompose_input(r, 0, "math:pi"), "unknown .*'math:pi'"),
    (config_of("tensor_product", biases=(), **ONE), scores_of(0), "'tensor_product' is not linear"),
    (config_of(extras=(heads.TalkingHeads(),), **ONE), scores_of(0), "talking_heads"),
    (config_of(extras=(heads.SoftCap(5.0),), **ONE), scores_of(0), "soft_cap"),
    (config_of(**ONE), lambda r: interpret.decompose_residual(r, encoder=True), "one stack"),
    (config_of(**ONE), lambda r: decompose_scores(r, 0, 0, attention="encoder"), "s, no encoder"),
    (config_of(**ONE), lambda r: interpret.decompose_residual(r, layer=1), "layers are 0 to 0"),
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
        ("attention_in", interpret.decompose_input),
        ("ffn_in", lambda r, layer: interpret.decompose_input(r, layer, "ffn")),
        ("cross.attention_in", lambda r, layer: interpret.decompose_input(r, layer, "cross")),
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
def test_parameters_may_be_arrays_of_numpy_or_variables_of_a_module(kind):
    config = config_of(output=OutputHead(kind=kind, bias=True), **ONE)
    params = random_params(config)
    run = lambda params, tokens: direct_logit_attribution(record(config, params, tokens), tokens)
    expected = jax.jit(run)(params, TOKENS)
    for one in (jax.tree.map(np.asarray, params), {"params": params}):
        assert_close(jax.jit(lambda tokens, one=one: run(one, tokens))(TOKENS), expected)


def test_calls_that_cannot_be_recorded():
    types = (1, models.LayerOverrides(window=2)), (1, models.LayerOverrides())
    config = config_of()
    patched = ModelInputs(patch={"residual": lambda x, layer: x})
    for asked, inputs, message in (
        (config, patched, "'residual' would break the sum"),
        (config, ModelInputs(cache=config.init_cache(2, 8)), "cache"),
        (config_of(layer_types=types), ModelInputs(), "layer_types"),
    ):
        with pytest.raises(ValueError, match=message):
            record(asked, random_params(config), TOKENS, inputs)


def test_linearize_at():
    x = jnp.arange(1.0, 4)
    root = lambda x: x / jnp.sqrt(jnp.sum(x * x)) * 2 + 1
    found = interpret.linearize_at(root, x)
    np.testing.assert_allclose(found.linear(jnp.eye(3)[0]), [2 / 14**0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.constant, 1, rtol=1e-6)
    assert interpret.linearize_at(lambda x: x @ jnp.ones((3, 2)), x).constant is None
    padded = interpret.linearize_at(lambda x: jnp.pad(x, 1), x).apply(jnp.ones((4, 3)))
    assert padded.shape == (4, 5)
    for f in (lambda x: x * x, lambda x: jnp.sqrt(x) + x**3, lambda x: 1 / x):
        with pytest.raises(ValueError, match="not linear"):
            interpret.linearize_at(f, x)
    with pytest.raises(ValueError, match="rsqrt"):
        interpret.linearize_at(lambda x: x * jax.lax.rsqrt(jnp.sum(x)), x, hold_norms=False)
