"""`HeadSpec`: layout and sizes of a set of heads, checked; the weights that follow from them."""

import dataclasses

from attnlab.heads.layouts import INPUT_AXES, LAYOUTS, Absorbed, Layout
from attnlab.names import find
from attnlab.norms import NORM_KINDS

# The weights that make keys and values, where a layout has them.
MEMORY_NAMES = ("k_outer", "v_outer", "k", "v", "k_bias", "v_bias", "k_norm")


WEIGHT_NAMES = {*INPUT_AXES, *(f"{letter}_bias" for letter in "qkvo"), "q_norm", "k_norm"}


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Layout and sizes of a set of heads: frozen, hashable, complete.

    Sizes left None take the layout's own: `head_dim` = D/N (`standard`, `narrow`, `narrow_tied`,
    `alt`, `two_stage`) or D (`wide`); `value_dim` = head_dim, D/N where the layout has no head_dim
    (`collaborative`, `bilinear`); `shared_dim` (`collaborative`) and the input and output widths =
    `width`; `num_kv_heads` = num_heads. `num_kv_heads=1` is multi-query attention (Shazeer 2019,
    arXiv 1911.02150), between 1 and num_heads grouped-query (Ainslie 2023, arXiv 2305.13245).

    `scale` multiplies the scores; None is 1/sqrt(width of q). `biases` holds the letters of the
    maps that have one, of "qkvo". `output=False` leaves W_O out: the output is the heads side by
    side. `qk_norm` normalises q and k per head, with a learnt scale: "layer" (Dehghani et al.
    2023, arXiv 2302.05442; Flax's `normalize_qk`) or "rms" (Qwen3).

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
    scale: float | None = None
    biases: str = ""
    output: bool = True
    qk_norm: str | None = None

    def __post_init__(self):
        row = find("layout", self.layout, LAYOUTS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")
        letters = "".join(row.axes.values())
        self._check_sizes(row, letters)
        self._check_maps(row)
        needs_chunk = "C" in letters or "C" in (
            self.head_dim or row.head_dim,
            self.value_dim or row.value_dim,
        )
        if needs_chunk and self.width % self.num_heads:
            free = "head_dim" if "H" in letters else "value_dim"
            way_out = (
                "change one of them" if "C" in letters else f"set {free} or change one of them"
            )
            raise ValueError(
                f"layout {self.layout!r}: width {self.width} is not divisible by "
                f"{self.num_heads} heads; {way_out}"
            )

    def _check_sizes(self, row: Layout, letters: str) -> None:
        """A size that the layout has no axis for is refused, not ignored."""
        fixed = {"H": "head_dim", "V": "value_dim", "R": "shared_dim", "E": "key_width"}
        for letter, name in (fixed | {"W": "value_width"}).items():
            value = getattr(self, name)
            if letter in letters or value is None or (letter in "EW" and value == self.width):
                continue
            reason = {
                "R": "only 'collaborative' has one",
                "E": f"each head reads a chunk of x, so it must equal width ({self.width})",
                "W": f"each head reads a chunk of x, so it must equal width ({self.width})",
            }.get(letter, "its heads are as wide as what they read")
            raise ValueError(f"layout {self.layout!r} takes no {name}: {reason}; leave it out")
        if self.num_kv_heads is None:
            return
        if "K" not in letters:
            raise ValueError(
                f"layout {self.layout!r} has no key heads to choose; "
                "leave num_kv_heads out or use layout 'standard'"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )

    def _check_maps(self, row: Layout) -> None:
        if not set(self.biases) <= set("qkvo") or len(set(self.biases)) != len(self.biases):
            raise ValueError(f"biases must be letters of 'qkvo', not {self.biases!r}")
        maps = set(row.biases) - ({"o"} if not self.output else set())
        if not set(self.biases) <= maps:
            raise ValueError(
                f"layout {self.layout!r}{'' if self.output else ' without output'} has no map for "
                f"bias {min(set(self.biases) - maps)!r}; use letters of {''.join(sorted(maps))!r}"
            )
        if not self.output and "o" not in row.axes:
            raise ValueError(f"layout {self.layout!r} is made of output maps; output must be True")
        if not self.output and self.out_width is not None:
            raise ValueError("output=False has no output map; leave out_width out")
        if self.qk_norm is not None:
            find("qk_norm", self.qk_norm, NORM_KINDS)
            if "qk" in row.axes:
                raise ValueError(
                    f"layout {self.layout!r} has no separate q and k; leave qk_norm out"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letter -> size, with every None resolved."""
        d, n, row = self.width, self.num_heads, LAYOUTS[self.layout]
        sizes = {
            "D": d,
            "N": n,
            "C": d // n,
            "K": self.num_kv_heads or n,
            "E": self.key_width or d,
            "W": self.value_width or d,
            "R": self.shared_dim or d,
        }
        sizes["H"] = self.head_dim or sizes[row.head_dim]
        sizes["V"] = self.value_dim or sizes[row.value_dim]
        # An absorbed value bias rides on one more column, of ones.
        sizes["V"] += row.value_dim == "W" and "v" in self.biases
        return sizes | {"O": self.out_width or d if self.output else n * sizes["V"]}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight name -> shape, biases included."""
        return {name: tuple(self.sizes[a] for a in axes) for name, axes in weight_axes(self)}

    @property
    def score_scale(self) -> float:
        """What multiplies q k^T."""
        return self.sizes["H"] ** -0.5 if self.scale is None else self.scale


def weight_axes(spec: HeadSpec) -> list[tuple[str, str]]:
    """(weight name, its axis letters) for every weight of `spec`, biases and norms included."""
    row = LAYOUTS[spec.layout]
    rows = [(name, axes.replace(" ", "")) for name, axes in row.axes.items()]
    rows = [(name, axes) for name, axes in rows if spec.output or name != "o"]
    rows += [
        (f"{letter}_bias", axes) for letter, axes in row.biases.items() if letter in spec.biases
    ]
    return rows + ([("q_norm", "H"), ("k_norm", "H")] if spec.qk_norm else [])


def absorption(spec: HeadSpec) -> list[Absorbed]:
    """The steps from `spec` along the rows that are the same function.

    >>> [step.spec.layout for step in absorption(HeadSpec("narrow_tied", width=6, num_heads=2))]
    ['narrow', 'standard', 'bilinear', 'absorbed']
    """
    absorb = LAYOUTS[spec.layout].absorb
    step = absorb and absorb(spec)
    return [step, *absorption(step.spec)] if step else []
