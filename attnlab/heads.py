"""Head layouts: how a head gets its q, k and v from x, and how heads become one output.

One letter per axis, everywhere in attnlab:

    B batch    T query positions    S key positions    D width    O output width
    N query heads    K key/value heads    H head width    V value width of a head
    C = D/N, the chunk of x that belongs to a head    E, W widths of the key and value input
    F feed-forward width    L layers    G slots (sets of shared weights)

Two questions that seeds and blogs mix are kept apart here: *what a head reads* (all of x, or
its own chunk: the layout) and *how wide it is* (`head_dim`). A layout is one row of `LAYOUTS`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.names import find

Weights = dict[str, Any]
"""The weights of one set of heads: arrays named q, k, v, o and q_bias, k_bias, ..."""

# The axes that a weight sums over; the rest are what it makes. They give the fan and the bias.
INPUT_AXES = {"q": "DC", "k": "EC", "v": "WC", "o": "NV"}


class Layout(NamedTuple):
    """One way to make heads. A new layout is three functions and a row of `LAYOUTS`."""

    axes: dict[str, str]
    """Weight name -> axis letters: gives its shape, fan, parameter count and FLOPs."""
    query: Callable
    """(w, x, spec) -> [B, T, N, H]"""
    memory: Callable
    """(w, key_input, value_input, spec) -> k [B, S, K, H], v [B, S, K, V]"""
    merge: Callable
    """(w, heads [B, T, N, V], spec) -> [B, T, O]"""
    head_dim: str = "C"
    """The axis whose size H takes where a spec leaves `head_dim` out."""
    source: str = ""
    """Where the layout comes from."""


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Layout and sizes of a set of heads: frozen, hashable, complete.

    Sizes left None take the layout's own: `head_dim` = D/N (`standard`, `narrow`) or D (`wide`),
    `value_dim` = head_dim, `num_kv_heads` = num_heads, the input and output widths = `width`.
    `num_kv_heads=1` is multi-query attention (Shazeer 2019, arXiv 1911.02150), between 1 and
    num_heads grouped-query (Ainslie 2023, arXiv 2305.13245). `scale` multiplies the scores;
    None is 1/sqrt(H). `biases` holds the letters of the maps that have one, of "qkvo".

    Raises ValueError, saying what to change, for an impossible combination.
    """

    layout: str
    width: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    out_width: int | None = None
    scale: float | None = None
    biases: str = ""

    def __post_init__(self):
        row = find("layout", self.layout, LAYOUTS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")
        letters = "".join(row.axes.values())
        needs_chunk = "C" in letters or (self.head_dim is None and row.head_dim == "C")
        if needs_chunk and self.width % self.num_heads:
            way_out = (
                "change one of them" if "C" in letters else "set head_dim or change one of them"
            )
            raise ValueError(
                f"layout {self.layout!r}: width {self.width} is not divisible by "
                f"{self.num_heads} heads; {way_out}"
            )
        if "C" in row.axes["k"] and {self.key_width, self.value_width} - {None, self.width}:
            raise ValueError(
                f"layout {self.layout!r} gives each head a chunk of width, so key_width and "
                f"value_width must equal width ({self.width})"
            )
        if self.num_kv_heads is not None:
            if "K" not in letters:
                raise ValueError(
                    f"layout {self.layout!r} has one key head per query head; "
                    "leave num_kv_heads out or use layout 'standard'"
                )
            if self.num_heads % self.num_kv_heads:
                raise ValueError(
                    f"num_heads {self.num_heads} is not divisible by num_kv_heads "
                    f"{self.num_kv_heads}"
                )
        if not set(self.biases) <= set("qkvo") or len(set(self.biases)) != len(self.biases):
            raise ValueError(f"biases must be letters of 'qkvo', not {self.biases!r}")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letter -> size, with every None resolved."""
        d, n = self.width, self.num_heads
        sizes = {"D": d, "N": n, "C": d // n}
        head_dim = self.head_dim or sizes[LAYOUTS[self.layout].head_dim]
        return sizes | {
            "K": self.num_kv_heads or n,
            "H": head_dim,
            "V": self.value_dim or head_dim,
            "E": self.key_width or d,
            "W": self.value_width or d,
            "O": self.out_width or d,
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight name -> shape, biases included."""
        return {name: tuple(self.sizes[a] for a in axes) for name, axes in weight_axes(self)}


def weight_axes(spec: HeadSpec) -> list[tuple[str, str]]:
    """(weight name, its axis letters) for every weight of `spec`; a bias has the output axes."""
    rows = []
    for name, axes in LAYOUTS[spec.layout].axes.items():
        rows.append((name, axes.replace(" ", "")))
        if name in spec.biases:
            rows.append((f"{name}_bias", "".join(a for a in rows[-1][1] if not is_input(name, a))))
    return rows


def is_input(name: str, axis: str) -> bool:
    """Does weight `name` sum over `axis`?"""
    return axis in INPUT_AXES[name]


def init_heads(
    key: Array, spec: HeadSpec, *, std: float | None = None, dtype=jnp.float32
) -> Weights:
    """Fresh weights: normal with standard deviation 1/sqrt(fan in), biases zero.

    The fan is the number of inputs that one output sums over: D (q), E (k), W (v), the chunk C
    where a head reads its chunk, and N*V (o). So q, k, v and scores start with unit variance for
    unit-variance x in every layout (default initialisers take a wrong fan on 3-D weights).
    `std` replaces 1/sqrt(fan in) by one number for all weights.
    """
    weights: Weights = {}
    names = weight_axes(spec)
    for (name, axes), k in zip(names, jax.random.split(key, len(names)), strict=True):
        if name.endswith("_bias"):
            weights[name] = jnp.zeros(spec.shapes[name], dtype)
        else:
            fan = math.prod(spec.sizes[a] for a in axes if is_input(name, a))
            weights[name] = jax.random.normal(k, spec.shapes[name], dtype) * (std or fan**-0.5)
    return weights


def project_heads(
    w: Weights,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    value_context: Float[Array, "B S W"] | None = None,
    *,
    spec: HeadSpec,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """x -> q; context (default x) -> k; value_context (default context) -> v.

    The weights are cast to the input's dtype, so x decides the precision of the products.

    >>> import jax
    >>> spec = HeadSpec("narrow", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> [a.shape for a in project_heads(w, jax.numpy.ones((1, 5, 6)), spec=spec)]
    [(1, 5, 2, 3), (1, 5, 2, 3), (1, 5, 2, 3)]
    """
    row = LAYOUTS[spec.layout]
    context = x if context is None else context
    value_context = context if value_context is None else value_context
    return row.query(w, x, spec), *row.memory(w, context, value_context, spec)


def merge_heads(
    w: Weights, heads: Float[Array, "B T N V"], *, spec: HeadSpec
) -> Float[Array, "B T O"]:
    """Heads -> output: sum_i heads_i W_O[i], which is concat(heads) W_O."""
    return LAYOUTS[spec.layout].merge(w, heads, spec)


def _add_bias(y: Array, w: Weights, name: str) -> Array:
    return y + w[name].astype(y.dtype) if name in w else y


def _read_all(w: Weights, name: str, x: Array) -> Array:
    """[B, T, D] x [D, N, H] -> [B, T, N, H] as one flat matmul (1.6 times as fast on a CPU)."""
    kernel = w[name].astype(x.dtype)
    flat = x.reshape(-1, x.shape[-1]) @ kernel.reshape(kernel.shape[0], -1)
    return _add_bias(flat.reshape(*x.shape[:-1], *kernel.shape[1:]), w, f"{name}_bias")


def _read_chunk(w: Weights, name: str, x: Array) -> Array:
    """Head n reads x[..., n*C:(n+1)*C] alone: [B, T, N*C] x [N, C, H] -> [B, T, N, H]."""
    kernel = w[name].astype(x.dtype)
    chunks = x.reshape(*x.shape[:-1], *kernel.shape[:2])
    return _add_bias(jnp.einsum("BTNC,NCH->BTNH", chunks, kernel), w, f"{name}_bias")


def _merge_all(w: Weights, heads: Array, spec: HeadSpec) -> Array:
    kernel = w["o"].astype(heads.dtype)
    flat = heads.reshape(-1, kernel.shape[0] * kernel.shape[1]) @ kernel.reshape(
        -1, kernel.shape[2]
    )
    return _add_bias(flat.reshape(*heads.shape[:2], -1), w, "o_bias")


def _row(read: Callable, axes: str, **fields: Any) -> Layout:
    """A layout whose q, k and v all read their input with `read`."""
    return Layout(
        axes=dict(zip("qkvo", axes.split(", "), strict=True)),
        query=lambda w, x, spec: read(w, "q", x),
        memory=lambda w, x, y, spec: (read(w, "k", x), read(w, "v", y)),
        merge=_merge_all,
        **fields,
    )


LAYOUTS: dict[str, Layout] = {
    # Every head reads all of x. Sizes make it canonical, multi-query, grouped or V != H.
    "standard": _row(
        _read_all,
        "D N H, E K H, W K V, N V O",
        source="Vaswani et al. 2017, section 3.2.2, arXiv 1706.03762",
    ),
    # The same function with heads as wide as x.
    "wide": _row(
        _read_all,
        "D N H, E K H, W K V, N V O",
        head_dim="D",
        source="pbloem/former, SelfAttentionWide",
    ),
    # Every head reads its own chunk of x, with its own weights.
    "narrow": _row(
        _read_chunk,
        "N C H, N C H, N C V, N V O",
        source="peterbloem.nl/blog/transformers, text of 2019 to 2023",
    ),
}
