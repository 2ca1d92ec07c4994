"""The runs of parts A to D, in order, and the rule for learning rates: the plan in code."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from experiments.studies.head_width.rates import parabola_minimum
from experiments.studies.head_width.texts import TEXTS
from experiments.studies.study3.rows import Row
from experiments.studies.study3.spec import (
    FACTORS,
    Run,
    Variant,
    narrow_variant,
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
LENGTH_EXPONENT = 0.273
"""Of the best rate on T / 128, from the second study."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A variant and the runs that judge it.

    Attributes:
      variant: what is trained.
      replicates: numbers of its seeds on each text.
      texts: on which it is judged.
      tuned: its rate comes from a grid of its own; else from `best_rate` of part A.
    """

    variant: Variant
    replicates: tuple[int, ...] = (0,)
    texts: tuple[str, ...] = ALL_TEXTS
    tuned: bool = True


@dataclasses.dataclass(frozen=True)
class Group:
    """Cells that are run together. A later group starts when they are complete."""

    title: str
    cells: tuple[Cell, ...]


class NotReady(Exception):
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

PARTS: dict[str, tuple[Group, ...]] = {
    "A": (
        Group("A1: heads of 4 and 16, rotary and T5, D 64", _cells(ENDS, "rotary", "t5")),
        Group("other widths, rotary and T5, D 64", _cells(MIDDLE, "rotary", "t5")),
        Group(
            "A3: second seeds of 8x8 and 4x16, T5, D 64",
            tuple(
                Cell(Variant(*point, positions="t5"), (1,), tuned=False)
                for point in ((8, 8), (4, 16))
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
                Cell(Variant(*point, length=256), tuple(range(8)), TUNING_TEXTS, tuned=False)
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
}
"""In the order in which they are run; A64 is the rest of part A, and A32 part A at D = 32."""


def seed_of(run_length: int, role: str, width: int, text: str, replicate: int) -> int:
    """One seed for each length, role, width, text and replicate: the same for every variant.

    >>> seed_of(128, "judged", 64, "python", 0), seed_of(128, "tuning", 64, "python", 0)
    (3064000, 3564000)
    """
    longer = 0 if run_length == 128 else 200_000
    tuning = 500_000 if role == "tuning" else 0
    return FIRST_SEED + longer + tuning + 1000 * width + 10 * ALL_TEXTS.index(text) + replicate


def find_part(variant: Variant, *, tuned: bool = True) -> str:
    """The part with the (tuned) cell of a variant."""
    for part, groups in PARTS.items():
        for group in groups:
            if any(c.variant == variant and c.tuned == tuned for c in group.cells):
                return part
    raise ValueError(f"no part has a cell of {variant}")


def _tuning_runs(part: str, variant: Variant, rate: float, first: float) -> list[Run]:
    return [
        Run(part, "tuning", variant, text, 0,
            seed_of(variant.length, "tuning", variant.width, text, 0), rate, first)
        for text in TUNING_TEXTS
    ]  # fmt: skip


def tuning(part: str, variant: Variant, rows: Sequence[Row]) -> tuple[list[Run], float | None]:
    """(the tuning runs known so far, the best rate or None before they are complete).

    Three rates on two texts around `rate_centre`, or around the rate before the reset. Where the
    lowest mean validation bits are at an end, one more rate beyond it, twice at most. The best rate
    is the minimum of the parabola in ln r through the lowest and those beside it; at an end after
    that, the end.

    Raises NotReady where the rate of the first half is not known.
    """
    first = 0.0
    if variant.start != "scratch":
        first = best_rate(narrow_variant(variant), rows)
    centre = first or rate_centre(variant)
    rates = [float(f"{centre * factor:.3g}") for factor in FACTORS]
    bits = {row.spec.id: row.scores.validation_bits for row in rows}
    while True:
        runs = {rate: _tuning_runs(part, variant, rate, first) for rate in rates}
        every = [run for one in runs.values() for run in one]
        if any(run.id not in bits for run in every):
            return every, None
        mean = {r: float(np.mean([bits[run.id] for run in one])) for r, one in runs.items()}
        best = min(mean, key=lambda rate: mean[rate])
        beyond = {min(rates): min(rates) / STEP, max(rates): max(rates) * STEP}
        if best not in beyond or len(rates) == len(FACTORS) + MOST_EXTRA:
            found = parabola_minimum(mean).log_rate
            return every, float(f"{math.exp(found):.4g}")
        rates.append(float(f"{beyond[best]:.3g}"))


def best_rate(variant: Variant, rows: Sequence[Row]) -> float:
    """The best rate of a tuned cell. Raises NotReady."""
    part = find_part(variant)
    rate = tuning(part, variant, rows)[1]
    if rate is None:
        raise NotReady(f"part {part} lacks tuning runs of {variant}")
    return rate


def judged(part: str, cell: Cell, rows: Sequence[Row]) -> list[Run]:
    """The judged runs of a cell, text by text. Raises NotReady."""
    variant = cell.variant
    first = 0.0
    if variant.start != "scratch":
        first = best_rate(narrow_variant(variant), rows)
    at_128 = dataclasses.replace(variant, length=128)
    longer = (variant.length / 128) ** LENGTH_EXPONENT
    rate = float(f"{best_rate(at_128, rows) * longer:.4g}")
    return [
        Run(part, "judged", variant, text, replicate,
            seed_of(variant.length, "judged", variant.width, text, replicate), rate, first)
        for replicate in cell.replicates
        for text in cell.texts
    ]  # fmt: skip


def next_runs(part: str, rows: Sequence[Row]) -> list[Run]:
    """The runs without rows that can be started now; empty when the part is complete.

    Raises NotReady where an earlier part is not complete enough.
    """
    done = {row.spec.id for row in rows}
    for group in PARTS[part]:
        ready: list[Run] = []
        for cell in group.cells:
            runs, rate = tuning(part, cell.variant, rows) if cell.tuned else ([], 0.0)
            if rate is not None:
                runs = runs + judged(part, cell, rows)
            ready += [run for run in runs if run.id not in done]
        if ready:
            return sorted(ready, key=lambda run: run.role == "judged")
    return []


def count_runs(cell: Cell) -> int:
    """Runs of a cell, without further rates beyond a grid."""
    tuned = len(FACTORS) * len(TUNING_TEXTS) if cell.tuned else 0
    return tuned + len(cell.texts) * len(cell.replicates)


def tiny_runs() -> list[Run]:
    """A run of each kind at D = 16, seconds each: a check that all works, no part of the study."""
    base = Variant(4, 4, 16, 128, bytes_per_parameter=4.0)
    variants = [dataclasses.replace(base, positions=p) for p in ("rotary", "t5", "half", "none")]
    variants += [dataclasses.replace(base, optimizer=o) for o in ("muon_per_head", "adamw_qk_norm")]
    t5 = dataclasses.replace(base, positions="t5")
    variants += [dataclasses.replace(t5, start="reset")]
    runs = [
        Run("tiny", "judged", v, "python", 0, 5, 0.01, 0.0 if v.start == "scratch" else 0.01)
        for v in variants
    ]
    wide = dataclasses.replace(t5, head_dim=64, start="converted")
    return [
        *runs,
        Run("tiny", "judged", wide, "python", 0, 5, 0.01, 0.01),
        Run("D", "judged", dataclasses.replace(base, length=256), "python", 0, 5, 0.01),
    ]
