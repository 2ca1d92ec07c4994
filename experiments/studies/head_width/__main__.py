r"""Run a study: long-lived workers, one row per finished run, resumable at any moment.

    python -m experiments.studies.head_width --data=DATA --rows=docs/results/head_width/runs.csv \
        --workdir=WORK

Runs whose rows are in --rows are skipped; a stopped run continues from its checkpoint in --workdir.
SIGTERM saves and ends with exit code 75. --status prints how many runs are done, --pages writes the
tables, --analysis writes the registered analysis.

On one GPU, with learning rates from the rows of stages 0 and 1 (--measure=20 only times 20 steps
and prints an estimate for the whole study):

    python -m experiments.studies.head_width --config=experiments/studies/head_width/config.py:gpu \
        --data=DATA --rows=gpu_runs.csv --workdir=WORK [--measure=20]
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from attnlab.lab.worker import STOPPED
from attnlab.training.provenance import code_commit
from experiments import app
from experiments.studies.head_width import gpu_run, gpu_study
from experiments.studies.head_width.design import expected_runs
from experiments.studies.head_width.rates import fit_rates
from experiments.studies.head_width.rows import Row, check_origin, read_rows
from experiments.studies.head_width.run import Place
from experiments.studies.head_width.stages import run_stage, status
from experiments.studies.head_width.texts import check_texts, load_text
from experiments.studies.head_width.tuning_pages import write_pages

DEFAULT = "experiments/studies/head_width/config.py"
# Without a default: config_flags would read it, and fail on a wrong field, before `app.start`.
CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "A config file, or file.py:PRESET; left out: experiments/studies/head_width/config.py.",
)
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
    "measure",
    0,
    "With :gpu: only time so many steps and print an estimate for the study.",
    lower_bound=0,
)
ONE_OF = ("status", "pages", "analysis", "measure")
"""Each replaces the training."""
NOT_OF_GPU, ONLY_OF_GPU = ("pages", "jobs", "accept_commit"), ("measure", "tuned")


def tuned_rows(path: Path) -> list[Row]:
    """The rows of stage 1. Raises ValueError where there are none."""
    if found := [row for row in read_rows(path) if row.spec.stage == 1]:
        return found
    raise ValueError(f"--tuned={path} has no rows of stage 1; name a file of finished runs")


def run_on_gpu(scale: float, place: Place, path: Path) -> None:
    """The programs that have no scores yet, or their number or time."""
    formula = fit_rates(tuned_rows(Path(TUNED.value)))
    study = gpu_run.Study(formula, scale, path, place, say)
    if STATUS.value:
        print(study.status())
    elif MEASURE.value:
        say(study.measure(MEASURE.value))
    else:
        study.run()


def say(line: str) -> None:
    """A line with the time, on standard error."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


def check_flags(on_gpu: bool) -> None:
    """Raises ValueError on flags that are not of this study, exclude or miss one another."""
    for name in NOT_OF_GPU if on_gpu else ONLY_OF_GPU:
        if flags.FLAGS[name].present:
            way = "with" if on_gpu else "without"
            raise ValueError(f"--{name} has no effect {way} the preset :gpu; leave it out")
    asked = [name for name in ONE_OF if flags.FLAGS[name].value]
    if len(asked) > 1:
        raise ValueError(f"--{' and --'.join(asked)} exclude one another; give one of them")
    if not (asked or WORKDIR.value):
        raise ValueError("--workdir is needed: the folder of unfinished runs")


def write(path: Path, on_gpu: bool) -> None:
    """Writes what --pages or --analysis asks for. Raises ValueError where runs are missing."""
    folder = Path(PAGES.value or ANALYSIS.value or "")
    if on_gpu:
        from experiments.studies.head_width.gpu_page import write_page  # these need [lab]

        written = write_page(gpu_study.read_scores(path), folder)
    elif PAGES.value:
        written = write_pages(read_rows(path), folder)
    else:
        from experiments.studies.head_width.page import write_analysis

        written = write_analysis(read_rows(path), folder)
    print("\n".join(map(str, written)))


def run_stages(stages: Sequence[int], place: Place, path: Path) -> None:
    """Trains what has no row yet. Exits with `STOPPED` after a signal."""
    rows = read_rows(path)
    texts = {run.text for stage in stages for run in expected_runs(stage)}
    of_rows = {row.spec.text for row in rows}
    check_texts(sorted(texts | of_rows), place.data)
    digests = {name: load_text(name, place.data).sha256 for name in of_rows}
    check_origin(rows, [place.commit, *ACCEPT.value], digests)
    for stage in stages:
        if not run_stage(stage, place, path, JOBS.value, say):
            say("stopped; repeat the command to resume")
            sys.exit(STOPPED)
    say("done")


def main() -> None:
    """Runs the stages of --config, or does what the flags ask for instead."""
    if "stages" not in CONFIG.value:
        raise ValueError(f"--config is no config of this study; use {DEFAULT}")
    stages, path = CONFIG.value.stages, Path(ROWS.value)
    scale = CONFIG.value.get("gpu_scale")
    check_flags(bool(scale))
    if PAGES.value or ANALYSIS.value:
        return write(path, bool(scale))
    commit = code_commit(Path(__file__).parents[3])
    place = Place(Path(DATA.value), Path(WORKDIR.value or tempfile.gettempdir()), commit)
    if scale:
        run_on_gpu(scale, place, path)
    elif STATUS.value:
        print("\n".join(status(stages, read_rows(path), JOBS.value)))
    else:
        run_stages(stages, place, path)


if not any(word.lstrip("-").partition("=")[0] == "config" for word in sys.argv[1:]):
    sys.argv.insert(1, f"--config={DEFAULT}")
app.start(main)
