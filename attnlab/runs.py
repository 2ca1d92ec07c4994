"""What a run of `experiments` left behind, as a model with its weights."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from attnlab.model.config import Model, ModelConfig
from attnlab.sharing.plan import Plan
from attnlab.training.checkpoint import Checkpoints


def load_run(folder: str | Path, seed: int | None = None) -> tuple[Model, dict[str, Any]]:
    """(model, params) of one seed, the first where it is None, at the newest checkpoint of the run
    that has `folder` as its --workdir.

    Weights are arrays on the first device; a checkpoint that is damaged is told and passed over.
    Needs the extra `train`. Raises ValueError where there is no run, no checkpoint or no such seed.

    >>> try:
    ...     load_run("nowhere")
    ... except ValueError as error:
    ...     print(error)
    nowhere holds no checkpoints; give the --workdir of one run
    """
    folder = Path(folder)
    if not (folder / "checkpoints").is_dir() or not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no checkpoints; give the --workdir of one run")
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    seeds = record["config"]["train"]["seeds"]
    seed = seeds[0] if seed is None else seed
    if seed not in seeds:
        raise ValueError(f"{folder} has no seed {seed}, only {', '.join(map(str, seeds))}")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.restore()
    if found is None:
        raise ValueError(f"{folder} has no checkpoint yet; let it run until its first")
    _, state, notes = found
    known = [f.name for f in dataclasses.fields(ModelConfig)]
    told = {name: notes["model"][name] for name in known if name in notes["model"]}
    params: dict[str, Any] = {}
    for path, a in state.items():
        *steps, last = path.split(".")
        if steps[:1] == ["params"]:
            where = params
            for step in steps[1:]:
                where = where.setdefault(step, {})
            where[last] = a[seeds.index(seed)]
    config = ModelConfig(**{name: _as_data(value) for name, value in told.items()})
    return config.build(), params


def _as_data(value: Any) -> Any:
    """What JSON made of a field, as the field is: tuples and plans."""
    if isinstance(value, dict):
        return Plan(**value)
    return tuple(value) if isinstance(value, list) else value
