"""Sharing plans: which layers share which parameters, one group index per layer and sublayer."""

from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator
from typing import ClassVar, Literal, SupportsIndex

from attnlab.fields import as_count

Group = int | str | None
"""The parameter group that a layer uses; in the sublayer "kv" also "@j" or None (see `Plan`)."""

Groups = tuple[Group, ...]


class Plan:
    """A sharing plan: sublayer -> the parameter group of each layer.

    A hashable, read-only mapping. Layers with the same number share their parameters. Groups count
    from 0 without gaps, so the parameters of a sublayer stack to arrays [G, ...]. Everything is
    validated here because JAX clamps an index out of range without an error.

    Sublayers of a transformer are "attention", "ffn", "cross" (cross-attention), and:

    - "kv": the projections to keys and values, apart from the rest of attention. Besides a group it
      may hold "@j": this layer has no such projections and attends to the keys and values of layer
      j (cross-layer attention), or to those that j itself attends to. None stands for the last
      layer before it that computes its own.
    - "delta": a low-rank difference added to the shared parameters (see
      `attnlab.sharing.low_rank_delta`).

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
      Plan(attention=(0, 1, 2), kv=(0, None, None))
    """

    __slots__ = ("_groups",)
    example: ClassVar[str] = "'albert' or Plan(attention=(0, 0, 1), ffn=(0, 1, 2))"
    """For errors."""

    def __init__(self, **sublayers: Iterable[SupportsIndex | str | None]):
        for name, groups in sublayers.items():
            if not isinstance(groups, Iterable):
                raise ValueError(f"{name}: give one group per layer, not {groups!r}")
        self._groups: dict[str, Groups] = {
            name: tuple(
                g if g is None or isinstance(g, str) else as_count(f"{name}: a group", g)
                for g in groups
            )
            for name, groups in sublayers.items()
        }
        lengths = {name: len(groups) for name, groups in self.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(
                f"every sublayer of a plan needs one parameter group per layer; got {lengths}"
            )
        if "kv" in self:
            self._groups["kv"] = _canonical_kv(self["kv"])
        for name, groups in self.items():
            _check_groups(name, groups)

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

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(next(iter(self._groups.values())))

    @property
    def num_groups(self) -> dict[str, int]:
        """sublayer -> number of parameter groups, the leading axis G of its stacked parameters."""
        return {name: max(self.indices(name)) + 1 for name in self}

    @property
    def num_applications(self) -> dict[str, int]:
        """sublayer -> number of layers that apply its parameters.

        All layers, except for "kv", which a layer that attends to the keys and values of an
        earlier layer does not apply.

        >>> Plan(attention=(0, 1, 2, 3), kv=(0, 1, "@0", "@1")).num_applications["kv"]
        2
        """
        return {name: sum(isinstance(g, int) for g in groups) for name, groups in self.items()}

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it attends to: itself, or an earlier one.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, 1, None, "@0")).kv_sources
        (0, 1, 1, 0)
        """
        return resolve_kv_sources(self._groups.get("kv", separate(self.num_layers)))

    @property
    def reuses_kv(self) -> tuple[bool, ...]:
        """For each layer, whether it attends to the keys and values of an earlier layer."""
        return tuple(source != i for i, source in enumerate(self.kv_sources))

    @property
    def kv_indices(self) -> tuple[int, ...]:
        """For each layer, the index of its keys and values in the order in which they are computed.

        A cache for decoding has one entry per index.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, None, 0, "@0")).kv_indices
        (0, 0, 1, 0)
        """
        return renumber(self.kv_sources)

    @property
    def kv_buffers(self) -> tuple[int, ...]:
        """For each layer, the buffer that holds its keys and values until their last use.

        Buffers are reused: there are as many as are needed at one time.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, None, 1, None)).kv_buffers
        (0, 0, 0, 0)
        >>> Plan(attention=(0, 0, 0, 0), kv=(0, 1, None, "@0")).kv_buffers
        (0, 1, 1, 0)
        """
        sources = self.kv_sources
        last_use = {source: i for i, source in enumerate(sources)}
        buffer: dict[int, int] = {}
        for i in dict.fromkeys(sources):
            in_use = {buffer[j] for j in buffer if last_use[j] >= i}
            buffer[i] = min(set(range(len(in_use) + 1)) - in_use)
        return tuple(buffer[source] for source in sources)

    def indices(self, sublayer: str) -> tuple[int, ...]:
        """The group of each layer as integers, for indexing the stacked parameters.

        A layer that attends to the keys and values of an earlier layer gets the group of that one.

        >>> Plan(attention=(0, 1, 2), kv=(0, None, 1)).indices("kv")
        (0, 0, 1)
        """
        groups = self[sublayer]
        sources = self.kv_sources if sublayer == "kv" else separate(self.num_layers)
        # A layer that others attend to has a group of its own: none is filtered out.
        return tuple(group for i in sources if isinstance(group := groups[i], int))


def _check_groups(sublayer: str, groups: Groups) -> None:
    used = {group for group in groups if isinstance(group, int)}
    if sublayer != "kv" and any(not isinstance(group, int) for group in groups):
        raise ValueError(
            f"{sublayer}: groups are integers; '@j' and None are for the sublayer 'kv' alone; "
            f"got {groups}"
        )
    if used != set(range(len(used))):
        raise ValueError(f"{sublayer}: groups must be 0, 1, 2, ... without gaps; got {groups}")


def resolve_kv_sources(groups: Groups) -> tuple[int, ...]:
    """For each layer, the layer that computes the keys and values it attends to.

    Args:
      groups: of the sublayer "kv", one per layer: an integer, "@j" or None.

    Raises:
      ValueError: "@j" names no earlier layer, or the first layer has no group.

    >>> resolve_kv_sources((0, 1, "@0", None, "@2"))
    (0, 1, 0, 1, 0)
    """
    sources: list[int] = []
    for i, group in enumerate(groups):
        if isinstance(group, int):
            sources.append(i)
            continue
        if group is None and i == 0:
            raise ValueError(
                "kv: the first layer has no earlier keys and values to attend to; give it a group; "
                f"got {groups}"
            )
        computing = [j for j, source in enumerate(sources) if source == j]
        number = str(computing[-1]) if group is None else group.removeprefix("@")
        is_layer = number.isdecimal() and (group is None or group.startswith("@"))
        if not is_layer or int(number) >= len(groups):
            raise ValueError(
                f"kv: {group!r} names no layer; layer {i} takes a group, or '@j' with j < {i}; got "
                f"{groups}"
            )
        if int(number) >= i:
            raise ValueError(
                f"kv: layer {i} cannot attend to the keys and values of layer {number}, which are "
                "computed later (that takes several passes over the tokens, arXiv 2405.10637); "
                "name an earlier layer"
            )
        sources.append(sources[int(number)])
    return tuple(sources)


def _canonical_kv(groups: Groups) -> Groups:
    """Each "@j" with the layer that computes the keys; None if that is the last one to do so."""
    sources, short, last = resolve_kv_sources(groups), list(groups), 0
    for i, source in enumerate(sources):
        if source == i:
            last = i
        else:
            short[i] = None if source == last else f"@{source}"
    return tuple(short)


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


def grouped(num_layers: int, num_groups: int, rule: GroupRule = "exact") -> tuple[int, ...]:
    """Consecutive layers share: `num_groups` blocks of layers.

    "sequence" in Takase and Kiyono 2021 (arXiv 2104.06022).

    Args:
      num_layers: L.
      num_groups: G, from 1 to L.
      rule: formula of `GROUP_RULES`; a formula that skips a group gives fewer of them.

    Returns:
      The group of each layer.

    Raises:
      ValueError: `num_groups` is not in [1, num_layers].

    >>> grouped(6, 3)
    (0, 0, 1, 1, 2, 2)
    """
    _check_count("num_groups", num_layers, num_groups)
    group_of = GROUP_RULES[rule]
    return renumber(group_of(i, num_layers, num_groups) for i in range(num_layers))


def cycled(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """The groups in turn, over and over ("cycle" in Takase and Kiyono 2021, arXiv 2104.06022).

    Args:
      num_layers: L.
      num_groups: G, from 1 to L.

    Returns:
      The group of each layer.

    Raises:
      ValueError: `num_groups` is not in [1, num_layers].

    >>> cycled(6, 3)
    (0, 1, 2, 0, 1, 2)
    """
    _check_count("num_groups", num_layers, num_groups)
    return tuple(i % num_groups for i in range(num_layers))


def cycled_reversed(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """`cycled`, the last cycle in reverse order ("cycle (rev)", arXiv 2104.06022).

    Args:
      num_layers: L.
      num_groups: G, from 1 to L.

    Returns:
      The group of each layer.

    Raises:
      ValueError: `num_groups` is not in [1, num_layers].

    >>> cycled_reversed(6, 3)
    (0, 1, 2, 2, 1, 0)
    """
    _check_count("num_groups", num_layers, num_groups)
    last = (num_layers - 1) // num_groups * num_groups
    return tuple(
        i % num_groups if i < last else num_groups - 1 - i % num_groups for i in range(num_layers)
    )


def _check_count(name: str, num_layers: int, count: int) -> None:
    if not 1 <= count <= num_layers:
        raise ValueError(f"{name} must be from 1 to the {num_layers} layers, not {count}")


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
      num_calls: `num_hidden_layers` in ALBERT's config.
      num_groups: `num_hidden_groups` in ALBERT's config.
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

    Args:
      num_layers: number of layers.
      num_kv_layers: how many of them compute keys and values.

    Raises:
      ValueError: `num_kv_layers` is not in [1, num_layers].

    >>> kv_sharing(6, 2)
    (0, '@0', '@0', 1, '@3', '@3')
    """
    _check_count("num_kv_layers", num_layers, num_kv_layers)
    block = grouped(num_layers, num_kv_layers)
    first: dict[int, int] = {}
    sources = [first.setdefault(number, i) for i, number in enumerate(block)]
    computing = list(first.values())
    return tuple(computing.index(j) if j == i else f"@{j}" for i, j in enumerate(sources))


def renumber(labels: Iterable[Hashable]) -> tuple[int, ...]:
    """Labels as groups 0, 1, 2, ... in the order of their first use.

    >>> renumber([4, 4, 0, 7])
    (0, 0, 1, 2)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


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
