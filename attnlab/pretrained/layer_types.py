"""`layer_types` of a config.json: layers with a sliding window and layers without in turn."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.settings import shown
from attnlab.sharing.stack import repeating_pattern

SLIDING, FULL = "sliding_attention", "full_attention"


def by_pattern(num_layers: int, pattern: int) -> list[str]:
    """Every layer whose number `pattern` divides sees all, counted from 1.

    >>> by_pattern(5, 2)[:2]
    ['sliding_attention', 'full_attention']
    """
    return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]


def read_types(
    s: dict[str, Any], types: list[str], fields: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The fields of a ModelConfig whose layers are of these types; `fields` are those of a type.

    Raises ValueError for a type that is none, or another number of them than of layers.
    """
    if not isinstance(types, list) or not types or any(t not in (SLIDING, FULL) for t in types):
        raise ValueError(
            f"config.json: layer_types = {shown(types)} is not supported, only a list of "
            f"{SLIDING!r} and {FULL!r}"
        )
    if len(types) != s["num_hidden_layers"]:
        raise ValueError(
            f"config.json: layer_types = {shown(types)} are {len(types)}, num_hidden_layers is "
            f"{s['num_hidden_layers']}"
        )
    if SLIDING in types and s["sliding_window"] is None:
        raise ValueError(f"config.json: sliding_window = None, but some layer_types are {SLIDING}")
    base = fields[FULL if FULL in types else SLIDING]
    if len(set(types)) == 1:
        return base
    own = {name: value for name, value in fields[SLIDING].items() if base.get(name) != value}
    runs = repeating_pattern(types)[0][0]
    return base | dict(kinds=[(count, own if name == SLIDING else {}) for name, count in runs])


def write_types(c: ModelConfig) -> dict[str, Any]:
    """layer_types and sliding_window: the inverse. Raises ValueError for windows of two sizes."""
    windows = {stack.window for stack in c.stacks.values() if stack.window is not None}
    if len(windows) > 1:
        raise ValueError(f"all layers that slide have one window, not {sorted(windows)}")
    slides = {name: stack.window is not None for name, stack in c.stacks.items()}
    return dict(
        layer_types=[SLIDING if slides[name] else FULL for name in c.layer_names],
        # They count the token itself.
        sliding_window=windows.pop() + 1 if windows else None,
    )


def of_type(c: ModelConfig, kind: str) -> ModelConfig:
    """The model of the layers of a type; of one without, that of the others."""
    stacks = sorted(
        c.stacks.values(), key=lambda stack: (stack.window is None) == (kind == SLIDING)
    )
    return stacks[0]
