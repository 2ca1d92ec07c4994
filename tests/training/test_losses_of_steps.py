"""Loss and gradient of one step: auxiliary losses, logits in chunks, parts, packed documents."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep, shape
from small_runs import one_device

from attnlab import heads, models, training
from attnlab.data import DataSizes
from attnlab.data.packing import packed_rows
from attnlab.models import Alibi, Learned, OutputHead, Relative, Rotary
from attnlab.training import OBJECTIVES, init_state, train_step
from attnlab.training.objectives import Example, Objective


def make(task="causal_lm", dtype="float64", **fields):
    """A model with 40 tokens and more, and the objective."""
    objective = OBJECTIVES[task]
    kind = objective.model_kinds[0]
    sizes = dict(
        vocab_size=150, max_len=20, width=8, num_layers=1, heads=heads.Standard(num_heads=2)
    )
    model = models.ModelConfig(
        kind=kind, ffn=models.FFN(width=12), compute=models.Compute(dtype=dtype),
        encoder=models.EncoderConfig() if kind == "encoder_decoder" else None, **sizes | fields,
    )  # fmt: skip
    return model.build(), objective.bind(DataSizes(40))


def step(model, objective, batch, **options):
    """(losses, change of the parameters, the parameters before, which are large) of a step of plain
    gradient descent."""
    sgd = optax.sgd(1.0)

    @jax.jit
    def run(batch):
        state = init_state(model, objective, sgd, batch, 0)
        kind = jnp.result_type(float)
        large = jax.tree.map(lambda a: 3 * a.astype(kind) + 0.1, state.params)
        state = state._replace(params=large)
        end = train_step(model, objective, sgd, state, batch, 7, **options)
        change = jax.tree.map(jnp.subtract, end.params, large)
        return end.window, change, large

    return run(jax.tree.map(jnp.asarray, batch))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("accumulate", deep([1, 2], 2))
def test_auxiliary_losses_by_hand(accumulate):
    """Cross-entropy of the whole batch, plus the mean over the parts of the loss of each part."""
    balanced = heads.Standard(num_heads=4, extras=(heads.MixtureOfHeads(balance=1.0),))
    model, objective = make(heads=balanced, num_layers=2)
    tokens = np.random.default_rng(0).integers(0, 40, (4, 9))

    def losses(params):
        log_probs = jax.nn.log_softmax(model.apply({"params": params}, tokens[:, :-1]).logits)
        nats = -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))
        parts = [model.apply({"params": params}, tokens[i::accumulate, :-1]).losses["head_balance"]
                 for i in range(accumulate)]  # fmt: skip
        return nats, sum(parts) / accumulate

    found, change, params = step(model, objective, {"tokens": tokens}, accumulate=accumulate)
    nats, balance = jax.jit(losses)(params)
    assert_close(found, {"head_balance": balance, "loss": nats})
    gradient = jax.jit(jax.grad(lambda p: sum(losses(p))))(params)
    assert_close(change, jax.tree.map(jnp.negative, gradient), loosen=100)
    assert np.any(change["layers"]["attention"]["router"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("task", "output"),
    [
        ("causal_lm", OutputHead(soft_cap=2.0, scale=0.5)),
        ("masked_lm", OutputHead(kind="own", bias=True, transform="gelu", transform_bias=True)),
        pytest.param("span_corruption", OutputHead(), marks=pytest.mark.slow),
    ],
)
def test_chunks_and_parts_are_the_whole_batch(task, output):
    """Five positions at a time of rows of 13 with padding, in two parts of the batch on which the
    targets fall unevenly."""
    model, objective = make(task, output=output)
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 40, (4, 14)), "valid": rng.random((4, 13)) < 0.7}
    whole, chunked = (
        step(model, objective.smoothed(0.1), batch, loss_tokens=n, accumulate=k)
        for n, k in ((99, 1), (10, 2))
    )
    assert float(whole[0]["loss"]) > 1
    assert_close(chunked, whole, loosen=100)


def test_memory_of_a_step_with_a_large_vocabulary():
    """At most 0.4 of that of whole logits, by the compiler's count; chosen without being asked."""
    model, objective = make(dtype="float32", vocab_size=1 << 16, max_len=256)
    batch = {"tokens": shape(8, 257, dtype="int32")}
    start = functools.partial(init_state, model, objective, optax.sgd(1.0))
    state = jax.eval_shape(start, batch, 0)

    def memory(**options):
        one = functools.partial(train_step, model, objective, optax.sgd(1.0), **options)
        return jax.jit(one).lower(state, batch, 0).compile().memory_analysis().temp_size_in_bytes

    whole = memory(loss_tokens=8 * 256)
    assert whole > 4 * 8 * 256 * (1 << 16)
    assert memory() < 0.4 * whole


LENGTH = 15
SIZES = np.random.default_rng(0).integers(2, LENGTH + 2, 12)
TOKENS = np.random.default_rng(1).integers(0, 40, SIZES.sum())


def padded():
    """A row for each document."""
    rows = np.zeros((len(SIZES), LENGTH + 1), np.int32)
    for row, text in zip(rows, np.split(TOKENS, np.cumsum(SIZES)[:-1]), strict=True):
        row[: len(text)] = text
    return {"tokens": rows, "valid": np.arange(1, LENGTH + 1) < SIZES[:, None]}


def packed():
    count, select = packed_rows({"tokens": TOKENS.astype(np.int32)}, np.cumsum(SIZES), LENGTH)
    assert count < len(SIZES)
    return select(np.arange(count))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("positions", deep([Learned(), Rotary(), Alibi(), Relative()], Rotary()))
def test_packed_documents_give_the_loss_and_gradient_of_padded_ones(positions):
    """Of a step and of an evaluation, per target."""
    model, objective = make(positions=positions)
    alone, together = (step(model, objective, rows) for rows in (padded(), packed()))
    assert_close(together, alone, loosen=1000)
    evaluate = training.Evaluator(model, objective, one_device(), batch_size=4)
    params = jax.tree.map(lambda a: a[None], alone[-1])
    for rows in (padded(), packed()):
        rows = {"valid": np.ones(len(rows["tokens"]), bool)} | rows
        np.testing.assert_allclose(evaluate(params, rows)["loss"], alone[0]["loss"], rtol=1e-6)


def test_targets_of_packed_texts():
    """By hand: none is the first token of a text, none is padding, and no text sees another."""
    tokens, segments = jnp.array([[5, 6, 7, 8, 9, 0, 0], [1, 1, 2, 2, 3, 0, 0]])
    batch = {"tokens": tokens[None], "segments": segments[None]}
    causal = OBJECTIVES["causal_lm"].prepare(batch, jax.random.key(0))
    assert causal.weights.tolist() == [[1, 0, 1, 0, 0, 0]]
    assert causal.inputs["segments"].tolist() == [[1, 1, 2, 2, 3, 0]]
    masked = [OBJECTIVES["masked_lm"].prepare(batch, jax.random.key(i)) for i in range(60)]
    assert jnp.max(jnp.stack([m.weights for m in masked]), axis=0).tolist() == [[1, 0, 1, 0, 0, 0]]
    assert masked[0].inputs["segments"].tolist() == [[1, 2, 2, 3, 0, 0]]
    with pytest.raises(ValueError, match="span_corruption"):
        OBJECTIVES["span_corruption"].prepare(batch, jax.random.key(0))


class Noise:
    """Its prediction for row i is w_i times the noise of a dropout key."""

    def init(self, key, rows):
        return {"params": {"w": jnp.ones(4)}}

    def apply(self, variables, rows, *, deterministic=True, rngs=None):
        noise = jax.random.normal(rngs["dropout"]) if rngs else 1.0
        return types.SimpleNamespace(logits=variables["params"]["w"][rows] * noise, losses={})


def test_parts_of_an_accumulated_step_have_dropout_of_their_own():
    """A step of SGD moves w_i by the noise of the part that row i is in."""
    objective = Objective(
        lambda batch, key, /, sizes=None: Example(batch, batch["rows"], jnp.ones(4)),
        "noise", ("encoder",), (), ("rows",), loss=lambda found, targets, smoothing=0.0: found,
    )  # fmt: skip
    batch, sgd = {"rows": jnp.arange(4)}, optax.sgd(1.0)
    state = init_state(Noise(), objective, sgd, batch, 0)
    for parts in (1, 2, 4):
        moved = train_step(Noise(), objective, sgd, state, batch, 0, accumulate=parts)
        assert len(np.unique(moved.params["w"])) == parts
