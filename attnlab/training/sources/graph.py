"""The row `graph`: one graph whose nodes have features and, some of them, a known class."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.training.sources.files import digest, lines_of, read_bytes
from attnlab.training.sources.source import Batch, Sizes, Source

PARTS = ("train", "valid", "test", "rest")


class Graph(NamedTuple):
    """Nodes in the order of the file of features; every edge in both directions, each once."""

    features: np.ndarray
    """[nodes, F], float32"""
    labels: np.ndarray
    """[nodes], numbers of `classes`"""
    classes: tuple[str, ...]
    senders: np.ndarray
    """[edges]"""
    receivers: np.ndarray
    parts: dict[str, np.ndarray]
    """train, valid, test -> [nodes], True where a node belongs to the part"""
    left_out: int
    """lines of edges that name a node without features"""
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of one graph, each with features and a class; `path` is a folder that
    `read_graph` reads.

    A row is the whole graph, with an edge from every node to itself besides: features, each row
    divided by its sum, in the place of words; the classes of all nodes; which of them count. The
    training nodes are learnt from, curves are of the validation nodes, the result of the test
    nodes, which are scored once.
    """

    path: str = ""

    def __post_init__(self):
        if self.path and not Path(self.path).is_dir():
            raise FileNotFoundError(f"no folder at {self.path}; set data.path to that of a graph")

    @property
    def graph(self) -> Graph:
        """What the folder holds."""
        if not self.path:
            raise ValueError("set data.path to the folder of a graph")
        return read_graph(Path(self.path))

    def sizes(self) -> Sizes:
        """Features and classes."""
        return Sizes(self.graph.features.shape[1], len(self.graph.classes))

    def shapes(self, length: int) -> Batch:
        """One graph; raises ValueError unless `length` is its number of nodes."""
        nodes = len(self.graph.labels)
        if length != nodes:
            raise ValueError(
                f"a row is the whole graph: set train.length and model.max_len to its {nodes} "
                f"nodes, not {length}"
            )
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), _row(self.graph, "train")
        )

    def load(self, length: int, folder: Path | None = None) -> Source:
        """The graph, once in every batch."""
        self.shapes(length)
        graph = self.graph

        def draw(resident: Any, key: jax.Array, size: int) -> Batch:
            repeat = lambda a: jnp.broadcast_to(a[None], (size, *a.shape))
            return jax.tree.map(repeat, resident)

        def scored(part: str, count: int) -> Batch:
            return jax.tree.map(lambda a: a[None], _row(graph, part))

        def yardsticks() -> dict[str, dict[str, float]]:
            spread, _ = label_propagation(graph)
            # The training part has as many nodes of each class: it cannot tell the commonest.
            labels = graph.labels[graph.parts["test"]]
            majority = float(np.bincount(labels).max() / len(labels))
            return {
                "accuracy": {"label propagation": 100 * spread, "majority class": 100 * majority}
            }

        counts = {f"{part} nodes": int(nodes.sum()) for part, nodes in graph.parts.items()}
        facts: dict[str, Any] = {"nodes": length, "edges": len(graph.senders) // 2, **counts}
        if graph.left_out:
            facts["edges left out for a node without features"] = graph.left_out
        return Source(
            name=Path(self.path).name,
            digest=graph.digest,
            sizes=self.sizes(),
            row_tokens=length,
            draw=draw,
            resident=_row(graph, "train"),
            heldout=functools.partial(scored, "test"),
            validation=functools.partial(scored, "valid"),
            train=functools.partial(scored, "train"),
            yardsticks=yardsticks,
            facts=facts,
        )


def _row(graph: Graph, part: str) -> Batch:
    """The whole graph, and the nodes of one part as those that count."""
    total = np.maximum(graph.features.sum(1, keepdims=True), 1e-9)
    loops = np.arange(len(graph.labels), dtype=np.int32)
    return {
        "features": graph.features / total,
        "labels": graph.labels,
        "valid": graph.parts[part],
        "senders": np.concatenate([graph.senders, loops]),
        "receivers": np.concatenate([graph.receivers, loops]),
    }


@functools.lru_cache(maxsize=2)
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
    paths = [_only(folder, pattern) for pattern in ("*.content*", "*.cites*", "*split*")]
    raw = [read_bytes(path) for path in paths]
    (content, cites, split), rows = (
        paths,
        [
            [line.split("\t") for line in lines_of(data, path)]
            for data, path in zip(raw, paths, strict=True)
        ],
    )
    nodes = _numbered([row[0] for row in rows[0]], content)
    features = np.zeros((len(nodes), len(rows[0][0]) - 2), np.float32)
    for number, row in enumerate(rows[0], 1):
        if len(row) != features.shape[1] + 2:
            raise ValueError(
                f"{content}:{number}: {len(row)} columns, the first line has "
                f"{features.shape[1] + 2}; write id, features and class apart by tabs"
            )
        try:
            features[number - 1] = row[1:-1]
        except ValueError as error:
            raise ValueError(f"{content}:{number}: a feature is no number ({error})") from None
    classes = sorted({row[-1] for row in rows[0]})
    labels = np.array([classes.index(row[-1]) for row in rows[0]], np.int32)
    named = [_columns(row, 2, cites, number) for number, row in enumerate(rows[1], 1)]
    ends = np.array([[nodes[a], nodes[b]] for a, b in named if a in nodes and b in nodes])
    both = np.unique(np.concatenate([ends, ends[:, ::-1]]), axis=0)
    senders, receivers = both[both[:, 0] != both[:, 1]].astype(np.int32).T
    parts = {part: np.zeros(len(nodes), bool) for part in PARTS}
    for number, row in enumerate(rows[2][1:], 2):
        _, name, part = _columns(row, 3, split, number)
        if part not in parts:
            raise ValueError(f"{split}:{number}: part {part!r} is none of {', '.join(parts)}")
        if name not in nodes:
            raise ValueError(f"{split}:{number}: node {name!r} has no line in {content}")
        parts[part][nodes[name]] = True
    parts.pop("rest")
    for part, members in parts.items():
        if not members.any():
            raise ValueError(f"{split}: no node is in the part {part!r}")
    left_out = len(named) - len(ends)
    return Graph(features, labels, tuple(classes), senders, receivers, parts, left_out, digest(raw))


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
    the validation nodes, the fewest of them; the test nodes are looked at once."""
    guesses = spread_labels(graph, graph.parts["train"], most)
    right = guesses == graph.labels
    rounds = int(np.argmax(right[:, graph.parts["valid"]].mean(1)))
    return float(right[rounds, graph.parts["test"]].mean()), rounds


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(
            f"{folder} must hold one file {pattern}, not {len(found)}; set data.path to the folder "
            "of a graph"
        )
    return found[0]


def _numbered(names: list[str], path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if name in found:
            raise ValueError(f"{path}:{number}: node {name!r} stands in line {found[name] + 1} too")
        found[name] = number - 1
    return found


def _columns(row: list[str], count: int, path: Path, number: int) -> list[str]:
    if len(row) != count:
        raise ValueError(f"{path}:{number}: {len(row)} columns, not {count} apart by tabs")
    return row
