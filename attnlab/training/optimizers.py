"""Optimizers. `OPTIMIZERS`: name -> what it is called, and (config, rate, axes) -> transform.

Every row is made of optax's parts. Each leaves out weight decay where `decays` says so, multiplies
it by the learning rate, and reads the fields of `TrainConfig` from `learning_rate` to `clip_norm`.
`beta1` is the decay of its momentum, `beta2` that of its second moment.

The weights of layers are stacked, and the maps of heads have more than two axes: [G, D, N, H] is G
matrices of D x N H, [G, N, C, H] of heads that read their own chunk is G N matrices of C x H. What
looks at a whole matrix (Muon, LAMB, Adafactor) must be told, so it takes `axes`: params -> the tree
of `Axes`. `by_shape` knows plain matrices alone; for the models of attnlab
`attnlab.model.matrices.weight_axes` knows all.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from attnlab.names import find
from attnlab.training.schedules import SCHEDULES, Rate


class Optimizer(NamedTuple):
    """Gradients -> updates, and the learning rate of each step, which is what is logged."""

    transform: optax.GradientTransformation
    schedule: Rate


class Row(NamedTuple):
    """One optimizer."""

    title: str
    make: Callable[[Any, Rate, Callable], optax.GradientTransformation]
    """(config, rate, axes) -> transform, without clipping."""


Axes = tuple[int, int]
"""The axes of a weight from the end: so many that a matrix sums over, before so many that it
makes. All before them number matrices that are apart. (0, n) is a vector."""


def decays(params: Any) -> Any:
    """True for matrices, False for biases, sinks, norm scales and the coefficients of mixtures: by
    name, since slots are stacked."""
    matrices = _by_name(params, lambda name: not name.endswith(("bias", "scale", "norm", "sink")))
    mixed = lambda path: any("_mixture" in jax.tree_util.keystr((key,)) for key in path)
    return jax.tree_util.tree_map_with_path(lambda path, on: on and not mixed(path), matrices)


def by_shape(params: Any) -> Any:
    """The last axis is made, all before it are summed over; a bias or a norm scale is a vector."""
    shaped = lambda on, a: (a.ndim - 1, 1) if on else (0, a.ndim)
    return jax.tree.map(shaped, decays(params), params)


LOOKED_UP = ("embedding", "positions", "token_types", "relative_bias", "readout", "classes")
"""Ends of the names of tables and of what is read off: no map within the model."""


def adamw(config: Any, rate: Rate, axes: Callable) -> optax.GradientTransformation:
    """Loshchilov and Hutter 2017, arXiv 1711.05101. Reads `base_fan_in` (see `by_fan_in`)."""
    if config.base_fan_in is not None:
        return optax.chain(
            optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
            by_fan_in(config.base_fan_in, axes),
            optax.add_decayed_weights(config.weight_decay, decays),
            optax.scale_by_learning_rate(rate),
        )
    return optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
    )


def adam(config: Any, rate: Rate, axes: Callable) -> optax.GradientTransformation:
    """Kingma and Ba 2014, arXiv 1412.6980. Raises ValueError with a weight decay."""
    if config.weight_decay:
        raise ValueError(
            "adam has no weight decay; set weight_decay=0, or optimizer='adamw', which is Adam "
            "with one"
        )
    return optax.adam(rate, b1=config.beta1, b2=config.beta2, eps=config.epsilon)


def adafactor(config: Any, rate: Rate, axes: Callable) -> optax.GradientTransformation:
    """Shazeer and Stern 2018, arXiv 1804.04235, without momentum: `rate` is relative to the root
    mean square of a matrix (0.001 at least), the second moment decays by 1 - step^-0.8, updates of
    a matrix are cut at a root mean square of 1. Sizes below 128 are not factored. `beta1`, `beta2`
    and `epsilon` are not read.
    """
    shrunk = optax.chain(
        optax.scale_by_factored_rms(decay_rate=0.8),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return optax.chain(
        each_matrix(shrunk, axes),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(rate),
    )


def lamb(config: Any, rate: Rate, axes: Callable) -> optax.GradientTransformation:
    """You et al. 2019, arXiv 1904.00962: Adam's step of each matrix, made as long as the matrix. As
    in ALBERT's code, what does not decay is not scaled either."""
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.masked(each_matrix(optax.scale_by_trust_ratio(), axes), decays),
        optax.scale_by_learning_rate(rate),
    )


def lion(config: Any, rate: Rate, axes: Callable) -> optax.GradientTransformation:
    """Chen et al. 2023, arXiv 2302.06675; wants a third to a tenth of AdamW's rate."""
    return optax.lion(
        rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decays
    )


def muon(config: Any, rate: Rate, axes: Callable) -> optax.GradientTransformation:
    """Jordan et al. 2024, github.com/KellerJordan/Muon: the momentum of each matrix is made nearly
    orthogonal by 5 steps of Newton and Schulz, and scaled to 0.2 sqrt(max(rows, columns)) (Liu et
    al. 2025, arXiv 2502.16982), so that `rate` is that of AdamW. AdamW has what is no matrix inside
    the model: biases, norm scales, embeddings, positions, readouts."""

    from optax import contrib

    inside = functools.partial(hidden_matrices, axes)
    outside = lambda params: jax.tree.map(lambda on: not on, inside(params))
    dimensions = contrib.MuonDimensionNumbers(0, 1)
    orthogonal = optax.chain(
        contrib.scale_by_muon(beta=config.beta1, weight_dimension_numbers=dimensions),
        optax.stateless(lambda u, _: 0.2 * max(u.shape) ** 0.5 * u),
    )
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    return optax.chain(
        optax.masked(each_matrix(orthogonal, axes), inside),
        optax.masked(adam, outside),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(rate),
    )


def sgd(config: Any, rate: Rate, axes: Callable) -> optax.GradientTransformation:
    """Gradient descent with a momentum of `beta1` (0: none)."""
    return optax.chain(
        optax.trace(config.beta1),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(rate),
    )


def hidden_matrices(axes: Callable, params: Any) -> Any:
    """True for the matrices of attention and FFN; False for embeddings, positions, the LM head,
    norms, biases and mixture coefficients."""
    return jax.tree.map(
        lambda named, on, pair: named and on and pair[0] > 0,
        _by_name(params, lambda name: not name.endswith(LOOKED_UP)),
        decays(params),
        axes(params),
    )


def fan_in(shape: tuple[int, ...], pair: Axes) -> int:
    """How many numbers a matrix sums over.

    >>> fan_in((3, 4, 16, 64), (2, 1))  # W_O [G, N, V, D] of 4 heads of 16
    64
    """
    reads, makes = pair
    end = len(shape) - makes
    return math.prod(shape[end - reads : end])


def by_fan_in(base: int, axes: Callable) -> optax.GradientTransformation:
    """Multiply the update of every hidden matrix by `base` / fan-in (`hidden_matrices`, `fan_in`).

    After Adam this is a learning rate of `base` / fan-in per matrix: the change of a matrix's
    output in one step then does not grow with its fan-in (Yang et al. 2022, arXiv 2203.03466,
    table 8). Embeddings, LM head, positions, norms and biases keep the learning rate; Adam's
    epsilon is not scaled. Embeddings start at 1/sqrt(D), not at muP's 1, so their own change
    relative to their size still grows with D.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factors = jax.tree.map(
            lambda a, pair, hidden: base / fan_in(a.shape, pair) if hidden else 1.0,
            params,
            axes(params),
            hidden_matrices(axes, params),
        )
        return jax.tree.map(lambda u, factor: u * factor, updates, factors), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def each_matrix(
    transform: optax.GradientTransformation, axes: Callable
) -> optax.GradientTransformation:
    """`transform` on every matrix by itself, where an array holds several."""

    def spread(a: Any, pair: Axes) -> Any:
        """[matrices, rows, columns], or [vectors, size]"""
        reads, makes = pair
        apart, read = a.ndim - reads - makes, a.ndim - makes
        rows = [math.prod(a.shape[apart:read])] if reads else []
        return a.reshape(math.prod(a.shape[:apart]), *rows, math.prod(a.shape[read:]))

    def init(params: Any) -> Any:
        start = lambda a, pair: jax.vmap(transform.init)(spread(a, pair))
        return jax.tree.map(start, params, axes(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        tree: Any = jax.tree.structure(updates)
        leaves = tree.flatten_up_to(updates)
        others = [tree.flatten_up_to(t) for t in (state, params, axes(params))]
        found = [
            jax.vmap(transform.update)(spread(g, pair), s, spread(w, pair))
            for g, s, w, pair in zip(leaves, *others, strict=True)
        ]
        new = [u.reshape(g.shape) for (u, _), g in zip(found, leaves, strict=True)]
        return tree.unflatten(new), tree.unflatten([s for _, s in found])

    return optax.GradientTransformation(init, update)


def _by_name(params: Any, on: Callable[[str], bool]) -> Any:
    last = lambda path: jax.tree_util.keystr(path[-1:], simple=True)
    return jax.tree_util.tree_map_with_path(lambda path, _: on(last(path)), params)


OPTIMIZERS: dict[str, Row] = {
    "adamw": Row("AdamW", adamw),
    "adam": Row("Adam", adam),
    "adafactor": Row("Adafactor", adafactor),
    "lamb": Row("LAMB", lamb),
    "lion": Row("Lion", lion),
    "muon": Row("Muon", muon),
    "sgd": Row("SGD", sgd),
}
"""Name -> `Row`."""


def frozen(pattern: str, params: Any) -> Any:
    r"""True for the weights whose path ("layers.attention.q") the regular expression finds.

    Raises ValueError where it finds none.

    >>> frozen(r"attention\.[qk]$", {"attention": {"q": 1.0, "v": 2.0}})
    {'attention': {'q': True, 'v': False}}
    """
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    found = jax.tree_util.tree_map_with_path(
        lambda path, _: re.search(pattern, name(path)) is not None, params
    )
    if not any(jax.tree.leaves(found)):
        paths = [name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        raise ValueError(f"frozen={pattern!r} is none of the weights {', '.join(paths)}")
    return found


def make_optimizer(config: Any, axes: Callable[[Any], Any] = by_shape) -> Optimizer:
    """The optimizer and schedule of a `TrainConfig`, after clipping by the global norm.

    Weights that are `frozen` have no gradient, which the norm does not count, and no update, not
    even by decay.

    `axes` (params -> a tree of `Axes`) says what the matrices are, for the rows that ask.
    """
    if config.base_fan_in is not None and config.optimizer != "adamw":
        raise ValueError(
            f"base_fan_in={config.base_fan_in} needs optimizer='adamw', not "
            f"{config.optimizer!r}; set base_fan_in=None"
        )
    schedule = find("schedule", config.schedule, SCHEDULES)(config)
    transform = find("optimizer", config.optimizer, OPTIMIZERS).make(config, schedule, axes)
    if config.clip_norm:
        transform = optax.chain(optax.clip_by_global_norm(config.clip_norm), transform)
    if config.frozen:
        still = optax.masked(optax.set_to_zero(), functools.partial(frozen, config.frozen))
        transform = optax.chain(still, transform, still)
    return Optimizer(transform, schedule)
