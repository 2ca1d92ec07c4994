"""Weights that are there already: of a published folder, of a run; and under another plan."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import pretrained, runs, transforms
from attnlab.model.alike import same_heads
from attnlab.model.config import ModelConfig
from attnlab.sharing.named_plans import plan_name
from attnlab.training.checkpoint import digest


class Same(NamedTuple):
    """How the heads of fresh weights start: `config.same`."""

    maps: str = ""
    """Letters of the maps in which all heads are the first; "" leaves them apart."""
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
    if same.noise < 0 or (same.noise and not same.maps):
        raise ValueError(f"same.noise {same.noise} must be 0 or more, and needs same.maps")
    if same.first_of and same.first_of <= model.num_heads:
        raise ValueError(
            f"same.first_of {same.first_of} must be more than model.num_heads {model.num_heads}"
        )
    size = model.heads.sizes
    sizes: dict[str, Any] = {"head_dim": size["H"], "value_dim": size["V"]}
    many = dataclasses.replace(model, num_heads=same.first_of, **sizes) if same.first_of else model

    def make(key: jax.Array, inputs: dict[str, Any]) -> Any:
        params = many.build().init(key, **inputs)["params"]
        if same.first_of:
            shapes = jax.eval_shape(model.build().init, key, **inputs)["params"]
            cut = lambda a, like: a[tuple(map(slice, like.shape))]
            params = jax.tree.map(cut, params, shapes)
        if same.maps:
            key = jax.random.fold_in(key, NOISE)
            params = same_heads(model, params, same.maps, noise=same.noise, key=key)
        return params

    texts = ("source", "tokens") if model.kind == "encoder_decoder" else ("tokens",)
    one = dict.fromkeys(texts, jnp.zeros((1, 1), int))
    jax.eval_shape(lambda key: make(key, one), jax.random.key(0))
    return make


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
MAY_DIFFER = {
    "plan",
    "share_encoder",
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
    if config.share_encoder and not model.share_encoder:
        config, params = transforms.untie_encoder(config, params)
        changes.append("encoder and decoder part")
    ranked = dataclasses.replace(config, delta_rank=model.delta_rank)
    if model.layer_plan != config.layer_plan or ("delta" in model.layer_plan and ranked != config):
        changes.append(f"plan {plan_name(config.plan)} -> {plan_name(model.plan)}")
        # A name is the plan of both stacks; an encoder that has a plan of its own keeps it.
        plan = model.plan if config.encoder_plan is None else model.layer_plan
        config, params = transforms.change_plan(ranked, params, plan)
    if model.share_encoder and not config.share_encoder:
        config, params = transforms.tie_encoder(config, params)
        changes.append("encoder and decoder become one")
    if not changes:
        return params, f"its plan, {plan_name(config.plan)}, is kept"
    before, after = (stored.config, stored.params), (config, params)
    difference = transforms.output_difference(before, after, np.asarray(tokens))
    return params, f"{', '.join(changes)}: outputs differ by {difference:.3g} of the largest"
