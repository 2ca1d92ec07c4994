"""`Layout`, the base class of head layouts, and `Extra`, the base class of their options.

A layout is a frozen dataclass. Its fields are sizes and options, its methods are the stages

    x -> project_q -> q            y, z -> project_kv -> cache entries -> keys_values -> k, v
    q, k, v -> attend -> heads -> project_out -> output

with x the query input, y the key input and z the value input. Parameters are a plain dict of arrays
that every method receives. A new layout is one subclass; `register_layout` gives it a name for
flags. An option that any layout may have is one subclass of `Extra`.

Sizes, weights, costs and other forms follow from the fields. A layout computes them once, when it
is made with a width.

Axes: B batch, T queries, S keys, N heads, K and Kv key and value heads, H width of a query and key,
V width of a value, O output width.
"""

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attnlab.attention import AttentionOptions, attend
from attnlab.fields import Spec, bounded, check_fields
from attnlab.heads.factors import Floats, Weights
from attnlab.heads.linear import combine_heads
from attnlab.heads.weights import Params, Stage, Weight
from attnlab.tap import Tap

Rotate = Callable[[Array], Array]
"""Applies rotary embedding by position to [B, T, ..., H]; the identity without rotary positions."""

Bias = Literal["q", "k", "v", "o", "factors"]
OUTPUT = Weight("project_out", ("num_heads", "value_dim"), ("out_width",), residual=True)
"""W_O of most layouts."""
VALUES = Weight("project_kv", ("value_width",), ("num_kv_heads", "value_dim"), changes=("v",))
"""W_V of layouts that read all of the value input."""
OTHER_FORMS = ("rewritten", "general", "inverse")
"""Methods that know how a class computes, so that a class that computes otherwise has none."""
FUNCTIONS = (types.FunctionType, property, functools.cached_property, staticmethod, classmethod)
Entries = dict[str, Array]
"""What a cache keeps of each token: name -> [B, S, ...]."""

LayoutT = TypeVar("LayoutT", bound="Layout")


# A call, as layouts and extras see it -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """One call of heads, passed to `Layout.attend` and to extras.

    Attributes:
      x: the query input [B, T, D].
      options: of attention: mask, bias, is_causal, dropout_rate, score_mods, ...
      tap: `call.tap(name, value)` makes a value available to `capture` and `patch`.
      layer: index of the layer, counted from 0; may be traced.
      padding_mask: [B, T], True = a token of x; None: all are.
      softmax: (call, q, k, v) -> heads, by an extra; None: one call of `attend`.

    >>> import jax.numpy as jnp
    >>> x, q = jnp.ones((1, 2, 4)), jnp.ones((1, 2, 1, 4))
    >>> v = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> call = HeadCall(x, AttentionOptions(scale=0.5)).bind(is_causal=True)
    >>> call.attention(q, q, v).ravel().tolist()
    [1.0, 2.0]
    """

    x: Float[Array, "B T D"]
    options: AttentionOptions
    tap: Tap = dataclasses.field(default_factory=Tap)
    layer: ArrayLike = 0
    padding_mask: Bool[Array, "B T"] | None = None
    softmax: Callable[["HeadCall", Array, Array, Array], Array] | None = None

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        """Softmax attention: q [B, T, N, H], k [B, S, K, H], v [B, S, Kv, V] -> [B, T, N, V]."""
        if self.softmax is not None:
            return self.softmax(self, q, k, v)
        return attend(q, k, v, self.options, tap=self.tap).output

    def bind(self, **options: Any) -> "HeadCall":
        """The call with other options of attention."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))

    def with_new(self, **options: object) -> "HeadCall":
        """The call with options that it does not have yet.

        Raises:
          ValueError: the call has one of them, which would be replaced silently.
        """
        for name in options:
            if getattr(self.options, name) is not None:
                raise ValueError(f"{name} is set twice, in the call and by an extra; leave one out")
        return self.bind(**options)


# Other forms --------------------------------------------------------------------------------------


class Rewrite(NamedTuple):
    """One step to another layout that computes the same function.

    >>> from attnlab.heads import Standard
    >>> step = Standard(width=6, num_heads=2).rewritten()
    >>> step.layout.name, step.flops  # 2 FLOPs for each of N D E H multiply-adds of W_Q W_K^T
    ('bilinear', 432)
    >>> step.blocked(rotary=True, shift_invariant=True)
    'rotary positions are applied between W_Q and W_K'
    """

    layout: "Layout"
    """The other layout."""
    params: Callable[[Params], Params]
    """Parameters of this layout -> those of `layout`."""
    flops: int = 0
    """FLOPs of `params`, once per call."""
    not_rotary: str = ""
    """Why it is another function under rotary positions."""
    not_shifted: str = ""
    """Why it is another function where a constant added to all scores of a query counts."""

    def blocked(self, *, rotary: bool, shift_invariant: bool) -> str:
        """Why it is another function in this call; "" if it is the same."""
        return (self.not_rotary if rotary else "") or ("" if shift_invariant else self.not_shifted)


class Blocked(NamedTuple):
    """The reason why the next layout of the chain would compute another function.

    >>> from attnlab.heads import HeadNorm, Standard
    >>> Standard(width=6, num_heads=2, qk_norm=HeadNorm()).rewritten()
    Blocked(layout='bilinear', reason='qk_norm is applied between W_Q and W_K')
    """

    layout: str
    """Name of that layout; "" at the end of the chain."""
    reason: str


def overridden(kind: type, method: str) -> list[str]:
    """What a class or its bases override after the class that defines `method`, which therefore
    cannot know of it: methods and properties, but not checks and default sizes."""
    owner = next(base for base in kind.__mro__ if method in vars(base))
    return [
        name
        for name in dir(owner)
        if not name.startswith(("__", "default_"))
        and name not in (*OTHER_FORMS, "check")
        and isinstance(known := inspect.getattr_static(owner, name), FUNCTIONS)
        and inspect.getattr_static(kind, name) is not known
    ]


# Extra --------------------------------------------------------------------------------------------


class Named(Spec):
    """A record with a name for flags: that of its registration, else that of its class."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name", cls.__name__)
        if "__repr__" not in cls.__dict__:  # `dataclass` would make another
            setattr(cls, "__repr__", Spec.__repr__)  # noqa: B010


@dataclasses.dataclass(frozen=True)
class Extra(Named):
    """Base class of options that any layout may have, such as a gate or a sink.

    A subclass is a frozen dataclass that overrides what it needs: `weights`, and `before_attention`
    to change the softmax or `after_attention` to change what heads return.

    >>> @dataclasses.dataclass(frozen=True)
    ... class HeadScale(Extra):
    ...     between = ""  # it multiplies whole heads
    ...
    ...     def weights(self, layout):
    ...         return {"head_scale": Weight("attend", out_axes=("num_heads",), constant=1.0)}
    ...
    ...     def after_attention(self, params, heads, call):
    ...         return heads * params["head_scale"][:, None], {}
    >>> from attnlab.heads import Standard, num_parameters
    >>> num_parameters(Standard(width=8, num_heads=2, extras=(HeadScale(),))) - 4 * 8**2
    2
    """

    name: ClassVar[str] = ""
    """Name for flags, set by `register_extra`; else the name of the class."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Names of the auxiliary losses that `after_attention` returns."""
    excludes: ClassVar[tuple[str, ...]] = ()
    """Names of extras that this one does not combine with."""
    shift_invariant: ClassVar[bool] = True
    """Is the output unchanged if a constant is added to all scores of a query?"""
    depends_on_head_order: ClassVar[bool] = False
    """Does it do another thing with head n than with head m, apart from weights that have an axis
    named "num_heads"? Such heads cannot be permuted or removed."""

    between: ClassVar[Literal["", "qk", "vo", "any"]] = ""
    """The pair of matrices that it is applied between, so that they cannot be multiplied out. "":
    none, since it sees only scores, probabilities or whole heads. "any": not known, for a class
    that overrides methods and does not state it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if overridden(cls, "between"):
            cls.between = "any"

    def __post_init__(self) -> None:
        check_fields(self, prefix=f"{self.name}.")

    @property
    def num_keys(self) -> int:
        """Keys that it adds to those of the input."""
        return 0

    def check(self, layout: "Layout") -> None:
        """Raises ValueError if the layout cannot have this extra."""

    def weights(self, layout: "Layout") -> dict[str, Weight]:
        """Its weights by name."""
        return {}

    def values(self, layout: "Layout") -> dict[str, str]:
        """Names of its own values that can be captured or patched -> their axes."""
        return {}

    def before_attention(self, params: Params, call: HeadCall) -> HeadCall:
        """The call that the layout attends with; an extra may change its options here."""
        return call

    def after_attention(
        self, params: Params, heads: Float[Array, "B T N V"], call: HeadCall
    ) -> tuple[Float[Array, "B T N V"], dict[str, Array]]:
        """Output of attention -> (input of the output projection, auxiliary losses by name)."""
        return heads, {}


# Layout -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Named):
    """Base class of layouts: how heads compute q, k and v from x, and the output from heads.

    A field keeps None where its size has a default. `size` resolves it by the property
    `default_<field>`, so `dataclasses.replace(layout, width=32)` changes all sizes that follow.

    A subclass is a frozen dataclass with the methods `weights`, `project_q` and `project_kv`; the
    other methods have defaults. Its fields are the sizes and options of a layout. If q, k and v are
    not [num_heads, head_dim] and [num_kv_heads, value_dim], it says what they are: `num_score_maps`
    and `score_width`, `num_key_heads`, `num_value_heads` and `head_width`. Class constants describe
    it (the table of layouts prints `equation`, `rank` and `source`) and state what it can do; all
    of them have defaults. For a variant of a layout, subclass that layout. A subclass that
    overrides more than checks and default sizes inherits no `rewritten`, `general` and `inverse`:

    >>> from attnlab.heads import Standard, init
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class SmallKeys(Standard):
    ...     @property
    ...     def default_head_dim(self):
    ...         return self.slice_width // 2
    >>> SmallKeys(width=8, num_heads=2).size("head_dim")
    2

    Attributes:
      width: D, of the query input. 0: not known yet; a model config fills in its own.
      num_heads: N.
      out_width: O, of the output; None is `width`.
      scale: multiplies q k^T; None is 1/sqrt(width of q).
      biases: projections that have a bias.
      output_projection: without one the output is the heads, concatenated.
      extras: options such as gates and sinks, applied in this order.
      norm_eps: epsilon of the norms inside the heads, but for one that a layout fixes.

    Raises:
      TypeError: an unknown field.
      ValueError: a field of the wrong type, or sizes or options that do not fit each other, saying
        what to change.
    """

    name: ClassVar[str] = ""
    """Name for flags, set by `register_layout`; else the name of the class."""
    equation: ClassVar[str] = ""
    """q_n, k_n and v_n; x_n, y_n, z_n are slices n of the inputs."""
    rank: ClassVar[str] = ""
    """Sizes; the smallest of them bounds the rank of the score matrix of a head."""
    source: ClassVar[str] = ""
    """Where the layout was published."""
    rotary_axis: ClassVar[str | None] = "head_dim"
    """The axis that rotary embedding rotates; None where keys cannot be rotated."""
    bias_names: ClassVar[tuple[Bias, ...]] = ("q", "k", "v", "o")
    """Projections that may have a bias."""
    values: ClassVar[Mapping[str, str]] = {}
    """Names of values of its own that can be captured or patched -> their axes."""
    head_axes: ClassVar[tuple[str, ...]] = (
        "num_heads", "num_kv_heads", "num_score_maps", "num_key_heads", "num_value_heads",
    )  # fmt: skip
    """Axes of weights that number heads."""
    merges_values: ClassVar[bool] = False
    """Are W_V and W_O multiplied out, so that nothing per element can be applied between them?"""

    width: int = bounded(0, least=0)
    num_heads: int
    out_width: int | None = None
    scale: float | None = None
    biases: tuple[Bias, ...] = ()
    output_projection: bool = True
    extras: tuple[Extra, ...] = ()
    norm_eps: float = bounded(1e-6, least=0.0)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in OTHER_FORMS:
            if overridden(cls, name):
                setattr(cls, name, getattr(Layout, name))

    def __post_init__(self) -> None:
        check_fields(self, least=1)
        for bias in self.biases:
            if bias not in self.bias_names:
                known = ", ".join(map(repr, self.bias_names))
                raise ValueError(f"{self._label} has no bias {bias!r}; use some of {known}")
        if not self.output_projection and self.out_width is not None:
            raise ValueError(f"out_width {self.out_width} cannot be set without output_projection")
        if self.width:  # what follows from the fields is computed now, and kept
            if self.num_heads % (heads := self.size("num_kv_heads")):
                raise ValueError(f"num_kv_heads {heads} must divide num_heads {self.num_heads}")
            self.check()
            _ = self.shapes, self.multiply_adds, self.input_widths, self.score_scale, self.chain

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check(self) -> None:
        """Raises ValueError for fields of this layout that do not fit each other."""

    # What follows from the fields -----------------------------------------------------------------

    @functools.cached_property
    def all_weights(self) -> dict[str, Weight]:
        """Weights of the layout and of its extras, by name."""
        with jax.ensure_compile_time_eval():  # initial values may be computed with JAX, under jit
            made, names = dict(self.weights()), [extra.name for extra in self.extras]
            for extra in self.extras:
                if names.count(extra.name) > 1:
                    raise ValueError(f"{self._label}: extra {extra.name!r} is given twice; use one")
                if others := sorted(set(extra.excludes) & set(names)):
                    raise ValueError(f"extra {extra.name!r} does not combine with {others[0]!r}")
                extra.check(self)
                more = extra.weights(self)
                if twice := sorted(made.keys() & more.keys()):
                    raise ValueError(f"extra {extra.name!r} adds a second weight {twice[0]!r}")
                made |= more
        return made

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by name."""
        for weight in self.all_weights.values():
            for axis in (*weight.axes, *weight.tied_axes, *weight.mean_axes):
                if (size := self.size(axis)) < 1:
                    raise ValueError(f"{self._label}: {axis} must be at least 1, not {size}")
        return {name: self.sizes(weight.axes) for name, weight in self.all_weights.items()}

    @functools.cached_property
    def multiply_adds(self) -> dict[str, int]:
        """Stage -> multiply-adds of a token; "score" -> of a pair of a query and a key; "q and kv"
        -> of the weights that make both, which count in both of these stages.

        >>> from attnlab.heads import Standard
        >>> Standard(width=512, num_heads=8).multiply_adds["project_q"] == 512**2
        True
        """
        sizes = self.head_sizes
        pair = sizes["num_score_maps"] * (sizes["score_width"] + sizes["head_width"])
        counts = dict.fromkeys(get_args(Stage), 0) | self.extra_multiply_adds()
        counts |= {"score": pair, "q and kv": 0}
        for weight in (weight for weight in self.all_weights.values() if weight.in_axes):
            stages: tuple[str, ...] = ("score",) if weight.per_score else weight.stages
            stages += ("q and kv",) * ({"project_q", "project_kv"} <= set(stages))
            for stage in stages:
                counts[stage] += math.prod(self.sizes(weight.axes + weight.tied_axes))
        return counts

    @functools.cached_property
    def chain(self) -> tuple[tuple[Rewrite, ...], Blocked]:
        """The steps to every other form of the layout, and the reason why there is no further one.

        >>> from attnlab.heads import NarrowTied
        >>> [step.layout.name for step in NarrowTied(width=6, num_heads=2).chain[0]]
        ['narrow', 'standard', 'bilinear', 'absorbed']
        """
        step = self.rewritten()
        if isinstance(step, Blocked):
            return (), step
        steps, blocked = step.layout.chain
        return (step, *steps), blocked

    @functools.cached_property
    def head_sizes(self) -> dict[str, int]:
        """What q [B, T, *, *], k [B, S, *, ...] and v [B, S, *, *] have; costs follow from it."""
        names = ("num_score_maps", "score_width", "num_key_heads", "num_value_heads", "head_width")
        return {name: self.size(name) for name in names}

    @functools.cached_property
    def score_scale(self) -> float:
        """What multiplies q k^T: `scale`, or 1/sqrt(width of q)."""
        return float(self.score_width**-0.5) if self.scale is None else self.scale

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return {}

    def size(self, axis: str | int) -> int:
        """Size of an axis: a field, with None resolved by `default_<field>`, or a property.

        Fields that only some layouts have, such as `num_kv_heads`, have their default in others.

        >>> from attnlab.heads import Standard
        >>> Standard(width=12, num_heads=3).size("head_dim")
        4
        """
        if isinstance(axis, int):
            return axis
        if axis not in self._sizes:
            if not self.width:
                raise ValueError(f"{self._label} has no width; set width=...")
            value: int | None = getattr(self, axis, None)
            self._sizes[axis] = getattr(self, f"default_{axis}") if value is None else value
        return self._sizes[axis]

    def sizes(self, axes: tuple[str | int, ...]) -> tuple[int, ...]:
        """Sizes of several axes."""
        return tuple(map(self.size, axes))

    def with_width(self: LayoutT, width: int) -> LayoutT:
        """The layout in a model of this width.

        Raises:
          ValueError: it has another width already.
        """
        if self.width not in (0, width):
            raise ValueError(f"{self._label} has width {self.width}, not {width}; leave it out")
        return dataclasses.replace(self, width=width)

    @property
    def slice_width(self) -> int:
        """D / N, the width of the slice of x that belongs to a head."""
        if self.width % self.num_heads:
            raise ValueError(
                f"{self._label}: width {self.width} is not divisible by num_heads {self.num_heads};"
                " change one of them, or set what is width / num_heads by default, such as head_dim"
            )
        return self.width // self.num_heads

    @property
    def default_out_width(self) -> int:
        """The output is as wide as x, or the concatenated heads."""
        return self.width if self.output_projection else self.num_heads * self.size("value_dim")

    @property
    def default_head_dim(self) -> int:
        """D / N."""
        return self.slice_width

    @property
    def default_value_dim(self) -> int:
        """As wide as a key."""
        return self.size("head_dim")

    @property
    def default_num_kv_heads(self) -> int:
        """A key and value head for each query head."""
        return self.num_heads

    @property
    def default_key_width(self) -> int:
        """As wide as x."""
        return self.width

    @property
    def default_value_width(self) -> int:
        """As wide as x."""
        return self.width

    @functools.cached_property
    def input_widths(self) -> tuple[int, int, int]:
        """Widths of the query, key and value input."""
        return self.width, self.size("key_width"), self.size("value_width")

    @property
    def tie(self) -> str:
        """Projections that use one weight; a field of some layouts."""
        return ""

    @property
    def qk_norm(self) -> Any:
        """The `HeadNorm` of queries and keys; a field of some layouts."""
        return None

    @property
    def num_score_maps(self) -> int:
        """Softmax distributions per token: N, or more where a head combines several."""
        return self.num_heads

    @property
    def head_of_map(self) -> tuple[int, ...]:
        """The head of each softmax distribution; by default those of a head stand side by side."""
        return tuple(i * self.num_heads // self.num_score_maps for i in range(self.num_score_maps))

    @property
    def score_width(self) -> int:
        """H, the width of q and k in the scores."""
        return self.size("head_dim")

    @property
    def num_key_heads(self) -> int:
        """K, the heads of k."""
        return self.size("num_kv_heads")

    @property
    def num_value_heads(self) -> int:
        """Kv, the heads of v."""
        return self.size("num_kv_heads")

    @property
    def head_width(self) -> int:
        """V, the width of v, which is what a head returns."""
        return self.size("value_dim")

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
        """x -> queries.

        Args:
          params: weights by name.
          x: query input, after `prepare`.
          rotate: applies rotary embedding to [B, T, ..., H].
        """
        raise NotImplementedError

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        """Inputs -> cache entries.

        Args:
          params: weights by name.
          y: key input, after `prepare`.
          z: value input; `z is y` where the two are the same.
          rotate: applies rotary embedding to [B, S, ..., H].
        """
        raise NotImplementedError

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        """Cache entries -> k [B, S, K, H], v [B, S, Kv, V]."""
        return entries["k"], entries.get("v", entries["k"])

    def attend(
        self, params: Params, q: Array, k: Array, v: Array, call: HeadCall
    ) -> Float[Array, "B T N V"]:
        """q, k, v -> heads, by default one softmax attention."""
        return call.attention(q, k, v)

    def project_out(self, params: Params, heads: Float[Array, "B T N V"]) -> Float[Array, "B T O"]:
        """Heads -> output; linear in the heads but for a bias."""
        return combine_heads(params, heads)

    # Other layouts --------------------------------------------------------------------------------

    def rewritten(self) -> Rewrite | Blocked:
        """The same function as another layout, with adjacent matrices multiplied out."""
        return Blocked("", f"{self._label} is the last of its chain")

    def general(self) -> Rewrite | Blocked:
        """The next more general layout, for conversion; by default that of `rewritten`."""
        return self.rewritten()

    def inverse(self, w: Weights, other: "Layout", tolerance: float) -> dict[str, Floats] | None:
        """Weights of this layout that are the function of weights of `general`; None: there are
        none.

        A guess does no harm, since `convert` measures the result. Weights of the same name and
        biases of zeros need not be returned.

        Args:
          w: weights of `other`, in NumPy float64.
          other: the layout that `general` leads to.
          tolerance: what is smaller, relative to the largest number, is rounding.
        """
        return None

    def with_biases(self, weights: dict[str, Weight]) -> dict[str, Weight]:
        """`weights`, followed by a bias "q_bias" for each projection in `biases`; without W_O where
        the layout has none."""
        biases = {f"{n}_bias": w.bias() for n, w in weights.items() if n in self.biases}
        if not self.output_projection:
            weights = {n: w for n, w in weights.items() if n != "o"}
        return weights | biases

    def extra_multiply_adds(self) -> dict[str, int]:
        """Stage -> multiply-adds per token of products that involve no weight."""
        return {}

    def to(self, kind: type[LayoutT], **changes: object) -> LayoutT:
        """A layout of another class with the fields and sizes that both have, and `changes`."""
        ours = {f.name for f in dataclasses.fields(self)}
        both = {f.name for f in dataclasses.fields(kind)} & ours
        kept = {name: getattr(self, name) for name in both}
        for name, value in kept.items():
            rules = (getattr(a, f"default_{name}", None) for a in (type(self), kind))
            if value is None and len(set(rules)) > 1 and self.width:
                kept[name] = self.size(name)
        return kind(**(kept | changes))

    def blocks(self, pair: Literal["qk", "vo"]) -> str | None:
        """Name of the first extra that may be between these two matrices; None without one."""
        return next((extra.name for extra in self.extras if extra.between in (pair, "any")), None)

    @property
    def _label(self) -> str:
        return f"layout {self.name!r}"


# Parameters ---------------------------------------------------------------------------------------


def check_params(params: Params, layout: Layout) -> None:
    """Raises an error if `params` are not those of the layout.

    Nested dicts in `params`, such as adapters, are not checked.

    Raises:
      TypeError: `params` is not a dict, or `layout` no layout.
      ValueError: a weight is missing, superfluous, of another shape or no array.
    """
    if not isinstance(layout, Layout):
        name = type(layout).__name__
        raise TypeError(f"the arguments are (params, x, layout): {name} is no attnlab.heads.Layout")
    if not isinstance(params, Mapping):
        name = type(params).__name__
        raise TypeError(f"the arguments are (params, x, layout): params must be a dict, not {name}")
    own = {name: a for name, a in params.items() if not isinstance(a, Mapping)}
    if {name: getattr(a, "shape", None) for name, a in own.items()} != layout.shapes:
        problem = describe_mismatch(layout.shapes, own, "the layout")
        raise ValueError(f"{problem}; the layout is {layout}; see attnlab.convert")


def is_stack(name: str) -> bool:
    """Whether parameters of this name are stacked, [G, ...]: those of layers.

    >>> [is_stack(name) for name in ("layers_0", "encoder_layers", "embedding")]
    [True, True, False]
    """
    return name in ("layers", "encoder_layers") or name.startswith("layers_")


def shapes_by_path(tree: object, path: str = "") -> dict[str, tuple[int, ...]]:
    """Path, as "layers/attention/q", -> shape of each array."""
    if not isinstance(tree, Mapping):
        shape = () if isinstance(tree, int | float) else getattr(tree, "shape", None)
        if not isinstance(shape, tuple):
            raise ValueError(f"weight {path!r} must be an array, not a {type(tree).__name__}")
        return {path: shape}
    found: dict[str, tuple[int, ...]] = {}
    for name in tree:
        found |= shapes_by_path(tree[name], f"{path}/{name}" if path else str(name))
    return found


def describe_mismatch(
    expected: Mapping[str, tuple[int, ...]], params: object, owner: str = "the model"
) -> str | None:
    """The first weight that differs from those of a model or layout, or None.

    Args:
      expected: the weights of the owner, of `shapes_by_path`.
      params: the tree to compare.
      owner: what has these weights, in words.

    >>> import jax.numpy as jnp
    >>> params = {"layers": {"ffn": {"up": jnp.ones((1, 4, 9))}}}
    >>> describe_mismatch({"layers/ffn/up": (3, 4, 9)}, params)
    "weight 'layers/ffn/up' has shape (1, 4, 9), the model has (3, 4, 9): another sharing \
plan or number of layers; see attnlab.transforms.change_plan"
    """
    given = shapes_by_path(params)
    if given == expected:
        return None
    if any("." in path for path in given):
        return "these are names of another library; attnlab.pretrained.load reads its folder"
    wrong = [path for path in {**expected, **given} if given.get(path) != expected.get(path)]
    path = min(wrong, key=lambda path: (path not in given or path not in expected, path))
    theirs, ours, hint = given.get(path), expected.get(path), ""
    if theirs and ours and is_stack(path.partition("/")[0]) and ours[1:] == theirs[1:]:
        hint = ": another sharing plan or number of layers; see attnlab.transforms.change_plan"
    has = "is missing" if theirs is None else f"has shape {theirs}"
    return f"weight {path!r} {has}, {owner} has {ours or 'no such weight'}{hint}"
