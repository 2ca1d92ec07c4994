"""Positions: tables that are added to x, rotary angles for q and k, distance buckets."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from attnlab.attention.score_mods import relative_buckets as relative_buckets
from attnlab.fields import check_choice
from attnlab.names import lookup
from attnlab.ops import with_rank

__all__ = [
    "SCALINGS", "RotaryScaling", "Scaling", "read_scaling", "relative_buckets", "rotary_angles",
    "rotate", "sinusoidal", "sinusoidal_halves",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


def sinusoidal(num_positions: int, width: int, *, base: float = 10000.0) -> Float[Array, "T D"]:
    """sin and cos of position / base^(2i/D), interleaved (Vaswani et al. 2017, section 3.5).

    >>> sinusoidal(2, 4)[0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    angles = _angles(jnp.arange(num_positions), width, base)
    table = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return table.reshape(num_positions, -1)[:, :width]


def sinusoidal_halves(
    num_positions: int, width: int, *, base: float = 10000.0, rates: str = "t2t"
) -> Float[Array, "T D"]:
    """All sines, then all cosines, of position * base^(-i/(n-1)) for i < n = D // 2, as
    tensor2tensor makes them, or with rates "paper" base^(-i/n); an odd D ends in a zero.

    >>> sinusoidal_halves(2, 5)[0].tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0]
    """
    check_choice("rates", rates, ("t2t", "paper"))
    half, dtype = width // 2, jnp.result_type(float)
    steps = half if rates == "paper" else half - 1
    each = base ** (-jnp.arange(half, dtype=dtype) / max(steps, 1))
    angles = jnp.arange(num_positions, dtype=dtype)[:, None] * each[None]
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(table, [(0, 0), (0, width % 2)])


class Scaling(NamedTuple):
    """One way to change the rates of rotary positions; an entry of `SCALINGS`."""

    run: Callable[..., Array]
    """(rates, *numbers) -> rates"""
    numbers: tuple[str, ...]
    """Their names in a Hugging Face config.json."""
    by_length: bool = False
    """After these numbers there are any more, an even number; `run` is given the length of the text
    before them."""


class RotaryScaling(NamedTuple):
    """Rotary positions for texts longer than those of training; see `read_scaling`."""

    kind: str
    """A key of `SCALINGS`."""
    numbers: tuple[float, ...]


def rotary_angles(
    positions: Int[Array, "*B T"],
    head_dim: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
) -> Float[Array, "*B T half"]:
    """position * rate_i with rate_i = base^(-2i/H) for i < H/2 (Su et al. 2021, arXiv 2104.09864).

    `scaling` changes the rates, for texts longer than those of training. "dynamic" changes none: it
    is for texts up to its length, and only `ModelConfig` refuses longer ones.

    Raises:
      ValueError: head_dim is odd, or the scaling is not a key of `SCALINGS`.

    >>> rotary_angles(jnp.arange(3), 4)[:, 0].tolist()
    [0.0, 1.0, 2.0]
    >>> rotary_angles(jnp.arange(3), 4, scaling=RotaryScaling("linear", (4.0,)))[:, 0].tolist()
    [0.0, 0.25, 0.5]
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions rotate pairs: head_dim {head_dim} must be even")
    if scaling is None:
        return _angles(positions, head_dim, base)
    entry, numbers = lookup(SCALINGS, scaling.kind, what="rotary_scaling"), scaling.numbers
    length = (jnp.max(positions) + 1,) if entry.by_length else ()
    return _angles(positions, head_dim, base, lambda rates: entry.run(rates, *length, *numbers))


def _longrope(rates: Array, length: Array, trained: float, *factors: float) -> Array:
    """A rate each is divided by a short factor in texts of up to `trained` tokens, by a long one in
    longer ones. `factors`: the short ones, then the long ones."""
    half = len(factors) // 2
    if half != len(rates):
        raise ValueError(f"longrope: {half} short factors do not fit {len(rates)} rates of a head")
    short, long = jnp.asarray(factors[:half], rates.dtype), jnp.asarray(factors[half:], rates.dtype)
    return rates / jnp.where(length > trained, long, short)


def _llama3(rates: Array, factor: float, low: float, high: float, length: float) -> Array:
    """Wavelengths above length/low grow by `factor`, those below length/high are kept. Between them
    the rate is interpolated in the number of periods.
    """
    periods = length * rates / (2 * math.pi)
    kept = jnp.clip((periods - low) / (high - low), 0, 1)
    return (1 - kept) * rates / factor + kept * rates


def _yarn(
    rates: Array, factor: float, fast: float, slow: float, length: float, whole: bool = True
) -> Array:
    """Rates of fewer than `slow` periods in `length` positions are divided by `factor`, those of
    more than `fast` are kept. Between them is a linear ramp over the index i of a rate; if `whole`,
    it starts and ends at whole numbers."""
    size = 2 * rates.shape[-1]
    base = rates[1] ** (-size / 2) if size > 2 else jnp.asarray(10000.0)

    def index(periods: float) -> Array:
        return size * jnp.log(length / (periods * 2 * math.pi)) / (2 * jnp.log(base))

    low, high = index(fast), index(slow)
    low, high = (jnp.floor(low), jnp.ceil(high)) if whole else (low, high)
    low, high = jnp.maximum(low, 0), jnp.minimum(high, size - 1)
    high = jnp.where(high == low, high + 0.001, high)
    scaled = jnp.clip((jnp.arange(size // 2) - low) / (high - low), 0, 1)
    return scaled * rates / factor + (1 - scaled) * rates


YARN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
SCALINGS = {
    # Peng et al. 2023, arXiv 2309.00071; its factor of the scores is not of the rates.
    "yarn": Scaling(_yarn, YARN),
    "yarn_smooth": Scaling(functools.partial(_yarn, whole=False), YARN),
    # Of texts longer than the length of training alone, which `ModelConfig` refuses.
    "dynamic": Scaling(
        lambda rates, factor, length: rates, ("factor", "original_max_position_embeddings")
    ),
    # Ding et al. 2024, arXiv 2402.13753.
    "longrope": Scaling(_longrope, ("original_max_position_embeddings",), by_length=True),
    # Chen et al. 2023, arXiv 2306.15595: every position counts as a fraction of one.
    "linear": Scaling(lambda rates, factor: rates / factor, ("factor",)),
    # Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783).
    "llama3": Scaling(
        _llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
}


def read_scaling(scaling: str) -> RotaryScaling:
    """The scaling that a config writes as text: a key of `SCALINGS`, a colon and its numbers.

    Raises:
      ValueError: another text; the message has the expected form.

    >>> read_scaling("llama3:8,1,4,8192")
    RotaryScaling(kind='llama3', numbers=(8.0, 1.0, 4.0, 8192.0))
    """
    name, _, text = scaling.partition(":")
    entry = lookup(SCALINGS, name, what="rotary_scaling")
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    more = len(numbers) - len(entry.numbers)
    fits = more > 0 and more % 2 == 0 if entry.by_length else more == 0
    if not fits or not all(0 < n < math.inf for n in numbers):
        form = ",".join(n.upper() for n in entry.numbers)
        form += ",SHORT_FACTOR,...,LONG_FACTOR,..." * entry.by_length
        raise ValueError(f"rotary_scaling {scaling!r}: write {name}:{form}, all of them above 0")
    if name == "llama3" and numbers[1] >= numbers[2]:
        raise ValueError(f"{scaling!r}: low_freq_factor must be less than high_freq_factor")
    return RotaryScaling(name, numbers)


def rotate(
    x: Float[Array, "B T N H"], angles: Inexact[Array, "*B T half"]
) -> Float[Array, "B T N H"]:
    """Rotates the pairs (x_i, x_{i+R/2}) by their angles, so that q.k depends on distance alone.

    With R/2 angles the first R numbers of a head are rotated, the others stay. Pairs are taken R/2
    apart, as in GPT-NeoX and Hugging Face. The paper takes adjacent numbers: a fixed permutation of
    the head, which W_Q and W_K absorb. Complex angles log(s) + i angle also multiply by s.

    >>> quarter = jnp.array([[jnp.pi / 2]])
    >>> float(rotate(jnp.array([[[[1.0, 0.0]]]]), quarter)[0, 0, 0, 1])
    1.0
    """
    angles, half = with_rank(angles[..., None, :], x.ndim), angles.shape[-1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scale = jnp.exp(angles.real).astype(wide) if jnp.iscomplexobj(angles) else None
    angles = (angles if scale is None else angles.imag).astype(wide)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    cos, sin = (cos, sin) if scale is None else (scale * cos, scale * sin)
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    a, b = a.astype(cos.dtype), b.astype(cos.dtype)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _angles(
    positions: Array, width: int, base: float, scale: Callable[[Array], Array] = lambda rates: rates
) -> Array:
    # float at least 32, and 64 where x64 is on.
    dtype = jnp.result_type(float)
    rates = scale(base ** (-jnp.arange(0, width, 2, dtype=dtype) / width))
    return positions[..., None].astype(dtype) * with_rank(rates, positions.ndim + 1)
