"""Comparison of arrays by their bits."""

import numpy as np


def same_bits(one: object, other: object) -> bool:
    """Whether two arrays have equal dtype, shape and bit patterns.

    Unlike `==`, NaN equals a NaN of the same bits, and 0.0 differs from -0.0.

    >>> same_bits(np.float32(np.nan), np.float32(np.nan)), same_bits(0.0, -0.0)
    (True, False)
    """
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    ours, theirs = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return bool(np.array_equal(ours, theirs))
