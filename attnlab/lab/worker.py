"""What a worker process does: it runs what is left of a sweep.

It takes the runs of `WORKDIR/specs.json` that have no result, those that cost most first, and
leaves out those that another worker has. So any number of workers share a workdir, on one machine
or on many.
"""

import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

from attnlab.lab import lock
from attnlab.lab.lock import RunInUse
from attnlab.lab.result import FILE
from attnlab.lab.run import RunOptions, run_folder, run_one
from attnlab.lab.spec import RunSpec, read_specs
from attnlab.models import flops_per_token
from attnlab.runs import SPECS
from attnlab.training.interrupts import Stopped

ERROR = "error.txt"
STOPPED = 75
"""Exit code after a signal: the same command goes on (EX_TEMPFAIL of sysexits.h)."""


def work(
    workdir: Path,
    options: RunOptions = RunOptions(),  # noqa: B008
    skip: Collection[str] = (),
) -> int:
    """Runs what is left.

    Args:
      workdir: of the sweep.
      options: of `run_one`.
      skip: ids of runs that are left out.

    Returns:
      The exit code: 0, 1 where a run failed, 75 after a signal. The traceback of a run that failed
      is in its `error.txt`; the others go on.
    """
    tried, code = set(skip), 0
    while (spec := _next(workdir, tried)) is not None:
        error = run_folder(workdir, spec) / ERROR
        try:
            run_one(spec, workdir, options=options)
        except RunInUse:
            continue  # it began in this moment
        except (Stopped, KeyboardInterrupt) as stop:
            print(f"[{spec.id}] {stop}", flush=True)
            return STOPPED
        except Exception:
            tried.add(spec.id)
            error.parent.mkdir(parents=True, exist_ok=True)
            error.write_text(traceback.format_exc())
            print(f"[{spec.id}] {traceback.format_exc()}", flush=True)
            code = 1
        else:
            error.unlink(missing_ok=True)
    return code


def _next(workdir: Path, tried: Collection[str]) -> RunSpec | None:
    """The next run without a result that nobody has; None where there is none."""
    for spec in costly_first(read_specs((workdir / SPECS).read_text(encoding="utf-8"))):
        folder = run_folder(workdir, spec)
        is_open = spec.id not in tried and not is_complete(folder, spec)
        if is_open and not lock.holder(folder):
            return spec
    return None


def is_complete(folder: Path, spec: RunSpec) -> bool:
    """Is there a result, and of as many steps as the spec has?"""
    from attnlab.lab.result import read_result

    if not (folder / FILE).exists():
        return False
    found = read_result(folder)
    return found is not None and found.spec.digest == spec.digest


def costly_first(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """By the FLOPs of a training: the last ones to end are then short."""
    known: dict[str, int] = {}

    def cost(spec: RunSpec) -> int:
        key = spec.config.to_json()
        if key not in known:
            train = spec.config.train
            tokens = train.steps * train.batch_size * train.length
            known[key] = flops_per_token(spec.config.model, train.length) * tokens
        return -known[key]

    return sorted(specs, key=cost)
