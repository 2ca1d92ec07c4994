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
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from scipy import optimize

from attnlab import heads, multi_head_attention
from attnlab.data.synthetic import generate_recall
from attnlab.lab.stats import paired_difference
from attnlab.report.page import render, table
from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from attnlab.sharing import Params

WIDTH, VOCABULARY, TOKENS, RATE = 64, 128, 1024, 0.01
"""Residual stream, tokens (half are keys), tokens of a batch, learning rate."""
PAIRS = (4, 8, 16, 32)
FIXED_TOTAL = ((32, 1), (16, 2), (8, 4), (4, 8), (2, 16))
"""(num_heads, head_dim) with N h = 32."""
FIXED_DIM = ((4, 2), (8, 2), (16, 2), (32, 2))
"""h = 2."""
LONGER, LONGER_SEEDS = 1600, 3
"""Steps of the check whether the limit is capacity or training: three points at 32 pairs."""
State = tuple[Params, optax.OptState]


class Point(NamedTuple):
    """What is trained, with several seeds."""

    num_heads: int
    head_dim: int
    pairs: int
    steps: int


def layout(point: Point) -> heads.Layout:
    """Standard heads."""
    return heads.Standard(width=WIDTH, num_heads=point.num_heads, head_dim=point.head_dim)


def init(key: Array, point: Point) -> Params:
    """Embeddings of this token and of the last, one attention layer, an output projection."""
    keys = jax.random.split(key, 4)
    return {
        "this": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "last": jax.random.normal(keys[1], (VOCABULARY, WIDTH)),
        "heads": heads.init(keys[2], layout(point)),
        "out": jax.random.normal(keys[3], (WIDTH, VOCABULARY)) * WIDTH**-0.5,
    }


def logits(params: Params, tokens: Int[Array, "B T"], point: Point) -> Float[Array, "B T V"]:
    """Scores of the recalled value at every position."""
    this, last = jnp.asarray(params["this"]), jnp.asarray(params["last"])
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    x = this[tokens] + last[before].at[:, 0].set(0.0)
    x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    found = multi_head_attention(params["heads"], x, layout(point), is_causal=True)
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


def runs(seeds: int, steps: int) -> list[dict[str, Any]]:
    """Every run: both families, then the longer ones."""
    shapes = dict.fromkeys((*FIXED_TOTAL, *FIXED_DIM))
    main = [(*shape, pairs, seed, steps)
            for shape in shapes for pairs in PAIRS for seed in range(seeds)]  # fmt: skip
    longer = [(*shape, PAIRS[-1], seed, LONGER)
              for shape in FIXED_TOTAL[:3] for seed in range(LONGER_SEEDS)]  # fmt: skip
    names = ("num_heads", "head_dim", "pairs", "seed", "steps")
    return [dict(zip(names, run, strict=True)) for run in main + longer]


def fitted(pairs: np.ndarray, dims: np.ndarray, count: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Coefficients [constant, ln pairs, ln h, ln N] of the logistic curve

        recalled = 1 / pairs + (1 - 1 / pairs) sigmoid(a + b ln pairs + c ln h + d ln N)

    by the least binomial cross-entropy; 1 / pairs is guessing among the stated values.
    """
    x = np.stack([np.ones(len(pairs)), np.log(pairs), np.log(dims), np.log(count)], 1)
    y = np.clip((right - 1 / pairs) / (1 - 1 / pairs), 0, 1)

    def cost(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = x @ w
        gradient = x.T @ (1 / (1 + np.exp(-z)) - y) + 1e-3 * w
        return float(np.sum(np.logaddexp(0, z) - y * z) + 5e-4 * w @ w), gradient

    found: np.ndarray = optimize.minimize(cost, np.zeros(4), jac=True).x
    return found


def fit_curve(rows: pandas.DataFrame, draws: int = 300) -> dict[str, tuple[float, float, float]]:
    """Coefficients with 95 % intervals of a bootstrap over seeds; "ratio" is b + c, 0 where only
    pairs / h counts; "half" the pairs / h at which half is recalled, at N h = 32 and h = 2."""
    names = ["pairs", "head_dim", "num_heads", "recalled"]
    of_seed = {seed: some[names].to_numpy(float) for seed, some in rows.groupby("seed")}
    random, seeds, found = np.random.default_rng(0), list(of_seed), []
    for i in range(draws + 1):
        chosen = seeds if i == 0 else random.choice(seeds, len(seeds))
        w = fitted(*np.concatenate([of_seed[seed] for seed in chosen]).T)
        half = math.exp(-(w[0] + w[2] * math.log(2) + w[3] * math.log(16)) / w[1]) / 2
        found.append([*w, w[1] + w[2], half])
    low, high = np.quantile(found[1:], [0.025, 0.975], axis=0)
    labels = ("constant", "ln pairs", "ln h", "ln N", "ratio", "half")
    return {name: (found[0][i], low[i], high[i]) for i, name in enumerate(labels)}


def recalled(rows: pandas.DataFrame, shape: tuple[int, int], pairs: int) -> pandas.Series:
    """Fractions recalled by the seeds of a (num_heads, head_dim)."""
    n, h = shape
    chosen = (rows.num_heads == n) & (rows.head_dim == h) & (rows.pairs == pairs)
    return rows.recalled[chosen]


def percent(rows: pandas.DataFrame, shape: tuple[int, int], pairs: int = PAIRS[-1]) -> str:
    """Mean percent recalled with its 95 % interval, or "not run"."""
    values = recalled(rows, shape, pairs)
    if values.empty:
        return "not run"
    found = paired_difference(100 * values)
    return f"{found.mean:.1f} ({max(found.low, 0):.1f} to {min(found.high, 100):.1f})"


def points_table(rows: pandas.DataFrame, shapes: Sequence[tuple[int, int]]) -> str:
    """Percent recalled by shape and pairs."""
    lines = [[*map(str, shape), *(percent(rows, shape, p) for p in PAIRS)] for shape in shapes]
    return table(("num_heads", "head_dim", *(f"{p} pairs" for p in PAIRS)), lines)


COMMAND = "python -m experiments.studies.recall --out=docs/results"


def page(rows: pandas.DataFrame, command: str = COMMAND) -> str:
    """The Markdown page of recall.csv; `command` wrote it."""
    steps = rows.steps[rows.steps != LONGER].max()
    main, longer = rows[rows.steps == steps], rows[rows.steps == LONGER]
    fit = fit_curve(main)
    answer = [[f"{n} of width {h}", percent(main, (n, h)), percent(longer, (n, h))]
              for n, h in FIXED_TOTAL]  # fmt: skip
    names = {"ratio": "ln pairs + ln h", "half": "pairs / h at half, 16x2"}
    estimates = [
        [names.get(k, k), f"{a:+.2f}", f"{b:+.2f} to {c:+.2f}"] for k, (a, b, c) in fit.items()
    ]
    text = render(
        Path(__file__).with_name("page.md.jinja"),
        answer=table(("heads", f"after {steps} steps", f"after {LONGER} steps"), answer),
        steps=steps,
        longer=LONGER,
        longer_seeds=LONGER_SEEDS,
        half=interval_text(fit["half"]),
        command=command,
        minutes=f"{rows.seconds.sum() / 60:.0f}",
        runs=len(rows),
        seeds=main.seed.nunique(),
        fixed_total=points_table(main, FIXED_TOTAL),
        fixed_dim=points_table(main, FIXED_DIM),
        estimates=table(("coefficient", "estimate", "95 % interval"), estimates),
        ratio=interval_text(fit["ratio"]),
        said="inconclusive: the interval holds 0"
        if fit["ratio"][1] * fit["ratio"][2] <= 0
        else "so pairs / h alone does not describe the fractions",
    )
    return f"{text}\n"


def interval_text(found: tuple[float, float, float]) -> str:
    """ "value (low to high)"."""
    return f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"


def figure(rows: pandas.DataFrame) -> Figure:
    """Fraction recalled over pairs / head_dim, a line per head_dim."""
    drawn, [axes] = new_axes(1, 3.4)
    main = rows[rows.steps != LONGER]
    for i, (n, h) in enumerate(FIXED_TOTAL):
        y = [recalled(main, (n, h), pairs).mean() for pairs in PAIRS]
        axes.plot([p / h for p in PAIRS], y, color=COLOURS[i], marker="os^Dv"[i], label=f"{n}x{h}")
    x = np.geomspace(1, 32, 100)
    a, b, c, d = (fit_curve(main, 1)[k][0] for k in ("constant", "ln pairs", "ln h", "ln N"))
    of_two = 2 * x
    z = a + b * np.log(of_two) + c * math.log(2) + d * math.log(16)
    axes.plot(x, 1 / of_two + (1 - 1 / of_two) / (1 + np.exp(-z)), "--", color=INK, linewidth=1)
    axes.axvline(1, color=INK, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.25, 1, 4, 16], ["1/4", "1", "4", "16"])
    axes.set_xlabel("pairs / head_dim")
    axes.set_ylabel("fraction recalled")
    axes.set_ylim(0, 1.03)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, title=None, loc="lower left")
    return drawn
