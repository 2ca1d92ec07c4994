"""Optimizers. `OPTIMIZERS`: name -> ((config, rate, axes) -> transform).

All are made of optax's parts. Each leaves out weight decay where `weight_decay_mask` is False,
multiplies it by the learning rate, and reads the fields of `OptimizerConfig`. `beta1` is the decay
of its momentum, `beta2` that of its second moment.

The parameters of layers are stacked, and the projections of heads have more than two axes:
[G, D, N, H] is G matrices of D x N H, [G, N, C, H] of heads that read a slice of x each is G N
matrices of C x H. Optimizers of whole matrices (Muon, LAMB, Adafactor) therefore take `axes`:
params -> the tree of `MatrixAxes`. `axes_by_shape` knows plain matrices only; for the models of
attnlab `attnlab.models.matrix_axes` knows all.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyEntry

from attnlab.fields import Spec, bounded
from attnlab.models.params import MatrixAxes
from attnlab.names import lookup, name_in
from attnlab.sharing import Params, PyTree
from attnlab.training.schedules import Rate

AxesOf: TypeAlias = Callable[[Params], PyTree]
"""params -> the tree of `MatrixAxes`."""
Transform: TypeAlias = optax.GradientTransformation


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OptimizerConfig(Spec, prefix="optimizer."):
    """The optimizer: what it does with a gradient.

    Attributes:
      name: a name of `OPTIMIZERS`, or such a function of your own; it reads the other fields.
      learning_rate: the largest, at the end of the warm-up.
      beta1, beta2, epsilon: of Adam and its relatives.
      weight_decay: multiplied by the learning rate; biases, scales and norms have none.
      base_fan_in: adamw only; None: off. Sets the learning rate of each matrix of attention and FFN
        to `learning_rate` x base_fan_in / fan-in. Embeddings, LM head, positions, norms and biases
        keep `learning_rate`. Epsilon and weight decay are not scaled: every matrix shrinks by
        `learning_rate` x `weight_decay` a step, so the number of steps that it averages over does
        not depend on its fan-in.
      per_head: muon only; the q, k and v of each head are orthogonalised by themselves, not as one
        matrix of all heads.
      clip_norm: largest norm of a gradient; 0: no clipping.
      frozen: regular expression of parameters that keep their initial values (see `frozen_mask`).

    Raises:
      ValueError: an unknown `name`, a value out of range, a `frozen` that is no regular expression,
        or a field that the optimizer cannot use.

    >>> OptimizerConfig(frozen="attention.[qk]$", clip_norm=0.0)  # the repr omits defaults
    OptimizerConfig(clip_norm=0.0, frozen='attention.[qk]$')
    """

    name: str = "adamw"
    learning_rate: float = bounded(3e-3, above=0.0)
    beta1: float = bounded(0.9, least=0.0, below=1.0)
    beta2: float = bounded(0.99, above=0.0, below=1.0)
    epsilon: float = bounded(1e-8, above=0.0)
    weight_decay: float = bounded(0.1, least=0.0)
    base_fan_in: int | None = bounded(None, least=1)
    per_head: bool = False
    clip_norm: float = bounded(1.0, least=0.0)
    frozen: str = ""

    def __post_init__(self) -> None:
        if callable(self.name):
            object.__setattr__(self, "name", name_in(OPTIMIZERS, self.name, what="optimizer"))
        super().__post_init__()
        try:
            re.compile(self.frozen)
        except re.error as error:
            raise ValueError(
                f"optimizer.frozen={self.frozen!r} is no regular expression: {error}"
            ) from None
        # Raises where the entry cannot be made of these fields.
        make_transform(self, lambda step: self.learning_rate, axes_by_shape)


class Optimizer(NamedTuple):
    """Gradients -> updates, and the learning rate of each step, which is logged.

    Attributes:
      transform: of optax, with clipping, schedule and frozen parameters.
      schedule: step, from 0 -> learning rate.

    Any transform of optax can train; the schedule is then only what is logged:

        Optimizer(optax.sgd(0.1), lambda step: 0.1)
    """

    transform: Transform
    schedule: Rate


WITHOUT_DECAY = ("bias", "scale", "norm", "sink")
"""Ends of the names of parameters that weight decay leaves alone."""


def weight_decay_mask(params: Params) -> PyTree:
    """True for matrices, False for biases, sinks and norm scales: by name, since parameters of
    layers are stacked."""

    def decays(path: tuple[KeyEntry, ...], _: object) -> bool:
        return not _last_name(path).endswith(WITHOUT_DECAY)

    return jax.tree_util.tree_map_with_path(decays, params)


def axes_by_shape(params: Params) -> PyTree:
    """The last axis is the output, all before it are summed over; a bias or norm scale is a
    vector."""
    return jax.tree.map(
        lambda is_matrix, a: (a.ndim - 1, 1) if is_matrix else (0, a.ndim),
        weight_decay_mask(params),
        params,
    )


OUTER_PARAMETERS = (
    "embedding", "positions", "token_types", "relative_bias", "lm_head", "classifier",
)  # fmt: skip
"""Ends of the names of embedding tables and output heads: no matrices within the model."""


def adamw(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """Loshchilov and Hutter 2017, arXiv 1711.05101. Reads `base_fan_in` (`scale_by_fan_in`)."""
    base = config.base_fan_in
    scaled = [] if base is None else [scale_by_fan_in(base, axes)]
    return optax.chain(_scale_by_adam(config), *scaled, *_decay_and_scale(config, rate))


def adam(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """Kingma and Ba 2014, arXiv 1412.6980. Raises ValueError with a weight decay."""
    if config.weight_decay:
        raise ValueError(
            "adam has no weight decay; set optimizer.weight_decay=0, or optimizer.name='adamw', "
            "which is Adam with one"
        )
    return optax.adam(rate, b1=config.beta1, b2=config.beta2, eps=config.epsilon)


def adafactor(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """Shazeer and Stern 2018, arXiv 1804.04235, without momentum: `rate` is relative to the root
    mean square of a matrix (0.001 at least), the second moment decays by 1 - step^-0.8, updates of
    a matrix are clipped at a root mean square of 1. Sizes below 128 are not factored. `beta1`,
    `beta2` and `epsilon` are not read.
    """
    scaled = optax.chain(
        optax.scale_by_factored_rms(decay_rate=0.8),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return optax.chain(per_matrix(scaled, axes), *_decay_and_scale(config, rate))


def lamb(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """You et al. 2019, arXiv 1904.00962: Adam's update of each matrix, scaled to the norm of the
    matrix. As in ALBERT's code, parameters without decay are not scaled either."""
    return optax.chain(
        _scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, weight_decay_mask),
        optax.masked(per_matrix(optax.scale_by_trust_ratio(), axes), weight_decay_mask),
        optax.scale_by_learning_rate(rate),
    )


def lion(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """Chen et al. 2023, arXiv 2302.06675; needs a third to a tenth of AdamW's rate."""
    signs = optax.scale_by_lion(b1=config.beta1, b2=config.beta2)
    return optax.chain(signs, *_decay_and_scale(config, rate))


def muon(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """Jordan et al. 2024, github.com/KellerJordan/Muon: the momentum of each matrix is made nearly
    orthogonal by 5 steps of Newton and Schulz, and scaled by 0.2 sqrt(max(rows, columns)) (Liu et
    al. 2025, arXiv 2502.16982), so that `rate` is that of AdamW. Adam updates what is no matrix
    within the model: biases, norm scales, embeddings, positions, output heads. With `per_head` the
    q, k and v of each head are matrices by themselves (Kimi K3, arXiv 2607.24653); any
    weight with several output axes is one matrix for each index of the first; W_O stays one."""
    from optax import contrib

    inside = functools.partial(hidden_matrix_mask, axes)
    orthogonal = optax.chain(
        contrib.scale_by_muon(
            beta=config.beta1, weight_dimension_numbers=contrib.MuonDimensionNumbers(0, 1)
        ),
        optax.stateless(lambda u, _: 0.2 * max(u.shape) ** 0.5 * u),
    )
    return optax.chain(
        optax.masked(per_matrix(orthogonal, axes, per_head=config.per_head), inside),
        optax.masked(
            _scale_by_adam(config), lambda params: jax.tree.map(lambda on: not on, inside(params))
        ),
        *_decay_and_scale(config, rate),
    )


def sgd(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """Gradient descent with a momentum of `beta1` (0: none)."""
    return optax.chain(optax.trace(config.beta1), *_decay_and_scale(config, rate))


def _scale_by_adam(config: OptimizerConfig) -> Transform:
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)


def _decay_and_scale(config: OptimizerConfig, rate: Rate) -> tuple[Transform, Transform]:
    return (
        optax.add_decayed_weights(config.weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(rate),
    )


def hidden_matrix_mask(axes: AxesOf, params: Params) -> PyTree:
    """True for the matrices of attention and FFN; False for embeddings, positions, output heads,
    norms and biases."""

    def is_inside(path: tuple[KeyEntry, ...], decays: bool, pair: MatrixAxes) -> bool:
        return decays and pair[0] > 0 and not _last_name(path).endswith(OUTER_PARAMETERS)

    mask = weight_decay_mask(params)
    return jax.tree_util.tree_map_with_path(is_inside, mask, axes(params))


def fan_in(shape: tuple[int, ...], axes: MatrixAxes) -> int:
    """How many numbers an output of a matrix sums over.

    >>> fan_in((3, 4, 16, 64), (2, 1))  # W_O [G, N, V, D] of 4 heads of 16
    64
    """
    summed, outputs = axes
    end = len(shape) - outputs
    return math.prod(shape[end - summed : end])


def scale_by_fan_in(base: int, axes: AxesOf) -> Transform:
    """Multiply the update of every hidden matrix by `base` / fan-in (`hidden_matrix_mask`,
    `fan_in`).

    After Adam this is a learning rate of `base` / fan-in per matrix: the change of a matrix's
    output in one step then does not grow with its fan-in (Yang et al. 2022, arXiv 2203.03466,
    table 8). Embeddings, LM head, positions, norms and biases keep the learning rate; Adam's
    epsilon is not scaled. Initial embeddings have scale 1/sqrt(D), not muP's 1, so their own change
    relative to their size still grows with D.
    """

    def scale(updates: optax.Updates, params: Params | None) -> optax.Updates:
        assert params is not None
        return jax.tree.map(
            lambda u, pair, hidden: u * (base / fan_in(u.shape, pair)) if hidden else u,
            updates,
            axes(params),
            hidden_matrix_mask(axes, params),
        )

    return optax.stateless(scale)


def per_matrix(transform: Transform, axes: AxesOf, *, per_head: bool = False) -> Transform:
    """`transform` on every matrix by itself, where an array holds several.

    Args:
      transform: of one matrix.
      axes: which axes of each parameter form a matrix.
      per_head: the first of several output axes, as the heads of W_Q [G, D, N, H], numbers matrices
        too: G N matrices of D x H.
    """
    separate = functools.partial(_separate, per_head=per_head)

    def init_one(a: jax.Array, axes: MatrixAxes) -> PyTree:
        return jax.vmap(transform.init)(separate(a, axes))

    def update_one(g: jax.Array, state: PyTree, w: jax.Array, axes: MatrixAxes) -> PyTree:
        apart = functools.partial(separate, axes=axes)
        update, state = jax.vmap(transform.update)(apart(g), state, apart(w))
        # `apart` moves numbers only: its transpose moves them back.
        whole = jax.ShapeDtypeStruct(g.shape, update.dtype)
        return jax.linear_transpose(apart, whole)(update)[0], state

    def update(
        updates: optax.Updates, state: PyTree, params: Params | None = None
    ) -> tuple[optax.Updates, PyTree]:
        assert params is not None
        pairs = jax.tree.map(update_one, updates, state, params, axes(params))
        new = jax.tree.map(lambda _, pair: pair[0], updates, pairs)
        return new, jax.tree.map(lambda _, pair: pair[1], updates, pairs)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(init_one, params, axes(params)), update
    )


def _separate(a: jax.Array, axes: MatrixAxes, *, per_head: bool) -> jax.Array:
    """[matrices, rows, columns], or [vectors, size]."""
    summed, outputs = axes
    if per_head and summed and outputs > 1:
        a, outputs = jnp.moveaxis(a, -outputs, -outputs - summed), outputs - 1
    apart, end = a.ndim - summed - outputs, a.ndim - outputs
    rows = [math.prod(a.shape[apart:end])] if summed else []
    return a.reshape(math.prod(a.shape[:apart]), *rows, math.prod(a.shape[end:]))


def _last_name(path: tuple[KeyEntry, ...]) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Rate, AxesOf], Transform]] = {
    one.__name__: one for one in (adamw, adam, adafactor, lamb, lion, muon, sgd)
}
"""Name -> ((config, rate, axes) -> transform, without clipping)."""


def frozen_mask(pattern: str, params: Params) -> PyTree:
    r"""True for parameters whose path ("layers.attention.q") matches the regular expression.

    Raises:
      ValueError: none does.

    >>> frozen_mask(r"attention\.[qk]$", {"attention": {"q": 1.0, "v": 2.0}})
    {'attention': {'q': True, 'v': False}}
    """
    named = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named[0]]
    matches = [re.search(pattern, path) is not None for path in paths]
    if not any(matches):
        raise ValueError(
            f"optimizer.frozen={pattern!r} matches none of the weights {', '.join(paths)}"
        )
    return jax.tree.unflatten(named[1], matches)


def make_transform(config: OptimizerConfig, rate: Rate, axes: AxesOf) -> Transform:
    """The transform of an `OptimizerConfig` at a learning rate, after clipping by the global norm.

    Frozen parameters have no gradient, which the norm does not count, and no update, not even by
    weight decay.

    Args:
      config: the optimizer.
      rate: the learning rate of each step.
      axes: which axes of each parameter form a matrix.

    Raises:
      ValueError: an unknown name, or fields that do not go together.
    """
    for field, off, name in (("base_fan_in", None, "adamw"), ("per_head", False, "muon")):
        value = getattr(config, field)
        if value != off and config.name != name:
            raise ValueError(
                f"optimizer.{field}={value} needs optimizer.name={name!r}, not {config.name!r}; "
                f"set {field}={off}"
            )
    transform = lookup(OPTIMIZERS, config.name, what="optimizer")(config, rate, axes)
    if config.clip_norm:
        transform = optax.chain(optax.clip_by_global_norm(config.clip_norm), transform)
    if config.frozen:
        no_update = optax.masked(optax.set_to_zero(), functools.partial(frozen_mask, config.frozen))
        transform = optax.chain(no_update, transform, no_update)
    return transform
