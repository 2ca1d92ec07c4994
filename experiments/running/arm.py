"""One arm: a config -> model, data and optimizer -> `fit` -> result.json. Its seeds are inside."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import training
from attnlab.model import accounting, alike
from attnlab.model.config import ModelConfig
from attnlab.model.explain import explain_model
from attnlab.model.match import match, under_layout
from attnlab.model.matrices import weight_axes
from attnlab.model.splits import split_axes
from attnlab.names import find
from attnlab.training import shard
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.metrics import Recorder
from attnlab.training.schedules import fork_step
from attnlab.training.sources import SOURCES, Batch, Data, Sizes, Source
from attnlab.training.tasks import TASKS, Task, abstract_inputs
from experiments.running import initial, launch, machine, maps, workdir, writing
from experiments.running.longer import go_on

COMPLETE, DIVERGED = "complete", "diverged"


class Arm(NamedTuple):
    """A config, checked and resolved: nothing in it can fail later for what it says."""

    task: str
    model: ModelConfig
    train: training.TrainConfig
    data: Data
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
    task = find("task", config.task, TASKS)
    trains = training.TrainConfig(**{**config.train, "seeds": tuple(config.train.seeds)})
    model, data = ModelConfig(**config.model), data_of(config.data)
    if model.kind not in task.kinds:
        kinds = " or ".join(map(repr, task.kinds))
        raise ValueError(f"task {config.task!r} needs model.kind={kinds}, not {model.kind!r}")
    sizes = data.sizes()
    NEEDS[task.reads](config.task, task, model, sizes)
    _check_lengths(task.bind(sizes), data.shapes(trains.length), model)
    budget, _, ratio = config.match.budget.partition(":")
    if budget == "seconds" and not ratio:
        raise ValueError(
            "match.budget=seconds is measured by experiments.sweep, which tells every arm the "
            "ffn_width that it found; run the arm by a sweep"
        )
    if budget and not ratio:
        reference = under_layout(model, config.match.layout, config.match.plan)
        model = match(model, reference, budget, length=trains.length).config
    if config.start:
        initial.check(model, config.start, trains.seeds)
    if trains.frozen:
        inputs = abstract_inputs(task.bind(sizes), data.shapes(trains.length))
        made = lambda: model.build().init(jax.random.key(0), **_zeros(inputs))["params"]
        training.frozen(trains.frozen, jax.eval_shape(made))
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


def _check_lengths(task: Task, rows: Batch, model: ModelConfig) -> None:
    inputs = abstract_inputs(task, rows)
    for name in (name for name in maps.TEXTS if name in inputs):
        if (length := inputs[name].shape[1]) > model.max_len:
            raise ValueError(
                f"the data give {name!r} of {length} tokens, longer than model.max_len "
                f"{model.max_len}; raise it, or lower train.length where that cuts the rows"
            )


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def data_of(fields: Any) -> Data:
    """`config.data` -> the row of `SOURCES` with its fields."""
    given = dict(fields)
    row = find("source", given.pop("source"), SOURCES)
    known = [field.name for field in dataclasses.fields(row)]  # type: ignore[arg-type]
    if set(given) != set(known):
        raise ValueError(
            f"data.source={fields['source']!r} has the fields {', '.join(known)}, config.data has "
            f"{', '.join(given)}; choose the source by its word behind the config file's colon"
        )
    return row(**given)


def _needs_logits(name: str, task: Task, model: ModelConfig, sizes: Sizes) -> None:
    most = sizes.vocab_size + len(task.symbols)
    if model.vocab_size < most:
        raise ValueError(
            f"task {name!r} needs model.vocab_size of at least {most}, not {model.vocab_size}"
        )
    if model.readout == "none":
        raise ValueError(
            f"task {name!r} reads logits, model.readout='none' has none; give the model a "
            "readout, or start from a folder with a language-model readout"
        )


def _needs_classes(name: str, task: Task, model: ModelConfig, sizes: Sizes) -> None:
    most = sizes.vocab_size + len(task.symbols)
    if model.vocab_size < most:
        raise ValueError(
            f"task {name!r} needs model.vocab_size of at least {most}, not {model.vocab_size}"
        )
    if model.pooled_classes != sizes.num_classes:
        raise ValueError(
            f"task {name!r} needs model.pooled_classes={sizes.num_classes} (and a model.pooler), "
            f"not {model.pooled_classes}"
        )


NEEDS = {"logits": _needs_logits, "classes": _needs_classes}
"""What a task reads -> a check that the model has it for data of these sizes."""


def run(
    config: Any, folder: Path, name: str = "", *, model_parallel: int = 1, cut_state: bool = False
) -> dict[str, Any]:
    """Runs the arm in `folder`, or goes on where it was left; returns what result.json holds.

    `model_parallel` devices compute one model together, each its own heads and hidden units; with
    `cut_state` the devices of a data axis share weights and optimizer out between them
    (`training.shard`). Neither changes more than last bits, and a run may go on under others.

    Raises ValueError before any work for bad input and where another process owns the folder,
    training.Stopped after a signal. A loss that is not finite ends the arm with status "diverged"
    and a message.
    """
    arm = resolve(config)
    with workdir.own(folder) if jax.process_index() == 0 else contextlib.nullcontext():
        return _run(arm, config, folder, name, model_parallel, cut_state)


def _run(
    arm: Arm, config: Any, folder: Path, name: str, model_parallel: int, cut_state: bool
) -> dict[str, Any]:
    """`run` in a folder that is ours."""
    sizes = {"batch_size": arm.train.batch_size, "eval_batch_size": arm.train.eval_batch_size}
    if arm.train.accumulate > 1:
        sizes["batch_size / accumulate"] = arm.train.batch_size // arm.train.accumulate
    mesh = shard.data_mesh(model_parallel=model_parallel, **sizes)
    source = arm.data.load(arm.train.length, folder)
    task = TASKS[arm.task].bind(source.sizes)
    # Rows that are scored may be longer than those that are learnt from.
    for rows in filter(None, (source.heldout, source.validation)):
        _check_lengths(task, rows(1), arm.model)
    record = {
        "config": config.to_dict(),
        "source": {"name": source.name, "sha256": source.digest, "facts": source.facts},
        "environment": machine.environment(),
    }
    if arm.start:
        stored = initial.start(arm.start, arm.train.seeds)
        record["start"] = stored.record
    size = accounting.unique_parameters(arm.model) * len(arm.train.seeds)
    # Parameters and two moments in float32, for three checkpoints and the one being written.
    changed, longer = [], ""
    if jax.process_index() == 0:
        longer = go_on(folder, record, arm.train)
        changed = workdir.claim(folder, record, room=12 * 4 * size + (64 << 20))
        for file, content in source.files.items():
            workdir.write_bytes(folder / file, content)
    shard.wait_for_all("workdir")
    done = folder / workdir.RESULT
    if done.exists():
        return workdir.read_json(done)
    with (
        Recorder(
            folder,
            arm.train.seeds,
            name=name,
            about=_about(config),
            writes=jax.process_index() == 0,
        ) as recorder,
        Checkpoints(
            folder / "checkpoints", also=fork_step(arm.train), say=recorder.say
        ) as checkpoints,
    ):
        if longer:
            recorder.say(longer)
        for line in changed:
            recorder.say(f"since this run began, {line}: its numbers may differ in the last bits")
        model = arm.model.build()
        shapes = step_inputs(task, source.shapes(), arm.train)
        result = {
            "name": name,
            "asks": task.asks,
            "metrics": [metric.describe() for metric in task.metrics],
            "layout": arm.model.layout,
            "plan": arm.model.plan,
            "match": arm.match,
            **({"seconds_of_reference": arm.ratio} if arm.ratio else {}),
            "model": training.describe_model(model),
            "seeds": list(arm.train.seeds),
            "steps": arm.train.steps,
            "length": arm.train.length,
            "learning_rate": arm.train.learning_rate,
            "unique_parameters": accounting.unique_parameters(arm.model),
            "applied_parameters": accounting.applied_parameters(arm.model),
            "uses": accounting.parameters_by_uses(arm.model),
            "cache_bytes_per_token": accounting.model_cache_bytes(arm.model),
            "flops_per_token": accounting.flops_per_token(arm.model, arm.train.length),
            "yardsticks": source.yardsticks(),
            "curves": "held-out" if source.validation is None else "validation",
            "attention": explain_model(arm.model, shapes, training=True),
        }
        params: Any = initial.fresh(arm.model, arm.same)
        if arm.start:
            inputs = task.prepare(source.heldout(1), jax.random.key(0)).inputs
            params, told = initial.begin(stored, arm.model, inputs["tokens"])
            if stored.record.get("source", source.digest) != source.digest:
                told += "; it was trained on other data"
            recorder.say(f"starting from {told}")
            result["start"] = told
        try:
            fitted = training.fit(
                model,
                task,
                training.make_optimizer(arm.train, weight_axes(arm.model)),
                arm.train,
                source,
                mesh=mesh,
                recorder=recorder,
                checkpoints=checkpoints,
                params=params,
                cut=shard.Cut(split_axes(arm.model), cut_state),
                watch=functools.partial(_watch, arm.model) if arm.watch else None,
            )
        except training.NonFiniteLoss as error:
            result |= {"status": DIVERGED, "message": str(error)}
        else:
            result |= {
                "status": COMPLETE,
                **{f"heldout_{name}": v.tolist() for name, v in fitted.heldout.items()},
                **{f"train_{name}": v.tolist() for name, v in fitted.train.items()},
                **{f"weights_{name}": v.tolist() for name, v in fitted.watched.items()},
                "tokens_per_second": fitted.tokens_per_second,
                "wall_seconds": fitted.wall_seconds,
            }
            seen, sample = _looked_at(arm, model, task, source, fitted, shapes, params)
            result |= {"sample": sample} if sample else {}
            if seen and jax.process_index() == 0:
                np.savez_compressed(folder / maps.FILE, **seen)
                recorder.show(fitted.step, {}, {"attention": maps.tiles(seen["probs"])})
        if jax.process_index() == 0:
            workdir.write_json(done, result)
        shard.wait_for_all("result")
        return result


def _looked_at(
    arm: Arm, model: Any, task: Task, source: Source, fitted: Any, shapes: Any, params: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Maps and statistics of the heads, and a text that the model writes, of the first seed;
    nothing where there are none. `params` are what `fit` began with."""
    tokens, heads = shapes["tokens"], {c.num_heads for c in arm.model.stacks.values()}
    if tokens.ndim != 2:  # features
        return {}, {}
    seed, rows = arm.train.seeds[0], maps.shown_rows(task, source)

    def begun(inputs: dict[str, Any]) -> Any:
        return initial.begun(model, params, seed, inputs)

    seen, told = {}, {}
    # No map of layers that differ in their number of heads, nor of two such stacks.
    of_one_number = len(heads) == 1 and arm.model.encoder_heads is None
    if tokens.shape[1] <= maps.LONGEST and of_one_number:
        seen = maps.of_fitted(arm.model, task, fitted, source, rows, seed, begun)
    if arm.task == writing.TASK and hasattr(arm.data, "tokenizer"):
        last = jax.tree.map(lambda a: a[0], shard.gather(fitted.state.params))
        told = writing.sample(arm.model, last, source, rows[0], seed)
    return seen, told


def _watch(model: ModelConfig, begun: Any, params: Any) -> dict[str, jax.Array]:
    apart, moved = alike.heads_apart(model, params), alike.least_moved(begun, params)
    return {"heads_apart": apart, "least_moved": moved}


def step_inputs(task: Task, row: Any, trains: training.TrainConfig) -> dict[str, Any]:
    """Shapes of what the model is called on in a training step; `row` are those of one row."""
    count = trains.batch_size // trains.accumulate
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), row)
    return abstract_inputs(task, batch)


def _about(config: Any) -> str:
    """Every field that is set, as a Markdown table."""
    fields = launch.fields(config).items()
    rows = [f"| {path} | {value} |" for path, (_, value) in fields if value not in (None, "")]
    return "\n".join(["| field | value |", "|---|---|", *rows])
