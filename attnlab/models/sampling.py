"""How the next token is chosen: the likeliest, or one drawn from the likely ones."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from attnlab.fields import as_count

SMALLEST = 1e-30
"""Of temperature and top_p: smaller ones choose the same tokens, but are 0 in float32."""


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
        # Numbers of NumPy and JAX become Python's.
        object.__setattr__(self, "temperature", _number("temperature", self.temperature))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", as_count("top_k", self.top_k, 1))
        if self.top_p is not None:
            object.__setattr__(self, "top_p", _number("top_p", self.top_p))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, not {self.temperature}")
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


def _number(name: str, value: object) -> float:
    """Raises ValueError for what is no number, or not known yet in a traced function."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{name} is no float: a whole number of more than 1,000 bits") from None
    except TypeError:
        raise ValueError(f"{name} must be a number known before tracing, not {value!r}") from None


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

    Raises:
      ValueError: top_k is more than the vocabulary.

    >>> logits = jnp.log(jnp.array([0.1, 0.5, 0.25, 0.15]))
    >>> keeps = lambda **limits: jnp.isfinite(limit_logits(logits, **limits)).astype(int).tolist()
    >>> keeps(top_k=3), keeps(top_p=0.7), keeps(top_p=0.8), keeps(top_k=2, top_p=0.7)
    ([0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 0])
    """
    logits = logits / jnp.maximum(temperature, SMALLEST)
    if top_k is not None:
        if top_k > logits.shape[-1]:
            raise ValueError(f"top_k must be from 1 to vocab_size {logits.shape[-1]}, not {top_k}")
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p is not None:
        order = jnp.argsort(-logits, axis=-1)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        likelier = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.take_along_axis(
            likelier < jnp.maximum(top_p, SMALLEST), jnp.argsort(order, axis=-1), axis=-1
        )
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
