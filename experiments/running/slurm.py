"""Many arms as arrays of SLURM: scripts in the workdir, to be read and edited, and their `sbatch`.

A script holds the command line of every arm of its part, an arm a task; its `--array` names the
tasks of those that are neither complete nor in the queue. So a script and a task say which arm it
is whenever the script was written, which is how `squeue` tells what is in the queue.
"""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from experiments.running import workdir

FOLDER = "slurm"
"""Below the folder of the arms: scripts, and what the tasks print."""
MAX_ARRAY_SIZE = 1001
"""Where SLURM is not there to say: what it has where nobody sets another."""
OURS = {"-a", "--array"}

HEAD = """\
#!/bin/bash
# Arms of {folder}, an arm a task, one node each.
# Edit it as you like and submit it with: sbatch {script}
# The same experiments.sweep writes it again.
#SBATCH --job-name={title}
#SBATCH --array={array}
#SBATCH --chdir={here}
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
"""
TAIL = r"""
# Seconds before its time is up SLURM sends USR1 to this script alone. TERM makes the arm save and
# end with 75 (143 where it does not listen: while it starts, and in its last evaluation).
cut=
trap 'cut=yes; kill -TERM $arm' USR1
trap 'kill -TERM $arm' TERM
saved() { ls "$folder/checkpoints" 2> /dev/null; }
before=$(saved)

echo "$(date '+%F %T') $(hostname): ${command[*]}"
"${command[@]}" &
arm=$!
while kill -0 $arm 2> /dev/null; do wait $arm; done # a signal ends the waiting, not the arm
wait $arm
code=$?

case $cut$code in
  yes75 | yes143)
    if [ -e "$folder/result.json" ]; then
      code=0 # it was complete, and about to end
    elif [ "$(saved)" != "$before" ]; then
      scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
      echo "not queued again: its time was up before a step was saved; ask for more --time" >&2
    fi
    ;;
esac
exit $code
"""


class Queued(Exception):
    """Arms are in the queue, or on their way there: what was done, in words."""


class Asked(NamedTuple):
    """What the flags of a sweep say."""

    options: str = ""
    """Of sbatch; they come last and win."""
    at_once: int | None = None
    """Arms at most; None: as the cluster likes."""
    submits: bool = True
    """Or are the scripts only written?"""
    exports: dict[str, str] = {}  # noqa: RUF012
    """Variables of the environment of every arm."""


def check(asked: Asked) -> None:
    """Raises ValueError where nothing could be submitted."""
    if asked.submits and not shutil.which("sbatch"):
        raise ValueError(
            "there is no sbatch on this machine; start this on a login node of the cluster, or "
            "write the scripts with --print_only and submit them there. Without --launcher=slurm "
            "--print_only prints a command an arm, for any other scheduler"
        )
    try:
        words = shlex.split(asked.options)
    except ValueError as error:
        raise ValueError(f"--slurm={asked.options!r}: {error}") from None
    if "\n" in asked.options or (words and not words[0].startswith("-")):
        raise ValueError(
            f"--slurm={asked.options!r} is no line of options; give it as to sbatch: "
            '--slurm="--partition=gpu --time=4:00:00"'
        )
    if taken := OURS & {word.partition("=")[0] for word in words}:
        raise ValueError(
            f"--slurm: {taken.pop()} is what this command makes; --jobs=N lets N arms run at once"
        )


def run(lines: dict[str, str], folder: Path, asked: Asked) -> dict[str, str]:
    """How the arms ended whose command lines these are, in folders below `folder`.

    Where some have no result it writes scripts for those that are not in the queue, submits them,
    and raises Queued. Raises ValueError, before anything is written, where SLURM does not answer or
    has no arrays, and where a script is refused.
    """
    folder = folder.absolute()
    names = list(lines)
    done = [name for name in names if (folder / name / workdir.RESULT).exists()]
    if done == names:
        return {n: workdir.read_json(folder / n / workdir.RESULT)["status"] for n in names}
    size = array_size()
    waiting = in_queue(names, folder) - set(done)
    left = set(names) - set(done) - waiting
    parts = [part for i in range(0, len(names), size) if left & set(part := names[i : i + size])]
    if asked.at_once and asked.at_once < len(parts):
        raise ValueError(
            f"--jobs={asked.at_once}: the arms are {len(parts)} arrays, for MaxArraySize = {size} "
            f"here, and each runs one at least; --jobs={len(parts)} or more, or fewer arms"
        )
    scripts: list[Path] = []
    for number, part in enumerate(parts):
        script = folder / FOLDER / f"from-{part[0]}.sh"
        most = _share(asked.at_once, len(parts), number)
        text = written({n: lines[n] for n in part}, left, script, asked, most)
        script.parent.mkdir(parents=True, exist_ok=True)
        workdir.write_bytes(script, text.encode())
        scripts.append(script)
    numbers = [_submit(script, scripts[:i]) for i, script in enumerate(scripts) if asked.submits]
    for script in scripts:
        print(f"sbatch {shlex.quote(str(script))}")
    last = f"submitted as job {', '.join(numbers)}" if numbers else "to be submitted as above"
    told = {"complete": done, "in the queue": waiting, last: left}
    counts = ", ".join(f"{len(some)} {what}" for what, some in told.items() if some)
    raise Queued(
        f"{len(names)} arms in {folder}: {counts}. Every node must find that folder, and the one "
        "that this command was started in, under the same names. When the queue is empty, the same "
        "command goes on with what is not complete, or ends with the report"
    )


def written(
    lines: dict[str, str], left: set[str], script: Path, asked: Asked, at_once: int | None
) -> str:
    """The script of the arms `lines`, whose array are those of them in `left`."""
    tasks = [task for task, name in enumerate(lines) if name in left]
    place = str(script.parent).replace("%", "%%")  # of which SLURM makes numbers
    folder = script.parent.parent
    head = HEAD.format(
        folder=folder,
        script=shlex.quote(str(script)),
        title=shlex.quote(folder.name),
        array=ranges(tasks) + (f"%{at_once}" if at_once else ""),
        here=shlex.quote(str(Path.cwd())),
        log=shlex.quote(f"{place}/%A_%a.log"),
    )
    head += f"#SBATCH {asked.options}\n" if asked.options else ""
    exports = [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
    exports += [f"export {name}={shlex.quote(value)}" for name, value in asked.exports.items()]
    cases = [
        f"  {task}) folder={shlex.quote(str(folder / name))} command=({line}) ;;"
        for task, (name, line) in enumerate(lines.items())
    ]
    return "\n".join([head, *exports, "case $SLURM_ARRAY_TASK_ID in", *cases, "esac", TAIL])


def ranges(numbers: list[int]) -> str:
    """[0, 2, 3, 4] -> "0,2-4"."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found)


def array_size() -> int:
    """How many tasks an array may have here: their numbers are below MaxArraySize."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.M)
    size = int(found[1]) if found else MAX_ARRAY_SIZE
    if not size:
        raise ValueError(
            "this cluster has no job arrays (MaxArraySize = 0); without --launcher=slurm "
            "--print_only prints a command an arm, to submit one by one"
        )
    return size


def in_queue(names: list[str], folder: Path) -> set[str]:
    """Which of the arms are in the queue or run, submitted by us or by hand."""
    found = set()
    ours = (folder / FOLDER).resolve()
    for row in _ask("squeue", "--me", "--array", "--noheader", "--format=%K %o").splitlines():
        task, _, script = row.partition(" ")
        path = Path(script.strip())
        first = path.stem.removeprefix("from-") if path.suffix == ".sh" else ""
        if task.isdecimal() and path.parent.resolve() == ours and first in names:
            found |= set(names[names.index(first) + int(task) :][:1])
    return found


def _submit(script: Path, before: list[Path]) -> str:
    """The number of the job."""
    try:
        return _ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    except ValueError as error:
        and_now = f"{len(before)} scripts before it are submitted; " if before else ""
        raise ValueError(f"{error}; {and_now}the script is {script}") from None


def _ask(*words: str) -> str:
    """What a command of SLURM prints; nothing where it is not installed. Raises ValueError."""
    if not shutil.which(words[0]):
        return ""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{shlex.join(words)} says: {done.stderr.strip()}")
    return done.stdout


def _share(whole: int | None, parts: int, number: int) -> int | None:
    return whole and whole // parts + (number < whole % parts)
