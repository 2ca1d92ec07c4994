r"""Many runs: python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
    --workdir=runs/first

Runs every arm that the config's `sweep(add)` adds, one folder each, and writes the report; where
the config has `paper()`, with the published numbers beside ours, where it has `claim()`, with what
was expected and whether it came. The same command again skips what
is complete, goes on with what is broken, and renews the report.
Arms run side by side, each in a process of its own: as many as there are cores (or GPUs) for them,
or --jobs of them. --print_only prints one `experiments.run` command an arm instead, to start
elsewhere. See docs/running.md.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from attnlab.names import find
from experiments import report
from experiments.running import arm, jobs, launch, workdir

RATE = "train.learning_rate"
SAID = ("paper", "claim")
"""What a config file may say of its arms, each a function of its words."""
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Arms at once; left out: as many as there is room for.", lower_bound=1
)
_BUSY = flags.DEFINE_enum(
    "busy", "wait", ["wait", "skip"], "What to do with an arm that another process runs, at last."
)
_PRINT_ONLY = flags.DEFINE_bool("print_only", False, "Print the command of each arm and stop.")


class Sweep(NamedTuple):
    """What a config file says beside its base config."""

    arms: dict[str, dict[str, Any]]
    """Folder -> overrides."""
    titles: dict[str, str]
    """Folder -> what the report calls the arm, where the config file names it."""
    paper: dict[str, Any]
    """The published table that the arms are rows of (see `running/tables.py`), or nothing."""
    claim: dict[str, Any] = {}  # noqa: RUF012
    """What is known beforehand of the arms (see `running/claims.py`), or nothing."""


def main() -> None:
    """Checks every arm, then runs them side by side."""
    filename, base, overrides = launch.config()
    folder, plan = Path(flags.FLAGS.workdir), read(filename, overrides)
    if _PRINT_ONLY.value:
        for name, changes in plan.arms.items():
            print(command(filename, overrides | changes, folder / name, flags.FLAGS.threads))
        return
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the arms
    configs = {name: with_changes(base, changes) for name, changes in plan.arms.items()}
    for config in configs.values():
        arm.resolve(config)
    record = {"arms": {n: c.to_dict() for n, c in configs.items()}}
    record |= {"titles": plan.titles} if plan.titles else {}
    record |= {"paper": plan.paper} if plan.paper else {}
    record |= {"claim": plan.claim} if plan.claim else {}
    threads = flags.FLAGS.threads or workdir.began_with(folder).get("threads")
    room = jobs.divide(len(configs), _JOBS.value, threads)
    with workdir.own(folder, patience=60):
        environment = {"config": filename, "threads": room.threads}
        workdir.claim(folder, record | {"environment": environment})
    ends = jobs.run(configs, folder, room, waits=_BUSY.value == "wait")
    if any((folder / name / workdir.RESULT).exists() for name in configs):
        with workdir.own(folder, patience=60):
            report.write([folder])
        print(f"report: {folder / 'report.html'}")
    failed = [f"{n} {end}" for n, end in ends.items() if end not in (arm.COMPLETE, jobs.LEFT)]
    if failed:
        sys.exit(f"error: {len(failed)} of {len(ends)} arms are not complete: {', '.join(failed)}")


def read(filename: str, overrides: dict[str, Any]) -> Sweep:
    """What the config file `path.py:words` adds.

    Raises ValueError where a flag sets what the sweep itself varies, and where two arms have one
    name.
    """
    path, _, words = filename.partition(":")
    module, _ = launch.load(filename)
    if not hasattr(module, "sweep"):
        raise ValueError(f"{path} has no sweep(add, arg); use experiments.run for one run")
    arms: dict[str, dict[str, Any]] = {}
    titles: dict[str, str] = {}

    def add(name: str = "", **changes: Any) -> None:
        values = {f: v for f, v in changes.items() if not name or f == RATE}
        words = [re.sub(r"[^\w.=]+", "-", name), *(_word(f, v) for f, v in values.items())]
        folder = "-".join(filter(None, words))
        if folder in arms:
            raise ValueError(f"{path} has two arms {folder!r}; give each a name of its own")
        arms[folder] = changes
        titles.update({folder: name} if name else {})

    module.sweep(add, words)
    varied = {field for changes in arms.values() for field in changes}
    for field in varied & overrides.keys():
        raise ValueError(f"--config.{field} is what this sweep varies; leave the flag out")
    said = [getattr(module, name)(words) if hasattr(module, name) else {} for name in SAID]
    return Sweep(arms, titles, *said)


def command(
    filename: str, changes: dict[str, Any], folder: Path, threads: int | None = None
) -> str:
    """The experiments.run command line of one arm."""
    sets = [f"--config.{field}={value}" for field, value in changes.items()]
    words = ["python", "-m", "experiments.run", f"--config={filename}", *sets]
    words += [f"--threads={threads}"] if threads else []
    return shlex.join([*words, f"--workdir={folder}"])


def with_changes(config: Any, changes: dict[str, Any]) -> Any:
    """The config of one arm."""
    known = launch.fields(config)
    for field in changes:
        find("config field", field, known)
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
    return copy


def _word(field: str, value: Any) -> str:
    if field == RATE:
        return f"lr{value:g}"
    return str(value) if isinstance(value, str) else ""


if __name__ == "__main__":
    launch.define_run()
    launch.start(main)
