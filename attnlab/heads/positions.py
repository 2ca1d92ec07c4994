"""Where a token stands: tables that are added to x, angles that turn q and k, distance buckets."""

import math

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


def sinusoidal_halves(
    num_positions: int, width: int, *, base: float = 10000.0
) -> Float[Array, "T D"]:
    """All sines, then all cosines, of position * base^(-i/(n-1)) for i < n = D // 2, as
    tensor2tensor makes them (the paper has n where the code has n - 1); an odd D ends in a zero.

    >>> sinusoidal_halves(2, 5)[0].tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0]
    """
    half, dtype = width // 2, jnp.result_type(float)
    rates = base ** (-jnp.arange(half, dtype=dtype) / max(half - 1, 1))
    angles = jnp.arange(num_positions, dtype=dtype)[:, None] * rates
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(table, [(0, 0), (0, width % 2)])


def relative_buckets(
    distance: Int[Array, "..."], *, num_buckets: int, max_distance: int, two_sided: bool
) -> Int[Array, "..."]:
    """Key position - query position -> a bucket (T5: Raffel et al. 2020, arXiv 1910.10683).

    Half the buckets hold one distance each, the other half grow as its logarithm up to
    `max_distance`. `two_sided` gives keys ahead a half of their own; else they are all at 0.

    >>> relative_buckets(jnp.arange(-4, 3), num_buckets=8, max_distance=20, two_sided=True).tolist()
    [2, 2, 2, 1, 0, 5, 6]
    """
    ahead = jnp.zeros_like(distance)
    if two_sided:
        num_buckets //= 2
        ahead = num_buckets * (distance > 0)
        far = jnp.abs(distance)
    else:
        far = jnp.maximum(-distance, 0)
    exact = num_buckets // 2
    # In float32 whatever the model's precision: the edges are those of the published code.
    steps = jnp.log(jnp.maximum(far, 1).astype(jnp.float32) / exact)
    steps = steps / math.log(max_distance / exact) * (num_buckets - exact)
    grown = jnp.minimum(exact + steps.astype(distance.dtype), num_buckets - 1)
    return ahead + jnp.where(far < exact, far, grown)


def rotary_angles(
    positions: Int[Array, "*B T"], head_dim: int, *, base: float = 10000.0
) -> Float[Array, "*B T half"]:
    """position * base^(-2i/H) for i < H/2 (Su et al. 2021, arXiv 2104.09864).

    >>> rotary_angles(jnp.arange(3), 4)[:, 0].tolist()
    [0.0, 1.0, 2.0]
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs: head_dim {head_dim} must be even")
    return _angles(positions, head_dim, base)


def rotate(
    x: Float[Array, "B T N H"], angles: Float[Array, "*B T half"]
) -> Float[Array, "B T N H"]:
    """Turns the pairs (x_i, x_{i+H/2}) by their angles; q.k then depends on distance alone.

    Pairs are taken half a head apart, as GPT-NeoX and Hugging Face do (the paper takes
    neighbours: a fixed permutation of the head, which W_Q and W_K absorb).

    >>> quarter = jnp.array([[jnp.pi / 2]])
    >>> float(rotate(jnp.array([[[[1.0, 0.0]]]]), quarter)[0, 0, 0, 1])
    1.0
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
