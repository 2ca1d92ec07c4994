"""More steps for a run that has ended: it goes on, where its schedule allows."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from attnlab.atomic import write_atomic
from attnlab.lab import lock
from attnlab.lab.result import FILE
from attnlab.load import SPEC
from attnlab.nested import JSON
from attnlab.training.config import TrainConfig, common_steps

ENDED = "ended"
"""Holds, under its number of steps, the run as it was when it ended for the first time."""


def is_longer(there: JSON, here: JSON) -> bool:
    """Does one spec, as JSON, differ from another in more `train.steps` alone?"""

    def without_steps(spec: JSON) -> JSON:
        config = spec["config"]
        train = config["train"] | {"steps": 0, "seeds": ()}
        names = {"seed": spec["seed"], "source": spec.get("source"), "start": spec.get("start")}
        return names | {"config": config | {"train": train}}

    steps = [spec["config"]["train"]["steps"] for spec in (there, here)]
    return without_steps(there) == without_steps(here) and bool(steps[0] < steps[1])


def extend(folder: Path, record: JSON, config: TrainConfig) -> str:
    """Makes the run of `folder` the beginning of one that differs from it in more steps alone.

    It does nothing where another thing or nothing differs. The longer run ends with the numbers
    that it would have had from the start: it goes on from the newest checkpoint up to which the
    learning rates of both are the same. The run as it ended stays in `ended/STEPS`.

    Args:
      folder: of the run, which this process holds.
      record: the new spec.json.
      config: of the longer training.

    Returns:
      A line for people, or "".

    Raises:
      ValueError: there is no such checkpoint; nothing is changed.
    """
    path = folder / SPEC
    if not path.exists():
        return ""
    there = json.loads(path.read_text(encoding="utf-8"))
    if not is_longer(there, record):
        return ""
    before = there["config"]["train"]["steps"]
    common = check_continues(folder, before, config)
    _keep(folder, before)
    for step in _checkpoints(folder):
        if step > common:
            shutil.rmtree(folder / "checkpoints" / str(step))
    # A kill before the last line leaves a run that goes on to its first end, or again as here.
    (folder / FILE).unlink(missing_ok=True)
    new = record | {"environment": there["environment"]}
    write_atomic(path, json.dumps(new, indent=1).encode())
    return f"{before} steps become {config.steps}"


def check_continues(folder: Path, before: int, config: TrainConfig) -> int:
    """The last step up to which `before` steps and those of `config` have the same rates.

    Raises:
      ValueError: the run of `folder` has no checkpoint up to there.
    """
    common = common_steps(dataclasses.replace(config, steps=before), config.steps)
    steps = _checkpoints(folder)
    ended = (folder / FILE).exists()
    if (steps and steps[0] > common) or (ended and not steps):
        first = f"the first checkpoint is at {steps[0]}" if steps else "there is no checkpoint"
        raise ValueError(
            f"{folder} cannot be continued from {before} to {config.steps} steps: with "
            f"train.schedule.name={config.schedule.name!r} the learning rates of the two differ "
            f"after step {common}, and {first}; use another --workdir (the schedules constant and "
            "warmup_stable_decay can be continued)"
        )
    return common


def _checkpoints(folder: Path) -> list[int]:
    return sorted(int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit())


def _keep(folder: Path, steps: int) -> None:
    """Copies the run as it ended, all of it or nothing."""
    kept = folder / ENDED / str(steps)
    if kept.exists() or not (folder / FILE).exists():
        return
    new = kept.with_suffix(".tmp")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(folder, new, ignore=shutil.ignore_patterns(ENDED, "tensorboard", lock.FILE))
    os.replace(new, kept)
