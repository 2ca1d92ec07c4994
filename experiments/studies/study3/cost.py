"""Seconds of runs, by measured steps and by rows, and what is left of a part."""

from collections.abc import Sequence

import pandas
from pandas import DataFrame

from attnlab.models import flops_per_token
from experiments.studies.study3.parts import PARTS, Group, count_runs
from experiments.studies.study3.rows import runs_of
from experiments.studies.study3.spec import BATCH_TOKENS, Run, Variant, model_config, num_steps

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


FLOPS = 65e9
"""A second on one core, of models that are not in `STEP`: between 8x8 and 4x16 of it."""


def run_seconds(variant: Variant) -> float:
    """Seconds of a run at the speed of `STEP`."""
    shape = variant.num_heads, variant.head_dim, variant.width, variant.length
    if variant.budget or variant.shared:
        each = flops_per_token(model_config(variant), variant.length)
        milliseconds = 3000.0 * each * BATCH_TOKENS / FLOPS
    else:
        milliseconds = STEP[shape] * FACTORS.get(variant.positions, 1.0)
        milliseconds *= FACTORS.get(variant.optimizer, 1.0)
    share = 0.5 if variant.start != "scratch" else 1.0  # the first half is another run's, mostly
    return OVERHEAD + share * num_steps(variant) * milliseconds / 1000


def measured_seconds(rows: DataFrame) -> pandas.Series:
    """CPU seconds of each row; of later rows, each on a core of its own, wall seconds."""
    return rows["cpu_seconds"].astype(float).fillna(rows["seconds"].astype(float))


def slowness(rows: DataFrame) -> float:
    """Seconds of these rows over those of `run_seconds`; 1 without rows."""
    rows = rows[rows["status"] == "complete"]
    expected = sum(run_seconds(run.variant) for run in runs_of(rows))
    return float(measured_seconds(rows).sum()) / expected if expected else 1.0


def _left(part: str, group: Group, runs: Sequence[Run]) -> float:
    """Seconds of the runs of a group that are left, at the speed of `STEP`."""
    total = 0.0
    for cell in group.cells:
        done = sum(
            run.variant == cell.variant
            and (run.role == "tuning" or run.replicate in cell.replicates)
            for run in runs
        )
        total += max(0, count_runs(part, cell) - done) * run_seconds(cell.variant)
    return total


def status(part: str, rows: DataFrame) -> list[str]:
    """A line for each group of a part, and one for all: runs, core-hours spent and to go."""
    rows = rows[rows["part"] == part]
    runs, slow, lines, left, planned = runs_of(rows), slowness(rows), [], 0.0, 0
    for group in PARTS.get(part, ()):
        count = sum(count_runs(part, cell) for cell in group.cells)
        hours = slow * _left(part, group, runs) / 3600
        lines.append(f"  {group.title}: {count} runs planned, {hours:.1f} core-hours to go")
        left, planned = left + hours, planned + count
    spent = float(measured_seconds(rows).sum()) / 3600
    return [
        *lines,
        f"part {part}: {len(rows)} of {planned} runs done (more where a grid was extended), "
        f"core-hours: {spent:.1f} spent, {left:.1f} to go",
    ]
