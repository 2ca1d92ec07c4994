"""Heads: x -> q, k, v and heads -> output, for every row of `layouts.LAYOUTS`.

The letters of the axes stand at the top of `attnlab/layouts.py`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.layouts import INPUT_AXES, LAYOUTS, Absorbed, Layout, Weights
from attnlab.names import find
from attnlab.pointwise import NORM_KINDS

# The weights that make keys and values, where a layout has them.
MEMORY_NAMES = ("k_outer", "v_outer", "k", "v", "k_bias", "v_bias", "k_norm")
WEIGHT_NAMES = {*INPUT_AXES, *(f"{letter}_bias" for letter in "qkvo"), "q_norm", "k_norm"}


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Layout and sizes of a set of heads: frozen, hashable, complete.

    Sizes left None take the layout's own: `head_dim` = D/N (`standard`, `narrow`, `narrow_tied`,
    `alt`, `two_stage`) or D (`wide`); `value_dim` = head_dim, D/N where the layout has no head_dim
    (`collaborative`, `bilinear`); `shared_dim` (`collaborative`) and the input and output widths =
    `width`; `num_kv_heads` = num_heads. `num_kv_heads=1` is multi-query attention (Shazeer 2019,
    arXiv 1911.02150), between 1 and num_heads grouped-query (Ainslie 2023, arXiv 2305.13245).

    `scale` multiplies the scores; None is 1/sqrt(width of q). `biases` holds the letters of the
    maps that have one, of "qkvo". `output=False` leaves W_O out: the output is the heads side by
    side. `qk_norm` normalises q and k per head, with a learnt scale: "layer" (Dehghani et al.
    2023, arXiv 2302.05442; Flax's `normalize_qk`) or "rms" (Qwen3).

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
    shared_dim: int | None = None
    scale: float | None = None
    biases: str = ""
    output: bool = True
    qk_norm: str | None = None

    def __post_init__(self):
        row = find("layout", self.layout, LAYOUTS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")
        letters = "".join(row.axes.values())
        self._check_sizes(row, letters)
        self._check_maps(row)
        needs_chunk = "C" in letters or "C" in (
            self.head_dim or row.head_dim,
            self.value_dim or row.value_dim,
        )
        if needs_chunk and self.width % self.num_heads:
            free = "head_dim" if "H" in letters else "value_dim"
            way_out = (
                "change one of them" if "C" in letters else f"set {free} or change one of them"
            )
            raise ValueError(
                f"layout {self.layout!r}: width {self.width} is not divisible by "
                f"{self.num_heads} heads; {way_out}"
            )

    def _check_sizes(self, row: Layout, letters: str) -> None:
        """A size that the layout has no axis for is refused, not ignored."""
        fixed = {"H": "head_dim", "V": "value_dim", "R": "shared_dim", "E": "key_width"}
        for letter, name in (fixed | {"W": "value_width"}).items():
            value = getattr(self, name)
            if letter in letters or value is None or (letter in "EW" and value == self.width):
                continue
            reason = {
                "R": "only 'collaborative' has one",
                "E": f"each head reads a chunk of x, so it must equal width ({self.width})",
                "W": f"each head reads a chunk of x, so it must equal width ({self.width})",
            }.get(letter, "its heads are as wide as what they read")
            raise ValueError(f"layout {self.layout!r} takes no {name}: {reason}; leave it out")
        if self.num_kv_heads is None:
            return
        if "K" not in letters:
            raise ValueError(
                f"layout {self.layout!r} has no key heads to choose; "
                "leave num_kv_heads out or use layout 'standard'"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )

    def _check_maps(self, row: Layout) -> None:
        if not set(self.biases) <= set("qkvo") or len(set(self.biases)) != len(self.biases):
            raise ValueError(f"biases must be letters of 'qkvo', not {self.biases!r}")
        maps = set(row.biases) - ({"o"} if not self.output else set())
        if not set(self.biases) <= maps:
            raise ValueError(
                f"layout {self.layout!r}{'' if self.output else ' without output'} has no map for "
                f"bias {min(set(self.biases) - maps)!r}; use letters of {''.join(sorted(maps))!r}"
            )
        if not self.output and "o" not in row.axes:
            raise ValueError(f"layout {self.layout!r} is made of output maps; output must be True")
        if not self.output and self.out_width is not None:
            raise ValueError("output=False has no output map; leave out_width out")
        if self.qk_norm is not None:
            find("qk_norm", self.qk_norm, NORM_KINDS)
            if "qk" in row.axes:
                raise ValueError(
                    f"layout {self.layout!r} has no separate q and k; leave qk_norm out"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letter -> size, with every None resolved."""
        d, n, row = self.width, self.num_heads, LAYOUTS[self.layout]
        sizes = {
            "D": d,
            "N": n,
            "C": d // n,
            "K": self.num_kv_heads or n,
            "E": self.key_width or d,
            "W": self.value_width or d,
            "R": self.shared_dim or d,
        }
        sizes["H"] = self.head_dim or sizes[row.head_dim]
        sizes["V"] = self.value_dim or sizes[row.value_dim]
        # An absorbed value bias rides on one more column, of ones.
        sizes["V"] += row.value_dim == "W" and "v" in self.biases
        return sizes | {"O": self.out_width or d if self.output else n * sizes["V"]}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight name -> shape, biases included."""
        return {name: tuple(self.sizes[a] for a in axes) for name, axes in weight_axes(self)}

    @property
    def score_scale(self) -> float:
        """What multiplies q k^T."""
        return self.sizes["H"] ** -0.5 if self.scale is None else self.scale


def weight_axes(spec: HeadSpec) -> list[tuple[str, str]]:
    """(weight name, its axis letters) for every weight of `spec`, biases and norms included."""
    row = LAYOUTS[spec.layout]
    rows = [(name, axes.replace(" ", "")) for name, axes in row.axes.items()]
    rows = [(name, axes) for name, axes in rows if spec.output or name != "o"]
    rows += [
        (f"{letter}_bias", axes) for letter, axes in row.biases.items() if letter in spec.biases
    ]
    return rows + ([("q_norm", "H"), ("k_norm", "H")] if spec.qk_norm else [])


def init_heads(
    key: Array, spec: HeadSpec, *, std: float | None = None, dtype=jnp.float32
) -> Weights:
    """Fresh weights: normal with standard deviation 1/sqrt(fan in), biases zero, norms one.

    The fan is the number of inputs that one output sums over: D (q), E (k), W (v), the chunk C
    where a head reads its chunk, and N*V (o). So q, k, v and scores start with unit variance for
    unit-variance x in every layout (default initialisers take a wrong fan on 3-D weights).
    `std` replaces 1/sqrt(fan in) by one number for all matrices.

    >>> w = init_heads(jax.random.key(0), HeadSpec("standard", width=8, num_heads=2, biases="o"))
    >>> {name: a.shape for name, a in w.items()}
    {'q': (8, 2, 4), 'k': (8, 2, 4), 'v': (8, 2, 4), 'o': (2, 4, 8), 'o_bias': (8,)}
    """
    weights: Weights = {}
    names = weight_axes(spec)
    for (name, axes), k in zip(names, jax.random.split(key, len(names)), strict=True):
        if name.endswith("_bias"):
            weights[name] = jnp.zeros(spec.shapes[name], dtype)
        elif name.endswith("_norm"):
            weights[name] = jnp.ones(spec.shapes[name], dtype)
        else:
            fan = math.prod(spec.sizes[a] for a in set(axes) & set(INPUT_AXES[name]))
            # The mixing vectors of collaborative heads are no map: they sum over nothing.
            scale = std if std and INPUT_AXES[name] else fan**-0.5
            weights[name] = jax.random.normal(k, spec.shapes[name], dtype) * scale
    return weights


def project_heads(
    w: Weights,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    value_context: Float[Array, "B S W"] | None = None,
    *,
    spec: HeadSpec,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S Kk H"], Float[Array, "B S Kv V"]]:
    """x -> q; context (default x) -> k; value_context (default context) -> v.

    Each query head n uses key head n // (N/Kk) and value head n // (N/Kv): `collaborative`,
    `bilinear` and `absorbed` have one key head. The weights are cast to the input's dtype, so x
    decides the precision of the products.

    >>> import jax
    >>> spec = HeadSpec("narrow", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> [a.shape for a in project_heads(w, jax.numpy.ones((1, 5, 6)), spec=spec)]
    [(1, 5, 2, 3), (1, 5, 2, 3), (1, 5, 2, 3)]

    Raises ValueError for weights and inputs that do not fit the spec.
    """
    check_arrays(w, x, context, value_context, spec)
    row = LAYOUTS[spec.layout]
    x, context, value_context = _prepare(row, w, x, context, value_context)
    return _query(w, x, spec), *_memory(w, context, value_context, spec)


def project_query(
    w: Weights, x: Float[Array, "B T D"], *, spec: HeadSpec
) -> Float[Array, "B T N H"]:
    """The q of `project_heads` alone.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> project_query(init_heads(jax.random.key(0), spec), jnp.ones((1, 5, 6)), spec=spec).shape
    (1, 5, 2, 3)
    """
    check_arrays(w, x, None, None, spec)
    return _query(w, LAYOUTS[spec.layout].prepare(w, x), spec)


def project_memory(
    w: Weights, context: Float[Array, "B S E"], *, spec: HeadSpec
) -> tuple[Float[Array, "B S Kk H"], Float[Array, "B S Kv V"]]:
    """The k and v of `project_heads` alone, both of one text.

    >>> spec = HeadSpec("standard", width=6, num_heads=2, num_kv_heads=1)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> [a.shape for a in project_memory(w, jnp.ones((1, 5, 6)), spec=spec)]
    [(1, 5, 1, 3), (1, 5, 1, 3)]
    """
    ready = LAYOUTS[spec.layout].prepare(w, context)
    return _memory(w, ready, ready, spec)


def _query(w: Weights, x: Array, spec: HeadSpec) -> Array:
    return _normalise(w, "q_norm", LAYOUTS[spec.layout].query(w, x, spec), spec)


def _memory(w: Weights, x: Array, y: Array, spec: HeadSpec) -> tuple[Array, Array]:
    k, v = LAYOUTS[spec.layout].memory(w, x, y, spec)
    return _normalise(w, "k_norm", k, spec), v


def _normalise(w: Weights, name: str, a: Array, spec: HeadSpec) -> Array:
    """Over the width of each head, as in the sources; epsilon 1e-6 is Flax's."""
    return NORM_KINDS[spec.qk_norm]({"scale": w[name]}, a, eps=1e-6) if spec.qk_norm else a


def split_memory(w: Weights) -> tuple[Weights, Weights]:
    """(the rest, what makes keys and values) of the weights of heads.

    >>> [sorted(part) for part in split_memory({"q": 1, "k": 2, "v": 3, "o": 4, "norm": 5})]
    [['norm', 'o', 'q'], ['k', 'v']]
    """
    memory = {name: a for name, a in w.items() if name in MEMORY_NAMES}
    return {name: a for name, a in w.items() if name not in memory}, memory


def merge_heads(
    w: Weights, heads: Float[Array, "B T N V"], *, spec: HeadSpec
) -> Float[Array, "B T O"]:
    """Heads -> output: sum_i heads_i W_O[i], which is concat(heads) W_O.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> merge_heads(w, jnp.ones((1, 5, 2, 3)), spec=spec).shape
    (1, 5, 6)
    """
    return LAYOUTS[spec.layout].merge(w, heads, spec)


def absorption(spec: HeadSpec) -> list[Absorbed]:
    """The steps from `spec` along the rows that are the same function.

    >>> [step.spec.layout for step in absorption(HeadSpec("narrow_tied", width=6, num_heads=2))]
    ['narrow', 'standard', 'bilinear', 'absorbed']
    """
    absorb = LAYOUTS[spec.layout].absorb
    step = absorb and absorb(spec)
    return [step, *absorption(step.spec)] if step else []


def check_arrays(w: Weights, x: Any, context: Any, value_context: Any, spec: HeadSpec) -> None:
    """Raises ValueError, naming the array, its shape and what the spec asks for."""
    shapes = spec.shapes
    # A tree may hold more (a layer's norm), but no weight of heads that the spec does not know of.
    if odd := sorted(set(shapes) - set(w) | (set(w) - set(shapes)) & WEIGHT_NAMES):
        raise ValueError(
            f"weights {sorted(w)} are not those of the spec, {sorted(shapes)}: see {odd}; make "
            "them with init_heads(key, spec)"
        )
    for name, shape in shapes.items():
        if w[name].shape != shape:
            raise ValueError(f"weight {name} has shape {w[name].shape}, the spec asks for {shape}")
    keys = x if context is None else context
    values = keys if value_context is None else value_context
    inputs = (("x", x, "width", "D"), ("context", keys, "key_width", "E"))
    for name, a, field, letter in (*inputs, ("value_context", values, "value_width", "W")):
        if len(a.shape) != 3:
            raise ValueError(f"{name} {a.shape} must be [batch, length, width]")
        if a.shape[2] != spec.sizes[letter]:
            raise ValueError(f"{name} {a.shape} must end in {field} {spec.sizes[letter]}")
        if a.shape[0] != x.shape[0]:
            raise ValueError(f"{name} {a.shape} and x {x.shape} must have one batch size")
    if values.shape[1] != keys.shape[1]:
        raise ValueError(f"value_context {values.shape} must be as long as context {keys.shape}")


def _prepare(row: Layout, w: Weights, x: Array, context, value_context) -> tuple[Array, ...]:
    """Every input prepared, each array once."""
    ready = row.prepare(w, x)
    key = ready if context is None or context is x else row.prepare(w, context)
    if value_context is None or value_context is context:
        return ready, key, key
    return ready, key, ready if value_context is x else row.prepare(w, value_context)
