"""Weights that are there already: of a published folder, of a run; and under another plan."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import models, pretrained, runs, transforms
from attnlab.models import ModelConfig
from attnlab.models.config import sharing_name
from attnlab.training.checkpoint import digest


class Same(NamedTuple):
    """How the heads of fresh weights start: `config.same`."""

    values: str = ""
    """Values that are those of the first head in all heads, with commas between: "outputs" makes
    heads equal, "probs" their scores; "" leaves them apart."""
    noise: float = 0.0
    """What tells them apart nevertheless, of the size of the weights."""
    first_of: int = 0
    """The heads are the first of so many; 0: they are drawn for themselves."""


def fresh(model: ModelConfig, same: Same) -> Callable | None:
    """(key, inputs) -> weights of a seed that start as `same` says; None where it says nothing.

    Raises ValueError, before any weight is made, for what cannot be.
    """
    if same == Same():
        return None
    if same.noise < 0 or (same.noise and not same.values):
        raise ValueError(f"same.noise {same.noise} must be 0 or more, and needs same.values")
    many = with_more_heads(model, same.first_of) if same.first_of else model

    def make(key: jax.Array, inputs: dict[str, Any]) -> Any:
        params = many.build().init(key, **inputs)["params"]
        if same.first_of:
            shapes = jax.eval_shape(model.build().init, key, **inputs)["params"]
            cut = lambda a, like: a[tuple(map(slice, like.shape))]
            params = jax.tree.map(cut, params, shapes)
        if same.values:
            key = jax.random.fold_in(key, NOISE)
            names = same.values.split(",")
            params = models.identical_heads(model, params, names, noise=same.noise, key=key)
        return params

    texts = ("source", "tokens") if model.kind == "encoder_decoder" else ("tokens",)
    one = dict.fromkeys(texts, jnp.zeros((1, 1), int))
    jax.eval_shape(lambda key: make(key, one), jax.random.key(0))
    return make


def with_more_heads(model: ModelConfig, count: int) -> ModelConfig:
    """`model` with `count` heads as wide as its own."""
    if count <= model.heads.num_heads:
        raise ValueError(
            f"same.first_of {count} must be more than model.heads.num_heads {model.heads.num_heads}"
        )
    known = {field.name for field in dataclasses.fields(model.heads)}
    widths: dict[str, Any] = {
        name: model.layout.size(name) for name in known & {"head_dim", "value_dim"}
    }
    heads = dataclasses.replace(model.heads, num_heads=count, **widths)
    return dataclasses.replace(model, heads=heads)


def begun(model: Any, params: Any, seed: int, inputs: dict[str, Any]) -> Any:
    """The weights of the first seed at step 0, as `fit` makes them of `params`."""
    if isinstance(params, list):
        return params[0]
    key = jax.random.key(seed)
    return params(key, inputs) if params else jax.jit(model.init)(key, **inputs)["params"]


NOISE = 2**31
"""Folded into the key of a seed for the noise between heads."""


class Weights(NamedTuple):
    """A model with its weights, and what tells them from others."""

    config: ModelConfig
    params: Any
    digest: str


class Start(NamedTuple):
    """What a run starts from."""

    config: ModelConfig
    params: list[Any]
    """The weights of each seed"""
    record: dict[str, Any]
    """What the run remembers of it"""
    told: str
    """What it is, in words"""


# What a run may choose: how weights are shared, computed with and dropped, not what is computed.
MAY_DIFFER = (
    "sharing", "encoder.shares_decoder", "delta_rank", "compute", "attention.order",
    "attention.implementation", "init", "dropout",
)  # fmt: skip


def check(model: ModelConfig, folder: str, seeds: Sequence[int]) -> None:
    """Raises ValueError that names every field of `model` which the weights of `folder` forbid, and
    seeds that a run has no weights of.
    """
    if runs.is_run(folder):
        left = runs.read_run(folder, ())
        stored, there = left.config, left.record["config"]["train"]["seeds"]
        if missing := [str(seed) for seed in seeds if seed not in there]:
            raise ValueError(
                f"seed n starts from seed n of {folder}, which has no seed {', '.join(missing)}, "
                f"only {', '.join(map(str, there))}: choose train.seeds among these, or train "
                "the others there first"
            )
    else:
        stored = pretrained.load_config(folder)
    ours, theirs = (_flat_fields(config) for config in (model, stored))
    wrong = [
        f"model.{path}={ours.get(path)!r} (there {theirs.get(path)!r})"
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    ]
    if wrong:
        raise ValueError(
            f"the weights of {folder} make another model than {', '.join(wrong)}; leave these "
            "fields as the folder has them, or start=''"
        )


def _flat_fields(config: ModelConfig) -> dict[str, Any]:
    """Path -> value of every field that makes other weights or computes otherwise."""
    found: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if path.startswith(MAY_DIFFER):
            return
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(inner, f"{path}.{name}" if path else name)
        else:
            found[path] = value

    visit(json.loads(models.to_json(config))["model"], "")
    return found


def load(folder: str) -> Weights:
    """The model of a published folder."""
    model, params = pretrained.load(folder)
    return Weights(model.config, params, _digest(params))


def of_run(folder: Path, seed: int | None = None) -> Weights:
    """The model of one seed of a run; see `attnlab.load_run`."""
    left = runs.read_run(folder, None if seed is None else [seed])
    return Weights(left.config, next(iter(left.params.values())), "")


def start(folder: str, seeds: Sequence[int]) -> Start:
    """The weights that these seeds start from: of a run each seed's own, at its newest checkpoint;
    of a published folder the same for all.
    """
    if not runs.is_run(folder):
        one = load(folder)
        return Start(one.config, [one.params] * len(seeds), {"digest": one.digest}, folder)
    left = runs.read_run(folder, seeds)
    digests = [_digest(left.params[seed]) for seed in seeds]
    record = {
        "digest": hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        "steps": left.steps,
        "source": left.record["source"]["sha256"],
    }
    told = f"each seed of {folder} after {left.steps:,} steps"
    return Start(left.config, [left.params[seed] for seed in seeds], record, told)


def _digest(params: Any) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    told = [f"{jax.tree_util.keystr(path)} {digest(leaf)}" for path, leaf in leaves]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def begin(stored: Start, model: ModelConfig, tokens: Any) -> tuple[list[Any], str]:
    """The weights of each seed under the plan of `model`, and in words where they come from, what
    was changed and what that did to the outputs for `tokens`.
    """
    made: dict[int, tuple[Any, str]] = {}
    for params in stored.params:
        if id(params) not in made:  # one for all seeds
            made[id(params)] = under_plan(Weights(stored.config, params, ""), model, tokens)
    changes = dict.fromkeys(told for _, told in made.values())
    return [made[id(p)][0] for p in stored.params], "; ".join([stored.told, *changes])


def under_plan(stored: Weights, model: ModelConfig, tokens: Any) -> tuple[Any, str]:
    """The weights under the plan (and the rank of deltas) of `model`, its encoder and decoder with
    as many sets of weights as there, and what that did to the outputs for `tokens`, in words.
    """
    config, params = stored.config, stored.params
    changes = []
    shared, wanted = (c.encoder is not None and c.encoder.shares_decoder for c in (config, model))
    if shared and not wanted:
        config, params = transforms.untie_encoder(config, params)
        changes.append("encoder and decoder part")
    ranked = dataclasses.replace(config, delta_rank=model.delta_rank)
    if model.plan != config.plan or ("delta" in model.plan and ranked != config):
        changes.append(f"plan {sharing_name(config)} -> {sharing_name(model)}")
        # A name is the plan of both stacks; an encoder that has a plan of its own keeps it.
        own = config.encoder is not None and config.encoder.sharing is not None
        config, params = transforms.change_plan(
            ranked, params, model.plan if own else model.sharing
        )
    if wanted and not (config.encoder is not None and config.encoder.shares_decoder):
        config, params = transforms.tie_encoder(config, params)
        changes.append("encoder and decoder become one")
    if not changes:
        return params, f"its plan, {sharing_name(config)}, is kept"
    before, after = (stored.config, stored.params), (config, params)
    difference = transforms.output_difference(before, after, np.asarray(tokens))
    return params, f"{', '.join(changes)}: outputs differ by {difference:.3g} of the largest"
