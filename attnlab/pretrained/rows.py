"""A name table: which tensor of a file is which weight of ours, and how one becomes the other."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import parse
from attnlab.pretrained.settings import shown
from attnlab.pretrained.tensors import CHUNK, Stored, Tensor, is_floating

Path = tuple[str, ...]


class Row(NamedTuple):
    """One tensor of a file."""

    name: str
    paths: tuple[Path, ...]
    """Weights of ours, each a path in the tree; several lie side by side in the tensor."""
    slot: int | slice | None = None
    """Of stacked weights [G, ...] which one; of a table [rows, ...] which rows."""
    kind: str = "same"
    """"linear" is stored (out, in), "conv1d" (in, out), "conv2d" (out, channels, height, width),
    "vector" flat, "same" as it is, "swapped" with the last two axes exchanged."""
    by_head: bool = False
    """Do several weights lie side by side head by head: all of head 0, then all of head 1?"""
    pairs: tuple[str, ...] = ()
    """Of these weights rotary positions turn neighbours (2i, 2i+1) in the file, (i, i+P/2) here."""
    stored: tuple[int, ...] = ()
    """The shape in the file, where it does not follow from ours: axes of 1, or those of a window"""


def same(name: str, *path: str, slot: int | None = None) -> list[Row]:
    """Embedding tables, lone vectors."""
    return [Row(name, (path,), slot)]


def dense(
    name: str,
    *path: str,
    slot: int | None = None,
    kind: str = "linear",
    bias: bool = True,
    pack: tuple[str, ...] = (),
    by_head: bool = False,
    pairs: tuple[str, ...] = (),
) -> list[Row]:
    """`name`.weight and `name`.bias; `pack` names the last step where several lie side by side."""
    paths = tuple((*path, last) for last in pack) or (path,)
    rows = [Row(f"{name}.weight", paths, slot, kind, by_head, pairs)]
    biases = tuple((*p[:-1], f"{p[-1]}_bias") for p in paths)
    return rows + ([Row(f"{name}.bias", biases, slot, "vector", by_head)] if bias else [])


def norm(name: str, *path: str, slot: int | None = None, bias: bool = True) -> list[Row]:
    """`name`.weight and `name`.bias of a norm."""
    rows = [Row(f"{name}.weight", ((*path, "scale"),), slot)]
    return rows + ([Row(f"{name}.bias", ((*path, "bias"),), slot)] if bias else [])


def fill(
    shapes: Any,
    rows: Iterable[Row],
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: Any = np.float32,
    put: Callable[[Path, np.ndarray], Any] = lambda path, a: a,
    allow_nonfinite: bool = False,
) -> Any:
    """The tree of `shapes` from the tensors, in `dtype`. Every weight is filled, once.

    Weights are made one by one, the largest first, and handed to `put`, which says what stands in
    the tree. No more than a weight and a part of a tensor is held beside what `put` has given.

    Raises ValueError that names the tensor which is missing, does not fit or is not of floating
    numbers, before any is read; and the first that has a number which `dtype` cannot hold, or NaN
    or infinity without `allow_nonfinite`.
    """
    rows = list(rows)
    leaves = {
        tuple(key.key for key in keys): leaf.shape
        for keys, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]
    }
    makers = _makers(rows, tensors, leaves)
    made = {}
    for path in sorted(leaves, key=lambda path: -math.prod(leaves[path])):
        weight = _empty(leaves[path], dtype)
        for row, tensor in makers[path]:
            target = weight if row.slot is None else weight[row.slot]
            _copy(row, path, leaves, tensor, target, allow_nonfinite)
        made[path] = put(path, weight)
        del weight
    return jax.tree.unflatten(jax.tree.structure(shapes), [made[path] for path in leaves])


def _makers(
    rows: list[Row], tensors: Mapping[str, np.ndarray], leaves: dict[Path, Any]
) -> dict[Path, list[tuple[Row, Any]]]:
    """Path of a weight -> the tensors that it is made of. Raises the errors of `fill`."""
    missing = [row.name for row in rows if row.name not in tensors]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors are missing, the first is {missing[0]!r}; the model of "
            "config.json needs it"
        )
    makers: dict[Path, list[tuple[Row, Any]]] = {path: [] for path in leaves}
    for row in rows:
        tensor = tensors.at(row.name) if isinstance(tensors, Stored) else tensors[row.name]
        stored = _stored_shape(row, leaves)
        if tensor.shape != stored:
            where = ", ".join(".".join(path) for path in row.paths)
            raise ValueError(
                f"the tensor {shown(row.name)} has shape {tensor.shape}, config.json asks for "
                f"{stored} (it becomes {where}){_file(tensor)}"
            )
        if not is_floating(tensor.dtype):
            raise ValueError(
                f"the tensor {shown(row.name)} has the dtype {np.dtype(tensor.dtype)}, weights "
                f"have a floating one{_file(tensor)}"
            )
        for path in row.paths:
            makers[path].append((row, tensor))
    for path, found in makers.items():
        slots = [row.slot for row, _ in found]
        if slots != [None] and _places(slots, leaves[path][0]) != list(range(leaves[path][0])):
            raise ValueError(f"no tensor of the file becomes all of {'.'.join(path)}")
    return makers


def unfill(params: Any, rows: Iterable[Row]) -> dict[str, np.ndarray]:
    """The inverse of `fill`: name -> tensor."""
    leaves = {
        tuple(key.key for key in keys): np.asarray(leaf)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    shapes = {path: a.shape for path, a in leaves.items()}
    tensors = {}
    for row in rows:
        dtype = functools.reduce(jnp.promote_types, [leaves[path].dtype for path in row.paths])
        tensor = np.empty(_stored_shape(row, shapes), dtype)
        for path, columns in _columns(row, shapes).items():
            a = leaves[path] if row.slot is None else leaves[path][row.slot]
            folded = a.reshape(_fold(row, path, shapes))
            if isinstance(columns, slice):
                tensor[...] = _as_stored(row, folded)
            else:
                _as_ours(row, tensor)[..., columns] = folded
        tensors[row.name] = tensor
    return tensors


def _copy(
    row: Row,
    path: Path,
    shapes: dict[Path, Any],
    tensor: Any,
    weight: np.ndarray,
    allow_nonfinite: bool,
) -> None:
    """Writes what `tensor` has of one slot of a weight into it."""
    folded = weight.reshape(_fold(row, path, shapes))
    columns = _columns(row, shapes)[path]
    convert = functools.partial(
        _convert, name=row.name, file=_file(tensor), allow_nonfinite=allow_nonfinite
    )
    if not isinstance(columns, slice):
        convert(_as_ours(row, tensor[...])[..., columns], folded)
        return
    target = _as_stored(row, folded)
    step = max(1, CHUNK // max(1, math.prod(tensor.shape[1:])))
    for first in range(0, tensor.shape[0], step):
        convert(tensor[first : first + step], target[first : first + step])


def _convert(
    source: np.ndarray, target: np.ndarray, name: str, file: str, allow_nonfinite: bool
) -> None:
    """Write numbers in the dtype of `target`.

    Raises ValueError for those that it cannot hold, and for NaN and infinity unless allowed.
    """
    with np.errstate(over="ignore"):
        target[...] = source
    finite = np.isfinite(target)
    if finite.all():
        return
    beyond = np.isfinite(source) & ~finite
    if beyond.any():
        value = float(source[beyond][0])
        raise ValueError(
            f"the tensor {shown(name)} has {value!r}, which is beyond the range of "
            f"{target.dtype}{file}"
        )
    if not allow_nonfinite:
        value = float(source[~finite][0])
        raise ValueError(
            f"the tensor {shown(name)} has the value {value!r}{file}; if it is meant to, pass "
            "allow_nonfinite=True"
        )


def _file(tensor: Any) -> str:
    """Where a tensor lies, for an error."""
    return f", in {tensor.path}" if isinstance(tensor, Tensor) else ""


def _as_ours(row: Row, tensor: np.ndarray) -> np.ndarray:
    """A view of a stored tensor with inputs first."""
    return tensor.swapaxes(-1, -2) if row.kind in ("linear", "swapped") else tensor


def _as_stored(row: Row, folded: np.ndarray) -> np.ndarray:
    """A view of a whole weight, inputs first, with the axes of the file."""
    if row.kind == "conv2d":
        out, channels, *window = row.stored
        return folded.reshape(*window, channels, out).transpose(3, 2, 0, 1)
    # Exchanging two axes is its own inverse.
    return _as_ours(row, folded.reshape(row.stored or folded.shape))


def _columns(row: Row, shapes: dict[Path, Any]) -> dict[Path, Any]:
    """path -> which outputs of the stored tensor, inputs first, are those of the weight."""
    if len(row.paths) == 1 and not row.pairs:
        return {row.paths[0]: slice(None)}
    widths = {path: _fold(row, path, shapes)[-1] for path in row.paths}
    # Without by_head all of a weight lies together, as if there were one head.
    heads = _slot_shape(row, row.paths[0], shapes)[-2] if row.by_head else 1
    order = np.arange(sum(widths.values())).reshape(heads, -1)
    found, start = {}, 0
    for path, width in widths.items():
        end = start + width // heads
        mine = order[:, start:end]
        if path[-1] in row.pairs:
            each = _slot_shape(row, path, shapes)[-1]
            mine = mine.reshape(-1, each // 2, 2).swapaxes(-1, -2)
        found[path], start = mine.reshape(-1), end
    return found


def _stored_shape(row: Row, shapes: dict[Path, Any]) -> tuple[int, ...]:
    """The shape in the file."""
    if row.stored:
        return row.stored
    folded = [_fold(row, path, shapes) for path in row.paths]
    ours = (*folded[0][:-1], sum(shape[-1] for shape in folded))
    return (*ours[:-2], *ours[:-3:-1]) if row.kind in ("linear", "swapped") else ours


def _slot_shape(row: Row, path: Path, shapes: dict[Path, Any]) -> tuple[int, ...]:
    if isinstance(row.slot, slice):
        return len(_places([row.slot], shapes[path][0])), *shapes[path][1:]
    shape: tuple[int, ...] = shapes[path]
    return shape if row.slot is None else shape[1:]


def _places(slots: Iterable[Any], count: int) -> list[int]:
    """Which of `count` these are, ascending."""
    each = (s if isinstance(s, slice) else slice(s, None if s is None else s + 1) for s in slots)
    return sorted(place for one in each for place in range(*one.indices(count)))


def _fold(row: Row, path: Path, shapes: dict[Path, Any]) -> tuple[int, ...]:
    """Heads and their width side by side, as files have them: [in, out], or flat."""
    name, shape = path[-1], _slot_shape(row, path, shapes)
    if row.kind == "vector":
        return (math.prod(shape),)
    if len(shape) < 3 or row.kind in ("same", "swapped"):
        return shape
    maps = LAYOUTS["standard"].maps
    reads = len(parse(name, maps[name]).reads) if name in maps else 1
    return math.prod(shape[:reads]), math.prod(shape[reads:])


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Where JAX on a CPU need not copy what it is given: 64 bytes is what it aligns to."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    empty: np.ndarray = room[start : start + size].view(dtype).reshape(shape)
    return empty
