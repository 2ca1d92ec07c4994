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
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from attnlab import data, shard
from attnlab.checkpoint import Checkpoints, check_model, describe_model
from attnlab.metrics import Recorder
from attnlab.tasks import Example, Task, cross_entropy


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Valid once it exists; raises ValueError with a way out.

    Each batch goes through the model in `accumulate` equal parts, one after the other: less
    memory, the same gradient (see `train_step`). `label_smoothing` is the `smoothing` of
    `tasks.cross_entropy` in training, in `train/loss` too; an evaluation is never smoothed.
    """

    steps: int = 800
    batch_size: int = 16
    accumulate: int = 1
    length: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-4
    warmup_steps: int = 50
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    label_smoothing: float = 0.0
    log_every: int = 50
    eval_every: int = 100
    eval_batch_size: int = 64
    eval_windows: int = 2048
    curve_windows: int = 256
    checkpoint_every: int = 400

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, zero_is_fine = getattr(self, field.name), field.name in _MAY_BE_ZERO
            if field.name == "seeds":
                continue
            if isinstance(value, bool) or value < 0 or (value == 0 and not zero_is_fine):
                least = "0 or more" if zero_is_fine else "more than 0"
                raise ValueError(f"{field.name} must be {least}, not {value!r}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers of 0 or more, not {self.seeds}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by accumulate {self.accumulate}; "
                f"use a multiple of {self.accumulate}"
            )
        if self.label_smoothing >= 1:
            raise ValueError(f"label_smoothing must be below 1, not {self.label_smoothing}")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be below steps {self.steps}; lower it"
            )


_MAY_BE_ZERO = {
    "final_learning_rate", "warmup_steps", "weight_decay", "eval_windows", "beta1",
    "label_smoothing",
}  # fmt: skip


class TrainState(NamedTuple):
    """What a run is at a step. Every leaf has a leading seeds axis."""

    params: Any
    opt_state: Any
    step: jax.Array
    window_loss: jax.Array
    """Sum of the losses since the last log line, so that a resumed log is the same too."""


class Result(NamedTuple):
    """What `fit` returns."""

    state: TrainState
    step: int
    heldout_loss: np.ndarray
    """[S], nats per target that counts."""
    train_loss: np.ndarray
    wall_seconds: float
    """Of all seeds together, over every start of the run, compilation included."""
    tokens_per_second: float
    """Bytes of the windows, of all seeds together, compilation and evaluation left out."""


class NonFiniteLoss(RuntimeError):
    """A loss became NaN or infinite."""


class Stopped(RuntimeError):
    """The run was asked to stop; its state is saved."""


def decays(params: Any) -> Any:
    """True for matrices, False for biases and norm scales: by name, since slots are stacked."""

    def by_name(path, _):
        return not str(path[-1].key).endswith(("bias", "scale"))

    return jax.tree_util.tree_map_with_path(by_name, params)


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up, then a cosine down to the final rate at the last step."""
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.final_learning_rate,
    )


def adamw(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2017) after clipping by the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def over_seeds(step: Callable) -> Callable:
    """`step` for a leading seeds axis on every argument.

    One after the other on a CPU, where that is faster and bit-equal to each seed alone; side by
    side on an accelerator.
    """
    if jax.default_backend() == "cpu":
        return lambda *args: lax.map(lambda row: step(*row), args)
    return jax.vmap(step)


def init_state(
    model: Any, task: Task, optimizer: Any, length: int, seed: Any, params: Any = None
) -> TrainState:
    """The state of one seed at step 0, without the seeds axis: with fresh weights, or `params`."""
    if params is None:
        window = jnp.zeros((1, length + 1), jnp.int32)
        inputs = task.prepare(window, jax.random.key(0)).inputs
        params = model.init(jax.random.key(seed), **inputs)["params"]
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), zero, jnp.zeros(()))


def train_step(
    model: Any,
    task: Task,
    optimizer: Any,
    state: TrainState,
    tokens: Any,
    seed: Any,
    *,
    accumulate: int = 1,
    label_smoothing: float = 0.0,
) -> TrainState:
    """One optimizer step of one seed on tokens [B, T + 1].

    The loss is sum(w nats) / sum(w) over the targets of the whole batch, w their weights, however
    many parts it goes through in: the gradient is the sum over the parts of the gradients of
    sum(w nats), divided by the sum of w over all parts. (A mean of the parts' means would weigh
    targets of a part that has few of them more.) The batch is prepared whole, so the targets do
    not depend on `accumulate`; dropout does.
    """
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    prepare_key, dropout_key = jax.random.split(key)
    example = task.prepare(tokens, prepare_key)
    count = jnp.maximum(jnp.sum(example.weights), 1)

    def loss(params, part, dropout_key):
        rngs = {"dropout": dropout_key}
        logits = model.apply({"params": params}, **part.inputs, deterministic=False, rngs=rngs)
        nats = cross_entropy(logits, part.targets, label_smoothing) * part.weights
        return jnp.sum(nats) / count

    value_and_grad = functools.partial(jax.value_and_grad(loss), state.params)
    if accumulate == 1:
        value, grads = value_and_grad(example, dropout_key)
    else:
        value, grads = _in_parts(value_and_grad, example, dropout_key, accumulate)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1, state.window_loss + value)


def _in_parts(call: Callable, example: Example, key: jax.Array, count: int) -> Any:
    """The sum of what `call(part, key)` gives for every part, one after the other."""
    # Part i has the rows i, i + count, ...: so every device has rows of every part.
    parts = jax.tree.map(lambda a: a.reshape(-1, count, *a.shape[1:]).swapaxes(0, 1), example)
    steps = parts, jax.random.split(key, count)
    shapes = jax.eval_shape(lambda s: call(*jax.tree.map(lambda a: a[0], s)), steps)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    add = lambda sums, step: (jax.tree.map(jnp.add, sums, call(*step)), None)
    return lax.scan(add, zeros, steps)[0]


def make_evaluate(model: Any, task: Task, mesh: Mesh, batch_size: int) -> Callable:
    """(params [S, ...], windows, valid) -> mean loss [S] in nats over the targets that count."""

    def sums(params, tokens, valid, key):
        example = task.prepare(tokens, key, valid)
        logits = model.apply({"params": params}, **example.inputs)
        nats = cross_entropy(logits, example.targets) * example.weights
        return jnp.sum(nats), jnp.sum(example.weights)

    @jax.jit
    def batch_sums(params, tokens, valid, key):
        return over_seeds(lambda p: sums(p, tokens, valid, key))(params)

    processes, process = jax.process_count(), jax.process_index()

    def evaluate(params, tokens, valid):
        totals = np.zeros(2)
        for i, start in enumerate(range(0, len(tokens), batch_size)):
            rows = [_fill(a[start : start + batch_size], batch_size) for a in (tokens, valid)]
            mine = [a[process * batch_size // processes :][: batch_size // processes] for a in rows]
            placed = [shard.spread(mesh, a, axis=0) for a in mine]
            # The same masks for every model: the key depends on the batch alone.
            got = batch_sums(params, *placed, jax.random.fold_in(jax.random.key(0), i))
            totals = totals + np.asarray(got, np.float64).T
        return totals[:, 0] / totals[:, 1]

    return evaluate


def _fill(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows of zeros (which do not count) up to `count`."""
    return np.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1))


def fit(
    model: Any,
    task: Task,
    optimizer: Any,
    config: TrainConfig,
    corpus: data.Corpus,
    *,
    mesh: Mesh,
    recorder: Recorder,
    checkpoints: Checkpoints,
    params: Any = None,
) -> Result:
    """Trains every seed of `config` to its last step, from the newest checkpoint if there is one.

    Step 0 has fresh weights for each seed, or `params` for all: seeds then differ in batches and
    dropout alone. A function of (model, params, config, corpus, seeds): killed at any moment and
    called again it ends with the same numbers, bit for bit, on the same machine with as many cores.
    A checkpoint remembers the model (`describe_model`): going on with another, above all with
    another plan of equal shapes, is a WrongCheckpoint. Raises NonFiniteLoss (nothing is saved
    then) and, on SIGTERM or SIGINT, Stopped (after a save).
    """
    began = time.perf_counter()
    seeds = shard.replicate(mesh, np.array(config.seeds, np.uint32))
    make = jax.jit(functools.partial(init_state, model, task, optimizer, config.length))
    states = [make(np.uint32(seed), params) for seed in config.seeds]
    state = shard.replicate(mesh, jax.tree.map(lambda *rows: np.stack(rows), *states))
    one_step = functools.partial(
        train_step,
        model,
        task,
        optimizer,
        accumulate=config.accumulate,
        label_smoothing=config.label_smoothing,
    )
    step_all = jax.jit(over_seeds(one_step), donate_argnums=0, out_shardings=shard.whole(mesh))
    evaluate = make_evaluate(model, task, mesh, config.eval_batch_size)
    schedule = learning_rate(config)

    first, spent, clock = 0, 0.0, _Clock()
    described = describe_model(model)
    restored = checkpoints.restore(state, functools.partial(check_model, described))
    if restored:
        first, state, notes = restored
        spent, clock = notes["wall_seconds"], _Clock(notes["busy_seconds"], notes["busy_steps"])
        recorder.say(f"resuming at step {first}")
    recorder.rewind(first)

    def save(step: int) -> None:
        _check_finite(config, step, state.window_loss)
        wall = spent + time.perf_counter() - began
        notes = {"wall_seconds": wall, "busy_seconds": clock.seconds, "busy_steps": clock.steps}
        checkpoints.save(step, state, notes | {"model": described})

    def score(step: int, part: np.ndarray, count: int) -> np.ndarray:
        losses = evaluate(state.params, *data.windows(part, config.length, count))
        _check_finite(config, step, losses)
        return losses

    tokens_per_step = len(config.seeds) * config.batch_size * config.length
    with _stop_signals() as asked, recorder.progress(config.steps, first) as advance:
        for step in range(first + 1, config.steps + 1):
            last, logs = step == config.steps, step % config.log_every == 0
            state = step_all(state, shard.spread(mesh, batch(corpus, config, step), axis=1), seeds)
            if logs or last:
                clock.stop(state, step)
                since = step - (step - 1) // config.log_every * config.log_every
                losses = np.asarray(state.window_loss) / since
                _check_finite(config, step, losses)
                state = state._replace(window_loss=jax.tree.map(jnp.zeros_like, state.window_loss))
                rate = float(schedule(step - 1))
                recorder.write(step, {"train/loss": losses, "train/learning_rate": rate})
                advance(step, tokens_per_step)
            if step % config.eval_every == 0 and not last:
                clock.stop(state, step)
                losses = score(step, corpus.heldout, config.curve_windows)
                recorder.write(step, {"eval/loss": losses})
            # Hosts agree on the step to stop at, now and then: asking costs them a message.
            stops = (logs or jax.process_count() == 1) and shard.any_process(asked())
            if step % config.checkpoint_every == 0 or last or stops:
                clock.stop(state, step)
                save(step)
            if stops and not last:
                raise Stopped(f"stopped at step {step} of {config.steps}; the state is saved")
            clock.start(step)  # hence not before the first step, which compiles
    heldout = score(config.steps, corpus.heldout, config.eval_windows)
    train = score(config.steps, corpus.train, config.eval_windows or config.curve_windows)
    recorder.write(config.steps, {"eval/loss": heldout})
    wall = spent + time.perf_counter() - began
    speed = clock.steps * tokens_per_step / max(clock.seconds, 1e-9)
    return Result(state, config.steps, heldout, train, wall, speed)


def batch(corpus: data.Corpus, config: TrainConfig, step: int) -> np.ndarray:
    """This process's rows of the batches of all seeds [S, B / P, T + 1]."""
    rows = [
        data.sample(
            corpus.train,
            config.length,
            config.batch_size,
            seed=seed,
            step=step,
            process=jax.process_index(),
            num_processes=jax.process_count(),
        )
        for seed in config.seeds
    ]
    return np.stack(rows)


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
