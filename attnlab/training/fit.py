"""`fit`: trains several seeds in one compiled program, evaluates them, and resumes exactly."""

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from attnlab.data.dataset import Batch, Dataset
from attnlab.models import ModelConfig, matrix_axes
from attnlab.sharing import Params, PyTree
from attnlab.sharing.plan import plan_name
from attnlab.training import memory, sharding
from attnlab.training import step as steps
from attnlab.training.callbacks import Callback, Profile, StepInfo
from attnlab.training.checkpoint import Checkpoints, check_run, describe_run
from attnlab.training.config import TrainConfig, make_optimizer
from attnlab.training.interrupts import Clock, Stopped, check_finite, stop_signals
from attnlab.training.loggers import Recorder, Row, read_metrics
from attnlab.training.objectives.objective import Model, Objective, check_kind, check_output
from attnlab.training.optimizers import Optimizer, axes_by_shape
from attnlab.training.sharding import StateSharding
from attnlab.training.step import InitParams, TrainState

Scores: TypeAlias = dict[str, np.ndarray]
"""Name -> a number for each seed [S]."""


class FitOptions(NamedTuple):
    """What `fit` may be given besides.

    Attributes:
      mesh: devices; None: all, as "data".
      sharding: how parameters and optimizer are sharded over the mesh.
      params: to start from, in place of `model.init`: a tree for all seeds, which then differ in
        batches and dropout alone; a list with the tree of each seed; or a function (key, inputs) ->
        tree.
      callbacks: functions with a period (`callbacks.callback`).
      profile: writes a trace of some steps.
    """

    mesh: Mesh | None = None
    sharding: StateSharding = StateSharding()
    params: Params | list[Params] | InitParams | None = None
    callbacks: Sequence[Callback] = ()
    profile: Profile | None = None


class FitResult(NamedTuple):
    """What `fit` returns.

    Every score is an array [S], in the order of `config.seeds`:

        mean = result.heldout["loss"].mean()
        params = jax.tree.map(lambda a: a[0], result.state.params)  # of the first seed

    Attributes:
      state: at the last step.
      step: its number.
      heldout: "loss" (the objective's, a mean over the targets that count) and every metric.
      train: the same of the training part.
      wall_seconds: of all seeds together, over every start of the run, with compilation.
      tokens_per_second: of all seeds together, without compilation and evaluation.
      validation: as `heldout`, of the whole validation part; empty where the dataset has none.
    """

    state: TrainState
    step: int
    heldout: Scores
    train: Scores
    wall_seconds: float
    tokens_per_second: float
    validation: Scores


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
      optimizer: of `make_optimizer(config, matrix_axes(model.config))`.
      config: steps, batch size, seeds, and how often to log, evaluate and save.
      dataset: of batches and scored rows.
      recorder: of metrics.
      checkpoints: of the state.
      options: devices, initial parameters, callbacks.

    Returns:
      The state at the last step and the scores of each seed.

    Raises:
      WrongCheckpoint: the newest checkpoint is of another model (above all another sharing plan of
        equal shapes), dataset, optimizer, schedule, batch size or seeds.
      NonFiniteLoss: the state is not saved then.
      Stopped: after SIGTERM or SIGINT and a save.
      ValueError: the model or the dataset does not fit the objective; the devices do not divide a
        batch; a step needs more memory than a device has; the profile has no step of the training;
        a callback has no period; or no target of the scored rows counts.

        config, dataset, model = TrainConfig(steps=200), Text().load(64), ModelConfig().build()
        objective = OBJECTIVES["causal_lm"].bind(dataset.sizes)
        folder = Path("runs/one")
        with (
            Recorder(folder, config.seeds) as recorder,
            Checkpoints(folder / "checkpoints") as checkpoints,
        ):
            result = fit(
                model, objective, make_optimizer(config, matrix_axes(model.config)), config,
                dataset, recorder=recorder, checkpoints=checkpoints,
            )
    """
    training = _Training(
        model, objective, optimizer, config, dataset, recorder, checkpoints, options
    )
    first, last, profile = training.restore(), config.steps, options.profile
    with stop_signals() as stop_requested, contextlib.ExitStack() as tracing:
        if sharding.any_process(bool(stop_requested())):  # while the data were loaded
            raise Stopped(f"stopped at step {first} of {last}")
        if first < last:
            training.compile(first)
        if not first:
            training.call_back(0)
        for step in range(first + 1, last + 1):
            if profile and step == max(profile.first, first and first + 2) <= profile.last:
                trace = jax.profiler.trace(profile.folder)
                recorder.attempt("the profile", functools.partial(tracing.enter_context, trace))
            training.take_step(step)
            if profile and step == profile.last:
                jax.block_until_ready(training.state.step)
                tracing.close()
            is_last, logs = step == last, step % config.log_every == 0
            if logs or is_last:
                training.log(step)
            if step % config.evaluation.every == 0 or is_last:
                training.evaluate(step)
            training.call_back(step)
            # Hosts agree on the step to stop at, now and then: it costs them a message.
            agrees = logs or jax.process_count() == 1
            stops = agrees and sharding.any_process(bool(stop_requested()))
            if step % config.checkpoint_every == 0 or is_last or stops:
                training.save(step)  # after all that is recorded of this step
            if stops:
                raise Stopped(f"stopped at step {step} of {last}; the state is saved")
            training.clock.start(step)  # hence not before the first step, which compiles
    return training.result()


@dataclasses.dataclass(eq=False)
class _Training:
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
        self.last_log = 0
        model, config, dataset, options = self.model, self.config, self.dataset, self.options
        if isinstance(about := getattr(model, "config", None), ModelConfig):
            what = self.objective.description
            check_kind(what, self.objective, about)
            check_output(what, self.objective, about, dataset.sizes)
        self.mesh = options.mesh or sharding.data_mesh()
        sharding.check_batches(self.mesh, config.device_batches)
        for one in options.callbacks:
            if not isinstance(one, Callback):
                raise ValueError(f"the callback {one} has no period: training.callback(every=100)")
        if (p := options.profile) and not 1 <= p.first <= min(p.last, config.steps):
            raise ValueError(f"give a profile within 1:{config.steps}, not {p.first}:{p.last}")
        self.objective = self.objective.bind(dataset.sizes)
        self.identity = describe_run(model, dataset.digest, config)
        self.state, self.shardings = steps.state_of_seeds(
            model, self.objective, self.optimizer.transform, dataset.shapes(), config.seeds,
            options.params, self.mesh, options.sharding,
        )  # fmt: skip
        seeds = np.array(config.seeds, np.uint32)
        self.constants = sharding.replicate(self.mesh, (seeds, dataset.device_arrays))
        evaluation = config.evaluation.batch_size
        self._score = steps.Evaluator(model, self.objective, self.mesh, evaluation)
        self._rate = jax.jit(self.optimizer.schedule)
        self.callbacks = [*options.callbacks]
        self._initial: list[Params] = self._params_of_seeds() if self.callbacks else []

    def restore(self) -> int:
        """Loads the newest checkpoint; returns its step, 0 without one."""
        first, check = 0, functools.partial(check_run, self.config, self.identity)
        if restored := self.checkpoints.restore(self.state, check):
            first, self.state, notes = restored
            self.earlier_seconds = notes["wall_seconds"]
            self.clock = Clock(notes["busy_seconds"], notes["busy_steps"])
            # Checkpoints of before this note: as if `log_every` had been the same.
            self.last_log = notes.get("last_log", first - first % self.config.log_every)
            self.recorder.say(f"resuming at step {first}")
        self.recorder.rewind(first)
        return first

    def compile(self, first: int) -> None:
        """Compiles the step; raises ValueError where it does not fit the memory of a device."""
        began, device = time.perf_counter(), self.mesh.local_devices[0]
        one_step = steps.step_of_seeds(
            self.model, self.objective, self.optimizer, self.config, self.dataset, self.mesh
        )
        jitted = jax.jit(one_step, donate_argnums=0, out_shardings=self.shardings)
        self._step = jitted.lower(*self._arguments(first + 1)).compile()
        self.recorder.say(
            f"{self._describe()}; {self.mesh.size} x {device.device_kind}; compiled in "
            f"{time.perf_counter() - began:.1f} s"
        )
        report = memory.check_memory(self._step, memory.device_memory(device))
        if report and (self.mesh.size > 1 or device.platform != "cpu"):
            self.recorder.say(report)

    def _arguments(self, step: int) -> tuple[object, ...]:
        batch = steps.host_batch(self.dataset, self.config, self.mesh, step)
        return self.state, batch, *self.constants

    def take_step(self, step: int) -> None:
        """Starts one step of all seeds."""
        self.state = self._step(*self._arguments(step))

    def log(self, step: int) -> None:
        """Records the mean losses since the last log line."""
        self.clock.stop(self.state.step, step)
        window, count = self.state.window, step - self.last_log
        means = {name: np.asarray(a) / count for name, a in window.items()}
        for losses in means.values():
            check_finite(self.config.seeds, step, losses)
        if step % self.config.log_every == 0:  # a longer training may go on in a window
            self.last_log = step
            zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), window)
            self.state = self.state._replace(window=sharding.replicate(self.mesh, zeros))
        numbers = {f"train/{name}": losses for name, losses in means.items()}
        rate = float(self._rate(np.int32(step - 1)))
        self.recorder.log_scalars(step, {**numbers, "train/learning_rate": rate})
        if self.clock.seconds:
            speed, last = self.tokens_per_second, self.config.steps
            self.recorder.show(step, {"train/tokens_per_second": speed})
            minutes = (last - step) * self.clock.seconds / self.clock.steps / 60
            self.recorder.say(f"{speed:,.0f} tokens/s; {minutes:.1f} minutes to step {last}")

    def evaluate(self, step: int) -> None:
        """Records the scores on the rows of learning curves."""
        self.clock.stop(self.state.step, step)
        rows = self.dataset.validation or self.dataset.heldout
        scores = self.score(step, rows(self.config.evaluation.curve_windows))
        self.recorder.log_scalars(step, {f"eval/{name}": a for name, a in scores.items()})

    def call_back(self, step: int) -> None:
        """Calls the callbacks that are due and records what they log; one that fails later than at
        step 0 is not called again."""
        is_last = step == self.config.steps
        due = [one for one in self.options.callbacks if step % one.every == 0 or is_last]
        if not due:
            return
        self.clock.stop(self.state.step, step)
        params = self._params_of_seeds()  # all hosts gather, also one where every callback failed
        for one in [one for one in due if one in self.callbacks]:
            call = functools.partial(self._logged_by, one, step, params)
            name = f"the callback {getattr(one, '__name__', type(one).__name__)}"
            numbers = self.recorder.attempt(name, call) if step else call()
            if numbers is None:
                self.callbacks.remove(one)
            elif numbers:
                self.recorder.log_scalars(step, numbers)

    def _logged_by(self, callback: Callback, step: int, params: list[Params]) -> Scores:
        """What a callback logs, of each seed; NaN of a seed for which it did not log the name."""
        found: Scores = {}
        for seed, (now, initial) in enumerate(zip(params, self._initial, strict=True)):
            logged: dict[str, ArrayLike] = {}
            callback(StepInfo(step, now, initial, self.model, self.dataset, logged.__setitem__))
            for name, value in logged.items():
                numbers = found.setdefault(name, np.full(len(params), np.nan))
                numbers[seed] = float(np.asarray(value))
        return found

    def save(self, step: int) -> None:
        """Starts to write a checkpoint, after the metrics up to it are on the disk."""
        self.clock.stop(self.state.step, step)
        check_finite(self.config.seeds, step, self.state.window["loss"])
        self.recorder.sync()
        seconds = {"wall_seconds": self.wall_seconds, "busy_seconds": self.clock.seconds}
        counts = {"busy_steps": self.clock.steps, "last_log": self.last_log, "step": step}
        notes = {**seconds, **counts, "of": self.config.steps, **self.identity}
        self.checkpoints.save(step, self.state, notes)

    def score(self, step: int, rows: Batch) -> Scores:
        """Loss and metrics on scored rows."""
        scores = self._score(self.state.params, rows)
        check_finite(self.config.seeds, step, scores["loss"])
        return scores

    def result(self) -> FitResult:
        """Scores the trained state."""
        counts, dataset, last = self.config.evaluation, self.dataset, self.config.steps
        heldout = self.score(last, dataset.heldout(counts.windows))
        train = self.score(last, dataset.train(counts.windows or counts.curve_windows))
        heldout |= self.recorder.attempt("the final metrics", self._final_metrics) or {}
        validation = dataset.validation and self.score(last, dataset.validation(0))
        seconds, speed = self.wall_seconds, self.tokens_per_second
        self.recorder.say(
            f"{last} steps in {seconds:.0f} s, {speed:,.0f} tokens/s; held-out loss "
            f"{' '.join(f'{loss:.4g}' for loss in heldout['loss'])}; metrics and checkpoints are "
            f"in {self.recorder.folder}"
        )
        return FitResult(self.state, last, heldout, train, seconds, speed, validation or {})

    def _describe(self) -> str:
        """Model, parameters of a seed and data, in words."""
        config, about = getattr(self.model, "config", None), type(self.model).__name__
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
        if (final_metrics := self.objective.final_metrics) is None:
            return {}
        of_seeds = self._params_of_seeds()
        final = [final_metrics(self.model, params, self.dataset) for params in of_seeds]
        return {name: np.array([one[name] for one in final]) for name in final[0]}

    def _params_of_seeds(self) -> list[Params]:
        """On the host."""
        params = sharding.gather(self.state.params)
        return [seed_of(params, i) for i in range(len(self.config.seeds))]

    @property
    def wall_seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.began

    @property
    def tokens_per_second(self) -> float:
        rows = self.clock.steps * len(self.config.seeds) * self.config.batch_size
        return rows * self.dataset.row_tokens / max(self.clock.seconds, 1e-9)


def seed_of(tree: PyTree, i: int) -> PyTree:
    """The leaves of one seed."""
    return jax.tree.map(lambda a: a[i], tree)


class InMemoryFit(NamedTuple):
    """What `fit_in_memory` returns.

    found = fit_in_memory(model, objective, config, dataset)
    steps, values = found.curve("eval/loss")  # [P], [S, P]
    params = found.params(0)

    Attributes:
      result: of `fit`: the parameters in `result.state.params`, each with a leading axis of seeds.
      records: what was recorded: "step", and numbers with one value per seed.
    """

    result: FitResult
    records: list[Row]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [P], values [S, P]) of a number that was recorded, as "eval/bits_per_byte"; the
        values are [P] of what all seeds have in common, as "train/learning_rate".

        Raises:
          ValueError: nothing was recorded under this name.
        """
        found = [(row["step"], row[name]) for row in self.records if name in row]
        if not found:
            known = sorted({other for row in self.records for other in row} - {"step"})
            raise ValueError(f"{name!r} was not recorded; there are {', '.join(known)}")
        steps, values = zip(*found, strict=True)
        return np.array(steps), np.array(values).T

    def params(self, seed: int = 0) -> Params:
        """The trained parameters of one seed, counted from 0 in the order of `config.seeds`.

        Raises:
          ValueError: there are not so many seeds.
        """
        count = len(self.result.state.step)
        if not 0 <= seed < count:  # JAX would take the last one
            raise ValueError(f"seed {seed} is not there; {count} seeds are counted from 0")
        params: Params = seed_of(self.result.state.params, seed)
        return params


def fit_in_memory(
    model: Model,
    objective: Objective,
    config: TrainConfig,
    dataset: Dataset,
    *,
    optimizer: Optimizer | None = None,
    options: FitOptions = FitOptions(),  # noqa: B008
) -> InMemoryFit:
    """`fit` with temporary files, which are deleted afterwards, and without output.

    Use `fit` for a run that is kept, or resumed after a stop.

    Args:
      model: with `init` and `apply`.
      objective: what it is trained to predict; an entry of `OBJECTIVES`.
      config: steps, batch size, seeds, and how often to evaluate.
      dataset: of batches and scored rows.
      optimizer: default that of `config`, for a model of attnlab with its `matrix_axes`.
      options: as of `fit`.

    Returns:
      The result of `fit`, and what was recorded.

    Raises:
      NonFiniteLoss: a loss became NaN or infinite.
      Stopped: after SIGTERM or SIGINT.
      ValueError: the model or the dataset does not fit the objective.

        from attnlab.data import Text
        from attnlab.models import ModelConfig
        from attnlab.training import OBJECTIVES, TrainConfig, fit_in_memory

        config = TrainConfig(steps=200, seeds=(0,))
        data = Text().load(config.length)
        found = fit_in_memory(ModelConfig().build(), OBJECTIVES["causal_lm"], config, data)
        found.result.heldout["bits_per_byte"]  # [1]: one value per seed
    """
    about = getattr(model, "config", None)
    axes = matrix_axes(about) if isinstance(about, ModelConfig) else axes_by_shape
    optimizer = optimizer or make_optimizer(config, axes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Recorder(folder, config.seeds, speaks=False) as recorder,
            Checkpoints(folder / "checkpoints") as checkpoints,
        ):
            result = fit(
                model, objective, optimizer, config, dataset, recorder=recorder,
                checkpoints=checkpoints, options=options,
            )  # fmt: skip
        return InMemoryFit(result, read_metrics(folder / "metrics.jsonl"))
