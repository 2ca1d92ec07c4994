"""Attention maps and head statistics of a trained model, on held-out rows."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnlab.data import Dataset
from attnlab.interpret.statistics import head_statistics
from attnlab.load import Row
from attnlab.load import shown_row as shown_row
from attnlab.load import shown_rows as shown_rows
from attnlab.models import ModelConfig
from attnlab.sharing import Params
from attnlab.training.objectives import Objective, decode_tokens
from attnlab.training.objectives.objective import Inputs

FILE = "maps.npz"
LONGEST = 512
"""Tokens of the longest text whose maps are kept."""


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
