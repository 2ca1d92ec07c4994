"""What a worker process does: it runs what is left of a sweep.

It takes the runs of `WORKDIR/specs.json` in order and leaves out those that are complete or that
another worker has. So any number of workers share a workdir, on one machine or on many.
"""

import traceback
from pathlib import Path

from attnlab.lab.result import read_result
from attnlab.lab.run import RunInUse, run_folder, run_one
from attnlab.lab.spec import read_specs
from attnlab.training.interrupts import Stopped

SPECS, ERROR = "specs.json", "error.txt"
STOPPED = 75


def work(workdir: Path) -> int:
    """Runs what is left. Returns the exit code: 0, 1 where a run failed, 75 after a signal.

    The traceback of a run that failed is in its `error.txt`; the others go on.
    """
    code = 0
    for spec in read_specs((workdir / SPECS).read_text(encoding="utf-8")):
        folder = run_folder(workdir, spec)
        if read_result(folder):
            continue
        error = folder / ERROR
        error.unlink(missing_ok=True)
        try:
            run_one(spec, workdir, speaks=False)
        except RunInUse:
            continue
        except (Stopped, KeyboardInterrupt):
            return STOPPED
        except Exception:
            error.write_text(traceback.format_exc())
            code = 1
    return code
