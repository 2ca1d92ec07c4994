"""Questions with an answer a row or a place: the class of a text, of a node, a value to recall."""

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.attention.masks import Edges
from attnlab.training.sources.source import BYTES, Batch, Sizes
from attnlab.training.tasks.task import Example, Task, accuracy, bits


def text_class(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """The class `labels` [B] of `tokens` [B, T], -1 behind the end of a text.

    >>> import jax
    >>> batch = {"tokens": jnp.array([[5, 6, -1]]), "labels": jnp.array([1])}
    >>> example = text_class(batch, jax.random.key(0))
    >>> example.inputs["tokens"].tolist(), example.inputs["padding_mask"].tolist()
    ([[5, 6, 0]], [[True, True, False]])
    """
    tokens, labels = batch["tokens"], batch["labels"]
    inputs = {"tokens": jnp.maximum(tokens, 0), "padding_mask": tokens >= 0}
    valid = batch.get("valid", jnp.ones(labels.shape, bool))
    return Example(inputs, labels, valid.astype(jnp.float32))


def node_class(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """The class `labels` [B, N] of nodes with `features` [B, N, F], each of which sees the nodes
    that an edge comes from; those count that are `valid` [B, N]."""
    inputs = {
        "tokens": batch["features"],
        "mask": Edges(batch["senders"], batch["receivers"]),
    }
    return Example(inputs, batch["labels"], batch["valid"].astype(jnp.float32))


def recall(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """The token that `values` [B, T] names, at every place where it is not -1."""
    values = batch["values"]
    valid = batch.get("valid", jnp.ones(len(values), bool))
    weights = (values >= 0) & valid[:, None]
    return Example({"tokens": batch["tokens"]}, jnp.maximum(values, 0), weights.astype(jnp.float32))


ROWS = {
    "text_class": Task(
        text_class,
        asks="the class of a text",
        kinds=("encoder", "decoder"),
        metrics=(accuracy("texts"), bits("text")),
        needs=("tokens", "labels"),
        reads="classes",
    ),
    "node_class": Task(
        node_class,
        asks="the class of every node",
        kinds=("encoder",),
        metrics=(accuracy("nodes"), bits("node")),
        needs=("features", "labels", "senders", "receivers"),
        reads="classes",
    ),
    "recall": Task(
        recall,
        asks="the value of every key that is asked for",
        kinds=("decoder", "encoder"),
        metrics=(accuracy("values"), bits("value")),
        needs=("tokens", "values"),
    ),
    "endpoint": Task(
        recall,
        asks="the endpoint that is selected",
        kinds=("decoder",),
        metrics=(accuracy("cases"), bits("case")),
        needs=("tokens", "values"),
    ),
}
