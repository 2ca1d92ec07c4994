"""What goes into a layer beside its weights, what comes out, and the names of the values inside.

Every value has one name, the same at every level. A call shows those in `show`, and for a name in
`edit` goes on with `f(value, layer)` in place of the value.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.names import find
from attnlab.tap import Tap

Edit = Mapping[str, Callable[[Array, Any], Any]]
"""name -> function of the value and the number of the layer (0 outside a stack)."""


class Value(NamedTuple):
    """One value inside a layer. Axes as everywhere: T queries, S keys, D, H, V, F, O widths."""

    axes: str
    meaning: str


OF_HEADS = {
    "q": Value("B T N H", "queries as the scores read them, normed and turned by position"),
    "k": Value("B S K H", "keys as the scores read them; with a cache all that it holds"),
    "v": Value("B S K V", "values; with a cache all that it holds"),
    "scores": Value(
        "B N T S", "what the softmax reads: scale q k^T + bias, capped and mixed, before the mask"
    ),
    "probs": Value("B N T S", "the softmax of the scores, mixed, before dropout"),
    "heads": Value("B T N V", "probs times v, and times the gate of each head"),
    "outputs": Value("B N T O", "what each head writes: its share of W_O, without the bias"),
}
OF_GATE = {"gate": Value("B T N V", "what multiplies each head, or (V = 1) each of its numbers")}
"""Of heads that have one."""
OF_LAYER = OF_HEADS | {
    "attention_in": Value("B T D", "what attention reads: after the norm, where that comes first"),
    "attention_out": Value("B T D", "the sum of the outputs and the bias, before dropout"),
    "ffn_in": Value("B T D", "what the feed-forward part reads"),
    "ffn_hidden": Value("B T F", "what its last matrix reads, before dropout"),
    "ffn_out": Value("B T D", "what it writes, before dropout"),
    "residual": Value("B T D", "x after the layer"),
}
OF_CROSS = {f"cross.{n}": OF_LAYER[n] for n in (*OF_HEADS, "attention_in", "attention_out")}
OF_ENCODER = {f"encoder.{n}": value for n, value in OF_LAYER.items()}
NAMES = OF_LAYER | OF_CROSS | OF_ENCODER


def values_of_heads(spec: Any) -> dict[str, Value]:
    """What heads of a `HeadSpec` can show and take edits of."""
    return OF_HEADS | (OF_GATE if spec.gate else {})


# These differ from one order of contraction to another; their names mean the factored order.
OF_ORDER = ("q", "k", "v", "scores", "heads")


def check_names(show: Any, edit: Any, known: Mapping[str, Any]) -> tuple[str, ...]:
    """`show` as a tuple. Raises for what can not be shown or edited: TypeError for a wrong kind,
    ValueError for a name that is not in `known`.

    >>> check_names(("prob",), {}, {"scores": 1, "probs": 2})
    Traceback (most recent call last):
    ValueError: unknown value 'prob': did you mean 'probs'? known: scores, probs
    """
    if isinstance(show, str) or not isinstance(show, Iterable):
        raise TypeError(f"show must be a tuple of names, as ('probs',), not {show!r}")
    show = tuple(show)
    if edit is not None and not isinstance(edit, Mapping):
        raise TypeError(f"edit must be a dict, name -> f(value, layer), not {edit!r:.80}")
    for name in (*show, *(edit or {})):
        find("value", name, known)
    for name, f in (edit or {}).items():
        if not callable(f):
            raise TypeError(f"edit of {name!r} must be a function (value, layer), not {f!r:.80}")
    return show


class Look:
    """Looks at the values of one call: look(name, value) is the value to go on with.

    >>> look = Look(("q", "heads"), {"heads": lambda value, layer: value + layer}, layer=2)
    >>> x = jnp.ones(())
    >>> float(look("heads", x)), float(look("q", x)), float(look("k", x)), sorted(look.seen)
    (3.0, 1.0, 1.0, ['heads', 'q'])
    """

    def __init__(self, show: Iterable[str] = (), edit: Edit | None = None, layer: Any = 0):
        self.show, self.edit, self.layer = set(show), dict(edit or {}), layer
        self.seen: dict[str, Array] = {}

    def wants(self, name: str) -> bool:
        """Is it shown or edited?"""
        return name in self.show or name in self.edit

    def __call__(self, name: str, value: Any, shape: tuple[int, ...] | None = None) -> Any:
        """The value, or what stands in its place; people see it in `shape`."""
        if not self.wants(name):
            return value
        seen = value if shape is None else value.reshape(shape)
        seen = self.replace(name, seen)
        if name in self.show:
            self.seen[name] = seen
        return seen if shape is None else seen.reshape(value.shape)

    def replace(self, name: str, value: Array) -> Array:
        """The value, or what `edit` puts in its place. Raises ValueError for another shape."""
        if name not in self.edit:
            return value
        new = jnp.asarray(self.edit[name](value, self.layer))
        if new.shape != value.shape:
            raise ValueError(
                f"edit of {name!r} gave shape {new.shape}, the value has {value.shape}"
            )
        return new.astype(value.dtype)

    def tap(self, *names: str) -> Tap:
        """A tap that records and replaces the same of these names."""

        def replace(name: str, value: Array, layer: Any) -> Array:
            return self.replace(name, value)

        patch = {n: functools.partial(replace, n) for n in names if n in self.edit}
        return Tap((n for n in names if n in self.show), patch, self.layer)


class Given(NamedTuple):
    """What surrounds a layer: all that goes into its call beside weights, spec, x and context.

    A stack takes the same record for all of its layers, where `head_gate` has an axis L before its
    others, `dropout_key` is one key for all, and `cache` one cache per layer that makes keys.
    """

    mask: Any = None
    """Boolean, True = may attend; broadcasts to [B, N, T, S]"""
    padding_mask: Any = None
    """[B, T], True = a token of x: others are seen by none, and a cache does not keep them"""
    bias: Any = None
    """Added to the scores; broadcasts to [B, N, T, S]"""
    context_mask: Any = None
    """As `mask`, of the second text: of cross-attention, or of `source`"""
    source: Any = None
    """A second text [B, S, D] that is read in the same softmax: its keys stand behind those of x,
    no position turns them, and all of x sees them"""
    rotary: Any = None
    """Angles of `positions.rotary_angles`, or a pair (for q, for k)"""
    head_gate: Any = None
    """Multiplies each head, [N] or [B, N]; 0 removes a head"""
    dropout_key: Any = None
    """Without a key nothing is dropped"""
    scale: Any = None
    """Multiplies the scale of the scores, or None"""
    memory: Any = None
    """Keys and values of an earlier layer"""
    reuse: Any = False
    """Are they read again?"""
    cache: Any = None
    """What decoding remembers"""
    show: tuple[str, ...] = ()
    edit: Edit | None = None
    layer: Any = 0
    """The number of the layer, for `edit`"""
    told: dict[str, Any] | None = None
    """Filled, while JAX traces, with how attention is computed"""

    def showing(self, names: Iterable[str]) -> "Given":
        """The same, and these are shown too."""
        return self._replace(show=(*self.show, *(n for n in names if n not in self.show)))

    def of(self, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
        """`show` and `edit` of these names alone, which stand here behind `prefix`."""
        names, edit = tuple(names), self.edit or {}
        return {
            "show": tuple(n for n in names if prefix + n in self.show),
            "edit": {n: edit[prefix + n] for n in names if prefix + n in edit},
        }

    def tell(self, key: str) -> dict[str, Any] | None:
        """The part of `told` for a part of the call."""
        return None if self.told is None else self.told.setdefault(key, {})


class Ran(NamedTuple):
    """What comes out of heads, of a layer and of a stack; None where it was not given."""

    x: Array
    cache: Any
    """The cache that was given, with x in it"""
    memory: Any
    """The keys and values that were read"""
    shown: dict[str, Array]
    """name -> value, of a stack [L, ...]"""


NOTHING = Given()


def gated(edit: Edit | None, gate: Array | None) -> Edit:
    """The edits, and a gate [N] or [B, N] that multiplies what they leave of the heads."""
    edit = edit or {}
    if gate is None:
        return edit
    before = edit.get("heads", lambda heads, layer: heads)

    def f(heads, layer):
        heads = before(heads, layer)
        return heads * gate[..., None, :, None].astype(heads.dtype)

    return {**edit, "heads": f}
