"""Safetensors files as NumPy arrays, read and written without any other package.

The format: 8 bytes, the length of a JSON header (little endian); the header, name -> dtype, shape
and byte range; the bytes. Nothing in it can be executed. Pickles can: none is ever opened.
"""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
LONGEST_HEADER = 100_000_000
PICKLES = (b"PK", *(bytes([0x80, protocol]) for protocol in range(2, 6)))
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of `model.safetensors`, or of the files that its index names.

    Raises ValueError, naming file and tensor, for anything that is missing, damaged or a pickle.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass one that holds config.json")
    if (folder / ONE_FILE).exists():
        return read_file(folder / ONE_FILE)
    if not (folder / INDEX).exists():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        found = f"; {pickles[0]} is a pickle, which can run code and is never opened: load it"
        way_out = f"{found} where you trust it and save it as safetensors" if pickles else ""
        raise ValueError(f"{folder} holds no {ONE_FILE} and no {INDEX}{way_out}")
    index = read_json(folder / INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map")
    tensors: dict[str, np.ndarray] = {}
    for name in sorted({str(file) for file in places.values()}):
        if Path(name).name != name or not (folder / name).exists():
            raise ValueError(f"{INDEX} names the file {name!r}, which is not in {folder}")
        held = read_file(folder / name)
        said = {tensor for tensor, file in places.items() if file == name}
        if said != set(held):
            odd = min(said ^ set(held))
            raise ValueError(f"{INDEX} and {name} disagree about the tensor {odd!r}")
        tensors |= held
    return tensors


def read_file(path: Path) -> dict[str, np.ndarray]:
    """name -> array, mapped from the file: only what is used is read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start, brace = file.read(8), file.read(1)
        # A header of 640 bytes begins as a pickle does: the brace tells them apart.
        if brace != b"{" and start[:2] in PICKLES:
            raise ValueError(
                f"{path} is a pickle with another name; pickles can run code and are never opened: "
                "save the model as safetensors"
            )
        length = int.from_bytes(start, "little")
        if size < 8 or not 0 < length <= min(LONGEST_HEADER, size - 8):
            raise ValueError(
                f"{path} is no whole safetensors file: {size} bytes, of which the header should "
                f"take {length}; copy it again"
            )
        try:
            header = json.loads(brace + file.read(length - 1))
            header.pop("__metadata__", None)
            rows = {name: _row(**row) for name, row in header.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has no safetensors header: {error}") from None
    buffer = np.memmap(path, np.uint8, mode="r") if size > 8 + length else np.empty(0, np.uint8)
    tensors, last = {}, 0
    for name, (dtype, shape, begin, end) in sorted(rows.items(), key=lambda item: item[1][2:]):
        if begin != last or end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
            raise ValueError(f"{path}: the bytes {begin} to {end} cannot hold {name!r} {shape}")
        if 8 + length + end > size:
            raise ValueError(
                f"{path} is cut off: {name!r} ends at byte {8 + length + end}, the file has "
                f"{size}; copy it again"
            )
        raw = buffer[8 + length + begin : 8 + length + end]
        tensors[name], last = np.frombuffer(raw, dtype).reshape(shape), end
    return tensors


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The inverse of `read_file`. float32 and the like only; names are sorted."""
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
    # transformers asks for the format.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, a in sorted(tensors.items()):
        end = begin + a.nbytes
        header[name] = {
            "dtype": codes[a.dtype],
            "shape": list(a.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, a in sorted(tensors.items()):
            file.write(np.ascontiguousarray(a).tobytes())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError, naming the file."""
    if not path.exists():
        raise ValueError(f"{path} is missing; a folder needs config.json and {ONE_FILE}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _row(dtype: str, shape: list[int], data_offsets: list[int]) -> tuple:
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    sizes = [*shape, *data_offsets]
    if len(data_offsets) != 2 or any(not isinstance(n, int) or n < 0 for n in sizes):
        raise ValueError(f"shape {shape} and offsets {data_offsets} are no sizes")
    return DTYPES[dtype], tuple(shape), *data_offsets
