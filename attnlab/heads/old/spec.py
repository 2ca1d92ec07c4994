"""`HeadSpec`: layout and sizes of a set of heads, checked; the weights that follow from them."""

import dataclasses

from attnlab.heads.old import beside
from attnlab.heads.old.absorb import Absorbed, untie_maps
from attnlab.heads.old.layouts import LAYOUTS, Layout
from attnlab.heads.old.maps import Map, parse
from attnlab.names import find
from attnlab.norms import NORM_KINDS

FIELDS = {
    "K": "num_kv_heads", "H": "head_dim", "V": "value_dim", "R": "shared_dim",
    "E": "key_width", "W": "value_width", "M": "latent_dim", "Q": "query_latent_dim",
    "P": "rotary_dim", "X": "query_rank", "Y": "key_rank", "Z": "value_rank",
    "A": "extra_keys",
}  # fmt: skip
"""Axis letter -> the field that sizes it."""

BIASES = "qkvoa"


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Layout and sizes of a set of heads: frozen, hashable, complete.

    Sizes left None take the layout's own: `head_dim` = D/N (`standard`, `narrow`, `narrow_tied`,
    `alt`, `two_stage`, `latent`: the part without positions) or D (`wide`); `value_dim` = head_dim,
    D/N where the layout has no head_dim (`collaborative`, `bilinear`); `shared_dim`
    (`collaborative`) and the input and output widths = `width`; `num_kv_heads` = num_heads;
    `latent_dim` = 4 head_dim and `rotary_dim` = head_dim/2, made even (`latent`; its queries read x
    where `query_latent_dim` is None). `low_rank_q` has one key head, heads of 2 D/N and a
    `query_latent_dim` of D/2; `grouped_tied` shares half of a head (`head_dim` = value_dim/2) and
    turns as many (`rotary_dim`); `tensor` is of `query_rank` 6, `key_rank` and `value_rank` 2.
    `num_kv_heads=1` is multi-query attention (Shazeer 2019, arXiv 1911.02150), between 1 and
    num_heads grouped-query (Ainslie 2023, arXiv 2305.13245).

    `scale` multiplies the scores; None is 1/sqrt(width of q). `biases` holds the letters of the
    maps that have one, of "qkvo", and "a" for the factors of the heads (`tensor`). `output=False`
    leaves W_O out: the output is the heads side by side. `qk_norm` normalises q and k per head,
    with a learnt scale: "layer" (Dehghani et al. 2023, arXiv 2302.05442; Flax's `normalize_qk`) or
    "rms" (Qwen3), and with `qk_norm_bias` a learnt bias (pbloem/former's `kqnorm`);
    `latent_norm=False` leaves out the norms of latents, which are then plain
    products of two maps; `norm_eps` is the epsilon of all norms inside the heads (1e-6 is Flax's).

    `gate` multiplies what a head gives by a sigmoid of a linear map of x: one number per "head" or
    one per "element" of it (Qiu et al. 2025, arXiv 2505.06708). `sink` is one more score in every
    softmax, whose probability goes nowhere: "learnt" per head (gpt-oss) or "one", a score of 0,
    which adds one to the sum. `ties` says which maps are one: "kv" (a token's value is its key,
    before norm and turning, so that without these a cache holds one of them), "qk" or "qkv".
    `extra_keys` are so many learnt keys and values for each key head, which no input has and every
    query sees (torch's `bias_k` and `bias_v`; its `add_zero_attn` is sink="one").

    Raises ValueError, saying what to change, for an impossible combination.
    """

    layout: str
    width: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    out_width: int | None = None
    shared_dim: int | None = None
    latent_dim: int | None = None
    query_latent_dim: int | None = None
    rotary_dim: int | None = None
    query_rank: int | None = None
    key_rank: int | None = None
    value_rank: int | None = None
    scale: float | None = None
    biases: str = ""
    output: bool = True
    qk_norm: str | None = None
    latent_norm: bool = True
    norm_eps: float = 1e-6
    gate: str | None = None
    sink: str | None = None
    ties: str = ""
    extra_keys: int | None = None
    qk_norm_bias: bool = False

    def __post_init__(self):
        row = find("layout", self.layout, LAYOUTS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")
        self._check_sizes(row)
        self._check_ties(row)
        self._check_maps(row)
        self._check_beside(row)
        if "C" in row.letters and self.width % self.num_heads:
            raise ValueError(self._no_chunk("change one of them"))
        row.check(self.layout, self.sizes)

    def _check_sizes(self, row: Layout) -> None:
        """A size that the layout has no axis for is refused, not ignored."""
        for letter, name in FIELDS.items():
            value = getattr(self, name)
            if letter in row.letters or value is None or (letter in "EW" and value == self.width):
                continue
            if letter == "K":
                raise ValueError(
                    f"layout {self.layout!r} has no key heads to choose; "
                    "leave num_kv_heads out or use layout 'standard'"
                )
            owners = [repr(n) for n, other in LAYOUTS.items() if letter in other.letters]
            told = " and ".join([", ".join(owners[:-1]), owners[-1]] if owners[1:] else owners)
            reason = f"only {told} {'have' if owners[1:] else 'has'} one"
            if letter in "HV":
                reason = "its heads are as wide as what they read"
            if letter in "EW":
                reason = f"it reads texts as wide as x, so it must equal width ({self.width})"
            raise ValueError(f"layout {self.layout!r} takes no {name}: {reason}; leave it out")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )

    def _check_maps(self, row: Layout) -> None:
        """A bias, a norm or a missing output map that the layout does not know is refused."""
        if not set(self.biases) <= set(BIASES) or len(set(self.biases)) != len(self.biases):
            raise ValueError(f"biases must be letters of {BIASES!r}, not {self.biases!r}")
        letters = self.bias_letters(self.layout, self.output, self.ties)
        if not set(self.biases) <= set(letters):
            raise ValueError(
                f"layout {self.layout!r}{'' if self.output else ' without output'} has no map for "
                f"bias {min(set(self.biases) - set(letters))!r}; use letters of {letters!r}"
            )
        if not self.output and "output" not in row.asks:
            raise ValueError(f"layout {self.layout!r} is made of output maps; output must be True")
        if not self.output and self.out_width is not None:
            raise ValueError("output=False has no output map; leave out_width out")
        if self.qk_norm is not None:
            find("qk_norm", self.qk_norm, NORM_KINDS)
            if "qk_norm" not in row.asks:
                raise ValueError(
                    f"layout {self.layout!r} has no q and k to normalise; leave qk_norm out"
                )
        if self.qk_norm_bias and self.qk_norm != "layer":
            raise ValueError("qk_norm_bias is the bias of a layer norm; set qk_norm='layer'")
        if not self.latent_norm and "latent_norm" not in row.asks:
            raise ValueError(f"layout {self.layout!r} has no latent; leave latent_norm out")

    def _check_ties(self, row: Layout) -> None:
        """The maps that are one are there, and of one shape."""
        find("ties", self.ties, dict.fromkeys(("", "kv", "qk", "qkv")))
        maps = [parse(name, text) for name, text in row.maps.items()]
        can = {one.word for one in maps if one.fields == ("ties",)}
        if odd := sorted(set(self.ties) & {"q", "v"} - can):
            raise ValueError(
                f"layout {self.layout!r} has no map of {odd[0]!r} that could be that of k; "
                f"leave {odd[0]!r} out of ties"
            )
        s, alike = self.sizes, {"q": ("NK", "DE"), "v": ("VH", "WE")}
        for pair in (pair for letter in "qv" if letter in self.ties for pair in alike[letter]):
            one, two = pair[0], pair[1]
            if s[one] != s[two]:
                raise ValueError(
                    f"ties {self.ties!r} make maps one that differ: {FIELDS.get(one, 'num_heads')} "
                    f"{s[one]} and {FIELDS.get(two, 'width')} {s[two]} must be equal"
                )

    def _check_beside(self, row: Layout) -> None:
        """What stands beside the row fits it."""
        for field, words in beside.WORDS.items():
            if getattr(self, field) is not None:
                find(field, getattr(self, field), dict.fromkeys(words))
        if self.gate == "element" and not (row.values == "V" and "V" in row.letters):
            raise ValueError(
                f"layout {self.layout!r} merges W_V and W_O, so there is no gate per element "
                "between them; use gate='head'"
            )

    @staticmethod
    def bias_letters(layout: str, output: bool = True, ties: str = "") -> str:
        """The letters of `BIASES` that `biases` may hold: those of maps that are there.

        >>> HeadSpec.bias_letters("bilinear")
        'oqv'
        """
        maps = (parse(name, text) for name, text in LAYOUTS[layout].maps.items())
        letters = {one.word for one in maps if "biases" in one.fields}
        gone = {"v"} & set(ties) | ({"k"} if "q" in ties else set())
        return "".join(sorted(letters - gone - (set() if output else {"o"})))

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letter -> size, with every None resolved."""
        d, n, row = self.width, self.num_heads, LAYOUTS[self.layout]
        sizes = {"D": d, "N": n} | ({} if d % n else {"C": d // n})
        sizes |= {"A": self.extra_keys} if self.extra_keys else {}
        defaults = {"K": n, "E": d, "W": d, "R": d}
        sizes |= {a: getattr(self, FIELDS[a]) or size for a, size in defaults.items()}
        for letter, default in row.sizes.items():
            field = FIELDS[letter]
            try:
                sizes[letter] = getattr(self, field) or default(self, sizes)
            except KeyError:  # C, which is no whole number
                raise ValueError(self._no_chunk(f"set {field} or change one of them")) from None
        return sizes | {"O": self.out_width or d if self.output else n * sizes["V"]}

    def _no_chunk(self, way_out: str) -> str:
        return (
            f"layout {self.layout!r}: width {self.width} is not divisible by {self.num_heads} "
            f"heads; {way_out}"
        )

    def size(self, letters: str) -> int:
        """Of a sum of letters, as "H + P"."""
        return sum(self.sizes[letter] for letter in letters.split(" + "))

    @property
    def maps(self) -> dict[str, Map]:
        """Weight name -> what its string in the row says, for every weight of this spec."""
        row = LAYOUTS[self.layout].maps | beside.MAPS
        maps = {name: parse(name, text) for name, text in row.items()}
        return {name: one for name, one in maps.items() if one.is_there(self)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight name -> shape, biases and norms included."""
        return {name: tuple(self.sizes[a] for a in axes) for name, axes in weight_axes(self)}

    @property
    def tied(self) -> dict[str, str]:
        """Of q, k and v -> the map that makes it.

        >>> HeadSpec("standard", 6, 2, ties="qk").tied
        {'q': 'q', 'k': 'q', 'v': 'v'}
        """
        k = "q" if "q" in self.ties else "k"
        return {"q": "q", "k": k, "v": k if "v" in self.ties else "v"}

    def keys_are_values(self, rotary: bool) -> bool:
        """Is a key, as the scores read it, the value too?"""
        return "v" in self.ties and not self.qk_norm and not rotary

    @property
    def score_scale(self) -> float:
        """What multiplies q k^T."""
        return self.size(LAYOUTS[self.layout].scores) ** -0.5 if self.scale is None else self.scale

    @property
    def turned(self) -> int | None:
        """How many numbers of a query rotary positions turn; None where they cannot."""
        letter = LAYOUTS[self.layout].turned
        return None if letter is None else self.sizes[letter]


def weight_axes(spec: HeadSpec) -> list[tuple[str, str]]:
    """(weight name, its axis letters) for every weight of `spec`, biases and norms included."""
    return [(name, one.axes) for name, one in spec.maps.items()]


def under_order(spec: HeadSpec, order: str) -> HeadSpec:
    """The spec that an order of contraction computes with.

    >>> under_order(HeadSpec("wide", width=6, num_heads=2), "bilinear").layout
    'bilinear'
    """
    reached = {"factored": spec} | {step.spec.layout: step.spec for step in absorption(spec)}
    return find(f"order of layout {spec.layout!r}", order, reached)


def bare(spec: HeadSpec) -> HeadSpec:
    """The spec without what stands between its matrices: the longest `absorption`.

    >>> [len(absorption(f(HeadSpec("wide", 6, 2, qk_norm="rms")))) for f in (lambda a: a, bare)]
    [0, 2]
    """
    gate = None if spec.gate == "element" else spec.gate
    return dataclasses.replace(spec, qk_norm=None, qk_norm_bias=False, gate=gate, extra_keys=None)


def absorption(spec: HeadSpec) -> list[Absorbed]:
    """The steps from `spec` along the rows that are the same function.

    >>> [step.spec.layout for step in absorption(HeadSpec("narrow_tied", width=6, num_heads=2))]
    ['narrow', 'standard', 'bilinear', 'absorbed']
    """
    absorb = untie_maps if spec.ties else LAYOUTS[spec.layout].absorb
    step = absorb and absorb(spec)
    return [step, *absorption(step.spec)] if step else []
