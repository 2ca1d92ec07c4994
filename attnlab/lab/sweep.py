"""`sweep`: runs a list of `RunSpec`s, and what policies make of it after reading results."""

import dataclasses
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from attnlab.lab.description import Description, read_description
from attnlab.lab.executors import LOGS, POLL_SECONDS, Executor, LocalExecutor, Queued
from attnlab.lab.result import read_result
from attnlab.lab.results import Results, check_named
from attnlab.lab.spec import RunSpec, check_unique
from attnlab.lab.text_table import counted
from attnlab.lab.workdir import add_specs, complete_result, holder, run_folder, specs_in
from attnlab.lab.worker import ERROR
from attnlab.load import SPECS
from attnlab.names import IMPORTING
from attnlab.nested import SHOWN
from attnlab.training.interrupts import Stopped, stop_signals

WAIT_SECONDS = 2.0
"""Between two looks whether a run of another process has ended."""
COMMAND = "command.txt"
"""In a workdir, the command that made its runs, as it was typed."""


@runtime_checkable
class Run(Protocol):
    """What a policy calls to run specs: see `Policy`."""

    def __call__(self, specs: Sequence[RunSpec], folder: str = "") -> Results:
        """The results of `specs`. In a `folder` of the workdir a run that fails has none, and the
        sweep fails at its end; without one it fails at once."""


@runtime_checkable
class Policy(Protocol):
    """Decides what a sweep runs: called with the specs so far, it returns those that are wanted.

    Until then it may run specs and read their results. A function is a policy, too:

        def slower_where_diverged(specs, run):
            diverged = [result.spec for result in run(specs) if result.status == "diverged"]
            return [*specs, *(lab.with_rate(spec, 1e-4) for spec in diverged)]

        lab.sweep(specs, "runs/a", policies=[slower_where_diverged])
    """

    def __call__(self, specs: Sequence[RunSpec], run: Run) -> Sequence[RunSpec]: ...


class SweepFailed(RuntimeError):
    """Runs ended without a result; the message says which and why.

    Attributes:
      specs: those runs.

        try:
            results = lab.sweep(specs, workdir)
        except lab.SweepFailed as error:
            results = lab.load_results(workdir)  # those that are complete
            print([spec.id for spec in error.specs])
    """

    def __init__(self, message: str, specs: Sequence[RunSpec] = ()) -> None:
        super().__init__(message)
        self.specs = tuple(specs)


def sweep(
    specs: Iterable[RunSpec],
    workdir: str | Path,
    *,
    executor: Executor | None = None,
    policies: Sequence[Policy] = (),
    description: Description | None = None,
    progress: bool = True,
    waits: bool = True,
) -> Results:
    """Runs all specs and returns their results; runs that have one are not run again.

    To resume after a stop or a kill, call it again: only what is left is computed.

    Args:
      specs: what to run.
      workdir: folder of the sweep. A sweep with other specs adds to those that are there; a spec
        of the same id with more steps makes that run longer.
      executor: where to run; None: `LocalExecutor()`.
      policies: choose learning rates, add seeds: each gets the specs that the one before returned.
      description: question, comparisons and margin, for the report; None: that of the workdir.
      progress: a line on standard error for each run that begins or ends.
      waits: wait for runs that another process has; False: leave them to it.

    Raises:
      attnlab.training.Stopped: after SIGTERM or SIGINT; all runs have saved.
      Queued: the executor left the runs to a queue; the same call goes on when they have ended.
      TypeError: `specs` are no RunSpecs.
      ValueError: nothing to run, one id twice, or another run of the same id in the workdir; or
        the baseline or a pair of `description` names no variant of a new sweep, or several.
      SweepFailed: runs ended without a result; the others are complete.

        base = lab.Experiment(model=ModelConfig(num_layers=2), train=TrainConfig(steps=200))
        specs = lab.product(base, layout=["standard", "wide"], seeds=[0, 1, 2])
        results = lab.sweep(specs, "runs/layouts", executor=lab.LocalExecutor(jobs=2))
        results.compare({"layout": "standard"})
    """
    workdir, wanted, start = Path(workdir), list(specs), executor or LocalExecutor()
    if IMPORTING:
        raise RuntimeError(
            f"{IMPORTING[0]} calls lab.sweep while another process imports it; write the "
            'call under if __name__ == "__main__":'
        )
    check_unique(wanted)
    about = described(read_description(workdir, description), wanted)
    if description and not specs_in(workdir):
        check_named(description.named, wanted)
    reads_scores = any(getattr(policy, "reads_scores", False) for policy in policies)
    if reads_scores and not about.seeds_added:
        planned = tuple(sorted({spec.seed for spec in wanted}))
        about = dataclasses.replace(about, seeds_added=True, planned_seeds=planned)
    failed: list[SweepFailed] = []

    def run(specs: Sequence[RunSpec], folder: str = "") -> Results:
        if folder:
            _check_before(folder, wanted, workdir)
        add_specs(specs, workdir / folder)
        if about != read_description(workdir):
            about.write(workdir)
        try:
            _finish(specs, workdir / folder, start, progress, waits)
        except SweepFailed as error:
            if not folder:
                raise
            failed.append(error)
        return load_results(workdir / folder, specs)

    for policy in policies:
        try:
            wanted = list(policy(wanted, run))
        except ValueError as error:
            if failed:  # so variants are left out which this policy needs
                raise failed[0] from error
            raise
        if not wanted:  # nothing is left for the policies behind it
            break
    if failed and not wanted:
        raise failed[0]
    if not wanted and not waits:  # other processes have all runs that a policy waits for
        return Results([])
    results = run(wanted)
    if failed:
        raise failed[0]
    return results


def described(about: Description, specs: Sequence[RunSpec]) -> Description:
    """With the budget that these specs have in common, if `about` has none."""
    budgets = {spec.config.matched for spec in specs}
    matched = about.matched or (budgets.pop() if len(budgets) == 1 else "")
    return dataclasses.replace(about, matched=matched)


def _check_before(folder: str, wanted: Sequence[RunSpec], workdir: Path) -> None:
    """Raises ValueError where runs of `wanted` exist that a policy did not choose in `folder`."""
    again = [spec.id for spec in wanted if spec.id in specs_in(workdir)]
    if again and not (workdir / folder / SPECS).exists():
        raise ValueError(
            f"{workdir} has runs that were not chosen by runs in {folder!r}, such as {again[0]!r}; "
            "use another workdir, or leave the policy (--tune) out"
        )


def load_results(workdir: str | Path, specs: Sequence[RunSpec] | None = None) -> Results:
    """The results in a workdir, in the order of its specs; those without one are left out.

    Args:
      workdir: of `sweep`. It may still run: nothing is locked or written.
      specs: only these runs; None: all.

    Raises:
      ValueError: there is no sweep.

        results = lab.load_results("runs/layouts")
        wide = results.filter(lambda run: run.spec.tags["layout"] == "wide")
    """
    workdir = Path(workdir)
    if specs is None:
        if not (workdir / SPECS).exists():
            raise ValueError(f"{workdir} holds no sweep; give the workdir of lab.sweep")
        specs = list(specs_in(workdir).values())
    found = (read_result(run_folder(workdir, spec), spec) for spec in specs)
    return Results(run for run in found if run)


def _finish(
    specs: Sequence[RunSpec], workdir: Path, executor: Executor, progress: bool, waits: bool
) -> None:
    """Runs what has no result yet. A run that ended without a reason, since another process had it
    and was stopped, is started once more."""
    again: set[str] = set()
    while left := _left(specs, workdir):
        forget_errors(left, workdir)
        _compute(left, workdir, executor, progress)
        left = _left(left, workdir)
        held = [spec for spec in left if holder(run_folder(workdir, spec))]
        ended = [spec for spec in left if spec not in held]
        failed = [s for s in ended if (run_folder(workdir, s) / ERROR).exists() or s.id in again]
        if failed:
            raise SweepFailed(_reason(failed, workdir), failed)
        again |= {spec.id for spec in ended}
        if held and not ended:
            if not waits:
                return
            while all(holder(run_folder(workdir, spec)) for spec in held):
                time.sleep(WAIT_SECONDS)


def forget_errors(specs: Sequence[RunSpec], workdir: Path) -> None:
    """Lets workers run again what failed."""
    for spec in specs:
        (run_folder(workdir, spec) / ERROR).unlink(missing_ok=True)


def _compute(left: Sequence[RunSpec], workdir: Path, executor: Executor, progress: bool) -> None:
    """One start of the executor. Raises Stopped after a signal."""
    look = _watch(left, workdir) if progress else lambda: None
    with stop_signals() as stop_requested:
        try:
            executor.start(workdir, len(left))
            while executor.running() and not stop_requested():
                look()
                time.sleep(POLL_SECONDS)
            if stop_requested():
                executor.stop()
                done = len(left) - len(_left(left, workdir))
                raise Stopped(
                    f"stopped and saved; {done} of {len(left)} runs are complete; to resume, "
                    "run the same again"
                )
        except Queued:  # the workers are not this process's to stop
            raise
        except BaseException:
            executor.stop()
            raise
    look()


def _watch(specs: Sequence[RunSpec], workdir: Path) -> Callable[[], None]:
    """Returns a function that looks at the folders of the runs and prints on standard error which
    have begun and ended."""
    began, left, begun = time.monotonic(), {spec.id: spec for spec in specs}, set[str]()
    print(f"{len(specs)} runs in {workdir}", file=sys.stderr, flush=True)

    def look() -> None:
        for name, spec in list(left.items()):
            if result := complete_result(workdir, spec):
                del left[name]
                done, minutes = len(specs) - len(left), (time.monotonic() - began) / 60
                line = f"{result.status}; {done} of {len(specs)} runs finished ({minutes:.1f} min)"
            elif name not in begun and holder(run_folder(workdir, spec)):
                begun.add(name)
                line = "begun"
            else:
                continue
            print(f"[{name}] {line}", file=sys.stderr, flush=True)

    return look


def _left(specs: Sequence[RunSpec], workdir: Path) -> list[RunSpec]:
    return [spec for spec in specs if not complete_result(workdir, spec)]


def _reason(failed: Sequence[RunSpec], workdir: Path) -> str:
    """The error of each run, in its error.txt, or the last line of the log of its worker."""
    full = shutil.disk_usage(workdir).free < 1 << 20
    unknown = "the disk is full; free some of it and run the same again" if full else "it ended"
    logs = sorted((workdir / LOGS).glob("*.log"), key=lambda log: log.stat().st_mtime)
    lines = [f"{counted(len(failed), 'run')} without a result:"]
    for spec in failed[:SHOWN]:
        places = [run_folder(workdir, spec) / ERROR, *logs[-1:]]
        path = next(filter(Path.exists, places), workdir)
        text = path.read_text().strip() if path.is_file() else ""
        # The error stands behind its traceback; notes may follow, such as those of JAX.
        *_, last = text.rpartition("Traceback (most recent call last):\n")
        errors = (
            re.findall(r"^\S.*", last, re.MULTILINE) if last != text else text.splitlines()[-1:]
        )
        why = next(iter(errors), unknown)
        lines.append(f"  {spec.id}: {why} (see {path})")
    return "\n".join(lines + (["  ..."] if len(failed) > SHOWN else []))
