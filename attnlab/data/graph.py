"""Dataset `graph`: one graph whose nodes have features and, some of them, a known class."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data import dataset
from attnlab.data.dataset import Batch, Dataset, DataSizes, DeviceBatch, DeviceBatches
from attnlab.data.files import Stamp, check_path, digest, read_bytes, split_lines, stamp
from attnlab.fields import Spec

PARTS = ("train", "valid", "test", "rest")


class Graph(NamedTuple):
    """Nodes in the order of the file of features; every edge in both directions, each once.

    Attributes:
      features: [nodes, F], float32.
      labels: [nodes], numbers of `classes`.
      classes: their names.
      senders, receivers: [edges].
      parts: train, valid, test -> [nodes], True where a node belongs to the part.
      left_out: lines of edges that name a node without features.
      digest: of the files.
    """

    features: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    senders: np.ndarray
    receivers: np.ndarray
    parts: dict[str, np.ndarray]
    left_out: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes(Spec, prefix="data."):
    """The nodes of one graph, each with features and a class.

    A row is the whole graph, with an additional edge from every node to itself: features, each row
    divided by its sum, in place of tokens; the classes of all nodes; which nodes count. Training
    reads the training nodes, learning curves the validation nodes, the result the test nodes, which
    are scored once.

    Attributes:
      path: a folder with the files `*.content`, `*.cites` and `*split*` (see `read_graph`).

    >>> import tempfile
    >>> files = {
    ...     "a.content": "x 1 0 red,y 1 1 blue,z 0 1 red",
    ...     "a.cites": "x y",
    ...     "a.split": "row id part,0 x train,1 y valid,2 z test",
    ... }
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, text in files.items():
    ...         _ = Path(folder, name).write_text(text.translate({32: "\\t", 44: "\\n"}))
    ...     row = Nodes(path=folder).load(3).train(0)
    >>> row["features"].tolist(), row["valid"].tolist()
    ([[[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]], [[True, False, False]])
    >>> row["senders"].tolist(), row["receivers"].tolist()
    ([[0, 1, 0, 1, 2]], [[1, 0, 0, 1, 2]])
    """

    path: str = ""

    @property
    def graph(self) -> Graph:
        """The graph of the folder."""
        if not self.path:
            raise ValueError("set data.path to the folder of a graph")
        check_path(self.path, "folder", "set data.path to that of a graph", folder=True)
        return read_graph(Path(self.path))

    def sizes(self) -> DataSizes:
        """Features and classes."""
        return DataSizes(self.graph.features.shape[1], len(self.graph.classes))

    def shapes(self, length: int) -> dataset.BatchShapes:
        """One graph; raises ValueError unless `length` is its number of nodes."""
        nodes = len(self.graph.labels)
        if length != nodes:
            raise ValueError(
                f"one row is the whole graph; set train.length and model.max_len to its {nodes} "
                f"nodes, not {length}"
            )
        return dataset.shapes_of(_scored(self.graph, "train", 0))

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The graph, once in every row of a batch; `folder` is not used.

        Raises:
          FileNotFoundError: there is no folder `path`, or not one file of each kind in it.
          ValueError: no `path`, `length` is not the number of nodes, or `read_graph` raises it.
        """
        graph = self.graph
        self.shapes(length)
        facts = {"nodes": length, "edges": len(graph.senders) // 2}
        facts |= {f"{part} nodes": int(nodes.sum()) for part, nodes in graph.parts.items()}
        if graph.left_out:
            facts["edges left out for a node without features"] = graph.left_out
        return Dataset(
            name=Path(self.path).name,
            digest=graph.digest,
            sizes=self.sizes(),
            row_tokens=length,
            batches=DeviceBatches(_repeat, _row(graph, "train")),
            heldout=functools.partial(_scored, graph, "test"),
            validation=functools.partial(_scored, graph, "valid"),
            train=functools.partial(_scored, graph, "train"),
            baselines=functools.partial(_baselines, graph),
            facts=dict(facts),
        )


def _repeat(arrays: Batch | DeviceBatch, key: jax.Array, size: int) -> DeviceBatch:
    return {name: jnp.broadcast_to(a[None], (size, *a.shape)) for name, a in arrays.items()}


def _scored(graph: Graph, split: str, count: int) -> Batch:
    """One row, whatever `count` is: there is one graph."""
    return {name: a[None] for name, a in _row(graph, split).items()}


def _baselines(graph: Graph) -> dataset.Baselines:
    accuracy, _ = label_propagation(graph)
    # The training part has as many nodes of each class, so it does not show which is commonest.
    labels = graph.labels[graph.parts["test"]]
    majority = float(np.bincount(labels).max() / len(labels))
    return {"accuracy": {"label propagation": 100 * accuracy, "majority class": 100 * majority}}


def _row(graph: Graph, split: str) -> Batch:
    """The whole graph, and the nodes of one split as those that count."""
    total = np.maximum(graph.features.sum(1, keepdims=True), 1e-9)
    loops = np.arange(len(graph.labels), dtype=np.int32)
    return {
        "features": graph.features / total,
        "labels": graph.labels,
        "valid": graph.parts[split],
        "senders": np.concatenate([graph.senders, loops]),
        "receivers": np.concatenate([graph.receivers, loops]),
    }


def read_graph(folder: Path) -> Graph:
    r"""The graph of a folder in the format of Cora (Sen et al. 2008, LINQS).

    Three files, each may be packed (`.gz`), columns apart by tabs: `*.content` with `id`, the
    features, `class`; `*.cites` with the ids of both ends of an edge; `*split*` with a line of
    names, then a number, the id and train, valid, test or rest. An edge of a node to itself is left
    out, one that is listed twice or both ways counts once; one that names a node without features
    is left out and counted (Citeseer has 17 lines of that kind).

    Raises ValueError, naming file and line, for a row of another length, an id that stands twice, a
    feature that is no number, a part of another name, and a split of a node without features.
    """
    return _read(folder, stamp(folder))


@functools.lru_cache(maxsize=2)  # the variants of a sweep read the same graph
def _read(folder: Path, stamp: Stamp) -> Graph:
    content = _read_table(folder, "*.content*")
    cites, split = _read_table(folder, "*.cites*", 2), _read_table(folder, "*split*", 3)
    names, classes = [row[0] for row in content.rows], sorted({row[-1] for row in content.rows})
    nodes = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        if nodes[name] != number:
            raise ValueError(f"{content.path}:{number + 1}: another line has node {name!r} too")
    pairs = [[nodes[a], nodes[b]] for a, b in cites.rows if a in nodes and b in nodes]
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    both = np.unique(np.concatenate([ends, ends[:, ::-1]]), axis=0)
    senders, receivers = both[both[:, 0] != both[:, 1]].astype(np.int32).T
    return Graph(
        features=_read_features(content),
        labels=np.array([classes.index(row[-1]) for row in content.rows], np.int32),
        classes=tuple(classes),
        senders=senders,
        receivers=receivers,
        parts=_read_parts(split, nodes),
        left_out=len(cites.rows) - len(ends),
        digest=digest(table.data for table in (content, cites, split)),
    )


class _Table(NamedTuple):
    """A file of columns separated by tabs."""

    path: Path
    data: bytes
    rows: list[list[str]]


def _read_table(folder: Path, pattern: str, columns: int = 0) -> _Table:
    """The one file of this pattern; with 0 each line has as many columns as the first."""
    found = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")]
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} (data.path) has {len(found)} files {pattern}, not one")
    path, data = found[0], read_bytes(found[0])
    rows = [line.split("\t") for line in split_lines(data, path)]
    if not rows:
        raise ValueError(f"{path} is empty; give a line for each node or edge")
    columns = columns or len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise ValueError(f"{path}:{number}: {len(row)} columns, not {columns} between tabs")
    return _Table(path, data, rows)


def _read_features(content: _Table) -> np.ndarray:
    features = np.full((len(content.rows), len(content.rows[0]) - 2), np.nan, np.float32)
    for number, row in enumerate(content.rows):
        with contextlib.suppress(ValueError):
            features[number] = row[1:-1]
        if not np.isfinite(features[number]).all():
            raise ValueError(f"{content.path}:{number + 1}: a feature is not a finite number")
    return features


def _read_parts(split: _Table, nodes: dict[str, int]) -> dict[str, np.ndarray]:
    parts = {part: np.zeros(len(nodes), bool) for part in PARTS}
    for number, (_, name, part) in enumerate(split.rows[1:], 2):
        if part not in parts:
            raise ValueError(f"{split.path}:{number}: part {part!r} is none of {', '.join(parts)}")
        if name not in nodes:
            raise ValueError(f"{split.path}:{number}: node {name!r} has no features")
        parts[part][nodes[name]] = True
    del parts["rest"]
    if empty := [part for part, members in parts.items() if not members.any()]:
        raise ValueError(f"{split.path}: no node is in the part {empty[0]!r}")
    return parts


def spread_labels(graph: Graph, known: np.ndarray, rounds: int) -> np.ndarray:
    """The class of every node after 0, 1, ... rounds of label propagation [rounds + 1, nodes].

    A round is F <- D^-1/2 A D^-1/2 F, then F = the label where it is `known` (Zhu and Ghahramani
    2002, with the weights of Zhou et al. 2004); the class is the argmax of F. A node that nothing
    has reached has the commonest class among the known.
    """
    n, c = len(graph.labels), len(graph.classes)
    degree = np.bincount(graph.receivers, minlength=n)
    weights = (degree[graph.receivers] * degree[graph.senders])[:, None] ** -0.5
    truth = np.eye(c)[graph.labels] * known[:, None]
    commonest = np.argmax(np.bincount(graph.labels[known], minlength=c))
    scores, found = truth, []
    for _ in range(rounds + 1):
        found.append(np.where(scores.any(1), np.argmax(scores, axis=1), commonest))
        spread = np.zeros((n, c))
        np.add.at(spread, graph.receivers, weights * scores[graph.senders])
        scores = np.where(known[:, None], truth, spread)
    return np.stack(found)


def label_propagation(graph: Graph, most: int = 50) -> tuple[float, int]:
    """(accuracy on the test nodes, rounds): the rounds, at most `most`, are those that are best on
    the validation nodes, the fewest of them; the test nodes are scored once."""
    right = spread_labels(graph, graph.parts["train"], most) == graph.labels
    rounds = int(np.argmax(right[:, graph.parts["valid"]].mean(1)))
    return float(right[rounds, graph.parts["test"]].mean()), rounds
