"""Sharing plans: which layers share which parameters, one group index per layer and sublayer; and
plans by name, as in a config or flag ("cycle:3")."""

import functools
import re
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator
from typing import Literal, NamedTuple, SupportsIndex

from attnlab.fields import as_count
from attnlab.names import nearest

Group = int | str
"""The parameter group that a layer uses; in the sublayer "kv" also "@j" (see `Plan`)."""

Groups = tuple[Group, ...]


class Plan:
    """A sharing plan: sublayer -> the parameter group of each layer.

    A hashable, read-only mapping. Layers with the same number share their parameters. Groups count
    from 0 without gaps, so the parameters of a sublayer stack to arrays [G, ...]. Everything is
    validated here because JAX clamps an index out of range without an error.

    Sublayers of a transformer are "attention", "ffn", "cross" (cross-attention), and:

    - "kv": the projections to keys and values, apart from the rest of attention. Besides a group it
      may hold "@j": this layer has no such projections and attends to the keys and values of layer
      j (cross-layer attention), or to those that j itself attends to.
    - "delta": a low-rank difference added to the shared parameters (see `attnlab.sharing.deltas`).

    Args:
      **sublayers: sublayer -> one group per layer; all of equal length.

    Raises:
      ValueError: lengths differ, groups have gaps, or "@j" points to no earlier layer.

    Example:
      ALBERT's attention-only sharing (Lan et al. 2019, arXiv 1909.11942):

      >>> Plan(attention=(0, 0), ffn=(0, 1)).num_groups
      {'attention': 1, 'ffn': 2}

      Cross-layer attention (Brandon et al. 2024, arXiv 2405.12981):

      >>> Plan(attention=(0, 1, 2), kv=(0, "@0", "@1"))
      Plan(attention=(0, 1, 2), kv=(0, '@0', '@0'))
    """

    def __init__(self, **sublayers: Iterable[SupportsIndex | str]):
        for name, groups in sublayers.items():
            if not isinstance(groups, Iterable):
                raise ValueError(f"{name}: give one group per layer, not {groups!r}")
        self._groups: dict[str, Groups] = {
            name: tuple(
                g if name == "kv" and isinstance(g, str) else as_count(f"{name}: a group", g)
                for g in groups
            )
            for name, groups in sublayers.items()
        }
        lengths = {name: len(groups) for name, groups in self.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"every sublayer needs one parameter group per layer; got {lengths}")
        self.num_layers: int = next(iter(lengths.values()))
        self.kv_sources: tuple[int, ...] = (
            _kv_sources(self["kv"]) if "kv" in self else separate(self.num_layers)
        )
        """For each layer, the layer whose keys and values it attends to: itself, or an earlier
        one."""
        if "kv" in self:
            pairs = zip(self["kv"], self.kv_sources, strict=True)
            self._groups["kv"] = tuple(g if isinstance(g, int) else f"@{j}" for g, j in pairs)
        for name, groups in self.items():
            used = {group for group in groups if isinstance(group, int)}
            if used != set(range(len(used))):
                raise ValueError(f"{name}: groups must be 0, 1, 2, ... without gaps; got {groups}")

    def __getitem__(self, sublayer: str) -> Groups:
        return self._groups[sublayer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def items(self) -> ItemsView[str, Groups]:
        """(sublayer, groups) pairs, like those of a dict."""
        return self._groups.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._groups == other._groups

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.items())))

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={groups}' for name, groups in self.items())})"

    @functools.cached_property
    def _indices(self) -> dict[str, tuple[int, ...]]:
        sources = {"kv": self.kv_sources}
        own = separate(self.num_layers)
        return {
            name: tuple(int(groups[i]) for i in sources.get(name, own))
            for name, groups in self.items()
        }

    def indices(self, sublayer: str) -> tuple[int, ...]:
        """The group of each layer as integers, for indexing the stacked parameters.

        A layer that attends to the keys and values of an earlier layer gets the group of that one.

        >>> Plan(attention=(0, 1, 2), kv=(0, "@0", 1)).indices("kv")
        (0, 0, 1)
        """
        return self._indices[sublayer]

    @functools.cached_property
    def num_groups(self) -> dict[str, int]:
        """sublayer -> number of parameter groups, the leading axis G of its stacked parameters."""
        return {name: max(indices) + 1 for name, indices in self._indices.items()}

    @functools.cached_property
    def num_applications(self) -> dict[str, int]:
        """sublayer -> number of layers that apply its parameters.

        All layers, except for "kv", which a layer that attends to the keys and values of an
        earlier layer does not apply.

        >>> Plan(attention=(0, 1, 2, 3), kv=(0, 1, "@0", "@1")).num_applications["kv"]
        2
        """
        return {name: sum(isinstance(g, int) for g in groups) for name, groups in self.items()}

    @functools.cached_property
    def reuses_kv(self) -> tuple[bool, ...]:
        """For each layer, whether it attends to the keys and values of an earlier layer."""
        return tuple(source != i for i, source in enumerate(self.kv_sources))

    @functools.cached_property
    def kv_indices(self) -> tuple[int, ...]:
        """For each layer, the index of its keys and values in the order in which they are computed.

        A cache for decoding has one entry per index.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, "@0", 0, "@0")).kv_indices
        (0, 0, 1, 0)
        """
        return renumber(self.kv_sources)

    @functools.cached_property
    def kv_buffers(self) -> tuple[int, ...]:
        """For each layer, the buffer that holds its keys and values until their last use.

        Buffers are reused: there are as many as are needed at one time.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, "@0", 1, "@2")).kv_buffers
        (0, 0, 0, 0)
        >>> Plan(attention=(0, 0, 0, 0), kv=(0, 1, "@1", "@0")).kv_buffers
        (0, 1, 1, 0)
        """
        sources = self.kv_sources
        last_use = {source: i for i, source in enumerate(sources)}
        buffer: dict[int, int] = {}
        for i in dict.fromkeys(sources):
            in_use = {buffer[j] for j in buffer if last_use[j] >= i}
            buffer[i] = min(set(range(len(in_use) + 1)) - in_use)
        return tuple(buffer[source] for source in sources)


def _kv_sources(groups: Groups) -> tuple[int, ...]:
    """For each layer, the layer that computes the keys and values it attends to."""
    sources: list[int] = []
    for i, group in enumerate(groups):
        if isinstance(group, int):
            sources.append(i)
            continue
        number = group.removeprefix("@")
        if not group.startswith("@") or not number.isdecimal() or int(number) >= i:
            raise ValueError(f"kv: layer {i} takes a group or '@j' with j < {i}, not {group!r}")
        sources.append(sources[int(number)])
    return tuple(sources)


# Groups of layers ---------------------------------------------------------------------------------


def separate(num_layers: int) -> tuple[int, ...]:
    """No sharing: every layer has its own group.

    >>> separate(3)
    (0, 1, 2)
    """
    return tuple(range(num_layers))


def all_shared(num_layers: int) -> tuple[int, ...]:
    """All layers in one group (ALBERT).

    >>> all_shared(3)
    (0, 0, 0)
    """
    return (0,) * num_layers


GroupRule = Literal["exact", "hf", "google"]
GROUP_RULES: dict[GroupRule, Callable[[int, int, int], int]] = {
    "exact": lambda layer, num_layers, num_groups: layer * num_groups // num_layers,
    # transformers, modeling_albert.py
    "hf": lambda layer, num_layers, num_groups: int(layer / (num_layers / num_groups)),
    # google-research/albert, modeling.py
    "google": lambda layer, num_layers, num_groups: int(layer / num_layers * num_groups),
}
"""Name -> (layer, num_layers, num_groups) -> group.

They differ by rounding of floats (of 22 layers in 22 groups, google-research puts layer 15 into
group 14, so two layers share). To reproduce a published model, use the rule of its code.
"""


def _check_count(num_layers: int, count: int) -> None:
    if not 1 <= count <= num_layers:
        raise ValueError(f"groups must be from 1 to the {num_layers} layers, not {count}")


def grouped(num_layers: int, num_groups: int, rule: GroupRule = "exact") -> tuple[int, ...]:
    """Consecutive layers share: `num_groups` blocks of layers, or fewer where the formula `rule` of
    `GROUP_RULES` skips one. "sequence" in Takase and Kiyono 2021 (arXiv 2104.06022).

    >>> grouped(6, 3)
    (0, 0, 1, 1, 2, 2)
    """
    _check_count(num_layers, num_groups)
    return renumber(GROUP_RULES[rule](i, num_layers, num_groups) for i in range(num_layers))


def cycled(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """The groups in turn, over and over ("cycle" in Takase and Kiyono 2021, arXiv 2104.06022).

    >>> cycled(6, 3)
    (0, 1, 2, 0, 1, 2)
    """
    _check_count(num_layers, num_groups)
    return tuple(i % num_groups for i in range(num_layers))


def cycled_reversed(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """`cycled`, the last cycle in reverse order ("cycle (rev)", arXiv 2104.06022).

    >>> cycled_reversed(6, 3)
    (0, 1, 2, 2, 1, 0)
    """
    _check_count(num_layers, num_groups)
    last = (num_layers - 1) // num_groups * num_groups
    return tuple(
        i % num_groups if i < last else num_groups - 1 - i % num_groups for i in range(num_layers)
    )


def sandwich(num_layers: int) -> tuple[int, ...]:
    """First and last layer separate, all others shared (Subformer, arXiv 2101.00234).

    >>> sandwich(4)
    (0, 1, 1, 2)
    """
    return renumber({0: "first", num_layers - 1: "last"}.get(i, "inner") for i in range(num_layers))


def inner_groups(
    num_calls: int, num_groups: int, inner_group_num: int, rule: GroupRule = "hf"
) -> tuple[int, ...]:
    """ALBERT's `inner_group_num`: each call of a group applies all `inner_group_num` of its layers.

    Groups keep their numbers: if `rule` skips one, the result has a gap, which `Plan` rejects.

    Args:
      num_calls, num_groups: `num_hidden_layers` and `num_hidden_groups` in ALBERT's config.
      inner_group_num: layers in each group.
      rule: formula of GROUP_RULES.

    Returns:
      `num_calls * inner_group_num` indices of `num_groups * inner_group_num` parameter groups.

    >>> inner_groups(3, 2, 2, rule="exact")
    (0, 1, 0, 1, 2, 3)
    """
    calls = (GROUP_RULES[rule](i, num_calls, num_groups) for i in range(num_calls))
    return tuple(group * inner_group_num + k for group in calls for k in range(inner_group_num))


def kv_sharing(num_layers: int, num_kv_layers: int) -> Groups:
    """The sublayer "kv" of cross-layer attention (CLA, Brandon et al. 2024, arXiv 2405.12981).

    Consecutive layers form `num_kv_layers` blocks; the layers of a block attend to the keys and
    values of its first layer.

    >>> kv_sharing(6, 2)
    (0, '@0', '@0', 1, '@3', '@3')
    """
    blocks = grouped(num_layers, num_kv_layers)
    first = [blocks.index(block) for block in blocks]
    return tuple(block if first[i] == i else f"@{first[i]}" for i, block in enumerate(blocks))


def renumber(labels: Iterable[Hashable]) -> tuple[int, ...]:
    """Labels as groups 0, 1, 2, ... in the order of their first use.

    >>> renumber([4, 4, 0, 7])
    (0, 0, 1, 2)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


# Plans by name ------------------------------------------------------------------------------------


class NamedPlan(NamedTuple):
    """An entry of `PLANS`.

    >>> PLANS["cycle"].build(5, 2)["ffn"], PLANS["albert"].takes_count
    ((0, 1, 0, 1, 0), False)
    """

    build: Callable[[int, int], Plan]
    """(number of layers, count of groups) -> Plan"""
    takes_count: bool = True
    """Whether the name is written with a count, as in "cycle:3"; else `build` ignores it."""

    def __repr__(self) -> str:
        return f"NamedPlan(takes_count={self.takes_count})"  # functions have no repr to read


def _both(groups: Groups) -> Plan:
    return Plan(attention=groups, ffn=groups)


def _kv_shared(num_layers: int, count: int) -> Plan:
    layers = separate(num_layers)
    return Plan(attention=layers, kv=kv_sharing(num_layers, count), ffn=layers)


def _relaxed(num_layers: int, count: int) -> Plan:
    groups = cycled(num_layers, count)
    return Plan(attention=groups, ffn=groups, delta=separate(num_layers))


PLANS: dict[str, NamedPlan] = {
    # No sharing (Vaswani et al. 2017, arXiv 1706.03762).
    "separate": NamedPlan(lambda n, _: _both(separate(n)), takes_count=False),
    # The other three rows of ALBERT's Table 4 (Lan et al. 2019, arXiv 1909.11942).
    "albert": NamedPlan(lambda n, _: _both(all_shared(n)), takes_count=False),
    "attention_only": NamedPlan(
        lambda n, _: Plan(attention=all_shared(n), ffn=separate(n)), takes_count=False
    ),
    "ffn_only": NamedPlan(
        lambda n, _: Plan(attention=separate(n), ffn=all_shared(n)), takes_count=False
    ),
    # Subformer (Reid et al. 2021, arXiv 2101.00234).
    "sandwich": NamedPlan(lambda n, _: _both(sandwich(n)), takes_count=False),
    # ALBERT's groups of layers, by three formulas (see GROUP_RULES).
    "groups": NamedPlan(lambda n, count: _both(grouped(n, count))),
    "groups_hf": NamedPlan(lambda n, count: _both(grouped(n, count, "hf"))),
    "groups_google": NamedPlan(lambda n, count: _both(grouped(n, count, "google"))),
    # Takase and Kiyono 2021 (arXiv 2104.06022); their "sequence" is "groups".
    "cycle": NamedPlan(lambda n, count: _both(cycled(n, count))),
    "cycle_rev": NamedPlan(lambda n, count: _both(cycled_reversed(n, count))),
    # Relaxed recursive transformer (Bae et al. 2024, arXiv 2410.20672): a cycle of layers, each
    # application with its own low-rank difference.
    "relaxed": NamedPlan(_relaxed),
    # Cross-layer attention (Brandon et al. 2024, arXiv 2405.12981): consecutive layers attend to
    # the same keys and values. CLA2 with 12 layers is "cla:6".
    "cla": NamedPlan(_kv_shared),
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
          attends to the keys and values of layer j;
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
    >>> parse_plan("attention=0..3 kv=0,1,@1,@0 ffn=0,0,0,0", 4)
    Plan(attention=(0, 1, 2, 3), kv=(0, 1, '@1', '@0'), ffn=(0, 0, 0, 0))
    """
    if "=" in text or not text[:1].isalpha():
        return _parse_groups(text)
    name, colon, count = text.partition(":")
    entry = PLANS.get(name)
    if entry is None or (colon and not entry.takes_count):
        near = None if entry else nearest(name, PLANS)
        hint = f"did you mean {near!r}? " if near else ""
        known = ", ".join([*plan_names("COUNT"), "'attention=0,0,1 ffn=0,1,2'", "'0,1,1,2'"])
        raise ValueError(f"unknown plan {text!r}: {hint}known: {known}")
    if entry.takes_count and not (count.isdigit() and 1 <= int(count) <= num_layers):
        raise ValueError(
            f"plan {text!r} needs a number from 1 to the {num_layers} layers, as in '{name}:1'"
        )
    return entry.build(num_layers, int(count or 0))


def as_plan(plan: str | Plan, num_layers: int) -> Plan:
    """A `Plan` unchanged, a string parsed by `parse_plan`.

    Raises:
      ValueError: as `parse_plan`, or the plan is one for another number of layers.

    >>> as_plan("albert", 2)
    Plan(attention=(0, 0), ffn=(0, 0))
    """
    made = plan if isinstance(plan, Plan) else parse_plan(plan, num_layers)
    if made.num_layers != num_layers:
        raise ValueError(f"the plan is one for {made.num_layers} layers, not for {num_layers}")
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
    for name, entry in PLANS.items():
        for count in range(1, plan.num_layers + 1 if entry.takes_count else 2):
            if entry.build(plan.num_layers, count) == plan:
                return f"{name}:{count}" if entry.takes_count else name
    return " ".join(f"{name}={','.join(map(str, groups))}" for name, groups in plan.items())


LOOP = re.compile(r"(\d+)/\((\d+)\)x(\d+)/(\d+)")
"""Layers before the loop, layers in it, times it runs, layers after it."""


def _parse_groups(text: str) -> Plan:
    try:
        if "=" not in text:
            return _both(_groups(text))
        pairs = [word.partition("=")[::2] for word in text.split()]
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a sublayer is there twice")
        sublayers = {sublayer: _groups(groups) for sublayer, groups in pairs}
    except ValueError as error:
        raise ValueError(
            f"cannot parse the plan {text!r}: {error}; write '0,1,1' or 'attention=0,0 ffn=0,1'"
        ) from None
    return Plan(**sublayers)


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
            groups.append(word if word[:1] == "@" else int(word))
    return tuple(groups)
