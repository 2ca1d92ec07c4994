"""Initial parameters whose heads are equal, nearly equal, or the first of more heads."""

import dataclasses

import jax

from attnlab.models import ModelConfig, identical_heads
from attnlab.sharing import Params
from attnlab.training.objectives.objective import Inputs

NOISE = 2**31
"""Folded into the key of a seed for the noise between heads."""


@dataclasses.dataclass(frozen=True)
class SameHeads:
    """Makes new parameters whose heads begin with the values of the first one.

    Attributes:
      values: names of values, with commas between, that are equal in all heads. "outputs" makes
        heads equal, "probs" their attention probabilities, "q,k" their queries and keys.
      noise: relative size of the random difference between the heads.
    """

    values: str
    noise: float = 0.0

    def __call__(self, key: jax.Array, model: ModelConfig, inputs: Inputs) -> Params:
        params: Params = model.build().init(key, **inputs)["params"]
        key, names = jax.random.fold_in(key, NOISE), self.values.split(",")
        return identical_heads(model, params, names, noise=self.noise, key=key)


def first_of_two(key: jax.Array, model: ModelConfig, inputs: Inputs) -> Params:
    """The first heads of a model with twice as many, each as wide."""
    many = with_twice_the_heads(model).build().init(key, **inputs)["params"]
    shapes = jax.eval_shape(model.build().init, key, **inputs)["params"]
    params: Params = jax.tree.map(lambda a, like: a[tuple(map(slice, like.shape))], many, shapes)
    return params


def with_twice_the_heads(model: ModelConfig) -> ModelConfig:
    """`model` with twice as many heads, each as wide as its own."""
    known = {field.name for field in dataclasses.fields(model.heads)}
    widths = {name: model.layout.size(name) for name in known & {"head_dim", "value_dim"}}
    changed = {"num_heads": 2 * model.heads.num_heads, **widths}
    heads = dataclasses.replace(model.heads, **changed)  # type: ignore[arg-type]
    return dataclasses.replace(model, heads=heads)


equal = SameHeads("outputs")
nearly_equal = SameHeads("outputs", noise=1e-4)
equal_probs = SameHeads("probs")
