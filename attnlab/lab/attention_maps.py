"""Attention maps and head statistics of a trained model, on held-out rows."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnlab.data import Dataset
from attnlab.interpret.statistics import head_statistics
from attnlab.models import ModelConfig
from attnlab.sharing import Params
from attnlab.training.objectives import Objective, decode_tokens
from attnlab.training.objectives.objective import Example, Inputs

FILE = "maps.npz"
LONGEST = 512
"""Tokens of the longest text whose maps are kept."""
ROWS = 8
"""Held-out rows: statistics are means over them, maps are of one."""
WORDS = 20
"""Tokens at the beginning of a row that a report shows as words."""
TEXTS = ("source", "tokens")
"""The inputs of a model that are tokens."""


class Row(NamedTuple):
    """One held-out row, as an objective presents it."""

    example: Example
    ends: dict[str, int]
    """Its texts -> the length of each: what follows is padding."""


def shown_rows(objective: Objective, dataset: Dataset) -> list[Row]:
    """Up to `ROWS` held-out rows, evenly spaced; the first is the one whose maps are kept.

    Of the rows that are no shorter than the middle one, that is the one that begins with most
    letters in words, so not the indentation of a program.
    """
    rows = dataset.heldout(ROWS)
    count = len(jax.tree.leaves(rows)[0])
    prepared = jax.jit(objective.prepare)(rows, jax.random.key(0))
    examples = [jax.tree.map(lambda a: a[i : i + 1], prepared) for i in range(count)]  # noqa: B023
    found = [Row(example, _lengths(example)) for example in examples]
    lengths = [sum(row.ends.values()) for row in found]

    def rank(i: int) -> tuple[bool, int, int]:
        is_long = lengths[i] >= lengths[count // 2]
        return is_long, _letters(found[i], dataset), -abs(i - count // 2)

    first = max(range(count), key=rank)
    return [found[first], *found[:first], *found[first + 1 :]]


def shown_row(objective: Objective, dataset: Dataset) -> Row:
    """The row whose maps are kept."""
    return shown_rows(objective, dataset)[0]


def _lengths(example: Example) -> dict[str, int]:
    inputs = example.inputs
    real = {name: np.ones(np.shape(inputs[name])[1], bool) for name in TEXTS if name in inputs}
    for text, mask in (("tokens", "padding_mask"), ("source", "source_padding_mask")):
        if mask in inputs:
            real[text] = np.asarray(inputs[mask])[0]
    if "source" in inputs:
        real["tokens"] = np.asarray(example.weights[0] > 0)
    return {n: int(np.flatnonzero(a)[-1]) + 1 for n, a in real.items() if np.any(a)}


def _letters(row: Row, dataset: Dataset) -> int:
    """In words of two letters or more among the first `WORDS` tokens; 0 of features."""
    name = "source" if "source" in row.ends else "tokens"
    tokens = np.asarray(row.example.inputs[name])[0][: min(row.ends.get(name, 0), WORDS)]
    if not np.issubdtype(tokens.dtype, np.integer):
        return 0
    text = dataset.decode([t for t in tokens.tolist() if t < dataset.sizes.vocab_size])
    text = re.sub(r"\\(x..|.)", " ", text)  # line ends and other escapes
    return sum(map(len, re.findall(r"[^\W\d_]{2,}", text)))


def attention_maps(
    config: ModelConfig,
    objective: Objective,
    dataset: Dataset,
    rows: Sequence[Row],
    params: Params,
    initial: Params,
) -> dict[str, np.ndarray]:
    """Attention maps on the first row and head statistics over all rows, as arrays for a file.

    Args:
      config: of the model.
      objective: of the training.
      dataset: what decodes tokens.
      rows: of `shown_rows`.
      params: trained parameters.
      initial: those at step 0.

    Returns:
      `probs`, the attention probabilities [L, N, T, S]; of a decoder with an encoder those to the
      source. `tokens` are those of its rows, `source`, where it is another text, those of the
      columns; `written_tokens` and `written_source` the same as text, `pieces_tokens` and
      `pieces_source` token by token. `sets` [L]: the parameter group of each layer. `statistics`
      and `untrained` [K, L, N]: the `head_statistics` called `names`, trained and at step 0.
    """
    example, ends = rows[0]
    attention_of = _attention(config)

    def of_row(params: Params, row: Row) -> tuple[jax.Array, Statistics]:
        length = np.shape(row.example.inputs["tokens"])[1]
        return attention_of(
            params, row.example.inputs, np.arange(length)[None] < row.ends.get("tokens", 0)
        )

    def mean(params: Params) -> dict[str, np.ndarray]:
        """Over the rows that have a statistic; NaN where none has."""
        found = [jax.tree.map(np.asarray, of_row(params, row)[1]) for row in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return {n: np.nanmean([one[n] for one in found], axis=0) for n in found[0]}

    probs, _ = of_row(params, rows[0])
    texts = {name: np.asarray(example.inputs[name])[0, :end] for name, end in ends.items()}
    probs = probs[:, :, : ends["tokens"], : ends.get("source", ends["tokens"])]
    plan = config.plan
    sublayer = "cross" if "source" in example.inputs and "cross" in plan else "attention"
    trained, before = mean(params), mean(initial)
    return {
        "probs": np.asarray(probs, np.float16),
        **_as_text(objective, dataset, texts),
        "sets": np.array(plan.indices(sublayer)),
        "names": np.array(list(trained), str),
        "statistics": np.array(list(trained.values()), np.float32),
        "untrained": np.array(list(before.values()), np.float32),
        "rows": np.array(len(rows)),
    }


Statistics = dict[str, jax.Array]
"""Name -> a number for each layer and head [L, N]."""


@functools.lru_cache(maxsize=4)  # seeds of one config share a compiled program
def _attention(
    config: ModelConfig,
) -> Callable[[Params, Inputs, ArrayLike], tuple[jax.Array, Statistics]]:
    """(params, inputs, True = a query that counts) -> attention of the first text and statistics of
    all texts."""
    # Fused kernels keep no probabilities: whatever trained, the dense path shows them.
    attention = dataclasses.replace(config.attention, implementation="dense")
    model = dataclasses.replace(config, attention=attention).build()
    name = "probs" if config.encoder is None else "cross.probs"

    @jax.jit
    def attention_of(
        params: Params, inputs: Inputs, real: ArrayLike
    ) -> tuple[jax.Array, Statistics]:
        tokens = jnp.asarray(inputs["tokens"])
        probs = model.apply({"params": params}, **inputs, capture=(name,)).captured[name]
        keys = jnp.asarray(inputs.get("source", tokens))
        return probs[:, 0], head_statistics(probs, tokens, real, key_tokens=keys)

    return attention_of


def _as_text(
    objective: Objective, dataset: Dataset, texts: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Texts as tokens, as people read them, and token by token."""
    found: dict[str, np.ndarray] = {}
    for name, a in texts.items():
        tokens = a.tolist()
        found[name] = np.asarray(a, np.int32)
        found[f"written_{name}"] = np.array(decode_tokens(objective, dataset, tokens))
        found[f"pieces_{name}"] = np.array([decode_tokens(objective, dataset, [t]) for t in tokens])
    return found


def tiles(probs: np.ndarray) -> np.ndarray:
    """Maps [L, N, T, S] as one image, layers below each other: black is 0, white a head's most."""
    most = probs.max(axis=(2, 3), keepdims=True)
    shares = np.asarray(probs / np.where(most > 0, most, 1), np.float32)
    framed = np.pad(shares, ((0, 0), (0, 0), (1, 1), (1, 1)))
    layers, heads, rows, columns = framed.shape
    return framed.transpose(0, 2, 1, 3).reshape(layers * rows, heads * columns)
