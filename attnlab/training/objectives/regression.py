"""Objective `regression`: vectors in, vectors out."""

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.data.dataset import BYTES, DataSizes, DeviceBatch
from attnlab.training.objectives.objective import (
    Example,
    Objective,
    squared_error,
    unexplained_variance,
)


def regression(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """The vectors `answers` [B, T, A] at the positions `scored` [B, T], given vectors `features`
    [B, T, F] in place of tokens."""
    valid = batch.get("valid", jnp.ones(len(batch["scored"]), bool))
    weights = (batch["scored"] & valid[:, None]).astype(jnp.float32)
    return Example({"tokens": batch["features"]}, batch["answers"], weights)


REGRESSION = {
    "regression": Objective(
        regression,
        description="the vector that is asked for",
        model_kinds=("encoder", "decoder"),
        metrics=(unexplained_variance(),),
        required_arrays=("features", "answers", "scored"),
        output="classes",
        loss=squared_error,
    ),
}
