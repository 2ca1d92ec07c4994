"""A name table: which tensor of a file is which weight of ours, and how one becomes the other."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab.heads.layouts import LAYOUTS
from attnlab.heads.maps import parse


class Row(NamedTuple):
    """One tensor of a file."""

    name: str
    paths: tuple[tuple[str, ...], ...]
    """Weights of ours, each a path in the tree; several lie side by side in the tensor."""
    slot: int | None = None
    """Of stacked weights [G, ...] which one."""
    kind: str = "same"
    """"linear" is stored (out, in), "conv1d" (in, out), "vector" flat, "same" as it is, "swapped"
    with the last two axes exchanged."""


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
) -> list[Row]:
    """`name`.weight and `name`.bias; `pack` names the last step where several lie side by side."""
    paths = tuple((*path, last) for last in pack) or (path,)
    rows = [Row(f"{name}.weight", paths, slot, kind)]
    biases = tuple((*p[:-1], f"{p[-1]}_bias") for p in paths)
    return rows + ([Row(f"{name}.bias", biases, slot, "vector")] if bias else [])


def norm(name: str, *path: str, slot: int | None = None, bias: bool = True) -> list[Row]:
    """`name`.weight and `name`.bias of a norm."""
    rows = [Row(f"{name}.weight", ((*path, "scale"),), slot)]
    return rows + ([Row(f"{name}.bias", ((*path, "bias"),), slot)] if bias else [])


def fill(shapes: Any, rows: Iterable[Row], tensors: Mapping[str, np.ndarray]) -> Any:
    """The tree of `shapes` from the tensors, in float32. Every weight is filled, once.

    Raises ValueError that names the tensor which is missing or does not fit.
    """
    rows = list(rows)
    missing = [row.name for row in rows if row.name not in tensors]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors are missing, the first is {missing[0]!r}; the model of "
            "config.json needs it"
        )
    tree = jax.tree.map(lambda a: np.full(a.shape, np.nan, np.float32), shapes)
    filled: set[Any] = set()
    for row in rows:
        leaves = [_leaf(tree, path) for path in row.paths]
        slices = [a if row.slot is None else a[row.slot] for a in leaves]
        folded = [_fold(row, path[-1], a.shape) for path, a in zip(row.paths, slices, strict=True)]
        stored = (*folded[0][:-1], sum(shape[-1] for shape in folded))
        swapped = row.kind in ("linear", "swapped")
        stored = (*stored[:-2], *stored[:-3:-1]) if swapped else stored
        tensor = tensors[row.name]
        if tensor.shape != stored:
            where = ", ".join(".".join(path) for path in row.paths)
            raise ValueError(
                f"the tensor {row.name!r} has shape {tensor.shape}, config.json asks for {stored} "
                f"(it becomes {where})"
            )
        tensor = tensor.swapaxes(-1, -2) if swapped else tensor
        ends = np.cumsum([shape[-1] for shape in folded])[:-1]
        pieces = np.split(tensor, ends, axis=-1) if len(folded) > 1 else [tensor]
        for path, a, piece in zip(row.paths, slices, pieces, strict=True):
            a[...] = piece.reshape(a.shape)
            filled.add((path, row.slot))
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        steps = tuple(key.key for key in keys)
        slots = {slot for known, slot in filled if known == steps}
        if slots != {None} and slots != set(range(leaf.shape[0])):
            raise ValueError(f"no tensor of the file becomes all of {'.'.join(steps)}")
    return tree


def unfill(params: Any, rows: Iterable[Row]) -> dict[str, np.ndarray]:
    """The inverse of `fill`: name -> tensor."""
    tensors = {}
    for row in rows:
        pieces = []
        for path in row.paths:
            a = np.asarray(_leaf(params, path))
            a = a if row.slot is None else a[row.slot]
            pieces.append(a.reshape(_fold(row, path[-1], a.shape)))
        tensor = np.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]
        swapped = row.kind in ("linear", "swapped")
        tensors[row.name] = tensor.swapaxes(-1, -2) if swapped else tensor
    return tensors


def _fold(row: Row, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Heads and their width side by side, as files have them: [in, out], or flat."""
    if row.kind == "vector":
        return (math.prod(shape),)
    if len(shape) < 3 or row.kind in ("same", "swapped"):
        return shape
    maps = LAYOUTS["standard"].maps
    reads = len(parse(name, maps[name]).reads) if name in maps else 1
    return math.prod(shape[:reads]), math.prod(shape[reads:])


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree
