"""Marks values that a layer saves for its backward pass without rematerialization."""

from typing import TypeVar

from jax.ad_checkpoint import checkpoint_name

SAVED = "saved_for_backward"
"""The name by which a policy of `jax.checkpoint` knows such a value."""

T = TypeVar("T")


def save_for_backward(x: T) -> T:
    """`x` itself; `run_stack(..., remat=False)` saves it, if the backward pass reads it.

    For values that are expensive to compute twice: products of tokens. Not for values computed from
    weights alone (a matrix and its delta): that would be one copy of the weights per layer.

    >>> import jax.numpy as jnp
    >>> save_for_backward(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    saved: T = checkpoint_name(x, SAVED)
    return saved
