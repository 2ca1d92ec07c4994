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

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from experiments.configs.cora import Graph, row_of

HEADS, HEAD_DIM, RATE, PATIENCE, MOST = 8, 8, 0.005, 100, 2000
PUBLISHED = (83.0, 0.7)
Params = dict[str, Array]


class Variant(NamedTuple):
    """A configuration; the defaults are the published one."""

    scores: str = "additive"
    """"additive": LeakyReLU(a . h_i + b . h_j); "dot": q . k / sqrt(H); "equal": no scores."""
    l2: float = 5e-4
    dropout: float = 0.6
    early_stopping: bool = True
    residual: bool = False


MAIN = "published configuration"
VARIANTS = {
    MAIN: Variant(),
    "dot-product scores": Variant(scores="dot"),
    "equal attention weights": Variant(scores="equal"),
    "no L2": Variant(l2=0.0),
    "no dropout": Variant(dropout=0.0),
    "no early stopping (300 epochs)": Variant(early_stopping=False),
    "residual connection": Variant(residual=True),
}
EPOCHS = 300
"""Of the variant without early stopping."""
RUNS = [
    {"variant": name, "seed": seed}
    for name in VARIANTS
    for seed in range(20 if name == MAIN else 5)
]


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
    row = row_of(graph)
    features = row["features"]
    rows, columns = np.nonzero(features)
    arrays = row["senders"], row["receivers"], rows, columns, features[rows, columns], row["labels"]
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


def dropout(key: Array | None, x: Array, rate: float) -> Array:
    """Zeros with probability `rate`, the rest divided by 1 - rate; without a key x as it is."""
    if key is None or not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


Keys = tuple[Array | None, Array | None, Array | None]
"""Of the dropout of a layer: attention weights, projected features, inputs."""
NO_DROPOUT: Keys = (None, None, None)


def attend(
    projected: Float[Array, "n N H"], weights: Params, layer: int, edges: Edges,
    variant: Variant = VARIANTS[MAIN], keys: Keys = NO_DROPOUT,
) -> Float[Array, "n N H"]:  # fmt: skip
    """One layer of attention over edges, per head: softmax over the edges to a node, dropout of
    the weights and of the projected features, sum, bias."""
    n, senders, receivers = len(projected), edges.senders, edges.receivers
    a, b = weights[f"a{layer}"], weights[f"b{layer}"]
    if variant.scores == "additive":
        biases = weights[f"score_bias{layer}"]
        first = jnp.einsum("nth,th->nt", projected, a) + biases[0]
        second = jnp.einsum("nth,th->nt", projected, b) + biases[1]
        score = jax.nn.leaky_relu(first[receivers] + second[senders], 0.2)
    elif variant.scores == "dot":  # a and b scale the features per dimension: q = a * h, k = b * h
        q, k = projected * a, projected * b
        score = jnp.sum(q[receivers] * k[senders], -1) / projected.shape[-1] ** 0.5
    else:
        score = jnp.zeros((len(senders), projected.shape[1]))
    weight = jnp.exp(score - jax.ops.segment_max(score, receivers, n)[receivers])
    p = weight / jax.ops.segment_sum(weight, receivers, n)[receivers]
    p = dropout(keys[0], p, variant.dropout)
    projected = dropout(keys[1], projected, variant.dropout)
    mixed = jax.ops.segment_sum(p[..., None] * projected[senders], receivers, n)
    return mixed + weights[f"bias{layer}"]


def logits(
    params: Params, edges: Edges, variant: Variant, key: Array | None = None
) -> Float[Array, "n C"]:
    """Class scores of all nodes; dropout with a key."""
    first = second = NO_DROPOUT
    if key is not None:
        first, second = (tuple(jax.random.split(jax.random.fold_in(key, i), 3)) for i in (0, 1))
    rate, n, w = variant.dropout, len(edges.labels), params["w0"]
    # x W for sparse x; each head has a dropout of its own, as in the published code.
    entries = jnp.broadcast_to(edges.values[:, None], (len(edges.values), len(w)))
    entries = dropout(first[2], entries, rate)
    terms = entries[..., None] * w.transpose(1, 0, 2)[edges.columns]
    projected = jax.ops.segment_sum(terms, edges.rows, n)
    x = attend(projected, params, 0, edges, variant, first).reshape(n, -1)
    if variant.residual:
        kept = edges.values[:, None] * params["skip"][edges.columns]
        x += jax.ops.segment_sum(kept, edges.rows, n)
    x = dropout(second[2], jax.nn.elu(x), rate)
    projected = jnp.einsum("nd,tdh->nth", x, params["w1"])
    return attend(projected, params, 1, edges, variant, second)[:, 0]


def loss_and_accuracy(scores: Array, labels: Array, mask: Array) -> tuple[Array, Array]:
    """Mean cross-entropy and share of right classes over the nodes of a mask."""
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1)[:, 0]
    right = jnp.argmax(scores, -1) == labels
    return jnp.sum(losses * mask) / mask.sum(), jnp.sum(right * mask) / mask.sum()


class State(NamedTuple):
    """Of the training, with the early stopping of the published code."""

    epoch: Array
    params: Params
    moments: optax.OptState
    best_loss: Array
    best_accuracy: Array
    since: Array
    kept: Params
    kept_epoch: Array


@functools.partial(jax.jit, static_argnames="variant")
def train(
    params: Params, edges: Edges, masks: dict[str, Array], key: Array, variant: Variant
) -> dict[str, Array]:
    """Trains from `params`; epochs, and the accuracy of each part in percent."""
    optimizer = optax.adam(RATE)

    def objective(params: Params, key: Array) -> Array:
        scores = logits(params, edges, variant, key)
        loss, _ = loss_and_accuracy(scores, edges.labels, masks["train"])
        return loss + variant.l2 * sum(jnp.sum(w**2) for w in params.values()) / 2

    def step(state: State) -> State:
        epoch = state.epoch + 1
        grads = jax.grad(objective)(state.params, jax.random.fold_in(key, epoch))
        updates, moments = optimizer.update(grads, state.moments)
        new = optax.apply_updates(state.params, updates)
        scores = logits(new, edges, variant)
        loss, accuracy = loss_and_accuracy(scores, edges.labels, masks["valid"])
        lower, higher = loss <= state.best_loss, accuracy >= state.best_accuracy
        keep = lower & higher if variant.early_stopping else jnp.array(True)
        kept = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state.kept)
        best = jnp.minimum(loss, state.best_loss), jnp.maximum(accuracy, state.best_accuracy)
        since = jnp.where(lower | higher, 0, state.since + 1)
        kept_epoch = jnp.where(keep, epoch, state.kept_epoch)
        return State(epoch, new, moments, *best, since, kept, kept_epoch)

    def continues(state: State) -> Array:
        if not variant.early_stopping:
            return state.epoch < EPOCHS
        return (state.since < PATIENCE) & (state.epoch < MOST)

    zero, best = jnp.array(0), (jnp.array(jnp.inf), jnp.array(0.0))
    start = State(zero, params, optimizer.init(params), *best, zero, params, zero)
    end = jax.lax.while_loop(continues, step, start)
    scores = logits(end.kept, edges, variant)
    found = {"epochs": end.epoch, "kept_epoch": end.kept_epoch}
    for part, nodes in masks.items():
        found[part] = 100 * loss_and_accuracy(scores, edges.labels, nodes)[1]
    return found


def run_one(name: str, seed: int, graph: Graph) -> dict[str, float]:
    """Accuracy on each part in percent, and epochs."""
    variant, key = VARIANTS[name], jax.random.key(seed)
    sizes = graph.features.shape[1], len(graph.classes)
    params = init(jax.random.fold_in(key, 2**31 - 1), *sizes, variant.residual)
    parts = {name: jnp.asarray(nodes) for name, nodes in graph.parts.items()}
    found = train(params, load(graph), parts, key, variant)
    return {name: float(value) for name, value in found.items()}
