"""Plans by name and by hand: what a config or a flag says, and back."""

import re
from collections.abc import Callable
from typing import NamedTuple

from attnlab.names import find
from attnlab.sharing.plan import (
    Plan,
    Slot,
    Slots,
    cycle,
    cycle_rev,
    groups,
    kv_map,
    one,
    own,
    sandwich,
)


class NamedPlan(NamedTuple):
    """A row of `PLANS`. A counted one is written with its number of slots: "cycle:3"."""

    make: Callable[..., Plan]
    """(number of layers) -> Plan; (number of layers, number of slots) -> Plan of a counted one"""
    counted: bool


def _plain(make: Callable[[int], Plan]) -> NamedPlan:
    return NamedPlan(make, counted=False)


def _counted(make: Callable[[int, int], Plan]) -> NamedPlan:
    return NamedPlan(make, counted=True)


def _both(slots: Slots) -> Plan:
    return Plan(attention=slots, ffn=slots)


def _keys(num_layers: int, slots: Slots) -> Plan:
    return Plan(attention=own(num_layers), kv=slots, ffn=own(num_layers))


PLANS = {
    # Vaswani et al. 2017; what tensor2tensor, BERT and GPT-2 do.
    "separate": _plain(lambda n: _both(own(n))),
    # The other three are the rows of ALBERT's Table 4 (Lan et al. 2019, arXiv 1909.11942).
    "albert": _plain(lambda n: _both(one(n))),
    "attention_only": _plain(lambda n: Plan(attention=one(n), ffn=own(n))),
    "ffn_only": _plain(lambda n: Plan(attention=own(n), ffn=one(n))),
    # Subformer (Reid et al. 2021, arXiv 2101.00234).
    "sandwich": _plain(lambda n: _both(sandwich(n))),
    # ALBERT's groups, by three rules (see GROUP_RULES).
    "groups": _counted(lambda n, count: _both(groups(n, count))),
    "groups_hf": _counted(lambda n, count: _both(groups(n, count, "hf"))),
    "groups_google": _counted(lambda n, count: _both(groups(n, count, "google"))),
    # Takase and Kiyono 2021 (arXiv 2104.06022); `sequence` is `groups` under their name.
    "sequence": _counted(lambda n, count: _both(groups(n, count))),
    "cycle": _counted(lambda n, count: _both(cycle(n, count))),
    "cycle_rev": _counted(lambda n, count: _both(cycle_rev(n, count))),
    # Relaxed recursive transformers (Bae et al. 2024, arXiv 2410.20672): looped blocks, each
    # application with a low-rank difference of its own.
    "relaxed": _counted(
        lambda n, count: Plan(attention=cycle(n, count), ffn=cycle(n, count), delta=own(n))
    ),
    # Cross-layer attention (Brandon et al. 2024, arXiv 2405.12981): neighbours read the same keys
    # and values. CLA2 of 12 layers is "cla:6".
    "cla": _counted(lambda n, count: _keys(n, kv_map("lasagna", "bottom", n, count))),
    # The layers behind the others read the keys and values of the first of them: YOCO (Sun et al.
    # 2024, arXiv 2405.05254); or those between them do (Wu et al. 2024, arXiv 2410.14442).
    "pizza_bottom": _counted(lambda n, count: _keys(n, kv_map("pizza", "bottom", n, count))),
    "sandwich_bottom": _counted(lambda n, count: _keys(n, kv_map("sandwich", "bottom", n, count))),
    # MASA (Zhussip et al. 2025, arXiv 2508.04581): the maps of attention are sums of those of all
    # slots, each layer with coefficients of its own.
    "dictionary": _counted(
        lambda n, count: Plan(attention=cycle(n, count), ffn=own(n), attention_mixture=own(n))
    ),
}
"""Every plan that has a name. Ask for one with `named`."""


def plan_names(count: int | str | None = None) -> list[str]:
    """What `named` reads, a name for each row of PLANS; without a `count` those that need none.

    >>> plan_names()
    ['separate', 'albert', 'attention_only', 'ffn_only', 'sandwich']
    >>> plan_names(2)[-2:]
    ['sandwich_bottom:2', 'dictionary:2']
    """
    return [
        f"{name}:{count}" if row.counted else name
        for name, row in PLANS.items()
        if count is not None or not row.counted
    ]


def named(name: str, num_layers: int) -> Plan:
    """The plan that a config names: a row of PLANS, a counted one with its number of slots; or the
    slots themselves, of all layers or part by part.

    Slots are numbers ("6..10" is all from 6 to 10), in `kv` also "@j" and "-" for what reuses the
    keys and values of application j or of the last one. "4/(2)x3/5" is 4 layers, 2 layers three
    times in turn, 5 layers.

    >>> named("cycle_rev:3", 6)["ffn"]
    (0, 1, 2, 2, 1, 0)
    >>> named("2/(2)x3/1", 9) == named("0,1,2,3,2,3,2,3,4", 9)
    True
    >>> named("attention=0..3 kv=0,1,-,@0 ffn=0,0,0,0", 4)
    Plan(attention=(0, 1, 2, 3), kv=(0, 1, None, '@0'), ffn=(0, 0, 0, 0))

    Raises ValueError for an unknown name and for a count that the layers cannot fill.
    """
    if "=" in name or not name[:1].isalpha():
        return _by_hand(name)
    base, colon, count = name.partition(":")
    row = PLANS.get(base)
    if row and not row.counted and not colon:
        return row.make(num_layers)
    if row is None or not row.counted:
        hint = f"plan {base!r} takes no count" if row else f"unknown plan {name!r}"
        known = ", ".join([*plan_names("COUNT"), "'attention=0,0,1 ffn=0,1,2'", "'0,1,1,2'"])
        raise ValueError(f"{hint}; known: {known}")
    if not count.isdigit() or not 1 <= int(count) <= num_layers:
        raise ValueError(
            f"plan {name!r} needs a number of slots from 1 to the {num_layers} layers, as in "
            f"'{base}:{min(2, num_layers)}'"
        )
    return row.make(num_layers, int(count))


def as_data(plan: str | Plan, num_layers: int) -> Plan:
    """A plan as it is, or `named`, where an unknown name is told with its nearest."""
    if isinstance(plan, str) and plan[:1].isalpha() and "=" not in plan:
        find("plan", plan.partition(":")[0], PLANS)
    return named(plan, num_layers) if isinstance(plan, str) else plan


def _by_hand(text: str) -> Plan:
    try:
        if "=" not in text:
            return _both(_slots(text))
        words = (word.partition("=")[::2] for word in text.split())
        parts = {part: _slots(slots) for part, slots in words}
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"plan {text!r} is not read; write it as 'attention=0,0,1 ffn=0,1,2', '0,1,1,2' or "
            "'1/(2)x3/1'"
        ) from error
    return Plan(**parts)


LOOP = re.compile(r"(\d+)/\((\d+)\)x(\d+)/(\d+)")


def _slots(text: str) -> Slots:
    if loop := LOOP.fullmatch(text):
        before, core, times, after = map(int, loop.groups())
        middle = [before + i for i in range(core)] * times
        return (*range(before), *middle, *range(before + core, before + core + after))
    slots: list[Slot] = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        if dots:
            slots += range(int(first), int(last) + 1)
        else:
            slots.append(None if word == "-" else word if word[:1] == "@" else int(word))
    return tuple(slots)


def name_of(plan: Plan | str) -> str:
    """What `named` reads as this plan: the first name that there is for it, else part by part; a
    name stays.

    >>> name_of(Plan(attention=(0, 0, 0), ffn=(0, 1, 2)))
    'attention_only'
    >>> name_of(Plan(attention=(0, 1, 1), ffn=(0, 0, 1)))
    'attention=0,1,1 ffn=0,0,1'
    """
    if isinstance(plan, str):
        return plan
    layers = plan.num_layers
    counts = range(1, layers + 1)
    counted = [f"{n}:{count}" for n, row in PLANS.items() if row.counted for count in counts]
    by_hand = " ".join(
        f"{part}={','.join('-' if slot is None else str(slot) for slot in slots)}"
        for part, slots in plan.items()
    )
    names = [*plan_names(), *counted]
    return next((name for name in names if named(name, layers) == plan), by_hand)
