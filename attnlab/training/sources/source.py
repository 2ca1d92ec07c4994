"""`Source`: what there is to learn from, as trees of arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

Batch = dict[str, Any]
"""Name -> array; the first axis of each is the rows."""


class Sizes(NamedTuple):
    """What a model must have room for."""

    vocab_size: int
    """Tokens 0 to vocab_size - 1; a task's own tokens come behind them."""
    num_classes: int = 0


BYTES = Sizes(256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What there is to learn from: batches, what is held out, and how to tell it.

    Batches are functions of (seed, step): no state is saved. They come from `batch` on the host or
    from `draw` on the device, inside the step; exactly one of the two is given. Rows that are held
    out have an array `valid` besides, [W] or [W, ...]: False where a row, or a place in it, is
    filling and must not count (an evaluation fills its last batch with rows of zeros).
    """

    name: str
    digest: str
    """Of all that a batch depends on, but for seed and step."""
    sizes: Sizes
    row_tokens: int
    """Tokens in a row, for the speed that is shown."""
    heldout: Callable[[int], Batch]
    """(count) -> so many rows, evenly spaced; 0: all there is, each target counted once."""
    train: Callable[[int], Batch]
    """The same of the training part, to be scored as `heldout` is."""
    validation: Callable[[int], Batch] | None = None
    """The same of rows that curves are drawn on, and that settings may be chosen by, where there
    are such: `heldout` is then looked at once, at the end."""
    batch: Callable[[int, int, int, slice], Batch] | None = None
    """(seed, step, size, part) -> the rows `part` of the batch of `size` rows, in NumPy. The whole
    batch depends on (seed, step, size) alone, so it is the same for any number of processes."""
    draw: Callable[[Any, jax.Array, int], Batch] | None = None
    """(resident, key, size) -> the batch, traced; the key is of (seed, step)."""
    resident: Any = ()
    """A tree of arrays that lie on every device from the start, for `draw`."""
    write: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens))
    """Tokens of the source -> how a person reads them."""
    yardsticks: Callable[[], dict[str, dict[str, float]]] = lambda: {}
    """() -> metric -> name -> value on the held-out part: what costs no model."""
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """Name -> content of what was made for this source (a tokenizer) and belongs to a run: it is
    kept in the run's folder, where `Data.load` finds it again."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else tells this data from other: numbers and texts, for the report."""

    def __post_init__(self):
        if (self.batch is None) == (self.draw is None):
            raise ValueError(f"{self.name}: give either batch or draw")

    def shapes(self) -> Batch:
        """Shapes and dtypes of a batch of one row."""
        if self.draw is not None:
            return jax.eval_shape(
                lambda resident, key: self.draw(resident, key, 1),  # type: ignore[misc]
                self.resident,
                jax.random.key(0),
            )
        assert self.batch is not None
        placed = lambda a: jax.dtypes.canonicalize_dtype(a.dtype)  # as it will be on a device
        one = self.batch(0, 1, 1, slice(None))
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, placed(a)), one)


class Data(Protocol):
    """A row of `SOURCES`: a frozen dataclass, every field of which is a flag (`config.data`).

    It checks itself when it is made, as far as that is quick.
    """

    def sizes(self) -> Sizes:
        """What a model must have room for; quick, since every arm of a sweep asks first."""

    def shapes(self, length: int) -> Batch:
        """Shapes and dtypes of a batch of one row of `length` tokens; as quick."""

    def load(self, length: int, folder: Path | None = None) -> Source:
        """The source, in rows of `length` tokens; what was made for it is kept in `folder`.

        Raises ValueError or FileNotFoundError, naming file and line, for data that cannot be used.
        """
