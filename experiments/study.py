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

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from attnlab.lab.head_width import gpu_study
from attnlab.lab.head_width.rates import fit_rates
from attnlab.lab.head_width.rows import check_origin, read_rows
from attnlab.lab.head_width.run import Place
from attnlab.lab.head_width.stages import run_stage, status
from attnlab.lab.head_width.texts import load_text
from attnlab.lab.head_width.tuning_pages import write_pages
from attnlab.lab.worker import STOPPED
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


def run_on_gpu(scale: float, place: Place, path: Path) -> None:
    """The programs of `attnlab.lab.head_width.gpu_study` that have no scores yet, or their time."""
    tuned = [row for row in read_rows(Path(TUNED.value)) if row.spec.stage == 1]
    programs = gpu_study.programs(fit_rates(tuned), scale)
    wanted = gpu_study.left(programs, gpu_study.read_scores(path))
    if STATUS.value:
        print(f"{len(programs) - len(wanted)}/{len(programs)} programs")
        return
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


def check_flags(on_gpu: bool) -> None:
    """Raises `app.UsageError` on flags that are not of this study or miss another one."""
    wrong = ("pages", "analysis") if on_gpu else ("measure",)
    why = "is of the registered stages, not of :gpu" if on_gpu else "needs the preset :gpu"
    for name in wrong:
        if flags.FLAGS[name].value:
            raise app.UsageError(f"--{name} {why}")
    only_reads = STATUS.value or PAGES.value or ANALYSIS.value or MEASURE.value
    if not (WORKDIR.value or only_reads):
        raise app.UsageError("--workdir is needed: the folder of unfinished runs")


def main(argv: Sequence[str]) -> None:
    """Runs the stages of --config, or prints their status."""
    stages, path = CONFIG.value.stages, Path(ROWS.value)
    scale = CONFIG.value.get("gpu_scale")
    check_flags(bool(scale))
    commit = code_commit(Path(__file__).parents[1])
    place = Place(Path(DATA.value), Path(WORKDIR.value or tempfile.gettempdir()), commit)
    if scale:
        run_on_gpu(scale, place, path)
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

        print("\n".join(map(str, write_analysis(rows, Path(ANALYSIS.value)))))
        return
    digests = {name: load_text(name, place.data).sha256 for name in {r.spec.text for r in rows}}
    check_origin(rows, [place.commit, *ACCEPT.value], digests)
    for stage in stages:
        if not run_stage(stage, place, path, JOBS.value, say):
            say("stopped; repeat the command to resume")
            sys.exit(STOPPED)
    say("done")


if __name__ == "__main__":
    app.run(main)
