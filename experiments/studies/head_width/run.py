"""`run_one`: trains one `StudyRun` in a folder and returns its `Row`; resumes after any stop."""

import contextlib
import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.data.dataset import Batch, Dataset
from attnlab.data.text import Corpus, dataset_of_corpus, gzip_bits, sample, windows
from attnlab.lab.machine import processor
from attnlab.lab.workdir import hold
from attnlab.models import ModelConfig, flops_per_token, matrix_axes, num_parameters
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import TrainConfig, make_optimizer
from attnlab.training.fit import FitResult, fit
from attnlab.training.interrupts import NonFiniteLoss
from attnlab.training.loggers import read_metrics
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES
from experiments.studies.head_width.ngrams import witten_bell
from experiments.studies.head_width.rows import (
    COMPLETE,
    DIVERGED,
    Baselines,
    Origin,
    Row,
    Scores,
    Sizes,
)
from experiments.studies.head_width.spec import (
    BATCH_TOKENS,
    StudyRun,
    model_config,
    num_steps,
    train_config,
)
from experiments.studies.head_width.texts import load_text

HELDOUT_BYTES, VALIDATION_BYTES = 1 << 18, 1 << 17
"""At most so many targets of a part are scored."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a study reads its data and keeps its runs, and the commit of its code."""

    data: Path
    work: Path
    commit: str


def scored_windows(text: np.ndarray, length: int, most: int) -> Batch:
    """Evenly spaced windows of at most `most` targets, the same for every run of a text."""
    count = max(1, min(most, len(text) - 1) // length)
    tokens, valid = windows(text, length, count)
    return {"tokens": tokens, "valid": valid}


def make_source(corpus: Corpus, length: int) -> Dataset:
    """The source of a run: random training windows; fixed held-out and validation windows."""
    kept = corpus.validation
    assert kept is not None
    heldout = scored_windows(corpus.heldout, length, HELDOUT_BYTES)
    validation = scored_windows(kept, length, VALIDATION_BYTES)
    return dataclasses.replace(
        dataset_of_corpus(corpus, length),
        heldout=lambda count: heldout,
        validation=lambda count: validation,
    )


def baselines(corpus: Corpus, config: TrainConfig, folder: Path) -> Baselines:
    """The n-gram baselines of a run, counted on all its batches (drawn again from its seed and
    steps), scored on its held-out windows. Kept in `folder` for runs of equal batches."""
    (seed,) = config.seeds
    sizes = f"{config.length}-{config.batch_size}-{config.steps}"
    path = folder / f"{corpus.sha256[:16]}-{seed}-{sizes}.json"
    if path.exists():
        return Baselines(**json.loads(path.read_text()))
    draw = functools.partial(sample, corpus.train, config.length, config.batch_size, seed=seed)
    train = np.concatenate([draw(step=step) for step in range(1, config.steps + 1)])
    rows = scored_windows(corpus.heldout, config.length, HELDOUT_BYTES)
    tokens = rows["tokens"].astype(np.uint8)
    bits = witten_bell(train.astype(np.uint8), tokens, rows["valid"], (0, 2, 3, 4))
    found = Baselines(bits[0], bits[2], bits[3], bits[4], gzip_bits(tokens[:, 1:]))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(dataclasses.asdict(found)).encode())
    return found


def run_one(spec: StudyRun, place: Place) -> Row:
    """Trains a run in `place.work`, from its newest checkpoint if any, and returns its row.

    A function of (spec, text, code, machine): stopped or killed at any moment and called again it
    returns the same numbers, bit for bit, but for its seconds. A loss that is not finite gives a
    row of status "diverged". Raises `training.Stopped` on SIGTERM, after a save; RunInUse where
    another process runs it.
    """
    corpus = load_text(spec.text, place.data)
    config = train_config(spec)
    folder = place.work / "runs" / spec.id
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder), _cpu(folder) as cpu_seconds:
        began = time.perf_counter()
        scores, seconds = _fit(spec, config, corpus, folder)
        if scores.status == DIVERGED:
            seconds = time.perf_counter() - began
        cpu = cpu_seconds()
    return Row(
        spec,
        _sizes(spec),
        scores,
        baselines(corpus, config, place.work / "baselines"),
        Origin(corpus.sha256, place.commit, round(seconds, 2), round(cpu, 2), processor()),
    )


def remove_run(spec: StudyRun, place: Place) -> None:
    """Deletes the folder of a run whose row is kept."""
    shutil.rmtree(place.work / "runs" / spec.id, ignore_errors=True)


def train(
    model: ModelConfig, config: TrainConfig, dataset: Dataset, folder: Path, *, speaks: bool
) -> FitResult:
    """Trains a decoder in a folder, made where it is missing, from its newest checkpoint if any."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        Recorder(folder, config.seeds, speaks=speaks) as recorder,
        Checkpoints(folder / "checkpoints", say=recorder.say) as checkpoints,
    ):
        return fit(
            model.build(),
            OBJECTIVES["causal_lm"],
            make_optimizer(config, matrix_axes(model)),
            config,
            dataset,
            recorder=recorder,
            checkpoints=checkpoints,
        )


def _fit(spec: StudyRun, config: TrainConfig, corpus: Corpus, folder: Path) -> tuple[Scores, float]:
    model = model_config(spec.variant, spec.parametrization)
    try:
        fitted = train(model, config, make_source(corpus, config.length), folder, speaks=False)
    except NonFiniteLoss:
        return Scores(DIVERGED, *[float("inf")] * 3), 0.0
    name = "bits_per_byte"
    last = [row for row in read_metrics(folder / "metrics.jsonl") if f"eval/{name}" in row][-1]
    assert last["step"] == config.steps
    bits = float(fitted.heldout[name][0]), float(last[f"eval/{name}"][0]), fitted.train[name][0]
    return Scores(COMPLETE, bits[0], bits[1], float(bits[2])), fitted.wall_seconds


def _sizes(spec: StudyRun) -> Sizes:
    model = model_config(spec.variant, spec.parametrization)
    steps = num_steps(spec)
    return Sizes(
        model.ffn.width,
        num_parameters(model),
        flops_per_token(model, spec.variant.length),
        steps,
        steps * BATCH_TOKENS,
    )


@contextlib.contextmanager
def _cpu(folder: Path) -> Iterator[Callable[[], float]]:
    """Yields a function: CPU seconds of this process in the run, earlier starts included."""
    path = folder / "cpu_seconds"
    before = float(path.read_text()) if path.exists() else 0.0
    began = time.process_time()

    def total() -> float:
        return before + time.process_time() - began

    try:
        yield total
    finally:
        write_atomic(path, str(total()).encode())
