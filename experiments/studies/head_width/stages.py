"""Runs the stages of the study in worker processes and says how far they are."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from attnlab.models import flops_per_token
from experiments.studies.head_width import design
from experiments.studies.head_width.executor import LocalExecutor
from experiments.studies.head_width.rows import Row, append_row, read_rows
from experiments.studies.head_width.run import Place, remove_run, run_one
from experiments.studies.head_width.spec import StudyRun, model_config, reference_parameters

GUESS = 45e9
"""FLOP/s of a worker before any row is there."""


def run_flops(run: design.Planned) -> float:
    """FLOPs of a training: three forward passes."""
    total = run.bytes_per_parameter * reference_parameters(run.variant.width)
    return 3.0 * flops_per_token(model_config(run.variant), run.variant.length) * total


def row_flops(row: Row) -> float:
    """FLOPs of the training of a row."""
    return 3.0 * row.sizes.flops_per_token * row.sizes.bytes_trained


def status(stages: Sequence[int], rows: Sequence[Row], jobs: int) -> list[str]:
    """One line per stage: runs done of all, measured and projected core-hours."""
    spent = sum(row.origin.seconds for row in rows if row.scores.status == "complete")
    done_flops = sum(row_flops(row) for row in rows if row.scores.status == "complete")
    speed = done_flops / spent if spent else GUESS
    lines, left_hours = [], 0.0
    for stage in stages:
        expected = design.expected_runs(stage)
        done = [row for row in rows if row.spec.stage == stage]
        try:
            total = len(design.stage_runs(stage, rows))
        except design.NotReady:
            total = len(expected)
        hours = sum(row.origin.seconds for row in done) / 3600
        share = max(0, total - len(done)) / len(expected)
        left = share * sum(map(run_flops, expected)) / speed / 3600
        left_hours += left
        title = design.TITLES.get(stage, "tiny")
        lines.append(
            f"stage {stage} ({title}): {len(done)}/{total} runs, {hours:.2f} core-hours spent, "
            f"{left:.2f} to go"
        )
    lines.append(f"{left_hours / jobs:.1f} hours to go with {jobs} free cores")
    return lines


def run_stage(
    stage: int, place: Place, path: Path, jobs: int, say: Callable[[str], None] = print
) -> bool:
    """Runs a stage until no run is left; `say` gets a line per run.

    Returns False where it was stopped.
    """
    run = functools.partial(run_one, place=place)
    with LocalExecutor[StudyRun, Row](run, jobs) as executor:
        while not executor.stopped:
            rows = read_rows(path)
            done = {row.spec.id for row in rows}
            specs = design.stage_runs(stage, rows)
            left = [spec for spec in specs if spec.id not in done]
            if not left:
                return True
            if stage > 0:
                left.sort(key=longest_first)
            for spec, row in executor.results(left):
                append_row(path, row)
                remove_run(spec, place)
                say(f"{spec.id} {row.scores.validation_bits:.4f} in {row.origin.seconds:.0f} s")
                say(status([stage], read_rows(path), jobs)[0])
    return False


def longest_first(spec: StudyRun) -> tuple[int, float]:
    """The order of runs in a stage: replicates of judged runs one after the other, then FLOPs."""
    run = design.Planned(spec.variant, spec.text, 0, spec.bytes_per_parameter)
    return spec.seed % 10 if spec.stage > 1 else 0, -run_flops(run)
