"""The runs of parts A to F, in order, and the rule for learning rates: the plan in code."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from experiments.studies.head_width.rates import parabola_minimum
from experiments.studies.head_width.texts import TEXTS
from experiments.studies.study3.spec import (
    Run,
    Variant,
    log_rate,
    narrow_variant,
    num_steps,
    rate_centre,
)

ALL_TEXTS = tuple(TEXTS)
TUNING_TEXTS = ("python", "wikitext2")
STEP = 1.7
"""A grid whose best rate is at an end gets one more rate, so many times further, beyond it."""
MOST_EXTRA = 2
FIRST_SEED = 3_000_000
"""Judged seeds begin here, those of tuning 500,000 later; the earlier studies and pilots used less
than 100,000."""

Done: TypeAlias = Mapping[str, float]
"""Id of each run that has a row -> its validation bits."""


class Grid(NamedTuple):
    """Learning rates of a tuning grid, as multiples of its centre, and its texts."""

    factors: tuple[float, ...]
    texts: tuple[str, ...]


GRIDS = {
    "E": Grid((0.36, 0.6, 1.0, 1.7, 2.9), ("wikitext2",)),
    "F": Grid((0.6, 1.0, 1.7), ("wikitext2",)),
}
"""Part -> its grid; the others have `GRID`."""
GRID = Grid((0.6, 1.0, 1.7), TUNING_TEXTS)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A variant and the runs that judge it.

    Attributes:
      variant: what is trained.
      replicates: numbers of its seeds on each text.
      texts: on which it is judged.
      rate_of: the variant whose grid decides its rate, by the formula's ratio of both; None: its
        rate comes from a grid of its own.
    """

    variant: Variant
    replicates: tuple[int, ...] = (0,)
    texts: tuple[str, ...] = ALL_TEXTS
    rate_of: Variant | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Cells that are run together. A later group starts when they are complete."""

    title: str
    cells: tuple[Cell, ...]


class NotReady(ValueError):
    """A part needs rows of an earlier one."""


POINTS = {
    64: ((16, 4), (4, 16), (8, 8), (2, 32), (1, 64)),
    32: ((16, 2), (2, 16), (8, 4), (4, 8), (1, 32)),
}
"""(num_heads, head_dim) with num_heads x head_dim = D; the ends of A1 first."""
ENDS, MIDDLE = POINTS[64][:2], POINTS[64][2:]


def _cells(points: Sequence[tuple[int, int]], *positions: str, width: int = 64) -> tuple[Cell, ...]:
    return tuple(Cell(Variant(n, h, width, positions=p)) for p in positions for n, h in points)


def _adamw() -> tuple[Cell, ...]:
    return tuple(
        Cell(Variant(n, h, positions=p, optimizer="adamw_qk_norm"))
        for p in ("rotary", "t5")
        for n, h in ENDS
    )


def _learned() -> tuple[Cell, ...]:
    return tuple(
        Cell(Variant(n, h, 32, positions="learned", bytes_per_parameter=80.0))
        for n, h in POINTS[32]
    )


NARROW = Variant(4, 16, positions="t5")
WIDE = Variant(4, 64, positions="t5")
RESET = dataclasses.replace(NARROW, start="reset")
WIDE_RESET = dataclasses.replace(WIDE, start="reset")
CONVERTED = dataclasses.replace(WIDE, start="converted")
CONVERTED_OLD = dataclasses.replace(CONVERTED, scale="old")
WIDE_INVERSE = dataclasses.replace(WIDE, scale="inverse")


def cache_variant(kind: str, cache: int, optimizer: str = "muon") -> Variant:
    """A layout of part E that keeps 1 / `cache` of the numbers of 8 heads of 8.

    >>> cache_variant("mqa", 4).head_dim, cache_variant("gqa_double", 4).head_dim
    (16, 16)
    """
    num_heads, head_dim = {
        "fewer": (8 // cache, 8), "gqa_double": (8, 16), "mqa": (cache, 64 // cache)
    }.get(kind, (8, 8))  # fmt: skip
    whole_keys = kind not in ("mla", "grouped_tied")
    return Variant(num_heads, head_dim, length=256, positions="half" if whole_keys else "rotary",
                   optimizer=optimizer, kind=kind, cache=cache, budget="parameters")  # fmt: skip


MHA = cache_variant("standard", 1)
CACHE_KINDS = ("gqa", "mla", "tied", "cla", "gqa_double", "mqa", "fewer", "grouped_tied",
               "tensor_product")  # fmt: skip
NOT_AT_8 = ("gqa_double", "mqa", "tensor_product")
"""Kinds without a model of their own at 1/8: two keep more, and one key head of 8 is GQA."""


def at_cache(cache: int) -> list[Variant]:
    """The models of part E that keep 1 / `cache` of MHA's numbers; MLA has per-head Muon, too.

    >>> [len(at_cache(cache)) for cache in (2, 4, 8)]
    [10, 10, 7]
    """
    kinds = [kind for kind in CACHE_KINDS if cache < 8 or kind not in NOT_AT_8]
    found = [cache_variant(kind, cache) for kind in kinds]
    return [*found, cache_variant("mla", cache, "muon_per_head")]


def equal_flops(variant: Variant) -> Variant:
    """The same model of part E, trained with the FLOPs of multi-head attention: itself where its
    steps are as many."""
    other = dataclasses.replace(variant, budget="flops")
    return variant if num_steps(other) == num_steps(variant) else other


WIDTHS = (64, 96, 128)
DEPTH = 8
LAYER_TEXTS = tuple(text for text in ALL_TEXTS if text not in ("python", "tatoeba_en"))


def layers_variant(
    shared: str, repeats: int = 1, num_layers: int = DEPTH, width: int = 64, steps: int = 1920
) -> Variant:
    """A model of part F: heads of 16, all trained for the same bytes.

    >>> layers_variant("both", 4, width=128).bytes_per_parameter
    5.0
    """
    each = 20.0 * (64 / width) ** 2 * steps / 1920
    return Variant(width // 16, 16, width=width, bytes_per_parameter=round(each, 6), shared=shared,
                   repeats=repeats, num_layers=num_layers)  # fmt: skip


LAYER_CELLS: tuple[tuple[str, int, int], ...] = (
    *(("none", 1, n) for n in (8, 4, 2)),
    *((shared, r, 8) for shared in ("attention", "ffn", "both") for r in (2, 4, 8)),
)
"""(what is shared, by how many layers, number of layers): 12 of each width."""


def layers_cells(width: int, steps: int) -> tuple[Cell, ...]:
    """The cells of part F at a width and length of training; all but one take the rates of the
    grids at D = 64 and 1,920 steps."""
    tuned = (width, steps) == (64, 1920)
    return tuple(
        Cell(
            layers_variant(*cell, width=width, steps=steps),
            texts=LAYER_TEXTS,
            rate_of=None if tuned else layers_variant(*cell),
        )
        for cell in LAYER_CELLS
    )


PARTS: dict[str, tuple[Group, ...]] = {
    "A": (
        Group("A1: heads of 4 and 16, rotary and T5, D 64", _cells(ENDS, "rotary", "t5")),
        Group("other widths, rotary and T5, D 64", _cells(MIDDLE, "rotary", "t5")),
        Group(
            "A3: second seeds of 8x8 and 4x16, T5, D 64",
            tuple(
                Cell(one, (1,), rate_of=one)
                for one in (Variant(*point, positions="t5") for point in ((8, 8), (4, 16)))
            ),
        ),
        Group("A4: rotary on half a head, D 64", _cells(POINTS[64], "half")),
    ),
    "B": (
        Group(
            "B1: Muon per head, D 64",
            tuple(
                Cell(Variant(*point, optimizer="muon_per_head"))
                for point in ((16, 4), (8, 8), (4, 16))
            ),
        ),
    ),
    "C": (
        Group("4x64 from scratch", (Cell(WIDE),)),
        Group("C1, C2: converted, reset", tuple(map(Cell, (CONVERTED, WIDE_RESET, RESET)))),
        Group("other scales of scores", tuple(map(Cell, (WIDE_INVERSE, CONVERTED_OLD)))),
    ),
    "A64": (
        Group("AdamW with QK-norm, heads of 4 and 16, D 64", _adamw()),
        Group("rotary base 100, D 64", _cells(POINTS[64], "rotary100")),
    ),
    "D": (
        Group(
            "D1: copying, T 256, D 64",
            tuple(
                Cell(
                    Variant(*point, length=256),
                    tuple(range(8)),
                    TUNING_TEXTS,
                    rate_of=Variant(*point),
                )
                for point in POINTS[64]
            ),
        ),
    ),
    "A32": (
        Group("rotary and T5, D 32", _cells(POINTS[32], "rotary", "t5", width=32)),
        Group(
            "other positions, D 32",
            _cells(POINTS[32], "none", "rotary100", width=32)
            + _cells(POINTS[32][1:], "half", width=32),
        ),
        Group("learned positions at 80 bytes a parameter, D 32", _learned()),
    ),
    "E": (
        Group("MHA and 1/4 of its cache", tuple(map(Cell, (MHA, *at_cache(4))))),
        Group("1/2", tuple(map(Cell, at_cache(2)))),
        Group("1/8", tuple(map(Cell, at_cache(8)))),
        Group(
            "1/4, equal FLOPs",
            tuple(
                Cell(equal_flops(one), rate_of=one)
                for one in at_cache(4)
                if equal_flops(one) != one
            ),
        ),
    ),
    "F": (
        Group("D 64", layers_cells(64, 1920)),
        Group(
            "D 64, a half and a quarter of the bytes", layers_cells(64, 960) + layers_cells(64, 480)
        ),
        Group("D 96", layers_cells(96, 1920)),
        Group("D 128", layers_cells(128, 1920)),
    ),
}
"""In the order in which they are run; A64 is the rest of part A, and A32 part A at D = 32."""
JOINT = Group(
    "rotary heads whose q, k and v Muon joins, of part A",
    tuple(Cell(Variant(*point)) for point in ((16, 4), (8, 8), (4, 16))),
)
"""The other side of part B."""
PINNED_PARTS = ("A", "B", "C")
"""Their rows are of `rows.PINNED`."""


def seed_of(run_length: int, role: str, width: int, text: str, replicate: int) -> int:
    """One seed for each length, role, width, text and replicate: the same for every variant.

    >>> seed_of(128, "judged", 64, "python", 0), seed_of(128, "tuning", 64, "python", 0)
    (3064000, 3564000)
    """
    longer = 0 if run_length == 128 else 200_000
    tuning = 500_000 if role == "tuning" else 0
    return FIRST_SEED + longer + tuning + 1000 * width + 10 * ALL_TEXTS.index(text) + replicate


def find_part(variant: Variant) -> str:
    """The part with the grid of a variant."""
    for part, groups in PARTS.items():
        for group in groups:
            if any(c.variant == variant and c.rate_of is None for c in group.cells):
                return part
    raise ValueError(f"no part has a grid of {variant}")


def tuning(part: str, variant: Variant, done: Done) -> tuple[list[Run], float | None]:
    """(the tuning runs known so far, the best rate or None before they are complete).

    The rates of the part's grid around `rate_centre`, or around the rate before the reset. Where
    the lowest mean validation bits are at an end, one more rate beyond it, twice at most. The best
    rate is the minimum of the parabola in ln r through the lowest and those beside it; at an end
    after that, the end.

    Raises NotReady where the rate of the first half is not known.
    """
    first = 0.0
    if variant.start != "scratch":
        first = best_rate(narrow_variant(variant), done)
    grid, centre = GRIDS.get(part, GRID), first or rate_centre(variant)
    rates = [float(f"{centre * factor:.3g}") for factor in grid.factors]

    def runs_at(rate: float) -> list[Run]:
        return [
            Run(part, "tuning", variant, text, 0,
                seed_of(variant.length, "tuning", variant.width, text, 0), rate, first)
            for text in grid.texts
        ]  # fmt: skip

    while True:
        runs = {rate: runs_at(rate) for rate in rates}
        every = [run for one in runs.values() for run in one]
        if any(run.id not in done for run in every):
            return every, None
        mean = {r: float(np.mean([done[run.id] for run in one])) for r, one in runs.items()}
        best = min(mean, key=lambda rate: mean[rate])
        beyond = {min(rates): min(rates) / STEP, max(rates): max(rates) * STEP}
        if best not in beyond or len(rates) == len(grid.factors) + MOST_EXTRA:
            found = parabola_minimum(mean).log_rate
            return every, float(f"{math.exp(found):.4g}")
        rates.append(float(f"{beyond[best]:.3g}"))


def best_rate(variant: Variant, done: Done) -> float:
    """The best rate of a variant with a grid. Raises NotReady."""
    part = find_part(variant)
    rate = tuning(part, variant, done)[1]
    if rate is None:
        raise NotReady(f"part {part} lacks tuning runs of {variant.name}")
    return rate


def judged(part: str, cell: Cell, done: Done) -> list[Run]:
    """The judged runs of a cell, text by text. Raises NotReady."""
    variant, source = cell.variant, cell.rate_of or cell.variant
    first = 0.0
    if variant.start != "scratch":
        first = best_rate(narrow_variant(variant), done)
    ratio = math.exp(log_rate(variant) - log_rate(source))
    rate = float(f"{best_rate(source, done) * ratio:.4g}")
    return [
        Run(part, "judged", variant, text, replicate,
            seed_of(variant.length, "judged", variant.width, text, replicate), rate, first)
        for replicate in cell.replicates
        for text in cell.texts
    ]  # fmt: skip


def next_runs(part: str, done: Done) -> list[Run]:
    """The runs without rows that can be started now; empty when the part is complete.

    Raises NotReady where an earlier part is not complete enough.
    """
    if part == "tiny":
        return [run for run in tiny_runs() if run.id not in done]
    for group in PARTS[part]:
        ready: list[Run] = []
        for cell in group.cells:
            tuned = cell.rate_of is None
            runs, rate = tuning(part, cell.variant, done) if tuned else ([], 0.0)
            if rate is not None:
                runs = runs + judged(part, cell, done)
            ready += [run for run in runs if run.id not in done]
        if ready:
            return sorted(ready, key=lambda run: run.role == "judged")
    return []


def count_runs(part: str, cell: Cell) -> int:
    """Runs of a cell, without further rates beyond a grid."""
    grid = GRIDS.get(part, GRID)
    tuned = len(grid.factors) * len(grid.texts) if cell.rate_of is None else 0
    return tuned + len(cell.texts) * len(cell.replicates)


def tiny_runs() -> list[Run]:
    """A run of each kind at D = 16, seconds each: a check that all works, no part of the study."""
    base = Variant(4, 4, 16, 128, bytes_per_parameter=4.0)
    t5 = dataclasses.replace(base, positions="t5")
    scratch = [dataclasses.replace(base, positions=p) for p in ("rotary", "t5", "half", "none")]
    scratch += [dataclasses.replace(base, optimizer=o) for o in ("muon_per_head", "adamw_qk_norm")]
    small = dataclasses.replace
    scratch += [small(one, bytes_per_parameter=0.1) for one in (MHA, *at_cache(4))]
    scratch += [
        small(layers_variant(shared, r, layers), bytes_per_parameter=0.1)
        for shared, r, layers in (("none", 1, 2), ("attention", 2, 4), ("both", 4, 4))
    ]
    halves = [
        dataclasses.replace(t5, start="reset"),
        dataclasses.replace(t5, head_dim=64, start="converted"),
    ]
    longer = dataclasses.replace(base, length=256, bytes_per_parameter=33.0)
    return [
        *(Run("tiny", "judged", v, "python", 0, 5, 0.01) for v in scratch),
        *(Run("tiny", "judged", v, "python", 0, 5, 0.01, 0.01) for v in halves),
        Run("D", "judged", longer, "python", 0, 5, 0.01),
    ]
