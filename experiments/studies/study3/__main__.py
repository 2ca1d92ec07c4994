"""The command of the study; README.md of this folder."""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from attnlab.lab.worker import STOPPED
from attnlab.training.provenance import code_commit
from experiments.studies.head_width.texts import check_texts, load_text
from experiments.studies.study3 import parts
from experiments.studies.study3.cost import projected_seconds, status
from experiments.studies.study3.executor import LocalExecutor, WorkerFailed
from experiments.studies.study3.page import write_pages
from experiments.studies.study3.rows import Row, WrongRows, append_row, check_origin, read_rows
from experiments.studies.study3.run import Place, remove_run, run_one
from experiments.studies.study3.spec import Run


def say(line: str) -> None:
    """A line with the time, on standard error."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


def run_part(part: str, place: Place, path: Path, processes: int) -> bool:
    """Runs a part until no run is left. Returns False where it was stopped."""
    with LocalExecutor[Run, Row](functools.partial(run_one, place=place), processes) as executor:
        while not executor.stopped:
            rows = read_rows(path)
            done = {row.spec.id for row in rows}
            tiny = [run for run in parts.tiny_runs() if run.id not in done]
            runs = tiny if part == "tiny" else parts.next_runs(part, rows)
            if not runs:
                return True
            for run, row in executor.results(runs):
                append_row(path, row)
                remove_run(run, place)
                say(f"{run.id} {row.scores.heldout_bits:.4f} in {row.origin.cpu_seconds:.0f} CPU s")
                if part != "tiny":
                    say(status(part, read_rows(path))[-1])
    return False


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(prog="experiments.studies.study3", description=__doc__)
    known = (*parts.PARTS, "tiny")
    parser.add_argument("--part", required=True, help=f"Parts, as A,B,C; of {', '.join(known)}.")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file of finished runs.")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="Texts.")
    parser.add_argument("--workdir", type=Path, help="Folder of unfinished runs.")
    parser.add_argument("--processes", type=int, default=2, help="Workers of one thread each.")
    parser.add_argument("--accept-commit", nargs="*", default=[], help="Other commits of rows.")
    parser.add_argument("--pages", type=Path, help="Only write the pages of the parts to a folder.")
    parser.add_argument("--status", action="store_true", help="Only print how far the runs are.")
    given = parser.parse_args(words)
    given.part = given.part.split(",")
    if unknown := set(given.part) - set(known):
        parser.error(f"unknown part {min(unknown)}; parts are {', '.join(known)}")
    if given.workdir is None and not (given.status or given.pages):
        parser.error("--workdir is needed: the folder of unfinished runs")
    if given.processes < 1:
        parser.error("--processes must be at least 1")
    return given


def main() -> int:
    """Runs the command; returns the exit code: 75 after a signal, 1 after an error."""
    try:
        return run_parts(arguments())
    except (parts.NotReady, WrongRows, WorkerFailed, FileNotFoundError) as error:
        say(f"error: {error}")
        return 1


def run_parts(given: argparse.Namespace) -> int:
    """Runs the parts in their order, or prints how far they are."""
    if given.pages:
        print(*write_pages(given.part, given.rows, given.pages), sep="\n")
        return 0
    rows = read_rows(given.rows)
    if given.status:
        for part in given.part:
            print("\n".join(status(part, rows)))
        return 0
    if given.part != ["tiny"]:  # which needs the standard library alone
        check_texts(parts.ALL_TEXTS, given.data)
    commit = code_commit(Path(__file__).parents[3])
    digests = {name: load_text(name, given.data).sha256 for name in {r.spec.text for r in rows}}
    check_origin(rows, [commit, *given.accept_commit], digests)
    place = Place(given.data.resolve(), given.workdir, commit)
    for part in given.part:
        if part != "tiny":
            seconds = projected_seconds(part, rows)
            say(f"part {part}: {seconds / 3600 / given.processes:.1f} hours to go")
        if not run_part(part, place, given.rows, given.processes):
            say("stopped; repeat the command to resume")
            return STOPPED
    say("done")
    return 0


sys.exit(main())
