"""What is asked of a model: tokens -> inputs, targets, and which targets count."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Example(NamedTuple):
    """A batch as the model sees it."""

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]


class Task(NamedTuple):
    """A question. `prepare(tokens [B, T + 1], key)` makes the batch."""

    prepare: Callable[[Array, Array], Example]
    extra_tokens: int
    """Symbols beyond the 256 bytes."""
    kind: str
    """The kind of model that can answer it."""


MASK_TOKEN = 256
MASK_RATE = 0.15


def causal_lm(tokens: Int[Array, "B T1"], key: Array) -> Example:
    """Predict every next byte."""
    return Example(tokens[:, :-1], tokens[:, 1:], jnp.ones(tokens[:, 1:].shape))


def masked_lm(tokens: Int[Array, "B T1"], key: Array) -> Example:
    """Predict 15 % of the bytes: 80 % of them masked, 10 % random, 10 % left as they are.

    Devlin et al. 2018, section 3.1, arXiv 1810.04805. The first byte of the window is not used,
    so that both tasks score the same targets.
    """
    targets = tokens[:, 1:]
    chosen, fate, other = jax.random.split(key, 3)
    chosen = jax.random.bernoulli(chosen, MASK_RATE, targets.shape)
    fate = jax.random.uniform(fate, targets.shape)
    other = jax.random.randint(other, targets.shape, 0, MASK_TOKEN, targets.dtype)
    shown = jnp.where(fate < 0.8, MASK_TOKEN, jnp.where(fate < 0.9, other, targets))
    inputs = jnp.where(chosen, shown, targets)
    return Example(inputs, targets, chosen.astype(jnp.float32))


def cross_entropy(
    logits: Float[Array, "B T vocab"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """-log softmax(logits)[target], in nats."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


TASKS = {
    "causal_lm": Task(causal_lm, extra_tokens=0, kind="decoder"),
    "masked_lm": Task(masked_lm, extra_tokens=1, kind="encoder"),
}
