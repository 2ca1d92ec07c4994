"""`run_one`: trains one `Run` in a folder and returns its `Row`; resumes after any stop."""

import contextlib
import dataclasses
import io
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.atomic import write_atomic
from attnlab.data.dataset import Batch, Dataset
from attnlab.data.text import Corpus
from attnlab.lab.machine import processor
from attnlab.lab.workdir import hold
from attnlab.models import ModelConfig, flops_per_token, matrix_axes, num_parameters
from attnlab.sharing import Params
from attnlab.training.callbacks import measured
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import TrainConfig, make_optimizer
from attnlab.training.fit import FitOptions, FitResult, fit
from attnlab.training.interrupts import NonFiniteLoss
from attnlab.training.loggers import read_metrics
from attnlab.training.metrics import Recorder
from attnlab.training.optimizers import Optimizer, make_transform
from attnlab.training.schedules import Steps
from experiments.studies.head_width.ngrams import baselines
from experiments.studies.head_width.texts import load_text, make_dataset
from experiments.studies.study3.copying import (
    PROBE,
    copy_objective,
    copy_step,
    probe_measure,
    split_bits,
)
from experiments.studies.study3.rows import (
    COMPLETE,
    DIVERGED,
    Baselines,
    Origin,
    Row,
    Scores,
    Sizes,
)
from experiments.studies.study3.spec import (
    BATCH_TOKENS,
    Run,
    model_config,
    narrow_variant,
    num_steps,
    train_config,
)
from experiments.studies.study3.widen import widen


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a study reads its data and keeps its runs, and the commit of its code."""

    data: Path
    work: Path
    commit: str


def run_one(run: Run, place: Place) -> Row:
    """Trains a run in `place.work`, from its newest checkpoint if any, and returns its row.

    A function of (run, text, code, machine): stopped or killed at any moment and called again it
    returns the same numbers, bit for bit, but for its seconds. A loss that is not finite gives a
    row of status "diverged". Raises `training.Stopped` on SIGTERM, after a save; RunInUse where
    another process runs it.
    """
    corpus = load_text(run.text, place.data)
    folder = place.work / "runs" / run.id
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder), _seconds(folder) as seconds:
        scores = _scores(run, corpus, folder, place.work / "halves")
        wall, cpu = seconds()
    versions = {name: metadata.version(name) for name in ("jax", "numpy", "optax", "flax")}
    return Row(
        run,
        _sizes(run),
        scores,
        _baselines(corpus, train_config(run), place.work / "baselines"),
        Origin(
            text_sha256=corpus.sha256,
            commit=place.commit,
            python=platform.python_version(),
            machine=processor(),
            seconds=round(wall, 2),
            cpu_seconds=round(cpu, 2),
            **versions,
        ),
    )


def _baselines(corpus: Corpus, config: TrainConfig, folder: Path) -> Baselines:
    """The n-gram baselines of a run, kept in `folder` for runs of equal batches."""
    (seed,) = config.seeds
    sizes = f"{config.length}-{config.batch_size}-{config.steps}"
    path = folder / f"{corpus.sha256[:16]}-{seed}-{sizes}.json"
    if path.exists():
        return Baselines(**json.loads(path.read_text()))
    found = baselines(corpus, config.length, config.batch_size, config.steps, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(found).encode())
    return Baselines(**found)


def remove_run(run: Run, place: Place) -> None:
    """Deletes the folder of a run whose row is kept."""
    shutil.rmtree(place.work / "runs" / run.id, ignore_errors=True)


def dataset_of(corpus: Corpus, length: int) -> Dataset:
    """Fixed held-out and validation windows; learning curves score the first evenly spaced ones."""
    dataset = make_dataset(corpus, length)
    assert dataset.validation is not None
    whole = dataset.validation(0)

    def validation(count: int) -> Batch:
        rows = len(whole["tokens"])
        index = np.linspace(0, rows, count or rows, endpoint=False).astype(int)
        return {name: array[index] for name, array in whole.items()}

    return dataclasses.replace(dataset, validation=validation)


def train_run(run: Run, corpus: Corpus, folder: Path, halves: Path) -> FitResult:
    """Trains a run to its end: at once, or after a first half and a reset of the optimizer."""
    config, model = train_config(run), model_config(run.variant)
    dataset = dataset_of(corpus, config.length)
    if run.variant.start == "scratch":
        optimizer, options = make_optimizer(config, matrix_axes(model)), FitOptions()
        if run.part == "D":
            probe = measured(probe_measure(model.build(), corpus.train), config.evaluation.every)
            options = FitOptions(callbacks=[probe])
        return _fit(model, config, optimizer, dataset, folder, options)
    params = second_start(run, first_half(run, dataset, folder, halves))
    half = config.steps // 2
    later = dataclasses.replace(dataset, batches=_shifted(dataset, half))
    second = dataclasses.replace(config, steps=config.steps - half)
    optimizer = reset_optimizer(config, half, model)
    return _fit(model, second, optimizer, later, folder / "second", FitOptions(params=params))


def first_half(run: Run, dataset: Dataset, folder: Path, halves: Path) -> Params:
    """The parameters half way of the training before the reset, kept in `halves` for other runs."""
    before = narrow_variant(run.variant)
    one = dataclasses.replace(run, variant=before, learning_rate=run.first_rate, first_rate=0.0)
    path = halves / f"{dataclasses.replace(one, part='', role='').id}.npz"
    model, config = model_config(before), train_config(one)
    shapes = jax.eval_shape(lambda: _initial(model, one.seed))
    if not path.exists():
        optimizer = make_optimizer(config, matrix_axes(model))  # with the rates of all steps
        half = dataclasses.replace(config, steps=config.steps // 2)
        fitted = _fit(model, half, optimizer, dataset, folder / "first", FitOptions())
        params = jax.tree.leaves(jax.tree.map(lambda a: np.asarray(a[0]), fitted.state.params))
        halves.mkdir(parents=True, exist_ok=True)
        file = io.BytesIO()
        np.savez(file, *params)
        write_atomic(path, file.getvalue())
    with np.load(path) as saved:
        arrays = [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(saved.files))]
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def second_start(run: Run, params: Params) -> Params:
    """The parameters after the reset: the same, or converted to the wider heads of the run."""
    if run.variant.start != "converted":
        return params
    narrow, wide = model_config(narrow_variant(run.variant)), model_config(run.variant)
    factor = narrow.layout.score_scale / wide.layout.score_scale
    return widen(params, _initial(wide, run.seed), factor)


def reset_optimizer(config: TrainConfig, half: int, model: ModelConfig) -> Optimizer:
    """An optimizer without state whose first step is step `half` of the schedule, with a linear
    rise over as many steps as the schedule's own warm-up."""
    whole = make_optimizer(config, matrix_axes(model)).schedule
    rise = config.schedule.warmup(config.steps) + 1

    def rate(step: Steps) -> jax.Array:
        return jnp.asarray(whole(step + half)) * jnp.minimum(1.0, (step + 1) / rise)

    return Optimizer(make_transform(config.optimizer, rate, matrix_axes(model)), rate)


def _initial(model: ModelConfig, seed: int) -> Params:
    tokens = jnp.zeros((1, 2), jnp.int32)
    params: Params = model.build().init(jax.random.key(seed), tokens=tokens)["params"]
    return params


def _shifted(dataset: Dataset, steps: int) -> Callable[[int, int, int, slice], Batch]:
    batches = dataset.batches
    assert callable(batches)
    return lambda seed, step, size, shard: batches(seed, step + steps, size, shard)


def _fit(
    model: ModelConfig,
    config: TrainConfig,
    optimizer: Optimizer,
    dataset: Dataset,
    folder: Path,
    options: FitOptions,
) -> FitResult:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        Recorder(folder, config.seeds, speaks=False) as recorder,
        Checkpoints(folder / "checkpoints", say=recorder.say) as checkpoints,
    ):
        return fit(
            model.build(),
            copy_objective(),
            optimizer,
            config,
            dataset,
            recorder=recorder,
            checkpoints=checkpoints,
            options=options,
        )


def _scores(run: Run, corpus: Corpus, folder: Path, halves: Path) -> Scores:
    try:
        fitted = train_run(run, corpus, folder, halves)
    except NonFiniteLoss:
        inf = math.inf
        return Scores(DIVERGED, inf, inf, inf, 0, 0, inf, inf, inf, inf, 0, "")
    valid = dataset_of(corpus, run.variant.length).heldout(0)["valid"]
    heldout, copy, other, share = split_bits(fitted.heldout)
    validation = split_bits(fitted.validation)
    count = int(valid.sum())
    curve = {}
    if run.part == "D":
        name = f"weights/{PROBE}"
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if name in row]
        curve = {int(row["step"]): float(row[name][0]) for row in rows}
    return Scores(
        COMPLETE, heldout, copy, other, count, round(share * count), *validation[:3],
        split_bits(fitted.train)[0], copy_step(curve) if curve else 0,
        " ".join(f"{step}:{bits:.4f}" for step, bits in curve.items()),
    )  # fmt: skip


def _sizes(run: Run) -> Sizes:
    model, steps = model_config(run.variant), num_steps(run.variant)
    length, tokens = run.variant.length, num_steps(run.variant) * BATCH_TOKENS
    halves = [model_config(narrow_variant(run.variant)), model]
    flops = sum(3.0 * flops_per_token(one, length) * tokens / 2 for one in halves)
    each = flops_per_token(model, length)
    return Sizes(model.ffn.width, num_parameters(model), each, flops, steps, tokens)


@contextlib.contextmanager
def _seconds(folder: Path) -> Iterator[Callable[[], tuple[float, float]]]:
    """Yields a function: (wall, CPU) seconds in the run, earlier starts included."""
    path = folder / "seconds"
    before = [float(word) for word in path.read_text().split()] if path.exists() else [0.0, 0.0]
    began = time.perf_counter(), time.process_time()

    def total() -> tuple[float, float]:
        return (
            before[0] + time.perf_counter() - began[0],
            before[1] + time.process_time() - began[1],
        )

    try:
        yield total
    finally:
        write_atomic(path, " ".join(map(str, total())).encode())
