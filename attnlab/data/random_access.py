"""Dataset `grain`: any data with a length and items by index, read through the package grain."""

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from attnlab.data.batching import evenly_spaced
from attnlab.data.dataset import (
    Baselines,
    Batch,
    BatchShapes,
    Dataset,
    DataSizes,
    join_tokens,
    shapes_of,
)
from attnlab.extras import extra

Item = dict[str, np.ndarray]
"""Name -> array, of the same shapes in all items."""


@runtime_checkable
class RandomAccess(Protocol):
    """Whatever has a length and items by index: datasets and sources of grain, lists too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


class Splits(NamedTuple):
    """What a function that a config names returns: the splits of a dataset, and its description.

    An objective's `required_arrays` say what an item must hold.
    """

    name: str
    train: RandomAccess
    heldout: RandomAccess
    sizes: DataSizes
    validation: RandomAccess | None = None
    decode: Callable[[Sequence[int]], str] = join_tokens
    baselines: Callable[[], Baselines] = dict
    digest: str = ""
    """"": sha256 of all items, which are read once for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAccessData:
    """Data of random access: anything whose items are dicts of arrays, read through the package
    grain.

    grain shuffles: the batch of step n holds the items n B to (n + 1) B - 1 of
    `grain.MapDataset.source(train).shuffle(seed).repeat()`, in another order every epoch.

    Attributes:
      make: "package.module:function"; the function is called with `path` and returns `Splits`.
      path: for the function.

        def read(path: str) -> Splits:  # in my_data.py
            items = [{"tokens": row} for row in np.load(path)]
            return Splits("mine", items[:-100], items[-100:], DataSizes(vocab_size=256))

        RandomAccessData(make="my_data:read", path="rows.npy")
    """

    make: str = ""
    path: str = ""

    @property
    def splits(self) -> Splits:
        """What `make` returns; raises ValueError where there is no such function."""
        module, _, name = self.make.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"data.make {self.make!r} must be package.module:function ({error})"
            ) from error
        return _splits(function, self.path)

    def sizes(self) -> DataSizes:
        """Those of the splits."""
        return self.splits.sizes

    def shapes(self, length: int) -> BatchShapes:
        """Those of the first item."""
        return shapes_of(_stack([self.splits.train[0]]))

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The items as rows; their shapes are their own, `length` is for the reported speed.
        `folder` is not used.

        Raises:
          ValueError: there is no such function. Making a batch raises it where items differ in
            their arrays or in shapes.
          ModuleNotFoundError: the package grain is missing.
        """
        return dataset_of_splits(self.splits, length)


@functools.lru_cache(maxsize=4)
def _splits(function: Callable[[str], Splits], path: str) -> Splits:
    return function(path)


def dataset_of_splits(splits: Splits, row_tokens: int) -> Dataset:
    """The dataset of splits that are already loaded."""
    with extra("data"):
        import grain

    @functools.lru_cache(maxsize=64)
    def stream(seed: int) -> Any:
        return grain.MapDataset.source(splits.train).shuffle(seed=seed).repeat(None)

    def batch(seed: int, step: int, size: int, shard: slice) -> Batch:
        items = stream(seed)
        return _stack([items[step * size + i] for i in range(size)[shard]])

    def scored(items: RandomAccess, count: int) -> Batch:
        rows = [items[int(i)] for i in evenly_spaced(len(items), count)]
        return {"valid": np.ones(len(rows), bool)} | _stack(rows)

    validation = splits.validation
    return Dataset(
        name=splits.name,
        digest=splits.digest or _digest((splits.train, validation or (), splits.heldout)),
        sizes=splits.sizes,
        row_tokens=row_tokens,
        batches=batch,
        heldout=functools.partial(scored, splits.heldout),
        train=functools.partial(scored, splits.train),
        validation=functools.partial(scored, validation) if validation else None,
        decode=splits.decode,
        baselines=splits.baselines,
        facts={"training rows": len(splits.train), "held-out rows": len(splits.heldout)},
    )


def _stack(items: Sequence[Item]) -> Batch:
    names = items[0].keys()
    try:
        if any(item.keys() != names for item in items):
            raise ValueError(f"one has {', '.join(names)}, another has not")
        return {name: np.stack([item[name] for item in items]) for name in names}
    except ValueError as error:
        raise ValueError(f"items of one dataset must have the same arrays: {error}") from error


def _digest(splits: Iterable[RandomAccess | tuple[()]]) -> str:
    whole = hashlib.sha256()
    for items in splits:
        whole.update(b"%d;" % len(items))
        for i in range(len(items)):
            for name, value in sorted(items[i].items()):
                array = np.asarray(value)
                # As JAX writes the path, so that digests of earlier versions stay.
                whole.update(f"(DictKey(key={name!r}),) {array.dtype} {array.shape};".encode())
                whole.update(array.tobytes())
    return whole.hexdigest()
