"""How much the heads of a model differ, and parameters that make them identical."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab import heads
from attnlab.models.config import ModelConfig
from attnlab.models.params import Leaf, check_params, head_layouts, leaves
from attnlab.sharing import Params, PyTree


def head_distance(config: ModelConfig, params: PyTree) -> Float[Array, ""]:
    """sqrt(sum_n |w_n - w_0|^2 / (N - 1)) / sqrt(2 sum_n |w_n|^2 / N), over all weights of heads n.

    Exactly 0 where every head equals the first, about 1 for heads that were drawn independently, 0
    for one head.

    >>> config = ModelConfig(width=4, num_layers=1, heads=heads.Standard(num_heads=2))
    >>> params = config.build().init(jax.random.key(0), jnp.zeros((1, 3), int))["params"]
    >>> same = identical_heads(config, params)
    >>> float(head_distance(config, params)) > 0.5, float(head_distance(config, same))
    (True, 0.0)
    """
    distance = norm = jnp.zeros(())
    for leaf in leaves(config, params):
        if leaf.head_axis is not None:
            count = leaf.array.shape[leaf.head_axis]
            difference = leaf.array - _first_head(leaf)
            distance = distance + jnp.sum(jnp.square(difference)) / (count - 1)
            norm = norm + 2 * jnp.sum(jnp.square(leaf.array)) / count
    ratio: Array = distance / jnp.maximum(norm, np.finfo(np.float32).tiny)
    return jnp.sqrt(ratio)


def identical_heads(
    config: ModelConfig,
    params: Params,
    names: Iterable[str] = ("outputs",),
    *,
    noise: float = 0.0,
    key: Array | None = None,
) -> Params:
    """Parameters that make these values the same in every head of a layer.

    In each weight that one of the values depends on, every head becomes a copy of the first; see
    `attnlab.heads.identical_heads`. Low-rank deltas and relative position biases stay as they are.

    Args:
      config: of the model.
      params: of the model.
      names: values of the heads: ("outputs",) makes heads identical, ("probs",) makes them attend
        alike.
      noise: each changed weight w becomes w + noise * rms(first head) * n, n standard normal.
      key: random key of the noise.

    Raises:
      ValueError: heads have no value of one of these names, or noise without a key.

    >>> config = ModelConfig(width=4, num_layers=1, heads=heads.Standard(num_heads=2))
    >>> params = config.build().init(jax.random.key(0), jnp.zeros((1, 3), int))["params"]
    >>> q = identical_heads(config, params, ("q",))["layers"]["attention"]["q"]
    >>> bool((q[:, :, 0] == q[:, :, 1]).all())
    True
    """
    if noise and key is None:
        raise ValueError(f"noise={noise} is random; pass key=jax.random.key(seed)")
    params = check_params(config, params)
    names, made = tuple(names), dict(params)
    for (stack, sublayer), layout in head_layouts(config).items():
        if sublayer not in params.get(stack, {}) or sublayer == "kv":
            continue
        kv = params[stack].get("kv", {}) if sublayer == "attention" else {}
        weights = {
            n: a for n, a in {**params[stack][sublayer], **kv}.items() if not isinstance(a, dict)
        }
        same = heads.identical_heads(weights, layout, names)
        new = {
            name: {n: same.get(n, a) for n, a in params[stack][name].items()}
            for name in (sublayer, *(["kv"] if kv else []))
        }
        made[stack] = {**made[stack], **new}
    return _with_noise(config, params, made, noise, key) if key is not None else made


def _with_noise(
    config: ModelConfig, params: Params, made: Params, noise: float, key: Array
) -> Params:
    """`made` with noise on every array that differs from the one in `params`."""
    noisy = []
    for i, (old, leaf) in enumerate(
        zip(jax.tree.leaves(params), leaves(config, made), strict=True)
    ):
        a = leaf.array
        if a is not old and noise:
            first = a if leaf.head_axis is None else _first_head(leaf)
            drawn = jax.random.normal(jax.random.fold_in(key, i), a.shape, a.dtype)
            a = a + noise * jnp.sqrt(jnp.mean(jnp.square(first))) * drawn
        noisy.append(a)
    new: Params = jax.tree.unflatten(jax.tree.structure(made), noisy)
    return new


def _first_head(leaf: Leaf) -> Array:
    """The weight of the first head, with an axis of size 1 for heads."""
    assert leaf.head_axis is not None
    axis = leaf.head_axis % leaf.array.ndim
    return jax.lax.index_in_dim(jnp.asarray(leaf.array), 0, axis)


def smallest_change(initial: PyTree, params: PyTree) -> Float[Array, ""]:
    """Root mean square of the change of the array that changed least.

    >>> before = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    >>> float(smallest_change(before, {"a": jnp.full(2, 3.0), "b": jnp.full(2, 2.0)}))
    2.0
    """

    def change(a: Array, b: Array) -> Array:
        return jnp.sqrt(jnp.mean(jnp.square(b - a)))

    return jnp.min(jnp.stack(jax.tree.leaves(jax.tree.map(change, initial, params))))
