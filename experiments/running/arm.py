"""One arm: a config -> model, data and optimizer -> `fit` -> result.json. Its seeds are inside."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab import training
from attnlab.heads.multihead import explain_heads
from attnlab.model import accounting
from attnlab.model.config import ModelConfig
from attnlab.names import find
from attnlab.training import shard, sources
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.metrics import Recorder
from attnlab.training.tasks import TASKS, Task, input_lengths
from experiments.running import initial, workdir

COMPLETE, DIVERGED = "complete", "diverged"
MAPS = "maps.npz"


class Arm(NamedTuple):
    """A config, checked and resolved: nothing in it can fail later for what it says."""

    task: str
    model: ModelConfig
    train: training.TrainConfig
    data_path: str
    match: str
    start: str
    """A folder of weights to start from, or ""."""


def resolve(config: Any) -> Arm:
    """A config of `experiments/configs` -> Arm. Raises ValueError, saying what to change."""
    task = find("task", config.task, TASKS)
    trains = training.TrainConfig(**{**config.train, "seeds": tuple(config.train.seeds)})
    model = ModelConfig(**config.model)
    if model.kind != task.kind:
        raise ValueError(f"task {config.task!r} needs model.kind={task.kind!r}, not {model.kind!r}")
    if model.vocab_size < sources.VOCAB_SIZE + task.extra_tokens:
        raise ValueError(
            f"task {config.task!r} needs model.vocab_size of at least "
            f"{sources.VOCAB_SIZE + task.extra_tokens}, not {model.vocab_size}"
        )
    for name, length in input_lengths(task, trains.length).items():
        if length > model.max_len:
            raise ValueError(
                f"train.length {trains.length} gives {name!r} of {length} tokens, longer than "
                f"model.max_len {model.max_len}"
            )
    if model.readout == "none":
        raise ValueError(
            f"task {config.task!r} reads logits, model.readout='none' has none; give the model a "
            "readout, or start from a folder with a language-model readout"
        )
    if config.match.budget:
        reference = dataclasses.replace(model, layout=config.match.layout, plan=config.match.plan)
        model = accounting.match_ffn_width(model, reference, config.match.budget, trains.length)
    if config.start:
        initial.check(model, config.start)
    return Arm(config.task, model, trains, config.data.path, config.match.budget, config.start)


def run(config: Any, folder: Path, name: str = "") -> dict[str, Any]:
    """Runs the arm in `folder`, or goes on where it was left; returns what result.json holds.

    Raises ValueError before any work for bad input, training.Stopped after a signal. A loss that is
    not finite ends the arm with status "diverged" and a message.
    """
    arm = resolve(config)
    sizes = {"batch_size": arm.train.batch_size, "eval_batch_size": arm.train.eval_batch_size}
    if arm.train.accumulate > 1:
        sizes["batch_size / accumulate"] = arm.train.batch_size // arm.train.accumulate
    mesh = shard.data_mesh(**sizes)
    corpus = sources.load_corpus(arm.data_path, length=arm.train.length)
    record = {
        "config": config.to_dict(),
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "bytes": corpus.num_bytes,
            "heldout_bytes": len(corpus.heldout),
        },
        "environment": workdir.environment(),
    }
    if arm.start:
        stored = initial.load(arm.start)
        record["start"] = {"digest": stored.digest}
    size = accounting.unique_parameters(arm.model) * len(arm.train.seeds)
    # Parameters and two moments in float32, for two checkpoints and the one being written.
    changed = []
    if jax.process_index() == 0:
        changed = workdir.claim(folder, record, room=9 * 4 * size + (64 << 20))
    shard.wait_for_all("workdir")
    done = folder / workdir.RESULT
    if done.exists():
        return workdir.read_json(done)
    with (
        Recorder(folder, arm.train.seeds, name=name, writes=jax.process_index() == 0) as recorder,
        Checkpoints(folder / "checkpoints", say=recorder.say) as checkpoints,
    ):
        for line in changed:
            recorder.say(f"since this run began, {line}: its numbers may differ in the last bits")
        model, task = arm.model.build(), TASKS[arm.task]
        length = input_lengths(task, arm.train.length)["tokens"]
        result = {
            "name": name,
            "unit": task.unit,
            "layout": arm.model.layout,
            "plan": arm.model.plan,
            "match": arm.match,
            "model": training.describe_model(model),
            "seeds": list(arm.train.seeds),
            "steps": arm.train.steps,
            "length": arm.train.length,
            "learning_rate": arm.train.learning_rate,
            "unique_parameters": accounting.unique_parameters(arm.model),
            "applied_parameters": accounting.applied_parameters(arm.model),
            "flops_per_token": accounting.flops_per_token(arm.model, arm.train.length),
            "unigram_bits_per_byte": sources.unigram_bits(corpus.heldout),
            "gzip_bits_per_byte": sources.gzip_bits(corpus.heldout),
            "attention": attention(arm.model, arm.train.batch_size, length),
        }
        params = None
        if arm.start:
            window = sources.windows(corpus.heldout, arm.train.length, 1)[0]
            inputs = task.prepare(window, jax.random.key(0)).inputs
            params, changed_by = initial.under_plan(stored, arm.model, inputs["tokens"])
            recorder.say(f"starting from {arm.start}; {changed_by}")
        try:
            fitted = training.fit(
                model,
                task,
                training.adamw(arm.train),
                arm.train,
                corpus,
                mesh=mesh,
                recorder=recorder,
                checkpoints=checkpoints,
                params=params,
            )
        except training.NonFiniteLoss as error:
            result |= {"status": DIVERGED, "message": str(error)}
        else:
            result |= {
                "status": COMPLETE,
                score("heldout", task.unit): (fitted.heldout_loss / math.log(2)).tolist(),
                score("train", task.unit): (fitted.train_loss / math.log(2)).tolist(),
                "tokens_per_second": fitted.tokens_per_second,
                "wall_seconds": fitted.wall_seconds,
            }
            maps = _maps(arm.model, task, fitted, corpus, arm.train)
            if jax.process_index() == 0:
                np.savez_compressed(folder / MAPS, **maps)
        if jax.process_index() == 0:
            workdir.write_json(done, result)
        shard.wait_for_all("result")
        return result


def score(part: str, unit: str) -> str:
    """The name of a loss in result.json and results.csv: "heldout_bits_per_byte"."""
    return f"{part}_bits_per_{unit.replace(' ', '_')}"


def attention(config: ModelConfig, batch: int, length: int) -> dict[str, Any]:
    """How heads are computed: order of contraction and backend, with the reasons against others.

    Of a decoder with an encoder: its own attention.
    """
    drops = config.attention_dropout_rate
    return explain_heads(
        config.heads,
        jax.ShapeDtypeStruct((batch, length, config.width), config.dtype),
        order=config.order,
        rotary=config.positions == "rotary",
        is_causal=config.kind != "encoder",
        dropout_rate=drops,
        dropout_key=jax.random.key(0) if drops else None,
        implementation=config.implementation,
    )


def _maps(config: ModelConfig, task: Task, fitted: Any, corpus: Any, trains: Any) -> dict[str, Any]:
    """The attention probabilities [L, N, T, S] of the first seed on one held-out window.

    Of a decoder with an encoder: to the source. `tokens` is what the rows stand for, `source`,
    where it is another text, what the columns stand for.
    """
    tokens, _ = sources.windows(corpus.heldout, trains.length, 3)
    params = jax.tree.map(lambda a: a[0], fitted.state.params)
    # Fused kernels keep no probabilities: whatever trained, the dense path shows them.
    model = dataclasses.replace(config, implementation="dense").build()

    @jax.jit
    def look(params, tokens):
        inputs = task.prepare(tokens, jax.random.key(0)).inputs
        probs = model.apply({"params": params}, **inputs, return_probs=True)[1]
        cross = probs[1] if "source" in inputs else probs
        return cross[:, 0], {name: a[0] for name, a in inputs.items()}

    probs, inputs = look(params, tokens[1:2])
    return {
        "probs": np.asarray(probs, np.float16),
        **{name: np.asarray(a, np.int32) for name, a in inputs.items()},
        "step": np.array(fitted.step),
        "seed": np.array(trains.seeds[0]),
    }
