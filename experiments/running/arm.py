"""One arm: a config -> model, data and optimizer -> `fit` -> result.json. Its seeds are inside."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import models, training
from attnlab.data import DATASETS, DataConfig, Dataset
from attnlab.lab.experiment import check_lengths, check_output
from attnlab.models import ModelConfig
from attnlab.models.budget import Budget
from attnlab.models.config import heads_per_layer
from attnlab.models.head_similarity import smallest_change
from attnlab.names import lookup
from attnlab.sharing.named_plans import plan_name
from attnlab.training import sharding
from attnlab.training.callbacks import parse_steps
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES, Objective, input_shapes
from attnlab.training.schedules import fork_step
from experiments.running import initial, machine, maps, workdir, writing
from experiments.running.longer import go_on

COMPLETE, DIVERGED = "complete", "diverged"


class Arm(NamedTuple):
    """A config, checked and resolved: nothing in it can fail later for what it says."""

    task: str
    model: ModelConfig
    train: training.TrainConfig
    data: DataConfig
    match: str
    """The budget that is equal to a reference's, or ""."""
    ratio: float | None
    """Of measured seconds of a step to the reference's, where these are the budget."""
    start: str
    """A published folder or the folder of a run, whose weights it starts from; or ""."""
    same: initial.Same
    watch: bool
    """Are the heads measured at every evaluation?"""


def resolve(config: Any) -> Arm:
    """A config of `experiments/configs` -> Arm. Raises ValueError, saying what to change."""
    task = lookup(OBJECTIVES, config.task, what="task")
    trains = training.TrainConfig(**{**config.train, "seeds": tuple(config.train.seeds)})
    model, data = model_of(config.model), data_of(config.data)
    if model.kind not in task.model_kinds:
        kinds = " or ".join(map(repr, task.model_kinds))
        raise ValueError(f"task {config.task!r} needs model.kind={kinds}, not {model.kind!r}")
    sizes = data.sizes()
    check_output(config.task, task, model, sizes)
    check_lengths(task.bind(sizes), data.shapes(trains.length), model)
    budget, _, ratio = config.match.budget.partition(":")
    if budget == "seconds" and not ratio:
        raise ValueError(
            "match.budget=seconds is measured by experiments.sweep, which tells every arm the "
            "ffn.width that it found; run the arm by a sweep"
        )
    if budget and not ratio:
        reference = models.with_layout(model, config.match.layout, config.match.sharing)
        model = models.match_budget(model, reference, _budget(budget), length=trains.length).config
    if config.start:
        initial.check(model, config.start, trains.seeds)
    if trains.frozen:
        inputs = input_shapes(task.bind(sizes), data.shapes(trains.length))
        made = lambda: model.build().init(jax.random.key(0), **_zeros(inputs))["params"]
        training.frozen_mask(trains.frozen, jax.eval_shape(made))
    same = initial.Same(**config.same)
    if initial.fresh(model, same) and config.start:
        raise ValueError(f"same.* is of fresh weights; leave it out, or start={config.start!r}")
    return Arm(
        config.task,
        model,
        trains,
        data,
        budget,
        float(ratio) if ratio else None,
        config.start,
        same,
        config.watch_heads,
    )


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def _budget(name: str) -> Budget:
    """The name of a budget that can be counted."""
    return lookup({budget: budget for budget in get_args(Budget)}, name, what="match.budget")


def model_of(fields: Any) -> ModelConfig:
    """`config.model` -> the config of the model."""
    return models.from_dict(fields.to_dict())


def data_of(fields: Any) -> DataConfig:
    """`config.data` -> the row of `DATASETS` with its fields."""
    given = dict(fields)
    row = lookup(DATASETS, given.pop("source"), what="source")
    known = [field.name for field in dataclasses.fields(row)]  # type: ignore[arg-type]
    if set(given) != set(known):
        raise ValueError(
            f"data.source={fields['source']!r} has the fields {', '.join(known)}, config.data has "
            f"{', '.join(given)}; choose the source by its word behind the config file's colon"
        )
    return row(**given)


def run(
    config: Any,
    folder: Path,
    name: str = "",
    *,
    model_parallel: int = 1,
    cut_state: bool = False,
    loggers: Sequence[str] = (),
    profile: str = "",
) -> dict[str, Any]:
    """Runs the arm in `folder`, or goes on where it was left; returns what result.json holds.

    `model_parallel` devices compute one model together, each its own heads and hidden units; with
    `cut_state` the devices of a data axis share weights and optimizer out between them
    (`training.sharding`). Neither changes more than last bits, and a run may go on under others.
    `loggers` are names of `training.LOGGERS`; `profile`, "10:20", are the steps whose trace is
    written to `folder/profile`. They are not in the config, since they change no number.

    Raises ValueError before any work for bad input and where another process owns the folder,
    training.Stopped after a signal. A loss that is not finite ends the arm with status "diverged"
    and a message.
    """
    arm = resolve(config)
    callbacks = []
    if profile:
        callbacks.append(training.Profile(folder / "profile", *parse_steps(profile)))
    recorder = functools.partial(
        Recorder,
        folder,
        arm.train.seeds,
        name=name,
        loggers=loggers,
        hyperparameters=config.to_dict(),
        writes=jax.process_index() == 0,
    )
    with workdir.own(folder) if jax.process_index() == 0 else contextlib.nullcontext():
        return _run(arm, config, folder, recorder, callbacks, model_parallel, cut_state)


def _run(
    arm: Arm,
    config: Any,
    folder: Path,
    make_recorder: Callable[[], Recorder],
    callbacks: Sequence[training.Callback],
    model_parallel: int,
    cut_state: bool,
) -> dict[str, Any]:
    """`run` in a folder that is ours."""
    mesh = _mesh(arm.train, model_parallel)
    source = arm.data.load(arm.train.length, folder)
    task = OBJECTIVES[arm.task].bind(source.sizes)
    # Rows that are scored may be longer than those that are learnt from.
    for rows in filter(None, (source.heldout, source.validation)):
        check_lengths(task, rows(1), arm.model)
    stored = initial.start(arm.start, arm.train.seeds) if arm.start else None
    said = _claim(arm, config, folder, source, stored)
    sharding.wait_for_all("workdir")
    done = folder / workdir.RESULT
    if done.exists():
        there: dict[str, Any] = workdir.read_json(done)
        return there
    with (
        make_recorder() as recorder,
        Checkpoints(
            folder / "checkpoints", also=fork_step(arm.train), say=recorder.say
        ) as checkpoints,
    ):
        for line in said:
            recorder.say(line)
        shapes = step_inputs(task, source.shapes(), arm.train)
        result = _described(arm, recorder.name, task, source, shapes)
        params: Any = initial.fresh(arm.model, arm.same)
        if stored is not None:
            params, result["start"] = _started(arm, stored, task, source)
            recorder.say(f"starting from {result['start']}")
        options = training.FitOptions(
            mesh=mesh,
            sharding=sharding.StateSharding(models.shard_axes(arm.model), cut_state),
            params=params,
            measure=functools.partial(_watch, arm.model) if arm.watch else None,
            callbacks=callbacks,
        )
        result |= _fit(arm, task, source, recorder, checkpoints, options)
        if jax.process_index() == 0:
            workdir.write_json(done, result)
        sharding.wait_for_all("result")
        return result


def _fit(
    arm: Arm,
    task: Objective,
    source: Dataset,
    recorder: Recorder,
    checkpoints: Checkpoints,
    options: training.FitOptions,
) -> dict[str, Any]:
    """What result.json holds after the training. An error in maps or sample does not lose it."""
    try:
        fitted = training.fit(
            arm.model.build(),
            task,
            training.make_optimizer(arm.train, models.matrix_axes(arm.model)),
            arm.train,
            source,
            recorder=recorder,
            checkpoints=checkpoints,
            options=options,
        )
    except training.NonFiniteLoss as error:
        return {"status": DIVERGED, "message": str(error)}
    tokens, sample = step_inputs(task, source.shapes(), arm.train)["tokens"], None
    is_text = tokens.ndim == 2  # else features
    if is_text and tokens.shape[1] <= maps.LONGEST and _of_one_number(arm.model):
        show = functools.partial(_show_heads, arm, task, source, fitted, options.params, recorder)
        recorder.attempt("the maps of the heads", show)
    if is_text and arm.task == writing.TASK and hasattr(arm.data, "tokenizer"):
        write = functools.partial(_sample, arm, task, source, fitted)
        sample = recorder.attempt("the sample", write)
    return _scores(fitted) | ({"sample": sample} if sample else {})


def _mesh(trains: training.TrainConfig, model_parallel: int) -> Any:
    """The devices of a run; ValueError where its batches do not divide."""
    sizes = {"batch_size": trains.batch_size, "eval_batch_size": trains.eval_batch_size}
    if trains.accumulate > 1:
        sizes["batch_size / accumulate"] = trains.batch_size // trains.accumulate
    return sharding.data_mesh(model_parallel=model_parallel, **sizes)


def _claim(
    arm: Arm, config: Any, folder: Path, source: Dataset, stored: initial.Start | None
) -> list[str]:
    """Makes the folder this run's. Returns what to say: that it goes on for more steps, and what
    differs in the environment since it began."""
    record = {
        "config": config.to_dict(),
        "source": {"name": source.name, "sha256": source.digest, "facts": source.facts},
        "environment": machine.environment(),
    }
    if stored is not None:
        record["start"] = stored.record
    if jax.process_index() != 0:
        return []
    longer = go_on(folder, record, arm.train)
    # Parameters and two moments in float32, for three checkpoints and the one being written.
    size = models.num_parameters(arm.model) * len(arm.train.seeds)
    changed = workdir.claim(folder, record, room=12 * 4 * size + (64 << 20))
    for file, content in source.files.items():
        workdir.write_bytes(folder / file, content)
    warnings = [
        f"since this run began, {line}: its numbers may differ in the last bits" for line in changed
    ]
    return [longer, *warnings] if longer else warnings


def _described(
    arm: Arm, name: str, task: Objective, source: Dataset, shapes: dict[str, Any]
) -> dict[str, Any]:
    """What result.json holds before any training."""
    model, trains = arm.model, arm.train
    return {
        "name": name,
        "asks": task.description,
        "metrics": [metric.describe() for metric in task.metrics],
        "layout": model.heads.name,
        "plan": model.sharing if isinstance(model.sharing, str) else plan_name(model.sharing),
        "match": arm.match,
        **({"seconds_of_reference": arm.ratio} if arm.ratio else {}),
        "model": training.describe_model(model.build()),
        "seeds": list(trains.seeds),
        "steps": trains.steps,
        "length": trains.length,
        "learning_rate": trains.learning_rate,
        "unique_parameters": models.num_parameters(model),
        "applied_parameters": models.applied_parameters(model),
        "uses": models.parameters_by_uses(model),
        "cache_bytes_per_token": models.cache_bytes_per_token(model),
        "flops_per_token": models.flops_per_token(model, trains.length),
        "yardsticks": source.baselines(),
        "curves": "held-out" if source.validation is None else "validation",
        "attention": attention_reports(model, shapes, training=True),
    }


def attention_reports(
    model: ModelConfig, inputs: dict[str, Any], *, training: bool
) -> dict[str, Any]:
    """`explain_model` by attention: "self", "cross" and "encoder"; with layer types one each, by
    their names."""
    found: dict[str, Any] = {}
    for stack, reports in models.explain_model(model, inputs, training=training).items():
        name = {"layers": "self", "encoder_layers": "encoder"}.get(stack, stack)
        found |= {name: reports["self"]} if "self" in reports else {}
        found |= {"cross": reports["cross"]} if "cross" in reports else {}
    return found


def _started(
    arm: Arm, stored: initial.Start, task: Objective, source: Dataset
) -> tuple[list[Any], str]:
    """The weights of each seed, and in words where they come from."""
    rows = jax.tree.map(jnp.asarray, source.heldout(1))
    inputs = task.prepare(rows, jax.random.key(0)).inputs
    params, told = initial.begin(stored, arm.model, inputs["tokens"])
    if stored.record.get("source", source.digest) != source.digest:
        told += "; it was trained on other data"
    return params, told


def _scores(fitted: training.FitResult) -> dict[str, Any]:
    """What result.json holds of a training that came to its end."""
    return {
        "status": COMPLETE,
        **{f"heldout_{name}": v.tolist() for name, v in fitted.heldout.items()},
        **{f"train_{name}": v.tolist() for name, v in fitted.train.items()},
        **{f"validation_{name}": v.tolist() for name, v in fitted.validation.items()},
        **{f"weights_{name}": v.tolist() for name, v in fitted.measured.items()},
        "tokens_per_second": fitted.tokens_per_second,
        "wall_seconds": fitted.wall_seconds,
    }


def _show_heads(
    arm: Arm,
    task: Objective,
    source: Dataset,
    fitted: training.FitResult,
    params: Any,
    recorder: Recorder,
) -> None:
    """Writes maps and statistics of the heads of the first seed, where there are any. `params` are
    what `fit` began with."""
    seed, rows = arm.train.seeds[0], maps.shown_rows(task, source)

    def begun(inputs: dict[str, Any]) -> Any:
        return initial.begun(arm.model.build(), params, seed, inputs)

    seen = maps.of_fitted(arm.model, task, fitted, source, rows, seed, begun)
    if seen and jax.process_index() == 0:
        np.savez_compressed(recorder.folder / maps.FILE, **seen)
        recorder.log_figure(fitted.step, "attention", maps.tiles(seen["probs"]))


def _sample(
    arm: Arm, task: Objective, source: Dataset, fitted: training.FitResult
) -> dict[str, Any]:
    """A text that the model of the first seed writes."""
    last = jax.tree.map(lambda a: a[0], sharding.gather(fitted.state.params))
    row = maps.shown_rows(task, source)[0]
    return writing.sample(arm.model, last, source, row, arm.train.seeds[0])


def _of_one_number(model: ModelConfig) -> bool:
    """Have all layers equally many heads? There is no map of others."""
    try:
        heads_per_layer(model)
    except ValueError:
        return False
    return True


def _watch(model: ModelConfig, begun: Any, params: Any) -> dict[str, jax.Array]:
    moved = smallest_change(begun, params)
    return {"heads_apart": models.head_distance(model, params), "least_moved": moved}


def step_inputs(task: Objective, row: Any, trains: training.TrainConfig) -> dict[str, Any]:
    """Shapes of what the model is called on in a training step; `row` are those of one row."""
    count = trains.batch_size // trains.accumulate
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), row)
    return input_shapes(task, batch)
