"""Weights that are there already: of a published folder, of a run; and under another plan."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab import pretrained
from attnlab.model.config import ModelConfig
from attnlab.sharing import surgery
from attnlab.sharing.plan import Plan, name_of
from attnlab.training.checkpoint import Checkpoints, digest
from experiments.running import workdir


class Weights(NamedTuple):
    """A model with its weights, and what tells them from others."""

    config: ModelConfig
    params: Any
    digest: str


# What a run may choose: how weights are shared, computed with and dropped, not what is computed.
MAY_DIFFER = {
    "plan",
    "delta_rank",
    "dtype",
    "remat",
    "order",
    "implementation",
    "init_std",
    "init_residual",
}
MAY_DIFFER |= {"dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"}
MAY_DIFFER |= {"ffn_dropout_rate", "dropout_places"}


def check(model: ModelConfig, folder: str) -> None:
    """Raises ValueError that names every field of `model` which the weights of `folder` forbid."""
    stored = pretrained.load_config(folder)
    wrong = []
    for field in dataclasses.fields(stored):
        ours, theirs = getattr(model, field.name), getattr(stored, field.name)
        if field.name not in MAY_DIFFER and ours != theirs:
            wrong.append(f"model.{field.name}={ours!r} (there {theirs!r})")
    if wrong:
        raise ValueError(
            f"the weights of {folder} make another model than {', '.join(wrong)}; leave these "
            "fields as the folder has them, or start=''"
        )


def load(folder: str) -> Weights:
    """The model of a published folder."""
    model, params = pretrained.load(folder)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    told = [f"{jax.tree_util.keystr(path)} {digest(leaf)}" for path, leaf in leaves]
    return Weights(model.config, params, hashlib.sha256("\n".join(told).encode()).hexdigest())


def load_run(folder: Path, seed: int | None = None) -> Weights:
    """The model of one seed (None: the first) from the newest checkpoint of a run.

    Raises ValueError where there is none, or no such seed.
    """
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} holds no checkpoints; give the --workdir of one run")
    seeds = workdir.read_json(folder / workdir.CONFIG)["config"]["train"]["seeds"]
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
    return Weights(config, params, "")


def under_plan(stored: Weights, model: ModelConfig, tokens: Any) -> tuple[Any, str]:
    """The weights under the plan (and the rank of deltas) of `model`, and what that did to the
    outputs for `tokens`, in words.
    """
    if model.layer_plan == stored.config.layer_plan:
        return stored.params, f"its plan, {name_of(stored.config.plan)}, is kept"
    before = dataclasses.replace(stored.config, delta_rank=model.delta_rank)
    _, params, difference = surgery.share(before, stored.params, model.plan, np.asarray(tokens))
    return params, (
        f"plan {name_of(stored.config.plan)} -> {model.plan}: outputs differ by "
        f"{difference:.3g} of the largest"
    )


def _as_data(value: Any) -> Any:
    """What JSON made of a field, as the field is: tuples and plans."""
    if isinstance(value, dict):
        return Plan(**value)
    return tuple(value) if isinstance(value, list) else value
