"""Arms that take equal seconds a step: measured on this machine, before the first arm, and kept.

`match.budget=seconds` cannot be counted. A sweep has the step of every arm timed beside that of
its reference (`match.layout` and `match.sharing`), in a process of its own as an arm is, solves
ffn_width for equal seconds and writes what it saw to calibration.json in its folder. The arms are
told their ffn_width and, as `seconds:1.01`, how many of the reference's seconds their step takes;
whoever goes on, on whatever machine, reads the file and measures nothing.
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from attnlab import training
from attnlab.models import ModelConfig, match_budget, matrix_axes, with_layout
from attnlab.training import sharding
from attnlab.training.fit import TrainStep, host_batch
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.step import init_state
from experiments.running import arm, jobs, launch, machine, workdir

SECONDS = "seconds"
NEAR, FAR = 0.02, 0.05
"""How near 1 a ratio of seconds is good enough, and how far from it is none."""
TRIES = 6
ROUNDS, MOST_SECONDS = (9, 60), 6.0
"""Fewest and most rounds of a comparison, and its length where these allow it."""
CLOCK = [sys.executable, "-m", "experiments.running.clock"]
"""The command that measures, told what on standard input."""


class Ratio(NamedTuple):
    """Seconds of a step of an arm over those of its reference, one ratio a round."""

    ffn_width: int
    ratio: float
    """Median"""
    low: float
    """A quarter of the rounds is below"""
    high: float
    """and a quarter above."""
    milliseconds: float
    """Of the arm's step, median"""
    rounds: int


def wanted(configs: dict[str, Any]) -> bool:
    """Does an arm ask for equal seconds?"""
    return any(config.match.budget == SECONDS for config in configs.values())


def changes(
    configs: dict[str, Any], folder: Path, threads: int | None, *, measures: bool
) -> dict[str, dict[str, Any]]:
    """Arm -> its ffn_width and ratio, as fields of its config: from `workdir.CALIBRATION`, which is
    measured now where it is missing and `measures`, with so many `threads`.

    Raises ValueError where it is missing otherwise, and where it is of other arms.
    """
    asked = {name: config.to_dict() for name, config in configs.items()}
    path = folder / workdir.CALIBRATION
    if not path.exists():
        if not measures:
            raise ValueError(
                f"match=seconds: {path} is missing, which says how wide each arm's FFN is for "
                "equal seconds; give this command --calibrate_only on a machine like those that "
                "will run the arms"
            )
        for name, config in configs.items():
            if config.match.budget != SECONDS:
                raise ValueError(f"{name}: match=seconds is for all arms of a sweep, or for none")
            arm.resolve(_without_match(config))  # what is wrong is said before anything runs
        with workdir.own(folder, patience=60):
            if not path.exists():  # another may have measured while this one waited
                found = _elsewhere({"arms": asked, "threads": threads})
                workdir.write_json(path, {"arms": asked} | found)
    told = workdir.read_json(path)
    if differ := workdir.differences(told["arms"], asked):
        rows = "\n".join(f"  {n}: there {a!r}, here {b!r}" for n, a, b in differ[: workdir.SHOWN])
        raise ValueError(f"{path} is of other arms:\n{rows}\nuse another --workdir")
    return {name: _fields(told["found"][name]) for name in configs}


def _fields(found: dict[str, Any]) -> dict[str, Any]:
    budget = f"{SECONDS}:{found['ratio']:.3f}"
    return {"model.ffn.width": found["ffn_width"], "match.budget": budget}


def _elsewhere(asked: dict[str, Any]) -> dict[str, Any]:
    """What `main` finds, in a process that holds the device no longer than it measures."""
    done = subprocess.run(
        CLOCK,
        input=pickle.dumps(asked),
        stdout=subprocess.PIPE,
        env={**os.environ, **jobs.jax_flags()},
    )
    if done.returncode:
        raise ValueError("match=seconds could not be measured; see above")
    return json.loads(done.stdout)


def main() -> None:
    """Times the arms that standard input asks for, and prints what `workdir.CALIBRATION` holds."""
    asked = pickle.load(sys.stdin.buffer)
    machine.compute_with(asked["threads"])
    machine.keep_compiled()
    found = {name: calibrate(name, ConfigDict(config)) for name, config in asked["arms"].items()}
    print(json.dumps({"environment": machine.environment(), "found": found}))


def calibrate(name: str, config: Any) -> dict[str, Any]:
    """The nearest that was found for one arm, measured once more, and all that was tried."""
    made = arm.resolve(_without_match(config))
    reference = with_layout(made.model, config.match.layout, config.match.sharing)
    source = made.data.load(made.train.length)
    timed = step(made._replace(model=reference), source)

    def compare(width: int) -> Ratio:
        ffn = dataclasses.replace(made.model.ffn, width=width)
        resized = dataclasses.replace(made.model, ffn=ffn)
        return ratio(width, step(made._replace(model=resized), source), timed)

    tried = solve(name, compare, _first(made.model, reference, made.train.length))
    best = compare(min(tried, key=_off).ffn_width)  # again: what was chosen looks better than it is
    text = f"{name}: ffn_width {best.ffn_width:,}, {best.ratio:.3f} times the seconds of a step of"
    text += f" {reference.heads.name}, {reference.sharing} ({len(tried)} tried)"
    print(text, file=sys.stderr, flush=True)
    return best._asdict() | {"tried": [one._asdict() for one in tried]}


def solve(name: str, compare: Callable[[int], Ratio], first: int) -> list[Ratio]:
    """What was tried, from ffn_width `first` on, until a ratio is `NEAR` 1 or after `TRIES`.

    Seconds are a + b ffn_width: the first step takes all for the FFN's, the next ones go where the
    line through all that was tried meets 1. Raises ValueError where the arm takes longer even
    without an FFN to speak of, and where nothing comes within `FAR`.

    >>> line = lambda width: Ratio(width, 0.4 + 0.002 * width, 0, 0, 0, 0)
    >>> [one.ffn_width for one in solve("arm", line, 512)]
    [512, 334, 300]
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


def _without_match(config: Any) -> Any:
    copy = config.copy_and_resolve_references()
    copy.match.budget = ""
    return copy


def step(made: arm.Arm, source: Any) -> Callable[[], float]:
    """A training step as `fit` compiles it; its call gives seconds.

    Of the first seed alone on a CPU, where seeds go one after the other; of all on an accelerator.
    """
    trains = made.train
    if jax.default_backend() == "cpu":
        trains = dataclasses.replace(trains, seeds=trains.seeds[:1])
    mesh = sharding.data_mesh(batch_size=trains.batch_size)
    task, model = OBJECTIVES[made.task].bind(source.sizes), made.model.build()
    optimizer = training.make_optimizer(trains, matrix_axes(made.model))
    seeds = sharding.replicate(mesh, np.array(trains.seeds, np.uint32))
    start = lambda seed: init_state(model, task, optimizer.transform, source.shapes(), seed)
    state = sharding.replicate(mesh, jax.jit(jax.vmap(start))(seeds))
    arrays = sharding.replicate(mesh, source.device_arrays)
    batch = host_batch(source, trains, mesh, 1)
    step_of_seeds = TrainStep(model, task, optimizer, trains, source, mesh)
    jitted = jax.jit(step_of_seeds, donate_argnums=0)
    compiled = jitted.lower(state, batch, seeds, arrays).compile()

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
    launch.start(main)
