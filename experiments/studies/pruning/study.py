"""How few heads are enough? Trainings with hard-concrete gates, beside other ways to choose heads.

`python -m experiments.prune` is the command; Voita et al. 2019 (arXiv 1905.09418) the method.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import interpret, load, training
from attnlab.data import Dataset
from attnlab.data.dataset import Batch
from attnlab.lab.experiment import Experiment
from attnlab.lab.text_table import columns
from attnlab.models import ModelConfig, matrix_axes, num_parameters
from attnlab.sharing import Params
from attnlab.tap import Patches
from attnlab.training.objectives import OBJECTIVES, Model, Objective
from attnlab.training.objectives.objective import Inputs
from attnlab.training.schedules import make_schedule

Values: TypeAlias = Mapping[str, np.ndarray]
"""Name of heads -> gates [R, N]"""
Loss: TypeAlias = Callable[[Model, Params, Patches], jax.Array]
"""(model, params, patch) -> the losses of rows [B]"""
DRAWS = 10
"""Choices by chance, in the model as it was."""
SURE = 20.0
"""log_alpha of a gate that every draw leaves open, or -SURE: closed."""
ALL = "."
"""What is frozen where the gates alone train."""


class Study(NamedTuple):
    """What is pruned, and how it is trained."""

    config: ModelConfig
    params: Params | None
    """None: new ones"""
    task: Objective
    source: Dataset
    trains: training.TrainConfig


class Row(NamedTuple):
    """What one pressure leads to. Losses are of rows that are held out."""

    pressure: float
    kept: int
    between: int
    """Of these, gates that are neither 0 nor 1"""
    loss: float
    before: dict[str, float]
    """Way to choose -> the loss of the model as it was, with as many heads"""
    after: dict[str, float]
    """The same after as much training"""
    gates: dict[str, list[list[float]]]
    heads: int | None = None
    """Of every layer of the model without the closed heads; None where none can go for good"""
    parameters: int | None = None
    small_loss: float | None = None
    why: str = ""
    """No model is smaller"""


def begin(
    folder: Path,
    seed: int | None,
    steps: int,
    *,
    frozen: bool = False,
    untrained: bool = False,
    learning_rate: float | None = None,
) -> Study:
    """A run as it is, and `steps` more; raises ValueError for what cannot be trained."""
    if frozen and untrained:
        raise ValueError(
            "with --frozen --untrained the initial weights would never be trained; leave one out"
        )
    found = load.read_run(folder, None if seed is None else [seed])
    [(seed, params)] = found.params.items()
    experiment = Experiment.from_dict(found.record["config"])
    was = experiment.train
    rate, schedule = was.optimizer.learning_rate, was.schedule
    if not untrained:
        last = float(make_schedule(schedule, rate, was.steps)(was.steps - 1))
        if not (learning_rate or last or frozen):
            raise ValueError(f"{folder} ended at a learning rate of 0; give --learning_rate")
        rate = last or 1.0
        schedule = dataclasses.replace(schedule, name="constant")
    rate = learning_rate or rate
    warmup = min(schedule.warmup(was.steps), steps // 10)
    trains = dataclasses.replace(
        was,
        steps=steps,
        seeds=(seed,),
        optimizer=dataclasses.replace(
            was.optimizer, learning_rate=rate, frozen=ALL if frozen else was.optimizer.frozen
        ),
        schedule=dataclasses.replace(schedule, warmup_steps=warmup),
        # Scored here, on more rows.
        evaluation=dataclasses.replace(was.evaluation, every=steps, windows=1, curve_windows=1),
        log_every=max(1, steps // 10),
        checkpoint_every=steps,
    )
    task = OBJECTIVES[experiment.task]._replace(final_metrics=None)
    place = load.run_of_seed(folder, seed) if (folder / load.SPECS).is_file() else folder
    source = experiment.data.load(trains.length, place)
    return Study(found.config, None if untrained else params, task, source, trains)


def at_pressures(
    study: Study,
    pressures: Sequence[float],
    *,
    by: Literal["layer", "group"],
    rate: float,
    rows: int,
) -> tuple[float | None, list[Row]]:
    """The loss of the model as it was (None: it is new), and what every pressure leads to."""
    gates = interpret.all_head_gates(study.config, by=by)
    gated = interpret.GatedModel(study.config.build(), gates)
    choose, judge = (loss_on(study, of(rows)) for of in (study.source.train, study.source.heldout))
    mean = lambda params, values: jnp.mean(judge(gated.model, params, gated.patch(values)))
    score: Callable[[Params, Values], jax.Array] = jax.jit(mean)
    orders: dict[str, list[np.ndarray]] = {}
    if study.params is not None:
        loss = functools.partial(choose, gated.model, study.params)
        orders |= {"gradient": [_order(interpret.head_importance, loss, gated)]}
        orders |= {"ablation": [_order(interpret.ablation_effects, loss, gated)]}
    size = sum(np.prod(one.shape) for one in gated.gates)
    draw = np.random.default_rng(study.trains.seeds[0])
    orders |= {"chance": [draw.permutation(size) for _ in range(DRAWS)]}
    begun, found = gated.with_gates({})["gates"], []
    for pressure in pressures:
        params = _train(study, gated, begun, pressure=pressure, rate=rate)
        values = {name: np.asarray(interpret.gate_values(a)) for name, a in params["gates"].items()}
        flat = np.concatenate([np.ravel(values[one.name]) for one in gated.gates])
        kept = int((flat > 0).sum())
        loss_then = float(score(params["model"], values))
        line = f"pressure {pressure:g}: {kept} of {size} heads, loss {loss_then:.4f}"
        print(line, file=sys.stderr, flush=True)
        shut = {n: [_without(gated, o[: size - kept]) for o in of] for n, of in orders.items()}
        before, after = {}, {}
        if study.params is not None:
            alone = {"gates": [{name: (a > 0).astype(np.float32) for name, a in values.items()}]}
            for name, some in (alone | shut).items():
                before[name] = float(np.mean([score(study.params, one) for one in some]))
        if study.trains.optimizer.frozen != ALL:
            for name, (one, *_) in shut.items():
                fixed = {n: np.where(a > 0, SURE, -SURE) for n, a in one.items()}
                other = _train(study, gated, fixed, pressure=0.0, rate=0.0)
                after[name] = float(score(other["model"], one))
        between = int(((flat > 0) & (flat < 1)).sum())
        as_data = {name: a.tolist() for name, a in values.items()}
        row = Row(pressure, kept, between, loss_then, before, after, as_data)
        found.append(_smaller(row, study, params["model"], gated, values, judge))
    ones: Values = {one.name: np.ones(one.shape, np.float32) for one in gated.gates}
    return None if study.params is None else float(score(study.params, ones)), found


def loss_on(study: Study, rows: Batch) -> Loss:
    """(model, params, patch) -> [B], whose mean is the mean loss of the targets of these rows."""
    task = study.task.bind(study.source.sizes)
    example = jax.jit(task.prepare)(rows, jax.random.key(0))

    def loss(model: Model, params: Params, patch: Patches) -> jax.Array:
        answer, _ = task.predict(model, params, example.inputs, patch=patch)
        each = task.loss(answer, example.targets, 0.0) * example.weights
        of_row = jnp.sum(each.reshape(len(each), -1), axis=1)
        return of_row * len(each) / jnp.maximum(jnp.sum(example.weights), 1)

    return loss


def _order(
    importance: Callable[..., jax.Array],
    loss: Callable[[Patches], jax.Array],
    gated: interpret.GatedModel,
) -> np.ndarray:
    """The numbers of all heads, the least important first."""
    found = [jax.jit(functools.partial(importance, loss, one))() for one in gated.gates]
    return np.argsort(np.concatenate([np.ravel(a) for a in found]), kind="stable")


def _without(gated: interpret.GatedModel, heads: np.ndarray) -> Values:
    """Gates of 0 for these, of 1 for the others."""
    flat = np.ones(sum(np.prod(one.shape) for one in gated.gates), np.float32)
    flat[heads] = 0
    ends = np.cumsum([np.prod(one.shape) for one in gated.gates])[:-1]
    parts = zip(gated.gates, np.split(flat, ends), strict=True)
    return {one.name: part.reshape(one.shape) for one, part in parts}


def _train(
    study: Study, gated: interpret.GatedModel, alphas: Params, *, pressure: float, rate: float
) -> Params:
    """Weights and gates after as many steps; `alphas` are the first log_alpha."""
    made = training.make_optimizer(study.trains, matrix_axes(study.config))
    transform = interpret.gated_optimizer(made.transform, penalty=pressure, learning_rate=rate)

    def start(params: Params) -> Params:
        return gated.with_gates(params) | {"gates": alphas}

    def new(key: jax.Array, inputs: Inputs) -> Params:
        return start(gated.model.init(key, **inputs)["params"])

    first = new if study.params is None else start(study.params)
    try:
        done = training.fit_in_memory(
            gated,
            study.task,
            study.trains,
            study.source,
            optimizer=made._replace(transform=transform),
            options=training.FitOptions(params=first),
        )
    except training.NonFiniteLoss:
        raise ValueError(
            f"the training with pressure {pressure:g} diverged: its loss is not finite; give a "
            "lower --learning_rate or --gate_rate"
        ) from None
    return done.params()


def _smaller(
    row: Row,
    study: Study,
    params: Params,
    gated: interpret.GatedModel,
    values: Values,
    judge: Loss,
) -> Row:
    """The row with the size and loss of the model without the heads that are closed everywhere."""
    try:
        small = interpret.remove_closed_heads(study.config, params, gated.gates, values)
    except ValueError as error:
        return row._replace(why=str(error))
    of = jax.jit(lambda w: jnp.mean(judge(small.config.build(), w, small.patch)))
    size = num_parameters(small.config)
    return row._replace(
        heads=small.config.heads.num_heads, parameters=size, small_loss=float(of(small.params))
    )


def table(config: ModelConfig, whole: float | None, rows: Sequence[Row], *, by: str) -> str:
    """A line a pressure; numbers are losses of rows that are held out."""
    size = sum(len(head) for of in rows[0].gates.values() for head in of)
    before, after = rows[0].before, rows[0].after
    heading = ["pressure", "heads", "between", "loss", "parameters"]
    heading += [f"{name} before" for name in before] + [f"{name} after" for name in after]
    lines = [heading]
    for row in rows:
        saved = "–" if row.parameters is None else f"{row.parameters:,}"
        line = [f"{row.pressure:g}", f"{row.kept}", f"{row.between}", f"{row.loss:.4f}", saved]
        lines.append(line + [f"{x:.4f}" for x in (*row.before.values(), *row.after.values())])
    was = "" if whole is None else f" The original model has all of them and loss {whole:.4f}."
    each = {
        "layer": "one for each head of each layer",
        "group": "one for each head of a parameter group",
    }[by]
    reasons = "; ".join(dict.fromkeys(row.why for row in rows if row.why))
    note = (
        f"Kept of {size} gates, {each}; between: neither 0 nor 1.{was}\n"
        f"All heads: {num_parameters(config):,} parameters."
        + (f" –: no smaller model, since {reasons}\n" if reasons else "\n")
        + "before: the original model with these heads, or as many chosen in another way;\n"
        "after: the same heads after the same training. chance: chosen at random, the mean of "
        f"{DRAWS} draws before, one after."
    )
    return "\n\n".join([columns(lines), note])
