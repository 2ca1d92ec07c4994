"""Dataset `endpoints`: which end of an arc is selected? Every example has four tokens."""

import dataclasses
import hashlib
import itertools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data.batching import scored_rows
from attnlab.data.dataset import (
    Baselines,
    Batch,
    BatchShapes,
    Dataset,
    DataSizes,
    DeviceBatch,
    DeviceBatches,
)
from attnlab.fields import Spec, bounded
from attnlab.names import lookup

GRAPHS: dict[str, Callable[[int, int], bool]] = {"complete": operator.ne, "acyclic": operator.lt}
"""Name -> which ordered pairs of vertices are arcs; "acyclic" is the transitive tournament."""
LENGTH = 4
"""Tokens of an example: both ends, the selector, the query token."""


def examples(vertices: int, graph: str) -> Batch:
    """Every example of the Endpoint Selection Problem (Tesfaye et al., ICLR 2026, openreview
    RRmPbbZsvl): arc (u, v), selector i, query # -> u if i is the first selector, else v.

    Of n vertices, tokens 0 to n - 1 are the vertices, n and n + 1 the selectors, n + 2 is #.
    tokens [2m, 4] of m arcs; values [2m, 4], the answer at #, else -1.

    Why one head is right in at most 3 of the 4 examples of a pair {a, b}, on a graph with both
    arcs: a causal layer of attention alone, with one head and one vector per token and position,
    writes at # the sum over the four tokens of exp(score) * value, divided by Z > 0; # itself is
    added as Z / Z of it, and a layer norm without bias multiplies by a positive number. So, but for
    a positive factor, the logits are linear in A + s_i for (a, b), in B + s_i for (b, a), where A
    and B belong to the arcs and s_i to selector and query. Let w be the LM head of a less that of
    b. All four right means w(A + s_1) > 0 > w(A + s_2) and w(B + s_1) < 0 < w(B + s_2): the sum of
    the outer two on the left and right of w(A + B + s_1 + s_2) is both > 0 and < 0.
    A second head has a Z of its own, and the argument fails.

    >>> rows = examples(2, "acyclic")
    >>> rows["tokens"].tolist(), rows["values"][:, -1].tolist()
    ([[0, 1, 2, 4], [0, 1, 3, 4]], [0, 1])
    """
    is_arc = lookup(GRAPHS, graph, what="graph")
    pairs = itertools.product(range(vertices), repeat=2)
    arcs = np.array([pair for pair in pairs if is_arc(*pair)], np.int32)
    number = len(arcs)
    tokens = np.full((2 * number, LENGTH), vertices + 2, np.int32)
    tokens[:, :2] = np.tile(arcs, (2, 1))
    tokens[:, 2] = np.repeat([vertices, vertices + 1], number)
    values = np.full((2 * number, LENGTH), -1, np.int32)
    values[:, -1] = arcs.T.reshape(-1)
    return {"tokens": tokens, "values": values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoints(Spec, prefix="data."):
    """`examples` of a graph, drawn uniformly. All of them are scored, those of training too: the
    question is what a model can represent, not how it generalises.

    Attributes:
      vertices: of the graph; the vocabulary has three more tokens.
      graph: "complete" has an arc in both directions between any two vertices; "acyclic" has the
        arc (u, v) only where u < v.

    Raises:
      ValueError: fewer than 2 vertices, or another graph.

    >>> dataset = Endpoints(vertices=3).load(4)
    >>> dataset.heldout(0)["tokens"].shape, dataset.decode([0, 2, 3, 5])  # 6 arcs, either end
    ((12, 4), '0 2 first #')
    """

    vertices: int = bounded(16, least=2)
    graph: Literal["complete", "acyclic"] = "complete"

    def sizes(self) -> DataSizes:
        """Vertices, two selectors and the query token."""
        return DataSizes(self.vertices + 3)

    def shapes(self, length: int) -> BatchShapes:
        """Tokens and values; raises ValueError for any `length` but 4."""
        if length != LENGTH:
            raise ValueError(
                f"an example is {LENGTH} tokens: set train.length={LENGTH}, not {length}"
            )
        row = jax.ShapeDtypeStruct((1, LENGTH), np.int32)
        return {"tokens": row, "values": row}

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The examples, which are kept on the device; `folder` is not used.

        Raises:
          ValueError: `length` is not 4.
        """
        self.shapes(length)
        every = examples(self.vertices, self.graph)
        count = len(every["tokens"])

        def scored(number: int) -> Batch:
            index = np.arange(number or count) * count // (number or count)
            return scored_rows({name: a[index] for name, a in every.items()}, 0)

        identity = f"{self} jax {jax.__version__}"
        return Dataset(
            name=f"arcs of the {self.graph} graph of {self.vertices} vertices",
            digest=hashlib.sha256(identity.encode()).hexdigest(),
            sizes=self.sizes(),
            row_tokens=LENGTH,
            batches=DeviceBatches(_draw, every),
            heldout=scored,
            train=scored,
            decode=self._decode,
            baselines=self._baselines,
            facts={"arcs": count // 2, "scored": "every case, those of training too"},
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        names = (*map(str, range(self.vertices)), "first", "second", "#")
        return " ".join(names[int(token)] for token in tokens)

    def _baselines(self) -> Baselines:
        known = {"a guess": 50.0}
        if self.graph == "complete":
            known["one head at most"] = 75.0
        return {"accuracy": known}


def _draw(arrays: Batch | DeviceBatch, key: jax.Array, size: int) -> DeviceBatch:
    index = jax.random.randint(key, (size,), 0, len(arrays["tokens"]))
    return {name: jnp.asarray(a)[index] for name, a in arrays.items()}
