"""What the heads of a trained model look at, on one text that is held out."""

import dataclasses
from typing import Any

import jax
import numpy as np

from attnlab.model.config import ModelConfig
from attnlab.training import shard
from attnlab.training.sources import Source
from attnlab.training.tasks import Task, written
from attnlab.training.tasks.task import Example

FILE = "maps.npz"
LONGEST = 512
"""Tokens of a text whose map is kept."""
TEXTS = ("source", "tokens")
"""The inputs of a model that are tokens, each as long as it likes up to `max_len`."""


def shown_row(task: Task, source: Source) -> tuple[Example, dict[str, int]]:
    """The row in the middle of those that are held out, as the task presents it, and where each of
    its texts ends: what stands behind is filling."""
    rows = source.heldout(3)
    middle = len(jax.tree.leaves(rows)[0]) // 2
    one = jax.tree.map(lambda a: a[middle : middle + 1], rows)
    example = jax.jit(task.prepare)(one, jax.random.key(0))
    inputs = example.inputs
    real = {name: np.ones(inputs[name].shape[1], bool) for name in TEXTS if name in inputs}
    if "padding_mask" in inputs:  # of the text that is looked at
        real["source" if "source" in inputs else "tokens"] = np.asarray(inputs["padding_mask"][0])
    if "source" in inputs:
        real["tokens"] = np.asarray(example.weights[0] > 0)
    return example, {n: int(np.flatnonzero(a)[-1]) + 1 for n, a in real.items() if np.any(a)}


def of_fitted(
    config: ModelConfig, task: Task, fitted: Any, source: Source, trains: Any
) -> dict[str, Any]:
    """The attention probabilities [L, N, T, S] of the first seed on one row that is held out.

    Of a decoder with an encoder: to the source. `tokens` is what the rows stand for, `source`,
    where it is another text, what the columns stand for; `written_tokens`, `written_source` the
    same as a person reads them.
    """
    example, ends = shown_row(task, source)
    params = jax.tree.map(lambda a: a[0], shard.gather(fitted.state.params))
    # Fused kernels keep no probabilities: whatever trained, the dense path shows them.
    model = dataclasses.replace(config, implementation="dense").build()

    @jax.jit
    def look(params, inputs):
        probs = model.apply({"params": params}, **inputs, return_probs=True)[1]
        if config.cross == "merged":  # behind the keys of its own text
            return probs[0][:, 0, ..., inputs["tokens"].shape[1] :]
        return (probs[1] if "source" in inputs else probs)[:, 0]

    probs = look(params, example.inputs)
    texts = {name: example.inputs[name][0, :end] for name, end in ends.items()}
    probs = probs[:, :, : ends["tokens"], : ends.get("source", ends["tokens"])]
    return {
        "probs": np.asarray(probs, np.float16),
        **{name: np.asarray(a, np.int32) for name, a in texts.items()},
        **{f"written_{name}": written(task, source, a.tolist()) for name, a in texts.items()},
        "step": np.array(fitted.step),
        "seed": np.array(trains.seeds[0]),
    }


def tiles(probs: np.ndarray) -> np.ndarray:
    """Maps [L, N, T, S] as one picture, layers below each other: dark is 0, white a head's most."""
    most = probs.max(axis=(2, 3), keepdims=True)
    shares = np.asarray(probs / np.where(most > 0, most, 1), np.float32)
    framed = np.pad(shares, ((0, 0), (0, 0), (1, 1), (1, 1)))
    layers, heads, rows, columns = framed.shape
    return framed.transpose(0, 2, 1, 3).reshape(layers * rows, heads * columns)
