"""What the heads of a trained model look at, in rows that are held out."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab.data import Dataset
from attnlab.interpret.statistics import head_statistics
from attnlab.models import ModelConfig
from attnlab.training import sharding
from attnlab.training.objectives import Objective, decode_tokens
from attnlab.training.objectives.objective import Example

FILE = "maps.npz"
LONGEST = 512
"""Tokens of a text whose map is kept."""
ROWS = 8
"""Held out, whose statistics are averaged, and of which one is looked at."""
WORDS = 20
"""Tokens at the beginning of a row that a report shows as words."""
TEXTS = ("source", "tokens")
"""The inputs of a model that are tokens, each as long as it likes up to `max_len`."""


class Row(NamedTuple):
    """One row that is held out, as a task presents it."""

    example: Example
    ends: dict[str, int]
    """Its texts -> where each ends: what stands behind is filling."""


def shown_rows(task: Objective, source: Dataset) -> list[Row]:
    """Up to `ROWS` of the rows that are held out, evenly spaced; the one to be looked at first: of
    those that are no shorter than the one in the middle that which begins with most letters in
    words, where they are words at all, not the indentation of a program."""
    rows = source.heldout(ROWS)
    count = len(jax.tree.leaves(rows)[0])
    every = jax.jit(task.prepare)(rows, jax.random.key(0))
    cut = lambda i: jax.tree.map(lambda a: a[i : i + 1], every)
    found = [Row(one, _ends(one)) for one in map(cut, range(count))]
    length = lambda row: sum(row.ends.values())
    least = length(found[count // 2])

    def worth(i: int) -> tuple[bool, int, int]:
        row = found[i]
        return length(row) >= least, _letters(row, source), -abs(i - count // 2)

    first = max(range(count), key=worth)
    return [found[first], *found[:first], *found[first + 1 :]]


def shown_row(task: Objective, source: Dataset) -> Row:
    """The row that is looked at."""
    return shown_rows(task, source)[0]


def _ends(example: Example) -> dict[str, int]:
    inputs = example.inputs
    real = {name: np.ones(np.shape(inputs[name])[1], bool) for name in TEXTS if name in inputs}
    for text, mask in (("tokens", "padding_mask"), ("source", "source_padding_mask")):
        if mask in inputs:
            real[text] = np.asarray(inputs[mask])[0]
    if "source" in inputs:
        real["tokens"] = np.asarray(example.weights[0] > 0)
    return {n: int(np.flatnonzero(a)[-1]) + 1 for n, a in real.items() if np.any(a)}


def _letters(row: Row, source: Dataset) -> int:
    """In words of two letters or more among the first `WORDS` tokens; 0 of features."""
    name = "source" if "source" in row.ends else "tokens"
    tokens = np.asarray(row.example.inputs[name])[0][: min(row.ends.get(name, 0), WORDS)]
    if not np.issubdtype(tokens.dtype, np.integer):
        return 0
    text = source.decode([t for t in tokens.tolist() if t < source.sizes.vocab_size])
    text = re.sub(r"\\(x..|.)", " ", text)  # line ends and other escapes
    return sum(map(len, re.findall(r"[^\W\d_]{2,}", text)))


def of_fitted(
    config: ModelConfig,
    task: Objective,
    fitted: Any,
    source: Dataset,
    rows: Sequence[Row],
    seed: int,
    begun: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """What the heads of the first seed look at in `rows`, as arrays for a file.

    `probs` are the attention probabilities [L, N, T, S] on the first; of a decoder with an encoder
    those to the source. `tokens` is what its rows stand for, `source`, where it is another text,
    what the columns stand for; `written_tokens`, `written_source` the same as a person reads them,
    `pieces_tokens`, `pieces_source` token by token. `sets` [L] is the set of weights of each layer.

    `statistics` and `fresh` [K, L, N] are the `head_statistics` called `names`, the mean over all
    rows, of the trained weights and of `begun` (inputs -> weights before any training).
    """
    example, ends = rows[0]
    params = jax.tree.map(lambda a: a[0], sharding.gather(fitted.state.params))
    look = _attention(config)

    def of_row(params: Any, row: Row) -> Any:
        length = np.shape(row.example.inputs["tokens"])[1]
        return look(params, row.example.inputs, np.arange(length)[None] < row.ends.get("tokens", 0))

    def mean(params: Any) -> dict[str, np.ndarray]:
        """Over the rows that have a statistic; NaN where none has."""
        found = [jax.tree.map(np.asarray, of_row(params, row)[1]) for row in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return {n: np.nanmean([one[n] for one in found], axis=0) for n in found[0]}

    probs, _ = of_row(params, rows[0])
    texts = {name: np.asarray(example.inputs[name])[0, :end] for name, end in ends.items()}
    probs = probs[:, :, : ends["tokens"], : ends.get("source", ends["tokens"])]
    plan = config.plan
    part = "cross" if "source" in example.inputs and "cross" in plan else "attention"
    known, before = mean(params), mean(begun(example.inputs))
    statistics = {
        "names": np.array(list(known), str),
        "statistics": np.array(list(known.values()), np.float32),
        "fresh": np.array(list(before.values()), np.float32),
        "rows": np.array(len(rows)),
    }
    return {
        "probs": np.asarray(probs, np.float16),
        **_as_written(task, source, texts),
        "sets": np.array(plan.distinct_parameters(part)),
        "step": np.array(fitted.step),
        "seed": np.array(seed),
        **statistics,
    }


def _attention(config: ModelConfig) -> Callable[[Any, Any, Any], tuple[Any, dict[str, Any]]]:
    """(params, inputs, True = a query that counts) -> attention of the first text and statistics of
    all."""
    # Fused kernels keep no probabilities: whatever trained, the dense path shows them.
    attention = dataclasses.replace(config.attention, implementation="dense")
    model = dataclasses.replace(config, attention=attention).build()
    merged = config.encoder is not None and config.encoder.cross == "merged"
    name = "cross.probs" if config.encoder is not None and not merged else "probs"

    @jax.jit
    def look(params: Any, inputs: Any, real: Any) -> Any:
        tokens = inputs["tokens"]
        probs = model.apply({"params": params}, **inputs, capture=(name,)).captured[name]
        if merged:  # behind the keys of its own text: no whole rows, no statistics
            return probs[:, 0, ..., tokens.shape[1] :], {}
        keys = inputs.get("source", tokens)
        return probs[:, 0], head_statistics(probs, tokens, real, key_tokens=keys)

    return look


def _as_written(task: Objective, source: Dataset, texts: dict[str, np.ndarray]) -> dict[str, Any]:
    """Texts as tokens, as a person reads them, and token by token."""
    found: dict[str, Any] = {}
    for name, a in texts.items():
        tokens = a.tolist()
        found[name] = np.asarray(a, np.int32)
        found[f"written_{name}"] = decode_tokens(task, source, tokens)
        found[f"pieces_{name}"] = np.array([decode_tokens(task, source, [t]) for t in tokens])
    return found


def tiles(probs: np.ndarray) -> np.ndarray:
    """Maps [L, N, T, S] as one picture, layers below each other: dark is 0, white a head's most."""
    most = probs.max(axis=(2, 3), keepdims=True)
    shares = np.asarray(probs / np.where(most > 0, most, 1), np.float32)
    framed = np.pad(shares, ((0, 0), (0, 0), (1, 1), (1, 1)))
    layers, heads, rows, columns = framed.shape
    return framed.transpose(0, 2, 1, 3).reshape(layers * rows, heads * columns)
