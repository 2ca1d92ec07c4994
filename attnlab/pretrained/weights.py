"""The tensors of a file as weights of a model, and back: `fill` and `unfill`."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from attnlab.pretrained.attributes import shown
from attnlab.pretrained.tensors import CHUNK, Arrays, Tensor, is_floating
from attnlab.sharing import Params

Path = tuple[str, ...]
Shapes = dict[Path, tuple[int, ...]]
"""Path of a weight -> its shape."""
Index = int | slice | tuple[int, int] | EllipsisType


class Entry(NamedTuple):
    """One tensor of a file, and which weights it holds."""

    name: str
    paths: tuple[Path, ...]
    """Weights, each a path in the tree; several lie side by side in the tensor."""
    at: Index = ...
    """Index of the weight in stacked weights: a group of [G, ...], a group and an expert of
    [G, E, ...], or rows of a table [rows, ...]."""
    kind: str = "table"
    """"linear" is stored (out, in), "conv1d" (in, out), "conv2d" (out, channels, height, width),
    "vector" flat, "table" as it is, "swapped" with the last two axes exchanged."""
    num_in: int = 1
    """How many axes of a weight, from its first, a "linear" or "conv1d" sums over."""
    by_head: bool = False
    """Several weights lie side by side head by head: all of head 0, then all of head 1; with fewer
    key heads, the queries of a key head stand before it."""
    pairs: tuple[str, ...] = ()
    """Weights in which the file rotates neighbours (2i, 2i+1), and the model (i, i+P/2)."""
    rotated: int = 0
    """P, how many numbers of a head these are, from its start; 0: all."""
    stored: tuple[int, ...] = ()
    """The shape in the file, where it does not follow: axes of 1, or those of a window."""
    in_turn: bool = False
    """Several weights lie column by column: the first of each, then the second of each."""


def fill(
    shapes: Params,
    entries: Iterable[Entry],
    tensors: Mapping[str, Tensor | np.ndarray],
    *,
    dtype: DTypeLike = np.float32,
    put: Callable[[Path, np.ndarray], object] = lambda path, a: a,
    allow_nonfinite: bool = False,
) -> Params:
    """The tree of `shapes` from the tensors, in `dtype`. Every weight is filled, once.

    Weights are made one by one, the largest first, and passed to `put`, whose result stands in the
    tree. Beside those results, no more than one weight and a chunk of a tensor is in memory.

    Raises ValueError that names the tensor which is missing, does not fit or is not of floating
    numbers, before any is read; and the first that has a number which `dtype` cannot hold, or NaN
    or infinity without `allow_nonfinite`.
    """
    entries = list(entries)
    leaves: Shapes = {path: leaf.shape for path, leaf in leaves_by_path(shapes).items()}
    parts = _parts(entries, tensors, leaves)
    made = {}
    for path in sorted(leaves, key=lambda path: -math.prod(leaves[path])):
        weight = _empty(leaves[path], dtype)
        for entry, tensor in parts[path]:
            where = f"the tensor {shown(entry.name)}{_file(tensor)}"
            for source, target in _pieces(entry, path, leaves, tensor, weight[entry.at]):
                _convert(source, target, where, allow_nonfinite)
        made[path] = put(path, weight)
        del weight
    filled: Params = jax.tree.unflatten(jax.tree.structure(shapes), [made[p] for p in leaves])
    return filled


def leaves_by_path(params: Params) -> dict[Path, Any]:
    """Path of a weight -> the weight, or what a tree has in its place."""
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    return {tuple(getattr(key, "key", key) for key in keys): leaf for keys, leaf in found}


def _parts(
    entries: list[Entry], tensors: Mapping[str, Tensor | np.ndarray], leaves: Shapes
) -> dict[Path, list[tuple[Entry, Tensor | np.ndarray]]]:
    """Path of a weight -> the tensors that it is made of. Raises the errors of `fill`."""
    missing = [entry.name for entry in entries if entry.name not in tensors]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors are missing, the first is {missing[0]!r}; the model of the "
            "config needs it"
        )
    parts: dict[Path, list[tuple[Entry, Tensor | np.ndarray]]] = {path: [] for path in leaves}
    for entry in entries:
        tensor = tensors[entry.name]
        stored = _stored_shape(entry, leaves)
        if tensor.shape != stored:
            where = ", ".join(".".join(path) for path in entry.paths)
            raise ValueError(
                f"the tensor {shown(entry.name)} has shape {tensor.shape}, the config asks for "
                f"{stored} (it becomes {where}){_file(tensor)}"
            )
        if not is_floating(tensor.dtype):
            raise ValueError(
                f"the tensor {shown(entry.name)} has the dtype {np.dtype(tensor.dtype)}, weights "
                f"have a floating one{_file(tensor)}"
            )
        for path in entry.paths:
            parts[path].append((entry, tensor))
    for path, found in parts.items():
        if not _is_covered([entry.at for entry, _ in found], leaves[path]):
            raise ValueError(f"no tensor of the file becomes all of {'.'.join(path)}")
    return parts


def _is_covered(indices: list[Index], shape: tuple[int, ...]) -> bool:
    """Is each number of a weight filled, and once?"""
    axes = 2 if any(isinstance(index, tuple) for index in indices) else 1
    filled = np.zeros(shape[:axes], int)
    for index in indices:
        filled[index] += 1
    return bool(np.all(filled == 1))


def unfill(params: Params, entries: Iterable[Entry]) -> Arrays:
    """The inverse of `fill`: name -> tensor."""
    leaves = {path: np.asarray(leaf) for path, leaf in leaves_by_path(params).items()}
    shapes: Shapes = {path: a.shape for path, a in leaves.items()}
    tensors = {}
    for entry in entries:
        dtype = functools.reduce(jnp.promote_types, [leaves[path].dtype for path in entry.paths])
        tensor = np.empty(_stored_shape(entry, shapes), dtype)
        for path, columns in _columns(entry, shapes).items():
            folded = leaves[path][entry.at].reshape(_fold(entry, path, shapes))
            if isinstance(columns, slice):
                tensor[...] = _as_stored(entry, folded)
            else:
                _as_ours(entry, tensor)[..., columns] = folded
        tensors[entry.name] = tensor
    return tensors


def _pieces(
    entry: Entry, path: Path, shapes: Shapes, tensor: Tensor | np.ndarray, weight: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What `tensor` holds of a weight, and the view of the weight that it belongs to."""
    folded = weight.reshape(_fold(entry, path, shapes))
    columns = _columns(entry, shapes)[path]
    if not isinstance(columns, slice):
        yield _as_ours(entry, tensor[...])[..., columns], folded
        return
    target = _as_stored(entry, folded)
    step = max(1, CHUNK // max(1, math.prod(tensor.shape[1:])))
    for first in range(0, tensor.shape[0], step):
        yield tensor[first : first + step], target[first : first + step]


def _convert(source: np.ndarray, target: np.ndarray, where: str, allow_nonfinite: bool) -> None:
    """Write numbers in the dtype of `target`.

    Raises ValueError for those that it cannot hold, and for NaN and infinity unless allowed.
    """
    with np.errstate(over="ignore"):
        target[...] = source
    finite = np.isfinite(target)
    beyond = np.isfinite(source) & ~finite
    if beyond.any():
        value = float(source[beyond][0])
        raise ValueError(f"{where} has {value!r}, which is beyond the range of {target.dtype}")
    if not finite.all() and not allow_nonfinite:
        value = float(source[~finite][0])
        raise ValueError(f"{where} has {value!r}; if it is meant to, pass allow_nonfinite=True")


def _file(tensor: Tensor | np.ndarray) -> str:
    """Where a tensor lies, for an error."""
    return f", in {tensor.path}" if isinstance(tensor, Tensor) else ""


def _as_ours(entry: Entry, tensor: np.ndarray) -> np.ndarray:
    """A view of a stored tensor with inputs first."""
    return tensor.swapaxes(-1, -2) if entry.kind in ("linear", "swapped") else tensor


def _as_stored(entry: Entry, folded: np.ndarray) -> np.ndarray:
    """A view of a whole weight, inputs first, with the axes of the file."""
    if entry.kind == "conv2d":
        out, channels, *window = entry.stored
        return folded.reshape(*window, channels, out).transpose(3, 2, 0, 1)
    # Exchanging two axes is its own inverse.
    return _as_ours(entry, folded.reshape(entry.stored or folded.shape))


def _columns(entry: Entry, shapes: Shapes) -> dict[Path, slice | np.ndarray]:
    """path -> which outputs of the stored tensor, inputs first, are those of the weight."""
    if len(entry.paths) == 1 and not entry.pairs:
        return {entry.paths[0]: slice(None)}
    widths = {path: _fold(entry, path, shapes)[-1] for path in entry.paths}
    # Without by_head all of a weight lies together, as if there were one head.
    counts = (_indexed_shape(entry, path, shapes)[-2] for path in entry.paths)
    heads = min(counts) if entry.by_head else 1
    heads = widths[entry.paths[0]] if entry.in_turn else heads
    order = np.arange(sum(widths.values())).reshape(heads, -1)
    found: dict[Path, slice | np.ndarray] = {}
    start = 0
    for path, width in widths.items():
        end = start + width // heads
        mine = order[:, start:end]
        if path[-1] in entry.pairs:
            each = _indexed_shape(entry, path, shapes)[-1]
            size = entry.rotated or each
            mine = mine.reshape(-1, each)
            pairs_apart = mine[:, :size].reshape(-1, size // 2, 2).swapaxes(-1, -2)
            mine = np.concatenate([pairs_apart.reshape(-1, size), mine[:, size:]], axis=1)
        found[path] = mine.reshape(-1)
        start = end
    return found


def _stored_shape(entry: Entry, shapes: Shapes) -> tuple[int, ...]:
    """The shape in the file."""
    if entry.stored:
        return entry.stored
    folded = [_fold(entry, path, shapes) for path in entry.paths]
    ours = (*folded[0][:-1], sum(shape[-1] for shape in folded))
    return (*ours[:-2], *ours[:-3:-1]) if entry.kind in ("linear", "swapped") else ours


def _indexed_shape(entry: Entry, path: Path, shapes: Shapes) -> tuple[int, ...]:
    return np.broadcast_to(0, shapes[path])[entry.at].shape


def _fold(entry: Entry, path: Path, shapes: Shapes) -> tuple[int, ...]:
    """Heads and their width side by side, as files have them: [in, out], or flat."""
    shape = _indexed_shape(entry, path, shapes)
    if entry.kind == "vector":
        return (math.prod(shape),)
    if len(shape) < 3 or entry.kind in ("table", "swapped"):
        return shape
    return math.prod(shape[: entry.num_in]), math.prod(shape[entry.num_in :])


def _empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Aligned to 64 bytes, so that JAX on a CPU need not copy it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    empty: np.ndarray = buffer[start : start + size].view(dtype).reshape(shape)
    return empty
