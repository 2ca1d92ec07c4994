"""What a model promises: causality, positions, dropout, looking, one program for any depth."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, diagonal

from attnlab import (
    LAYOUTS,
    FeedForward,
    HeadSpec,
    ModelConfig,
    MultiHeadAttention,
    Plan,
    layer_norm,
    masks,
    multi_head_attention,
    plan_names,
    training,
)
from attnlab.model.block import DROPOUT_PLACES
from attnlab.model.outer import POSITIONS
from attnlab.sharing.named_plans import parse_plan

SMALL = ModelConfig(vocab_size=19, max_len=9, width=12, num_layers=3, num_heads=3, ffn_width=10)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 19, (2, 7)))


def make(config=SMALL, tokens=TOKENS):
    """A model's jitted apply and large random weights."""
    model = config.build()
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), shapes)

    def run(params, tokens, seed=None, **options):
        if seed is None:
            return model.apply({"params": params}, tokens, **options)
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, tokens, deterministic=False, rngs=rngs, **options)

    return jax.jit(run, static_argnames="return_probs"), params


@pytest.mark.parametrize("positions", [n for n, p in POSITIONS.items() if not p.skips_padding])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_who_sees_whom(kind, positions):
    """Changing token 4 moves the logits before it in an encoder alone."""
    run, params = make(dataclasses.replace(SMALL, kind=kind, positions=positions))
    moved = np.abs(run(params, TOKENS) - run(params, TOKENS.at[:, 4].add(1) % 19)).max((0, 2)) > 0
    assert moved[4:].all()
    assert moved[:4].all() == (kind == "encoder")
    assert moved[:4].any() == (kind == "encoder")


def test_without_positions_an_encoder_cannot_tell_the_order():
    run, params = make(dataclasses.replace(SMALL, kind="encoder", positions="none"))
    order = np.random.default_rng(2).permutation(7)
    assert_close(run(params, TOKENS[:, order]), run(params, TOKENS)[:, order], loosen=10)


SOME = {"standard", "wide", "narrow", "latent", "bilinear"}


@pytest.mark.parametrize(("layout", "plan"), diagonal(LAYOUTS, plan_names(), of=SOME))
def test_sharing_equals_copied_weights(layout, plan):
    config = dataclasses.replace(SMALL, layout=layout, plan=plan, remat=plan == "albert")
    run, params = make(config)
    alone = dataclasses.replace(config, plan="separate")
    users = config.layer_plan
    layers = params["layers"]
    copied = params | {
        "layers": {p: jax.tree.map(lambda a, p=p: a[np.array(users[p])], layers[p]) for p in users}
    }
    assert_close(make(alone)[0](copied, TOKENS), run(params, TOKENS))


def test_a_dtype_is_a_name_or_the_thing_itself():
    given = (jnp.bfloat16, np.dtype("float32"), "float64")
    assert [ModelConfig(dtype=d).dtype for d in given] == ["bfloat16", "float32", "float64"]
    with pytest.raises(ValueError, match=r"unknown dtype 'int32'.*known: float32, bfloat16"):
        ModelConfig(dtype=jnp.int32)


@pytest.mark.parametrize(
    ("plan", "dtype"), diagonal(["sandwich", "cla:2"], ["float32", "bfloat16"])
)
def test_looking_changes_no_bit(plan, dtype, optimized):
    run, params = make(dataclasses.replace(SMALL, plan=plan, dtype=dtype))
    logits, probs = run(params, TOKENS, return_probs=True)
    np.testing.assert_array_equal(logits, run(params, TOKENS))
    assert logits.dtype == jnp.float32
    assert probs.shape == (3, 2, 3, 7, 7)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("plan", ["separate", "cla:2"])
def test_rotary_positions_count_from_anywhere(plan):
    """Also for keys that a layer reads from the one before."""
    config = dataclasses.replace(SMALL, positions="rotary", plan=plan)
    run, params = make(config)
    shifted = run(params, TOKENS, positions=jnp.arange(7) + 5)
    assert_close(shifted, run(params, TOKENS), loosen=5)
    apart = run(params, TOKENS, positions=jnp.arange(7) * 2)
    assert np.abs(apart - shifted).max() > 1e-2


def test_gates_act_per_application_on_shared_weights():
    run, params = make(dataclasses.replace(SMALL, plan="albert"))
    gate = jnp.ones((3, 3))
    assert_close(run(params, TOKENS, head_gate=gate), run(params, TOKENS))
    first, last = (run(params, TOKENS, head_gate=gate.at[i, 1].set(0)) for i in (0, 2))
    assert np.abs(first - last).max() > 1e-3


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate", "ffn_dropout_rate"])
def test_dropout(rate):
    run, params = make(dataclasses.replace(SMALL, **{rate: 0.5}))
    same, other = run(params, TOKENS, 0), run(params, TOKENS, 1)
    np.testing.assert_array_equal(same, run(params, TOKENS, 0))
    assert np.abs(same - other).max() > 1e-3
    assert np.abs(same - run(params, TOKENS)).max() > 1e-3


@pytest.mark.parametrize("place", DROPOUT_PLACES)
def test_each_place_of_dropout_acts_alone(place):
    run, params = make(dataclasses.replace(SMALL, dropout_rate=0.5, dropout_places=(place,)))
    plain = run(params, TOKENS)
    assert np.abs(run(params, TOKENS, 0) - plain).max() > 1e-3
    run, _ = make(dataclasses.replace(SMALL, dropout_rate=0.5, dropout_places=()))
    assert_close(run(params, TOKENS, 0), plain)


def test_embeddings_can_have_a_rate_of_their_own():
    run, params = make(dataclasses.replace(SMALL, dropout_rate=0.5, embedding_dropout_rate=0.0))
    only, _ = make(
        dataclasses.replace(SMALL, dropout_rate=0.5, dropout_places=("attention", "ffn"))
    )
    np.testing.assert_array_equal(run(params, TOKENS, 0), only(params, TOKENS, 0))
    alone, _ = make(dataclasses.replace(SMALL, embedding_dropout_rate=0.5))
    assert np.abs(alone(params, TOKENS, 0) - alone(params, TOKENS)).max() > 1e-3


def test_padding_mask_and_token_types():
    run, params = make(
        dataclasses.replace(SMALL, kind="encoder", token_types=2, embedding_norm=True)
    )
    mask = masks.padding(jnp.array([7, 4]), 7)
    got = run(params, TOKENS, mask=mask)
    changed = run(params, TOKENS.at[1, 5].add(1) % 19, mask=mask)
    np.testing.assert_array_equal(got[1, :4], changed[1, :4])
    types = jnp.zeros_like(TOKENS)
    np.testing.assert_array_equal(run(params, TOKENS), run(params, TOKENS, token_types=types))
    assert np.abs(run(params, TOKENS) - run(params, TOKENS, token_types=types + 1)).max() > 1e-3


def test_own_readout_with_bias():
    run, params = make(dataclasses.replace(SMALL, readout="own", readout_bias=True))
    more = params | {"readout_bias": params["readout_bias"] + 1}
    assert_close(run(more, TOKENS), run(params, TOKENS) + 1)


def lines_of_the_step(plan, depth):

    model = dataclasses.replace(SMALL, plan=plan, num_layers=depth).build()
    config = training.TrainConfig(length=7, batch_size=2)
    optimizer, task = training.make_optimizer(config).transform, objectives.OBJECTIVES["causal_lm"]
    batch = {"tokens": jax.ShapeDtypeStruct((2, 8), jnp.int32)}
    state = jax.eval_shape(lambda: training.init_state(model, task, optimizer, batch, 0))
    step = jax.jit(lambda s, b: training.train_step(model, task, optimizer, s, b, 0))
    return step.lower(state, batch).as_text().count("\n")


@pytest.mark.parametrize("plan", deep(plan_names(), "separate", "sandwich"))
def test_the_step_is_as_long_at_any_depth(plan):
    assert lines_of_the_step(plan, 2) == lines_of_the_step(plan, 12) == lines_of_the_step(plan, 48)


def test_modules_are_shells():
    spec = HeadSpec("standard", width=12, num_heads=3, biases="qkvo")
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 5, 12)), jnp.float32)
    module = MultiHeadAttention(spec, dropout_rate=0.5)
    params = module.init(jax.random.key(0), x)["params"]
    got = module.apply({"params": params}, x, is_causal=True)
    assert_close(got, multi_head_attention(params["heads"], x, spec=spec, is_causal=True))
    with pytest.raises(Exception, match="dropout"):
        module.apply({"params": params}, x, deterministic=False)
    module = FeedForward(ffn_width=7, dropout_rate=0.5)
    params = module.init(jax.random.key(0), x)["params"]
    assert params["ffn"]["up"].shape == (12, 7)
    assert np.isfinite(module.apply({"params": params}, x)).all()


def test_standard_equals_flax_attention():
    """Flax's own module with the same weights: the layout is what everyone calls attention."""
    spec = HeadSpec("standard", width=12, num_heads=3, biases="qkvo")
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 5, 12)), jnp.float32)
    flax = nn.MultiHeadDotProductAttention(num_heads=3)
    params = flax.init(jax.random.key(1), x)["params"]
    rng = np.random.default_rng(4)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), params)
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    w = {n: params[f]["kernel"] for n, f in names.items()}
    w |= {f"{n}_bias": params[f]["bias"] for n, f in names.items()}
    expected = flax.apply({"params": params}, x, mask=masks.causal(5)[None, None])
    assert_close(multi_head_attention(w, x, spec=spec, is_causal=True), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(plan="alber"), "unknown plan 'alber': did you mean 'albert'"),
        (dict(layout="narow"), "did you mean 'narrow'"),
        (dict(kind="transformer"), "known: decoder, encoder"),
        (dict(activation="swish"), "unknown activation"),
        (dict(norm="between"), "known: pre, post"),
        (dict(positions="rotery"), "did you mean 'rotary'"),
        (dict(positions="rotary", head_dim=3), "head_dim 3 must be even"),
        (dict(dtype="float16x"), "unknown dtype"),
        (dict(implementation="flash"), "unknown implementation"),
        (dict(num_layers=0), "num_layers must be a whole number of at least 1"),
        (dict(ffn_width=-4), "ffn_width must be"),
        (dict(dropout_rate=1.0), r"in \[0, 1\)"),
        (dict(init_std=0.0), "init_std must be positive"),
        (dict(width=13), "width 13 is not divisible by 3 heads"),
        (dict(plan=parse_plan("albert", 2)), "the plan has 2 layers, num_layers is 3"),
        (dict(init_residual="deep"), "unknown init_residual"),
        (dict(token_types=-1), "token_types must be"),
        (dict(norm_kind="rms"), "an RMS norm has no bias; set norm_bias=False"),
        (dict(positions="learned_unpadded"), "set pad_token and kind='encoder'"),
        (dict(positions="relative", relative_buckets=6), "must be a multiple of 4"),
        (dict(embedding_width=5), "set readout_transform='gelu' or readout='own'"),
        (dict(readout="none", readout_bias=True), "readout='none' has no logits"),
        (dict(readout_transform="gated_gelu"), "unknown readout_transform"),
        (dict(pooled_classes=2), "set pooler='first'"),
        (dict(encoder_layers=2), "are for kind='encoder_decoder', this is a decoder"),
        (dict(plan=Plan(attention=(0,) * 3, cross=(0,) * 3)), "nothing to attend to but itself"),
        (
            dict(kind="encoder_decoder", encoder_layers=4, share_encoder=True),
            "the encoder uses 4 slots of 'attention', the decoder has 3",
        ),
        (dict(kind="encoder_decoder", pooler="first"), "has no pooler"),
        (dict(embedding_dropout_rate=1.0), "embedding_dropout_rate must be in"),
        (dict(dropout_places=("embedding",)), "did you mean 'embeddings'"),
    ],
)
def test_impossible_configs_say_what_to_change(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **fields)


TEXT_TO_TEXT = dataclasses.replace(
    SMALL,
    kind="encoder_decoder",
    encoder_layers=2,
    positions="relative",
    relative_buckets=8,
    relative_distance=6,
    norm_kind="rms",
    norm_bias=False,
    activation="gated_gelu",
)
SOURCE = jnp.asarray(np.random.default_rng(5).integers(0, 19, (2, 5)))


def make_both(config=TEXT_TO_TEXT):
    model = config.build()
    shapes = jax.eval_shape(model.init, jax.random.key(0), SOURCE, TOKENS)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), shapes)
    run = lambda params, *texts, **options: model.apply({"params": params}, *texts, **options)
    return jax.jit(run, static_argnames=("return_probs", "return_outputs")), params


def test_who_sees_whom_in_text_to_text():
    """A token of the source moves all logits, one of the target those from it on; padding none."""
    run, params = make_both()
    plain = run(params, SOURCE, TOKENS)
    moved = np.abs(plain - run(params, SOURCE.at[:, 3].add(1) % 19, TOKENS)).max((0, 2)) > 0
    assert moved.all()
    moved = np.abs(plain - run(params, SOURCE, TOKENS.at[:, 4].add(1) % 19)).max((0, 2)) > 0
    assert moved[4:].all()
    assert not moved[:4].any()
    real = jnp.asarray(np.arange(5) < 3)[None].repeat(2, 0)
    short = run(params, SOURCE[:, :3], TOKENS)
    assert_close(run(params, SOURCE, TOKENS, padding_mask=real), short)


def test_text_to_text_in_pieces():
    """The encoder once, then the decoder token by token, is the whole at once."""
    run, params = make_both()
    whole = run(params, SOURCE, TOKENS, return_outputs=True, return_probs=True)
    assert whole.hidden.shape == (4, 2, 7, 12)
    assert whole.encoder_hidden.shape == (3, 2, 5, 12)
    assert [a.shape[0] for a in (whole.probs, whole.cross_probs, whole.encoder_probs)] == [3, 3, 2]
    cache, logits = TEXT_TO_TEXT.empty_cache(2, 7), []
    for start, end in ((0, 3), (3, 4), (4, 7)):
        piece = TOKENS[:, start:end]
        seen, cache = run(params, SOURCE, piece, encoded=whole.encoded, cache=cache)
        logits.append(seen)
    assert_close(jnp.concatenate(logits, 1), whole.logits, loosen=5)


def test_a_shared_encoder_equals_copied_weights():
    config = dataclasses.replace(TEXT_TO_TEXT, encoder_layers=None, share_encoder=True)
    run, params = make_both(config)
    apart = dataclasses.replace(config, share_encoder=False)
    copied = params | {
        "encoder_layers": {p: params["layers"][p] for p in ("attention", "ffn")},
        "encoder_final_norm": params["final_norm"],
        "encoder_relative_bias": params["relative_bias"],
    }
    alone, own = make_both(apart)
    assert jax.tree.structure(own) == jax.tree.structure(copied)
    assert_close(alone(copied, SOURCE, TOKENS), run(params, SOURCE, TOKENS))


def test_outputs_are_the_steps_of_the_model():
    config = dataclasses.replace(
        SMALL, kind="encoder", pooler="first", pooled_classes=2, readout="none", token_types=2
    )
    model = config.build()
    params = make(config)[1]
    seen = model.apply({"params": params}, TOKENS, return_outputs=True)
    assert seen.logits is None
    assert_close(model.apply({"params": params}, TOKENS), seen.last)
    assert_close(layer_norm(params["final_norm"], seen.hidden[-1]), seen.last)
    pooled = jnp.tanh(seen.last[:, 0] @ params["pooler"] + params["pooler_bias"])
    assert_close(seen.pooled, pooled)
    assert_close(seen.classes, pooled @ params["classes"] + params["classes_bias"])
    words = params["embedding"][TOKENS] + params["positions"][:7] + params["token_types"][0]
    assert_close(seen.hidden[0], words)


def test_given_positions_are_honoured():
    for positions in ("learned", "rotary", "relative"):
        run, params = make(dataclasses.replace(SMALL, positions=positions))
        same = run(params, TOKENS, positions=jnp.arange(7))
        assert_close(run(params, TOKENS), same)
        far = run(
            params, TOKENS, positions=jnp.arange(7)[None].repeat(2, 0) * jnp.array([[1], [0]])
        )
        assert_close(far[0], same[0], loosen=5)
        assert np.abs(far[1] - same[1]).max() > 1e-3


def test_positions_skip_padding():
    """A left-padded text is the text, when padding is hidden too."""
    config = dataclasses.replace(SMALL, kind="encoder", positions="learned_unpadded", pad_token=1)
    run, params = make(config)
    text = TOKENS[:, :4].at[:].max(2)
    padded = jnp.concatenate([jnp.ones((2, 2), text.dtype), text], axis=1)
    got = run(params, padded, padding_mask=padded != 1)
    assert_close(got[:, 2:], run(params, text))


def test_too_long_an_input():
    with pytest.raises(ValueError, match="10 tokens are longer than max_len 9; raise max_len"):
        make(tokens=jnp.zeros((1, 10), jnp.int32))
