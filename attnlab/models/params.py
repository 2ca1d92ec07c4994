"""The parameters of a model: names, shapes, initial values, axes; which do not fit a config."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads import Layout, Weight
from attnlab.heads.layout import describe_mismatch, is_stack, shapes_by_path
from attnlab.heads.weights import without
from attnlab.models.config import ModelConfig
from attnlab.models.embed import Shapes, embedding_shapes
from attnlab.models.ffn import init_norm, norm_shapes
from attnlab.models.head import output_shapes
from attnlab.models.layer import Init, init_layer
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
    stacks = {"": config}
    if config.encoder is not None and not config.encoder.shares_decoder:
        stacks["encoder_"] = config.encoder_model
    if isinstance(config.positions, Relative):
        for prefix, stack in stacks.items():
            layers = (stack.num_layers,) if config.positions.per_layer else ()
            shape = (*layers, config.positions.buckets, stack.heads.num_heads)
            shapes[f"{prefix}relative_bias"] = shape
    if config.norm.places.final:
        for prefix in stacks:
            shapes[f"{prefix}final_norm"] = norm_shapes(config.width, config.norm)
    made = shapes | output_shapes(config)
    return {name: shape for name, shape in made.items() if shape != {}}


def init_outer(config: ModelConfig) -> dict[str, Init]:
    """Weight outside the layers -> (key -> its initial value).

    Matrices are normal with standard deviation 1/sqrt(fan-in), or `init.std`; biases are zero.
    """

    def make(name: str, shape: tuple[int, ...] | dict[str, tuple[int, ...]]) -> Init:
        if isinstance(shape, dict):
            return lambda key: init_norm(shape["scale"][0], config.norm)
        if len(shape) == 1:
            return lambda key: jnp.zeros(shape)
        fan_in, std = shape[-1 if name in TABLES else 0], config.init.std
        return lambda key: jax.random.normal(key, shape) * (fan_in**-0.5 if std is None else std)

    return {name: make(name, shape) for name, shape in outer_shapes(config).items()}


def owned_stacks(config: ModelConfig) -> Mapping[str, ModelConfig]:
    """Name of the parameters of each stack of layers -> the config of these layers.

    >>> list(owned_stacks(ModelConfig(kind="encoder_decoder")))
    ['layers', 'encoder_layers']
    """
    shared = config.encoder is not None and config.encoder.shares_decoder
    return config.stacks if shared else config.layer_stacks


def encoder_params(config: ModelConfig, params: Params) -> Params:
    """The parameters of the encoder of an encoder-decoder, for `config.encoder_model`.

    >>> config = ModelConfig(kind="encoder_decoder")
    >>> sorted(set(param_shapes(config)) - set(encoder_params(config, param_shapes(config))))
    ['encoder_final_norm', 'encoder_layers']
    """
    own = {n.removeprefix("encoder_"): a for n, a in params.items() if n.startswith("encoder_")}
    made = {n: a for n, a in params.items() if not n.startswith("encoder_")} | own
    layers = made["layers"]
    if "delta" in layers:  # that of the decoder has cross-attention too
        layers = layers | {"delta": without(layers["delta"], "cross")}
    return made | {"layers": layers}


def init_sublayers(spec: LayerSpec, plan: Plan, *, std: float | None, residual_scale: float) -> (
    dict[str, Init]
):  # fmt: skip
    """Sublayer of a stack -> (key -> its parameters [G, ...]).

    Raises:
      ValueError: the plan has other sublayers than the layer.
    """
    inits = init_layer(spec, std=std, residual_scale=residual_scale)
    if set(plan) != set(inits):
        raise ValueError(f"the plan has {', '.join(plan)}, the layer has {', '.join(inits)}")

    def stacked(name: str, key: Array) -> PyTree:
        return init_sublayer(inits[name], jax.random.split(key, 1)[0], plan, name)

    empty = empty_sublayers(spec)
    return {name: functools.partial(stacked, name) for name in plan if name not in empty}


def empty_sublayers(spec: LayerSpec) -> Params:
    """Sublayers of a plan that have no parameters: those of an FFN of width 0."""
    return {} if spec.ffn.width else {"ffn": {}}


def residual_scale(config: ModelConfig, stack: str = "layers") -> float:
    """What multiplies the initial matrices of a stack that write into the residual stream."""
    num_layers = (config.encoder_model if stack == "encoder_layers" else config).num_layers
    return (2 * num_layers) ** -0.5 if config.init.residual == "depth" else 1.0


@functools.lru_cache(maxsize=256)
def param_shapes(config: ModelConfig) -> Params:
    """The tree of the model's parameters, with `jax.ShapeDtypeStruct`s for arrays.

    >>> param_shapes(ModelConfig(vocab_size=7, width=4))["embedding"].shape
    (7, 4)
    """

    def init(key: Array) -> Params:
        params: Params = {name: make(key) for name, make in init_outer(config).items()}
        for stack, c in owned_stacks(config).items():
            inits = init_sublayers(
                c.layer, c.plan, std=config.init.std, residual_scale=residual_scale(config, stack)
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


# Checks -------------------------------------------------------------------------------------------


def check_params(config: ModelConfig, params: object) -> Params:
    """The parameters as dicts, also those of a `FrozenDict` of Flax and of the variables
    {"params": ...} that a module's `init` returns.

    Args:
      config: of the model.
      params: of `init` of the model; abstract arrays are allowed.

    Raises:
      TypeError: params are no dict, or config is no `ModelConfig`.
      ValueError: they are not those of the model; names the first weight that is missing,
        superfluous or of another shape.

    >>> check_params(ModelConfig(), param_shapes(ModelConfig(vocab_size=255)))
    Traceback (most recent call last):
    ValueError: params are not those of this model: weight 'embedding' has shape (255, 64), the \
model has (256, 64)
    """
    if not isinstance(params, Mapping) or not isinstance(config, ModelConfig):
        raise TypeError(
            "the arguments are (params, tokens, config), in transforms (config, params): params the"
            " dict of model.init, config a ModelConfig such as model.config, not "
            f"{type(params).__name__} and {type(config).__name__}"
        )
    found = _as_dicts(cast(Params, params["params"]) if set(params) == {"params"} else params)
    if problem := describe_mismatch(_model_shapes(config), found):
        raise ValueError(f"params are not those of this model: {problem}")
    return found


def _as_dicts(params: Mapping[str, PyTree]) -> Params:
    return {n: _as_dicts(a) if isinstance(a, Mapping) else a for n, a in params.items()}


@functools.lru_cache(maxsize=256)
def _model_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    return shapes_by_path(param_shapes(config))


def same_bits(one: object, other: object) -> bool:
    """Whether two arrays have equal dtype, shape and bit patterns.

    Unlike `==`, NaN equals a NaN of the same bits, and 0.0 differs from -0.0.

    >>> same_bits(np.float32(np.nan), np.float32(np.nan)), same_bits(0.0, -0.0)
    (True, False)
    """
    a, b = np.asarray(one), np.asarray(other)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# Axes ---------------------------------------------------------------------------------------------

MatrixAxes = tuple[int, int]
"""(number of axes that one output sums over, number of axes of the outputs), from the end. All axes
before them number separate matrices. (0, n) is a vector."""
HIDDEN_AXES = {"up": -1, "gate": -1, "up_bias": -1, "gate_bias": -1, "down": -2}
"""Weight of an FFN -> its axis of hidden units, from the end."""
HEAD_SUBLAYERS = ("attention", "kv", "cross")
"""Sublayers that hold weights of heads."""


class Leaf(NamedTuple):
    """One array of the parameters.

    Attributes:
      path: names from the root, such as ("layers", "attention", "q").
      array: with a leading axis of parameter groups, if it belongs to a stack of layers.
      layout, weight: of the heads that it is a weight of; None for other parameters, such as norms
        beside the heads and low-rank deltas.
    """

    path: tuple[str, ...]
    array: Array
    layout: Layout | None = None
    weight: Weight | None = None

    @property
    def head_axis(self) -> int | None:
        """The axis that numbers heads, counted from the end.

        None if there is none, if all heads share one, and for matrices that mix heads.
        """
        if self.layout is None or self.weight is None:
            return None
        axes = self.weight.axes
        found = [i - len(axes) for i, axis in enumerate(axes) if axis in self.layout.head_axes]
        return found[0] if len(found) == 1 and self.array.shape[found[0]] > 1 else None


def leaves(config: ModelConfig, params: PyTree) -> list[Leaf]:
    """The arrays of params, or of the variables {"params": ...}, in the order of `jax.tree.leaves`,
    each with its `Weight`.

    >>> params = {"layers": {"attention": {"q": jnp.zeros((2, 32, 4, 8))}}}
    >>> [(leaf.path, leaf.head_axis) for leaf in leaves(ModelConfig(width=32), params)]
    [(('layers', 'attention', 'q'), -2)]
    """
    layouts = head_layouts(config)
    weights = {layout: layout.all_weights for layout in set(layouts.values())}
    made = []
    for keys, array in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = tuple(str(getattr(key, "key", key)) for key in keys)
        path = path[1:] if path[:1] == ("params",) else path
        layout = layouts.get(path[:2]) if len(path) == 3 else None
        weight = None if layout is None else weights[layout].get(path[-1])
        made.append(Leaf(path, array, *((layout, weight) if weight else (None, None))))
    return made


def map_leaves(
    function: Callable[[Leaf], object], config: ModelConfig
) -> Callable[[PyTree], PyTree]:
    """params -> the tree of what `function` returns for each array."""

    def of(params: PyTree) -> PyTree:
        made = [function(leaf) for leaf in leaves(config, params)]
        return jax.tree.unflatten(jax.tree.structure(params), made)

    return of


def head_layouts(config: ModelConfig) -> dict[tuple[str, ...], Layout]:
    """(stack, sublayer) -> its heads.

    >>> sorted(head_layouts(ModelConfig(kind="encoder_decoder")))[:2]
    [('encoder_layers', 'attention'), ('encoder_layers', 'cross')]
    """
    stacks = config.layer_stacks.items()
    return {(stack, name): c.layout for stack, c in stacks for name in HEAD_SUBLAYERS}


def matrix_axes(config: ModelConfig) -> Callable[[PyTree], PyTree]:
    """params -> the tree of `MatrixAxes` of every parameter.

    Axes before those of a matrix number separate matrices: parameter groups, experts, and heads
    that read a slice of x each. (0, n) is a vector of any shape, such as a bias. The axes of heads
    follow from `Weight`: q [G, D, N, H] is G matrices of D x NH, o [G, N, V, O] is G matrices of
    NV x O.

    >>> from attnlab.heads import Narrow
    >>> axes = matrix_axes(ModelConfig(heads=Narrow(num_heads=4)))
    >>> axes({"layers": {"attention": {"q": jnp.zeros((2, 4, 16, 16))}}})
    {'layers': {'attention': {'q': (1, 1)}}}
    """
    return map_leaves(_axes, config)


def _axes(leaf: Leaf) -> MatrixAxes:
    # Axes of the weight itself, without that of parameter groups.
    size, weight = leaf.array.ndim - is_stack(leaf.path[0]), leaf.weight
    if size < 2 or leaf.path[-1].endswith(("bias", "scale", "norm")):
        return 0, size
    if weight is not None:
        return (len(weight.in_axes), len(weight.out_axes)) if weight.in_axes else (0, size)
    if leaf.path[1:2] == ("ffn",):
        return 1, 1  # experts number separate matrices
    return size - 1, 1


def shard_axes(config: ModelConfig) -> Callable[[PyTree], PyTree]:
    """params -> the tree of sharded axes, from the end: heads, or hidden units; 0 is none.

    Each device computes its own heads and hidden units. Outputs are summed over devices after the
    output projection and after the FFN (Shoeybi et al. 2019, arXiv 1909.08053,
    section 3).

    >>> axes = shard_axes(ModelConfig(width=32))
    >>> axes({"layers": {"attention": {"q": jnp.zeros((2, 32, 4, 8))}}})
    {'layers': {'attention': {'q': -2}}}
    """
    return map_leaves(_axis, config)


def _axis(leaf: Leaf) -> int:
    if leaf.path[1:2] == ("ffn",):
        return HIDDEN_AXES.get(leaf.path[-1], 0)
    return leaf.head_axis or 0
