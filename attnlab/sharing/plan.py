"""Which layer uses which weights. A plan is data: one slot number per application of a part."""

from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, Sequence
from typing import NamedTuple

Slots = tuple[int | None, ...]


class Plan:
    """part -> slot per application, e.g. `Plan(attention=(0, 0, 0), ffn=(0, 1, 2))`.

    A hashable read-only mapping. Slots count from 0 without gaps, so the slots of a part stack
    to [G, ...]. Checked here because JAX clamps an index that is out of range in silence.

    The part `kv` (the maps to keys and values, apart from the rest of attention) may hold None:
    that application makes none and reads the keys and values that the last one before it made.

    >>> Plan(attention=(0, 0), ffn=(0, 1)).num_slots
    {'attention': 1, 'ffn': 2}
    >>> Plan(attention=(0, 1, 2), kv=(0, None, 1), ffn=(0, 1, 2)).num_applied["kv"]
    2
    """

    __slots__ = ("_parts",)

    def __init__(self, **parts: Iterable[int | None]):
        self._parts: dict[str, Slots] = {name: tuple(slots) for name, slots in parts.items()}
        lengths = {name: len(slots) for name, slots in self.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"every part needs one slot per application; got {lengths}")
        for name, slots in self.items():
            if None in slots and name != "kv":
                raise ValueError(f"{name}: None (reuse) is for the part 'kv' alone; got {slots}")
            if slots[0] is None:
                raise ValueError(
                    f"{name}: the first application reuses keys and values that none has made; "
                    f"give it a slot; got {slots}"
                )
            used = {slot for slot in slots if slot is not None}
            if used != set(range(max(used) + 1)):
                raise ValueError(f"{name}: slots must be 0, 1, 2, ... without gaps; got {slots}")

    def __getitem__(self, part: str) -> Slots:
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def items(self) -> ItemsView[str, Slots]:
        """(part, slots) pairs, as of a dict."""
        return self._parts.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.items())))

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{part}={slots}' for part, slots in self.items())})"

    @property
    def num_layers(self) -> int:
        """Applications of each part."""
        return len(next(iter(self._parts.values())))

    @property
    def num_slots(self) -> dict[str, int]:
        """part -> number of weight sets."""
        return {name: max(self.indices(name)) + 1 for name in self}

    @property
    def num_applied(self) -> dict[str, int]:
        """part -> how often its weights are applied: by all applications but those that reuse."""
        return {name: len(slots) - slots.count(None) for name, slots in self.items()}

    def indices(self, part: str) -> tuple[int, ...]:
        """The slot that each application can read; where it reuses, that of the one before.

        >>> Plan(attention=(0, 1, 2), kv=(0, None, 1)).indices("kv")
        (0, 0, 1)
        """
        filled: list[int] = []
        for slot in self[part]:
            filled.append(filled[-1] if slot is None else slot)
        return tuple(filled)

    @property
    def reuses(self) -> tuple[bool, ...]:
        """Does an application read keys and values that one before it made? One bool each."""
        return tuple(slot is None for slot in self._parts.get("kv", range(self.num_layers)))

    @property
    def memories(self) -> tuple[int, ...]:
        """Which keys and values each application reads, counted in the order of their making.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, None, 0, None)).memories
        (0, 0, 1, 1)
        """
        return tuple(i - sum(self.reuses[: i + 1]) for i in range(self.num_layers))


def own(num_layers: int) -> tuple[int, ...]:
    """Each layer its own slot: 0, 1, 2, ..."""
    return tuple(range(num_layers))


def one(num_layers: int) -> tuple[int, ...]:
    """All layers one slot: 0, 0, 0, ..."""
    return (0,) * num_layers


def groups(num_layers: int, count: int, rule: str = "exact") -> tuple[int, ...]:
    """`count` groups of neighbours: 0, 0, 1, 1, 2, 2; the group of layer i by a row of GROUP_RULES.

    >>> groups(6, 3)
    (0, 0, 1, 1, 2, 2)
    """
    return gapless(GROUP_RULES[rule](i, num_layers, count) for i in range(num_layers))


def cycle(num_layers: int, count: int) -> tuple[int, ...]:
    """One round of `count` slots after another: 0, 1, 2, 0, 1, 2."""
    return tuple(i % count for i in range(num_layers))


def cycle_rev(num_layers: int, count: int) -> tuple[int, ...]:
    """`cycle` with the last round backwards: 0, 1, 2, 2, 1, 0."""
    last = (num_layers - 1) // count * count
    return tuple(i % count if i < last else count - 1 - i % count for i in range(num_layers))


def sandwich(num_layers: int) -> tuple[int, ...]:
    """The first and the last layer own, one slot for all between: 0, 1, 1, 2."""
    return gapless({0: -2, num_layers - 1: -1}.get(i, 0) for i in range(num_layers))


def inner_groups(num_calls: int, num_groups: int, inner: int, rule: str = "hf") -> tuple[int, ...]:
    """ALBERT's stack: each of `num_calls` group calls applies all `inner` blocks of its group.

    Applications are num_calls * inner, slots num_groups * inner. Groups keep their numbers: a
    rule that leaves one out leaves a gap, which a `Plan` refuses.

    >>> inner_groups(3, 2, 2, rule="exact")
    (0, 1, 0, 1, 2, 3)
    """
    calls = (GROUP_RULES[rule](i, num_calls, num_groups) for i in range(num_calls))
    return tuple(group * inner + k for group in calls for k in range(inner))


def reuse(slots: Sequence[int]) -> Slots:
    """None for each slot that equals the one before it: made once, read by all neighbours.

    >>> reuse((0, 0, 1, 1))
    (0, None, 1, None)
    """
    before = (None, *slots)
    return tuple(None if slot == last else slot for slot, last in zip(slots, before, strict=False))


def gapless(slots: Iterable[Hashable]) -> tuple[int, ...]:
    """Slots renamed to 0, 1, 2, ... in the order in which they are first used.

    >>> gapless([4, 4, 0, 7])
    (0, 0, 1, 2)
    """
    names: dict[Hashable, int] = {}
    return tuple(names.setdefault(slot, len(names)) for slot in slots)


# Layer i of L in N groups. Floats make them differ (L = N = 22, i = 15: google's gives group 14, so
# two layers share by accident); to match a peer, take its formula.
GROUP_RULES: dict[str, Callable[[int, int, int], int]] = {
    "exact": lambda i, layers, count: i * count // layers,
    "hf": lambda i, layers, count: int(i / (layers / count)),  # transformers, modeling_albert.py
    "google": lambda i, layers, count: int(i / layers * count),  # google-research/albert
}


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
    "cla": _counted(
        lambda n, count: Plan(attention=own(n), kv=reuse(groups(n, count)), ffn=own(n))
    ),
}
"""Every plan that has a name. Ask for one with `named`."""


def plan_names(count: int | str | None = None) -> list[str]:
    """What `named` reads, a name for each row of PLANS; without a `count` those that need none.

    >>> plan_names()
    ['separate', 'albert', 'attention_only', 'ffn_only', 'sandwich']
    >>> plan_names(2)[-2:]
    ['relaxed:2', 'cla:2']
    """
    return [
        f"{name}:{count}" if row.counted else name
        for name, row in PLANS.items()
        if count is not None or not row.counted
    ]


def named(name: str, num_layers: int) -> Plan:
    """The plan that a config names: a row of PLANS, a counted one with its number of slots; or a
    plan by hand, part by part, with "-" for what reuses.

    >>> named("cycle_rev:3", 6)["ffn"]
    (0, 1, 2, 2, 1, 0)
    >>> named("attention=0,1,0 kv=0,-,1 ffn=0,0,0", 3)
    Plan(attention=(0, 1, 0), kv=(0, None, 1), ffn=(0, 0, 0))

    Raises ValueError for an unknown name and for a count that the layers cannot fill.
    """
    if "=" in name:
        return _by_hand(name)
    base, colon, count = name.partition(":")
    row = PLANS.get(base)
    if row and not row.counted and not colon:
        return row.make(num_layers)
    if row is None or not row.counted:
        hint = f"plan {base!r} takes no count" if row else f"unknown plan {name!r}"
        known = ", ".join([*plan_names("COUNT"), "'attention=0,0,1 ffn=0,1,2'"])
        raise ValueError(f"{hint}; known: {known}")
    if not count.isdigit() or not 1 <= int(count) <= num_layers:
        raise ValueError(
            f"plan {name!r} needs a number of slots from 1 to the {num_layers} layers, as in "
            f"'{base}:{min(2, num_layers)}'"
        )
    return row.make(num_layers, int(count))


def _by_hand(text: str) -> Plan:
    parts = dict(word.partition("=")[::2] for word in text.split())
    try:
        read = {
            part: [None if slot == "-" else int(slot) for slot in slots.split(",")]
            for part, slots in parts.items()
        }
    except ValueError as error:
        raise ValueError(
            f"plan {text!r} is not read; write it as 'attention=0,0,1 ffn=0,1,2'"
        ) from error
    return Plan(**read)


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
