"""Datasets of items by index: own ones (`rows`), and token ids of the package datasets."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from attnlab import names
from attnlab.data import batching, dataset
from attnlab.data.dataset import Baselines, Batch, BatchShapes, Dataset, DataSizes
from attnlab.data.files import check_path, digest, last_name, visible_files
from attnlab.extras import extra
from attnlab.fields import Spec, bounded, check_choice

Item = dict[str, np.ndarray]
"""Name -> array, of the same shapes in all items."""


@runtime_checkable
class RandomAccess(Protocol):
    """Whatever has a length and items by index: a list, a table, a data source of grain."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


class Splits(NamedTuple):
    """What a function that a config names returns: the splits of a dataset, and its description.

    An objective's `required_arrays` say what an item must hold. With the digest "" it is sha256 of
    all items, which are read once for it.
    """

    name: str
    train: RandomAccess
    heldout: RandomAccess
    sizes: DataSizes
    validation: RandomAccess | None = None
    decode: Callable[[Sequence[int]], str] = dataset.join_tokens
    baselines: Callable[[], Baselines] = dict
    digest: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Spec, prefix="data."):
    """Own rows: anything with a length whose items by index are dicts of arrays.

    The rows are shuffled anew in every epoch (`batching.epoch_indices`).

    Attributes:
      make: "package.module:function" or "file.py:function"; the function is called with `path` and
        returns `Splits`.
      path: for the function.

        def read(path: str) -> Splits:  # in my_data.py
            items = [{"tokens": row} for row in np.load(path)]
            return Splits("mine", items[:-100], items[-100:], DataSizes(vocab_size=256))

        Rows(make="my_data:read", path="rows.npy")
    """

    make: str = ""
    path: str = ""

    @property
    def splits(self) -> Splits:
        """What `make` returns; raises ValueError where there is no such function or a part has no
        rows."""
        return _splits(names.load(self.make), self.path)

    def sizes(self) -> DataSizes:
        """Those of the splits."""
        return self.splits.sizes

    def shapes(self, length: int) -> BatchShapes:
        """Those of the first item."""
        return dataset.shapes_of(_stack([self.splits.train[0]]))

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The items as rows; their shapes are their own, `length` is for the reported speed.
        `folder` is not used.

        Raises:
          ValueError: there is no such function, or a part has no rows. Making a batch raises it
            where items differ in their arrays or in shapes.
        """
        return dataset_of_splits(self.splits, length)


@functools.lru_cache(maxsize=4)
def _splits(function: Callable[[str], Splits], path: str) -> Splits:
    splits = function(path)
    for part, items in (("training", splits.train), ("held-out", splits.heldout)):
        if not len(items):
            raise ValueError(f"{splits.name}: the {part} part has no rows; give it at least one")
    return splits


def dataset_of_splits(
    splits: Splits, row_tokens: int, convert: Callable[[Any], Item] = dict
) -> Dataset:
    """The dataset of splits that are already loaded; `convert` makes the item of a row."""
    parts = {"train": splits.train, "heldout": splits.heldout}
    if splits.validation:
        parts["validation"] = splits.validation
    order = splits.train, splits.validation or (), splits.heldout
    content = splits.digest or digest(_contents(order))

    def rows(items: RandomAccess) -> batching.Rows:
        return len(items), lambda index: _stack([convert(items[i]) for i in index.tolist()])

    return batching.dataset_of_rows(
        {name: rows(items) for name, items in parts.items()},
        name=splits.name,
        digest=digest([content.encode(), b"order of epoch_indices"]),
        sizes=splits.sizes,
        row_tokens=row_tokens,
        decode=splits.decode,
        baselines=splits.baselines,
        facts={"training rows": len(splits.train), "held-out rows": len(splits.heldout)},
    )


def _stack(items: Sequence[Item]) -> Batch:
    arrays = items[0].keys()
    try:
        if any(item.keys() != arrays for item in items):
            raise ValueError(f"one has {', '.join(arrays)}, another has not")
        return {name: np.stack([item[name] for item in items]) for name in arrays}
    except ValueError as error:
        raise ValueError(f"items of one dataset must have the same arrays: {error}") from error


def _contents(splits: Iterable[RandomAccess | tuple[()]]) -> Iterator[bytes]:
    for items in splits:
        yield b"%d" % len(items)
        for i in range(len(items)):
            for name, value in sorted(items[i].items()):
                array = np.asarray(value)
                yield f"{name} {array.dtype} {array.shape}".encode()
                yield array.tobytes()


HELDOUT_SPLITS = ("validation", "valid", "test")
"""Splits that are held out, the first that there is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace(Spec, prefix="data."):
    """Rows of token ids, one example each, shuffled anew in every epoch.

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
        return dataset.shapes_of(_stack([self._item(np.zeros(0, np.int32), length)]))

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The rows; `folder` is not used.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: `path`, `vocab_size` or `bytes_per_token` is not given; there is no split
            "train", no such column, or too few rows to hold some out. Reading a row raises it where
            the row does not hold token ids below `vocab_size`.
          ModuleNotFoundError: the package datasets is missing.
        """
        sizes = self.sizes()
        if not self.path or not self.bytes_per_token:
            raise ValueError(
                "give data.path, and data.bytes_per_token: the mean number of bytes of a token (1: "
                "bits per token)"
            )
        files = visible_files(Path(self.path), "*.parquet")
        train, heldout = self._tables(files)
        tables = visible_files(Path(self.path), "*.arrow")
        # What `filter` and `map` of the package datasets keep beside the rows is none of them.
        rows = [file for file in tables if not file.name.startswith("cache-")]
        content = self._digest(files or rows)
        splits = Splits(last_name(self.path), train, heldout, sizes, digest=content)
        item = lambda row: self._item(np.asarray(row[self.column]), length)
        return dataset_of_splits(splits, length, item)

    def _tables(self, parquet: list[Path]) -> tuple[Any, Any]:
        """Training and held-out rows, of the package datasets."""
        with extra("data"):
            import datasets
        if parquet:
            table: Any = datasets.Dataset.from_parquet([str(file) for file in parquet])
        else:
            table = datasets.load_from_disk(self.path)
        splits = table if isinstance(table, datasets.DatasetDict) else {"train": table}
        table = names.lookup(splits, "train", what=f"split of {self.path}")
        check_choice(f"column of {self.path}", self.column, table.column_names)
        if (held := next((splits[n] for n in HELDOUT_SPLITS if n in splits), None)) is None:
            end = int(len(table) * (1 - self.heldout))
            table, held = table.select(range(end)), table.select(range(end, len(table)))
        if not len(table) or not len(held):
            raise ValueError(f"{self.path} has too few rows to hold out a share {self.heldout}")
        arrays = {"type": "numpy", "columns": [self.column]}
        return table.with_format(**arrays), held.with_format(**arrays)

    def _digest(self, files: list[Path]) -> str:
        """Of the files with rows, and of what is made of them."""
        whole = hashlib.sha256(repr(dataclasses.replace(self, path="")).encode())
        for file in files:
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()

    def _item(self, ids: np.ndarray, length: int) -> Item:
        """The row of these ids; raises ValueError where they are no token ids."""
        if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(
                f"a row of {self.column!r} has no token ids (dtype {ids.dtype}); tokenize texts "
                "with experiments.prepare"
            )
        ids = ids[: length + 1]
        if len(wrong := ids[(ids < 0) | (ids >= self.vocab_size)]):
            raise ValueError(
                f"a row of {self.column!r} has the token {wrong[0]}, data.vocab_size is "
                f"{self.vocab_size}"
            )
        return {
            "tokens": np.pad(ids.astype(np.int32), (0, length + 1 - len(ids))),
            "valid": np.arange(1, length + 1) < len(ids),
            "bytes": np.full(length, self.bytes_per_token, np.float32),
        }
