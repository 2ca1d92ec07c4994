"""The row `endpoints`: which end of an arc is asked for? All there is to know is in four tokens."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from attnlab.names import find
from attnlab.training.sources.source import Batch, Sizes, Source

GRAPHS = {
    "complete": lambda n: [(u, v) for u in range(n) for v in range(n) if u != v],
    "acyclic": lambda n: [(u, v) for u in range(n) for v in range(n) if u < v],
}
"""Name -> (number of vertices -> its arcs): all arcs, or those of the transitive tournament."""
LENGTH = 4
"""Of a case: both ends, the selector, the query token."""


def cases(vertices: int, graph: str) -> Batch:
    """Every case of the Endpoint Selection Problem (Tesfaye et al., ICLR 2026, openreview
    RRmPbbZsvl): arc (u, v), selector i, query # -> u where i is the first selector, else v.

    Of n vertices, tokens 0 to n - 1 are the vertices, n and n + 1 the selectors, n + 2 is #.
    tokens [2m, 4] of m arcs; values [2m, 4], the answer at #, else -1.

    Why one head is right in 3 of the 4 cases of a pair {a, b} at most, on a graph with both arcs: a
    causal layer of attention alone, with one head and one vector per token and position, writes at
    # the sum over the four tokens of exp(score) * value, divided by Z > 0; # itself is added as Z /
    Z of it, and a layer norm without bias multiplies by a positive number. So, but for a positive
    factor, the logits are linear in A + s_i for (a, b), in B + s_i for (b, a), where A and B belong
    to the arcs and s_i to selector and query. Let w be the readout of a less that of b. All four
    right means w(A + s_1) > 0 > w(A + s_2) and w(B + s_1) < 0 < w(B + s_2): the sum of the outer
    two on the left and right of w(A + B + s_1 + s_2) is both > 0 and < 0.
    A second head has a Z of its own, and the argument falls.

    >>> rows = cases(2, "acyclic")
    >>> rows["tokens"].tolist(), rows["values"][:, -1].tolist()
    ([[0, 1, 2, 4], [0, 1, 3, 4]], [0, 1])
    """
    arcs = np.array(find("graph", graph, GRAPHS)(vertices), np.int32)
    number = len(arcs)
    tokens = np.full((2 * number, LENGTH), vertices + 2, np.int32)
    tokens[:, :2] = np.tile(arcs, (2, 1))
    tokens[:, 2] = np.repeat([vertices, vertices + 1], number)
    values = np.full((2 * number, LENGTH), -1, np.int32)
    values[:, -1] = arcs.T.reshape(-1)
    return {"tokens": tokens, "values": values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoints:
    """`cases` of a graph, drawn evenly; all of them are scored, those of training too: what a model
    can say at all is asked, not what it makes of cases that it has not seen.
    """

    vertices: int = 16
    graph: str = "complete"

    def __post_init__(self):
        find("graph", self.graph, GRAPHS)
        if self.vertices < 2:
            raise ValueError(f"an arc needs data.vertices of at least 2, not {self.vertices}")

    def sizes(self) -> Sizes:
        """Vertices, two selectors and the query token."""
        return Sizes(self.vertices + 3)

    def shapes(self, length: int) -> Batch:
        """Tokens and values; raises ValueError for any `length` but 4."""
        if length != LENGTH:
            raise ValueError(f"a case is {LENGTH} tokens: set train.length={LENGTH}, not {length}")
        row = jax.ShapeDtypeStruct((1, LENGTH), np.int32)
        return {"tokens": row, "values": row}

    def load(self, length: int, folder: Path | None = None) -> Source:
        """The cases, which lie on the device."""
        self.shapes(length)
        every = cases(self.vertices, self.graph)
        count = len(every["tokens"])

        def draw(resident: Any, key: Array, size: int) -> Batch:
            chosen = jax.random.randint(key, (size,), 0, count)
            return jax.tree.map(lambda a: a[chosen], resident)

        def rows(some: int) -> Batch:
            chosen = np.arange(some or count) * count // (some or count)
            found = {name: a[chosen] for name, a in every.items()}
            return found | {"valid": np.ones(len(chosen), bool)}

        known = {"a guess": 50.0}
        if self.graph == "complete":
            known["one head at most"] = 75.0
        told = f"{self} jax {jax.__version__}"
        names = ("first", "second", "#")
        return Source(
            name=f"arcs of the {self.graph} graph of {self.vertices} vertices",
            digest=hashlib.sha256(told.encode()).hexdigest(),
            sizes=self.sizes(),
            row_tokens=LENGTH,
            draw=draw,
            resident=every,
            heldout=rows,
            train=rows,
            write=lambda tokens: " ".join(
                names[t - self.vertices] if t >= self.vertices else str(t) for t in map(int, tokens)
            ),
            yardsticks=lambda: {"accuracy": known},
            facts={"arcs": count // 2, "scored": "every case, those of training too"},
        )
