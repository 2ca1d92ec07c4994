"""Record or replace intermediate values of a call by name.

Functions of attnlab with intermediate values take an optional `tap` and pass each named value
through it: `q = tap("q", q)`. Without a tap nothing is recorded and no code is compiled for it.

>>> from attnlab.tap import capture
>>> def double(x, *, tap):
...     return tap("twice", 2 * x) + 1
>>> y, values = capture(double, jnp.ones(()), names=("twice",))
>>> float(y), float(values["twice"])
(3.0, 2.0)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

Result = TypeVar("Result")
Patch = Callable[[Array, ArrayLike], ArrayLike]
"""(value, layer index) -> the value to continue with, of the same shape."""
Patches = Mapping[str, Patch]


class Tap:
    """Records the values named in `capture` and replaces those named in `patch`.

    `tap(name, value)` returns the value to continue with. Recorded values stand in `captured`.
    A tap belongs to one call: under `jit` create it inside the jitted function and return
    `captured`, or use `capture`.

    Args:
      capture: names of values to record.
      patch: name -> f(value, layer), which replaces the value.
      layer: index of the layer, counted from 0; may be traced.

    Raises:
      TypeError: `capture` is one name and not a collection of names.
      ValueError: a patch returned another shape than the value it replaces.

    >>> tap = Tap(("q",), {"k": lambda value, layer: value + layer}, layer=2)
    >>> float(tap("q", jnp.ones(()))), float(tap("k", jnp.ones(()))), sorted(tap.captured)
    (1.0, 3.0, ['q'])
    """

    def __init__(
        self, capture: Iterable[str] = (), patch: Patches | None = None, layer: ArrayLike = 0
    ) -> None:
        if isinstance(capture, str):
            raise TypeError(f"give a tuple of names such as ('probs',), not {capture!r}")
        self.capture = frozenset(capture)
        self.patch = dict(patch or {})
        self.layer = layer
        self.captured: dict[str, Array] = {}
        self.patched: set[str] = set()
        """Names of the values that were replaced"""

    def wants(self, name: str) -> bool:
        """Is the value recorded or replaced?"""
        return name in self.capture or name in self.patch

    def __call__(self, name: str, value: Array) -> Array:
        value = self.replace(name, value) if name in self.patch else value
        return self.record(name, value) if name in self.capture else value

    def record(self, name: str, value: Array) -> Array:
        """The value itself, which is recorded if requested."""
        if name in self.capture:
            self.captured[name] = value
        return value

    def replace(self, name: str, value: Array) -> Array:
        """The value after its patch, if it has one."""
        if name not in self.patch:
            return value
        self.patched.add(name)
        new = jnp.asarray(self.patch[name](value, self.layer))
        if new.shape != value.shape:
            raise ValueError(
                f"patch of {name!r} returned shape {new.shape}; the value has {value.shape}"
            )
        return new.astype(value.dtype)

    def restricted(self, names: Iterable[str], prefix: str = "") -> "Tap":
        """A new tap for a nested call, whose value `name` is called `prefix + name` here."""
        known = tuple(names)
        return Tap(
            (n for n in known if prefix + n in self.capture),
            {n: self.patch[prefix + n] for n in known if prefix + n in self.patch},
            self.layer,
        )

    def merge(self, other: "Tap", prefix: str = "") -> None:
        """Adds what `other` recorded and replaced, with `prefix` before the names."""
        self.captured |= {prefix + name: value for name, value in other.captured.items()}
        self.patched |= {prefix + name for name in other.patched}


def capture(
    function: Callable[..., Result],
    *args: Any,
    names: Iterable[str],
    patch: Patches | None = None,
    **kwargs: Any,
) -> tuple[Result, dict[str, Array]]:
    """`function(*args, tap=..., **kwargs)` and the values of these names.

    Works under `jit`, `grad`, `vmap` and in the body of a scan, since the values are returned.

    Args:
      function: any function of attnlab that takes `tap`.
      names: values to return; the function's documentation lists them.
      patch: name -> f(value, layer index), which replaces the value.

    Returns:
      (what the function returns, name -> value).

    Raises:
      TypeError: `names` is one name and not a collection of names, or the function takes no `tap`.
      ValueError: the function has no value of one of these names, to return or to patch.

    >>> import jax.numpy as jnp
    >>> from attnlab import dot_product_attention
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> _, values = capture(dot_product_attention, x, x, x, names=("probs",), is_causal=True)
    >>> values["probs"][0, 0, 1].tolist()
    [0.5, 0.5, 0.0]
    """
    tap = Tap(names, patch)
    try:
        result = function(*args, tap=tap, **kwargs)
    except TypeError as error:
        if "unexpected keyword argument 'tap'" not in str(error):
            raise
        raise TypeError(
            f"{getattr(function, '__name__', function)!s} takes no tap; a model returns its values "
            f"itself: model.apply(variables, tokens, capture={tuple(names)}).captured"
        ) from None
    missing = sorted(tap.capture - tap.captured.keys()) + sorted(tap.patch.keys() - tap.patched)
    if missing:
        raise ValueError(
            f"{getattr(function, '__name__', function)!s} has no value {missing[0]!r} to return or "
            "to patch; it has those that its documentation lists"
        )
    return result, tap.captured
