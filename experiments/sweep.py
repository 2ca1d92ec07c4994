r"""Many runs: python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
    --workdir=runs/first

Runs every arm that the config's `sweep(add)` adds, one folder each, and writes the report; where
the config has `paper()`, with the published numbers beside ours. The same command again skips what
is complete, goes on with what is broken, and renews the report.
--print_only prints one `experiments.run` command an arm instead, to start elsewhere.
"""

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from experiments import report
from experiments.running import arm, launch, workdir

RATE = "train.learning_rate"
_PRINT_ONLY = flags.DEFINE_bool("print_only", False, "Print the command of each arm and stop.")


class Sweep(NamedTuple):
    """What a config file says beside its base config."""

    arms: dict[str, dict[str, Any]]
    """Folder -> overrides."""
    titles: dict[str, str]
    """Folder -> what the report calls the arm, where the config file names it."""
    paper: dict[str, Any]
    """The published table that the arms are rows of (see `running/tables.py`), or nothing."""


def main() -> None:
    """Checks every arm, then runs them one by one."""
    filename, base, overrides = launch.config()
    folder, plan = Path(flags.FLAGS.workdir), read(filename, overrides)
    if _PRINT_ONLY.value:
        for name, changes in plan.arms.items():
            print(command(filename, overrides | changes, folder / name))
        return
    configs = {name: with_changes(base, changes) for name, changes in plan.arms.items()}
    for config in configs.values():
        arm.resolve(config)
    record = {"arms": {n: c.to_dict() for n, c in configs.items()}}
    record |= {"titles": plan.titles} if plan.titles else {}
    record |= {"paper": plan.paper} if plan.paper else {}
    with workdir.own(folder):
        workdir.claim(folder, record | {"environment": {"config": filename}})
    results = {n: arm.run(config, folder / n, name=n) for n, config in configs.items()}
    report.write([folder])
    print(f"report: {folder / 'report.html'}")
    failed = [n for n, result in results.items() if result["status"] != arm.COMPLETE]
    if failed:
        sys.exit(f"error: {len(failed)} of {len(results)} arms diverged: {', '.join(failed)}")


def read(filename: str, overrides: dict[str, Any]) -> Sweep:
    """What the config file `path.py:words` adds.

    Raises ValueError where a flag sets what the sweep itself varies, and where two arms have one
    name.
    """
    path, _, words = filename.partition(":")
    module = _load(Path(path))
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
    return Sweep(arms, titles, module.paper(words) if hasattr(module, "paper") else {})


def command(filename: str, changes: dict[str, Any], folder: Path) -> str:
    """The experiments.run command line of one arm."""
    sets = [f"--config.{field}={value}" for field, value in changes.items()]
    words = ["python", "-m", "experiments.run", f"--config={filename}", *sets]
    return shlex.join([*words, f"--workdir={folder}"])


def with_changes(config: Any, changes: dict[str, Any]) -> Any:
    """The config of one arm."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
    return copy


def _word(field: str, value: Any) -> str:
    if field == RATE:
        return f"lr{value:g}"
    return str(value) if isinstance(value, str) else ""


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    launch.define_config()
    launch.start(main)
