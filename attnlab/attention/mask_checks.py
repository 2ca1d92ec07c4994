"""Checks of masks: boolean, and of padding one element for each token."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool


def check_boolean(name: str, mask: ArrayLike) -> None:
    """Raises TypeError for a mask of numbers.

    >>> check_boolean("mask", jnp.zeros((2, 2)))
    Traceback (most recent call last):
    TypeError: mask must be boolean (True = may attend), not float32; write mask > 0.5 for one of \
zeros and ones, pass numbers that are added to the scores as bias
    """
    if (dtype := jnp.result_type(mask)) != jnp.bool_:
        raise TypeError(
            f"{name} must be boolean (True = may attend), not {dtype}; write {name} > 0.5 for one "
            "of zeros and ones, pass numbers that are added to the scores as bias"
        )


def check_padding_shape(name: str, mask: ArrayLike, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a padding mask that does not have one element for each token.

    >>> check_padding_shape("padding_mask", jnp.ones((1, 2), bool), (1, 3))
    Traceback (most recent call last):
    ValueError: padding_mask (1, 2) must be [batch, length] = (1, 3), True where there is a token
    """
    if np.shape(mask) != shape:
        raise ValueError(
            f"{name} {np.shape(mask)} must be [batch, length] = {shape}, True where there is a "
            "token"
        )


def checked_padding_mask(
    name: str, mask: ArrayLike | None, tokens: ArrayLike | None
) -> Bool[Array, "B T"] | None:
    """A padding mask (True = a token) as booleans; tokenizers return zeros and ones.

    Args:
      name: for errors.
      mask: [B, T].
      tokens: what it belongs to, [B, T, ...].

    Raises:
      ValueError: another shape, or whole numbers apart from 0 and 1.
      TypeError: floats, which other libraries add to the scores (0 = a token there).

    >>> checked_padding_mask("padding_mask", [[1, 1, 0]], jnp.array([[5, 3, 0]])).tolist()
    [[True, True, False]]
    """
    if mask is None:
        return None
    assert tokens is not None
    array = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    check_padding_shape(name, array, np.shape(tokens)[:2])
    if jnp.issubdtype(array.dtype, jnp.integer):
        if not isinstance(array, jax.core.Tracer) and not np.isin(np.asarray(array), (0, 1)).all():
            raise ValueError(f"{name} must hold 0 (padding) and 1 (a token) only")
    elif array.dtype != jnp.bool_:
        raise TypeError(
            f"{name} must be boolean (True = a token), not {array.dtype}; write mask > 0.5 for one "
            "of zeros and ones, mask == 0 for one that is added to the scores"
        )
    return jnp.asarray(array, bool)
