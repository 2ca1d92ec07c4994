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
accuracy is used for 10 other seeds. Runs without a row in the CSV file are trained by `lab.sweep`.
The published rows are of the training of commit fdb4b6dc, whose warm-up started at 0 and which drew
other random numbers from the same seeds.

Writes looped_depth.csv, looped_depth.md and looped_depth.svg. A stopped command resumes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attnlab import FFN, ModelConfig, heads, lab, match_budget
from attnlab.data.dataset import BYTES, Baselines, Batch, DataSizes, DeviceBatch
from attnlab.data.synthetic import Generated
from attnlab.models.specs import NoPositions, OutputHead
from attnlab.training import EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from attnlab.training.objectives.objective import Example, Metric, Objective, Sums

NODES, HOPS, LAYERS, WIDTH, ROWS = 16, 4, 4, 64, 32
COLUMNS = [f"hops{k + 1}" for k in range(HOPS)]
RATES, TUNING_SEEDS = (1e-3, 3e-3, 6e-3, 12e-3), (100, 101)
STEPS, SEEDS = 1000, 10
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pointers(Generated):
    """Rows of `batch`, each with a number of hops drawn from 1 to `HOPS`."""

    heldout_rows: int = 128 * HOPS

    def sizes(self) -> DataSizes:
        """Features of a position, and nodes."""
        return DataSizes(2 * NODES + HOPS, NODES)

    def name(self, length: int) -> str:
        """The task."""
        return f"1 to {HOPS} hops along a permutation of {NODES} nodes"

    def generator(self, length: int) -> Callable[[Array, int], DeviceBatch]:
        """(key, size) -> rows."""

        def generate(key: Array, size: int) -> DeviceBatch:
            draw, of_hops = jax.random.split(key)
            hops = jax.random.randint(of_hops, (size,), 1, HOPS + 1)
            features, answer = batch(draw, size, hops)
            return {"features": features, "labels": answer}

        return generate

    def baselines(self, rows: Batch) -> Baselines:
        """None."""
        return {}


def read(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """Features and answers, which all count."""
    labels = batch["labels"]
    return Example({"tokens": batch["features"]}, labels, jnp.ones(labels.shape))


def right_after(hops: int) -> Metric:
    """Percent right in rows with so many hops."""

    def measure(logits: Array, example: Example) -> Sums:
        asked = jnp.asarray(example.inputs["tokens"])[..., 2 * NODES + hops - 1]
        return asked * (jnp.argmax(logits, -1) == example.targets), asked

    return Metric(f"hops{hops}", f"% right after {hops} hops", "higher", measure, 0.01, digits=1)


TASK = Objective(
    read,
    description="the node that a number of pointers lead to",
    model_kinds=("encoder",),
    metrics=tuple(right_after(k + 1) for k in range(HOPS)),
    required_arrays=("features", "labels"),
    output="classes",
)


def spec(variant: str, rate: float, seed: int, steps: int = STEPS) -> lab.RunSpec:
    """The run of a variant, a learning rate, a seed and a number of steps."""
    train = TrainConfig(
        steps=steps,
        batch_size=ROWS,
        length=NODES,
        optimizer=OptimizerConfig(name="adam", learning_rate=rate, beta2=0.999, weight_decay=0.0),
        schedule=ScheduleConfig(final_learning_rate=rate / 10, warmup_steps=steps // 20),
        evaluation=EvaluationConfig(every=steps, batch_size=512, windows=0),
        log_every=max(1, steps // 10),
        checkpoint_every=steps,
    )
    experiment = lab.Experiment(model=VARIANTS[variant], train=train, data=Pointers(), task=TASK)
    tags: dict[str, lab.Tag] = {"variant": variant, "rate": rate, "seed": seed, "steps": steps}
    name = variant.replace(",", "").replace(" ", "_")
    return lab.RunSpec(f"{name}-rate{rate:g}-steps{steps}-seed{seed}", experiment, seed, tags)


TUNING = [
    {"variant": name, "rate": rate, "seed": seed, "steps": STEPS}
    for name in VARIANTS for rate in RATES for seed in TUNING_SEEDS
]  # fmt: skip


def runs(rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """The runs of every variant at a learning rate."""
    return [{"variant": name, "rate": rate, "seed": seed, "steps": STEPS}
            for name, rate in rates.items() for seed in range(SEEDS)]  # fmt: skip


def trained(missing: Sequence[Mapping[str, Any]], workdir: str) -> list[dict[str, Any]]:
    """The rows of runs, of `lab.sweep`."""
    specs = [spec(**run) for run in missing]
    return [row(run) for run in lab.sweep(specs, workdir)] if specs else []


def row(run: lab.RunResult) -> dict[str, Any]:
    """The row of a run in looped_depth.csv; one that diverged has nothing right."""
    scores = {name: f"{run.scores.heldout.get(name, 0.0):.6g}" for name in COLUMNS}
    return {**run.spec.tags, **scores, "seconds": f"{run.timing.seconds:.1f}"}
