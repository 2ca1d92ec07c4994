"""`run_one`: trains one `RunSpec` in a folder of its own, or goes on where it was left."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import models
from attnlab.atomic import write_atomic
from attnlab.data import Dataset, keep_in
from attnlab.data.dataset import Baselines
from attnlab.lab.experiment import Experiment, check_lengths
from attnlab.lab.machine import environment
from attnlab.lab.result import (
    ModelSizes,
    Provenance,
    RunResult,
    Scores,
    TaskInfo,
    Timing,
    data_info,
    metric_infos,
)
from attnlab.lab.spec import RunSpec
from attnlab.lab.workdir import SHARED, claim, complete_result, held, run_folder, waiting
from attnlab.load import LoadedModel, load_start, with_plan_of
from attnlab.models import matrix_axes
from attnlab.names import lookup
from attnlab.sharing import Params
from attnlab.training import sharding
from attnlab.training.callbacks import Profile, parse_steps
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import TrainConfig, make_optimizer
from attnlab.training.fit import FitOptions, FitResult, fit
from attnlab.training.interrupts import NonFiniteLoss
from attnlab.training.loggers import LOGGERS, Recorder
from attnlab.training.objectives import Objective, check_output, input_shapes
from attnlab.training.sharding import StateSharding
from attnlab.training.step import InitParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is computed and recorded. None of it is in its spec: it changes no number, or last
    bits only.

    Attributes:
      model_parallel: devices that compute one model together, each its own heads and hidden units.
      shard_state: share parameters and optimizer out between devices that read other rows.
      loggers: names of `attnlab.training.LOGGERS`.
      profile: "FIRST:LAST", steps whose trace is written to the folder `profile` of the run.
      speaks: print a line at each step that is logged.

    Raises:
      ValueError: an unknown logger, or a `profile` that is not FIRST:LAST.

    >>> RunOptions(loggers=("tensorbord",))
    Traceback (most recent call last):
    ValueError: unknown logger 'tensorbord': did you mean 'tensorboard'? known: tensorboard, wandb
    """

    model_parallel: int = 1
    shard_state: bool = False
    loggers: tuple[str, ...] = ()
    profile: str = ""
    speaks: bool = True

    def __post_init__(self) -> None:
        for name in self.loggers:
            lookup(LOGGERS, name, what="logger")
        if self.profile:
            parse_steps(self.profile)


def run_one(
    spec: RunSpec,
    workdir: str | Path,
    *,
    options: RunOptions = RunOptions(),
    datasets: dict[str, Dataset] | None = None,
) -> RunResult:
    """Trains a run in `workdir/runs/ID` and returns its result.

    A function of (spec, data, machine): killed at any moment and called again, it goes on from its
    newest checkpoint and ends with the same numbers, bit for bit, but for its seconds. A run that
    has a result is not run again: no data are loaded then. A loss that is not finite gives a result
    of status "diverged". A spec that differs from that of a complete run in more `train.steps`
    alone makes it longer, where the schedule allows (`attnlab.lab.workdir`).

    Besides the result the folder holds `spec.json` (with the environment and the digest of the
    data), `metrics.jsonl`, `checkpoints`, `provenance.json` and `changes.diff`.

    Args:
      spec: the run.
      workdir: of the sweep. Tokenizers and baselines that its runs share are kept in `shared`.
      options: how it is computed and recorded.
      datasets: the dataset of the last run of this process, which the next one reads again.

    Returns:
      The result, which is also `result.json` in the folder.

    Raises:
      ValueError: the folder holds another run of the same id, or other files; or the experiment
        cannot be run.
      RunInUse: another process runs it.
      attnlab.training.Stopped: after SIGTERM or SIGINT, and a save.

        spec = lab.RunSpec("wide", lab.Experiment(model=ModelConfig(heads=Wide())), seed=0)
        result = lab.run_one(spec, "runs/one")
        result.scores.heldout["bits_per_byte"], result.timing.seconds
    """
    workdir = Path(workdir)
    folder, shared, experiment = run_folder(workdir, spec), workdir / SHARED, spec.config
    if found := complete_result(workdir, spec):
        return found
    with held(folder):
        config = dataclasses.replace(experiment.train, seeds=(spec.seed,))
        mesh = sharding.data_mesh(model_parallel=options.model_parallel, **config.device_batches)
        dataset = load_data(experiment, shared, folder, datasets)
        objective = _bound(experiment, dataset)
        start = load_start(experiment.start, spec.seed) if experiment.start else None
        notes = claim(folder, spec, dataset, start.digest if start else None)
        recorder = Recorder(
            folder,
            config.seeds,
            name=spec.id,
            loggers=options.loggers,
            hyperparameters=spec.to_dict(),
            writes=jax.process_index() == 0,
            speaks=options.speaks,
        )
        with recorder, Checkpoints(folder / "checkpoints", say=recorder.say) as checkpoints:
            params, origin = _initial(experiment, dataset, objective, start)
            for line in [*notes, f"starting from {origin}"] if origin else notes:
                recorder.say(line)
            baselines = load_baselines(dataset, _shared_by(experiment, shared))
            result = _result(spec, dataset, objective, baselines, origin)
            state_sharding = StateSharding(models.shard_axes(experiment.model), options.shard_state)
            profile = None
            if options.profile:
                profile = Profile(folder / "profile", *parse_steps(options.profile))
            try:
                fitted = fit(
                    experiment.model.build(),
                    experiment.objective,
                    make_optimizer(config, matrix_axes(experiment.model)),
                    config,
                    dataset,
                    recorder=recorder,
                    checkpoints=checkpoints,
                    options=FitOptions(mesh, state_sharding, params, experiment.calls, profile),
                )
                result = _scored(result, fitted)
            except NonFiniteLoss as error:
                recorder.say(str(error))
                result = dataclasses.replace(result, status="diverged", message=str(error))
            if jax.process_index() == 0:
                result.write(folder)
            sharding.wait_for_all("result")
    return dataclasses.replace(result, folder=folder)


def _bound(experiment: Experiment, dataset: Dataset) -> Objective:
    """The objective for these data. Raises ValueError where the model does not fit them."""
    bound = experiment.objective.bind(dataset.sizes)
    check_output(str(experiment.task), bound, experiment.model, dataset.sizes)
    # Scored rows may be longer than those of training.
    for rows in filter(None, (dataset.heldout, dataset.validation)):
        check_lengths(bound, rows(1), experiment.model)
    experiment.check_start()
    return bound


def _initial(
    experiment: Experiment, dataset: Dataset, objective: Objective, start: LoadedModel | None
) -> tuple[Params | InitParams | None, str]:
    """What `fit` begins with, and in words where that comes from."""
    if start is None:
        return experiment.init_params, ""
    rows = jax.tree.map(jnp.asarray, dataset.heldout(1))
    tokens = np.asarray(objective.prepare(rows, jax.random.key(0)).inputs["tokens"])
    params, change = with_plan_of(start.config, start.params, experiment.model, tokens)
    if not start.record:
        return params, f"{start.name}; {change}"
    other = start.record["source"]["sha256"] != dataset.digest
    more = "; it was trained on other data" if other else ""
    run = f"seed {start.seed} of {start.name} after {start.steps:,} steps"
    return params, f"{run}; {change}{more}"


def _result(
    spec: RunSpec, dataset: Dataset, objective: Objective, baselines: Baselines, origin: str
) -> RunResult:
    """The result before training."""
    model, train = spec.config.model, spec.config.train
    inputs = step_inputs(objective, dataset.shapes(), train)
    return RunResult(
        spec=spec,
        status="complete",
        scores=Scores(baselines=baselines),
        sizes=ModelSizes(
            parameters=models.num_parameters(model),
            applied_parameters=models.applied_parameters(model),
            flops_per_token=models.flops_per_token(model, train.length),
            ffn_width=model.ffn.width,
            cache_bytes_per_token=models.cache_bytes_per_token(model),
            parameters_by_uses=models.parameters_by_uses(model),
        ),
        task=TaskInfo(
            description=objective.description,
            metrics=metric_infos(objective),
            curves="held-out" if dataset.validation is None else "validation",
        ),
        data=data_info(dataset),
        provenance=Provenance(
            environment=environment(),
            start=origin,
            attention=models.explain_model(model, inputs, training=True),
        ),
    )


def _scored(result: RunResult, fitted: FitResult) -> RunResult:
    """The result with what the training gave."""
    scores = dataclasses.replace(
        result.scores,
        heldout=_of_seed(fitted.heldout),
        train=_of_seed(fitted.train),
        validation=_of_seed(fitted.validation),
    )
    seconds, speed = round(fitted.wall_seconds, 3), round(fitted.tokens_per_second, 1)
    timing = Timing(seconds=seconds, tokens_per_second=speed)
    return dataclasses.replace(result, scores=scores, timing=timing)


def _of_seed(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    return _finite({name: float(values[0]) for name, values in scores.items()})


def _finite(scores: Mapping[str, float]) -> dict[str, float]:
    """What is no number (of generated texts, of no rows) is left out: JSON has none."""
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def step_inputs(
    objective: Objective, row: Mapping[str, jax.ShapeDtypeStruct], config: TrainConfig
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the model's inputs in a part of a training step; `row` are those of one row."""
    rows = config.batch_size // config.accumulate
    shapes = {name: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for name, a in row.items()}
    return input_shapes(objective, shapes)


def load_data(
    experiment: Experiment,
    shared: Path,
    folder: Path,
    datasets: dict[str, Dataset] | None = None,
) -> Dataset:
    """The dataset. What is made for it (a tokenizer) is made, and its files are read and hashed,
    once for all runs of a workdir.

    Args:
      experiment: names the data.
      shared: of the workdir.
      folder: of the run; files that are there already are those that are used.
      datasets: that of the last run of this process; it is replaced where another is loaded.
    """
    place = _shared_by(experiment, shared)
    with waiting(place), keep_in(shared / "texts"):
        if (folder / "tokenizer.json").exists():
            return experiment.data.load(experiment.train.length, folder)
        if datasets and place.name in datasets:
            return datasets[place.name]
        dataset = experiment.data.load(experiment.train.length, place)
        for name, content in dataset.files.items():
            if not (place / name).exists():
                write_atomic(place / name, content)
    if datasets is not None:
        datasets.clear()
        datasets[place.name] = dataset
    return dataset


def _shared_by(experiment: Experiment, shared: Path) -> Path:
    """The folder of what runs with these data share."""
    key = json.dumps([experiment.to_dict()["data"], experiment.train.length], sort_keys=True)
    return shared / hashlib.sha256(key.encode()).hexdigest()[:12]


def load_baselines(dataset: Dataset, place: Path) -> Baselines:
    """The baselines of the data that are finite, computed once for all runs that share `place`."""
    path = place / f"baselines-{dataset.digest[:16]}.json"
    with waiting(place):
        if not path.exists():
            write_atomic(path, json.dumps(dataset.baselines()).encode())
    found: Baselines = json.loads(path.read_text())
    return {metric: _finite(values) for metric, values in found.items()}
