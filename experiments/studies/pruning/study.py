"""How few heads are enough? Hard-concrete gates (Voita et al. 2019) for the heads of a run.

    python -m experiments.studies.pruning --workdir=runs/one --pressures=0.1,0.3,1 --out=pruned.json

Runs one training for each value of --pressures: the penalty if all heads are open, in the unit of
the loss. Gates and weights continue from the run's newest checkpoint with its task, data and
optimizer, at the learning rate that it ended with. With --by=layer a head has one gate per layer,
with --by=group one gate for all layers that share its parameters. For comparison the same number of
heads is chosen in other ways: by the gradients of the gates (Michel et al. 2019), by ablation of
each head alone, and at random; both before and after the same training without these heads. Heads
are chosen on rows of the training part and scored on held-out rows.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from pandas import DataFrame

from attnlab import interpret, load, training
from attnlab.data import Dataset
from attnlab.data.dataset import Batch
from attnlab.lab.experiment import Experiment
from attnlab.models import ModelConfig, matrix_axes, num_parameters
from attnlab.sharing import Params
from attnlab.tap import Patches
from attnlab.training.objectives import Model, Objective
from attnlab.training.schedules import make_schedule

Values: TypeAlias = Mapping[str, np.ndarray]
"""Name of heads -> gates [R, N]"""
Loss: TypeAlias = Callable[[Model, Params, Patches], jax.Array]
"""(model, params, patch) -> the losses of rows [B]"""
DRAWS = 10
"""Random choices in the original model."""
SURE = 20.0
"""log_alpha of a gate that every draw leaves open, or -SURE: closed."""
Row: TypeAlias = dict[str, Any]
"""What one pressure leads to: the pressure, heads `kept`, of these those `between` 0 and 1, `loss`,
losses `before` and `after` training of other choices of as many heads, `gates`; and of the model
without the closed heads its `heads`, `parameters` and `small_loss`, or `why` there is none. Losses
are of held-out rows."""


class Study(NamedTuple):
    """What is pruned, and how it is trained."""

    config: ModelConfig
    params: Params
    task: Objective
    source: Dataset
    trains: training.TrainConfig


def begin(folder: Path, seed: int | None, steps: int, learning_rate: float | None = None) -> Study:
    """A run as it is, and `steps` more at a constant learning rate, by default the one it ended
    with. Raises ValueError where that is 0."""
    found = load.open_run(folder, seed)
    experiment = Experiment.from_dict(found.record["config"])
    was = experiment.train
    last = make_schedule(was.schedule, was.optimizer.learning_rate, was.steps)(was.steps - 1)
    rate = float(last) if learning_rate is None else learning_rate
    if learning_rate is None and not rate:
        raise ValueError(f"{folder} ended at a learning rate of 0; give --learning_rate")
    warmup = min(was.schedule.warmup(was.steps), steps // 10)
    trains = dataclasses.replace(
        was,
        steps=steps,
        seeds=(found.seed,),
        optimizer=dataclasses.replace(was.optimizer, learning_rate=rate),
        schedule=dataclasses.replace(was.schedule, name="constant", warmup_steps=warmup),
        # Scored here, on more rows.
        evaluation=dataclasses.replace(was.evaluation, every=steps, windows=1, curve_windows=1),
        log_every=max(1, steps // 10),
        checkpoint_every=steps,
    )
    task = experiment.objective._replace(final_metrics=None)
    source = experiment.data.load(trains.length, found.folder)
    return Study(found.config, found.params, task, source, trains)


def at_pressures(
    study: Study,
    pressures: Sequence[float],
    *,
    by: Literal["layer", "group"],
    rate: float,
    rows: int,
) -> tuple[float, list[Row]]:
    """The loss of the original model, and what every pressure leads to."""
    gates = interpret.all_head_gates(study.config, by=by)
    gated = interpret.GatedModel(study.config.build(), gates)
    choose, judge = (loss_on(study, of(rows)) for of in (study.source.train, study.source.heldout))
    mean = lambda params, values: jnp.mean(judge(gated.model, params, gated.patch(values)))
    score: Callable[[Params, Values], jax.Array] = jax.jit(mean)
    orders = _orders(study, gated, choose)
    begun, found = gated.with_gates({})["gates"], []
    for pressure in pressures:
        params = _train(study, gated, begun, pressure=pressure, rate=rate)
        values = {name: np.asarray(interpret.gate_values(a)) for name, a in params["gates"].items()}
        flat = np.concatenate([np.ravel(values[one.name]) for one in gated.gates])
        kept, loss = int((flat > 0).sum()), float(score(params["model"], values))
        line = f"pressure {pressure:g}: {kept} of {flat.size} heads, loss {loss:.4f}"
        print(line, file=sys.stderr, flush=True)
        shut = {n: [_without(gated, o[: flat.size - kept]) for o in of] for n, of in orders.items()}
        alone = {"gates": [{name: (a > 0).astype(np.float32) for name, a in values.items()}]}
        before = {name: float(np.mean([score(study.params, one) for one in some]))
                  for name, some in (alone | shut).items()}  # fmt: skip
        after = {}
        for name, (one, *_) in shut.items():
            fixed = {n: np.where(a > 0, SURE, -SURE) for n, a in one.items()}
            other = _train(study, gated, fixed, pressure=0.0, rate=0.0)
            after[name] = float(score(other["model"], one))
        row: Row = dict(pressure=pressure, kept=kept, between=int(((flat > 0) & (flat < 1)).sum()))
        row |= dict(loss=loss, before=before, after=after)
        row["gates"] = {name: a.tolist() for name, a in values.items()}
        found.append(row | _smaller(study, params["model"], gated, values, judge))
    return float(score(study.params, _without(gated, np.array([], int)))), found


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


def _orders(study: Study, gated: interpret.GatedModel, choose: Loss) -> dict[str, list[np.ndarray]]:
    """Way to choose -> orders of all heads, the least important first."""
    orders: dict[str, list[np.ndarray]] = {}
    loss = functools.partial(choose, gated.model, study.params)
    ways = {"gradient": interpret.head_importance, "ablation": interpret.ablation_effects}
    for name, way in ways.items():
        found = [jax.jit(functools.partial(way, loss, one))() for one in gated.gates]
        orders[name] = [np.argsort(np.concatenate([np.ravel(a) for a in found]), kind="stable")]
    draw = np.random.default_rng(study.trains.seeds[0])
    size = sum(np.prod(one.shape) for one in gated.gates)
    return orders | {"chance": [draw.permutation(size) for _ in range(DRAWS)]}


def _without(gated: interpret.GatedModel, heads: np.ndarray) -> Values:
    """Gates of 0 for these, of 1 for the others."""
    sizes = [np.prod(one.shape) for one in gated.gates]
    flat = np.ones(sum(sizes), np.float32)
    flat[heads] = 0
    parts = zip(gated.gates, np.split(flat, np.cumsum(sizes)[:-1]), strict=True)
    return {one.name: part.reshape(one.shape) for one, part in parts}


def _train(
    study: Study, gated: interpret.GatedModel, alphas: Params, *, pressure: float, rate: float
) -> Params:
    """Weights and gates after as many steps; `alphas` are the first log_alpha."""
    made = training.make_optimizer(study.trains, matrix_axes(study.config))
    transform = interpret.gated_optimizer(made.transform, penalty=pressure, learning_rate=rate)
    optimizer = made._replace(transform=transform)
    start = training.FitOptions(params=gated.with_gates(study.params) | {"gates": alphas})
    trains, source = study.trains, study.source
    try:
        done = training.fit_in_memory(
            gated, study.task, trains, source, optimizer=optimizer, options=start
        )
    except training.NonFiniteLoss:
        raise ValueError(
            f"the training with pressure {pressure:g} diverged: its loss is not finite; give a "
            "lower --learning_rate or --gate_rate"
        ) from None
    return done.params()


def _smaller(
    study: Study, params: Params, gated: interpret.GatedModel, values: Values, judge: Loss
) -> Row:
    """Size and loss of the model without the heads that are closed everywhere."""
    try:
        small = interpret.remove_closed_heads(study.config, params, gated.gates, values)
    except ValueError as error:
        return dict(heads=None, parameters=None, small_loss=None, why=str(error))
    of = jax.jit(lambda w: jnp.mean(judge(small.config.build(), w, small.patch)))
    size, loss = num_parameters(small.config), float(of(small.params))
    return dict(heads=small.config.heads.num_heads, parameters=size, small_loss=loss, why="")


def table(config: ModelConfig, whole: float, rows: Sequence[Row], *, by: str) -> str:
    """A line a pressure; numbers are losses of held-out rows. –: no smaller model, and why."""
    lines = []
    for row in rows:
        losses = {"loss": row["loss"]}
        for when in ("before", "after"):
            losses |= {f"{name} {when}": loss for name, loss in row[when].items()}
        line = {"pressure": f"{row['pressure']:g}", "heads": row["kept"], "between": row["between"]}
        line |= {name: f"{loss:.4f}" for name, loss in losses.items()}
        line["parameters"] = "–" if row["why"] else f"{row['parameters']:,}"
        lines.append(line)
    size = sum(len(head) for of in rows[0]["gates"].values() for head in of)
    each = {"layer": "each layer", "group": "a parameter group"}[by]
    reasons = "; ".join(dict.fromkeys(row["why"] for row in rows if row["why"]))
    note = f"""
Heads: of {size} gates, one for each head of {each}; between: neither 0 nor 1.
All heads: loss {whole:.4f}, {num_parameters(config):,} parameters.
before: the original model with these heads, or as many chosen in another way;
after: the same heads after the same training. chance: the mean of {DRAWS} draws before, one after.
"""
    return DataFrame(lines).to_string(index=False) + "\n" + note + f"–: {reasons}" * bool(reasons)
