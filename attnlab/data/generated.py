"""Datasets whose rows are generated on the device from a key."""

import hashlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array

from attnlab.data.dataset import Baselines, Batch, Dataset, DataSizes, DeviceBatch, DeviceBatches


@runtime_checkable
class GeneratedConfig(Protocol):
    """The config of a dataset that is generated."""

    @property
    def heldout_rows(self) -> int:
        """How many rows are held out."""

    def sizes(self) -> DataSizes:
        """Sizes that a model must have."""


def generated_dataset(
    config: GeneratedConfig,
    length: int,
    name: str,
    generate: Callable[[Array, int], DeviceBatch],
    baselines: Callable[[Batch], Baselines],
) -> Dataset:
    """The dataset of rows of `length` tokens that `generate(key, size)` returns.

    `config.heldout_rows` rows of a key that no batch has are held out; as many others are scored as
    training rows. `baselines` is called with the held-out rows.
    """

    def scored(seed: int, count: int) -> Batch:
        # A run folds a step into its key, here a number that no step has.
        key = jax.random.fold_in(jax.random.key(seed), 2**31)
        made = jax.jit(lambda key: generate(key, config.heldout_rows))(key)
        whole = {n: np.asarray(a) for n, a in made.items()}
        whole["valid"] = np.ones(config.heldout_rows, bool)
        return {n: a[: count or None] for n, a in whole.items()}

    identity = f"{config} {length} jax {jax.__version__}"
    return Dataset(
        name=name,
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        sizes=config.sizes(),
        row_tokens=length,
        batches=DeviceBatches(lambda arrays, key, size: generate(key, size)),
        heldout=lambda count: scored(0, count),
        train=lambda count: scored(1, count),
        baselines=lambda: baselines(scored(0, 0)),
    )
