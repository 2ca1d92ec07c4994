"""Safetensors files as NumPy arrays, by the library of that name.

Nothing in such a file can be executed. Pickles can: none is ever opened.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from attnlab.extras import extra
from attnlab.nested import JSON
from attnlab.pretrained.attributes import shown

DTYPES: dict[str, DTypeLike] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
PICKLE = "a pickle (.bin, .pt) can run code and is never opened: save the model as safetensors"
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Arrays = dict[str, np.ndarray]
"""Name of a tensor -> the tensor."""
CHUNK = 2**20
"""Numbers of a tensor that are read, or checked, at once."""


def is_floating(dtype: DTypeLike) -> bool:
    """Whether a dtype is a real floating one, bfloat16 included."""
    return bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, of which only what is asked for is read; nothing is kept or mapped."""

    path: Path
    dtype: DTypeLike
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""

    def __getitem__(self, rows: slice | EllipsisType) -> np.ndarray:
        """A slice of the first axis, or ... for all."""
        first, end = 0, math.prod(self.shape[:1])
        if isinstance(rows, slice):
            first, end, _ = rows.indices(end)
        row = math.prod(self.shape[1:])
        start = self.start + first * row * np.dtype(self.dtype).itemsize
        shape = (max(end - first, 0), *self.shape[1:]) if self.shape else ()
        found = np.fromfile(self.path, self.dtype, math.prod(shape), offset=start)
        return found.reshape(shape)

    def equals(self, other: "Tensor") -> bool:
        """Whether both have the same numbers; NaN equals NaN. Only a chunk of each is in memory."""
        if self.shape != other.shape:
            return False
        step = max(1, CHUNK // max(1, math.prod(self.shape[1:])))
        return all(
            np.array_equal(
                self[first : first + step].astype(np.float64),
                other[first : first + step].astype(np.float64),
                equal_nan=True,
            )
            for first in range(0, math.prod(self.shape[:1]), step)
        )


Tensors = dict[str, Tensor]
"""Name of a tensor -> where it is."""


def open_folder(folder: Path) -> Tensors:
    """Every tensor of `model.safetensors`, or of the files that its index names.

    Raises ValueError, naming file and tensor, for anything that is missing, damaged or a pickle.
    """
    if os.path.lexists(folder / ONE_FILE):
        return open_file(folder / ONE_FILE)
    if not os.path.lexists(folder / INDEX):
        raise ValueError(f"{folder} holds no {ONE_FILE} and no {INDEX}; {PICKLE}")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(
            f"{folder / INDEX} has weight_map = {shown(places)}; it should map names to files"
        )
    files = {name if isinstance(name, str) else shown(name): name for name in places.values()}
    for name in files.values():
        inside = isinstance(name, str) and Path(name).name == name
        if not inside or not os.path.isfile(folder / name):
            raise ValueError(f"{INDEX} names the file {shown(name)}, which is not in {folder}")
    tensors: Tensors = {}
    for name in files:
        held = open_file(folder / name)
        said = {tensor for tensor, file in places.items() if file == name}
        if said != set(held):
            differs = shown(min(said ^ set(held)))
            raise ValueError(f"{INDEX} and {name} disagree about the tensor {differs}")
        tensors |= held
    return tensors


def read_file(path: Path) -> Arrays:
    """Every tensor of one file, read. Raises as `open_file`."""
    return {name: tensor[...] for name, tensor in open_file(path).items()}


def open_file(path: Path) -> Tensors:
    """Every tensor of one file. Raises ValueError for what is damaged, a pickle or empty."""
    with extra("pretrained"):
        from safetensors import SafetensorError, safe_open
    try:
        mapped = safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is no whole safetensors file ({error}); copy it again, or where it is a "
            f"pickle: {PICKLE}"
        ) from None
    with path.open("rb") as file:  # the library has checked all of it
        length = int.from_bytes(file.read(8), "little")
        header = _parse_object(file.read(length), path)
    found: Tensors = {}
    for name in mapped.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
        said = header[name]
        if said["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {shown(name)} has the unknown dtype {said['dtype']!r}")
        start = 8 + length + said["data_offsets"][0]
        found[name] = Tensor(path, DTYPES[said["dtype"]], tuple(said["shape"]), start)
    if not found:
        raise ValueError(f"{path} holds no tensor")
    return found


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """The inverse of `read_file`. Raises OSError where the file cannot be written."""
    with extra("pretrained"):
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    # The library writes the bytes as they lie, whatever the strides.
    whole = {name: np.asarray(a, order="C") for name, a in tensors.items()}
    try:
        save_file(whole, path, metadata={"format": "pt"})  # transformers asks for the format
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from None


def read_json(path: Path) -> JSON:
    """A JSON object. Raises ValueError, naming the file."""
    if not os.path.isfile(path):
        raise ValueError(
            f"{shown(str(path), 400)[1:-1]} is missing; a folder needs config.json and {ONE_FILE}"
        )
    return _parse_object(path.read_bytes(), path)


def _parse_object(text: bytes, path: Path) -> JSON:
    """A JSON object, in which none has a key twice."""

    def unique(pairs: list[tuple[str, object]]) -> JSON:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"it has the key {shown(twice)} twice; keep one")
        return found

    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{path} is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
