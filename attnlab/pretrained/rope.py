"""Rotary positions in a config.json: of today (`rope_parameters`) and before transformers 5."""

from typing import Any

from attnlab.heads.positions import SCALINGS, read_scaling

ROPE: dict[str, Any] = {"rope_parameters": None, "rope_theta": None, "rope_scaling": None}
"""Attributes that `read_rope` reads, beside the family's own names."""


def read_rope(
    s: dict[str, Any], *, base: str = "rope_theta", fraction: str = "", part: float = 1.0
) -> dict[str, Any]:
    """The fields of a ModelConfig. `base` and `fraction` are the family's own names of two numbers
    that `rope_parameters` calls rope_theta and partial_rotary_factor; `part` is what the second is
    where nothing says it. A family without a `fraction` turns whole heads.

    Raises ValueError that names the attribute which is unknown, missing, or said twice.
    """
    said: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(s[name] or {}, dict):
            raise ValueError(f"config.json: {name} = {s[name]!r} should be an object or null")
        for key, value in (s[name] or {}).items():
            _say(said, "rope_type" if key == "type" else key, value, f"{name}.{key}")
    for key, name in {"rope_theta": base, "partial_rotary_factor": fraction}.items():
        if name and s[name] is not None:
            _say(said, key, s[name], name)
    kind = said.pop("rope_type", "default")
    if kind != "default" and kind not in SCALINGS:
        raise ValueError(
            f"config.json: rope_type = {kind!r} is not supported; known: default, "
            f"{', '.join(SCALINGS)}"
        )
    names = () if kind == "default" else SCALINGS[kind].numbers
    known: dict[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": part} | dict.fromkeys(
        names
    )
    for key, value in said.items():
        if key not in known:
            raise ValueError(
                f"config.json: {key} = {value!r} of the rotary positions (rope_type {kind!r}) is "
                "unknown here and may change what the model computes"
            )
    if "original_max_position_embeddings" in names:
        said.setdefault("original_max_position_embeddings", s["max_position_embeddings"])
    for key, value in said.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"config.json: {key} = {value!r} of the rotary positions is no number")
    if missing := [n for n in names if n not in said]:
        raise ValueError(f"config.json: rope_type {kind!r} needs {missing[0]}")
    found = known | said
    if not fraction and found["partial_rotary_factor"] != 1:
        raise ValueError(
            f"config.json: partial_rotary_factor = {found['partial_rotary_factor']!r} is not "
            "supported in this family, only 1.0"
        )
    numbers = ",".join(_short(found[name]) for name in names)
    scaling = f"{kind}:{numbers}" if names else None
    if scaling:
        read_scaling(scaling)
    return dict(
        positions="rotary",
        rotary_base=float(found["rope_theta"]),
        rotary_fraction=float(found["partial_rotary_factor"]),
        rotary_scaling=scaling,
    )


def write_rope(
    c: Any, *, base: str = "rope_theta", fraction: str = "", part: float = 1.0
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
            f"config.json: {name} = {value!r} contradicts another attribute of the rotary "
            f"positions, which says {said[key]!r}"
        )


def _short(number: float) -> str:
    """8.0 -> "8", and any other number so that it is read again exactly."""
    return repr(int(number)) if float(number).is_integer() else repr(float(number))
