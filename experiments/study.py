"""Run a study: long-lived workers, one row per finished run, resumable at any moment.

    python -m experiments.study --config=experiments/configs/head_width.py \
        --data=DATA --rows=docs/results/head_width/runs.csv --workdir=WORK

Runs whose rows are in --rows are skipped; a stopped run continues from its checkpoint in --workdir.
SIGTERM saves and ends with exit code 75. --status prints how many runs are done, --pages writes the
tables, --analysis writes the registered analysis.

On one GPU, with learning rates from the rows of stages 0 and 1 (--measure=20 only times 20 steps
and prints an estimate for the whole study):

    python -m experiments.study --config=experiments/configs/head_width.py:gpu --data=DATA \
        --rows=gpu_runs.csv --workdir=WORK [--measure=20]
"""

import functools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from attnlab.lab.head_width import design, gpu_study
from attnlab.lab.head_width.executor import LocalExecutor
from attnlab.lab.head_width.rates import fit_rates
from attnlab.lab.head_width.rows import Row, append_row, check_origin, read_rows
from attnlab.lab.head_width.run import Place, remove_run, run_one
from attnlab.lab.head_width.spec import StudyRun, model_config, reference_parameters
from attnlab.lab.head_width.texts import load_text
from attnlab.lab.head_width.tuning_pages import write_pages
from attnlab.lab.worker import STOPPED
from attnlab.models import flops_per_token
from attnlab.training.provenance import code_commit

CONFIG = config_flags.DEFINE_config_file("config", "experiments/configs/head_width.py")
DATA = flags.DEFINE_string("data", "../shared/data", "Folder of the texts.")
ROWS = flags.DEFINE_string("rows", None, "CSV file of finished runs.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of unfinished runs.")
JOBS = flags.DEFINE_integer("jobs", 2, "Worker processes, one thread each.", lower_bound=1)
ACCEPT = flags.DEFINE_list("accept_commit", [], "Other commits whose rows may be in --rows.")
STATUS = flags.DEFINE_bool("status", False, "Only print how many runs are done.")
PAGES = flags.DEFINE_string("pages", None, "Only write the tables of --rows to this folder.")
ANALYSIS = flags.DEFINE_string(
    "analysis", None, "Only write analysis.md, its table and its figures to this folder."
)

TUNED = flags.DEFINE_string(
    "tuned", "docs/results/head_width/runs.csv", "With :gpu: rows whose learning rates are used."
)
MEASURE = flags.DEFINE_integer(
    "measure", 0, "With :gpu: only time so many steps and print an estimate for the study."
)

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


def run_stage(stage: int, place: Place, path: Path, jobs: int) -> bool:
    """Runs a stage until no run is left. Returns False where it was stopped."""
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


def run_on_gpu(scale: float, place: Place, path: Path) -> None:
    """The programs of `attnlab.lab.head_width.gpu_study` that have no scores yet, or their time."""
    tuned = [row for row in read_rows(Path(TUNED.value)) if row.spec.stage == 1]
    programs = gpu_study.programs(fit_rates(tuned), scale)
    wanted = gpu_study.left(programs, gpu_study.read_scores(path))
    mixture = gpu_study.Mixture(place, 0.001 if MEASURE.value else scale)
    if MEASURE.value:
        rate = gpu_study.measured_speed(mixture, MEASURE.value)
        flops = sum(map(gpu_study.program_flops, wanted))
        say(f"{rate:.3g} FLOP/s; {len(wanted)} programs of {flops:.3g} FLOP to go: "
            f"{flops / rate / 60:.1f} minutes, without compilation and scoring")  # fmt: skip
        return
    for number, program in enumerate(wanted, 1):
        gpu_study.append_scores(path, gpu_study.run_program(program, mixture, place))
        say(f"{program.id}: program {number} of {len(wanted)}")


def say(line: str) -> None:
    """A line with the time, on standard error."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    """Runs the stages of --config, or prints their status."""
    stages, path = CONFIG.value.stages, Path(ROWS.value)
    commit = code_commit(Path(__file__).parents[1])
    if scale := CONFIG.value.get("gpu_scale"):
        if not (WORKDIR.value or MEASURE.value):
            raise app.UsageError("--workdir is needed: the folder of unfinished runs")
        work = Path(WORKDIR.value or tempfile.mkdtemp())
        run_on_gpu(scale, Place(Path(DATA.value), work, commit), path)
        return
    rows = read_rows(path)
    if STATUS.value:
        print("\n".join(status(stages, rows, JOBS.value)))
        return
    if PAGES.value:
        print("\n".join(map(str, write_pages(rows, Path(PAGES.value)))))
        return
    if ANALYSIS.value:
        from attnlab.lab.head_width.page import write_analysis  # needs [plot]

        paths = write_analysis(rows, Path(ANALYSIS.value))
        print("\n".join(map(str, paths)))
        return
    if not WORKDIR.value:
        raise app.UsageError("--workdir is needed: the folder of unfinished runs")
    place = Place(Path(DATA.value), Path(WORKDIR.value), commit)
    digests = {name: load_text(name, place.data).sha256 for name in {r.spec.text for r in rows}}
    check_origin(rows, [place.commit, *ACCEPT.value], digests)
    for stage in stages:
        if not run_stage(stage, place, path, JOBS.value):
            say("stopped; repeat the command to resume")
            sys.exit(STOPPED)
    say("done")


if __name__ == "__main__":
    app.run(main)
