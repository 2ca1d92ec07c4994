"""Which layer uses which weights. A plan is data: one slot number per application of a part."""

from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator

Slot = int | str | None
Slots = tuple[Slot, ...]
MIXTURE = "_mixture"
"""The end of the name of a part that holds coefficients."""


class Plan:
    """part -> slot per application, e.g. `Plan(attention=(0, 0, 0), ffn=(0, 1, 2))`.

    A hashable read-only mapping. Slots count from 0 without gaps, so the slots of a part stack
    to [G, ...]. Checked here because JAX clamps an index that is out of range in silence.

    The part `kv` (the maps to keys and values, apart from the rest of attention) may hold "@j":
    that application makes none and reads the keys and values of application j, or those that j
    itself reads; None stands for the last application before it that makes its own.

    A part "attention_mixture" beside "attention" (so of any part) holds coefficients: an
    application reads no slot but a sum of all, weight by weight; its own slot is where it begins.

    >>> Plan(attention=(0, 0), ffn=(0, 1)).num_slots
    {'attention': 1, 'ffn': 2}
    >>> Plan(attention=(0, 1, 2, 3), kv=(0, 1, "@0", "@1"), ffn=(0, 1, 2, 3)).num_applied["kv"]
    2
    >>> Plan(attention=(0, 1, 2), kv=(0, "@0", "@1"))
    Plan(attention=(0, 1, 2), kv=(0, None, None))
    """

    __slots__ = ("_parts",)

    def __init__(self, **parts: Iterable[Slot]):
        self._parts: dict[str, Slots] = {name: tuple(slots) for name, slots in parts.items()}
        lengths = {name: len(slots) for name, slots in self.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"every part needs one slot per application; got {lengths}")
        if "kv" in self:
            self._parts["kv"] = _shortest(self["kv"])
        for name, slots in self.items():
            used = {slot for slot in slots if isinstance(slot, int)}
            if name != "kv" and len(used | {*slots}) != len(used):
                raise ValueError(f"{name}: reuse is for the part 'kv' alone; got {slots}")
            if used != set(range(max(used) + 1)):
                raise ValueError(f"{name}: slots must be 0, 1, 2, ... without gaps; got {slots}")
            if name.endswith(MIXTURE) and name.removesuffix(MIXTURE) not in self:
                raise ValueError(f"{name}: the plan has no {name.removesuffix(MIXTURE)!r} to mix")

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
        return {name: sum(isinstance(slot, int) for slot in slots) for name, slots in self.items()}

    @property
    def reads(self) -> tuple[int, ...]:
        """The application whose keys and values each application reads: its own, if it makes any.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, 1, None, "@0")).reads
        (0, 1, 1, 0)
        """
        return followed(self._parts.get("kv", own(self.num_layers)))

    @property
    def reuses(self) -> tuple[bool, ...]:
        """Does an application read keys and values that one before it made? One bool each."""
        return tuple(source != i for i, source in enumerate(self.reads))

    def indices(self, part: str) -> tuple[int, ...]:
        """The slot that each application can read; where it reuses, that of the one it reads.

        >>> Plan(attention=(0, 1, 2), kv=(0, None, 1)).indices("kv")
        (0, 0, 1)
        """
        slots = self[part]
        sources = self.reads if part == "kv" else own(self.num_layers)
        return tuple(int(slots[source]) for source in sources)  # type: ignore[arg-type]

    def sets(self, part: str) -> tuple[int, ...]:
        """Numbers that are equal where applications compute with equal weights: of its slots or,
        where these are mixed, of its coefficients.

        >>> Plan(attention=(0, 1, 0), attention_mixture=(0, 1, 2)).sets("attention")
        (0, 1, 2)
        """
        return self.indices(mixtures(self).get(part, part))

    @property
    def memories(self) -> tuple[int, ...]:
        """Which keys and values each application reads, counted in the order of their making.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, None, 0, "@0")).memories
        (0, 0, 1, 0)
        """
        return gapless(self.reads)

    @property
    def places(self) -> tuple[int, ...]:
        """Where the keys and values that each application reads lie until the last has read them:
        in as few places as hold all that is still to be read.

        >>> Plan(attention=(0, 0, 0, 0), kv=(0, None, 1, None)).places
        (0, 0, 0, 0)
        >>> Plan(attention=(0, 0, 0, 0), kv=(0, 1, None, "@0")).places
        (0, 1, 1, 0)
        """
        sources = self.reads
        last = {source: i for i, source in enumerate(sources)}
        place: dict[int, int] = {}
        for i in dict.fromkeys(sources):
            taken = {place[j] for j in place if last[j] >= i}
            place[i] = min(set(range(len(taken) + 1)) - taken)
        return tuple(place[source] for source in sources)


def mixtures(parts: Iterable[str]) -> dict[str, str]:
    """part whose slots are mixed -> the part that holds the coefficients.

    >>> mixtures(["attention", "ffn", "attention_mixture"])
    {'attention': 'attention_mixture'}
    """
    names = set(parts)
    return {part: part + MIXTURE for part in parts if part + MIXTURE in names}


def followed(slots: Slots) -> tuple[int, ...]:
    """The application that makes what each reads. Raises ValueError for a pointer to nothing.

    >>> followed((0, 1, "@0", None, "@2"))
    (0, 1, 0, 1, 0)
    """
    reads: list[int] = []
    for i, slot in enumerate(slots):
        if isinstance(slot, int):
            reads.append(i)
            continue
        if slot is None and not reads:
            raise ValueError(
                "kv: the first application reuses keys and values that none has made; give it a "
                f"slot; got {slots}"
            )
        made = [j for j, source in enumerate(reads) if source == j]
        number = str(made[-1] if slot is None else slot.removeprefix("@"))
        if not number.isdigit() or int(number) >= len(slots):
            raise ValueError(
                f"kv: {slot!r} is no application; write '@0' to '@{i - 1}' or a slot; got {slots}"
            )
        if int(number) >= i:
            raise ValueError(
                f"kv: application {i} reads the keys and values of {number}, which are not made "
                "yet: that takes several passes over a text (arXiv 2405.10637), run_stack makes "
                "one; point to an earlier application"
            )
        reads.append(reads[int(number)])
    return tuple(reads)


def _shortest(slots: Slots) -> Slots:
    """Each pointer to what makes the keys and values; None where that is the last one before."""
    reads, short, last = followed(slots), list(slots), 0
    for i, source in enumerate(reads):
        if source == i:
            last = i
        else:
            short[i] = None if source == last else f"@{source}"
    return tuple(short)


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


def kv_map(partition: str, target: str, num_layers: int, count: int) -> Slots:
    """The part `kv` where `count` layers make keys and values, one of the nine maps of Wu et al.
    2024 (arXiv 2410.14442).

    Neighbours share: the layers behind the others ("pizza"), between them ("sandwich"), or all, in
    `count` groups ("lasagna"). Those of a group read what its first ("bottom"), middle or last
    layer ("top") makes; a `Plan` refuses a map in which a layer reads a later one. Pizza bottom
    is YOCO, and Gemma's last layers that read the last one with keys of its own; lasagna bottom
    is CLA and MLKV, sandwich top LCKV.

    >>> kv_map("pizza", "bottom", 6, 3), kv_map("sandwich", "top", 6, 3)
    ((0, 1, 2, '@2', '@2', '@2'), (0, '@4', '@4', '@4', 1, 2))
    """
    starts = {"pizza": count - 1, "sandwich": count // 2, "lasagna": 0}
    targets = {"bottom": lambda n: 0, "middle": lambda n: (n - 1) // 2, "top": lambda n: n - 1}
    if partition not in starts or target not in targets:
        raise ValueError(
            f"no map {partition!r} {target!r}; known: {', '.join(starts)}, each with "
            f"{', '.join(targets)}"
        )
    if not 1 <= count <= num_layers:
        raise ValueError(f"from 1 to {num_layers} layers make keys and values, not {count}")
    if partition == "lasagna":
        group = groups(num_layers, count)
    else:
        start, end = starts[partition], starts[partition] + num_layers - count
        group = tuple(start if start <= i <= end else i for i in range(num_layers))
    made: list[int] = []
    for name in dict.fromkeys(group):
        members = [i for i, its in enumerate(group) if its == name]
        made += [members[targets[target](len(members))]] * len(members)
    makers = sorted(set(made))
    return tuple(
        makers.index(source) if source == i else f"@{source}" for i, source in enumerate(made)
    )


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
