"""`run_one`: trains one `RunSpec` in a folder of its own, or goes on where it was left."""

import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from attnlab.atomic import write_atomic
from attnlab.data import Dataset
from attnlab.data.dataset import Baselines
from attnlab.extras import extra
from attnlab.lab.experiment import Experiment
from attnlab.lab.result import ModelSizes, RunResult, read_result
from attnlab.lab.spec import RunSpec
from attnlab.models import applied_parameters, flops_per_token, matrix_axes, num_parameters
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.fit import FitResult, NonFiniteLoss, fit
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.optimizers import make_optimizer

RUNS, SHARED = "runs", "shared"
"""Folders of a workdir: one folder for each run, and what runs share."""


class RunInUse(RuntimeError):
    """Another process runs it now."""


def run_folder(workdir: Path, spec: RunSpec) -> Path:
    """The folder of a run."""
    return workdir / RUNS / spec.id


def run_one(spec: RunSpec, workdir: str | Path, *, speaks: bool = True) -> RunResult:
    """Trains a run in `workdir/runs/ID` and returns its result.

    A function of (spec, data, machine): killed at any moment and called again, it goes on from its
    newest checkpoint and ends with the same numbers, bit for bit, but for its seconds. A run that
    has a result is not run again. A loss that is not finite gives a result of status "diverged".

    Args:
      spec: the run.
      workdir: of the sweep. Tokenizers and baselines that its runs share are kept in `shared`.
      speaks: print a line at each step that is logged?

    Raises:
      ValueError: the folder holds another run of the same id.
      RunInUse: another process runs it.
      attnlab.training.Stopped: after SIGTERM or SIGINT, and a save.
    """
    folder = run_folder(Path(workdir), spec)
    folder.mkdir(parents=True, exist_ok=True)
    with _own(folder):
        if found := read_result(folder):
            _check_same(spec, found.spec, folder)
            return found
        _claim(spec, folder)
        result = _run(spec, folder, Path(workdir) / SHARED, speaks)
        result.write(folder)
    return result


def _run(spec: RunSpec, folder: Path, shared: Path, speaks: bool) -> RunResult:
    experiment = spec.config
    config = dataclasses.replace(experiment.train, seeds=(spec.seed,))
    dataset = load_data(experiment, shared)
    with (
        Recorder(
            folder, config.seeds, name=spec.id, speaks=speaks, hyperparameters=spec.to_dict()
        ) as recorder,
        Checkpoints(folder / "checkpoints", say=recorder.say) as checkpoints,
    ):
        try:
            fitted = fit(
                experiment.model.build(),
                OBJECTIVES[experiment.task],
                make_optimizer(config, matrix_axes(experiment.model)),
                config,
                dataset,
                recorder=recorder,
                checkpoints=checkpoints,
            )
        except NonFiniteLoss as error:
            recorder.say(str(error))
            fitted = None
    return _result(spec, fitted, load_baselines(dataset, shared))


def _result(spec: RunSpec, fitted: FitResult | None, baselines: Baselines) -> RunResult:
    model, length = spec.config.model, spec.config.train.length
    sizes = ModelSizes(
        parameters=num_parameters(model),
        applied_parameters=applied_parameters(model),
        flops_per_token=flops_per_token(model, length),
        ffn_width=model.ffn.width,
    )
    return RunResult(
        spec=spec,
        status="complete" if fitted else "diverged",
        heldout=_of_seed(fitted.heldout) if fitted else {},
        train=_of_seed(fitted.train) if fitted else {},
        validation=_of_seed(fitted.validation) if fitted else {},
        baselines=baselines,
        sizes=sizes,
        seconds=round(fitted.wall_seconds, 3) if fitted else 0.0,
        tokens_per_second=round(fitted.tokens_per_second, 1) if fitted else 0.0,
        environment={
            "python": platform.python_version(),
            "jax": jax.__version__,
            "attnlab": metadata.version("attnlab"),
            "device": jax.local_devices()[0].device_kind,
        },
    )


def _of_seed(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(values[0]) for name, values in scores.items()}


def load_data(experiment: Experiment, shared: Path) -> Dataset:
    """The dataset. What is made for it (a tokenizer) is made once for all runs of a workdir."""
    key = json.dumps([experiment.to_dict()["data"], experiment.train.length], sort_keys=True)
    folder = shared / hashlib.sha256(key.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        dataset = experiment.data.load(experiment.train.length, folder)
        for name, content in dataset.files.items():
            if not (folder / name).exists():
                write_atomic(folder / name, content)
    return dataset


def load_baselines(dataset: Dataset, shared: Path) -> Baselines:
    """The baselines of the data, computed once for all runs of a workdir."""
    path = shared / f"baselines-{dataset.digest[:16]}.json"
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            write_atomic(path, json.dumps(dataset.baselines()).encode())
    found: Baselines = json.loads(path.read_text())
    return found


def _claim(spec: RunSpec, folder: Path) -> None:
    """Writes spec.json, or checks that the one there is the same run."""
    path = folder / "spec.json"
    if path.exists():
        _check_same(spec, RunSpec.from_dict(json.loads(path.read_text())), folder)
    else:
        write_atomic(path, json.dumps(spec.to_dict(), indent=1, allow_nan=False).encode())


def _check_same(spec: RunSpec, there: RunSpec, folder: Path) -> None:
    if spec.digest == there.digest:
        return
    ours, others = _flat(spec.to_dict()), _flat(there.to_dict())
    changed = [
        f"{name}: there {others.get(name)!r}, here {ours.get(name)!r}"
        for name in sorted({*ours, *others})
        if not name.startswith("tags.") and ours.get(name) != others.get(name)
    ]
    raise ValueError(
        f"{folder} holds another run of this id; use another workdir or id ({'; '.join(changed)})"
    )


def _flat(fields: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Locks the folder of a run; the lock ends with the process. Its text says who holds it."""
    with extra("train"):
        import filelock
    lock = filelock.FileLock(folder / "lock", timeout=0)
    try:
        with lock:
            yield
    except filelock.Timeout:
        raise RunInUse(
            f"{folder} is in use by another process; wait for it, end it, or use another workdir"
        ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process makes the same file."""
    with extra("train"):
        import filelock
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path):
        yield
