"""Which token comes next: the likeliest, or one drawn among the likely."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def limit_logits(
    logits: Float[Array, "*B vocab"],
    *,
    temperature: Any = 1.0,
    top_k: int | None = None,
    top_p: Any = None,
) -> Float[Array, "*B vocab"]:
    """logits / temperature, -inf where a token may not be drawn; each step reads what the one
    before it left, in the order and by the definitions of transformers.

    1. p = softmax(logits / temperature).
    2. `top_k`: those as likely as the k-th (Fan et al. 2018, arXiv 1805.04833).
    3. `top_p`: the likeliest, down to the first with which their sum reaches `top_p` (Holtzman et
       al. 2019, arXiv 1904.09751). Of equal ones that need not all be in, those with smaller ids.

    >>> logits = jnp.log(jnp.array([0.1, 0.5, 0.25, 0.15]))
    >>> keeps = lambda **limits: jnp.isfinite(limit_logits(logits, **limits)).astype(int).tolist()
    >>> keeps(top_k=3), keeps(top_p=0.7), keeps(top_p=0.8), keeps(top_k=2, top_p=0.7)
    ([0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 0])
    """
    logits = logits / temperature
    if top_k is not None:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p is not None:
        order = jnp.argsort(-logits, axis=-1)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        likelier = jnp.cumsum(probs, axis=-1) - probs
        stays = jnp.take_along_axis(likelier < top_p, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(stays, logits, -jnp.inf)
    return logits


def check_limits(
    vocab_size: int, temperature: float, top_k: int | None, top_p: float | None, key: Any
) -> None:
    """Raises ValueError, with a way out, for what nothing can be drawn by."""
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, not {temperature}")
    if temperature and key is None:
        raise ValueError(
            f"temperature={temperature} draws at random; pass key=jax.random.key(seed)"
        )
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be from 1 to vocab_size {vocab_size}, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, which keeps all, not {top_p}")


def choose(
    logits: Float[Array, "B vocab"], key: Array, limits: dict[str, Any], top_k: int | None
) -> Int[Array, "B"]:
    """The likeliest token; with `limits` (of `limit_logits`) one drawn."""
    if not limits:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.random.categorical(key, limit_logits(logits, top_k=top_k, **limits))
    return drawn.astype(jnp.int32)
