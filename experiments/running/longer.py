"""More steps for a run that has ended: it goes on, where its schedule allows."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from attnlab.training import TrainConfig
from attnlab.training.schedules import common_steps
from experiments.running import lock, workdir

FIELD = "config.train.steps"
ENDED = "ended"
"""Holds, under its number of steps, the run as it was when it ended for the first time."""


def go_on(folder: Path, record: dict[str, Any], trains: TrainConfig) -> str:
    """Makes the run of `folder`, which is ours, the beginning of one that differs from it in more
    `train.steps` alone; does nothing where another thing or nothing is different. Returns what to
    say of it.

    The longer run ends with the numbers that it would have had from the start: it goes on from the
    newest checkpoint up to which the rates of both are the same. The run as it ended stays in
    ended/STEPS. Raises WorkdirError, and changes nothing, where there is no such checkpoint.
    """
    if not (folder / workdir.CONFIG).exists():
        return ""
    there = workdir.read_json(folder / workdir.CONFIG)
    differ = workdir.differences(there, record)
    if [name for name, _, _ in differ] != [FIELD] or differ[0][1] > differ[0][2]:
        return ""
    before = dataclasses.replace(trains, steps=differ[0][1])
    common = common_steps(before, trains.steps)
    steps = sorted(int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit())
    ended = (folder / workdir.RESULT).exists()
    if (steps and steps[0] > common) or (ended and not steps):
        first = f"the first checkpoint is at {steps[0]}" if steps else "there is no checkpoint"
        raise workdir.WorkdirError(
            f"{folder} cannot go on from {before.steps} to {trains.steps} steps: with "
            f"train.schedule={trains.schedule!r} the learning rates of the two differ after step "
            f"{common}, and {first}; use another --workdir (the schedules constant and "
            "warmup_stable_decay can go on)"
        )
    _keep(folder, before.steps)
    for step in steps:
        if step > common:
            shutil.rmtree(folder / "checkpoints" / str(step))
    # A kill before the last line leaves a run that goes on to its first end, or again as here.
    (folder / workdir.RESULT).unlink(missing_ok=True)
    workdir.write_json(folder / workdir.CONFIG, record | {"environment": there["environment"]})
    return f"{before.steps} steps become {trains.steps}"


def _keep(folder: Path, steps: int) -> None:
    """The run as it ended, whole or not at all."""
    kept = folder / ENDED / str(steps)
    if kept.exists() or not (folder / workdir.RESULT).exists():
        return
    new = kept.with_suffix(".tmp")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(folder, new, ignore=shutil.ignore_patterns(ENDED, "tensorboard", lock.OWNER))
    os.replace(new, kept)
