"""Where a token stands: sinusoidal tables that are added to x, rotary angles that turn q and k."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sinusoidal(num_positions: int, width: int, *, base: float = 10000.0) -> Float[Array, "T D"]:
    """sin and cos of position / base^(2i/D), interleaved (Vaswani et al. 2017, section 3.5).

    >>> sinusoidal(2, 4)[0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    angles = _angles(jnp.arange(num_positions), width, base)
    table = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return table.reshape(num_positions, -1)[:, :width]


def rotary_angles(
    positions: Int[Array, "*B T"], head_dim: int, *, base: float = 10000.0
) -> Float[Array, "*B T half"]:
    """position * base^(-2i/H) for i < H/2 (Su et al. 2021, arXiv 2104.09864)."""
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs: head_dim {head_dim} must be even")
    return _angles(positions, head_dim, base)


def rotate(
    x: Float[Array, "B T N H"], angles: Float[Array, "*B T half"]
) -> Float[Array, "B T N H"]:
    """Turns the pairs (x_i, x_{i+H/2}) by their angles; q.k then depends on distance alone.

    Pairs are taken half a head apart, as GPT-NeoX and Hugging Face do (the paper takes
    neighbours: a fixed permutation of the head, which W_Q and W_K absorb).
    """
    angles = angles[..., None, :].astype(jnp.promote_types(x.dtype, jnp.float32))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _angles(positions: Array, width: int, base: float) -> Array:
    # float at least 32, and 64 where x64 is on.
    dtype = jnp.result_type(float)
    rates = base ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
    return positions[..., None].astype(dtype) * rates
