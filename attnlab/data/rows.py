"""Datasets of any rows: items of random access (`random_access`), or of the package datasets."""

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
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
from attnlab.data.files import check_path, visible_files
from attnlab.extras import extra
from attnlab.fields import Spec, bounded

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


HELDOUT_SPLITS = ("validation", "valid", "test")
"""Splits that are held out, the first that there is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace(Spec, prefix="data."):
    """Rows of token ids, one example each; grain shuffles them, as those of `grain`.

    Parquet files are turned into Arrow files in the cache of the package datasets. Rows are read
    from the disk as they are needed, and no row attends to another. A dataset with a split "train"
    holds out its split "validation", "valid" or "test", the first that there is.

    Attributes:
      path: a folder of `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk`, a Parquet
        file, or a folder of Parquet files.
      column: of the token ids. A row is cut after `length` + 1 of them, and what a shorter one
        lacks does not count. A column of text is refused: `prepare` tokenizes it.
      vocab_size: more than the largest id; required.
      heldout: the share of the rows, the last ones, that is held out where no split is.
      bytes_per_token: mean number of bytes of a token, for bits per byte (1: bits per token);
        required.

    Raises:
      ValueError: a negative number, or `heldout` that is not between 0 and 1.

    >>> {name: a.shape for name, a in HuggingFace(vocab_size=100).shapes(5).items()}
    {'tokens': (1, 6), 'valid': (1, 5), 'bytes': (1, 5)}
    """

    path: str = ""
    column: str = "input_ids"
    vocab_size: int = bounded(0, least=0)
    heldout: float = bounded(0.05, above=0.0, below=1.0)
    bytes_per_token: float = bounded(0.0, least=0.0)

    def sizes(self) -> DataSizes:
        """The tokens."""
        check_path(self.path, "dataset", "give data.path")
        if not self.vocab_size:
            raise ValueError("give data.vocab_size: more than the largest token id")
        return DataSizes(self.vocab_size)

    def shapes(self, length: int) -> BatchShapes:
        """`length` + 1 tokens, and what each target counts."""
        shapes = {"tokens": (1, length + 1), "valid": (1, length), "bytes": (1, length)}
        dtypes = {"tokens": np.int32, "valid": bool, "bytes": np.float32}
        return {name: jax.ShapeDtypeStruct(shapes[name], dtypes[name]) for name in shapes}

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The rows; `folder` is not used.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: `path`, `vocab_size` or `bytes_per_token` is not given; there is no split
            "train", no such column, or too few rows to hold some out. Reading a row raises it where
            the row does not hold token ids below `vocab_size`.
          ModuleNotFoundError: the package datasets or grain is missing.
        """
        check_path(self.path, "dataset", "give data.path")
        if not self.bytes_per_token:
            raise ValueError(
                "give data.bytes_per_token, the mean number of bytes of a token (1: bits per token)"
            )
        train, heldout = self._tables()
        limits = length, self.sizes().vocab_size, self.bytes_per_token
        parts = [_Rows(table, self.column, *limits) for table in (train, heldout)]
        splits = Splits(
            name=Path(self.path).name,
            train=parts[0],
            heldout=parts[1],
            sizes=self.sizes(),
            digest=self._digest(),
        )
        return dataset_of_splits(splits, length)

    def _tables(self) -> tuple[Any, Any]:
        """Training and held-out rows, of the package datasets."""
        with extra("data"):
            import datasets
        files = self._parquet()
        if files:
            table: Any = datasets.Dataset.from_parquet([str(file) for file in files])
        elif self.path:
            table = datasets.load_from_disk(self.path)
        else:
            raise ValueError("the dataset huggingface needs data.path")
        held = None
        if isinstance(table, datasets.DatasetDict):
            known = list(table)
            names = [name for name in HELDOUT_SPLITS if name in table]
            if "train" not in table:
                raise ValueError(f"{self.path} has the splits {known}, none is 'train'")
            table, held = table["train"], table[names[0]] if names else None
        if self.column not in table.column_names:
            raise ValueError(f"{self.path} has no column {self.column!r}; {table.column_names}")
        if held is None:
            end = int(len(table) * (1 - self.heldout))
            table, held = table.select(range(end)), table.select(range(end, len(table)))
        if not len(table) or not len(held):
            raise ValueError(f"{self.path} has too few rows to hold out a share {self.heldout}")
        return tuple(t.select_columns([self.column]).with_format("numpy") for t in (table, held))

    def _parquet(self) -> list[Path]:
        path = Path(self.path)
        if not self.path or path.suffix == ".parquet":
            return [path] if self.path else []
        return visible_files(path, "*.parquet")

    def _digest(self) -> str:
        """Of the files with rows, and of what is made of them."""
        whole = hashlib.sha256(repr(dataclasses.replace(self, path="")).encode())
        path = Path(self.path)
        files = self._parquet() or visible_files(path, "*.arrow")
        for file in files:
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A table as random access."""

    table: Any
    column: str
    length: int
    vocab_size: int
    bytes_per_token: float

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int, /) -> Item:
        """Raises ValueError where the row does not hold token ids."""
        ids = np.asarray(self.table[int(index)][self.column])
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"a row of {self.column!r} has no token ids (dtype {ids.dtype}); tokenize texts "
                "with experiments.prepare"
            )
        ids = ids[: self.length + 1]
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(
                f"a row of {self.column!r} has the token {wrong}, data.vocab_size is "
                f"{self.vocab_size}"
            )
        tokens = np.zeros(self.length + 1, np.int32)
        tokens[: len(ids)] = ids
        valid = np.arange(1, self.length + 1) < len(ids)
        return {
            "tokens": tokens,
            "valid": valid,
            "bytes": np.full(self.length, self.bytes_per_token, np.float32),
        }
