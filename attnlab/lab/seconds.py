"""Variants that take equal seconds a step: measured on this machine before the first run, and kept.

Equal seconds cannot be counted. The step of every variant is timed beside that of its reference, in
a process of its own, and the FFN width is solved for equal seconds. What was measured is kept in
`calibration.json` in the workdir; a sweep that goes on, on whatever machine, reads the file and
measures nothing.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from attnlab.atomic import write_atomic
from attnlab.data import Dataset
from attnlab.lab import lock
from attnlab.lab.experiment import Experiment
from attnlab.lab.machine import (
    cores,
    environment,
    keep_compiled,
    read_threads,
    use_threads,
    write_threads,
)
from attnlab.lab.spec import Match, RunSpec
from attnlab.models import ModelConfig, match_budget, matrix_axes, with_layout
from attnlab.nested import JSON
from attnlab.training import sharding
from attnlab.training.compiled import TrainStep, host_batch
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.optimizers import make_optimizer
from attnlab.training.step import TrainState, init_state

FILE = "calibration.json"
NEAR, FAR = 0.02, 0.05
"""How near 1 a ratio of seconds is good enough, and how far from it is none."""
TRIES = 6
ROUNDS, MOST_SECONDS = (9, 60), 6.0
"""Fewest and most rounds of a comparison, and its length where these allow it."""


class Ratio(NamedTuple):
    """Seconds of a step over those of the reference, one ratio a round."""

    ffn_width: int
    ratio: float
    """Median."""
    low: float
    """A quarter of the rounds is below"""
    high: float
    """and a quarter above."""
    milliseconds: float
    """Of the step, median."""
    rounds: int


def equal_seconds(
    specs: Sequence[RunSpec],
    match: Match,
    workdir: Path,
    *,
    threads: int | None = None,
    measures: bool = True,
    environment: Mapping[str, str] | None = None,
) -> list[RunSpec]:
    """The specs with the FFN width that gives each variant the seconds of its reference.

    Args:
      specs: the runs.
      match: layout and sharing plan of the reference.
      workdir: of the sweep.
      threads: on CPUs; None: those of the workdir, or cores // runs.
      measures: False: read `calibration.json` only.
      environment: further variables for the process that measures.

    Raises:
      ValueError: the file is missing and `measures` is False, it is of other variants, no width
        takes the seconds of the reference, or two variants have the same tags.
    """
    reference = {"layout": match.layout, "sharing": match.sharing}
    request: JSON = {}
    of: dict[str, RunSpec] = {}
    for spec in specs:
        one = {"config": spec.config.to_dict(), **reference}
        first = of.setdefault(spec.title, spec)
        if request.setdefault(spec.title, one) != one:
            raise ValueError(
                f"{first.id!r} and {spec.id!r} have the title {spec.title!r} and different "
                "configs; give them different tags"
            )
    path = workdir / FILE
    if not path.exists():
        if not measures:
            raise ValueError(
                f"match.budget=seconds: {path}, with the FFN width of each variant, is missing; "
                "run this command with --calibrate_only on a machine like those that will train"
            )
        workdir.mkdir(parents=True, exist_ok=True)
        threads = threads or read_threads(workdir) or max(1, len(cores()) // len(specs))
        with lock.hold(workdir, patience=3600):
            if not path.exists():  # another process may have measured while this one waited
                write_threads(workdir, threads)
                found = _measure(request, threads, environment or {})
                write_atomic(path, json.dumps({"variants": request} | found, indent=1).encode())
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["variants"] != json.loads(json.dumps(request)):
        raise ValueError(f"{path} belongs to other variants or configs; use another --workdir")
    return [_with_width(spec, kept["found"][spec.title]) for spec in specs]


def _with_width(spec: RunSpec, found: JSON) -> RunSpec:
    config = resized(spec.config, found["ffn_width"])
    config = dataclasses.replace(config, matched="seconds", seconds_ratio=round(found["ratio"], 3))
    return dataclasses.replace(spec, config=config)


def resized(config: Experiment, width: int) -> Experiment:
    """The experiment with another FFN width."""
    ffn = dataclasses.replace(config.model.ffn, width=width)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, ffn=ffn))


def _measure(request: JSON, threads: int, environment: Mapping[str, str]) -> JSON:
    """What `main` finds, in a process that holds the device no longer than it measures."""
    command = [sys.executable, "-m", "attnlab.lab.seconds", f"--threads={threads}"]
    done = subprocess.run(
        command,
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        check=False,
    )
    if done.returncode:
        raise ValueError("match.budget=seconds could not be measured; see above")
    found: JSON = json.loads(done.stdout)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Times the variants on standard input and prints what `FILE` holds, both as JSON."""
    parser = argparse.ArgumentParser(prog="python -m attnlab.lab.seconds", description=__doc__)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    request = json.load(sys.stdin)
    use_threads(args.threads)
    keep_compiled()
    found = {}
    try:
        for name, one in request.items():
            config = Experiment.from_dict(one["config"])
            found[name] = calibrate(name, config, one["layout"], one["sharing"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"environment": environment(), "found": found}))
    return 0


def calibrate(name: str, config: Experiment, layout: str, sharing: str) -> JSON:
    """The nearest width that was found for a variant, measured once more, and all that was tried.

    Args:
      name: for people.
      config: of the variant.
      layout, sharing: of the reference.
    """
    reference = with_layout(config.model, layout, sharing)
    dataset = config.data.load(config.train.length)
    timed = training_step(dataclasses.replace(config, model=reference), dataset)

    def compare(width: int) -> Ratio:
        return ratio(width, training_step(resized(config, width), dataset), timed)

    tried = solve(name, compare, _first(config.model, reference, config.train.length))
    best = compare(min(tried, key=_off).ffn_width)  # again: what was chosen looks better than it is
    text = f"{name}: ffn.width {best.ffn_width:,}, {best.ratio:.3f} times the seconds of a step of"
    text += f" {reference.heads.name}, {reference.sharing} ({len(tried)} tried)"
    print(text, file=sys.stderr, flush=True)
    return best._asdict() | {"tried": [one._asdict() for one in tried]}


def solve(name: str, compare: Callable[[int], Ratio], first: int) -> list[Ratio]:
    """What was tried, from ffn_width `first` on, until a ratio is `NEAR` 1 or after `TRIES`.

    Seconds are a + b ffn_width: the first step takes all for the FFN's, the next ones go where the
    line through all that was tried meets 1. Raises ValueError where the variant takes longer even
    without an FFN to speak of, and where nothing comes within `FAR`.

    >>> line = lambda width: Ratio(width, 0.4 + 0.002 * width, 0, 0, 0, 0)
    >>> [one.ffn_width for one in solve("wide", line, 512)]
    [512, 360, 300]
    """
    tried: list[Ratio] = []
    width = first
    while len(tried) < TRIES and width not in {one.ffn_width for one in tried}:
        tried.append(compare(width))
        if _off(tried[-1]) <= NEAR:
            return tried
        width = _next(tried)
    best = min(tried, key=_off)
    if _off(best) <= FAR:
        return tried
    if best.ffn_width == 1:
        raise ValueError(
            f"{name}: at ffn_width 1 a step still takes {best.ratio:.2f} times as long as the "
            "whole reference's; give the reference a larger ffn_width"
        )
    seen = ", ".join(f"{one.ffn_width}: {one.ratio:.3f}" for one in tried)
    raise ValueError(
        f"{name}: no ffn_width took the reference's seconds (width: ratio {seen}); the machine may "
        "be busy with other work"
    )


def _next(tried: list[Ratio]) -> int:
    """Where the line through all points meets 1."""
    widths, ratios = (np.array([float(one[i]) for one in tried]) for i in (0, 1))
    last = tried[-1]
    slope = last.ratio / last.ffn_width
    if len(tried) > 1 and np.ptp(widths) > 0:
        slope = float(np.polyfit(widths, ratios, 1)[0])
    if slope <= 0:  # noise: the ends are too near each other
        return max(1, round(last.ffn_width * (0.5 if last.ratio > 1 else 2)))
    at = min(tried, key=_off)
    return max(1, round(at.ffn_width + (1 - at.ratio) / slope))


def _off(one: Ratio) -> float:
    return abs(one.ratio - 1)


def _first(model: ModelConfig, reference: ModelConfig, length: int) -> int:
    """Equal FLOPs where there are such, or the width that is there."""
    try:
        return match_budget(model, reference, "flops", length=length).config.ffn.width
    except ValueError:
        return model.ffn.width


def training_step(config: Experiment, dataset: Dataset) -> Callable[[], float]:
    """A training step as `fit` compiles it; its call returns seconds."""
    train = dataclasses.replace(config.train, seeds=(0,))
    mesh = sharding.data_mesh(batch_size=train.batch_size)
    objective, model = OBJECTIVES[config.task].bind(dataset.sizes), config.model.build()
    optimizer = make_optimizer(train, matrix_axes(config.model))
    seeds = sharding.replicate(mesh, np.array(train.seeds, np.uint32))

    def init(seed: jax.Array) -> TrainState:
        return init_state(model, objective, optimizer.transform, dataset.shapes(), seed)

    state = sharding.replicate(mesh, jax.jit(jax.vmap(init))(seeds))
    arrays = sharding.replicate(mesh, dataset.device_arrays)
    batch = host_batch(dataset, train, mesh, 1)
    step = TrainStep(model, objective, optimizer, train, dataset, mesh)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch, seeds, arrays).compile()

    def run() -> float:
        nonlocal state
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state, batch, seeds, arrays))
        return time.perf_counter() - began

    run()
    return run


def ratio(width: int, ours: Callable[[], float], theirs: Callable[[], float]) -> Ratio:
    """Both in every round, either first in turn, so that other work on the machine meets both."""
    theirs()
    once = ours() + theirs()
    rounds = int(np.clip(MOST_SECONDS / once, *ROUNDS))
    seconds = np.empty((rounds, 2))
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            seconds[i, which] = (ours, theirs)[which]()
    low, middle, high = np.quantile(seconds[:, 0] / seconds[:, 1], [0.25, 0.5, 0.75])
    took = 1e3 * float(np.median(seconds[:, 0]))
    return Ratio(width, float(middle), float(low), float(high), took, rounds)


if __name__ == "__main__":
    sys.exit(main())
