"""Registries of layouts and extras by name."""

from collections.abc import Callable
from typing import Any, TypeVar

from attnlab.heads.layout import Extra, Layout
from attnlab.names import lookup

LayoutT = TypeVar("LayoutT", bound=Layout)
ExtraT = TypeVar("ExtraT", bound=Extra)

LAYOUTS: dict[str, type[Layout]] = {}
"""Name -> class; `register_layout` adds to it."""
EXTRAS: dict[str, type[Extra]] = {}
"""Name -> class; `register_extra` adds to it."""


def register_layout(name: str) -> Callable[[type[LayoutT]], type[LayoutT]]:
    """Class decorator: registers a layout, so that flags and `make_layout` know it.

    Args:
      name: a name that no other layout has.

    Returns:
      The decorator. It returns the class, with `name` set.

    Raises:
      ValueError: another class has the name.

    >>> @register_layout("half")  # doctest: +SKIP
    ... @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Half(Standard):
    ...     @property
    ...     def default_head_dim(self):
    ...         return self.slice_width // 2
    """

    return _adder("layout", name, LAYOUTS)


def register_extra(name: str) -> Callable[[type[ExtraT]], type[ExtraT]]:
    """Class decorator: registers an extra, as `register_layout` does a layout.

    Raises:
      ValueError: another class has the name.

    >>> @register_extra("half")  # doctest: +SKIP
    ... @dataclasses.dataclass(frozen=True)
    ... class Half(Extra):
    ...     def after_attention(self, params, heads, call):
    ...         return heads / 2
    """

    return _adder("extra", name, EXTRAS)


def _adder(what: str, name: str, table: dict[str, Any]) -> Callable[[type[Any]], type[Any]]:
    def register(kind: type[Any]) -> type[Any]:
        other = table.get(name, kind)
        # The same class again, as when its module is reloaded, replaces itself.
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ValueError(
                f"{what} {name!r} is {other.__module__}.{other.__qualname__}; choose another name"
            )
        kind.name = name
        table[name] = kind
        return kind

    return register


def make_layout(name: str, **fields: object) -> Layout:
    """A layout by its registered name.

    Args:
      name: a key of `LAYOUTS`.
      **fields: of the class.

    Raises:
      TypeError: a field that the layout does not have.
      ValueError: an unknown name.

    >>> make_layout("wide", width=6, num_heads=2)
    Wide(width=6, num_heads=2)
    """
    kind: type[Any] = lookup(LAYOUTS, name, what="layout")
    made: Layout = kind(**fields)
    return made
