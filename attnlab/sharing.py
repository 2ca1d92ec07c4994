"""Which layer uses which weights. A plan is data: one slot number per application of a part."""


class Plan:
    """part -> slot per application, e.g. `Plan(attention=(0, 0, 0), ffn=(0, 1, 2))`.

    A hashable read-only mapping. Slots count from 0 without gaps, so the slots of a part stack
    to [G, ...]. Checked here because JAX clamps an index that is out of range in silence.

    >>> Plan(attention=(0, 0), ffn=(0, 1)).num_slots
    {'attention': 1, 'ffn': 2}
    """

    __slots__ = ("_parts",)

    def __init__(self, **parts):
        self._parts = {name: tuple(slots) for name, slots in parts.items()}
        lengths = {name: len(slots) for name, slots in self.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"every part needs one slot per application; got {lengths}")
        for name, slots in self.items():
            if set(slots) != set(range(max(slots) + 1)):
                raise ValueError(f"{name}: slots must be 0, 1, 2, ... without gaps; got {slots}")

    def __getitem__(self, part):
        return self._parts[part]

    def __iter__(self):
        return iter(self._parts)

    def __len__(self):
        return len(self._parts)

    def items(self):
        """(part, slots) pairs, as of a dict."""
        return self._parts.items()

    def __eq__(self, other):
        return isinstance(other, Plan) and self._parts == other._parts

    def __hash__(self):
        return hash(tuple(sorted(self.items())))

    def __repr__(self):
        return f"Plan({', '.join(f'{part}={slots}' for part, slots in self.items())})"

    @property
    def num_layers(self):
        """Applications of each part."""
        return len(next(iter(self._parts.values())))

    @property
    def num_slots(self):
        """part -> number of weight sets."""
        return {name: max(slots) + 1 for name, slots in self.items()}


def own(num_layers):
    """Each layer its own slot: 0, 1, 2, ..."""
    return tuple(range(num_layers))


def one(num_layers):
    """All layers one slot: 0, 0, 0, ..."""
    return (0,) * num_layers


PLANS = {
    # Vaswani et al. 2017; what tensor2tensor, BERT and GPT-2 do.
    "separate": lambda n: Plan(attention=own(n), ffn=own(n)),
    # The other three are the rows of ALBERT's Table 4 (Lan et al. 2019, arXiv 1909.11942).
    "albert": lambda n: Plan(attention=one(n), ffn=one(n)),
    "attention_only": lambda n: Plan(attention=one(n), ffn=own(n)),
    "ffn_only": lambda n: Plan(attention=own(n), ffn=one(n)),
}
