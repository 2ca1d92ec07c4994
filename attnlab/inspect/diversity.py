"""How heads differ: of one layer, of different layers, of layers that share their weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.names import find

AXES = {"outputs": "LBNTO", "heads": "LBTNV"}
"""Value of `observe.OF_HEADS` -> its axes, as a model shows it."""


def divergence(
    probs: Float[Array, "L B N T S"], mask: Bool[Array, "B T"] | None = None
) -> Float[Array, "L N L N"]:
    """Jensen-Shannon divergence of two heads, in nats, the mean over rows: 0 where they look at the
    same keys, ln 2 where at different ones. `mask` [B, T], True = count this query.

        JS(p, q) = H((p + q)/2) - (H(p) + H(q))/2

    >>> two = jnp.eye(2)[None, None, :, None]  # two heads, each of its own key
    >>> round(float(divergence(two)[0, 0, 0, 1]), 4)
    0.6931
    """
    layers, batch, heads, length, keys = probs.shape
    rows = jnp.moveaxis(probs, 2, 1).reshape(layers * heads, batch * length, keys)
    weight = jnp.ones(batch * length) if mask is None else jnp.asarray(mask).reshape(-1)
    weight = weight / jnp.sum(weight)
    entropy = lambda p: -jnp.sum(jax.scipy.special.xlogy(p, jnp.where(p > 0, p, 1)), axis=-1)
    own = entropy(rows) @ weight
    one = lambda p: jax.lax.map(lambda q: entropy((p + q) / 2) @ weight, rows)
    found = jax.lax.map(one, rows) - (own[:, None] + own) / 2
    return jnp.maximum(found, 0).reshape(layers, heads, layers, heads)


def cka(
    values: Float[Array, "L B *X"], name: str = "outputs", mask: Bool[Array, "B T"] | None = None
) -> Float[Array, "L N L N"]:
    """Linear centred kernel alignment of what two heads make of the same tokens, between 0 and 1:
    1 where one is the other turned and scaled (Kornblith et al. 2019, arXiv 1905.00414).

        |X^T Y|^2 / (|X^T X| |Y^T Y|),  X [B T, O] minus its mean over tokens, |.| Frobenius

    `values` are what a model shows under `name`: "outputs" [L, B, N, T, O] or "heads"
    [L, B, T, N, V]. The second depends on how a head numbers its values; turned by any orthogonal
    matrix it stays. Memory grows with the square of the number of tokens.

    >>> x = jax.random.normal(jax.random.key(0), (1, 1, 1, 9, 3))
    >>> two = jnp.concatenate([x, 5 * x[..., ::-1]], axis=2)
    >>> round(float(cka(two)[0, 0, 0, 1]), 4)
    1.0
    """
    axes = find("value", name, AXES)
    heads = values.shape[axes.index("N")]
    tokens = jnp.moveaxis(values, axes.index("N"), 1)
    tokens = tokens.reshape(values.shape[0] * heads, -1, values.shape[-1])
    weight = jnp.ones(tokens.shape[1]) if mask is None else jnp.asarray(mask).reshape(-1)
    weight = (weight / jnp.sum(weight))[:, None].astype(tokens.dtype)
    centred = (tokens - jnp.sum(tokens * weight, axis=1, keepdims=True)) * jnp.sqrt(weight)
    grams = jnp.einsum("hmd,hnd->hmn", centred, centred).reshape(len(tokens), -1)
    grams = grams / jnp.maximum(jnp.linalg.norm(grams, axis=1, keepdims=True), 1e-30)
    return (grams @ grams.T).reshape(values.shape[0], heads, values.shape[0], heads)


def between(pairs: Float[Array, "L N L N"]) -> dict[str, Array]:
    """The mean over pairs of different heads: "heads" [L] of one layer, "layers" [L, L] of two
    (on its diagonal "heads"), "application" [L, L] of the same head in two layers, which where
    they share weights is one head in two of its uses.

    >>> found = between(jnp.arange(16.0).reshape(2, 2, 2, 2))
    >>> found["heads"].tolist(), found["application"][0].tolist()
    ([2.5, 12.5], [2.5, 4.5])
    """
    layers, heads = pairs.shape[:2]
    same = jnp.eye(layers)[:, None, :, None] * jnp.eye(heads)[:, None]
    count = heads**2 - heads * jnp.eye(layers)
    layer = jnp.sum(pairs * (1 - same), axis=(1, 3)) / count
    return {
        "heads": jnp.diagonal(layer),
        "layers": layer,
        "application": jnp.einsum("lnmn->lm", pairs) / heads,
    }


def effective_rank(scores: Float[Array, "L B N T S"]) -> Float[Array, "L N"]:
    """exp of the entropy of s / sum s, s the singular values of the scores of a text, the mean over
    texts (Roy and Vetterli 2007): 1 for a matrix of rank one, at most min(T, S).

    >>> round(float(effective_rank(jnp.eye(3)[None, None, None])[0, 0]), 4)
    3.0
    """
    sizes = jnp.linalg.svd(scores.astype(jnp.result_type(float)), compute_uv=False)
    share = sizes / jnp.maximum(jnp.sum(sizes, axis=-1, keepdims=True), 1e-30)
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, jnp.where(share > 0, share, 1)), axis=-1)
    return jnp.mean(jnp.exp(entropy), axis=1)
