r"""The third study: heads, positions, copying, caches, shared layers; README.md of this folder.

    python -m experiments.studies.study3 --part=D,E --data=DATA --workdir=WORK

trains the runs of these parts that have no row and adds their rows to later_runs.csv. A stopped
command resumes. With --status it prints how many runs are done; with --pages it writes the pages of
the parts from the rows that are there.
"""

from pathlib import Path

from absl import flags
from pandas import DataFrame

from attnlab import lab
from attnlab.lab.machine import code_commit
from attnlab.lab.workdir import SHARED, run_folder
from experiments import app
from experiments.studies.head_width.rows import check_origin
from experiments.studies.head_width.texts import check_texts, load_text
from experiments.studies.study3 import parts
from experiments.studies.study3.cost import status
from experiments.studies.study3.rows import (
    NEW,
    OLD,
    PINNED,
    PUBLISHED,
    add_rows,
    done_in,
    new_rows,
    read_rows,
)
from experiments.studies.study3.spec import Run, half_spec, model_config, run_spec
from experiments.studies.study3.widen import write_start

PART = flags.DEFINE_list("part", None, "Parts in their order, as D,E; tiny: a check of all kinds.",
                         required=True)  # fmt: skip
RESULTS = flags.DEFINE_string("results", str(PUBLISHED), "Folder of the rows and the pages.")
DATA = flags.DEFINE_string("data", "../shared/data", "Folder of the texts.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs that are trained.")
JOBS = flags.DEFINE_integer("jobs", 2, "Runs at a time, of one thread each.", lower_bound=1)
ACCEPT = flags.DEFINE_list("accept_commit", [], "Other commits whose rows may be in the file.")
STATUS = flags.DEFINE_bool("status", False, "Only print how far the parts are.")
PAGES = flags.DEFINE_bool("pages", False, "Only write the pages of the parts and their figures.")


def train(runs: list[Run], workdir: Path, data: Path) -> lab.Results:
    """Trains runs, after the first halves that some continue."""
    executor = lab.LocalExecutor(JOBS.value, threads=1)
    starts: dict[str, Path] = {}
    if reset := [run for run in runs if run.variant.start != "scratch"]:
        halves = {run.id: half_spec(run, data) for run in reset}
        lab.sweep({one.id: one for one in halves.values()}.values(), workdir, executor=executor)
        for run in reset:
            starts[run.id] = run_folder(workdir, halves[run.id])
            if run.variant.start == "converted":
                wide = workdir / "converted" / run.id
                write_start(starts[run.id], wide, model_config(run.variant), run.seed)
                starts[run.id] = wide
    specs = [run_spec(run, data, starts.get(run.id)) for run in runs]
    return lab.sweep(specs, workdir, executor=executor)


def run_part(part: str, folder: Path, data: Path, earlier: DataFrame, commit: str) -> None:
    """Trains the runs of a part that have no row, until none is left."""
    if not WORKDIR.value:
        raise ValueError("--workdir is needed: the folder of the runs")
    workdir, path = Path(WORKDIR.value).resolve(), folder / NEW
    while runs := parts.next_runs(part, done_in(earlier, read_rows(path))):
        if part != "tiny":  # which needs the standard library alone
            check_texts({run.text for run in runs}, data)
        known = {run.id: run for run in runs}
        try:
            results = train(runs, workdir, data)
        except BaseException:  # a signal, too: the rows of what is complete
            if (workdir / "specs.json").exists():
                results = lab.load_results(workdir)
                add_rows(path, new_rows(known, results, data, workdir / SHARED, commit))
            raise
        add_rows(path, new_rows(known, results, data, workdir / SHARED, commit))


def read_parts() -> list[str]:
    """--part. Raises ValueError for one that there is not, or that only the pinned commit runs."""
    known = [*parts.PARTS, "tiny"]
    if unknown := [one for one in PART.value if one not in known]:
        raise ValueError(f"--part: no part {unknown[0]}; parts are {', '.join(known)}")
    only_read = STATUS.value or PAGES.value
    if pinned := [one for one in PART.value if one in parts.PINNED_PARTS and not only_read]:
        raise ValueError(f"part {pinned[0]} is run at commit {PINNED} alone; see README.md")
    return list(PART.value)


def main() -> None:
    """Trains, or does what the flags ask for instead."""
    names, folder, data = read_parts(), Path(RESULTS.value), Path(DATA.value).resolve()
    earlier, later = read_rows(folder / OLD), read_rows(folder / NEW)
    if STATUS.value:
        for part in names:
            print("\n".join(status(part, earlier if part in parts.PINNED_PARTS else later)))
        return
    if PAGES.value:
        from experiments.studies.study3.page import write_pages

        print(*write_pages(names, folder), sep="\n")
        return
    commit = code_commit(Path(__file__).parents[3])
    for rows, commits in ((earlier, [PINNED]), (later, [commit, *ACCEPT.value])):
        digests = {name: load_text(name, data).sha256 for name in set(rows["text"])}
        check_origin(rows, commits, digests)
    for part in names:
        run_part(part, folder, data, earlier, commit)


app.start(main)
