"""What a run of `experiments` left behind, as a model with its weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnlab.models import ModelConfig, from_json
from attnlab.models.transformer import Transformer
from attnlab.training.checkpoint import Checkpoints


class Left(NamedTuple):
    """A run at its newest checkpoint."""

    config: ModelConfig
    params: dict[int, dict[str, Any]]
    """Seed -> weights, on the first device"""
    steps: int
    """So many it had taken"""
    record: dict[str, Any]
    """Its config.json"""


def load_run(folder: str | Path, seed: int | None = None) -> tuple[Transformer, dict[str, Any]]:
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
    left = read_run(folder, None if seed is None else [seed])
    return left.config.build(), next(iter(left.params.values()))


def is_run(folder: str | Path) -> bool:
    """Is it the --workdir of a run, and no folder of a published model?"""
    folder = Path(folder)
    return (folder / "checkpoints").is_dir() and (folder / "config.json").is_file()


def read_run(folder: str | Path, seeds: Sequence[int] | None = None) -> Left:
    """All that a run left of these seeds, in their order; the first seed where they are None, and
    no weights where there are none. Raises as `load_run`.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise ValueError(f"{folder} holds no checkpoints; give the --workdir of one run")
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    there = record["config"]["train"]["seeds"]
    seeds = there[:1] if seeds is None else seeds
    if missing := [str(seed) for seed in seeds if seed not in there]:
        raise ValueError(
            f"{folder} has no seed {', '.join(missing)}, only {', '.join(map(str, there))}"
        )
    with Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.restore() if seeds else checkpoints.notes()
    if found is None:
        raise ValueError(f"{folder} has no checkpoint yet; let it run until its first")
    step, notes = found[0], found[-1]
    params = {seed: _weights(found[1], there.index(seed)) for seed in seeds}
    return Left(_config(folder, notes), params, step, record)


LAST_OF_FLAT_CONFIGS = "aa6530e"
"""The last commit that reads runs whose model config is flat."""


def _config(folder: Path, notes: dict[str, Any]) -> ModelConfig:
    """The config of the model, of what `describe_model` wrote."""
    fields = {name: value for name, value in notes["model"].items() if name != "plans"}
    if "version" not in fields:
        raise ValueError(
            f"{folder} is a run of attnlab before the nested model config (November 2026), which "
            f"this version cannot read; use commit {LAST_OF_FLAT_CONFIGS}"
        )
    return from_json(json.dumps({"version": fields.pop("version"), "model": fields}))


def _weights(state: dict[str, Any], place: int) -> dict[str, Any]:
    """Of path -> array [seeds, ...] the weights of one seed, as a tree."""
    params: dict[str, Any] = {}
    for path, a in state.items():
        *steps, last = path.split(".")
        if steps[:1] == ["params"]:
            where = params
            for step in steps[1:]:
                where = where.setdefault(step, {})
            where[last] = a[place]
    return params
