"""What a layer saves for its backward pass, where it does not save everything or nothing."""

from typing import TypeVar

from jax.ad_checkpoint import checkpoint_name

SAVED = "saved_for_backward"
"""The name by which a policy of `jax.checkpoint` knows such a value."""

T = TypeVar("T")


def save_for_backward(x: T) -> T:
    """`x` itself; `run_stack(..., remat=False)` saves it, if the backward pass reads it.

    For what is dear to compute twice: products of tokens. Not for what is made of weights alone
    (a matrix and its delta): that would be one copy of the weights per layer.

    >>> import jax.numpy as jnp
    >>> save_for_backward(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    return checkpoint_name(x, SAVED)
