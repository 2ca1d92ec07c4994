r"""How many pairs does a head of each width recall? python -m experiments.studies.recall --out=DIR

Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927; `data.synthetic`) by one
attention layer: x_t is an embedding of token t plus another of token t - 1 (their convolution of
width 2), so that one layer can find the value of a key and no run waits for an induction head to
form. Two questions: the fraction recalled over (num_heads N, head_dim h) at fixed N h = 32, and
over N at fixed h = 2. A logistic curve in ln pairs, ln h and ln N is fitted to the fractions.

Rank bound (Bhojanapalli et al. 2020, Theorem 1; experiments/studies/rank_bound): a head of width h
can make every positive attention matrix over n pairs where h >= n - 1. Recall needs only those
near a permutation, which a head of small width can make with large scores. Up to pairs = h + 1 a
head is sure to have the rank; that is not a limit.

Writes recall.csv, recall.md and recall.svg. A stopped command resumes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from attnlab import heads, multi_head_attention
from attnlab.data.synthetic import generate_recall
from attnlab.sharing import Params

WIDTH, VOCABULARY, TOKENS, RATE = 64, 128, 1024, 0.01
"""Residual stream, tokens (half are keys), tokens of a batch, learning rate."""
PAIRS = (4, 8, 16, 32)
FIXED_TOTAL = ((32, 1), (16, 2), (8, 4), (4, 8), (2, 16))
"""(num_heads, head_dim) with N h = 32."""
FIXED_DIM = ((4, 2), (8, 2), (16, 2), (32, 2))
"""h = 2."""
STEPS, SEEDS = 400, 10
LONGER, LONGER_SEEDS = 1600, 3
"""Steps of the check whether the limit is capacity or training: three points at 32 pairs."""
State = tuple[Params, optax.OptState]


class Point(NamedTuple):
    """What is trained, with several seeds."""

    num_heads: int
    head_dim: int
    pairs: int
    steps: int

    @property
    def heads(self) -> heads.Layout:
        """Standard heads."""
        return heads.Standard(width=WIDTH, num_heads=self.num_heads, head_dim=self.head_dim)


def init(key: Array, point: Point) -> Params:
    """Embeddings of this token and of the last, one attention layer, an output projection."""
    keys = jax.random.split(key, 4)
    return {
        "this": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "last": jax.random.normal(keys[1], (VOCABULARY, WIDTH)),
        "heads": heads.init(keys[2], point.heads),
        "out": jax.random.normal(keys[3], (WIDTH, VOCABULARY)) * WIDTH**-0.5,
    }


def logits(params: Params, tokens: Int[Array, "B T"], point: Point) -> Float[Array, "B T V"]:
    """Scores of the recalled value at every position."""
    this, last = jnp.asarray(params["this"]), jnp.asarray(params["last"])
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    x = this[tokens] + last[before].at[:, 0].set(0.0)
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    found = multi_head_attention(params["heads"], x, point.heads, is_causal=True)
    return found @ jnp.asarray(params["out"])


def loss(params: Params, key: Array, point: Point, size: int) -> tuple[Array, Array]:
    """Cross-entropy of the values at the queries, and the fraction that is right."""
    batch = generate_recall(
        key, size, vocab_size=VOCABULARY, pairs=point.pairs, length=4 * point.pairs
    )
    scores, values = logits(params, batch["tokens"], point), batch["values"]
    asked = values >= 0
    log_p = jax.nn.log_softmax(scores)
    nll = -jnp.take_along_axis(log_p, jnp.maximum(values, 0)[..., None], -1)[..., 0]
    right = jnp.argmax(scores, -1) == values
    return jnp.sum(nll * asked) / asked.sum(), jnp.sum(right * asked) / asked.sum()


@functools.partial(jax.jit, static_argnames="point")
def train(key: Array, point: Point) -> tuple[Array, Array]:
    """Trains one seed; (loss, fraction recalled) on 256 rows that no batch has."""
    size = max(1, TOKENS // (4 * point.pairs))
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, point.steps, 0.1))
    params = init(jax.random.fold_in(key, 0), point)

    def step(state: State, number: Array) -> tuple[State, None]:
        params, moments = state
        grads = jax.grad(lambda p: loss(p, jax.random.fold_in(key, number), point, size)[0])(params)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), None

    state = params, optimizer.init(params)
    (params, _), _ = jax.lax.scan(step, state, jnp.arange(1, point.steps + 1))
    return loss(params, jax.random.fold_in(key, 2**31 - 1), point, 256)


def run_one(seed: int, **point: int) -> dict[str, float]:
    """Loss in nats and fraction recalled."""
    loss, recalled = train(jax.random.key(seed), Point(**point))
    return {"loss": float(loss), "recalled": float(recalled)}


def runs() -> list[dict[str, Any]]:
    """Every run: both families, then the longer ones."""
    shapes = dict.fromkeys((*FIXED_TOTAL, *FIXED_DIM))
    main = [(*shape, pairs, seed, STEPS)
            for shape in shapes for pairs in PAIRS for seed in range(SEEDS)]  # fmt: skip
    longer = [(*shape, PAIRS[-1], seed, LONGER)
              for shape in FIXED_TOTAL[:3] for seed in range(LONGER_SEEDS)]  # fmt: skip
    names = ("num_heads", "head_dim", "pairs", "seed", "steps")
    return [dict(zip(names, run, strict=True)) for run in main + longer]
