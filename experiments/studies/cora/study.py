r"""GAT on Cora at the published configuration.

    python -m experiments.studies.cora --data=PATH/cora --out=DIR

Velickovic et al. 2018 (arXiv 1710.10903, section 3.3) print 83.0 +- 0.7 % of the test nodes over
100 runs. Configuration of the paper and of its code (github.com/PetarV-/GAT, execute_cora.py): 8
heads of 8 with ELU, then one head of 7 classes; dropout 0.6 on the inputs of both layers, on the
projected features and on attention; L2 of 5e-4; Glorot initial weights; Adam at 0.005. Training
ends when for 100 epochs neither validation loss nor accuracy was as good as its best; the scored
weights are those of the last epoch where both were. Each variant changes one ingredient.

Writes cora.csv, cora.md and cora.svg. A stopped command resumes.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from attnlab.data.graph import Graph, read_graph
from attnlab.report.page import render, table
from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments import app
from experiments.studies.cells import (
    Line,
    conclusions,
    interval,
    matching,
    numbers,
    run_cells,
    write_results,
)

HEADS, HEAD_DIM, RATE, PATIENCE, MOST = 8, 8, 0.005, 100, 2000
PUBLISHED = (83.0, 0.7)
Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A configuration; the defaults are the published one."""

    scores: str = "additive"
    """"additive": LeakyReLU(a . h_i + b . h_j); "dot": q . k / sqrt(H); "equal": no scores."""
    l2: float = 5e-4
    dropout: float = 0.6
    early_stopping: bool = True
    residual: bool = False


VARIANTS = {
    "published configuration": Variant(),
    "dot-product scores": Variant(scores="dot"),
    "equal attention weights": Variant(scores="equal"),
    "no L2": Variant(l2=0.0),
    "no dropout": Variant(dropout=0.0),
    "no early stopping (300 epochs)": Variant(early_stopping=False),
    "residual connection": Variant(residual=True),
}
EPOCHS = 300
"""Of the variant without early stopping."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""

    variant: str
    seed: int


class Edges(NamedTuple):
    """A graph with self-loops, and its features as a list of entries that are not zero."""

    senders: Int[Array, " E"]
    receivers: Int[Array, " E"]
    rows: Int[Array, " Z"]
    columns: Int[Array, " Z"]
    values: Float[Array, " Z"]
    labels: Int[Array, " n"]


def load(graph: Graph) -> Edges:
    """Features divided by the sum of their row, edges in both directions, self-loops."""
    features = graph.features / np.maximum(graph.features.sum(1, keepdims=True), 1e-9)
    rows, columns = np.nonzero(features)
    loops = np.arange(len(graph.labels))
    arrays = (
        np.concatenate([graph.senders, loops]), np.concatenate([graph.receivers, loops]),
        rows, columns, features[rows, columns], graph.labels,
    )  # fmt: skip
    return Edges(*map(jnp.asarray, arrays))


def glorot(key: Array, *shape: int) -> Array:
    """Uniform in +-sqrt(6 / (fan in + fan out)) of the last two axes (Glorot and Bengio 2010)."""
    limit = (6 / (shape[-2] + shape[-1])) ** 0.5
    return jax.random.uniform(key, shape, minval=-limit, maxval=limit)


def init(key: Array, features: int, classes: int, residual: bool = False) -> Params:
    """Weights of both layers: w [heads, in, out], the score vectors a and b, biases."""
    params: Params = {}
    layers = ((HEADS, features, HEAD_DIM), (1, HEADS * HEAD_DIM, classes))
    for i, (n, size, out) in enumerate(layers):
        keys = jax.random.split(jax.random.fold_in(key, i), 4)
        params[f"w{i}"] = glorot(keys[0], n, size, out)
        params[f"a{i}"] = glorot(keys[1], n, out, 1)[..., 0]
        params[f"b{i}"] = glorot(keys[2], n, out, 1)[..., 0]
        params[f"score_bias{i}"] = jnp.zeros((2, n))
        params[f"bias{i}"] = jnp.zeros((n, out))
        if residual and i == 0:
            params["skip"] = glorot(keys[3], size, n * out)
    return params


def dropout(key: Array, x: Array, rate: float) -> Array:
    """Zeros with probability `rate`, the rest divided by 1 - rate."""
    if not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attend(
    projected: Float[Array, "n N H"], weights: Params, layer: int, edges: Edges,
    scores: str = "additive", keys: Array | None = None, rate: float = 0.0,
) -> Float[Array, "n N H"]:  # fmt: skip
    """One layer of attention over edges, per head: softmax over the edges to a node, dropout of
    the weights and of the projected features, sum, bias."""
    n, senders, receivers = len(projected), edges.senders, edges.receivers
    if scores == "additive":
        first = jnp.einsum("nth,th->nt", projected, weights[f"a{layer}"])
        second = jnp.einsum("nth,th->nt", projected, weights[f"b{layer}"])
        first, second = (
            x + b for x, b in zip((first, second), weights[f"score_bias{layer}"], strict=True)
        )
        score = jax.nn.leaky_relu(first[receivers] + second[senders], 0.2)
    elif scores == "dot":
        # a and b scale the features per dimension: q = a * h, k = b * h
        q, k = projected * weights[f"a{layer}"], projected * weights[f"b{layer}"]
        score = jnp.sum(q[receivers] * k[senders], -1) / projected.shape[-1] ** 0.5
    else:
        score = jnp.zeros((len(senders), projected.shape[1]))
    top = jax.ops.segment_max(score, receivers, n)
    weight = jnp.exp(score - top[receivers])
    p = weight / jax.ops.segment_sum(weight, receivers, n)[receivers]
    if keys is not None:
        p, projected = dropout(keys[0], p, rate), dropout(keys[1], projected, rate)
    return (
        jax.ops.segment_sum(p[..., None] * projected[senders], receivers, n)
        + weights[f"bias{layer}"]
    )


def logits(
    params: Params, edges: Edges, variant: Variant, key: Array | None = None
) -> Float[Array, "n C"]:
    """Class scores of all nodes; dropout with a key."""
    keys: list[Array | None] = [None, None]
    if key is not None:
        keys = [jax.random.split(jax.random.fold_in(key, i), 3) for i in (0, 1)]
    rate, n = variant.dropout, len(edges.labels)
    w = params["w0"]
    # x W for sparse x; each head has a dropout of its own, as in the published code.
    entries = jnp.broadcast_to(edges.values[:, None], (len(edges.values), len(w)))
    if keys[0] is not None:
        entries = dropout(keys[0][2], entries, rate)
    terms = entries[..., None] * w.transpose(1, 0, 2)[edges.columns]
    projected = jax.ops.segment_sum(terms, edges.rows, n)
    x = attend(projected, params, 0, edges, variant.scores, keys[0], rate).reshape(n, -1)
    if variant.residual:
        x += jax.ops.segment_sum(
            edges.values[:, None] * params["skip"][edges.columns], edges.rows, n
        )
    x = jax.nn.elu(x)
    if keys[1] is not None:
        x = dropout(keys[1][2], x, rate)
    projected = jnp.einsum("nd,tdh->nth", x, params["w1"])
    return attend(projected, params, 1, edges, variant.scores, keys[1], rate)[:, 0]


def loss_and_accuracy(scores: Array, labels: Array, mask: Array) -> tuple[Array, Array]:
    """Mean cross-entropy and share of right classes over the nodes of a mask."""
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1)[:, 0]
    right = jnp.argmax(scores, -1) == labels
    return jnp.sum(losses * mask) / mask.sum(), jnp.sum(right * mask) / mask.sum()


class State(NamedTuple):
    """Of the training: Adam, and the early stopping of the published code."""

    epoch: Array
    params: Params
    first: Params
    second: Params
    best_loss: Array
    best_accuracy: Array
    since: Array
    kept: Params
    kept_epoch: Array


@functools.partial(jax.jit, static_argnames="variant")
def train(
    params: Params, edges: Edges, masks: dict[str, Array], key: Array, variant: Variant
) -> dict[str, Array]:
    """Trains from `params` and scores the test nodes once."""

    def objective(params: Params, key: Array) -> Array:
        loss, _ = loss_and_accuracy(
            logits(params, edges, variant, key), edges.labels, masks["train"]
        )
        return loss + variant.l2 * sum(jnp.sum(w**2) for w in params.values()) / 2

    def step(state: State) -> State:
        epoch = state.epoch + 1
        grads = jax.grad(objective)(state.params, jax.random.fold_in(key, epoch))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, state.second, grads)
        rate = RATE * jnp.sqrt(1 - 0.999**epoch) / (1 - 0.9**epoch)
        new = jax.tree.map(
            lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), state.params, first, second
        )
        loss, accuracy = loss_and_accuracy(
            logits(new, edges, variant), edges.labels, masks["valid"]
        )
        lower, higher = loss <= state.best_loss, accuracy >= state.best_accuracy
        keep = lower & higher if variant.early_stopping else jnp.array(True)
        kept = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state.kept)
        best = jnp.minimum(loss, state.best_loss), jnp.maximum(accuracy, state.best_accuracy)
        since = jnp.where(lower | higher, 0, state.since + 1)
        kept_epoch = jnp.where(keep, epoch, state.kept_epoch)
        return State(epoch, new, first, second, *best, since, kept, kept_epoch)

    def goes_on(state: State) -> Array:
        if not variant.early_stopping:
            return state.epoch < EPOCHS
        return (state.since < PATIENCE) & (state.epoch < MOST)

    zeros = jax.tree.map(jnp.zeros_like, params)
    none = jnp.array(0)
    start = State(
        none, params, zeros, zeros, jnp.array(jnp.inf), jnp.array(0.0), none, params, none
    )
    end = jax.lax.while_loop(goes_on, step, start)
    scores = logits(end.kept, edges, variant)
    found = {"epochs": end.epoch, "kept_epoch": end.kept_epoch}
    for part, nodes in masks.items():
        found[part] = 100 * loss_and_accuracy(scores, edges.labels, nodes)[1]
    return found


def run_one(run: Run, graph: Graph) -> Mapping[str, float]:
    """Accuracy on each part in percent, and epochs."""
    variant, key = VARIANTS[run.variant], jax.random.key(run.seed)
    sizes = graph.features.shape[1], len(graph.classes)
    params = init(jax.random.fold_in(key, 2**31 - 1), *sizes, variant.residual)
    parts = {name: jnp.asarray(nodes) for name, nodes in graph.parts.items()}
    found = train(params, load(graph), parts, key, variant)
    return {name: float(value) for name, value in found.items()}


def summary(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Variant -> test accuracies of its seeds."""
    return {name: np.array(numbers(matching(lines, variant=name), "test")) for name in VARIANTS}


COMMAND = "python -m experiments.studies.cora --data=PATH/cora --out=docs/results"


def page(lines: Sequence[Line], command: str = COMMAND) -> str:
    """The Markdown page; `command` wrote it."""
    found, rows = summary(lines), []
    main = found["published configuration"]
    others = {name: test for name, test in found.items() if test is not main}
    said = conclusions({name: test - main[: len(test)] for name, test in others.items()}, 2)
    for name, test in found.items():
        of_name = matching(lines, variant=name)
        mean, low, high = interval(test)
        cells = [
            name,
            str(len(test)),
            f"{mean:.2f} ± {test.std(ddof=1):.2f}",
            f"{low:.2f} to {high:.2f}",
        ]
        for column in ("valid", "epochs", "seconds"):
            cells.append(f"{np.mean(numbers(of_name, column)):.1f}")
        rows.append([*cells, said.get(name, "")])
    header = ("variant", "seeds", "test accuracy, %, mean ± standard deviation", "95 % interval",
              "validation, %", "epochs", "seconds a run", "difference (95 %)")  # fmt: skip
    mean, low, high = interval(main)
    text = render(
        Path(__file__).with_name("page.md.jinja"),
        score=f"{mean:.1f} ± {main.std(ddof=1):.1f}",
        seeds=len(main),
        interval=f"{low:.2f} to {high:.2f}",
        published=f"{PUBLISHED[0]} ± {PUBLISHED[1]}",
        says="agrees" if low <= PUBLISHED[0] <= high else "does not agree",
        command=command,
        minutes=f"{sum(numbers(lines, 'seconds')) / 60:.0f}",
        num_compared=len(said),
        variants=table(header, rows),
    )
    return f"{text}\n"


def figure(lines: Sequence[Line]) -> Figure:
    """Test accuracy by variant."""
    drawn, [axes] = new_axes(1, 3.4)
    found = summary(lines)
    for i, test in enumerate(found.values()):
        y = len(found) - 1 - i
        axes.plot(test, np.full(len(test), y), "o", color=COLOURS[0], alpha=0.5, markersize=4)
        axes.plot([test.mean()] * 2, [y - 0.3, y + 0.3], color=COLOURS[1], linewidth=2)
    axes.axvline(PUBLISHED[0], color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(found)), list(found)[::-1], fontsize=8)
    axes.set_xlabel("test accuracy, %")
    return drawn


def check_seeds(seeds: int, other_seeds: int) -> None:
    """Raises ValueError unless each seed of a variant has its pair."""
    if seeds < other_seeds:
        raise ValueError(
            f"--seeds={seeds} must be at least --other_seeds={other_seeds}: each run of a variant "
            "is compared with the published configuration at the same seed"
        )


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    check_seeds(flags.FLAGS.seeds, flags.FLAGS.other_seeds)
    graph, out = read_graph(Path(flags.FLAGS.data)), Path(flags.FLAGS.out)
    count = dict.fromkeys(VARIANTS, flags.FLAGS.other_seeds) | {
        "published configuration": flags.FLAGS.seeds
    }
    cells = [Run(name, seed) for name in VARIANTS for seed in range(count[name])]
    lines = run_cells(cells, functools.partial(run_one, graph=graph), out / "cora.csv")
    data = flags.FLAGS.data
    command = app.given_command().replace(f"data={data}", f"data=PATH/{Path(data).name}")
    write_results(out, "cora", page(lines, command), figure(lines))


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("data", None, "Folder of Cora (docs/reference/texts.md).", required=True)
    flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")
    flags.DEFINE_integer("seeds", 20, "Seeds of the published configuration.", lower_bound=2)
    flags.DEFINE_integer("other_seeds", 5, "Seeds of each other variant.", lower_bound=2)
