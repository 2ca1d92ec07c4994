"""Checks of config fields: each raises a ValueError with the field, its value, what is allowed."""

import math

from attnlab.names import lookup


def check_choice(field: str, value: object, known: tuple[str, ...] | list[str]) -> None:
    """Raises ValueError unless `value` is one of the known names."""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be one of {', '.join(known)}, not {value!r}")
    lookup(dict.fromkeys(known), value, what=field)


def check_bool(field: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, not {value!r}")


def check_number(
    field: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Raises ValueError unless `value` is a finite number within these bounds."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    bounds = []
    for limit, name in ((least, "at least"), (above, "above"), (below, "below"), (most, "at most")):
        if limit is not None:
            bounds.append(f"{name} {limit:g}")
    if good:
        assert isinstance(value, int | float)
        good = not (
            (least is not None and value < least)
            or (above is not None and value <= above)
            or (below is not None and value >= below)
            or (most is not None and value > most)
        )
    if not good:
        allowed = f" {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"{field} must be a finite number{allowed}, not {value!r}")
