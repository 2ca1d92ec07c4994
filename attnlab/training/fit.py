"""`fit`: trains several seeds in one compiled program, evaluates them, and resumes exactly."""

import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from attnlab.data.dataset import Batch, Dataset, DeviceBatch
from attnlab.sharing import Params, PyTree
from attnlab.training import memory, sharding
from attnlab.training.checkpoint import (
    Checkpoints,
    WrongCheckpoint,
    check_model,
    describe_model,
)
from attnlab.training.config import TrainConfig
from attnlab.training.metrics import Recorder
from attnlab.training.objectives.objective import Model, Objective
from attnlab.training.optimizers import Optimizer
from attnlab.training.schedules import common_steps, fork_step
from attnlab.training.sharding import StateSharding
from attnlab.training.step import (
    Evaluator,
    InitParams,
    TrainState,
    generation_key,
    init_state,
    map_over_seeds,
    train_step,
)

Scores: TypeAlias = dict[str, np.ndarray]
"""Name -> a number for each seed [S]."""
Measure: TypeAlias = Callable[[Params, Params], dict[str, Array]]
"""(parameters at step 0, parameters now) of one seed -> numbers by name."""
Notes: TypeAlias = dict[str, Any]
"""JSON beside a checkpoint."""


class FitOptions(NamedTuple):
    """What `fit` may be given besides.

    Attributes:
      mesh: of devices; None: all, as "data".
      sharding: how parameters and optimizer are sharded over the mesh.
      params: to start from, in place of `model.init`: a tree for all seeds, which then differ in
        batches and dropout alone; a list with the tree of each seed; or a function (key, inputs) ->
        tree.
      measure: numbers of the parameters that are recorded at step 0, at every evaluation and at the
        end.
    """

    mesh: Mesh | None = None
    sharding: StateSharding = StateSharding()
    params: Params | list[Params] | InitParams | None = None
    measure: Measure | None = None


class FitResult(NamedTuple):
    """What `fit` returns."""

    state: TrainState
    step: int
    heldout: Scores
    """"loss" (the objective's, a mean over the targets that count) and every metric."""
    train: Scores
    """The same of the training part."""
    wall_seconds: float
    """Of all seeds together, over every start of the run, with compilation."""
    tokens_per_second: float
    """Of all seeds together, without compilation and evaluation."""
    measured: Scores
    """What `FitOptions.measure` returns at the end."""


class NonFiniteLoss(RuntimeError):
    """A loss became NaN or infinite."""


class Stopped(RuntimeError):
    """The run received a signal to stop; its state is saved."""


def fit(
    model: Model,
    objective: Objective,
    optimizer: Optimizer,
    config: TrainConfig,
    dataset: Dataset,
    *,
    recorder: Recorder,
    checkpoints: Checkpoints,
    options: FitOptions = FitOptions(),  # noqa: B008
) -> FitResult:
    """Trains every seed of `config` to its last step, from the newest checkpoint if there is one.

    The result is a function of (model, initial parameters, config, dataset, seeds): killed at any
    moment and called again, a run ends with the same numbers, bit for bit, on the same machine with
    as many cores.

    Args:
      model: with `init` and `apply`.
      objective: what it is trained to predict.
      optimizer: of `make_optimizer(config)`.
      config: steps, batch size, seeds, and how often to log, evaluate and save.
      dataset: of batches and scored rows.
      recorder: of metrics.
      checkpoints: of the state.
      options: devices, initial parameters, what to measure.

    Raises:
      WrongCheckpoint: the newest checkpoint is of another model (above all another sharing plan of
        equal shapes), dataset or schedule.
      NonFiniteLoss: nothing is saved then.
      Stopped: after SIGTERM or SIGINT and a save.
      ValueError: a step needs more memory than a device has.
    """
    run = _Run(model, objective, optimizer, config, dataset, recorder, checkpoints, options)
    first = run.restore()
    if first < config.steps:
        run.compile(first)
    if not first:
        run.measure(0)
    run.train(first)
    return run.result()


class _Run:
    """One call of `fit`: the state and what changes it."""

    def __init__(
        self,
        model: Model,
        objective: Objective,
        optimizer: Optimizer,
        config: TrainConfig,
        dataset: Dataset,
        recorder: Recorder,
        checkpoints: Checkpoints,
        options: FitOptions,
    ) -> None:
        self.began, self.earlier_seconds, self.clock = time.perf_counter(), 0.0, _Clock()
        self.mesh = options.mesh or sharding.data_mesh(batch_size=config.batch_size)
        self.model, self.objective = model, objective.bind(dataset.sizes)
        self.optimizer, self.config, self.dataset = optimizer, config, dataset
        self.recorder, self.checkpoints = recorder, checkpoints
        self.identity: Notes = {"model": describe_model(model), "source": dataset.digest}
        self.seeds = sharding.replicate(self.mesh, np.array(config.seeds, np.uint32))
        self.state, self.shardings = self._initial_state(options)
        self.device_arrays = sharding.replicate(self.mesh, dataset.device_arrays)
        self.evaluate = Evaluator(model, self.objective, self.mesh, config.eval_batch_size)
        self._measure: Callable[..., dict[str, Array]] | None = None
        if options.measure is not None:
            self._initial = sharding.gather(self.state.params)
            self._measure = jax.jit(
                map_over_seeds(options.measure), out_shardings=sharding.replicated(self.mesh)
            )

    def _initial_state(self, options: FitOptions) -> tuple[TrainState, PyTree]:
        """The state at step 0 of all seeds, and its shardings."""
        params, seeds = options.params, self.config.seeds

        @functools.partial(jax.jit, static_argnames="params" if callable(params) else ())
        def make(seed: Array, params: PyTree) -> PyTree:
            state = init_state(
                self.model,
                self.objective,
                self.optimizer.transform,
                self.dataset.shapes(),
                seed,
                params,
            )
            where = sharding.state_shardings(self.mesh, options.sharding, state)
            return jax.lax.with_sharding_constraint(state, where)

        per_seed = params if isinstance(params, list) else [params] * len(seeds)
        pairs = zip(seeds, per_seed, strict=True)
        states = [sharding.gather(make(np.uint32(seed), params=p)) for seed, p in pairs]
        one = sharding.state_shardings(self.mesh, options.sharding, states[0])
        shardings = sharding.with_seed_axis(one)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        return sharding.place(shardings, stacked), shardings

    def restore(self) -> int:
        """Loads the newest checkpoint; returns its step, 0 without one."""
        first = 0
        check = functools.partial(_check_notes, self.config, self.identity)
        if restored := self.checkpoints.restore(self.state, check):
            first, self.state, notes = restored
            self.earlier_seconds = notes["wall_seconds"]
            self.clock = _Clock(notes["busy_seconds"], notes["busy_steps"])
            self.recorder.say(f"resuming at step {first}")
        self.recorder.rewind(first)
        return first

    def compile(self, first: int) -> None:
        """Compiles the step; raises ValueError where it does not fit the memory of a device."""
        step = TrainStep(
            self.model, self.objective, self.optimizer, self.config, self.dataset, self.mesh
        )
        jitted = jax.jit(step, donate_argnums=0, out_shardings=self.shardings)
        batch = host_batch(self.dataset, self.config, self.mesh, first + 1)
        lowered = jitted.lower(self.state, batch, self.seeds, self.device_arrays)
        self._step = lowered.compile()
        device = self.mesh.local_devices[0]
        if (needed := memory.step_memory(self._step)) is not None:
            report = memory.check_fits(needed, memory.device_memory(device))
            if self.mesh.size > 1 or device.platform != "cpu":
                self.recorder.say(report)

    def train(self, first: int) -> None:
        """Takes the steps after `first`."""
        config, fork = self.config, fork_step(self.config)
        progress = self.recorder.progress(config.steps, first)
        with _stop_signals() as stop_requested, progress as advance:
            for step in range(first + 1, config.steps + 1):
                batch = host_batch(self.dataset, config, self.mesh, step)
                self.state = self._step(self.state, batch, self.seeds, self.device_arrays)
                is_last, logs = step == config.steps, step % config.log_every == 0
                if logs or is_last:
                    self.log(step)
                    advance(step, self.tokens_per_step)
                if step % config.eval_every == 0 and not is_last:
                    self.clock.stop(self.state, step)
                    self._write_scores(step, self.score(step, self.curve(config.curve_windows)))
                    self.measure(step)
                # Hosts agree on the step to stop at, now and then: it costs them a message.
                agrees = logs or jax.process_count() == 1
                stops = agrees and sharding.any_process(stop_requested())
                if step % config.checkpoint_every == 0 or step == fork or is_last or stops:
                    self.clock.stop(self.state, step)
                    self.save(step)
                if stops and not is_last:
                    raise Stopped(f"stopped at step {step} of {config.steps}; the state is saved")
                self.clock.start(step)  # hence not before the first step, which compiles

    def log(self, step: int) -> None:
        """Records the mean losses since the last log line."""
        self.clock.stop(self.state, step)
        state, every = self.state, self.config.log_every
        count = step - (step - 1) // every * every
        sums = {"loss": state.window_loss, **state.window_auxiliary}
        means = {name: np.asarray(a) / count for name, a in sums.items()}
        for losses in means.values():
            _check_finite(self.config, step, losses)
        if step % every == 0:  # a longer training goes on in the middle of a window
            zeros = jax.tree.map(
                lambda a: np.zeros(a.shape, a.dtype), (state.window_loss, state.window_auxiliary)
            )
            loss, auxiliary = sharding.replicate(self.mesh, zeros)
            self.state = state._replace(window_loss=loss, window_auxiliary=auxiliary)
        rate = float(self.optimizer.schedule(step - 1))
        numbers = {f"train/{name}": losses for name, losses in means.items()}
        self.recorder.write(step, {**numbers, "train/learning_rate": rate})
        if self.clock.seconds:
            self.recorder.show(step, {"train/tokens_per_second": self.tokens_per_second})

    def save(self, step: int) -> None:
        """Starts to write a checkpoint."""
        _check_finite(self.config, step, self.state.window_loss)
        notes = {
            "wall_seconds": self.wall_seconds,
            "busy_seconds": self.clock.seconds,
            "busy_steps": self.clock.steps,
            "step": step,
            "of": self.config.steps,
        }
        self.checkpoints.save(step, self.state, notes | self.identity)

    def score(self, step: int, rows: Batch) -> Scores:
        """Loss and metrics on scored rows."""
        scores = self.evaluate(self.state.params, rows)
        _check_finite(self.config, step, scores["loss"])
        return scores

    def measure(self, step: int) -> Scores:
        """Records what `FitOptions.measure` returns."""
        if self._measure is None:
            return {}
        numbers = self._measure(self._initial, self.state.params)
        measured = {name: np.asarray(a) for name, a in numbers.items()}
        if measured:
            self.recorder.write(step, {f"weights/{name}": a for name, a in measured.items()})
        return measured

    def result(self) -> FitResult:
        """Scores the trained state."""
        config, dataset, objective = self.config, self.dataset, self.objective
        heldout = self.score(config.steps, dataset.heldout(config.eval_windows))
        rows = dataset.train(config.eval_windows or config.curve_windows)
        train = self.score(config.steps, rows)
        if objective.final_metrics is not None:
            params = sharding.gather(self.state.params)
            final = [
                objective.final_metrics(
                    self.model, jax.tree.map(lambda a: a[i], params), dataset  # noqa: B023
                )
                for i in range(len(config.seeds))
            ]  # fmt: skip
            heldout |= {name: np.array([one[name] for one in final]) for name in final[0]}
        is_curve = dataset.validation is None
        self._write_scores(
            config.steps, heldout if is_curve else self.score(config.steps, self.curve(0))
        )
        seconds, speed = self.wall_seconds, self.tokens_per_second
        measured = self.measure(config.steps)
        return FitResult(self.state, config.steps, heldout, train, seconds, speed, measured)

    def curve(self, count: int) -> Batch:
        """Rows of learning curves."""
        return (self.dataset.validation or self.dataset.heldout)(count)

    def _write_scores(self, step: int, scores: Scores) -> None:
        self.recorder.write(step, {f"eval/{name}": a for name, a in scores.items()})

    @property
    def wall_seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.began

    @property
    def tokens_per_step(self) -> int:
        return len(self.config.seeds) * self.config.batch_size * self.dataset.row_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.clock.steps * self.tokens_per_step / max(self.clock.seconds, 1e-9)


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, for jit
class TrainStep:
    """(state, batch [S, B, ...], seeds, device arrays) -> state: one step of all seeds.

    A batch that the dataset generates on the device is made inside the step.
    """

    model: Model
    objective: Objective
    optimizer: Optimizer
    config: TrainConfig
    dataset: Dataset
    mesh: Mesh

    def __call__(
        self, state: TrainState, batch: DeviceBatch, seeds: Array, device_arrays: DeviceBatch
    ) -> PyTree:
        def one_seed(state: TrainState, batch: DeviceBatch, seed: Array) -> TrainState:
            if self.dataset.generate is not None:
                key = generation_key(seed, state.step)
                batch = self.dataset.generate(device_arrays, key, self.config.batch_size)
                rows = sharding.shard_rows(self.mesh)
                batch = jax.lax.with_sharding_constraint(batch, dict.fromkeys(batch, rows))
            return train_step(
                self.model,
                self.objective,
                self.optimizer.transform,
                state,
                batch,
                seed,
                accumulate=self.config.accumulate,
                label_smoothing=self.config.label_smoothing,
            )

        return map_over_seeds(one_seed)(state, batch, seeds)


def host_batch(dataset: Dataset, config: TrainConfig, mesh: Mesh, step: int) -> DeviceBatch:
    """The batches of all seeds [S, B, ...], sharded over the devices; empty where the dataset
    generates them."""
    if dataset.batch is None:
        return {}
    rows = config.batch_size // jax.process_count()
    part = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    batches = [dataset.batch(seed, step, config.batch_size, part) for seed in config.seeds]
    return {
        name: sharding.shard_batch(mesh, np.stack([batch[name] for batch in batches]), axis=1)
        for name in batches[0]
    }


def _check_notes(config: TrainConfig, identity: Notes, notes: Notes) -> None:
    """Raises WrongCheckpoint where the notes are of another run."""
    check_model(identity["model"], notes)
    step, steps = notes.get("step", 0), notes.get("of", config.steps)
    common = common_steps(dataclasses.replace(config, steps=steps), config.steps)
    if steps != config.steps and step > common:
        raise WrongCheckpoint(
            f"the checkpoint is step {step} of {steps}, whose learning rates are those of "
            f"{config.steps} steps for {common} steps alone under {config.schedule!r}; give the "
            "run another folder, or go on under constant or warmup_stable_decay"
        )
    if notes.get("source", identity["source"]) != identity["source"]:
        raise WrongCheckpoint(
            f"the checkpoint was trained on other data (digest {notes['source'][:12]}, here "
            f"{identity['source'][:12]}); give it the same data, or the run another folder"
        )


class _Clock:
    """Seconds and number of training steps, without compilation, evaluation and saving."""

    def __init__(self, seconds: float = 0.0, steps: int = 0) -> None:
        self.seconds, self.steps = seconds, steps
        self._started: tuple[float, int] | None = None

    def start(self, step: int) -> None:
        """Runs from the end of `step`, unless it runs already."""
        self._started = self._started or (time.perf_counter(), step)

    def stop(self, state: TrainState, step: int) -> None:
        """Waits for the end of `step` and adds the time since the start."""
        if self._started:
            jax.block_until_ready(state.step)
            began, first = self._started
            self.seconds += time.perf_counter() - began
            self.steps += step - first
            self._started = None


def _check_finite(config: TrainConfig, step: int, losses: np.ndarray | Array) -> None:
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
    received: list[int] = []

    def stop_requested() -> bool:
        return bool(received)

    if threading.current_thread() is not threading.main_thread():
        yield stop_requested
        return
    both = (signal.SIGTERM, signal.SIGINT)
    before = {s: signal.signal(s, lambda number, frame: received.append(number)) for s in both}
    try:
        yield stop_requested
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
