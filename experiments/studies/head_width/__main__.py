r"""The head-width study: which head_dim and how many heads, at equal FLOPs per token?

    python -m experiments.studies.head_width --data=DATA --results=NEW --workdir=WORK

trains the runs of docs/results/head_width/runs.csv that have no row in NEW/runs.csv and adds their
rows; with --gpu, those of gpu_runs.csv: the study at D = 256 on a GPU. A stopped command resumes.
With --analysis it writes the pages of the rows instead (20 seconds).
"""

import dataclasses
from pathlib import Path

from absl import flags

from attnlab import lab
from attnlab.lab.machine import code_commit
from experiments import app
from experiments.studies.head_width import gpu, rows, texts
from experiments.studies.head_width.design import STAGES
from experiments.studies.head_width.spec import run_spec

ROOT = Path(__file__).parents[3]
RESULTS = flags.DEFINE_string("results", str(rows.PUBLISHED), "Folder of the rows and the pages.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs that are trained.")
DATA = flags.DEFINE_string("data", "../shared/data", "Folder of the texts.")
ONLY = flags.DEFINE_list("stages", list(map(str, STAGES)), "Stages in their order.")
GPU = flags.DEFINE_bool("gpu", False, "The study on a GPU in place of the stages.")
SHARE = flags.DEFINE_float(
    "share", 1.0, "Share of the bytes of each run, below 1 for a check.", 0.0, 1.0
)
JOBS = flags.DEFINE_integer("jobs", 2, "Runs at a time, of one thread each.", lower_bound=1)
ACCEPT = flags.DEFINE_list("accept_commit", [], "Other commits whose rows may be in the file.")
ANALYSIS = flags.DEFINE_bool("analysis", False, "Only write the pages and figures of the rows.")
flags.register_validator(
    "stages",
    lambda a: len(set(a) & set(map(str, STAGES))) == len(a),
    f"stages are {', '.join(map(str, STAGES))}, each once",
)


def run_stages(path: Path, data: Path, workdir: str) -> None:
    """Trains the runs of --stages that have no row in the file, and adds their rows."""
    there, commit = rows.read_rows(path), code_commit(ROOT)
    digests = {name: texts.load_text(name, data).sha256 for name in set(there["text"])}
    rows.check_origin(there, [commit, *ACCEPT.value], digests)
    executor, done = lab.LocalExecutor(JOBS.value, threads=1), set(rows.runs_of(there))
    wanted = (
        dataclasses.replace(run, bytes_per_parameter=SHARE.value * run.bytes_per_parameter)
        for run in rows.published_runs()
        if str(run.stage) in ONLY.value
    )
    left = [run for run in wanted if run not in done]
    texts.check_texts(dict.fromkeys(run.text for run in left), data)
    for stage in map(int, ONLY.value):
        if specs := [run_spec(run, data) for run in left if run.stage == stage]:
            results = lab.sweep(specs, workdir, executor=executor)
            rows.append_csv(path, rows.new_rows(results, data, commit))
            print(f"stage {stage} ({STAGES[stage].title}): {len(specs)} runs")


def run_on_gpu(path: Path, data: Path) -> None:
    """Trains the programs that have no scores in the file, and adds their rows."""
    texts.check_texts(texts.TEXTS, data)
    for program in gpu.missing(gpu.read_scores(path.parent), SHARE.value):
        rows.append_csv(path, gpu.train(program, data, code_commit(ROOT), SHARE.value))


def main() -> None:
    """Trains, or does what the flags ask for instead."""
    folder, data = Path(RESULTS.value), Path(DATA.value)
    if ANALYSIS.value:
        from experiments.studies.head_width.page import write_pages

        print("\n".join(map(str, write_pages(folder))))
    elif SHARE.value < 1 and folder.resolve() == rows.PUBLISHED.resolve():
        raise ValueError("--share is a check; name another folder for its rows with --results")
    elif GPU.value:
        run_on_gpu(folder / "gpu_runs.csv", data)
    elif not WORKDIR.value:
        raise ValueError("--workdir is needed: the folder of the runs")
    else:
        run_stages(folder / "runs.csv", data, WORKDIR.value)


app.start(main)
