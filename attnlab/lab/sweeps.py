"""`sweep`: runs a list of `RunSpec`s, and what policies propose after looking at results."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from attnlab.atomic import write_atomic
from attnlab.extras import extra
from attnlab.lab.executors import Executor, LocalExecutor
from attnlab.lab.result import FILE, read_result
from attnlab.lab.results import Results
from attnlab.lab.run import RUNS, run_folder
from attnlab.lab.spec import RunSpec, check_unique, read_specs, write_specs
from attnlab.lab.worker import ERROR, SPECS

Policy: TypeAlias = Callable[[Results], list[RunSpec]]
"""Results so far -> further runs; an empty list ends the sweep."""
POLL_SECONDS = 0.2


class SweepFailed(RuntimeError):
    """Runs ended without a result; the message says which and why."""


def sweep(
    specs: Iterable[RunSpec],
    workdir: str | Path,
    *,
    executor: Executor | None = None,
    policy: Policy | None = None,
    progress: bool = True,
) -> Results:
    """Runs all specs and returns their results; runs that have one are not run again.

    Stopped or killed at any moment, the same call goes on with what is left.

    Args:
      specs: what to run.
      workdir: folder of the sweep. A sweep with other specs adds to those that are there.
      executor: where to run; None: `LocalExecutor()`.
      policy: proposes further runs each time that all have ended.
      progress: show a bar, in a terminal or a notebook.

    Raises:
      ValueError: nothing to run, one id twice, or another run of the same id in the workdir.
      SweepFailed: runs ended without a result; the others are complete.
    """
    workdir, wanted = Path(workdir), list(specs)
    while True:
        _add(wanted, workdir)
        _finish(wanted, workdir, executor or LocalExecutor(), progress)
        results = load_results(workdir, wanted)
        proposed = policy(results) if policy else []
        if not proposed:
            return results
        wanted += proposed


def load_results(workdir: str | Path, specs: Sequence[RunSpec] | None = None) -> Results:
    """The results in a workdir, in the order of its specs; those without one are left out.

    Raises:
      ValueError: there is no sweep.
    """
    path = Path(workdir) / SPECS
    if specs is None:
        if not path.exists():
            raise ValueError(f"{workdir} holds no sweep; give the workdir of lab.sweep")
        specs = read_specs(path.read_text(encoding="utf-8"))
    found = (read_result(run_folder(Path(workdir), spec)) for spec in specs)
    return Results([result for result in found if result], workdir)


def _add(specs: Sequence[RunSpec], workdir: Path) -> None:
    """Writes the specs to the workdir, behind those that are there."""
    check_unique(specs)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / SPECS
    there = read_specs(path.read_text(encoding="utf-8")) if path.exists() else []
    known = {spec.id: spec for spec in there}
    for spec in specs:
        if spec.id in known and spec.digest != known[spec.id].digest:
            raise ValueError(
                f"{workdir} has another run with the id {spec.id!r} (another config or seed); use "
                "another workdir, or give the run another id"
            )
    new = [spec for spec in specs if spec.id not in known]
    if new:
        write_atomic(path, write_specs([*there, *new]).encode())


def _finish(specs: Sequence[RunSpec], workdir: Path, executor: Executor, progress: bool) -> None:
    """Runs what has no result yet."""
    left = [spec for spec in specs if not read_result(run_folder(workdir, spec))]
    if not left:
        return
    paths = [workdir / RUNS / spec.id / FILE for spec in left]
    with extra("train"):
        from rich.progress import Progress
    with Progress(disable=not progress) as bar:
        task = bar.add_task(f"{len(left)} runs", total=len(left))
        try:
            executor.start(workdir, len(left))
            while executor.running():
                bar.update(task, completed=sum(path.exists() for path in paths))
                time.sleep(POLL_SECONDS)
        except BaseException:
            executor.stop()
            raise
        bar.update(task, completed=sum(path.exists() for path in paths))
    failed = [spec for spec, path in zip(left, paths, strict=True) if not path.exists()]
    if failed:
        raise SweepFailed(_reason(failed, workdir))


def _reason(failed: Sequence[RunSpec], workdir: Path) -> str:
    first = run_folder(workdir, failed[0]) / ERROR
    text = first.read_text().strip() if first.exists() else f"see {workdir / 'logs'}"
    ids = ", ".join(spec.id for spec in failed)
    return f"{len(failed)} runs have no result ({ids}). The first one: {text}"
