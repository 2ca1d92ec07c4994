"""Parameters that are drawn in a special way: heads that begin equal, or as a part of more."""

import dataclasses

import jax

from attnlab.models import ModelConfig, identical_heads
from attnlab.sharing import Params
from attnlab.training.objectives.objective import Inputs
from attnlab.training.step import InitParams, smallest_inputs

NOISE = 2**31
"""Folded into the key of a seed for the noise between heads."""


@dataclasses.dataclass(frozen=True)
class HeadInit:
    """How the heads of new parameters start.

    Attributes:
      values: names of values, with commas between, that are initially equal in all heads: those of
        the first head. "outputs" makes heads equal, "probs" their attention probabilities, "q,k"
        their queries and keys; "": heads differ.
      noise: relative size of the random difference between heads that `values` makes equal.
      first_of: N' > N: the heads are initially the first N of a layer with N' heads; 0: they are
        initialized on their own.

    Start with equal attention probabilities in all heads, but for noise of 1 %:

        lab.Experiment(head_init=lab.HeadInit(values="probs", noise=0.01))
    """

    values: str = ""
    noise: float = 0.0
    first_of: int = 0


def init_function(model: ModelConfig, head_init: HeadInit) -> InitParams | None:
    """Makes parameters that start as `head_init` says; None where it says nothing.

    Raises:
      ValueError: before any parameter is made, for what cannot be.
    """
    if head_init == HeadInit():
        return None
    if head_init.noise < 0 or (head_init.noise and not head_init.values):
        raise ValueError(
            f"head_init.noise {head_init.noise} must be 0 or more, and needs head_init.values"
        )
    many = with_more_heads(model, head_init.first_of) if head_init.first_of else model

    def make(key: jax.Array, inputs: Inputs) -> Params:
        params: Params = many.build().init(key, **inputs)["params"]
        if head_init.first_of:
            shapes = jax.eval_shape(model.build().init, key, **inputs)["params"]
            params = jax.tree.map(lambda a, like: a[tuple(map(slice, like.shape))], params, shapes)
        if head_init.values:
            key = jax.random.fold_in(key, NOISE)
            names = head_init.values.split(",")
            params = identical_heads(model, params, names, noise=head_init.noise, key=key)
        return params

    jax.eval_shape(lambda key: make(key, smallest_inputs(model)), jax.random.key(0))
    return make


def with_more_heads(model: ModelConfig, count: int) -> ModelConfig:
    """`model` with `count` heads as wide as its own. Raises ValueError where it has as many."""
    if count <= model.heads.num_heads:
        raise ValueError(
            f"head_init.first_of {count} must be more than model.heads.num_heads "
            f"{model.heads.num_heads}"
        )
    known = {field.name for field in dataclasses.fields(model.heads)}
    widths = {name: model.layout.size(name) for name in known & {"head_dim", "value_dim"}}
    heads = dataclasses.replace(model.heads, **{"num_heads": count, **widths})  # type: ignore[arg-type]
    return dataclasses.replace(model, heads=heads)
