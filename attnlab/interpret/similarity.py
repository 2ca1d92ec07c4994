"""How similar heads are: within a layer, between layers, and in layers that share parameters."""

from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attnlab.names import lookup

AXES = MappingProxyType({"outputs": "LBNTO", "heads": "LBTNV"})
"""Value -> its axes as `capture` returns it."""


def js_divergence(
    probs: Float[Array, "L B N T S"], mask: Bool[Array, "B T"] | None = None
) -> Float[Array, "L N L N"]:
    """Jensen-Shannon divergence of the attention of two heads in nats, mean over queries.

    0 where they attend to the same keys, ln 2 where to different ones.

        JS(p, q) = H((p + q)/2) - (H(p) + H(q))/2

    Args:
      probs: captured "probs".
      mask: [B, T], True = count this query.

    Raises:
      ValueError: a mask of another shape.

    >>> two = jnp.eye(2)[None, None, :, None]  # two heads, each attends to a key of its own
    >>> round(float(js_divergence(two)[0, 0, 0, 1]), 4)
    0.6931
    """
    layers, batch, heads, length, keys = probs.shape
    rows = jnp.moveaxis(_at_least_float32(probs), 2, 1)
    weight = _weights(mask, (batch, length))
    rows = jnp.where(weight[:, None] > 0, rows.reshape(layers * heads, -1, keys), 0)  # no NaN
    own = entropy(rows) @ weight

    def middle(p: Array) -> Array:
        return jnp.asarray(jax.lax.map(lambda q: entropy((p + q) / 2) @ weight, rows))

    found = jax.lax.map(middle, rows) - (own[:, None] + own) / 2
    return jnp.maximum(found, 0).reshape(layers, heads, layers, heads)


def _at_least_float32(a: ArrayLike) -> Array:
    a = jnp.asarray(a)
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def _weights(mask: ArrayLike | None, shape: tuple[int, int]) -> Array:
    """[B T], of equal numbers where `mask` is True, that sum to 1."""
    if mask is not None and jnp.shape(mask) != shape:
        raise ValueError(f"mask {jnp.shape(mask)} must be {shape}, True = count this token")
    counted = jnp.ones(shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
    return counted.reshape(-1) / jnp.sum(counted)


def entropy(p: Float[Array, "*X S"]) -> Float[Array, "*X"]:
    """-sum p ln p over the last axis, in nats, with 0 ln 0 = 0."""
    return -jnp.sum(jax.scipy.special.xlogy(p, jnp.where(p > 0, p, 1)), axis=-1)


def linear_cka(
    values: Float[Array, "L B *X"], name: str = "outputs", mask: Bool[Array, "B T"] | None = None
) -> Float[Array, "L N L N"]:
    """Linear centred kernel alignment of two heads, between 0 and 1.

    1 where one is the other, rotated and scaled (Kornblith et al. 2019, arXiv 1905.00414).

        |X^T Y|^2 / (|X^T X| |Y^T Y|),  X [B T, O] minus its mean over tokens, |.| Frobenius

    Args:
      values: captured "outputs" [L, B, N, T, O] or "heads" [L, B, T, N, V]. The latter is invariant
        only to orthogonal changes of the basis of a head.
      name: which of the two.
      mask: [B, T], True = count this token.

    Raises:
      ValueError: a mask of another shape, or another name.

    Memory grows with the square of the number of tokens.

    >>> x = jax.random.normal(jax.random.key(0), (1, 1, 1, 9, 3))
    >>> two = jnp.concatenate([x, 5 * x[..., ::-1]], axis=2)
    >>> round(float(linear_cka(two)[0, 0, 0, 1]), 4)
    1.0
    """
    axes = lookup(AXES, name, what="value")
    heads = values.shape[axes.index("N")]
    tokens = jnp.moveaxis(_at_least_float32(values), axes.index("N"), 1)
    weight = _weights(mask, (tokens.shape[2], tokens.shape[3]))[:, None].astype(tokens.dtype)
    tokens = jnp.where(weight > 0, tokens.reshape(len(values) * heads, -1, values.shape[-1]), 0)
    centred = (tokens - jnp.sum(tokens * weight, axis=1, keepdims=True)) * jnp.sqrt(weight)
    # The scale of a head does not count; squares of small numbers would be 0.
    largest = jnp.max(jnp.abs(centred), axis=(1, 2), keepdims=True)
    centred = centred / jnp.where(largest > 0, largest, 1)
    grams = jnp.einsum("hmd,hnd->hmn", centred, centred).reshape(len(tokens), -1)
    grams = grams / jnp.maximum(jnp.linalg.norm(grams, axis=1, keepdims=True), 1e-30)
    return (grams @ grams.T).reshape(values.shape[0], heads, values.shape[0], heads)


def mean_over_pairs(pairs: Float[Array, "L N L N"]) -> dict[str, Array]:
    """Means over pairs of different heads.

    Returns:
      "heads" [L]: within a layer, NaN for one head. "layers" [L, L]: between two layers, with
      "heads" on the diagonal. "same_head" [L, L]: head n of two layers, which is one head applied
      twice where they share parameters.

    >>> found = mean_over_pairs(jnp.arange(16.0).reshape(2, 2, 2, 2))
    >>> found["heads"].tolist(), found["same_head"][0].tolist()
    ([2.5, 12.5], [2.5, 4.5])
    """
    layers, heads = pairs.shape[:2]
    same = jnp.eye(layers)[:, None, :, None] * jnp.eye(heads)[:, None]
    count = heads**2 - heads * jnp.eye(layers)
    layer = jnp.sum(pairs * (1 - same), axis=(1, 3)) / count
    return {
        "heads": jnp.diagonal(layer),
        "layers": layer,
        "same_head": jnp.einsum("lnmn->lm", pairs) / heads,
    }


def effective_rank(scores: Float[Array, "L B N T S"]) -> Float[Array, "L N"]:
    """exp of the entropy of s / sum s, s the singular values of the scores, mean over texts.

    1 for a matrix of rank one, at most min(T, S) (Roy and Vetterli 2007).

    >>> round(float(effective_rank(jnp.eye(3)[None, None, None])[0, 0]), 4)
    3.0
    """
    sizes = jnp.linalg.svd(scores.astype(jnp.result_type(float)), compute_uv=False)
    share = sizes / jnp.maximum(jnp.sum(sizes, axis=-1, keepdims=True), 1e-30)
    return jnp.mean(jnp.exp(entropy(share)), axis=1)
