r"""Do the papers that a paper cites show its subject? Attention over the edges of a graph.

    python -m experiments.run --config=experiments/configs/cora.py \
        --config.data.path=PATH/cora --workdir=runs/cora

Cora with the split of Yang et al. 2016 (arXiv 1603.08861): 2,708 papers, 1,433 words, 7 classes, of
which 20 papers each are known. Every paper attends to itself and to those it shares a citation
with. The test nodes are scored once, curves are of the validation nodes.

Measured, three seeds, 50 seconds on 2 CPU cores: 77.5 % of the test nodes (75.0 to 78.9); label
propagation 73.1 %, the commonest class 31.9 %. Velickovic et al. 2018 print 83.0 with another
network; `python -m experiments.studies.cora` trains that one and has 83.2 % (docs/results/cora.md).

Presets after the colon: `layout=`, `sharing=`, `citeseer` (the path must fit), `tiny` (for tests: a
graph of 30 nodes and two classes).
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnlab import lab
from attnlab.data.dataset import Baselines, Batch, DataSizes
from attnlab.data.rows import Splits
from experiments import config

if TYPE_CHECKING:
    import pandas


PARTS = ("train", "valid", "test")


class Graph(NamedTuple):
    """Nodes in the order of the file of features; every edge in both directions, each once.

    Attributes:
      features: [nodes, F], float32.
      labels: [nodes], numbers of `classes`.
      classes: their names.
      senders, receivers: [edges].
      parts: train, valid, test -> [nodes], True where a node belongs to the part.
    """

    features: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    senders: np.ndarray
    receivers: np.ndarray
    parts: dict[str, np.ndarray]


def read_graph(folder: Path) -> Graph:
    """The graph of a folder in the format of Cora (Sen et al. 2008, LINQS).

    Three files, each may be packed (`.gz`), columns apart by tabs: `*.content` with `id`, the
    features, `class`; `*.cites` with the ids of both ends of an edge; `*split*` with a line of
    names, then a number, the id and train, valid, test or rest. An edge of a node to itself is left
    out, one that is listed twice or both ways counts once; one that names a node without features
    is left out (Citeseer has 17 lines of that kind).

    Raises ValueError for a row of another length, an id that stands twice, a feature that is no
    number, a part of another name, a split of a node without features, and an empty part.
    """
    content, cites, split = (_table(folder, n) for n in ("*.content*", "*.cites*", "*split*"))
    nodes, labels = content.set_index(0).index, content.iloc[:, -1].astype("category").cat
    if not nodes.is_unique:
        raise ValueError(f"{folder}: a node stands twice in the file of features")
    ends = np.stack([nodes.get_indexer(cites[column]) for column in (0, 1)], axis=1)
    ends = ends[(ends >= 0).all(1) & (ends[:, 0] != ends[:, 1])]
    senders, receivers = np.unique(np.concatenate([ends, ends[:, ::-1]]), axis=0).astype(np.int32).T
    split = split[1:]
    known = split[1].isin(nodes) & split[2].isin([*PARTS, "rest"]) & ~split[1].duplicated()
    if len(wrong := split[~known]):
        raise ValueError(
            f"{folder}: the split has node {wrong.iloc[0, 1]!r} in part {wrong.iloc[0, 2]!r}; it "
            f"needs features and one part, and the parts are {', '.join(PARTS)} and rest"
        )
    parts = {part: nodes.isin(split[1][split[2] == part]) for part in PARTS}
    if empty := [part for part, members in parts.items() if not members.any()]:
        raise ValueError(f"{folder}: no node is in the part {empty[0]!r} of the split")
    features, numbers = content.iloc[:, 1:-1].to_numpy(np.float32), labels.codes.to_numpy(np.int32)
    return Graph(features, numbers, tuple(labels.categories), senders, receivers, parts)


def _table(folder: Path, pattern: str) -> "pandas.DataFrame":
    """The one file of this pattern; ids are texts."""
    import pandas

    found = [path for path in folder.glob(pattern) if not path.name.startswith(".")]
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} (data.path) has {len(found)} files {pattern}, not one")
    texts = {0: str} if pattern == "*.content*" else str
    rows = pandas.read_csv(found[0], sep="\t", header=None, dtype=texts, quoting=3)
    if (gaps := rows.isna().any(axis=1)).any():
        raise ValueError(f"{found[0]}:{gaps.argmax() + 1}: a column is missing or no number")
    return rows


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


def _baselines(graph: Graph) -> Baselines:
    # The training part has as many nodes of each class, so it does not show which is commonest.
    labels = graph.labels[graph.parts["test"]]
    majority, accuracy = np.bincount(labels).max() / len(labels), label_propagation(graph)[0]
    known = {"label propagation": 100 * accuracy, "majority class": 100 * float(majority)}
    return {"accuracy": known}


def row_of(graph: Graph) -> Batch:
    """A graph as a row: features, each line divided by its sum, in place of tokens, the classes,
    and the edges with one from every node to itself."""
    loops = np.arange(len(graph.labels), dtype=np.int32)
    return {
        "features": graph.features / np.maximum(graph.features.sum(1, keepdims=True), 1e-9),
        "labels": graph.labels,
        "senders": np.concatenate([graph.senders, loops]),
        "receivers": np.concatenate([graph.receivers, loops]),
    }


def rows(path: str) -> Splits:
    """The whole graph as the one row of each part, with the nodes of the part, which alone count
    (`valid`)."""
    if not path:
        raise ValueError("set data.path to the folder of a graph")
    graph = read_graph(Path(path))
    row = row_of(graph)
    train, valid, test = ([row | {"valid": graph.parts[n]}] for n in PARTS)
    return Splits(
        name=f"{Path(path).name}, {len(graph.labels):,} nodes, {len(graph.senders) // 2:,} edges",
        train=train,
        heldout=test,
        validation=valid,
        sizes=DataSizes(graph.features.shape[1], len(graph.classes)),
        baselines=functools.partial(_baselines, graph),
    )


VALUES = {
    "data.make": "experiments.configs.cora:rows",
    "model.kind": "encoder",
    "model.vocab_size": 1433,
    "model.max_len": 2708,
    "model.positions.kind": "none",
    "model.output.kind": "none",
    "model.output.pooler": "each",
    "model.output.num_classes": 7,
    "model.num_layers": 2,
    "model.heads.num_heads": 8,
    "model.ffn.width": 64,
    "model.dropout.rate": 0.6,
    "model.dropout.attention": 0.6,
    "model.dropout.ffn": 0.6,
    "train.length": 2708,
    "train.batch_size": 1,
    "train.evaluation.batch_size": 1,
    "train.steps": 150,
    "train.optimizer.learning_rate": 5e-3,
    "train.schedule.final_learning_rate": 5e-4,
    "train.schedule.warmup_steps": 10,
    "train.optimizer.weight_decay": 0.5,
    "train.log_every": 25,
    "train.evaluation.every": 25,
    "train.evaluation.windows": 0,
}
PRESETS: dict[str, config.Values] = {
    "citeseer": {
        "model.vocab_size": 3703,
        "model.max_len": 3312,
        "model.output.num_classes": 6,
        "train.length": 3312,
    },
    "tiny": {
        "model.vocab_size": 6,
        "model.max_len": 30,
        "model.output.num_classes": 2,
        **config.TINY,
        "train.batch_size": 1,
        "train.evaluation.batch_size": 1,
        "train.length": 30,
    },
}

get_config = config.other_data("node_class", "rows", VALUES, PRESETS)

variants = lab.grid(layout=("standard", "wide", "narrow"))
"""What a head reads of a paper: all, all with a wider head, or a slice."""
