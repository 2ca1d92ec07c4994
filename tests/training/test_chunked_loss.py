"""Training without the logits of all tokens is training with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close

from attnlab.data import DataSizes
from attnlab.heads import Standard
from attnlab.models import FFN, Compute, EncoderConfig, ModelConfig, OutputHead
from attnlab.training import OBJECTIVES, init_state, train_step

HEADS = {
    "tied": OutputHead(soft_cap=2.0, scale=0.5),
    "own": OutputHead(kind="own", bias=True, transform="gelu", transform_bias=True),
}


def make(task, output, dtype="float32", **fields):
    objective = OBJECTIVES[task]
    kind = objective.model_kinds[0]
    model = ModelConfig(
        kind=kind, width=8, num_layers=1, heads=Standard(num_heads=2), ffn=FFN(width=12),
        output=output, encoder=EncoderConfig() if kind == "encoder_decoder" else None,
        compute=Compute(dtype=dtype), **{"vocab_size": 150, "max_len": 20, **fields},
    )  # fmt: skip
    return model.build(), objective.bind(DataSizes(40)).smoothed(0.1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("task", "head"),
    [
        ("causal_lm", "tied"),
        ("masked_lm", "own"),
        pytest.param("span_corruption", "tied", marks=pytest.mark.slow),
    ],
)
def test_the_step_is_that_of_whole_logits(task, head):
    """Five positions at a time of rows of 13 with padding, in two parts of the batch on which the
    targets fall unevenly."""
    model, objective = make(task, HEADS[head], "float64")
    rng = np.random.default_rng(0)
    tokens, valid = rng.integers(0, 40, (4, 14)), rng.random((4, 13)) < 0.7
    batch = {"tokens": jnp.asarray(tokens), "valid": jnp.asarray(valid)}

    @jax.jit
    def changes(batch):
        state = init_state(model, objective, optax.sgd(1.0), batch, 0)
        large = jax.tree.map(lambda a: 3 * a.astype(jnp.float64) + 0.1, state.params)
        step = functools.partial(
            train_step, model, objective, optax.sgd(1.0), state._replace(params=large), batch, 7
        )
        ends = [step(loss_tokens=n, accumulate=k) for n, k in ((99, 1), (10, 2))]
        return [(e.window_loss, jax.tree.map(jnp.subtract, e.params, large)) for e in ends]

    whole, chunked = changes(batch)
    assert float(whole[0]) > 1
    assert_close(chunked, whole, loosen=100)


def test_memory_of_a_step_with_a_large_vocabulary():
    """At most 0.4 of that of whole logits, by the compiler's count; chosen without being asked."""
    model, objective = make("causal_lm", OutputHead(), vocab_size=1 << 16, max_len=256)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 257), jnp.int32)}
    zeros = {"tokens": jnp.zeros((8, 257), jnp.int32)}
    state = jax.eval_shape(lambda: init_state(model, objective, optax.sgd(1.0), zeros, 0))

    def memory(**options):
        step = functools.partial(train_step, model, objective, optax.sgd(1.0), **options)
        return jax.jit(step).lower(state, batch, 0).compile().memory_analysis().temp_size_in_bytes

    whole = memory(loss_tokens=8 * 256)
    assert whole > 4 * 8 * 256 * (1 << 16)
    assert memory() < 0.4 * whole
