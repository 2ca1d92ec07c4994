"""Checkpoints that are whole or not there, with a digest of every array.

Orbax writes to a temporary folder and renames it, so a kill leaves the older step; but it reads a
flipped bit, or another dtype, without a word. So each array's digest is stored and checked on load.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np


def digest(array: Any) -> str:
    """blake2b of dtype, shape and bytes."""
    array = np.asarray(array)
    head = f"{array.dtype} {array.shape} ".encode()
    return hashlib.blake2b(head + array.tobytes(), digest_size=16).hexdigest()


class Checkpoints:
    """The newest `keep` steps of a state (any tree of arrays), written in the background.

    Use as a context manager: leaving it waits for the last write and raises if it failed.
    """

    def __init__(self, directory: Path, *, keep: int = 2, say: Callable[[str], None] = print):
        # Orbax takes a second to import and talks through these loggers; our errors say it better.
        from orbax.checkpoint import v1 as orbax

        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.ERROR)
        training = orbax.training
        self._directory, self._say = directory, say
        self._open = lambda: training.Checkpointer(
            directory.resolve(),
            preservation_policy=training.preservation_policies.LatestN(keep),
        )
        self._checkpointer = self._open()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: Any) -> None:
        self._checkpointer.close()

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Starts to write `state`; a step that is there already is kept."""
        if any(c.step == step for c in self._checkpointer.checkpoints):
            return
        flat = _flat(state)
        digests = {name: digest(leaf) for name, leaf in flat.items()}
        self._checkpointer.save_async(
            step, flat, force=True, custom_metadata={"digests": digests, "notes": notes}
        )

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """(step, state, notes) of the newest step that is whole, or None where there is none.

        `like` gives the tree, shapes, dtypes and placement. A damaged step is reported in one
        line and the next older one is tried. Raises ValueError where steps exist but none loads.
        """
        damaged = []
        for step in sorted((c.step for c in self._checkpointer.checkpoints), reverse=True):
            try:
                state, notes = self._load(step, like)
            except Exception as error:  # orbax raises many kinds for a damaged step
                cause = error.__cause__ or error.__context__ or error
                self._say(f"checkpoint {step} is damaged, trying an older one: {_brief(cause)}")
                damaged.append(step)
                continue
            self._remove(damaged)  # the run gets there again and must be able to save
            return step, state, notes
        if damaged:
            raise ValueError(
                f"no checkpoint in {self._directory} could be read (tried {damaged}); "
                "move the folder away to start again"
            )
        return None

    def _remove(self, steps: list[int]) -> None:
        if steps and jax.process_index() == 0:
            for step in steps:
                shutil.rmtree(self._directory / str(step))
        if steps:
            self._checkpointer.close()
            self._checkpointer = self._open()

    def _load(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        flat_like = _flat(like)
        abstract = {
            n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for n, a in flat_like.items()
        }
        metadata = self._checkpointer.metadata(step).custom_metadata
        flat = self._checkpointer.load(step, abstract)
        for name, leaf in flat.items():
            if digest(leaf) != metadata["digests"][name]:
                raise ValueError(f"the digest of {name} does not match")
        # Orbax hands the names back sorted, not in the tree's order.
        leaves = [flat[name] for name in flat_like]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), metadata["notes"]


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by path, so that what is on disk does not depend on optax's classes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
