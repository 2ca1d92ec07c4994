"""Read a published folder as (model, params)."""

import dataclasses
import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.model.config import Model, ModelConfig
from attnlab.names import find
from attnlab.pretrained.families import Family
from attnlab.pretrained.registry import FAMILIES, REFUSED
from attnlab.pretrained.rows import fill
from attnlab.pretrained.settings import read_settings
from attnlab.pretrained.shapes import param_shapes
from attnlab.pretrained.tensors import Stored, read_folder, read_json
from attnlab.tokenizer import FILE, Tokenizer, make_tokenizer
from attnlab.transforms import resharing

Sharding = jax.sharding.Sharding
PARAM_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def load(
    folder: str | Path,
    *,
    ignore: tuple[str, ...] = (),
    param_dtype: str = "float32",
    detect_sharing: bool = False,
    sharding: Callable[[tuple[str, ...], tuple[int, ...]], Sharding] | dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Model, dict[str, Any]]:
    """(model, params) of a folder with config.json and safetensors, as transformers saves it.

    Weights are `param_dtype`, "float32" or "bfloat16", whatever the file holds. Readout, pooler and
    classes are those that the file or its architecture has. `fields` replace fields of the
    `ModelConfig` that change no weight (dtype, which is what products run in, remat, order, ...).

    Weights are read one by one, so that the peak of memory is the result and the part of a tensor
    that is being read. With `sharding` each is put where it says before the next one is read: a
    tree of shardings like that of the params, or a function ((name, name, ...), shape) -> sharding;
    no device holds more than its part. With `detect_sharing` layers whose weights are equal bit for
    bit share one set (see `transforms.detect_sharing`), where the file says nothing of it.

    Strict both ways: every tensor is used or known to hold nothing, every weight is filled.
    `ignore` are patterns of further tensors, or of attributes in config.json, to leave out.

    Raises ValueError, naming the tensor, the attribute or the file, and never runs or unpickles
    anything that it finds.
    """
    dtype = find("param_dtype", param_dtype, PARAM_DTYPES)
    family, settings, tensors, config = _read(Path(folder), ignore)
    dataclasses.replace(config, **fields)  # its errors, before anything is read
    rows = family.rows(config, settings)
    known = {row.name for row in rows}
    patterns = (*family.ignored, *family.ignored_for(config), *family.unused(config), *ignore)
    unknown = [name for name in tensors if name not in known and not _matches(name, patterns)]
    if unknown:
        raise ValueError(
            f"{len(unknown)} tensors have no place in a {family.name} model with this config.json, "
            f"the first is {unknown[0]!r}; if they do not matter, pass ignore=({unknown[0]!r},)"
        )

    def put(path: tuple[str, ...], weight: np.ndarray) -> Array:
        where: Any = sharding
        if callable(sharding):
            where = sharding(path, weight.shape)
        elif sharding is not None:
            for step in path:
                where = where[step]
        return jax.device_put(weight, where)

    params = fill(param_shapes(config), rows, tensors, dtype=dtype, put=put)
    if detect_sharing:
        config, params = resharing.detect_sharing(config, params)
    return dataclasses.replace(config, **fields).build(), params


def load_config(folder: str | Path, *, ignore: tuple[str, ...] = ()) -> ModelConfig:
    """The config of the model that `load` gives; no weight is read. The errors are those of `load`,
    as far as names and config.json tell.
    """
    return _read(Path(folder), ignore)[-1]


def tokenizer(folder: str | Path) -> Tokenizer:
    """What turns text into the tokens of a folder's model and back: its tokenizer.json, read by the
    package tokenizers (extra `data`). `read(text)` gives the ids that the library gives, special
    tokens too, and where each stands in the text; `decode` is the way back.

    Raises ValueError for a folder without the file, and for a file that is none.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {FILE}, which holds a tokenizer whole; a folder with vocab.txt or "
            "spiece.model alone needs to be saved again by transformers"
        )
    return make_tokenizer(str(path), ())


def _read(
    folder: Path, ignore: tuple[str, ...]
) -> tuple[Family, dict[str, Any], Stored, ModelConfig]:
    raw = read_json(folder / "config.json")
    if "model_type" not in raw:
        raise ValueError(
            f"{folder / 'config.json'} has no model_type; known: {', '.join(FAMILIES)}"
        )
    if raw["model_type"] in REFUSED:
        reason = REFUSED[raw["model_type"]]
        raise ValueError(f"config.json: model_type = {raw['model_type']!r}: {reason}")
    family: Family = find("model_type", raw["model_type"], FAMILIES)
    settings = read_settings(raw, family.settings, family.fixed, ignore)
    tensors = _ours(family, read_folder(folder), ignore)
    architecture = (raw.get("architectures") or [""])[0]
    return family, settings, tensors, ModelConfig(**family.fields(settings, tensors, architecture))


def _ours(family: Family, tensors: Stored, ignore: tuple[str, ...]) -> Stored:
    """The tensors under the names of the name table: no prefix, today's endings."""
    found: dict[str, str] = {}
    for name in tensors:
        if _matches(name, ignore):
            continue
        short = name.removeprefix(family.prefix)
        for old, new in family.renamed:
            short = short.removesuffix(old) + new if short.endswith(old) else short
        if short in found:
            raise ValueError(f"the tensor {name!r} is there twice, under another name as well")
        found[short] = name
    return tensors.renamed(found)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
