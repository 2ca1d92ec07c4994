"""`Dataset`: batches and scored examples as dicts of arrays, each a function of (seed, step)."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

Batch: TypeAlias = dict[str, np.ndarray]
"""Name -> array on the host; the first axis of each array is the rows."""
DeviceBatch: TypeAlias = dict[str, jax.Array]
"""The same on devices."""
BatchShapes: TypeAlias = dict[str, jax.ShapeDtypeStruct]
Baselines: TypeAlias = dict[str, dict[str, float]]
"""Metric -> name of a baseline -> its value on the held-out rows."""
Fact: TypeAlias = str | int | float


class DataSizes(NamedTuple):
    """Sizes that a model for the data must have.

    Attributes:
      vocab_size: tokens are 0 to vocab_size - 1; special tokens of an objective come after them. Of
        vectors in place of tokens: how many features each has.
      num_classes: classes, or numbers of a vector to predict; 0: the data have neither.

    >>> DataSizes(vocab_size=128, num_classes=2)
    DataSizes(vocab_size=128, num_classes=2)
    """

    vocab_size: int
    num_classes: int = 0


BYTES = DataSizes(256)
"""Of bytes."""


def join_tokens(tokens: Sequence[int]) -> str:
    """The numbers of tokens, separated by blanks.

    >>> join_tokens([3, 14])
    '3 14'
    """
    return " ".join(map(str, tokens))


HostBatches: TypeAlias = Callable[[int, int, int, slice], Batch]
"""(seed, step, size, shard) -> the rows `shard` of the batch of `size` rows. The whole batch is a
function of (seed, step, size): it is the same for any number of processes."""


@dataclasses.dataclass(frozen=True)
class DeviceBatches:
    """Batches that are made on the device, inside the training step.

    Attributes:
      generate: (arrays, key, size) -> a batch, traced; the key depends on (seed, step).
      arrays: kept on every device from the start, for `generate`.

    >>> def generate(arrays, key, size):
    ...     return {"tokens": jax.random.randint(key, (size, 5), 0, 7)}
    >>> batches = DeviceBatches(generate)
    >>> make = lambda key: batches.generate(batches.arrays, key, 2)
    >>> jax.eval_shape(make, jax.random.key(0))["tokens"].shape
    (2, 5)
    """

    generate: Callable[[Batch | DeviceBatch, jax.Array, int], DeviceBatch]
    arrays: Batch = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training batches, held-out rows, and what a report says about the data.

    Batches are functions of (seed, step), so no state is saved. Scored rows (`heldout`, `train`,
    `validation`) also have the array `valid`, [W] or [W, ...]: False where a row, or a position in
    it, is padding and must not count. An evaluation pads its last batch with rows of zeros.

    Attributes:
      name: for people.
      digest: of everything that a batch depends on, except seed and step.
      sizes: that a model must have.
      row_tokens: tokens of a row, for the reported speed.
      heldout: count -> that many rows, evenly spaced; 0: all, each target counted once.
      train: the same of the training part, scored as `heldout` is.
      validation: the same of rows for learning curves and for choosing settings, if there are any;
        `heldout` is then scored once, at the end.
      batches: of the training, a function on the host or `DeviceBatches`.
      decode: tokens -> text for people.
      baselines: returns what needs no model, on the held-out rows.
      files: name -> content of what was made for this data (a tokenizer) and belongs to a run. It
        is kept in the folder of the run, where `DataConfig.load` finds it again.
      facts: further numbers and texts about the data, for the report.
    """

    name: str
    digest: str
    sizes: DataSizes
    row_tokens: int
    heldout: Callable[[int], Batch]
    train: Callable[[int], Batch]
    batches: HostBatches | DeviceBatches
    validation: Callable[[int], Batch] | None = None
    decode: Callable[[Sequence[int]], str] = join_tokens
    baselines: Callable[[], Baselines] = dict
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    facts: dict[str, Fact] = dataclasses.field(default_factory=dict)

    @property
    def device_arrays(self) -> Batch:
        """Arrays of `DeviceBatches`; none where batches come from the host."""
        return self.batches.arrays if isinstance(self.batches, DeviceBatches) else {}

    def shapes(self) -> BatchShapes:
        """Shapes and dtypes of a batch of one row."""
        if not isinstance(batches := self.batches, DeviceBatches):
            return shapes_of(batches(0, 1, 1, slice(None)))
        shapes: BatchShapes = jax.eval_shape(
            lambda arrays, key: batches.generate(arrays, key, 1), batches.arrays, jax.random.key(0)
        )
        return shapes


def shapes_of(batch: Batch) -> BatchShapes:
    """Shapes of arrays, with the dtypes that they have on a device."""
    dtype = jax.dtypes.canonicalize_dtype
    return {name: jax.ShapeDtypeStruct(a.shape, dtype(a.dtype)) for name, a in batch.items()}


@runtime_checkable
class DataConfig(Protocol):
    """An entry of `DATASETS`: a frozen dataclass, every field of which is a flag (`config.data`).

    It validates its fields when it is made. Files are looked for by `sizes` and `load`, so that a
    stored config can be read where the data are not.

    >>> from attnlab.data import Recall
    >>> isinstance(Recall(), DataConfig)
    True
    """

    def sizes(self) -> DataSizes:
        """Sizes that a model must have. Quick: every variant of a sweep asks for them."""

    def shapes(self, length: int) -> BatchShapes:
        """Shapes and dtypes of a batch of one row of `length` tokens. As quick.

        Raises:
          ValueError: rows of this length cannot be made.
        """

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The dataset in rows of `length` tokens.

        Args:
          length: tokens of a row.
          folder: of a run, with the `Dataset.files` that were made for it; None: they are made.

        Raises:
          ValueError: data that cannot be used, with file and line, or rows of another length.
          FileNotFoundError: there is no such file.
        """
