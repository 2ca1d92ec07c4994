"""Sharing plans by name, as in a config or flag ("cycle:3"), and names of plans."""

import re
from collections.abc import Callable
from typing import NamedTuple

from attnlab.names import nearest
from attnlab.sharing.plan import (
    Group,
    Groups,
    Plan,
    all_shared,
    cycled,
    cycled_reversed,
    grouped,
    kv_sharing,
    sandwich,
    separate,
)


class NamedPlan(NamedTuple):
    """An entry of `PLANS`.

    >>> PLANS["cycle"].build(5, 2)["ffn"], PLANS["albert"].takes_count
    ((0, 1, 0, 1, 0), False)
    """

    build: Callable[[int, int], Plan]
    """(number of layers, count) -> Plan"""
    takes_count: bool
    """Whether the name is written with a count, as in "cycle:3"; else `build` ignores it."""

    def __repr__(self) -> str:
        return f"NamedPlan(takes_count={self.takes_count})"  # functions have no repr to read


def _without_count(build: Callable[[int], Plan]) -> NamedPlan:
    return NamedPlan(lambda num_layers, _: build(num_layers), takes_count=False)


def _attention_and_ffn(groups: Groups) -> Plan:
    return Plan(attention=groups, ffn=groups)


def _same_groups(groups: Callable[[int, int], Groups]) -> NamedPlan:
    """The same groups for attention and FFN, by a function of (number of layers, count)."""
    return NamedPlan(lambda n, count: _attention_and_ffn(groups(n, count)), takes_count=True)


def _shared_kv(num_layers: int, count: int) -> Plan:
    layers = separate(num_layers)
    return Plan(attention=layers, kv=kv_sharing(num_layers, count), ffn=layers)


def _relaxed(num_layers: int, count: int) -> Plan:
    groups = cycled(num_layers, count)
    return Plan(attention=groups, ffn=groups, delta=separate(num_layers))


PLANS: dict[str, NamedPlan] = {
    # No sharing (Vaswani et al. 2017, arXiv 1706.03762).
    "separate": _without_count(lambda n: _attention_and_ffn(separate(n))),
    # The other three rows of ALBERT's Table 4 (Lan et al. 2019, arXiv 1909.11942).
    "albert": _without_count(lambda n: _attention_and_ffn(all_shared(n))),
    "attention_only": _without_count(lambda n: Plan(attention=all_shared(n), ffn=separate(n))),
    "ffn_only": _without_count(lambda n: Plan(attention=separate(n), ffn=all_shared(n))),
    # Subformer (Reid et al. 2021, arXiv 2101.00234).
    "sandwich": _without_count(lambda n: _attention_and_ffn(sandwich(n))),
    # ALBERT's groups of layers, by three formulas (see GROUP_RULES).
    "groups": _same_groups(grouped),
    "groups_hf": _same_groups(lambda n, count: grouped(n, count, "hf")),
    "groups_google": _same_groups(lambda n, count: grouped(n, count, "google")),
    # Takase and Kiyono 2021 (arXiv 2104.06022); their "sequence" is "groups".
    "cycle": _same_groups(cycled),
    "cycle_rev": _same_groups(cycled_reversed),
    # Relaxed recursive transformer (Bae et al. 2024, arXiv 2410.20672): a cycle of layers, each
    # application with its own low-rank difference.
    "relaxed": NamedPlan(_relaxed, takes_count=True),
    # Cross-layer attention (Brandon et al. 2024, arXiv 2405.12981): consecutive layers attend to
    # the same keys and values. CLA2 with 12 layers is "cla:6".
    "cla": NamedPlan(_shared_kv, takes_count=True),
}
"""Registry of named plans; `parse_plan` looks names up in it."""


def plan_names(count: int | str | None = None) -> list[str]:
    """The named plans as `parse_plan` reads them.

    Args:
      count: what to write behind the colon of plans with a count; None leaves those plans out.

    >>> plan_names()
    ['separate', 'albert', 'attention_only', 'ffn_only', 'sandwich']
    >>> plan_names(2)[-2:]
    ['relaxed:2', 'cla:2']
    """
    return [
        f"{name}:{count}" if entry.takes_count else name
        for name, entry in PLANS.items()
        if count is not None or not entry.takes_count
    ]


def parse_plan(text: str, num_layers: int) -> Plan:
    """The plan that a string in a config or flag describes.

    Args:
      text: one of three forms:

        - a name of `PLANS`, with a count of groups where it takes one: "albert", "cycle:3";
        - groups by sublayer: "attention=0,0,1 ffn=0..2". "6..10" stands for 6,7,8,9,10. In kv, "@j"
          attends to the keys and values of layer j, "-" to the last ones computed;
        - groups of attention and FFN alike: "0,1,1,2". "4/(2)x3/5" stands for 4 layers, 2 layers
          three times in turn, 5 layers.
      num_layers: number of layers, for a name.

    Raises:
      ValueError: the name is unknown, the count is not in [1, num_layers], or the groups are not
        valid.

    >>> parse_plan("cycle_rev:3", 6)["ffn"]
    (0, 1, 2, 2, 1, 0)
    >>> parse_plan("2/(2)x3/1", 9) == parse_plan("0,1,2,3,2,3,2,3,4", 9)
    True
    >>> parse_plan("attention=0..3 kv=0,1,-,@0 ffn=0,0,0,0", 4)
    Plan(attention=(0, 1, 2, 3), kv=(0, 1, None, '@0'), ffn=(0, 0, 0, 0))
    """
    if "=" in text or not text[:1].isalpha():
        return _parse_groups(text)
    name, colon, count = text.partition(":")
    entry = PLANS.get(name)
    if entry is None or (colon and not entry.takes_count):
        known = ", ".join([*plan_names("COUNT"), "'attention=0,0,1 ffn=0,1,2'", "'0,1,1,2'"])
        if entry:
            raise ValueError(f"plan {name!r} takes no count; known: {known}")
        near = nearest(name, PLANS)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"unknown plan {text!r}: {hint}known: {known}")
    if not entry.takes_count:
        return entry.build(num_layers, 0)
    if not count.isdigit() or not 1 <= int(count) <= num_layers:
        raise ValueError(
            f"plan {text!r} needs a number of groups from 1 to the {num_layers} layers, as in "
            f"'{name}:{min(2, num_layers)}'"
        )
    return entry.build(num_layers, int(count))


def as_plan(plan: str | Plan, num_layers: int) -> Plan:
    """A `Plan` unchanged, a string parsed by `parse_plan`.

    Args:
      plan: a plan, or a string as in a config or flag.
      num_layers: that the plan must be for.

    Raises:
      ValueError: as `parse_plan`, or the plan is one for another number of layers.

    >>> as_plan("albert", 2)
    Plan(attention=(0, 0), ffn=(0, 0))
    """
    made = plan if isinstance(plan, Plan) else parse_plan(plan, num_layers)
    if made.num_layers != num_layers:
        raise ValueError(
            f"the sharing plan is one for {made.num_layers} layers, not for {num_layers}; give one "
            "for as many layers, or change num_layers"
        )
    return made


def plan_name(plan: Plan | str) -> str:
    """The shortest string that `parse_plan` reads as this plan; a string is returned unchanged.

    The first name of `PLANS` that fits, else the groups by sublayer.

    >>> plan_name(Plan(attention=(0, 0, 0), ffn=(0, 1, 2)))
    'attention_only'
    >>> plan_name(Plan(attention=(0, 1, 1), ffn=(0, 0, 1)))
    'attention=0,1,1 ffn=0,0,1'
    """
    if isinstance(plan, str):
        return plan
    num_layers = plan.num_layers
    names = plan_names()
    for name, entry in PLANS.items():
        names += [f"{name}:{n}" for n in range(1, num_layers + 1)] if entry.takes_count else []
    by_sublayer = " ".join(
        f"{sublayer}={','.join('-' if group is None else str(group) for group in groups)}"
        for sublayer, groups in plan.items()
    )
    return next((name for name in names if parse_plan(name, num_layers) == plan), by_sublayer)


def _parse_groups(text: str) -> Plan:
    try:
        if "=" not in text:
            return _attention_and_ffn(_groups(text))
        pairs = (word.partition("=")[::2] for word in text.split())
        sublayers = {sublayer: _groups(groups) for sublayer, groups in pairs}
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"cannot parse the plan {text!r}; write it as 'attention=0,0,1 ffn=0,1,2', '0,1,1,2' "
            "or '1/(2)x3/1'"
        ) from error
    return Plan(**sublayers)


LOOP = re.compile(r"(\d+)/\((\d+)\)x(\d+)/(\d+)")
"""Layers before the loop, layers in it, times it runs, layers after it."""


def _groups(text: str) -> Groups:
    if loop := LOOP.fullmatch(text):
        before, core, times, after = map(int, loop.groups())
        middle = [before + i for i in range(core)] * times
        return (*range(before), *middle, *range(before + core, before + core + after))
    groups: list[Group] = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        if dots:
            groups += range(int(first), int(last) + 1)
        else:
            groups.append(None if word == "-" else word if word[:1] == "@" else int(word))
    return tuple(groups)
