"""`Layout`, the base class of head layouts, and `Extra`, the base class of their options.

A layout is a frozen dataclass: its fields are sizes and choices, its methods are the stages

    x -> project_q -> q            y, z -> project_kv -> cache entries -> keys_values -> k, v
    q, k, v -> attend -> heads -> project_out -> output

with x the query input, y the key input and z the value input. Parameters are a plain dict of arrays
that every method receives; nothing is stored in the layout. A new layout is one subclass, decorated
with `register_layout` to be found by name; an option that any layout may have is one subclass of
`Extra`.

Axes: B batch, T queries, S keys, N heads, K and Kv key and value heads, H width of a query and key,
V width of a value, O output width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.call import Call
from attnlab.heads.linear import combine_heads
from attnlab.heads.weights import Params, Weight
from attnlab.names import find

Rotate = Callable[[Array], Array]
"""Applies rotary embedding by position to [B, T, ..., H]; the identity without rotary positions."""

Bias = Literal["q", "k", "v", "o", "factors"]
Entries = dict[str, Array]
"""What a cache keeps of each token: name -> [B, S, ...]."""


class Rewrite(NamedTuple):
    """One step to another layout that computes the same function."""

    layout: "Layout"
    params: Callable[[Params], Params]
    """Parameters of this layout -> those of `layout`."""
    flops: int = 0
    """What `params` costs, once per call."""


class Blocked(NamedTuple):
    """Why the next layout of the chain would compute another function."""

    layout: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Extra:
    """An option that any layout may have, such as a gate or a sink.

    Class attributes:
      losses: names of tapped scalars that training adds to its loss (load balancing).
      excludes: names of registered extras that this one does not combine with.
      between: the pair of matrices it stands between, which then cannot be multiplied out.
      shift_invariant: does adding a constant to all scores of a query leave its output unchanged?
    """

    losses: ClassVar[tuple[str, ...]] = ()
    excludes: ClassVar[tuple[str, ...]] = ()
    shift_invariant: ClassVar[bool] = True

    @property
    def between(self) -> Literal["", "qk", "vo"]:
        """See the class attributes."""
        return ""

    @property
    def num_keys(self) -> int:
        """Keys that it adds to those of the input."""
        return 0

    def check(self, layout: "Layout") -> None:
        """Raises ValueError where the layout cannot have this extra."""

    def weights(self, layout: "Layout") -> dict[str, Weight]:
        """Its weights by name."""
        return {}

    def values(self, layout: "Layout") -> dict[str, str]:
        """Names of its own values that can be captured or patched -> their axes."""
        return {}

    def before_attention(self, params: Params, call: Call) -> Call:
        """The call that the layout attends with: changes what happens in the softmax."""
        return call

    def after_attention(
        self, params: Params, x: Array, heads: Float[Array, "B T N V"], call: Call
    ) -> Float[Array, "B T N V"]:
        """What heads return -> what the output projection reads; x is the query input."""
        return heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How heads compute q, k and v from x and become one output.

    A size that is None takes the default of its layout, which `size` resolves, so
    `dataclasses.replace(layout, width=32)` does what it says.

    Attributes:
      width: D, of the query input. 0: not known yet; a model config fills in its own.
      num_heads: N.
      out_width: O, of the output; None is `width`.
      scale: multiplies q k^T; None is 1/sqrt(width of q).
      biases: projections that have a bias.
      output_projection: without one the output is the heads, concatenated.
      extras: options such as gates and sinks.
      norm_eps: epsilon of all norms inside the heads.

    Raises:
      ValueError: for an impossible combination, saying what to change.
    """

    name: ClassVar[str] = ""
    """On the command line; set by `register_layout`."""
    equation: ClassVar[str] = ""
    """q_n, k_n and v_n; x_n, y_n, z_n are slices n of the inputs."""
    rank: ClassVar[str] = ""
    """Sizes of which the smallest bounds the rank of the score matrix of a head."""
    source: ClassVar[str] = ""
    """Where the layout was published."""
    rotary_axis: ClassVar[str | None] = "head_dim"
    """The axis that rotary embedding rotates; None where keys cannot be rotated."""
    bias_names: ClassVar[tuple[Bias, ...]] = ("q", "k", "v", "o")
    """Projections that may have a bias."""
    values: ClassVar[Mapping[str, str]] = {}
    """Names of values of its own that can be captured or patched -> their axes."""

    width: int = 0
    num_heads: int
    out_width: int | None = None
    scale: float | None = None
    biases: tuple[Bias, ...] = ()
    output_projection: bool = True
    extras: tuple[Extra, ...] = ()
    norm_eps: float = 1e-6

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__repr__ = Layout.__repr__  # type: ignore[method-assign]  # else `dataclass` makes one

    def __post_init__(self) -> None:
        # Lists, as of a config file, become tuples: a layout is hashable.
        object.__setattr__(self, "biases", tuple(self.biases))
        object.__setattr__(self, "extras", tuple(self.extras))
        self._check_fields()
        if not self.width:
            return  # sizes are checked when the width is known
        self.check()
        self._check_extras()
        for name, weight in all_weights(self).items():
            for axis in (*weight.axes, *weight.applied_per):
                self._check_axis(name, axis)

    def check(self) -> None:
        """Raises ValueError for sizes of this layout that do not fit each other."""

    # Sizes ----------------------------------------------------------------------------------------

    def size(self, axis: str | int) -> int:
        """Size of an axis: a field, with None resolved by `default_<field>`, or a property.

        >>> from attnlab.heads import Standard
        >>> Standard(width=12, num_heads=3).size("head_dim")
        4
        """
        if isinstance(axis, int):
            return axis
        if not self.width:
            raise ValueError(f"{self._label} has no width; set width=...")
        value = getattr(self, axis)
        resolved: int = getattr(self, f"default_{axis}") if value is None else value
        return resolved

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """Shape of a weight."""
        return tuple(self.size(axis) for axis in weight.axes)

    def with_width(self, width: int) -> Self:
        """The layout in a model of this width.

        Raises:
          ValueError: it has another width already.
        """
        if self.width not in (0, width):
            raise ValueError(
                f"{self._label} has width {self.width}, the model has {width}; leave width out of "
                "the layout"
            )
        return dataclasses.replace(self, width=width)

    @property
    def slice_width(self) -> int:
        """D / N, the width of the slice of x that belongs to a head."""
        if self.width % self.num_heads:
            raise ValueError(
                f"{self._label}: width {self.width} is not divisible by {self.num_heads} heads; "
                "change one of them, or set the size that defaults to width / num_heads"
            )
        return self.width // self.num_heads

    @property
    def default_out_width(self) -> int:
        """The output is as wide as x, or the concatenated heads."""
        return self.width if self.output_projection else self.num_heads * self.size("value_dim")

    @property
    def input_widths(self) -> tuple[int, int, int]:
        """Widths of the query, key and value input."""
        return (self.width,) * 3

    @property
    def num_score_maps(self) -> int:
        """Softmax distributions per token: N, or more where a head combines several."""
        return self.num_heads

    @property
    def rotary_size(self) -> int | None:
        """How many numbers of a head rotary embedding rotates; None where it cannot."""
        return None if self.rotary_axis is None else self.size(self.rotary_axis)

    # Stages ---------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Weight]:
        """Weights of the layout by name, without those of its extras."""
        raise NotImplementedError

    def prepare(self, params: Params, x: Array) -> Array:
        """Done once to every input, before it is projected."""
        return x

    def project_q(
        self, params: Params, x: Float[Array, "B T D"], rotate: Rotate
    ) -> Float[Array, "B T N H"]:
        """x -> queries."""
        raise NotImplementedError

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        """Key input y and value input z (one array where they are the same) -> cache entries."""
        raise NotImplementedError

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        """Cache entries -> k [B, S, K, H], v [B, S, Kv, V]."""
        return entries["k"], entries.get("v", entries["k"])

    def attend(
        self, params: Params, q: Array, k: Array, v: Array, call: Call
    ) -> Float[Array, "B T N V"]:
        """q, k, v -> heads; `call.layer` is the layer index, `call.tap` takes values by name."""
        return call.attention(q, k, v)

    def project_out(self, params: Params, heads: Float[Array, "B T N V"]) -> Float[Array, "B T O"]:
        """Heads -> output; linear in the heads but for a bias."""
        return combine_heads(params, heads)

    # Other layouts --------------------------------------------------------------------------------

    def rewritten(self, *, rotary: bool = False, shift_invariant: bool = True) -> Rewrite | Blocked:
        """The same function as another layout, with neighbouring matrices multiplied out.

        Args:
          rotary: rotary positions are applied.
          shift_invariant: the call has no soft cap or other score modification that would see a
            constant added to all scores of a query.
        """
        return Blocked("", f"{self._label} is the last of its chain")

    def extra_multiply_adds(self) -> dict[str, int]:
        """Method -> multiply-adds per token of products that involve no weight."""
        return {}

    def to(self, kind: "type[LayoutT]", **changes: object) -> "LayoutT":
        """A layout of another class with the fields that both have, and `changes`."""
        ours = {f.name for f in dataclasses.fields(self)}
        both = {f.name for f in dataclasses.fields(kind)} & ours
        kept = {name: getattr(self, name) for name in both}
        return kind(**{**kept, **changes})  # type: ignore[arg-type]

    def blocks(self, pair: Literal["qk", "vo"]) -> str | None:
        """The first extra between these two matrices, by name; None if there is none."""
        return next((extra_name(e) for e in self.extras if e.between == pair), None)

    # Presentation ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({changed})"

    @property
    def _label(self) -> str:
        return f"layout {self.name or type(self).__name__!r}"

    # Checks ---------------------------------------------------------------------------------------

    def _check_fields(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "width" and value == 0:
                continue
            if field.type in (int, int | None, "int", "int | None") and value is not None:
                check_size(field.name, value)
        for bias in self.biases:
            if bias not in self.bias_names:
                known = ", ".join(map(repr, self.bias_names))
                raise ValueError(f"{self._label} has no bias {bias!r}; use some of {known}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(
                f"scale must be finite, or None for 1/sqrt(head_dim), not {self.scale}"
            )
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise ValueError(f"norm_eps must be finite and at least 0, not {self.norm_eps}")
        if not self.output_projection and self.out_width is not None:
            raise ValueError("without an output projection the output is the concatenated heads: "
                             "leave out_width out")  # fmt: skip

    def _check_extras(self) -> None:
        names = [extra_name(extra) for extra in self.extras]
        for extra in self.extras:
            if extra_name(extra) in extra.excludes or names.count(extra_name(extra)) > 1:
                raise ValueError(f"{self._label}: give {extra_name(extra)!r} once")
            for other in names:
                if other in extra.excludes:
                    raise ValueError(
                        f"{extra_name(extra)!r} does not combine with {other!r}; leave one out"
                    )
            extra.check(self)

    def _check_axis(self, weight: str, axis: str | int) -> None:
        try:
            size = self.size(axis)
        except AttributeError:
            raise ValueError(
                f"{self._label}: weight {weight!r} has the axis {axis!r}, which is neither a field "
                "nor a property of the layout"
            ) from None
        if size < 1:
            raise ValueError(f"{self._label}: {axis} must be at least 1, not {size}")


LayoutT = TypeVar("LayoutT", bound=Layout)
ExtraT = TypeVar("ExtraT", bound=Extra)

LAYOUTS: dict[str, type[Layout]] = {}
"""Name on the command line -> class; `register_layout` adds to it."""
EXTRAS: dict[str, type[Extra]] = {}
"""Name on the command line -> class; `register_extra` adds to it."""


def register_layout(name: str) -> Callable[[type[LayoutT]], type[LayoutT]]:
    """Class decorator: makes a layout known by `name`, for flags and tables.

    Raises:
      ValueError: another class has the name.
    """

    def register(kind: type[LayoutT]) -> type[LayoutT]:
        _check_free(LAYOUTS, "layout", name, kind)
        kind.name = name
        LAYOUTS[name] = kind
        return kind

    return register


def register_extra(name: str) -> Callable[[type[ExtraT]], type[ExtraT]]:
    """Class decorator: makes an extra known by `name`, for flags and tables.

    Raises:
      ValueError: another class has the name.
    """

    def register(kind: type[ExtraT]) -> type[ExtraT]:
        _check_free(EXTRAS, "extra", name, kind)
        EXTRAS[name] = kind
        return kind

    return register


def _check_free(table: Mapping[str, type], what: str, name: str, kind: type) -> None:
    other = table.get(name)
    if other is not None and other.__qualname__ != kind.__qualname__:
        raise ValueError(f"{what} {name!r} is {other.__qualname__} already; choose another name")


def extra_name(extra: Extra) -> str:
    """The registered name of an extra, or the name of its class."""
    names = (name for name, kind in EXTRAS.items() if kind is type(extra))
    return next(names, type(extra).__name__)


def make_layout(name: str, **fields: object) -> Layout:
    """A layout by name. A field that it does not have is an error that lists those it has.

    >>> make_layout("wide", width=6, num_heads=2)
    Wide(width=6, num_heads=2)

    Raises:
      ValueError: an unknown name or field.
    """
    kind: type[Layout] = find("layout", name, LAYOUTS)
    known = [f.name for f in dataclasses.fields(kind)]
    for field in fields:
        if field not in known:
            owners = [
                n for n, k in LAYOUTS.items() if field in {f.name for f in dataclasses.fields(k)}
            ]
            hint = f"; {field} is a field of {', '.join(owners)}" if owners else ""
            raise ValueError(
                f"layout {name!r} has no field {field!r}: its fields are {', '.join(known)}{hint}"
            )
    return kind(**fields)  # type: ignore[arg-type]


def check_size(field: str, value: object) -> None:
    """Raises ValueError for what is no whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} must be a whole number of at least 1, not {value!r}")


# What follows from the weights --------------------------------------------------------------------


def all_weights(layout: Layout) -> dict[str, Weight]:
    """Weights of a layout and of its extras, by name.

    Raises:
      ValueError: two of them have one name.
    """
    made = dict(layout.weights())
    for extra in layout.extras:
        more = extra.weights(layout)
        if twice := sorted(made.keys() & more.keys()):
            raise ValueError(f"{extra_name(extra)!r} adds a second weight {twice[0]!r}")
        made |= more
    return made


def with_biases(layout: Layout, weights: dict[str, Weight]) -> dict[str, Weight]:
    """`weights`, and behind them a bias "q_bias" for each projection in `layout.biases`."""
    names = [name for name in weights if name in layout.biases]
    return weights | {f"{name}_bias": weights[name].bias() for name in names}


def weight_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name.

    >>> from attnlab.heads import Standard
    >>> weight_shapes(Standard(width=8, num_heads=2, biases=("o",)))
    {'q': (8, 2, 4), 'k': (8, 2, 4), 'v': (8, 2, 4), 'o': (2, 4, 8), 'o_bias': (8,)}
    """
    return {name: layout.shape(weight) for name, weight in all_weights(layout).items()}


def init(
    key: Array,
    layout: Layout,
    *,
    std: float | None = None,
    residual_scale: float = 1.0,
    dtype: jnp.dtype | type = jnp.float32,
) -> dict[str, Array]:
    """Initial parameters: normal with standard deviation 1/sqrt(fan-in), biases 0, norm scales 1.

    The fan-in is the number of inputs that one output sums over: D for q, N*V for the output
    projection, D/N for heads that read a slice. So q, k, v and scores have unit variance for
    unit-variance x in every layout. Default initializers take a wrong fan-in for 3-D weights.

    Args:
      key: random key.
      layout: what to make weights for.
      std: one standard deviation for all matrices in place of 1/sqrt(fan-in).
      residual_scale: multiplies the matrices that make the output.
      dtype: of the weights.

    >>> from attnlab.heads import Wide
    >>> init(jax.random.key(0), Wide(width=4, num_heads=2))["q"].shape
    (4, 2, 4)
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"init(key, layout): layout is a {type(layout).__name__}, not a Layout")
    try:
        weights = all_weights(layout)
        keys = jax.random.split(key, len(weights))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"init(key, layout): key must be a random key such as jax.random.key(0): {error}"
        ) from None
    return {
        name: _initial(k, weight, layout, std, residual_scale, dtype)
        for k, (name, weight) in zip(keys, weights.items(), strict=True)
    }


def _initial(
    key: Array,
    weight: Weight,
    layout: Layout,
    std: float | None,
    residual_scale: float,
    dtype: jnp.dtype | type,
) -> Array:
    shape = layout.shape(weight)
    if weight.identity:
        return jnp.eye(*shape, dtype=dtype)
    if weight.constant is not None:
        return jnp.full(shape, weight.constant, dtype)
    fan_in = math.prod(map(layout.size, weight.reads))
    fan_in /= math.prod(map(layout.size, weight.averaged_over))
    scale = weight.std if weight.std is not None else std or fan_in**-0.5
    drawn = jax.random.normal(key, shape, dtype) * scale
    return drawn * residual_scale if weight.makes == ("out_width",) else drawn


def check_params(params: Params, layout: Layout) -> None:
    """Raises ValueError where params are not those of the layout: what is missing, superfluous or
    of another shape."""
    if isinstance(params, Layout) or not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dict of weights, as of init(key, layout), not {type(params).__name__};"
            " the order is (params, x, layout)"
        )
    shapes = weight_shapes(layout)
    missing = [name for name in shapes if name not in params]
    extra = [n for n, a in params.items() if n not in shapes and not isinstance(a, Mapping)]
    if missing or extra:
        owners = _layouts_with(set(params))
        hint = f"; they look like those of {owners}" if owners else ""
        raise ValueError(
            f"{layout} has the weights {', '.join(shapes)}; params "
            + (f"have no {missing[0]!r}" if missing else f"also have {extra[0]!r}")
            + f"{hint}; make them with init(key, layout), or convert them with attnlab.convert"
        )
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise ValueError(
                f"weight {name!r} has shape {params[name].shape}; {layout} needs {shape}; make "
                "params with init(key, layout), or convert them with attnlab.convert"
            )


def _layouts_with(names: set[str]) -> str:
    """Registered layouts whose smallest example has exactly these weights."""
    found = []
    for name, kind in LAYOUTS.items():
        try:
            example = kind(width=8, num_heads=2)
        except (TypeError, ValueError):
            continue
        if set(example.weights()) == {n for n in names if not n.endswith("_bias")}:
            found.append(name)
    return " or ".join(found)


class TokenShapes(NamedTuple):
    """Shapes of what a layout makes of one token."""

    q: tuple[int, ...]
    entries: dict[str, tuple[int, ...]]
    k: tuple[int, ...]
    v: tuple[int, ...]


@functools.cache
def token_shapes(layout: Layout, rotary: bool = False) -> TokenShapes:
    """Shapes for one token, by tracing the methods of the layout: nothing is declared twice."""
    rotate: Rotate = (lambda a: a + 0) if rotary else (lambda a: a)

    def trace(params: Params, x: Array, y: Array, z: Array) -> tuple[Array, Entries, Array, Array]:
        x, y = layout.prepare(params, x), layout.prepare(params, y)
        z = y if len(set(layout.input_widths)) == 1 else layout.prepare(params, z)
        entries = layout.project_kv(params, y, z, rotate)
        k, v = layout.keys_values(params, entries)
        return layout.project_q(params, x, rotate), entries, k, v

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {name: array(*shape) for name, shape in weight_shapes(layout).items()}
    inputs = (array(1, 1, width) for width in layout.input_widths)
    q, entries, k, v = jax.eval_shape(trace, params, *inputs)
    return TokenShapes(
        q.shape[2:], {n: a.shape[2:] for n, a in entries.items()}, k.shape[2:], v.shape[2:]
    )


def score_scale(layout: Layout) -> float:
    """What multiplies q k^T: `layout.scale`, or 1/sqrt(width of q)."""
    return float(token_shapes(layout).q[-1] ** -0.5) if layout.scale is None else layout.scale


def kv_weight_names(layout: Layout) -> list[str]:
    """Weights that make keys and values, and no queries: what layers share under a plan with `kv`.

    >>> from attnlab.heads import Absorbed
    >>> kv_weight_names(Absorbed(width=6, num_heads=2))
    []
    """
    makes_kv = {"project_kv", "keys_values"}
    return [name for name, weight in all_weights(layout).items() if set(weight.methods) <= makes_kv]


def loss_names(layout: Layout) -> tuple[str, ...]:
    """Names of the tapped scalars that training adds to its loss."""
    return tuple(name for extra in layout.extras for name in extra.losses)


def replace_extras(layout: Layout, extras: tuple[Extra, ...]) -> Layout:
    """The layout with other extras."""
    return dataclasses.replace(layout, extras=extras)


__all__ = [
    "EXTRAS", "LAYOUTS", "Bias", "Blocked", "Entries", "Extra", "Layout", "Rewrite", "Rotate",
    "Self", "TokenShapes", "all_weights", "check_params", "init", "kv_weight_names", "loss_names",
    "make_layout", "register_extra", "register_layout", "score_scale", "token_shapes",
    "weight_shapes", "with_biases",
]  # fmt: skip
