"""Objectives of one answer per row or per position: a class, a value to recall, a vector."""

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.attention.masks import Edges
from attnlab.data.dataset import BYTES, DataSizes, DeviceBatch
from attnlab.training.objectives.objective import (
    Example,
    Inputs,
    Objective,
    accuracy,
    bits,
    squared_error,
    unexplained_variance,
)


def text_class(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """The class `labels` [B] of `tokens` [B, T], -1 after the end of a text.

    >>> import jax
    >>> batch = {"tokens": jnp.array([[5, 6, -1]]), "labels": jnp.array([1])}
    >>> example = text_class(batch, jax.random.key(0))
    >>> example.inputs["tokens"].tolist(), example.inputs["padding_mask"].tolist()
    ([[5, 6, 0]], [[True, True, False]])
    """
    tokens, labels = batch["tokens"], batch["labels"]
    inputs: Inputs = {"tokens": jnp.maximum(tokens, 0), "padding_mask": tokens >= 0}
    valid = batch.get("valid", jnp.ones(labels.shape, bool))
    return Example(inputs, labels, valid.astype(jnp.float32))


def node_class(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """The class `labels` [B, N] of nodes with `features` [B, N, F], each of which attends to the
    nodes that an edge comes from; those that are `valid` [B, N] count."""
    inputs: Inputs = {
        "tokens": batch["features"],
        "mask": Edges(batch["senders"], batch["receivers"]),
    }
    return Example(inputs, batch["labels"], batch["valid"].astype(jnp.float32))


def recall(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """The token `values` [B, T], at every position where it is not -1."""
    values = batch["values"]
    valid = batch.get("valid", jnp.ones(len(values), bool))
    weights = (values >= 0) & valid[:, None]
    return Example({"tokens": batch["tokens"]}, jnp.maximum(values, 0), weights.astype(jnp.float32))


def regression(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """The vectors `answers` [B, T, A] at the positions `scored` [B, T], given vectors `features`
    [B, T, F] in place of tokens."""
    valid = batch.get("valid", jnp.ones(len(batch["scored"]), bool))
    weights = (batch["scored"] & valid[:, None]).astype(jnp.float32)
    return Example({"tokens": batch["features"]}, batch["answers"], weights)


ANSWERS = {
    "text_class": Objective(
        text_class,
        description="the class of a text",
        model_kinds=("encoder", "decoder"),
        metrics=(accuracy("texts"), bits("text")),
        required_arrays=("tokens", "labels"),
        output="classes",
    ),
    "node_class": Objective(
        node_class,
        description="the class of every node",
        model_kinds=("encoder",),
        metrics=(accuracy("nodes"), bits("node")),
        required_arrays=("features", "labels", "senders", "receivers"),
        output="classes",
    ),
    "recall": Objective(
        recall,
        description="the value of every key that is asked for",
        model_kinds=("decoder", "encoder"),
        metrics=(accuracy("values"), bits("value")),
        required_arrays=("tokens", "values"),
    ),
    "endpoint": Objective(
        recall,
        description="the endpoint that is selected",
        model_kinds=("decoder",),
        metrics=(accuracy("cases"), bits("case")),
        required_arrays=("tokens", "values"),
    ),
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
