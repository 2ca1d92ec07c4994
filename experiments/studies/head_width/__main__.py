r"""The head-width study: which head_dim and how many heads, at equal FLOPs per token?

    python -m experiments.studies.head_width --data=DATA --workdir=WORK

trains what has no row in docs/results/head_width/runs.csv and adds its rows; with --gpu=0.25, in
gpu_runs.csv, the study at D = 256 on a GPU. A stopped command resumes. With --analysis it writes
the pages of these rows instead (20 seconds), with --status how many runs are done.
"""

from collections.abc import Callable
from pathlib import Path

from absl import flags
from pandas import DataFrame

from attnlab import lab
from attnlab.training.provenance import code_commit
from experiments import app
from experiments.studies.head_width import design, gpu
from experiments.studies.head_width.rows import (
    COLUMNS,
    PUBLISHED,
    append_csv,
    check_origin,
    new_rows,
    read_csv,
    read_rows,
    runs_of,
)
from experiments.studies.head_width.spec import run_spec
from experiments.studies.head_width.texts import TEXTS, check_texts, load_text

RESULTS = flags.DEFINE_string("results", str(PUBLISHED), "Folder of the rows and the pages.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs that are trained.")
DATA = flags.DEFINE_string("data", "../shared/data", "Folder of the texts.")
STAGES = flags.DEFINE_list(
    "stages", list(map(str, design.ORDER)), "Stages in their order; -1: tiny."
)
GPU = flags.DEFINE_float(
    "gpu", None, "The study on a GPU in place of the stages, on this share of its bytes.",
    lower_bound=0.0, upper_bound=1.0,
)  # fmt: skip
JOBS = flags.DEFINE_integer("jobs", 2, "Runs at a time, of one thread each.", lower_bound=1)
ACCEPT = flags.DEFINE_list("accept_commit", [], "Other commits whose rows may be in the file.")
STATUS = flags.DEFINE_bool("status", False, "Only print how many runs are done.")
ANALYSIS = flags.DEFINE_bool("analysis", False, "Only write the pages and figures of the rows.")


def extend(
    path: Path,
    columns: list[str],
    wanted: Callable[[DataFrame], list[lab.RunSpec]],
    rows_of: Callable[[lab.Results], DataFrame],
    executor: lab.Executor,
) -> None:
    """Trains the runs that the rows ask for and adds their rows, until they ask for none.

    Args:
      path: CSV file of rows.
      columns: of the file.
      wanted: rows -> runs that have none.
      rows_of: results -> their rows.
      executor: of `lab.sweep`.
    """
    if not WORKDIR.value:
        raise ValueError("--workdir is needed: the folder of the runs")
    while specs := wanted(read_csv(path, columns)):
        append_csv(path, rows_of(lab.sweep(specs, WORKDIR.value, executor=executor)))


def run_stages(stages: list[int], folder: Path) -> None:
    """Trains the runs of these stages that have no row."""
    data, path, commit = (
        Path(DATA.value),
        folder / "runs.csv",
        code_commit(Path(__file__).parents[3]),
    )
    rows = read_rows(path)
    digests = {name: load_text(name, data).sha256 for name in set(rows["text"])}
    check_origin(rows, [commit, *ACCEPT.value], digests)
    executor = lab.LocalExecutor(JOBS.value, threads=1)
    for stage in stages:

        def wanted(rows: DataFrame, stage: int = stage) -> list[lab.RunSpec]:
            done = set(runs_of(rows))
            left = [run for run in design.stage_runs(stage, rows) if run not in done]
            check_texts({run.text for run in left}, data)
            return [run_spec(run, data) for run in left]

        extend(path, COLUMNS, wanted, lambda results: new_rows(results, data, commit), executor)


def run_on_gpu(share: float, folder: Path) -> None:
    """Trains the programs of the study on a GPU that have no scores."""
    data, commit, formula = (
        Path(DATA.value),
        code_commit(Path(__file__).parents[3]),
        gpu.published_formula(),
    )
    check_texts(TEXTS, data)
    extend(
        folder / "gpu_runs.csv",
        gpu.COLUMNS,
        lambda scores: [
            spec
            for program in gpu.next_programs(formula, scores, share)
            for spec in gpu.run_specs(program, data)
        ],
        lambda results: gpu.new_scores(results, commit),
        gpu.SeedsTogether(),
    )


def print_status(stages: list[int], folder: Path) -> None:
    """How many runs are done."""
    if GPU.value:
        scores = read_csv(folder / "gpu_runs.csv", gpu.COLUMNS)
        left = len(gpu.next_programs(gpu.published_formula(), scores, GPU.value))
        print(f"{left} programs to go, before any that depend on their scores")
        return
    rows = read_rows(folder / "runs.csv")
    for stage in stages:
        done = int((rows["stage"] == stage).sum())
        total = done + design.missing(stage, rows)
        print(f"stage {stage} ({design.TITLES[stage]}): {done} of {total} runs")


def read_stages() -> list[int]:
    """--stages. Raises ValueError for one that there is not."""
    known = {str(stage): stage for stage in design.TITLES}
    if unknown := [one for one in STAGES.value if one not in known]:
        raise ValueError(f"--stages: no stage {unknown[0]}; stages are {', '.join(known)}")
    return [known[one] for one in STAGES.value]


def main() -> None:
    """Trains, or does what the flags ask for instead."""
    folder, stages = Path(RESULTS.value), read_stages()
    if STATUS.value:
        print_status(stages, folder)
    elif ANALYSIS.value:
        from experiments.studies.head_width.page import write_pages

        print("\n".join(map(str, write_pages(folder))))
    elif GPU.value:
        run_on_gpu(GPU.value, folder)
    else:
        run_stages(stages, folder)


app.start(main)
