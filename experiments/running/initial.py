"""Weights that are there already: of a published folder, of a run; and under another plan."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import pretrained
from attnlab.model.alike import same_heads
from attnlab.model.config import ModelConfig
from attnlab.sharing import surgery
from attnlab.sharing.named import name_of
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


NOISE = 2**31
"""Folded into the key of a seed for the noise between heads."""


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


def of_run(folder: Path, seed: int | None = None) -> Weights:
    """The model of one seed of a run; see `attnlab.load_run`."""
    model, params = attnlab.load_run(folder, seed)
    return Weights(model.config, params, "")


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
