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

import csv
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from attnlab import FFN, ModelConfig, flops_per_token, heads, match_budget, num_parameters
from attnlab.models.specs import NoPositions, OutputHead
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

NODES, HOPS, LAYERS, WIDTH, ROWS = 16, 4, 4, 64, 32
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
VARIANTS = {
    "separate": REFERENCE,
    "albert, equal FLOPs": ALBERT,
    "albert, equal parameters": match_budget(ALBERT, REFERENCE, "parameters").config,
    "one layer": dataclasses.replace(REFERENCE, num_layers=1),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""

    variant: str
    rate: float
    seed: int
    steps: int


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


def run_one(run: Run) -> Mapping[str, float]:
    """Percent right for each number of hops."""
    found = train(jax.random.key(run.seed), VARIANTS[run.variant], run.rate, run.steps)
    return {f"hops{k + 1}": 100 * float(value) for k, value in enumerate(found)}


def accuracy(line: Line) -> float:
    """Mean over hops, percent."""
    return float(np.mean([float(line[f"hops{k + 1}"]) for k in range(HOPS)]))


def best_rate(lines: Sequence[Line], variant: str) -> float:
    """The learning rate with the best mean accuracy over the tuning seeds."""
    of_rate = {
        rate: np.mean([accuracy(o) for o in matching(lines, variant=variant, rate=rate)
                       if int(o["seed"]) in TUNING_SEEDS])
        for rate in RATES
    }  # fmt: skip
    return max(of_rate, key=lambda rate: of_rate[rate])


def judged(lines: Sequence[Line], variant: str) -> list[Line]:
    """The lines of a variant at its best rate that are not of tuning, by seed."""
    of_rate = matching(lines, variant=variant, rate=best_rate(lines, variant))
    of_rate = [o for o in of_rate if int(o["seed"]) not in TUNING_SEEDS]
    return sorted(of_rate, key=lambda o: int(o["seed"]))


COMMAND = "python -m experiments.studies.looped_depth --out=docs/results"


def page(lines: Sequence[Line], command: str = COMMAND) -> str:
    """The Markdown page; `command` wrote it."""
    accuracies = {name: [accuracy(o) for o in judged(lines, name)] for name in VARIANTS}
    reference, rows = accuracies.pop("separate"), []
    said = conclusions({name: np.subtract(of, reference) for name, of in accuracies.items()})
    for name, config in VARIANTS.items():
        of_name = judged(lines, name)
        means = [interval(numbers(of_name, f"hops{k + 1}")) for k in range(HOPS)]
        cells = [name, f"{num_parameters(config):,}", f"{flops_per_token(config, NODES):,}"]
        cells += [of_name[0]["rate"], *(f"{m:.1f}" for m, _, _ in means)]
        mean, low, high = interval(accuracy(o) for o in of_name)
        rows.append([*cells, f"{mean:.1f} ({low:.1f} to {min(high, 100):.1f})"])
    header = ("variant", "parameters", "FLOPs per token", "learning rate",
              *(f"k = {k + 1}" for k in range(HOPS)), "mean over hops (95 %)")  # fmt: skip
    text = render(
        Path(__file__).with_name("page.md.jinja"),
        words={name: text.rpartition(": ")[2] for name, text in said.items()},
        differences=table(("variant", "percentage points (95 %)"), list(said.items())),
        command=command,
        minutes=f"{sum(numbers(lines, 'seconds')) / 60:.0f}",
        runs=len(lines),
        seeds=len(reference),
        steps=judged(lines, "separate")[0]["steps"],
        variants=table(header, rows),
    )
    return f"{text}\n"


def figure(lines: Sequence[Line]) -> Figure:
    """Percent right over hops, a line per variant."""
    drawn, [axes] = new_axes(1, 3.4)
    x = np.arange(1, HOPS + 1)
    for i, name in enumerate(VARIANTS):
        y = np.array([[float(o[f"hops{k}"]) for k in x] for o in judged(lines, name)])
        shifted = x + 0.06 * (i - 1.5)
        axes.plot(shifted, y.T, "o", color=COLOURS[i], alpha=0.35, markersize=3)
        axes.plot(shifted, y.mean(0), color=COLOURS[i], marker="os^D"[i], label=name)
    axes.set_xticks(x)
    axes.set_xlabel("hops")
    axes.set_ylabel("percent right")
    axes.set_ylim(0, 104)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return drawn


def requested(lines: Sequence[Line], seeds: int, steps: int) -> list[Line]:
    """The lines of a command with these --seeds and --steps, at whatever rate."""
    wanted = {*TUNING_SEEDS, *range(seeds)}
    return [o for o in matching(lines, steps=steps) if int(o["seed"]) in wanted]


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    out, steps = Path(flags.FLAGS.out), flags.FLAGS.steps
    path = out / "looped_depth.csv"
    for name in VARIANTS:
        tuning = [Run(name, rate, seed, steps) for rate in RATES for seed in TUNING_SEEDS]
        rate = best_rate(run_cells(tuning, run_one, path), name)
        run_cells(
            [Run(name, rate, seed, steps) for seed in range(flags.FLAGS.seeds)], run_one, path
        )
    # With seeds of a rate that was the best before.
    lines = requested(list(csv.DictReader(path.open())), flags.FLAGS.seeds, steps)
    write_results(out, "looped_depth", page(lines, app.given_command()), figure(lines))


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")
    flags.DEFINE_integer(
        "seeds", 10, "Seeds of each variant.", lower_bound=2, upper_bound=min(TUNING_SEEDS)
    )
    flags.DEFINE_integer("steps", 1000, "Training steps of a run.", lower_bound=1)
