"""Training: the steps of S seeds in one compiled program, evaluation, exact resume."""

import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from attnlab.training import memory, shard
from attnlab.training.checkpoint import (
    Checkpoints,
    WrongCheckpoint,
    check_model,
    describe_model,
)
from attnlab.training.config import TrainConfig
from attnlab.training.metrics import Recorder
from attnlab.training.optimizers import Optimizer
from attnlab.training.schedules import common_steps, fork_step
from attnlab.training.sources.source import Batch, Source
from attnlab.training.step import (
    TrainState,
    init_state,
    make_evaluate,
    over_seeds,
    step_key,
    train_step,
)
from attnlab.training.tasks.task import Task


class Result(NamedTuple):
    """What `fit` returns."""

    state: TrainState
    step: int
    heldout: dict[str, np.ndarray]
    """"loss" (the task's, a mean over the targets that count) and every metric: [S]."""
    train: dict[str, np.ndarray]
    """The same of the training part."""
    wall_seconds: float
    """Of all seeds together, over every start of the run, compilation included."""
    tokens_per_second: float
    """Of all seeds together, compilation and evaluation left out."""
    watched: dict[str, np.ndarray]
    """What `watch` gives at the end: [S]."""


class NonFiniteLoss(RuntimeError):
    """A loss became NaN or infinite."""


class Stopped(RuntimeError):
    """The run was asked to stop; its state is saved."""


def fit(
    model: Any,
    task: Task,
    optimizer: Optimizer,
    config: TrainConfig,
    source: Source,
    *,
    mesh: Mesh,
    recorder: Recorder,
    checkpoints: Checkpoints,
    params: Any = None,
    cut: shard.Cut = shard.Cut(),  # noqa: B008
    watch: Callable[[Any, Any], dict[str, jax.Array]] | None = None,
) -> Result:
    """Trains every seed of `config` to its last step, from the newest checkpoint if there is one.

    Step 0 has fresh weights for each seed, those that `params` makes of (key, inputs), or `params`
    for all: seeds then differ in batches and dropout alone. A list holds those of each seed.
    `watch` (weights at step 0, weights of now) -> numbers is recorded at step 0, at every
    evaluation and at the end. `cut` says how weights and optimizer are cut over `mesh`; the first
    lines say what a device needs then, and a run that does not fit is a ValueError before step 1.

    A function of (model, params, config, source, seeds): killed at any moment and called again it
    ends with the same numbers, bit for bit, on the same machine with as many cores. A checkpoint
    remembers the model (`describe_model`) and the digest of the source: going on with another,
    above all with another plan of equal shapes, is a WrongCheckpoint. Raises NonFiniteLoss (nothing
    is saved then) and, on SIGTERM or SIGINT, Stopped (after a save).
    """
    began = time.perf_counter()
    seeds = shard.replicate(mesh, np.array(config.seeds, np.uint32))
    task, transform = task.bind(source.sizes), optimizer.transform

    @functools.partial(jax.jit, static_argnames="params" if callable(params) else ())
    def make(seed, params):
        made = init_state(model, task, transform, source.shapes(), seed, params)
        return jax.lax.with_sharding_constraint(made, shard.places(mesh, cut, made))

    each = params if isinstance(params, list) else [params] * len(config.seeds)
    pairs = zip(config.seeds, each, strict=True)
    states = [shard.gather(make(np.uint32(seed), params=w)) for seed, w in pairs]
    places = shard.of_seeds(shard.places(mesh, cut, states[0]))
    state = shard.put(places, jax.tree.map(lambda *rows: np.stack(rows), *states))
    resident = shard.replicate(mesh, source.resident)
    evaluate = make_evaluate(model, task, mesh, config.eval_batch_size)
    begun = shard.gather(state.params) if watch else None
    look: Callable = lambda begun, params: {}
    if watch:
        look = jax.jit(over_seeds(watch), out_shardings=shard.whole(mesh))

    first, spent, clock = 0, 0.0, _Clock()
    described = {"model": describe_model(model), "source": source.digest}
    restored = checkpoints.restore(state, functools.partial(_check_notes, config, described))
    if restored:
        first, state, notes = restored
        spent, clock = notes["wall_seconds"], _Clock(notes["busy_seconds"], notes["busy_steps"])
        recorder.say(f"resuming at step {first}")
    recorder.rewind(first)

    def save(step: int) -> None:
        _check_finite(config, step, state.window_loss)
        wall = spent + time.perf_counter() - began
        notes = {"wall_seconds": wall, "busy_seconds": clock.seconds, "busy_steps": clock.steps}
        checkpoints.save(step, state, notes | described | {"step": step, "of": config.steps})

    def score(step: int, rows: Batch) -> dict[str, np.ndarray]:
        found = evaluate(state.params, rows)
        _check_finite(config, step, found["loss"])
        return found

    def watched(step: int) -> dict[str, np.ndarray]:
        found = jax.tree.map(np.asarray, look(begun, state.params))
        if found:
            recorder.write(step, {f"weights/{name}": values for name, values in found.items()})
        return found

    compiled: Any = jax.jit(
        functools.partial(step_all, model, task, transform, config, source, mesh),
        donate_argnums=0,
        out_shardings=places,
    )
    if first < config.steps:
        batch = host_batch(source, config, mesh, first + 1)
        compiled = compiled.lower(state, batch, seeds, resident).compile()
        _tell_memory(compiled, mesh, recorder)
    if not first:
        watched(0)
    curve, fork = source.validation or source.heldout, fork_step(config)
    tokens_per_step = len(config.seeds) * config.batch_size * source.row_tokens
    with _stop_signals() as asked, recorder.progress(config.steps, first) as advance:
        for step in range(first + 1, config.steps + 1):
            last, logs = step == config.steps, step % config.log_every == 0
            state = compiled(state, host_batch(source, config, mesh, step), seeds, resident)
            if logs or last:
                clock.stop(state, step)
                since = step - (step - 1) // config.log_every * config.log_every
                means = jax.tree.map(
                    lambda a: np.asarray(a) / since,  # noqa: B023
                    {"loss": state.window_loss, **state.window_auxiliary},
                )
                for losses in means.values():
                    _check_finite(config, step, losses)
                if logs:  # a longer training goes on in the middle of a window
                    sums = state.window_loss, state.window_auxiliary
                    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), sums)
                    loss, auxiliary = shard.replicate(mesh, zeros)
                    state = state._replace(window_loss=loss, window_auxiliary=auxiliary)
                rate = float(optimizer.schedule(step - 1))
                written = {f"train/{name}": losses for name, losses in means.items()}
                recorder.write(step, written | {"train/learning_rate": rate})
                if clock.seconds:
                    speed = clock.steps * tokens_per_step / clock.seconds
                    recorder.show(step, {"train/tokens_per_second": speed})
                advance(step, tokens_per_step)
            if step % config.eval_every == 0 and not last:
                clock.stop(state, step)
                found = score(step, curve(config.curve_windows))
                recorder.write(step, _named(found))
                watched(step)
            # Hosts agree on the step to stop at, now and then: asking costs them a message.
            stops = (logs or jax.process_count() == 1) and shard.any_process(asked())
            if step % config.checkpoint_every == 0 or step == fork or last or stops:
                clock.stop(state, step)
                save(step)
            if stops and not last:
                raise Stopped(f"stopped at step {step} of {config.steps}; the state is saved")
            clock.start(step)  # hence not before the first step, which compiles
    heldout = score(config.steps, source.heldout(config.eval_windows))
    train = score(config.steps, source.train(config.eval_windows or config.curve_windows))
    if task.closing is not None:
        trained = shard.gather(state.params)
        one = lambda i: jax.tree.map(lambda a: a[i], trained)
        closed = [task.closing(model, one(i), source) for i in range(len(config.seeds))]
        heldout |= {name: np.array([found[name] for found in closed]) for name in closed[0]}
    final = heldout if curve is source.heldout else score(config.steps, curve(0))
    recorder.write(config.steps, _named(final))
    wall = spent + time.perf_counter() - began
    speed = clock.steps * tokens_per_step / max(clock.seconds, 1e-9)
    return Result(state, config.steps, heldout, train, wall, speed, watched(config.steps))


def step_all(
    model: Any,
    task: Task,
    transform: Any,
    config: TrainConfig,
    source: Source,
    mesh: Mesh,
    state: TrainState,
    batch: Batch,
    seeds: Any,
    resident: Any,
) -> TrainState:
    """One step of all seeds, on `batch` [S, B, ...] or on what the source draws."""

    def one_step(state, batch, seed):
        if source.draw is not None:
            key = jax.random.fold_in(step_key(seed, state.step), 2)
            batch = source.draw(resident, key, config.batch_size)
            rows = shard.rows(mesh)
            batch = jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, rows), batch)
        return train_step(
            model,
            task,
            transform,
            state,
            batch,
            seed,
            accumulate=config.accumulate,
            label_smoothing=config.label_smoothing,
        )

    return over_seeds(one_step)(state, batch, seeds)


def _tell_memory(compiled: Any, mesh: Mesh, recorder: Recorder) -> None:
    """Says what a device needs where that is a question: of several, and of accelerators."""
    device = mesh.local_devices[0]
    if (needed := memory.need(compiled)) is not None:
        told = memory.check(needed, memory.there(device))
        if mesh.size > 1 or device.platform != "cpu":
            recorder.say(told)


def host_batch(source: Source, config: TrainConfig, mesh: Mesh, step: int) -> Batch:
    """The batches of all seeds [S, B, ...], cut over the devices; nothing where a source draws."""
    if source.batch is None:
        return {}
    rows = config.batch_size // jax.process_count()
    part = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    each = [source.batch(seed, step, config.batch_size, part) for seed in config.seeds]
    return jax.tree.map(lambda *rows: shard.spread(mesh, np.stack(rows), axis=1), *each)


def _named(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"eval/{name}": values for name, values in found.items()}


def _check_notes(config: TrainConfig, ours: dict[str, Any], notes: dict[str, Any]) -> None:
    check_model(ours["model"], notes)
    step, steps = notes.get("step", 0), notes.get("of", config.steps)
    common = common_steps(dataclasses.replace(config, steps=steps), config.steps)
    if steps != config.steps and step > common:
        raise WrongCheckpoint(
            f"the checkpoint is step {step} of {steps}, whose learning rates are those of "
            f"{config.steps} steps for {common} steps alone under {config.schedule!r}; give the "
            "run another folder, or go on under constant or warmup_stable_decay"
        )
    if notes.get("source", ours["source"]) != ours["source"]:
        raise WrongCheckpoint(
            f"the checkpoint was trained on other data (digest {notes['source'][:12]}, here "
            f"{ours['source'][:12]}); give it the same data, or the run another folder"
        )


class _Clock:
    """Seconds and number of training steps alone: no compilation, evaluation or saving."""

    def __init__(self, seconds: float = 0.0, steps: int = 0):
        self.seconds, self.steps = seconds, steps
        self._since: tuple[float, int] | None = None

    def start(self, step: int) -> None:
        """Runs from the end of `step`, if it does not run already."""
        self._since = self._since or (time.perf_counter(), step)

    def stop(self, state: TrainState, step: int) -> None:
        """Waits for the end of `step` and adds what it took since the start."""
        if self._since:
            jax.block_until_ready(state.step)
            began, first = self._since
            self.seconds += time.perf_counter() - began
            self.steps += step - first
            self._since = None


def _check_finite(config: TrainConfig, step: int, losses: Any) -> None:
    pairs = zip(config.seeds, np.asarray(losses), strict=True)
    bad = [str(seed) for seed, loss in pairs if not np.isfinite(loss)]
    if bad:
        raise NonFiniteLoss(
            f"the loss of seed {', '.join(bad)} is not finite at step {step}; lower "
            "train.learning_rate, raise train.warmup_steps or use model.dtype=float32"
        )


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM and SIGINT set a flag in place of ending the process."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    both = (signal.SIGTERM, signal.SIGINT)
    before = {s: signal.signal(s, lambda number, frame: asked.append(number)) for s in both}
    try:
        yield lambda: bool(asked)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
