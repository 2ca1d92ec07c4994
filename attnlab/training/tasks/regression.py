"""Questions whose answers are numbers: vectors in, vectors out."""

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.training.sources.source import BYTES, Batch, Sizes
from attnlab.training.tasks.task import Example, Task, squared_error, unexplained


def regression(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """The vector `answers` [B, T, A] at every place that is `asked` [B, T] for, of vectors
    `features` [B, T, F] that stand in the place of words."""
    asked = batch["asked"] & batch.get("valid", jnp.ones(len(batch["asked"]), bool))[:, None]
    return Example({"tokens": batch["features"]}, batch["answers"], asked.astype(jnp.float32))


ROWS = {
    "regression": Task(
        regression,
        asks="the vector that is asked for",
        kinds=("encoder", "decoder"),
        metrics=(unexplained(),),
        needs=("features", "answers", "asked"),
        reads="classes",
        loss=squared_error,
    ),
}
