"""The loss of a batch, also without the logits of all its tokens at once."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from attnlab.models import ModelConfig
from attnlab.models.head import lm_head, output_shapes
from attnlab.sharing import Params, PyTree
from attnlab.training.objectives.objective import Example, Losses, Model, Objective

LossOfHead: TypeAlias = Callable[[Params, Array, Array], Array]
"""(parameters of the LM head, hidden states, targets) -> one number per target."""
WHOLE_LOGITS, CHUNK_LOGITS = 1 << 26, 1 << 25
"""Logits (tokens x vocabulary) that are computed at once, and those of a chunk where a batch has
more: 256 and 128 MiB in float32."""


def mean_loss(
    objective: Objective,
    model: Model,
    params: Params,
    example: Example,
    count: Array,
    *,
    tokens: int = 0,
    **options: PyTree,
) -> tuple[Array, Losses]:
    """(sum(w l) / count, auxiliary losses of the model by name).

    Args:
      objective: with the loss l of a target.
      model: with `apply`.
      params: of the model.
      example: inputs, targets and their weights w.
      count: sum of the weights of the whole batch.
      tokens: `TrainConfig.loss_tokens`.
      options: of the model's call.
    """
    config, weights, size = getattr(model, "config", None), example.weights, 0
    if isinstance(config, ModelConfig) and objective.output == "logits" and weights.ndim == 2:
        size = chunk_size(len(weights), weights.shape[1], config.vocab_size, tokens)
    if not isinstance(config, ModelConfig) or not size:
        prediction, auxiliary = objective.predict(model, params, example.inputs, **options)
        losses = objective.loss(prediction, example.targets)
        return jnp.sum(losses * weights) / count, auxiliary

    def loss(head: Params, hidden: Array, targets: Array) -> Array:
        return objective.loss(lm_head(head, hidden, config), targets)

    # The logits of this call are read by none, hence never computed.
    outputs = model.apply({"params": params}, **example.inputs, **options)
    names = {*output_shapes(config)} | ({"embedding"} if config.output.kind == "tied" else set())
    head = {name: params[name] for name in sorted(names) if name in params}
    share = weights.astype(jnp.promote_types(weights.dtype, outputs.hidden.dtype)) / count
    value = _chunked_sum(loss, size, example.targets, share, head, outputs.hidden)
    return value, dict(outputs.losses)


def chunk_size(rows: int, length: int, vocab_size: int, tokens: int = 0) -> int:
    """Positions of every row whose logits are computed at a time; 0: all.

    >>> chunk_size(8, 512, 256), chunk_size(8, 512, 50304), chunk_size(8, 512, 256, tokens=64)
    (0, 83, 8)
    """
    if not tokens:
        is_small = rows * length * vocab_size <= WHOLE_LOGITS
        tokens = rows * length if is_small else CHUNK_LOGITS // vocab_size
    size = max(tokens // rows, 1)
    return 0 if size >= length else size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_sum(
    loss: LossOfHead, size: int, targets: Array, weights: Array, head: Params, hidden: Array
) -> Array:
    """sum(weights * loss(head, hidden, targets)) over [B, T], `size` positions at a time.

    The gradients of head and hidden are computed beside the value, so logits are computed once: a
    chunk's are gone before the next one's are there. Targets and weights have none.
    """
    value: Array = _with_gradient(loss, size, targets, weights, head, hidden)[0]
    return value


def _with_gradient(
    loss: LossOfHead, size: int, targets: Array, weights: Array, head: Params, hidden: Array
) -> tuple[Array, tuple[Params, Array]]:
    """The sum, and its gradients for head and hidden."""
    rows, length = weights.shape
    count = -(-length // size)

    def split(a: Array, mode: str) -> Array:
        """[B, T, ...] -> [count, B, size, ...]"""
        filled = [(0, 0), (0, count * size - length)] + [(0, 0)] * (a.ndim - 2)
        padded: Array = jnp.pad(a, filled, mode=mode)
        return padded.reshape(rows, count, size, *a.shape[2:]).swapaxes(0, 1)

    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def chunk(head: Params, hidden: Array, targets: Array, weights: Array) -> Array:
        return jnp.sum(loss(head, hidden, targets) * weights)

    def add(sums: PyTree, part: tuple[Array, Array, Array]) -> tuple[PyTree, Array]:
        value, (to_head, to_hidden) = chunk(head, *part)
        return jax.tree.map(jnp.add, sums, (value, to_head)), to_hidden

    # What fills the last chunk are copies of the last position, of weight 0.
    parts = split(hidden, "edge"), split(targets, "edge"), split(weights, "constant")
    value, _ = jax.eval_shape(chunk, head, *jax.tree.map(lambda a: a[0], parts))
    zeros = jnp.zeros((), value.dtype), jax.tree.map(jnp.zeros_like, head)
    (total, to_head), to_hidden = lax.scan(add, zeros, parts)
    to_hidden = to_hidden.swapaxes(0, 1).reshape(rows, count * size, -1)[:, :length]
    return total, (to_head, to_hidden)


def _backward(
    loss: LossOfHead, size: int, gradients: PyTree, cotangent: Array
) -> tuple[None, None, Params, Array]:
    to_head, to_hidden = jax.tree.map(lambda a: (a * cotangent).astype(a.dtype), gradients)
    return None, None, to_head, to_hidden


_chunked_sum.defvjp(_with_gradient, _backward)
