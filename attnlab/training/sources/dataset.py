"""The row `grain`: any dataset that can be read at random, through `grain`."""

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from attnlab.extras import extra
from attnlab.training.sources.rows import spaced
from attnlab.training.sources.source import Batch, Sizes, Source


@runtime_checkable
class RandomAccess(Protocol):
    """Whatever has a length and items by number; an item is a dict of arrays, of the same shapes
    every time. Datasets and sources of `grain` are such, lists too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Parts(NamedTuple):
    """What a function that is named by a config makes: the parts of a dataset, and how to tell it.

    A task's `needs` says what an item must hold.
    """

    name: str
    train: RandomAccess
    heldout: RandomAccess
    sizes: Sizes
    validation: RandomAccess | None = None
    write: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens))
    yardsticks: Callable[[], dict[str, dict[str, float]]] = lambda: {}
    digest: str = ""
    """"": sha256 of all items, which are read for it once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset of random access: `make`, "package.module:function", is called with `path` and
    gives its `Parts`. Needs the package grain.

    grain shuffles: the batch of step n holds the items n B to (n + 1) B - 1 of
    `grain.MapDataset.source(train).shuffle(seed).repeat()`, which is another order every epoch.
    """

    make: str = ""
    path: str = ""

    @property
    def parts(self) -> Parts:
        """What `make` gives; raises ValueError where there is no such function."""
        module, _, name = self.make.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"data.make {self.make!r} must be package.module:function ({error})"
            ) from error
        return _made(function, self.path)

    def sizes(self) -> Sizes:
        """Those of the parts."""
        return self.parts.sizes

    def shapes(self, length: int) -> Batch:
        """Those of the first item."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((1, *a.shape), jax.dtypes.canonicalize_dtype(a.dtype)),
            jax.tree.map(np.asarray, self.parts.train[0]),
        )

    def load(self, length: int, folder: Path | None = None) -> Source:
        """The items as rows; their shapes are their own, `length` is what the speed is shown by."""
        return source_of_parts(self.parts, length)


@functools.lru_cache(maxsize=4)
def _made(function: Callable, path: str) -> Parts:
    return function(path)


def source_of_parts(parts: Parts, row_tokens: int) -> Source:
    """The source of datasets that are at hand."""
    with extra("grain"):
        import grain

    @functools.lru_cache(maxsize=64)
    def stream(seed: int) -> Any:
        return grain.MapDataset.source(parts.train).shuffle(seed=seed).repeat(None)

    def batch(seed: int, step: int, size: int, part: slice) -> Batch:
        rows = stream(seed)
        return _stacked([rows[step * size + i] for i in range(size)[part]])

    def scored(items: RandomAccess, count: int) -> Batch:
        rows = [items[int(i)] for i in spaced(len(items), count)]
        return _stacked(rows) | {"valid": np.ones(len(rows), bool)}

    validation = parts.validation and functools.partial(scored, parts.validation)
    return Source(
        name=parts.name,
        digest=parts.digest or _digest(parts),
        sizes=parts.sizes,
        row_tokens=row_tokens,
        batch=batch,
        heldout=functools.partial(scored, parts.heldout),
        train=functools.partial(scored, parts.train),
        validation=validation or None,
        write=parts.write,
        yardsticks=parts.yardsticks,
        facts={"training rows": len(parts.train), "held-out rows": len(parts.heldout)},
    )


def _stacked(items: Sequence[Any]) -> Any:
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *items)
    except ValueError as error:
        raise ValueError(f"items of one dataset must have the same arrays: {error}") from error


def _digest(parts: Parts) -> str:
    whole = hashlib.sha256()
    for items in (parts.train, parts.validation or (), parts.heldout):
        whole.update(b"%d;" % len(items))
        for i in range(len(items)):
            for path, leaf in jax.tree_util.tree_flatten_with_path(items[i])[0]:
                array = np.asarray(leaf)
                whole.update(f"{path} {array.dtype} {array.shape};".encode())
                whole.update(array.tobytes())
    return whole.hexdigest()
