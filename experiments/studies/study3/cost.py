"""CPU seconds of runs, by measured steps and by rows, and what is left of a part."""

from collections.abc import Sequence

from experiments.studies.study3.parts import PARTS, Cell, count_runs
from experiments.studies.study3.rows import Row
from experiments.studies.study3.spec import Variant, num_steps

OVERHEAD = 12.0
"""CPU seconds of a run besides its steps: to compile, to score and to count n-grams."""
STEP = {
    (16, 4, 64, 128): 118.0, (8, 8, 64, 128): 63.0, (4, 16, 64, 128): 46.0,
    (2, 32, 64, 128): 37.4, (1, 64, 64, 128): 36.7, (4, 64, 64, 128): 75.0,
    (16, 4, 64, 256): 78.0, (8, 8, 64, 256): 68.0, (4, 16, 64, 256): 58.0,
    (2, 32, 64, 256): 48.0, (1, 64, 64, 256): 45.0,
    (16, 2, 32, 128): 84.0, (8, 4, 32, 128): 28.7, (4, 8, 32, 128): 11.4,
    (2, 16, 32, 128): 4.5, (1, 32, 32, 128): 3.6,
}  # fmt: skip
"""(num_heads, head_dim, width, length) -> CPU milliseconds of a step, rotary positions and Muon, on
a machine with little else to do: medians of the second study. 4x64, and 8x8 and 2x32 at T = 256,
are estimated. Under a load of 14 processes on two cores they are 2.2 times as long."""
FACTORS = {"t5": 1.1, "adamw_qk_norm": 1.17}
"""Positions or optimizer -> times as long a step."""


def run_seconds(variant: Variant) -> float:
    """CPU seconds of a run at the speed of `STEP`."""
    shape = variant.num_heads, variant.head_dim, variant.width, variant.length
    milliseconds = STEP[shape] * FACTORS.get(variant.positions, 1.0)
    milliseconds *= FACTORS.get(variant.optimizer, 1.0)
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
