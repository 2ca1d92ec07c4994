"""Synthetic datasets with a known answer: `recall`, `endpoints`, `farthest`."""

import abc
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
from jaxtyping import Array

from attnlab.data import dataset
from attnlab.data.batching import select_rows
from attnlab.data.dataset import Baselines, Batch, Dataset, DataSizes, DeviceBatch, DeviceBatches
from attnlab.fields import Spec, bounded
from attnlab.names import lookup


class Generated(Spec, abc.ABC, prefix="data."):
    """Base class of datasets whose rows are generated on the device from a key.

    A subclass is a frozen dataclass with the field `heldout_rows`: as many rows, of a key that no
    batch has, are held out; as many others are scored as training rows.
    """

    heldout_rows: int

    @abc.abstractmethod
    def sizes(self) -> DataSizes:
        """Sizes that a model must have."""

    @abc.abstractmethod
    def name(self, length: int) -> str:
        """Of the dataset, for people."""

    @abc.abstractmethod
    def generator(self, length: int) -> Callable[[Array, int], DeviceBatch]:
        """(key, size) -> that many rows of `length` tokens. Raises ValueError where there are no
        rows of this length."""

    @abc.abstractmethod
    def baselines(self, rows: Batch) -> Baselines:
        """What needs no model, on the held-out rows."""

    def shapes(self, length: int) -> dataset.BatchShapes:
        """Those of a generated row."""
        generate = self.generator(length)
        return dict(jax.eval_shape(lambda key: generate(key, 1), jax.random.key(0)))

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Rows of `length` tokens; `folder` is not used. Raises ValueError as `generator` does."""
        generate = self.generator(length)

        def scored(seed: int, count: int) -> Batch:
            # A run folds a step into its key, here a number that no step has.
            key = jax.random.fold_in(jax.random.key(seed), 2**31)
            made = jax.jit(lambda key: generate(key, self.heldout_rows))(key)
            rows = {name: np.asarray(a)[: count or None] for name, a in made.items()}
            return rows | {"valid": np.ones(count or self.heldout_rows, bool)[: self.heldout_rows]}

        return Dataset(
            name=self.name(length),
            digest=_digest(f"{self} {length}"),
            sizes=self.sizes(),
            row_tokens=length,
            batches=DeviceBatches(lambda arrays, key, size: generate(key, size)),
            heldout=lambda count: scored(0, count),
            train=lambda count: scored(1, count),
            baselines=lambda: self.baselines(scored(0, 0)),
        )


def _digest(identity: str) -> str:
    return hashlib.sha256(f"{identity} jax {jax.__version__}".encode()).hexdigest()


def generate_recall(
    key: Array, size: int, *, vocab_size: int, pairs: int, length: int, near: float = 0.01
) -> DeviceBatch:
    """Multi-query associative recall (Arora et al. 2023, section 3, arXiv 2312.04927).

    A row states `pairs` keys, each followed by its value, then queries every key once more; the
    target there is its value. tokens [size, length]; values [size, length], the value where a key
    is queried, else -1.

    Keys are different tokens of 0 to vocab_size/2 - 1, values different ones of the rest. The
    queries are at even positions after the pairs, position i = 1, 2, ... (from the pairs) with
    weight i^(near - 1): many soon, few late, as in the paper. All other positions hold tokens of
    the second half, so that a key appears only where it is stated or queried.

    >>> rows = generate_recall(jax.random.key(0), 1, vocab_size=8, pairs=2, length=8)
    >>> rows["tokens"].tolist(), rows["values"].tolist()
    ([[0, 6, 2, 7, 0, 6, 2, 6]], [[-1, -1, -1, -1, 6, -1, 7, -1]])
    """
    keys_key, values_key, positions_key, other_key = jax.random.split(key, 4)
    half, positions = vocab_size // 2, length // 2 - pairs

    def choose(key: Array, count: int) -> Array:
        """[size, pairs] of range(count), no number twice in a row."""
        return jax.lax.top_k(jax.random.uniform(key, (size, count)), pairs)[1]

    stated, answers = choose(keys_key, half), half + choose(values_key, vocab_size - half)
    # The largest of log weight + Gumbel noise are a draw without replacement by these weights.
    weights = (near - 1) * jnp.log(jnp.arange(1.0, positions + 1))
    noise = jax.random.gumbel(positions_key, (size, positions))
    queried = 2 * (pairs + jax.lax.top_k(weights + noise, pairs)[1])
    rows = jnp.arange(size)[:, None]
    tokens = jax.random.randint(other_key, (size, length), half, vocab_size, jnp.int32)
    stated_pairs = jnp.stack([stated, answers], axis=-1).reshape(size, -1)
    tokens = tokens.at[:, : 2 * pairs].set(stated_pairs)
    values = jnp.full((size, length), -1, jnp.int32).at[rows, queried].set(answers)
    return {"tokens": tokens.at[rows, queried].set(stated), "values": values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Generated):
    """`generate_recall`: which value followed this key?

    Guessing among the stated values is right once in `pairs` times.

    Attributes:
      vocab_size: tokens; keys are of the first half, values of the second.
      pairs: keys and values of a row.
      heldout_rows: rows that are held out, of a key that no batch has; as many others are scored as
        training rows.

    Raises:
      ValueError: fewer than 2 tokens for each pair, no pair or no held-out row.

    >>> {name: a.shape for name, a in Recall(vocab_size=8, pairs=2).shapes(10).items()}
    {'tokens': (1, 10), 'values': (1, 10)}
    """

    vocab_size: int = 8192
    pairs: int = bounded(8, least=1)
    heldout_rows: int = bounded(1024, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 2 * self.pairs:
            raise ValueError(
                f"data.vocab_size {self.vocab_size} must be at least twice data.pairs {self.pairs}"
            )

    def sizes(self) -> DataSizes:
        """Keys and values."""
        return DataSizes(self.vocab_size)

    def name(self, length: int) -> str:
        """The sizes."""
        return f"{self.pairs} pairs in {length} tokens of {self.vocab_size}"

    def generator(self, length: int) -> Callable[[Array, int], DeviceBatch]:
        """Raises ValueError where `length` is odd, or below 4 tokens for each pair."""
        if length < 4 * self.pairs or length % 2:
            least = f"at least {4 * self.pairs}, 4 for each of data.pairs"
            raise ValueError(f"train.length must be even and {least}, not {length}")
        sizes = {"vocab_size": self.vocab_size, "pairs": self.pairs, "length": length}
        return lambda key, size: generate_recall(key, size, **sizes)

    def baselines(self, rows: Batch) -> Baselines:
        """Guesses."""
        values = self.vocab_size - self.vocab_size // 2
        known = {"one of the values said": 100 / self.pairs, "any value": 100 / values}
        return {"accuracy": known}


GRAPHS: dict[str, Callable[[int, int], bool]] = {"complete": operator.ne, "acyclic": operator.lt}
"""Name -> which ordered pairs of vertices are arcs; "acyclic" is the transitive tournament."""
LENGTH = 4
"""Tokens of an example of `endpoints`: both ends, the selector, the query token."""


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

    def shapes(self, length: int) -> dataset.BatchShapes:
        """Tokens and values; raises ValueError for any `length` but 4."""
        if length != LENGTH:
            raise ValueError(f"an example has 4 tokens: set train.length=4, not {length}")
        row = jax.ShapeDtypeStruct((1, LENGTH), np.int32)
        return {"tokens": row, "values": row}

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The examples, which are kept on the device; `folder` is not used. Raises ValueError for
        any `length` but 4."""
        self.shapes(length)
        every = examples(self.vertices, self.graph)
        count = len(every["tokens"])

        def scored(number: int) -> Batch:
            size = min(number or count, count)
            index = np.arange(size) * count // size
            return select_rows(every, index) | {"valid": np.ones(len(index), bool)}

        bound = {"one head at most": 75.0} if self.graph == "complete" else {}
        return Dataset(
            name=f"arcs of the {self.graph} graph of {self.vertices} vertices",
            digest=_digest(str(self)),
            sizes=self.sizes(),
            row_tokens=LENGTH,
            batches=DeviceBatches(_draw, every),
            heldout=scored,
            train=scored,
            decode=self._decode,
            baselines=lambda: {"accuracy": {"a guess": 50.0, **bound}},
            facts={"arcs": count // 2, "scored": "every case, those of training too"},
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        names = (*map(str, range(self.vertices)), "first", "second", "#")
        return " ".join(names[int(token)] for token in tokens)


def _draw(arrays: Batch | DeviceBatch, key: jax.Array, size: int) -> DeviceBatch:
    index = jax.random.randint(key, (size,), 0, len(arrays["tokens"]))
    return {name: jnp.asarray(a)[index] for name, a in arrays.items()}


def generate_farthest(key: Array, size: int, *, dimensions: int, points: int) -> DeviceBatch:
    """Points on a sphere, and for each of them the one that is farthest from it (Amsel, Yehudai and
    Bruna, ICLR 2025, arXiv 2407.16153).

    features [size, points, dimensions], uniform on the unit sphere; answers, of the same shape: of
    point i the point j with the least x_i . x_j; scored [size, points] is True everywhere.
    """
    x = jax.random.normal(key, (size, points, dimensions))
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    farthest = jnp.argmin(jnp.einsum("bid,bjd->bij", x, x), axis=-1)
    answers = jnp.take_along_axis(x, farthest[..., None], axis=1)
    return {"features": x, "answers": answers, "scored": jnp.ones((size, points), bool)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Farthest(Generated):
    """`generate_farthest`: which point is farthest from this one? `train.length` is the number of
    points. An answer has length 1 and mean 0, so the mean leaves all of its variance unexplained.

    Attributes:
      dimensions: of the space; the points lie on its unit sphere.
      heldout_rows: rows that are held out; as many others are scored as training rows.

    Raises:
      ValueError: fewer than 2 dimensions, or no held-out row.

    >>> {name: a.shape for name, a in Farthest(dimensions=3).shapes(5).items()}
    {'answers': (1, 5, 3), 'features': (1, 5, 3), 'scored': (1, 5)}
    """

    dimensions: int = bounded(16, least=2)
    heldout_rows: int = bounded(1024, least=1)

    def sizes(self) -> DataSizes:
        """As many features as answers."""
        return DataSizes(self.dimensions, self.dimensions)

    def name(self, length: int) -> str:
        """The sizes."""
        return f"{length} points on a sphere in {self.dimensions} dimensions"

    def generator(self, length: int) -> Callable[[Array, int], DeviceBatch]:
        """Raises ValueError for fewer than 3 points."""
        if length < 3:
            raise ValueError(f"train.length must be at least 3 points, not {length}")
        sizes = {"dimensions": self.dimensions, "points": length}
        return lambda key, size: generate_farthest(key, size, **sizes)

    def baselines(self, rows: Batch) -> Baselines:
        """The error of the mean, and of minus the point itself, scaled so that it is least."""
        x, y = rows["features"], rows["answers"]
        guesses = {"the mean": 0 * x, "minus the point": np.sum(x * y) / np.sum(x * x) * x}
        errors = {name: np.sum((guess - y) ** 2, axis=-1) for name, guess in guesses.items()}
        return {"unexplained": {name: 100 * float(np.mean(a)) for name, a in errors.items()}}
