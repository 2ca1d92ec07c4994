"""Checkpoints that are whole or not there, with a digest of every array.

Orbax writes to a temporary folder and renames it, so a kill leaves the older step; but it reads a
flipped bit, or another dtype, without an error. So the digest of each array is stored and checked
on load.
"""

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array

from attnlab.atomic import naming_full_disk
from attnlab.extras import extra
from attnlab.models import ModelConfig, to_json
from attnlab.nested import JSON, differences
from attnlab.sharing import PyTree
from attnlab.training import sharding
from attnlab.training.config import TrainConfig, common_steps

T = TypeVar("T")


def digest(array: jax.typing.ArrayLike) -> str:
    """blake2b of dtype, shape and bytes, whatever devices they are on."""
    host: np.ndarray = sharding.gather(array)
    head = f"{host.dtype} {host.shape} ".encode()
    return hashlib.blake2b(head + host.tobytes(), digest_size=16).hexdigest()


class WrongCheckpoint(ValueError):
    """A checkpoint of another run than the one that is to be resumed.

    The message names the first difference: of the model, its sharing plans, the data, the schedule
    or the training. Give the run the config of the checkpoint, or another folder.
    """


MAY_CHANGE = (
    "steps", "accumulate", "loss_tokens", "evaluation", "log_every", "checkpoint_every"
)  # fmt: skip
"""Fields of a `TrainConfig` with which a run may be resumed that began with others."""


def describe_model(model: object) -> JSON:
    """The config of a model as nested JSON, with its version and its sharing plans.

    `plans` are those of the layers and of an encoder beside a decoder: sublayer -> parameter group
    of each layer, so that two names of one plan are the same. Empty for a model whose `config` is
    no `ModelConfig`.

    >>> from attnlab.models import ModelConfig
    >>> describe_model(ModelConfig(sharing="cycle:2").build())["plans"]["layers"]["ffn"]
    [0, 1, 0, 1]
    """
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return {}
    written = json.loads(to_json(config))
    plans = {"layers": config.plan}
    if config.encoder is not None:
        plans["encoder_layers"] = config.encoder_model.plan
    groups = {stack: {n: list(g) for n, g in plan.items()} for stack, plan in plans.items()}
    return {**written["model"], "version": written["version"], "plans": groups}


def describe_run(model: object, source: str, config: TrainConfig) -> JSON:
    """What a resumed run must have again: the model, the digest of the data, and the training but
    for `MAY_CHANGE`."""
    training = json.loads(json.dumps(config.to_dict()))
    training = {name: value for name, value in training.items() if name not in MAY_CHANGE}
    return {"model": describe_model(model), "source": source, "training": training}


def check_longer(run: object, before: int, config: TrainConfig, step: int) -> None:
    """Raises WrongCheckpoint where a run of `before` steps, with a checkpoint at `step`, cannot
    become one of `config.steps`: their learning rates differ up to there."""
    if before == config.steps:
        return
    common = common_steps(dataclasses.replace(config, steps=before), config.steps)
    if step > common:
        raise WrongCheckpoint(
            f"{run} cannot be continued from {before} to {config.steps} steps: its newest "
            f"checkpoint is at {step}, and with train.schedule.name={config.schedule.name!r} the "
            f"learning rates of the two differ after step {common}; use another folder (the "
            "schedule constant can be continued)"
        )


def check_run(config: TrainConfig, identity: JSON, notes: JSON) -> None:
    """Compares the notes of a checkpoint with a run. Equal shapes do not say that two models are
    the same: plans, norms and masks leave no trace in them.

    Args:
      config: of the run.
      identity: of `describe_run`.
      notes: of a checkpoint: another `describe_run`, "step" and "of", the steps of its run.

    Raises:
      WrongCheckpoint: the first difference.

    >>> from attnlab.models import ModelConfig, Norm
    >>> models = [ModelConfig(norm=Norm(kind=kind)).build() for kind in ("rms", "layer")]
    >>> ours, theirs = (describe_run(model, "", TrainConfig()) for model in models)
    >>> try:
    ...     check_run(TrainConfig(), ours, theirs)
    ... except WrongCheckpoint as error:
    ...     print(str(error).partition(";")[0])
    the checkpoint is of another run: model.norm.kind is 'layer' there and 'rms' here
    """
    theirs = {name: notes.get(name) for name in identity}
    # The names of plans may differ: "plans" are the plans themselves.
    found = [one for one in differences(theirs, identity) if not one[0].endswith("sharing")]
    if found:
        path, there, here = found[0]
        raise WrongCheckpoint(
            f"the checkpoint is of another run: {path} is {there!r} there and {here!r} here; give "
            "the run the config and data of the checkpoint, or another folder"
        )
    # Last: it needs a schedule with which the checkpoint's number of steps is valid.
    check_longer("the run", notes.get("of", config.steps), config, notes.get("step", 0))


class Checkpoints:
    """The newest two steps of a state (any tree of arrays).

    States are written in the background. Use as a context manager: leaving it waits for the last
    write and raises if it failed.

    Args:
      directory: made if it is missing; one folder for each step.
      say: receives a line about each damaged checkpoint.

        with Checkpoints(Path("run/checkpoints")) as checkpoints:
            checkpoints.save(100, {"w": jnp.ones(3)}, {"of": 200})
        with Checkpoints(Path("run/checkpoints")) as checkpoints:
            step, state, notes = checkpoints.restore()  # None where nothing was saved
    """

    def __init__(self, directory: Path, *, say: Callable[[str], None] = print) -> None:
        # Orbax takes a second to import and logs what our errors report more clearly.
        with extra("train"):
            from orbax.checkpoint import v1 as orbax

        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._directory, self._say = directory, say
        newest = orbax.training.preservation_policies.LatestN(2)
        self._checkpointer = orbax.training.Checkpointer(
            directory.resolve(), preservation_policy=newest
        )
        # What a kill left. The first save deletes it, since a reader may see what another process
        # is writing.
        self._leftovers = list(directory.glob("*.orbax-checkpoint-tmp*"))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        with naming_full_disk(self._directory):
            self._checkpointer.close()

    def save(self, step: int, state: PyTree, notes: JSON) -> None:
        """Starts to write `state`, in place of a damaged one. `notes` are JSON."""
        flat = _flat(state)
        digests = {name: digest(leaf) for name, leaf in flat.items()}
        about = {"digests": digests, "notes": notes}
        while self._leftovers and jax.process_index() == 0:
            shutil.rmtree(self._leftovers.pop(), ignore_errors=True)
        with naming_full_disk(self._directory):  # of the last save, too
            self._checkpointer.save_async(
                step, flat, force=True, overwrite=True, custom_metadata=about
            )

    def restore(
        self, like: PyTree = None, check: Callable[[JSON], None] | None = None
    ) -> tuple[int, PyTree, JSON] | None:
        """(step, state, notes) of the newest step that is whole, or None if there is none.

        A damaged step is reported in one line and the next older one is tried.

        Args:
          like: a state with the tree, shapes, dtypes and shardings; without it the state is a dict
            of path -> array on the first device.
          check: called with the notes before the state is read; may raise WrongCheckpoint.

        Raises:
          WrongCheckpoint: the newest step has arrays of other names, shapes or dtypes than `like`.
          ValueError: steps exist but none can be loaded.
        """
        return self._newest(lambda step: self._load(step, like, check))

    def notes(self) -> tuple[int, JSON] | None:
        """(step, notes) as `restore` returns them, without reading arrays. Damaged arrays are not
        seen."""
        return self._newest(
            lambda step: (step, self._checkpointer.metadata(step).custom_metadata["notes"])
        )

    def _newest(self, read: Callable[[int], T]) -> T | None:
        """What `read` returns of the newest step where it does not fail."""
        steps = sorted((c.step for c in self._checkpointer.checkpoints), reverse=True)
        for step in steps:
            try:
                return read(step)
            except (WrongCheckpoint, MemoryError):
                raise
            except Exception as error:  # orbax raises many kinds for a damaged step
                if "RESOURCE_EXHAUSTED" in str(error):  # the memory of a device, as JAX says it
                    raise
                cause = error.__cause__ or error.__context__ or error
                said = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:200]
                self._say(f"checkpoint {step} is damaged, trying an older one: {said}")
        if steps:
            raise ValueError(
                f"no checkpoint in {self._directory} could be read (tried {steps}); "
                "move the folder away to start again"
            )
        return None

    def _load(
        self, step: int, like: PyTree, check: Callable[[JSON], None] | None
    ) -> tuple[int, PyTree, JSON]:
        stored = self._checkpointer.metadata(step)
        digests, notes = (stored.custom_metadata[name] for name in ("digests", "notes"))
        if check is not None:
            check(notes)
        arrays = stored.metadata if like is None else _flat(like)
        if found := differences(_shapes(stored.metadata), _shapes(arrays)):
            name, there, here = found[0]
            raise WrongCheckpoint(
                f"checkpoint {step} in {self._directory} is of another model or version of "
                f"attnlab: {name} is {there} there and {here} here; give the run another folder"
            )
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {
            n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one if like is None else a.sharding)
            for n, a in arrays.items()
        }
        flat = self._checkpointer.load(step, wanted)
        for name, leaf in flat.items():
            if digest(leaf) != digests[name]:
                raise ValueError(f"the digest of {name} does not match")
        # Orbax returns the names sorted, not in the tree's order.
        leaves = [flat[name] for name in wanted]
        state = flat if like is None else jax.tree.unflatten(jax.tree.structure(like), leaves)
        return step, state, notes


def _shapes(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{a.dtype} {list(a.shape)}" for name, a in arrays.items()}


def _flat(tree: PyTree) -> dict[str, Array]:
    """Leaves by path, so that the files do not depend on optax's classes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}
