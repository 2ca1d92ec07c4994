"""Rotary positions in a config.json: of today (`rope_parameters`) and before transformers 5."""

from typing import Any

from attnlab.heads.positions import SCALINGS, read_scaling
from attnlab.model.config import ModelConfig
from attnlab.pretrained.settings import LARGEST_NUMBER, Null, shown

ROPE: dict[str, Any] = {
    "rope_parameters": Null(dict),
    "rope_theta": None,
    "rope_scaling": Null(dict),
}
"""Attributes that `read_rope` reads, beside the family's own names."""


def read_rope(
    s: dict[str, Any], *, base: str = "rope_theta", fraction: str = "", part: float = 1.0
) -> dict[str, Any]:
    """Read the fields of a ModelConfig that set rotary positions.

    Args:
      s: the settings of config.json.
      base, fraction: the family's own names of two numbers that `rope_parameters` calls rope_theta
        and partial_rotary_factor. A family without a `fraction` rotates whole heads.
      part: the fraction where config.json has none.

    Raises:
      ValueError: names the attribute that is unknown, missing, given twice or no number.
    """
    said = _given(s, {"rope_theta": base, "partial_rotary_factor": fraction})
    kind = said.pop("rope_type", "default")
    if kind != "default" and (not isinstance(kind, str) or kind not in SCALINGS):
        raise ValueError(
            f"config.json: rope_type = {shown(kind)} is not supported; known: default, "
            f"{', '.join(SCALINGS)}"
        )
    names = () if kind == "default" else SCALINGS[kind].numbers
    found = {"rope_theta": 10000.0, "partial_rotary_factor": part}
    found |= _numbers(said, (*found, *names), kind)
    if "original_max_position_embeddings" in names:
        found.setdefault("original_max_position_embeddings", s["max_position_embeddings"])
    if missing := [n for n in names if n not in found]:
        raise ValueError(f"config.json: rope_type {kind!r} needs {missing[0]}")
    if not fraction and found["partial_rotary_factor"] != 1:
        raise ValueError(
            f"config.json: partial_rotary_factor = {found['partial_rotary_factor']!r} is not "
            "supported in this family, only 1.0"
        )
    scaling = f"{kind}:{','.join(_short(found[name]) for name in names)}" if names else None
    if scaling:
        read_scaling(scaling)
    return dict(
        positions="rotary",
        rotary_base=float(found["rope_theta"]),
        rotary_fraction=float(found["partial_rotary_factor"]),
        rotary_scaling=scaling,
    )


def _given(s: dict[str, Any], own: dict[str, str]) -> dict[str, Any]:
    """What rope_scaling, rope_parameters and the family's own names (`own`) say, in the words of
    `rope_parameters`."""
    said: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(s[name], dict | None):
            raise ValueError(f"config.json: {name} = {shown(s[name])} should be an object or null")
        for key, value in (s[name] or {}).items():
            _say(said, "rope_type" if key == "type" else key, value, f"{name}.{key}")
    for key, name in own.items():
        if name and s[name] is not None:
            _say(said, key, s[name], name)
    return said


def _numbers(said: dict[str, Any], known: tuple[str, ...], kind: str) -> dict[str, Any]:
    """The numbers that were given, all of them known, finite and above 0."""
    for key, value in said.items():
        if key not in known:
            raise ValueError(
                f"config.json: {shown(key)[1:-1]} = {shown(value)} of the rotary positions "
                f"(rope_type {kind!r}) is unknown here and may change what the model computes"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= LARGEST_NUMBER:
            raise ValueError(
                f"config.json: {key} = {shown(value)} of the rotary positions is no number above 0"
            )
    return said


def write_rope(
    c: ModelConfig, *, base: str = "rope_theta", fraction: str = "", part: float = 1.0
) -> dict[str, Any]:
    """The inverse, for readers of today and of before."""
    scaled: dict[str, Any] = {}
    if c.rotary_scaling:
        row, numbers = read_scaling(c.rotary_scaling)
        scaled = dict(zip(row.numbers, numbers, strict=True))
        if (length := "original_max_position_embeddings") in scaled:
            scaled[length] = int(scaled[length])
        scaled["rope_type"] = c.rotary_scaling.partition(":")[0]
    own = {fraction: c.rotary_fraction} if fraction else {}
    today = scaled | {"rope_theta": c.rotary_base, "rope_type": scaled.get("rope_type", "default")}
    today |= {"partial_rotary_factor": c.rotary_fraction} if fraction else {}
    return own | {base: c.rotary_base, "rope_scaling": scaled or None, "rope_parameters": today}


def _say(said: dict[str, Any], key: str, value: Any, name: str) -> None:
    if said.setdefault(key, value) != value:
        raise ValueError(
            f"config.json: {name} = {shown(value)} contradicts another attribute of the rotary "
            f"positions, which says {shown(said[key])}"
        )


def _short(number: float) -> str:
    """8.0 -> "8", and any other number so that it is read again exactly."""
    return repr(int(number)) if float(number).is_integer() else repr(float(number))
