r"""Many runs: python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
    --workdir=runs/first

Runs every arm that the config's `sweep(add)` adds, one folder each, and writes the report. The
same command again skips what is complete, goes on with what is broken, and renews the report.
--print_only prints one `experiments.run` command an arm instead, to start elsewhere.
"""

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

from absl import flags

from experiments import arm, launch, report, workdir

_PRINT_ONLY = flags.DEFINE_bool("print_only", False, "Print the command of each arm and stop.")


def main() -> None:
    """Checks every arm, then runs them one by one."""
    filename, base, overrides = launch.config()
    folder, arms = Path(flags.FLAGS.workdir), arms_of(filename, overrides)
    if _PRINT_ONLY.value:
        for name, changes in arms.items():
            print(command(filename, overrides | changes, folder / name))
        return
    configs = {name: _with(base, changes) for name, changes in arms.items()}
    for config in configs.values():
        arm.resolve(config)
    record = {"arms": {n: c.to_dict() for n, c in configs.items()}}
    workdir.claim(folder, record | {"environment": {"config": filename}})
    results = {n: arm.run(config, folder / n, name=n) for n, config in configs.items()}
    report.write([folder])
    print(f"report: {folder / 'report.html'}")
    failed = [n for n, result in results.items() if result["status"] != arm.COMPLETE]
    if failed:
        sys.exit(f"error: {len(failed)} of {len(results)} arms diverged: {', '.join(failed)}")


def arms_of(filename: str, overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> overrides of every arm of the config file `path.py:words`.

    Raises ValueError where a flag sets what the sweep itself varies.
    """
    path, _, words = filename.partition(":")
    module = _load(Path(path))
    if not hasattr(module, "sweep"):
        raise ValueError(f"{path} has no sweep(add, arg); use experiments.run for one run")
    arms: dict[str, dict[str, Any]] = {}

    def add(**changes: Any) -> None:
        name = "-".join(filter(None, (_word(f, value) for f, value in changes.items())))
        arms[name] = changes

    module.sweep(add, words)
    varied = {field for changes in arms.values() for field in changes}
    for field in varied & overrides.keys():
        raise ValueError(f"--config.{field} is what this sweep varies; leave the flag out")
    return arms


def command(filename: str, changes: dict[str, Any], folder: Path) -> str:
    """The experiments.run command line of one arm."""
    sets = [f"--config.{field}={value}" for field, value in changes.items()]
    words = ["python", "-m", "experiments.run", f"--config={filename}", *sets]
    return shlex.join([*words, f"--workdir={folder}"])


def _with(config: Any, changes: dict[str, Any]) -> Any:
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
    return copy


def _word(field: str, value: Any) -> str:
    if field == "train.learning_rate":
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
