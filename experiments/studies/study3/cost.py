"""CPU seconds of runs, by measured steps and by rows, and what is left of a part."""

from collections.abc import Sequence

from experiments.studies.study3.parts import PARTS, Cell, count_runs
from experiments.studies.study3.rows import Row
from experiments.studies.study3.spec import Variant, num_steps

OVERHEAD = 15.0
"""CPU seconds of a run besides its steps: to compile, to score and to count n-grams."""
ROTARY = {
    (16, 4, 64): 250.0, (8, 8, 64): 130.0, (4, 16, 64): 95.0, (2, 32, 64): 85.0, (1, 64, 64): 80.0,
    (4, 64, 64): 190.0,
    (16, 2, 32): 180.0, (8, 4, 32): 100.0, (4, 8, 32): 60.0, (2, 16, 32): 40.0, (1, 32, 32): 35.0,
}  # fmt: skip
"""CPU milliseconds of a step at T = 128 with rotary positions and Muon, on a busy machine."""
FACTORS = {"t5": 1.15, "learned": 0.95, "none": 0.95}
"""Positions -> times as long a step."""


def run_seconds(variant: Variant) -> float:
    """CPU seconds of a run on the machine on which `ROTARY` was measured."""
    shape = variant.num_heads, variant.head_dim, variant.width
    milliseconds = ROTARY[shape] * FACTORS.get(variant.positions, 1.0) * variant.length / 128
    share = 0.5 if variant.start != "scratch" else 1.0  # the first half is another run's, mostly
    return OVERHEAD + share * num_steps(variant) * milliseconds / 1000


def slowness(rows: Sequence[Row]) -> float:
    """CPU seconds of these rows over those of `run_seconds`; 1 without rows."""
    rows = [row for row in rows if row.scores.status == "complete"]
    expected = sum(run_seconds(row.spec.variant) for row in rows)
    return sum(row.origin.cpu_seconds for row in rows) / expected if expected else 1.0


def _left(cell: Cell, rows: Sequence[Row]) -> float:
    done = sum(
        row.spec.variant == cell.variant
        and (row.spec.role == "tuning" or row.spec.replicate in cell.replicates)
        for row in rows
    )
    return max(0, count_runs(cell) - done) * run_seconds(cell.variant)


def projected_seconds(part: str, rows: Sequence[Row]) -> float:
    """CPU seconds of the runs of a part that have no row, at the speed of its rows so far."""
    rows = [row for row in rows if row.spec.part == part]
    cells = [cell for group in PARTS.get(part, ()) for cell in group.cells]
    return slowness(rows) * sum(_left(cell, rows) for cell in cells)


def status(part: str, rows: Sequence[Row]) -> list[str]:
    """A line for each group of a part, and one for all: runs, core-hours spent and to go."""
    rows = [row for row in rows if row.spec.part == part]
    slow, lines = slowness(rows), []
    for group in PARTS.get(part, ()):
        planned = sum(map(count_runs, group.cells))
        left = slow * sum(_left(cell, rows) for cell in group.cells) / 3600
        lines.append(f"  {group.title}: {planned} runs planned, {left:.1f} core-hours to go")
    spent = sum(row.origin.cpu_seconds for row in rows) / 3600
    planned = sum(count_runs(cell) for group in PARTS.get(part, ()) for cell in group.cells)
    left = projected_seconds(part, rows) / 3600
    lines.append(
        f"part {part}: {len(rows)} of {planned} runs done (more where a grid was extended), "
        f"core-hours: {spent:.1f} spent, {left:.1f} to go"
    )
    return lines
