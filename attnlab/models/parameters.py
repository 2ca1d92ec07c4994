"""The parameters of a model: names, shapes and initial values; which ones do not fit a config."""

import functools
import math
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.models.config import ModelConfig
from attnlab.models.embeddings import Shapes, embedding_shapes
from attnlab.models.layer import Init, init_layer
from attnlab.models.mismatch import describe_mismatch
from attnlab.models.norm import init_normalize, norm_shapes
from attnlab.models.output import output_shapes
from attnlab.models.specs import LayerSpec, Relative
from attnlab.sharing import Params, Plan, PyTree, init_sublayer

TABLES = frozenset({"embedding", "positions", "token_types", "relative_bias",
                    "encoder_relative_bias", "encoder_positions"})  # fmt: skip
"""Weights whose rows are looked up: their fan-in is their width."""


def outer_shapes(config: ModelConfig) -> Shapes:
    """Shapes of the weights outside the layers, in the order in which they are initialized.

    >>> list(outer_shapes(ModelConfig()))
    ['embedding', 'positions', 'final_norm']
    """
    shapes = embedding_shapes(config)
    if isinstance(config.positions, Relative):
        for stack, num_heads in _num_heads(config).items():
            shapes[f"{stack}relative_bias"] = (config.positions.buckets, num_heads)
    if config.norm.has_final:
        for stack in _num_heads(config):
            shapes[f"{stack}final_norm"] = norm_shapes(config.width, config.norm)
    made = shapes | output_shapes(config)
    return {name: shape for name, shape in made.items() if shape != {}}


def _num_heads(config: ModelConfig) -> dict[str, int]:
    """Prefix of the weights of each stack -> its number of heads."""
    if config.encoder is None or config.encoder.shares_decoder:
        return {"": config.heads.num_heads}
    return {"": config.heads.num_heads, "encoder_": config.encoder_layout.num_heads}


def init_outer(config: ModelConfig) -> dict[str, Init]:
    """Weight outside the layers -> (key -> its initial value).

    Matrices are normal with standard deviation 1/sqrt(fan-in), or `init.std`; biases are zero.
    """

    def make(name: str, shape: tuple[int, ...] | dict[str, tuple[int, ...]]) -> Init:
        if isinstance(shape, dict):
            return lambda key: init_normalize(shape["scale"][0], config.norm)
        if len(shape) == 1:
            return lambda key: jnp.zeros(shape)
        std = config.init.std or shape[1 if name in TABLES else 0] ** -0.5
        return lambda key: jax.random.normal(key, shape) * std

    return {name: make(name, shape) for name, shape in outer_shapes(config).items()}


def stack_specs(config: ModelConfig) -> dict[str, tuple[LayerSpec, Plan]]:
    """Name of the parameters of each stack of layers -> one layer and its plan.

    >>> list(stack_specs(ModelConfig(kind="encoder_decoder")))
    ['layers', 'encoder_layers']
    """
    specs = {name: (c.layer, c.plan) for name, c in config.stacks.items()}
    if config.encoder is not None and not config.encoder.shares_decoder:
        specs["encoder_layers"] = config.encoder_layer, config.encoder_plan
    return specs


def init_sublayers(spec: LayerSpec, plan: Plan, *, std: float | None, residual_scale: float) -> (
    dict[str, Init]
):  # fmt: skip
    """Sublayer of a stack -> (key -> its parameters [G, ...]).

    Raises:
      ValueError: the plan has other sublayers than the layer.
    """
    inits = init_layer(spec, std=std, residual_scale=residual_scale)
    if set(plan) != set(inits):
        raise ValueError(
            f"the layer has the sublayers {', '.join(inits)}; the plan has {', '.join(plan)}; give "
            "the plan those of the layer"
        )

    def stacked(name: str, key: Array) -> PyTree:
        return init_sublayer(inits[name], jax.random.split(key, 1)[0], plan, name)

    empty = empty_sublayers(spec)
    return {name: functools.partial(stacked, name) for name in plan if name not in empty}


def empty_sublayers(spec: LayerSpec) -> Params:
    """Sublayers of a plan that have no parameters: those of an FFN of width 0."""
    return {} if spec.ffn.width else {"ffn": {}}


def residual_scale(config: ModelConfig) -> float:
    """What multiplies the initial matrices that write into the residual stream."""
    return (2 * config.num_layers) ** -0.5 if config.init.residual == "depth" else 1.0


@functools.lru_cache(maxsize=256)
def param_shapes(config: ModelConfig) -> Params:
    """The tree of the model's parameters, with `jax.ShapeDtypeStruct`s for arrays.

    >>> param_shapes(ModelConfig(vocab_size=7, width=4))["embedding"].shape
    (7, 4)
    """

    def init(key: Array) -> Params:
        params: Params = {name: make(key) for name, make in init_outer(config).items()}
        for stack, (spec, plan) in stack_specs(config).items():
            inits = init_sublayers(
                spec, plan, std=config.init.std, residual_scale=residual_scale(config)
            )
            params[stack] = {name: make(key) for name, make in inits.items()}
        return params

    shapes: Params = jax.eval_shape(init, jax.random.key(0))
    return shapes


def num_outer_parameters(config: ModelConfig) -> int:
    """Number of parameters outside the layers.

    >>> config = ModelConfig(vocab_size=7, max_len=5, width=4)
    >>> num_outer_parameters(config) == 7 * 4 + 5 * 4 + 2 * 4
    True
    """
    shapes = jax.tree.leaves(outer_shapes(config), is_leaf=lambda a: isinstance(a, tuple))
    return sum(map(math.prod, shapes))


def params_of(params: Params, config: ModelConfig) -> Params:
    """The parameters as dicts, also those of a `FrozenDict` of Flax and of the variables
    {"params": ...} that a module's `init` returns.

    Raises:
      TypeError: params are no dict, or config is no `ModelConfig`.
    """
    if not isinstance(params, Mapping) or not isinstance(config, ModelConfig):
        raise TypeError(
            "the arguments are (params, tokens, config): params the dict of model.init, config a "
            f"ModelConfig (of a module, module.config); these are {type(params).__name__} and "
            f"{type(config).__name__}"
        )
    return _as_dicts(cast(Params, params["params"]) if set(params) == {"params"} else params)


def _as_dicts(params: Mapping[str, PyTree]) -> Params:
    return {n: _as_dicts(a) if isinstance(a, Mapping) else a for n, a in params.items()}


def check_params(config: ModelConfig, params: object) -> None:
    """Raises ValueError if params are not those of the model.

    The message names the first weight that is missing, superfluous or of another shape, which model
    the weights look like, and how to convert them.

    Args:
      config: of the model.
      params: of `init` of the model, also as a `FrozenDict`; abstract arrays are allowed.

    Raises:
      ValueError: as above.

    >>> check_params(ModelConfig(), param_shapes(ModelConfig(vocab_size=255)))
    Traceback (most recent call last):
    ValueError: params are not those of this model: weight 'embedding' has shape (255, 64), the \
model has (256, 64)
    """
    problem = describe_mismatch(param_shapes(config), params)
    if problem is not None:
        raise ValueError(f"params are not those of this model: {problem}")
