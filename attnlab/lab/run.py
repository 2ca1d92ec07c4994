"""`run_one`: trains one `RunSpec` in a folder of its own, or goes on where it was left."""

import dataclasses
import functools
import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attnlab import models
from attnlab.atomic import write_atomic
from attnlab.data import Dataset
from attnlab.data.dataset import Baselines
from attnlab.lab.experiment import Experiment, check_lengths
from attnlab.lab.machine import environment
from attnlab.lab.result import (
    DataInfo,
    ModelSizes,
    Provenance,
    RunResult,
    Scores,
    TaskInfo,
    Timing,
    metric_infos,
)
from attnlab.lab.spec import RunSpec
from attnlab.lab.start import init_function
from attnlab.lab.workdir import (
    SHARED,
    RunInUse,
    check_same,
    complete_result,
    extend,
    held,
    run_folder,
    waiting,
)
from attnlab.load import SPEC, Start, load_start, with_plan_of
from attnlab.models import ModelConfig, matrix_axes
from attnlab.models.head_similarity import smallest_change
from attnlab.models.layer import Report
from attnlab.names import lookup
from attnlab.nested import differences
from attnlab.sharing import Params
from attnlab.training import sharding
from attnlab.training.callbacks import Profile, parse_steps
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import TrainConfig, fork_step, make_optimizer
from attnlab.training.fit import FitOptions, FitResult, fit
from attnlab.training.interrupts import NonFiniteLoss
from attnlab.training.loggers import LOGGERS
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES, Objective, check_output, input_shapes
from attnlab.training.step import InitParams

__all__ = [
    "RunInUse",
    "RunOptions",
    "attention_reports",
    "load_data",
    "run_one",
    "step_inputs",
]


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
) -> RunResult:
    """Trains a run in `workdir/runs/ID` and returns its result.

    A function of (spec, data, machine): killed at any moment and called again, it goes on from its
    newest checkpoint and ends with the same numbers, bit for bit, but for its seconds. A run that
    has a result is not run again: no data are loaded then. A loss that is not finite gives a result
    of status "diverged". A spec that differs from that of a complete run in more
    `train.steps` alone makes it longer, where the schedule allows (`attnlab.lab.workdir`).

    Besides the result the folder holds `spec.json` (with the environment and the digest of the
    data), `metrics.jsonl`, `checkpoints`,
    `provenance.json` and `changes.diff`.

    Args:
      spec: the run.
      workdir: of the sweep. Tokenizers and baselines that its runs share are kept in `shared`.
      options: how it is computed and recorded.

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
    folder = run_folder(Path(workdir), spec)
    if found := complete_result(Path(workdir), spec):
        return found
    with held(folder):
        config = dataclasses.replace(spec.config.train, seeds=(spec.seed,))
        run = _Run(spec, folder, config, options)
        return run.run(Path(workdir) / SHARED)


class _Run:
    """One call of `run_one`."""

    def __init__(
        self, spec: RunSpec, folder: Path, config: TrainConfig, options: RunOptions
    ) -> None:
        self.spec, self.folder, self.config, self.options = spec, folder, config, options
        self.experiment = spec.config
        self.model = spec.config.model
        self.start: Start | None = None

    def run(self, shared: Path) -> RunResult:
        """Trains and writes the result."""
        experiment = self.experiment
        profile = parse_steps(self.options.profile) if self.options.profile else None
        mesh = _mesh(self.config, self.options.model_parallel)
        self.dataset = load_data(experiment, shared, self.folder)
        task, sizes = OBJECTIVES[experiment.task], self.dataset.sizes
        check_output(experiment.task, task, self.model, sizes)
        self.objective = task.bind(sizes)
        # Scored rows may be longer than those of training.
        for rows in filter(None, (self.dataset.heldout, self.dataset.validation)):
            check_lengths(self.objective, rows(1), self.model)
        if experiment.start:
            experiment.check_start()
            self.start = load_start(experiment.start, self.spec.seed)
        lines = self._claim()
        sharding.wait_for_all("spec")
        with (
            Recorder(
                self.folder,
                self.config.seeds,
                name=self.spec.id,
                loggers=self.options.loggers,
                hyperparameters=self.spec.to_dict(),
                writes=jax.process_index() == 0,
                speaks=self.options.speaks,
            ) as self.recorder,
            Checkpoints(
                self.folder / "checkpoints",
                also=fork_step(self.config),
                say=self.recorder.say,
            ) as self.checkpoints,
        ):
            for line in lines:
                self.recorder.say(line)
            callbacks = [Profile(self.folder / "profile", *profile)] if profile else []
            result = self._fit(mesh, callbacks, load_baselines(self.dataset, shared))
            if jax.process_index() == 0:
                result.write(self.folder)
            sharding.wait_for_all("result")
        return result

    def _fit(self, mesh: Mesh, callbacks: Sequence[Profile], baselines: Baselines) -> RunResult:
        params: Params | InitParams | None = init_function(self.model, self.experiment.head_init)
        start = ""
        if self.start is not None:
            params, start = self._started(self.start)
            self.recorder.say(f"starting from {start}")
        measure = functools.partial(_measure_heads, self.model)
        options = FitOptions(
            mesh=mesh,
            sharding=sharding.StateSharding(
                models.shard_axes(self.model), self.options.shard_state
            ),
            params=params,
            measure=measure if self.experiment.measure_heads else None,
            callbacks=callbacks,
        )
        described = self._described(baselines, start)
        try:
            fitted = fit(
                self.model.build(),
                OBJECTIVES[self.experiment.task],
                make_optimizer(self.config, matrix_axes(self.model)),
                self.config,
                self.dataset,
                recorder=self.recorder,
                checkpoints=self.checkpoints,
                options=options,
            )
        except NonFiniteLoss as error:
            self.recorder.say(str(error))
            return dataclasses.replace(described, status="diverged", message=str(error))
        return _with_scores(described, fitted)

    def _started(self, start: Start) -> tuple[Params, str]:
        """The parameters, and in words where they come from."""
        rows = jax.tree.map(jnp.asarray, self.dataset.heldout(1))
        tokens = np.asarray(self.objective.prepare(rows, jax.random.key(0)).inputs["tokens"])
        params, change = with_plan_of(start.config, start.params, self.model, tokens)
        other = start.data_digest not in (None, self.dataset.digest)
        more = "; it was trained on other data" if other else ""
        return params, f"{start.description}; {change}{more}"

    def _described(self, baselines: Baselines, start: str) -> RunResult:
        """The result without scores."""
        model, length = self.model, self.config.length
        inputs = step_inputs(self.objective, self.dataset.shapes(), self.config)
        return RunResult(
            spec=self.spec,
            status="complete",
            scores=Scores(baselines=baselines),
            sizes=ModelSizes(
                parameters=models.num_parameters(model),
                applied_parameters=models.applied_parameters(model),
                flops_per_token=models.flops_per_token(model, length),
                ffn_width=model.ffn.width,
                cache_bytes_per_token=models.cache_bytes_per_token(model),
                parameters_by_uses=models.parameters_by_uses(model),
            ),
            task=TaskInfo(
                description=self.objective.description,
                metrics=metric_infos(self.objective),
                curves="held-out" if self.dataset.validation is None else "validation",
            ),
            data=self._data_info(),
            provenance=Provenance(
                environment=environment(),
                start=start,
                attention=attention_reports(model, inputs, training=True),
            ),
        )

    def _data_info(self) -> DataInfo:
        dataset = self.dataset
        return DataInfo(name=dataset.name, sha256=dataset.digest, facts=dataset.facts)

    def _claim(self) -> list[str]:
        """Writes spec.json, or checks that the one there is the same run on the same data.

        Returns:
          Lines for people: that it goes on for more steps, and what differs in the environment
          since it began.
        """
        if jax.process_index() != 0:
            return []
        record = self.spec.to_dict() | {
            "source": dataclasses.asdict(self._data_info()),
            "environment": environment(),
            "start": {"digest": self.start.digest} if self.start else None,
        }
        record = json.loads(json.dumps(record, allow_nan=False))
        path, lines = self.folder / SPEC, []
        if line := extend(self.folder, record, self.config):
            lines.append(line)
        if path.exists():
            there = json.loads(path.read_text(encoding="utf-8"))
            check_same(there, record, self.folder)
            changed = differences(there["environment"], record["environment"])
            return lines + [
                f"since this run began, {name} changed from {old} to {new}: its numbers may differ "
                "in the last bits"
                for name, old, new in changed
            ]
        self._check_disk()
        for name, content in self.dataset.files.items():
            write_atomic(self.folder / name, content)
        write_atomic(path, json.dumps(record, indent=1).encode())
        return lines

    def _check_disk(self) -> None:
        """Raises OSError where the disk has no space for the checkpoints."""
        # Parameters and two moments in float32, for three checkpoints and the one being written.
        needed = 12 * 4 * models.num_parameters(self.model) + (64 << 20)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(
                f"{self.folder}: the disk has {free >> 20} MiB left, this run needs "
                f"{needed >> 20} MiB"
            )


def _with_scores(described: RunResult, fitted: FitResult) -> RunResult:
    scores = dataclasses.replace(
        described.scores,
        heldout=_of_seed(fitted.heldout),
        train=_of_seed(fitted.train),
        validation=_of_seed(fitted.validation),
    )
    timing = Timing(
        seconds=round(fitted.wall_seconds, 3),
        tokens_per_second=round(fitted.tokens_per_second, 1),
    )
    weights = _of_seed(fitted.measured)
    return dataclasses.replace(described, scores=scores, timing=timing, weights=weights)


def _of_seed(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What is no number (of generated texts, of no rows) is left out: JSON has none."""
    found = {name: float(values[0]) for name, values in scores.items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _measure_heads(config: ModelConfig, initial: Params, params: Params) -> dict[str, jax.Array]:
    """Numbers of the parameters of a seed; see `models.head_distance`, `smallest_change`."""
    return {
        "heads_apart": models.head_distance(config, params),
        "least_moved": smallest_change(initial, params),
    }


def _mesh(config: TrainConfig, model_parallel: int) -> Mesh:
    """The devices of a run. Raises ValueError where its batches do not divide."""
    evaluation = config.evaluation.batch_size
    sizes = {"batch_size": config.batch_size, "evaluation.batch_size": evaluation}
    if config.accumulate > 1:
        sizes["batch_size / accumulate"] = config.batch_size // config.accumulate
    return sharding.data_mesh(model_parallel=model_parallel, **sizes)


def step_inputs(
    objective: Objective, row: Mapping[str, jax.ShapeDtypeStruct], config: TrainConfig
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the model's inputs in a part of a training step; `row` are those of one row."""
    rows = config.batch_size // config.accumulate
    shapes = {name: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for name, a in row.items()}
    return input_shapes(objective, shapes)


def attention_reports(
    model: ModelConfig, inputs: Mapping[str, object], *, training: bool
) -> Report:
    """`models.explain_model` by attention sublayer: "self", "cross" and "encoder"; with layer types
    one each, by their names."""
    found: Report = {}
    for stack, reports in models.explain_model(model, inputs, training=training).items():
        name = {"layers": "self", "encoder_layers": "encoder"}.get(stack, stack)
        found |= {name: reports["self"]} if "self" in reports else {}
        found |= {"cross": reports["cross"]} if "cross" in reports else {}
    return found


def load_data(experiment: Experiment, shared: Path, folder: Path | None = None) -> Dataset:
    """The dataset. What is made for it (a tokenizer) is made once for all runs of a workdir.

    Args:
      experiment: names the data.
      shared: of the workdir.
      folder: of the run; files that are there already are those that are used.
    """
    key = json.dumps([experiment.to_dict()["data"], experiment.train.length], sort_keys=True)
    place = shared / hashlib.sha256(key.encode()).hexdigest()[:12]
    place.mkdir(parents=True, exist_ok=True)
    with waiting(place / "lock"):
        if folder is not None and (folder / "tokenizer.json").exists():
            return experiment.data.load(experiment.train.length, folder)
        dataset = experiment.data.load(experiment.train.length, place)
        for name, content in dataset.files.items():
            if not (place / name).exists():
                write_atomic(place / name, content)
    return dataset


def load_baselines(dataset: Dataset, shared: Path) -> Baselines:
    """The baselines of the data, computed once for all runs of a workdir."""
    path = shared / f"baselines-{dataset.digest[:16]}.json"
    with waiting(path.with_suffix(".lock")):
        if not path.exists():
            write_atomic(path, json.dumps(dataset.baselines()).encode())
    found: Baselines = json.loads(path.read_text())
    return found
