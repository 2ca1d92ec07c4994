r"""Do shared layers win on pointer chasing? python -m experiments.studies.looped_depth --out=DIR

k-hop retrieval: a random permutation f of 16 nodes; position i holds the one-hot codes of i, f(i)
and of the number of hops k, drawn from 1 to 4 per row; the answer at i is f(f(... f(i))), k times.
An encoder with bidirectional attention must follow k pointers. Saunshi et al. 2025
(arXiv 2502.17416): a layer that is looped equals as many separate layers on such tasks, at a
fraction of the parameters. Variants, of 4 layers of width 64 unless said otherwise:

    separate                  separate layers: the reference
    albert, equal FLOPs       one layer, four times: equal FLOPs, about a quarter of the parameters
    albert, equal parameters  one layer, four times, with a wider FFN: about 4 times the FLOPs
    one layer                 one layer, once: the parameters of "albert, equal FLOPs"

Each variant is trained at four learning rates with 2 tuning seeds; the rate with the best mean
accuracy is used for 10 other seeds.

Writes looped_depth.csv, looped_depth.md and looped_depth.svg. A stopped command resumes.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from attnlab import FFN, ModelConfig, flops_per_token, heads, match_budget, num_parameters
from attnlab.lab.stats import paired_difference
from attnlab.models.specs import NoPositions, OutputHead
from attnlab.report.page import render, table
from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.rows import conclusions

NODES, HOPS, LAYERS, WIDTH, ROWS = 16, 4, 4, 64, 32
COLUMNS = [f"hops{k + 1}" for k in range(HOPS)]
RATES, TUNING_SEEDS = (1e-3, 3e-3, 6e-3, 12e-3), (100, 101)
REFERENCE = ModelConfig(
    kind="encoder",
    vocab_size=2 * NODES + HOPS,
    max_len=NODES,
    width=WIDTH,
    num_layers=LAYERS,
    heads=heads.Standard(num_heads=2, biases=("q", "k", "v", "o")),
    ffn=FFN(width=64),
    positions=NoPositions(),
    output=OutputHead(kind="none", pooler="each", num_classes=NODES),
)
ALBERT = dataclasses.replace(REFERENCE, sharing="albert")
SEPARATE = "separate"
VARIANTS = {
    SEPARATE: REFERENCE,
    "albert, equal FLOPs": ALBERT,
    "albert, equal parameters": match_budget(ALBERT, REFERENCE, "parameters").config,
    "one layer": dataclasses.replace(REFERENCE, num_layers=1),
}


def batch(key: Array, rows: int, hops: Int[Array, " B"]) -> tuple[Array, Array]:
    """Features [B, n, 2 n + K] and answers [B, n]: where `hops` steps of a permutation lead."""
    order = jax.random.split(key, rows)
    f = jax.vmap(lambda k: jax.random.permutation(k, NODES))(order)
    nodes = jnp.broadcast_to(jnp.arange(NODES), f.shape)
    answer = nodes
    for k in range(HOPS):
        step = jnp.take_along_axis(f, answer, 1)
        answer = jnp.where(hops[:, None] > k, step, answer)
    count = jnp.broadcast_to(jax.nn.one_hot(hops - 1, HOPS)[:, None], (*f.shape, HOPS))
    codes = jax.nn.one_hot(nodes, NODES), jax.nn.one_hot(f, NODES), count
    return jnp.concatenate(codes, -1), answer


State = tuple[dict[str, Array], optax.OptState]


@functools.partial(jax.jit, static_argnames=("config", "rate", "steps"))
def train(key: Array, config: ModelConfig, rate: float, steps: int) -> Float[Array, " K"]:
    """Trains a model; accuracy on 128 new permutations for each number of hops."""
    model = config.build()
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps, rate / 10)),
    )
    features, _ = batch(key, 1, jnp.ones(1, int))
    params = model.init(jax.random.fold_in(key, 0), features)["params"]

    def scores(params: dict[str, Array], features: Array) -> Array:
        return jnp.asarray(model.apply({"params": params}, features).classes)

    def step(state: State, number: Array) -> tuple[State, None]:
        params, moments = state
        draw, of_hops = jax.random.split(jax.random.fold_in(key, number))
        features, answer = batch(draw, ROWS, jax.random.randint(of_hops, (ROWS,), 1, HOPS + 1))

        def loss(params: dict[str, Array]) -> Array:
            classes = scores(params, features)
            losses = optax.softmax_cross_entropy_with_integer_labels(classes, answer)
            return jnp.asarray(losses.mean())

        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return (optax.apply_updates(params, updates), moments), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(1, steps + 1))
    features, answer = batch(
        jax.random.fold_in(key, 2**31 - 1), 128 * HOPS, jnp.repeat(jnp.arange(1, HOPS + 1), 128)
    )
    right = jnp.argmax(scores(params, features), -1) == answer
    return right.reshape(HOPS, -1).mean(1)


def run_one(variant: str, rate: float, seed: int, steps: int) -> dict[str, float]:
    """Percent right for each number of hops."""
    found = train(jax.random.key(seed), VARIANTS[variant], rate, steps)
    return {name: 100 * float(value) for name, value in zip(COLUMNS, found, strict=True)}


def accuracy(rows: pandas.DataFrame) -> pandas.Series:
    """Percent right of each row, mean over hops."""
    return rows[COLUMNS].mean(axis=1)


def best_rate(rows: pandas.DataFrame, variant: str) -> float:
    """The learning rate with the best mean accuracy over the tuning seeds."""
    tuning = rows[(rows.variant == variant) & rows.seed.isin(TUNING_SEEDS)]
    return float(accuracy(tuning).groupby(tuning.rate).mean().idxmax())


def judged(rows: pandas.DataFrame, variant: str) -> pandas.DataFrame:
    """The rows of a variant at its best rate that are not of tuning, by seed."""
    chosen = (rows.variant == variant) & (rows.rate == best_rate(rows, variant))
    return rows[chosen & ~rows.seed.isin(TUNING_SEEDS)].set_index("seed").sort_index()


COMMAND = "python -m experiments.studies.looped_depth --out=docs/results"


def page(rows: pandas.DataFrame, command: str = COMMAND) -> str:
    """The Markdown page of looped_depth.csv; `command` wrote it."""
    of = {name: judged(rows, name) for name in VARIANTS}
    said, lines = conclusions({name: accuracy(some) for name, some in of.items()}, digits=1), []
    for name, config in VARIANTS.items():
        cells = [name, f"{num_parameters(config):,}", f"{flops_per_token(config, NODES):,}"]
        cells += [str(of[name].rate.iloc[0]), *(f"{of[name][k].mean():.1f}" for k in COLUMNS)]
        found = paired_difference(accuracy(of[name]))
        interval = f"{found.low:.1f} to {min(found.high, 100):.1f}"
        lines.append([*cells, f"{found.mean:.1f} ({interval})"])
    header = ("variant", "parameters", "FLOPs per token", "learning rate",
              *(f"k = {k + 1}" for k in range(HOPS)), "mean over hops (95 %)")  # fmt: skip
    differences = [(name, text) for name, (text, _) in said.items()]
    text = render(
        Path(__file__).with_name("page.md.jinja"),
        words={name: word for name, (_, word) in said.items()},
        differences=table(("variant", "percentage points (95 %)"), differences),
        command=command,
        minutes=f"{rows.seconds.sum() / 60:.0f}",
        runs=len(rows),
        seeds=len(of[SEPARATE]),
        steps=of[SEPARATE].steps.iloc[0],
        variants=table(header, lines),
    )
    return f"{text}\n"


def figure(rows: pandas.DataFrame) -> Figure:
    """Percent right over hops, a line per variant."""
    drawn, [axes] = new_axes(1, 3.4)
    x = np.arange(1, HOPS + 1)
    for i, name in enumerate(VARIANTS):
        y = judged(rows, name)[COLUMNS].to_numpy()
        shifted = x + 0.06 * (i - 1.5)
        axes.plot(shifted, y.T, "o", color=COLOURS[i], alpha=0.35, markersize=3)
        axes.plot(shifted, y.mean(0), color=COLOURS[i], marker="os^D"[i], label=name)
    axes.set_xticks(x)
    axes.set_xlabel("hops")
    axes.set_ylabel("percent right")
    axes.set_ylim(0, 104)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return drawn
