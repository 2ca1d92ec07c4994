"""Weights that are there already: of a published folder, of a run; and under another plan."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab import pretrained, surgery
from attnlab.checkpoint import Checkpoints, digest
from attnlab.models import ModelConfig
from attnlab.sharing import COUNTED, PLANS, Plan, named
from experiments import workdir


class Weights(NamedTuple):
    """A model with its weights, and what tells them from others."""

    config: ModelConfig
    params: Any
    digest: str


# What a run may choose: how weights are shared, computed with and dropped, not what is computed.
MAY_DIFFER = {"plan", "dtype", "remat", "order", "implementation", "init_std", "init_residual"}
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
    if model.kind == "encoder_decoder" and model.slots != stored.slots:
        raise ValueError(
            f"surgery changes the plan of one stack, {folder} has two; leave model.plan as "
            f"{plan_name(stored)!r}"
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
    told = {f.name: notes["model"][f.name] for f in dataclasses.fields(ModelConfig)}
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


def under_plan(stored: Weights, plan: str | Plan, tokens: Any) -> tuple[Any, str]:
    """The weights under `plan`, and what that did to the outputs for `tokens`, in words."""
    before = stored.config, stored.params
    if dataclasses.replace(stored.config, plan=plan).slots == stored.config.slots:
        return stored.params, f"its plan, {plan_name(stored.config) or 'without a name'}, is kept"
    after = surgery.replan(*before, plan)
    difference = surgery.output_difference(before, after, np.asarray(tokens))
    return after[1], (
        f"plan {plan_name(stored.config) or 'without a name'} -> {plan}: outputs differ by "
        f"{difference:.3g} of the largest"
    )


def plan_name(config: ModelConfig) -> str:
    """The name of a config's plan, "" where it has none."""
    if isinstance(config.plan, str):
        return config.plan
    count = max(config.plan.num_slots.values())
    names = [*PLANS, *(f"{name}:{count}" for name in COUNTED)]
    return next((n for n in names if named(n, config.num_layers) == config.plan), "")


def _as_data(value: Any) -> Any:
    """What JSON made of a field, as the field is: tuples and plans."""
    if isinstance(value, dict):
        return Plan(**value)
    return tuple(value) if isinstance(value, list) else value
