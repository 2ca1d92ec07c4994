"""Dataset `huggingface`: rows of token ids in a folder of the package datasets, or in Parquet."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attnlab.data.dataset import BatchShapes, Dataset, DataSizes
from attnlab.data.files import check_path, visible_files
from attnlab.data.random_access import Item, Splits, dataset_of_splits
from attnlab.extras import extra
from attnlab.fields import Spec, bounded

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
