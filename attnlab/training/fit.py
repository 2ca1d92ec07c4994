"""`fit`: trains several seeds in one compiled program, evaluates them, and resumes exactly."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from attnlab.data.dataset import Batch, Dataset
from attnlab.models import ModelConfig
from attnlab.nested import JSON
from attnlab.sharing import Params
from attnlab.sharing.named_plans import plan_name
from attnlab.training import memory, sharding
from attnlab.training.callbacks import Callback, PeriodicCallback, StepInfo
from attnlab.training.checkpoint import (
    Checkpoints,
    check_run,
    describe_model,
    describe_training,
)
from attnlab.training.compiled import TrainStep, host_batch, initial_state
from attnlab.training.config import TrainConfig, fork_step
from attnlab.training.interrupts import Clock, Stopped, check_finite, stop_signals
from attnlab.training.metrics import Recorder
from attnlab.training.objectives.objective import (
    Model,
    Objective,
    check_kind,
    check_output,
    input_shapes,
)
from attnlab.training.optimizers import Optimizer
from attnlab.training.sharding import StateSharding
from attnlab.training.step import (
    Evaluator,
    InitParams,
    TrainState,
    init_state,
    map_over_seeds,
    new_params,
)

Scores: TypeAlias = dict[str, np.ndarray]
"""Name -> a number for each seed [S]."""
Measure: TypeAlias = Callable[[Params, Params], dict[str, Array]]
"""(parameters at step 0, parameters now) of one seed -> numbers by name."""


class FitOptions(NamedTuple):
    """What `fit` may be given besides.

    Attributes:
      mesh: of devices; None: all, as "data".
      sharding: how parameters and optimizer are sharded over the mesh.
      params: to start from, in place of `model.init`: a tree for all seeds, which then differ in
        batches and dropout alone; a list with the tree of each seed; or a function (key, inputs) ->
        tree.
      measure: numbers of the parameters that are recorded at step 0, at every evaluation and at the
        end. An error in it is raised at step 0 and printed later.
      callbacks: called before and after each step, or with a period (`callbacks.callback`).

    Record how far each seed has moved from its initial parameters:

        def moved(initial, now):
            return {"moved": optax.global_norm(jax.tree.map(jnp.subtract, now, initial))}

        options = FitOptions(measure=moved)  # in metrics.jsonl and `FitResult.measured`
    """

    mesh: Mesh | None = None
    sharding: StateSharding = StateSharding()
    params: Params | list[Params] | InitParams | None = None
    measure: Measure | None = None
    callbacks: Sequence[Callback | PeriodicCallback] = ()


class FitResult(NamedTuple):
    """What `fit` returns.

    Every score is an array [S], in the order of `config.seeds`:

        mean = result.heldout["loss"].mean()
        params = jax.tree.map(lambda a: a[0], result.state.params)  # of the first seed
    """

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
    validation: Scores
    """The same as `heldout` of the whole validation part; empty where the dataset has none."""


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
    as many cores. Learning curves (`eval/NAME` of the recorder) are of the same
    `config.evaluation.curve_windows` rows at every step, the last one too. An error in a callback,
    in an optional logger or, once there is something to lose, in a statistic is printed and the
    training goes on.

    Args:
      model: with `init` and `apply`.
      objective: what it is trained to predict.
      optimizer: of `make_optimizer(config)`.
      config: steps, batch size, seeds, and how often to log, evaluate and save.
      dataset: of batches and scored rows.
      recorder: of metrics.
      checkpoints: of the state.
      options: devices, initial parameters, what to measure, callbacks.

    Returns:
      The state at the last step and the scores of each seed.

    Raises:
      WrongCheckpoint: the newest checkpoint is of another model (above all another sharing plan of
        equal shapes), dataset, optimizer, schedule, batch size or seeds.
      NonFiniteLoss: nothing is saved then.
      Stopped: after SIGTERM or SIGINT and a save.
      ValueError: the model or the dataset does not fit the objective, or a step needs more memory
        than a device has.

        config, dataset = TrainConfig(steps=200), Text().load(64)
        objective = OBJECTIVES["causal_lm"].bind(dataset.sizes)
        folder = Path("runs/one")
        with (
            Recorder(folder, config.seeds) as recorder,
            Checkpoints(folder / "checkpoints") as checkpoints,
        ):
            result = fit(
                ModelConfig().build(), objective, make_optimizer(config), config, dataset,
                recorder=recorder, checkpoints=checkpoints,
            )
    """
    run = _Run(model, objective, optimizer, config, dataset, recorder, checkpoints, options)
    first = run.restore()
    with stop_signals() as stop_requested:
        if sharding.any_process(bool(stop_requested())):  # while the data were loaded
            raise Stopped(f"stopped at step {first} of {config.steps}")
        if first < config.steps:
            run.compile(first)
        if not first:
            run.measure(0)
            run.call_periodic(0)
        run.train(first, stop_requested)
    return run.result()


@dataclasses.dataclass(eq=False)
class _Run:
    """One call of `fit`: the state and what changes it."""

    model: Model
    objective: Objective
    optimizer: Optimizer
    config: TrainConfig
    dataset: Dataset
    recorder: Recorder
    checkpoints: Checkpoints
    options: FitOptions

    def __post_init__(self) -> None:
        self.began, self.earlier_seconds, self.clock = time.perf_counter(), 0.0, Clock()
        model, config, dataset, options = self.model, self.config, self.dataset, self.options
        self._check_task()
        self.mesh = options.mesh or sharding.data_mesh(batch_size=config.batch_size)
        self.objective = self.objective.bind(dataset.sizes)
        self.callbacks = [one for one in options.callbacks if isinstance(one, Callback)]
        self.periodic = [one for one in options.callbacks if not isinstance(one, Callback)]
        self.identity: JSON = {
            "model": describe_model(model),
            "source": dataset.digest,
            "training": describe_training(config),
        }
        self.seeds = sharding.replicate(self.mesh, np.array(config.seeds, np.uint32))
        self.state, self.shardings = initial_state(
            self.init_seed, config.seeds, self._initial_params(), self.mesh, options.sharding
        )
        self.device_arrays = sharding.replicate(self.mesh, dataset.device_arrays)
        self._evaluator = Evaluator(model, self.objective, self.mesh, config.evaluation.batch_size)
        self._measure: Callable[..., dict[str, Array]] | None = None
        if self.periodic or options.measure is not None:
            self._initial = sharding.gather(self.state.params)
        if options.measure is not None:
            self._measure = jax.jit(
                map_over_seeds(options.measure), out_shardings=sharding.replicated(self.mesh)
            )

    def _check_task(self) -> None:
        """Raises ValueError where model and dataset do not fit the objective."""
        config, objective, sizes = getattr(self.model, "config", None), self.objective, self.dataset
        if isinstance(config, ModelConfig):
            check_kind(objective.description, objective, config)
            check_output(objective.description, objective, config, sizes.sizes)
        input_shapes(objective, self.dataset.shapes())

    def _initial_params(self) -> Params | list[Params] | InitParams | None:
        """`FitOptions.params`. New ones are made here where nothing is sharded, by a program that
        other runs of the process use too."""
        if self.options.params is not None or self.mesh.size > 1:
            return self.options.params
        shapes = input_shapes(self.objective, self.dataset.shapes())
        inputs = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        return [new_params(self.model, seed, inputs) for seed in self.config.seeds]

    def init_seed(self, seed: Array, params: Params | InitParams | None) -> TrainState:
        """The state of one seed at step 0."""
        transform, shapes = self.optimizer.transform, self.dataset.shapes()
        return init_state(self.model, self.objective, transform, shapes, seed, params)

    def restore(self) -> int:
        """Loads the newest checkpoint; returns its step, 0 without one."""
        first = 0
        check = functools.partial(check_run, self.config, self.identity)
        if restored := self.checkpoints.restore(self.state, check):
            first, self.state, notes = restored
            self.earlier_seconds = notes["wall_seconds"]
            self.clock = Clock(notes["busy_seconds"], notes["busy_steps"])
            self.recorder.say(f"resuming at step {first}")
        self.recorder.rewind(first)
        return first

    def compile(self, first: int) -> None:
        """Compiles the step; raises ValueError where it does not fit the memory of a device."""
        began = time.perf_counter()
        step = TrainStep(
            self.model, self.objective, self.optimizer, self.config, self.dataset, self.mesh
        )
        jitted = jax.jit(step, donate_argnums=0, out_shardings=self.shardings)
        batch = host_batch(self.dataset, self.config, self.mesh, first + 1)
        lowered = jitted.lower(self.state, batch, self.seeds, self.device_arrays)
        self._step = lowered.compile()
        device = self.mesh.local_devices[0]
        self.recorder.say(
            f"{self._describe()}; {self.mesh.size} x {device.device_kind}; compiled in "
            f"{time.perf_counter() - began:.1f} s"
        )
        if (needed := memory.step_memory(self._step)) is not None:
            report = memory.check_fits(needed, memory.device_memory(device))
            if self.mesh.size > 1 or device.platform != "cpu":
                self.recorder.say(report)

    def train(self, first: int, stop_requested: Callable[[], int]) -> None:
        """Takes the steps after `first`."""
        config, fork = self.config, fork_step(self.config)
        progress = self.recorder.progress(config.steps, first)
        with self._finishing_callbacks(), progress as advance:
            for step in range(first + 1, config.steps + 1):
                self.train_step(step)
                is_last, logs = step == config.steps, step % config.log_every == 0
                if logs or is_last:
                    self.log(step)
                    advance(step, self.tokens_per_step)
                if step % config.evaluation.every == 0 and not is_last:
                    self.clock.stop(self.state.step, step)
                    self.evaluate(step)
                self.call_periodic(step)
                # Hosts agree on the step to stop at, now and then: it costs them a message.
                agrees = logs or jax.process_count() == 1
                stops = agrees and sharding.any_process(bool(stop_requested()))
                if step % config.checkpoint_every == 0 or step == fork or is_last or stops:
                    self.clock.stop(self.state.step, step)
                    self.save(step)
                if stops:
                    raise Stopped(f"stopped at step {step} of {config.steps}; the state is saved")
                self.clock.start(step)  # hence not before the first step, which compiles

    def train_step(self, step: int) -> None:
        """Starts one step of all seeds."""
        self._call_back(lambda callback: callback.before_step(step))
        batch = host_batch(self.dataset, self.config, self.mesh, step)
        self.state = self._step(self.state, batch, self.seeds, self.device_arrays)
        self._call_back(lambda callback: callback.after_step(step, self.state))

    def call_periodic(self, step: int) -> None:
        """Calls the periodic callbacks whose turn it is and records what they log."""
        is_last = step == self.config.steps
        if not (due := [one for one in self.periodic if step % one.every == 0 or is_last]):
            return
        params = sharding.gather(self.state.params)
        for one in due:
            call = functools.partial(self._logged_by, one, step, params)
            name = f"the callback {getattr(one, '__name__', type(one).__name__)}"
            found = self.recorder.attempt(name, call) if step else call()
            if found is None:
                self.periodic.remove(one)
            elif found:
                self.recorder.log_scalars(step, found)

    def _logged_by(self, one: PeriodicCallback, step: int, params: Params) -> Scores:
        """What a callback logs of each seed."""
        found: dict[str, list[float]] = {}

        def log(name: str, value: jax.typing.ArrayLike) -> None:
            found.setdefault(name, []).append(float(np.asarray(value)))

        for i in range(len(self.config.seeds)):
            now, initial = jax.tree.map(lambda a: a[i], (params, self._initial))  # noqa: B023
            one(StepInfo(step, now, initial, self.model, log))
        return {name: np.array(values) for name, values in found.items()}

    def log(self, step: int) -> None:
        """Records the mean losses since the last log line."""
        self.clock.stop(self.state.step, step)
        state, every = self.state, self.config.log_every
        count = step - (step - 1) // every * every
        sums = {"loss": state.window_loss, **state.window_auxiliary}
        means = {name: np.asarray(a) / count for name, a in sums.items()}
        for losses in means.values():
            check_finite(self.config.seeds, step, losses)
        if step % every == 0:  # a longer training goes on in the middle of a window
            zeros = jax.tree.map(
                lambda a: np.zeros(a.shape, a.dtype), (state.window_loss, state.window_auxiliary)
            )
            loss, auxiliary = sharding.replicate(self.mesh, zeros)
            self.state = state._replace(window_loss=loss, window_auxiliary=auxiliary)
        rate = float(self.optimizer.schedule(step - 1))
        numbers = {f"train/{name}": losses for name, losses in means.items()}
        self.recorder.log_scalars(step, {**numbers, "train/learning_rate": rate})
        if self.clock.seconds:
            self.recorder.show(step, {"train/tokens_per_second": self.tokens_per_second})

    def evaluate(self, step: int) -> None:
        """Records the scores on the rows of learning curves, and what is measured."""
        count = self.config.evaluation.curve_windows
        rows = (self.dataset.validation or self.dataset.heldout)(count)
        scores = self.score(step, rows)
        self.recorder.log_scalars(step, {f"eval/{name}": a for name, a in scores.items()})
        if step < self.config.steps:
            self.measure(step)

    def save(self, step: int) -> None:
        """Starts to write a checkpoint, after the metrics up to it are on the disk."""
        check_finite(self.config.seeds, step, self.state.window_loss)
        self.recorder.sync()
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
        scores = self._evaluator(self.state.params, rows)
        check_finite(self.config.seeds, step, scores["loss"])
        return scores

    def measure(self, step: int) -> Scores:
        """Records what `FitOptions.measure` returns."""
        measure = self._measure
        if measure is None:
            return {}

        def numbers() -> Scores:
            found = measure(self._initial, self.state.params)
            return {name: np.asarray(a) for name, a in found.items()}

        attempt = self.recorder.attempt
        measured = (attempt("FitOptions.measure", numbers) or {}) if step else numbers()
        if measured:
            self.recorder.log_scalars(step, {f"weights/{n}": a for n, a in measured.items()})
        return measured

    def result(self) -> FitResult:
        """Scores the trained state."""
        counts, dataset, step = self.config.evaluation, self.dataset, self.config.steps
        heldout = self.score(step, dataset.heldout(counts.windows))
        train = self.score(step, dataset.train(counts.windows or counts.curve_windows))
        heldout |= self.recorder.attempt("the final metrics", self._final_metrics) or {}
        self.evaluate(step)
        validation = dataset.validation and self.score(step, dataset.validation(0))
        seconds, speed = self.wall_seconds, self.tokens_per_second
        measured = self.measure(step)
        self.recorder.say(
            f"{step} steps in {seconds:.0f} s, {speed:,.0f} tokens/s; held-out loss "
            f"{' '.join(f'{loss:.4g}' for loss in heldout['loss'])}; metrics and checkpoints are "
            f"in {self.recorder.folder}"
        )
        return FitResult(
            self.state, step, heldout, train, seconds, speed, measured, validation or {}
        )

    def _describe(self) -> str:
        """Model, parameters of a seed and data, in words."""
        config = getattr(self.model, "config", None)
        about = type(self.model).__name__
        if isinstance(config, ModelConfig):
            about = (
                f"{config.kind} of {config.num_layers} layers, width {config.width}, "
                f"{config.heads.name} heads, plan {plan_name(config.sharing)}"
            )
        size = sum(a.size // a.shape[0] for a in jax.tree.leaves(self.state.params))
        tokens = self.dataset.facts.get("training tokens")
        data = f"{self.dataset.name}, {tokens:,} training tokens" if tokens else self.dataset.name
        return f"{about}, {size:,} parameters; {data}"

    def _final_metrics(self) -> Scores:
        """What needs generated texts, of each seed."""
        final_metrics = self.objective.final_metrics
        if final_metrics is None:
            return {}
        params = sharding.gather(self.state.params)
        final = []
        for i in range(len(self.config.seeds)):
            one = jax.tree.map(lambda a: a[i], params)  # noqa: B023
            final.append(final_metrics(self.model, one, self.dataset))
        return {name: np.array([one[name] for one in final]) for name in final[0]}

    def _call_back(self, call: Callable[[Callback], None]) -> None:
        self.callbacks = [
            one
            for one in self.callbacks
            if self.recorder.succeeds(
                f"the callback {type(one).__name__}", functools.partial(call, one)
            )
        ]

    @contextlib.contextmanager
    def _finishing_callbacks(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._call_back(lambda callback: callback.finish())

    @property
    def wall_seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.began

    @property
    def tokens_per_step(self) -> int:
        return len(self.config.seeds) * self.config.batch_size * self.dataset.row_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.clock.steps * self.tokens_per_step / max(self.clock.seconds, 1e-9)
