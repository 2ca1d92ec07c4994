"""Approximate conversion: the stated error is the true one, and what is exact is found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversions import in_float64, logits, random_model, random_params

from attnlab.heads import Gate, HeadNorm, Latent, Sink, Standard, Wide
from attnlab.models import Attention, Embedding, Images, ModelConfig, OutputHead, Rotary
from attnlab.transforms import approximate, approximate_model

MHA = Standard(width=16, num_heads=4)
GROUPED = Standard(width=16, num_heads=4, num_kv_heads=2)
LATENT = Latent(width=16, num_heads=4, latent_dim=6, rotary_dim=4, latent_norm=False)


def texts(seed=0, rank=16):
    """[6, 12, 16]: correlated, of this rank."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(6, 12, rank)) @ rng.normal(size=(rank, 16))


CASES = {
    "grouped": (MHA, dict(num_kv_heads=2)),
    "multi-query": (MHA, dict(num_kv_heads=1, scale=0.3)),
    "wide": (Wide(width=16, num_heads=4), dict(num_kv_heads=2)),
    "biases": (dataclasses.replace(MHA, biases=("q", "k", "v", "o")), dict(num_kv_heads=2)),
    "options": (
        dataclasses.replace(MHA, qk_norm=HeadNorm(), extras=(Gate("element"), Sink())),
        dict(num_kv_heads=2),
    ),
    "tied": (dataclasses.replace(MHA, tie="kv"), dict(num_kv_heads=2)),
    "fewer tied": (dataclasses.replace(MHA, tie="kv"), dict(num_heads=2, head_dim=4, value_dim=4)),
    "fewer heads": (MHA, dict(num_heads=3, head_dim=4)),
    "fewer of both": (GROUPED, dict(num_heads=2, num_kv_heads=1, head_dim=4)),
    "latent": (GROUPED, LATENT),
    "latent of queries": (MHA, dataclasses.replace(LATENT, query_latent_dim=9)),
}


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_stated_error_is_measured_and_least_squares_is_never_worse(name, rotary):
    layout, change = CASES[name]
    target = change if isinstance(change, Latent) else dataclasses.replace(layout, **change)
    params = {n: a.astype(np.float32) for n, a in random_params(layout).items()}
    call = dict(rotary=rotary, is_causal=name != "wide")
    mask = np.tri(12, dtype=bool) | (not call["is_causal"])
    for x in (texts(), texts(1)[:1]):  # many tokens, and fewer than W_O has rows
        found = [approximate(params, layout, target, x, fit=fit, **call) for fit in (False, True)]
        expected = in_float64(params, (x, x, x), mask, layout, rotary)
        for one in found:
            assert {a.dtype for a in one.params.values()} == {np.dtype(np.float32)}
            got = in_float64(one.params, (x, x, x), mask, target, rotary)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            np.testing.assert_allclose(one.error, error, rtol=1e-6)
        assert found[1].error < found[0].error < 3 or found[1].method == "exact"
        assert found[1].method.endswith("W_O fitted") or found[1].method == "exact"


def rotated_keys(params, size):
    """Keys of each `size` heads are one key, each pair of it times a complex factor of the head."""
    rng, k = np.random.default_rng(2), params["k"][..., :2] + 1j * params["k"][..., 2:]
    factors = rng.normal(size=k.shape[1:]) + 1j * rng.normal(size=k.shape[1:])
    k = np.repeat(k[:, ::size], size, axis=1) * factors
    return params | {"k": np.concatenate([k.real, k.imag], axis=-1)}


ONE = dataclasses.replace(MHA, num_kv_heads=1)
TWO = Standard(width=16, num_heads=2, num_kv_heads=1)
EVEN_PAIRS = random_params(TWO)
EVEN_PAIRS["k"] = EVEN_PAIRS["k"] * (np.arange(8) % 2 == 0)
PARAMS = random_params(MHA)
SHARED_VALUES = PARAMS | {"v": np.repeat(PARAMS["v"][:, ::2], 2, 1)}
KNOWN = {
    # What `convert` finds.
    "full latent": (PARAMS, MHA, dataclasses.replace(LATENT, latent_dim=32), {}, "exact"),
    # Inputs of rank 3 need keys and values of width 3.
    "few directions": (PARAMS, MHA, ONE, dict(x=texts(rank=3)), "low rank"),
    # Keys that differ by a complex factor are one key under rotary positions.
    "rotated keys": (
        rotated_keys(SHARED_VALUES, 2),
        MHA, GROUPED, dict(rotary=True), "low rank",
    ),
    # The pairs whose rates the target has keep their positions.
    "half of the pairs": (
        EVEN_PAIRS, TWO,
        dataclasses.replace(LATENT, num_heads=2, latent_dim=8), dict(rotary=True), "svd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_target_can_represent_is_recovered(name):
    params, layout, target, options, method = KNOWN[name]
    x = options.get("x", texts())
    found = approximate(params, layout, target, x, rotary=options.get("rotary", False))
    assert found.method.removesuffix(" and W_O fitted") == method
    assert found.error < 1e-9


def test_inputs_that_are_counted_four_times_change_nothing():
    """Not even the sizes of the weights, on which further training depends."""
    x = texts()
    for target in (GROUPED, LATENT):
        one, four = (approximate(PARAMS, MHA, target, np.tile(x, (n, 1, 1))) for n in (1, 4))
        for name, a in one.params.items():
            np.testing.assert_allclose(np.abs(four.params[name]), np.abs(a), rtol=1e-6, atol=1e-9)


def test_without_inputs_or_an_output_projection_it_is_the_mean_of_the_group():
    alone = [dataclasses.replace(one, output_projection=False) for one in (MHA, GROUPED)]
    without = {name: PARAMS[name] for name in "qkv"}
    for found in (approximate(PARAMS, MHA, GROUPED), approximate(without, *alone, texts())):
        for name in "kv":
            mean = (PARAMS[name][:, ::2] + PARAMS[name][:, 1::2]) / 2
            np.testing.assert_allclose(found.params[name], mean, rtol=1e-12)
        np.testing.assert_array_equal(found.params["q"], PARAMS["q"])
        assert found.method == "mean"


def test_the_heads_that_write_most_stay():
    params = random_params(MHA)
    params["o"][2] *= 1e-3
    found = approximate(params, MHA, dataclasses.replace(MHA, num_heads=3, head_dim=4), texts())
    np.testing.assert_allclose(found.params["k"], params["k"][:, [0, 1, 3]])
    assert found.error < 1e-2


MODEL = ModelConfig(
    vocab_size=11, max_len=16, width=16, num_layers=2, heads=Standard(num_heads=4),
    positions=Rotary(),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (9, 16)))


@pytest.mark.parametrize("sharing", ["albert", pytest.param("separate", marks=pytest.mark.slow)])
def test_a_whole_model(sharing):
    """Errors of each group, and the loss as one computes it; exactly the same where that exists."""
    config, tokens = dataclasses.replace(MODEL, sharing=sharing), TOKENS
    params = config.build().init(jax.random.key(0), tokens)["params"]
    fitted, mean, same = (
        approximate_model(config, params, heads=heads, tokens=tokens, fit=fit)
        for heads, fit in (
            (Standard(num_heads=4, num_kv_heads=1), True),
            (Standard(num_heads=4, num_kv_heads=1), False),
            (Standard(num_heads=4, value_dim=6), True),
        )
    )
    assert len(fitted.approximations) == config.plan.num_groups["attention"]
    assert fitted.approximations[0][1] < mean.approximations[0][1]
    assert [method for method, _ in same.approximations] == ["exact"] * len(same.approximations)
    assert same.logits_error < 1e-5
    both = (config, params), (fitted.config, fitted.params)
    for model, loss in zip(both, fitted.losses, strict=True):
        probs = np.asarray(jax.nn.softmax(logits(*model, tokens)))
        chosen = np.take_along_axis(probs[:, :-1], np.asarray(tokens)[:, 1:, None], -1)
        np.testing.assert_allclose(loss, -np.log(chosen).mean(), rtol=1e-5)


def test_numbers_that_scale_the_scores_of_layers_count():
    """As if they were in the queries."""
    config = dataclasses.replace(MODEL, attention=Attention(layer_scales=(4.0, 4.0)))
    params = random_model(config, scale=0.5)
    layers = params["layers"]
    folded = layers["attention"] | {"q": 4 * layers["attention"]["q"]}
    folded = params | {"layers": layers | {"attention": folded}}
    found, expected = (
        approximate_model(*model, heads=Standard(num_heads=4, num_kv_heads=1), tokens=TOKENS)
        for model in ((config, params), (MODEL, folded))
    )
    assert found.config.attention == config.attention
    for one, other in zip(found.approximations, expected.approximations, strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], rtol=1e-4)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_a_model_without_an_lm_head(kind):
    """Random tokens, or random images, show how far its hidden states differ."""
    images = Images(height=6, width=4, channels=3, patch_height=2, patch_width=4)
    sizes = dict(vocab_size=images.num_features, embedding=Embedding(images=images), max_len=7)
    config = ModelConfig(
        kind="encoder", width=16, num_layers=2, heads=Standard(num_heads=4),
        output=OutputHead(kind="none"), **(sizes if kind == "images" else {}),
    )  # fmt: skip
    params, fewer = random_model(config, scale=0.5), Standard(num_heads=4, num_kv_heads=1)
    found = approximate_model(config, params, heads=fewer)
    assert 1e-3 < found.logits_error < 3
    assert found.losses is None


REFUSED = [
    (Standard(width=16, num_heads=8), {}, "has more heads"),
    (Standard(width=16, num_heads=4, num_kv_heads=2, head_dim=2), {}, "cannot become"),
    (dataclasses.replace(LATENT, latent_norm=True), {}, "latent_norm=False"),
    (dataclasses.replace(LATENT, rotary_dim=8), {}, "divides head_dim 4"),
    (LATENT, dict(rotary=Rotary(fraction=0.5)), "2 of the 4 numbers"),
    (MHA, dict(inputs=np.ones((3, 16))), r"must be \[batch, length, 16\]"),
]


@pytest.mark.parametrize(("target", "options", "message"), REFUSED)
def test_what_cannot_be_approximated_says_why(target, options, message):
    with pytest.raises(ValueError, match=message):
        approximate(PARAMS, MHA, target, **options)


@pytest.mark.parametrize(
    "fields", [dict(window=2), dict(layer_scales=(1.0, 0.5)), dict(position_scale=(0.5, 8))]
)
def test_layers_that_attend_in_their_own_way_are_refused(fields):
    config = ModelConfig(width=16, num_layers=2, attention=Attention(**fields))
    with pytest.raises(ValueError, match="one layer type"):
        approximate_model(config, random_model(config), heads=Standard(num_heads=4))
