"""How the next token is chosen: the likeliest, or one drawn from the likely ones."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: 0 takes the likeliest token; else it is drawn from softmax(logits / temperature).
      top_k: only tokens at least as likely as the k-th (Fan et al. 2018, arXiv 1805.04833).
      top_p: only the likeliest tokens, down to the first at which their probabilities sum to top_p
        (Holtzman et al. 2019, arXiv 1904.09751).

    Raises:
      ValueError: a value that nothing can be drawn with.

    >>> Sampling(temperature=0.7, top_p=0.9).is_greedy
    False
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, not {self.temperature}")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be a whole number of at least 1, not {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1, which keeps all, not {self.top_p}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def limits(self) -> "SamplingArrays":
        """The values that a compiled program takes as arguments."""
        if self.is_greedy:
            return SamplingArrays()
        keeps_all = self.top_p is None or self.top_p == 1
        top_p = None if keeps_all else jnp.asarray(self.top_p)
        return SamplingArrays(jnp.asarray(self.temperature), top_p)


class SamplingArrays(NamedTuple):
    """Temperature and top_p of a `Sampling` as arrays; no temperature: greedy."""

    temperature: Array | None = None
    top_p: Array | None = None


def limit_logits(
    logits: Float[Array, "*B vocab"],
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
) -> Float[Array, "*B vocab"]:
    """logits / temperature, and -inf for tokens that may not be drawn.

    First top_k, then top_p of what is left, as in transformers. Of equally likely tokens that need
    not all be in, top_p keeps those with smaller ids.

    Args:
      logits: [..., vocab].
      temperature: above 0.
      top_k, top_p: as in `Sampling`.

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
        kept = jnp.take_along_axis(likelier < top_p, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits


def next_token(
    logits: Float[Array, "B vocab"], key: Array, limits: SamplingArrays, top_k: int | None
) -> Int[Array, " B"]:
    """The likeliest token, or with a temperature one drawn with `key`.

    >>> next_token(jnp.array([[0.0, 2.0, 1.0]]), jax.random.key(0), SamplingArrays(), None).tolist()
    [1]
    """
    if limits.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    allowed = limit_logits(logits, temperature=limits.temperature, top_k=top_k, top_p=limits.top_p)
    return jax.random.categorical(key, allowed).astype(jnp.int32)
