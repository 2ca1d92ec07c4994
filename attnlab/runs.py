"""Loads the files of a run as a model with its parameters."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnlab.models import ModelConfig, from_json
from attnlab.models.transformer import Transformer
from attnlab.training.checkpoint import Checkpoints

SPEC, SPECS, RUNS = "spec.json", "specs.json", "runs"
"""Files of a run and of a sweep, the folder of its runs."""


class StoredRun(NamedTuple):
    """A run at its newest checkpoint."""

    config: ModelConfig
    params: dict[int, dict[str, Any]]
    """Seed -> parameters, on the first device."""
    steps: int
    """Steps taken at the checkpoint."""
    record: dict[str, Any]
    """Its spec.json: "config", and "source" with the "sha256" of the data."""


def load_run(folder: str | Path, seed: int | None = None) -> tuple[Transformer, dict[str, Any]]:
    """The model and the parameters of one seed, at the newest checkpoint.

    A checkpoint that is damaged is reported and passed over. Needs the extra `train`.

    Args:
      folder: of a run (`WORKDIR/runs/ID`), or the workdir of a sweep whose runs differ in their
        seed only, as `experiments.run` writes it.
      seed: None: the first.

    Returns:
      (model, params), arrays on the first device.

    Raises:
      ValueError: there is no run, no checkpoint, no such seed, or several runs of it.

    >>> try:
    ...     load_run("nowhere")
    ... except ValueError as error:
    ...     print(error)
    nowhere holds no run with checkpoints; give the folder of one run
    """
    found = read_run(folder, None if seed is None else [seed])
    return found.config.build(), next(iter(found.params.values()))


def is_run(folder: str | Path) -> bool:
    """Is it the folder of a run or of a sweep, not of a published model?"""
    folder = Path(folder)
    if (folder / SPECS).is_file():
        return True
    return (folder / "checkpoints").is_dir() and (folder / SPEC).is_file()


def read_run(folder: str | Path, seeds: Sequence[int] | None = None) -> StoredRun:
    """The checkpoints of these seeds of a run, in their order.

    Args:
      folder: as of `load_run`.
      seeds: None: the first; empty: no parameters are read.

    Raises:
      ValueError: as of `load_run`.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise ValueError(f"{folder} holds no run with checkpoints; give the folder of one run")
    if not (folder / SPECS).is_file():
        return _read_one(folder, seeds)
    if not seeds:
        return _read_one(run_of_seed(folder), seeds)
    found = [_read_one(run_of_seed(folder, seed), [seed]) for seed in seeds]
    params = {seed: one for run in found for seed, one in run.params.items()}
    return found[0]._replace(params=params)


def run_of_seed(workdir: str | Path, seed: int | None = None) -> Path:
    """The folder of the only run of a seed in the workdir of a sweep; None: the first seed.

    Raises:
      ValueError: there is no such run, or there are several.
    """
    workdir = Path(workdir)
    specs = json.loads((workdir / SPECS).read_text(encoding="utf-8"))
    seed = specs[0]["seed"] if seed is None else seed
    ids = [spec["id"] for spec in specs if spec["seed"] == seed]
    if not ids:
        known = ", ".join(str(seed) for seed in dict.fromkeys(spec["seed"] for spec in specs))
        raise ValueError(f"{workdir} has no seed {seed}, only {known}")
    if len(ids) > 1:
        known = ", ".join(ids)
        raise ValueError(
            f"{workdir} is a sweep of several models; give the folder of one run, as "
            f"{workdir / RUNS / ids[0]} (its runs with seed {seed}: {known})"
        )
    return workdir / RUNS / str(ids[0])


def seeds_of(folder: str | Path) -> list[int]:
    """The seeds of a run, or of the only model of a sweep, in their order. Raises ValueError."""
    folder = Path(folder)
    if (folder / SPECS).is_file():
        specs = json.loads((folder / SPECS).read_text(encoding="utf-8"))
        return list(dict.fromkeys(int(spec["seed"]) for spec in specs))
    return [_read_one(folder, ()).record["seed"]]


def _read_one(folder: Path, seeds: Sequence[int] | None) -> StoredRun:
    """Of the folder of a run."""
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} has no checkpoint yet; let it run until its first")
    record = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    own = record["seed"]
    seeds = [own] if seeds is None else seeds
    if missing := [str(seed) for seed in seeds if seed != own]:
        raise ValueError(f"{folder} has no seed {', '.join(missing)}, only {own}")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.restore() if seeds else checkpoints.notes()
    if found is None:
        raise ValueError(f"{folder} has no checkpoint yet; let it run until its first")
    step, notes = found[0], found[-1]
    params = {seed: _params(found[1]) for seed in seeds}
    return StoredRun(_config(notes), params, step, record)


def _config(notes: dict[str, Any]) -> ModelConfig:
    """The config of the model, from the file that `describe_model` wrote."""
    fields = {name: value for name, value in notes["model"].items() if name != "plans"}
    return from_json(json.dumps({"version": fields.pop("version"), "model": fields}))


def _params(state: dict[str, Any]) -> dict[str, Any]:
    """The parameters as a tree, from path -> array [1, ...]."""
    params: dict[str, Any] = {}
    for path, a in state.items():
        *steps, last = path.split(".")
        if steps[:1] == ["params"]:
            where = params
            for step in steps[1:]:
                where = where.setdefault(step, {})
            where[last] = a[0]
    return params
