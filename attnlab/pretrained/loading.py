"""Read a published folder as (model, params)."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab.models.config import FlaxModel, ModelConfig
from attnlab.models.params import param_shapes
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.attributes import bad_value, matches, shown
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import Source
from attnlab.pretrained.hub import TOKENIZER, find_folder
from attnlab.pretrained.metadata import read_metadata
from attnlab.pretrained.name_table import NameTable
from attnlab.pretrained.registry import FAMILIES, REFUSED
from attnlab.pretrained.tensors import Tensors, open_folder, read_json
from attnlab.pretrained.weights import fill, leaves_by_path
from attnlab.sharing import Params
from attnlab.transforms import resharing

Sharding = jax.sharding.Sharding
WeightPath = tuple[str, ...]
"""Path of a weight in the tree."""
WRAPPERS = r"(_orig_mod\.|module\.)+"
"""What torch.compile and DistributedDataParallel put before all names of a module."""
PARAM_DTYPES = MappingProxyType({"float32": jnp.float32, "bfloat16": jnp.bfloat16})


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    ignore: tuple[str, ...] = (),
    param_dtype: str = "float32",
    detect_sharing: bool = False,
    allow_nonfinite: bool = False,
    sharding: Callable[[WeightPath, tuple[int, ...]], Sharding] | Params | None = None,
    **fields: Any,
) -> tuple[FlaxModel, Params]:
    """Read a model by its name on the Hugging Face Hub, or a folder, as transformers saves it.

        model, params = load("openai-community/gpt2")

    The LM head, pooler and classes are those that the file or its architecture has. Weights are
    read one by one: the peak of memory is the result and the part of a tensor that is being read.
    Every tensor must be used or known to hold nothing, and every weight filled. A word of
    config.json that transformers does not read for the family is ignored with a warning. Ids of
    special tokens and generation_config.json become `ModelConfig.metadata`.

    Args:
      name: a folder with config.json and model.safetensors, or several files and their index; or
        the name of a model on the hub ("org/name"), whose config, safetensors and tokenizer.json
        are fetched once (see `hub.find_folder`). Nothing in it is run or unpickled, no code that
        `auto_map` names either.
      revision: branch, tag or commit on the hub.
      ignore: patterns of further tensors, or of attributes in config.json, to leave out.
      param_dtype: "float32" or "bfloat16", of all weights, whatever the file holds. A number beyond
        its range is refused.
      detect_sharing: share layers whose weights have the same bits, where the file does not say
        that they are shared (see `transforms.detect_sharing`).
      allow_nonfinite: accept weights that are NaN or infinite.
      sharding: where each weight is put before the next one is read, so that no device holds more
        than its shard: a tree like that of the params, or (path, shape) -> sharding.
      **fields: fields of the `ModelConfig` to replace, which change no weight (compute, ...).

    Returns:
      (model, params).

    Raises:
      ValueError: names the file, the tensor or attribute, and its value; or the `fields` that
        change the shapes of weights; or there is no such folder or model on the hub.
      TypeError: `fields` has one that `ModelConfig` does not have.
      ConnectionError: the hub cannot be reached, and its cache does not hold the model.
      ModuleNotFoundError: safetensors or, for a name on the hub, huggingface_hub is missing.

    >>> import tempfile
    >>> from attnlab.models import FFN
    >>> from attnlab.pretrained import save
    >>> config = ModelConfig(width=8, num_layers=1, ffn=FFN(activation="gelu_tanh"))
    >>> params = jax.tree.map(lambda a: jnp.ones(a.shape), param_shapes(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, config.build(), params)
    ...     model, params = load(folder, param_dtype="bfloat16")
    >>> model.config.width, params["embedding"].dtype
    (8, dtype(bfloat16))
    """
    dtype = lookup(PARAM_DTYPES, param_dtype, what="param_dtype")
    found = _read(find_folder(name, revision), ignore)
    config, table, tensors = found.config, found.table, found.tensors
    changed = dataclasses.replace(config, **fields)  # its errors, before anything is read
    entries = table.entries(config, found.attributes)
    _check_all_used(found, {entry.name for entry in entries}, ignore)
    shapes = param_shapes(config)
    place = sharding if callable(sharding) else _placement(sharding, shapes)
    put = lambda path, a: jax.device_put(a, place(path, a.shape))
    if param_shapes(changed) != shapes:
        raise ValueError(
            f"{', '.join(fields)} would change the shapes of weights; load the model without, and "
            "convert it with attnlab.transforms"
        )
    for again, one in table.repeated_in(config).items():
        both = again in tensors and one in tensors and not matches(again, ignore)
        if both and not tensors[again].equals(tensors[one]):
            raise ValueError(
                f"the tensor {again!r} differs from {one!r}, which config.json ties it to; say "
                f"tie_word_embeddings = false, or pass ignore=({again!r},) to leave it out"
            )
    params = fill(shapes, entries, tensors, dtype=dtype, put=put, allow_nonfinite=allow_nonfinite)
    if detect_sharing:
        config, params = resharing.detect_sharing(config, params)
    return dataclasses.replace(config, **fields).build(), params


class Folder(NamedTuple):
    """Everything in a folder but the numbers of its weights."""

    family: Family
    architecture: str
    attributes: JSON
    tensors: Tensors
    """By the names of the family's table."""
    config: ModelConfig
    table: NameTable


def _check_all_used(found: Folder, known: set[str], ignore: tuple[str, ...]) -> None:
    family, table, architecture = found.family, found.table, found.architecture
    known |= {*table.repeated_in(found.config), *table.copies_in(found.config)}
    patterns = (*table.unread, *ignore)
    full = [name for name, tensor in found.tensors.items() if 0 not in tensor.shape]
    unknown = [name for name in full if name not in known and not matches(name, patterns)]
    if not unknown:
        return
    first, heads = shown(unknown[0]), (*family.architectures, *family.task_architectures)
    if architecture and architecture not in heads:
        raise ValueError(
            f"config.json: architectures = [{shown(architecture)}] has a head that is not read "
            f"({len(unknown)} tensors, the first is {first}), only that of {', '.join(heads)}; in "
            "transformers, save the model without it: model.base_model.save_pretrained(FOLDER)"
        )
    raise ValueError(
        f"{len(unknown)} tensors have no place in a {family.name} model with this config.json, "
        f"the first is {first}; if they do not matter, pass ignore=({first},)"
    )


def _placement(
    sharding: Params | None, shapes: Params
) -> Callable[[WeightPath, tuple[int, ...]], Sharding | None]:
    """Where a tree puts each weight. Raises ValueError where it has nothing for one."""
    if sharding is None:
        return lambda path, shape: None
    places = leaves_by_path(sharding)
    if missing := [path for path in leaves_by_path(shapes) if path not in places]:
        raise ValueError(
            f"sharding has nothing at {'.'.join(missing[0])}; pass a tree with a sharding for "
            "every weight, or a function of (path, shape)"
        )
    return lambda path, shape: places[path]


def load_config(
    name: str | Path, *, revision: str | None = None, ignore: tuple[str, ...] = ()
) -> ModelConfig:
    """The config of the model that `load` gives.

    Weights are fetched from the hub, whose names are needed, but none is read.

    Args:
      name, revision, ignore: as in `load`.

    Raises:
      ValueError, ConnectionError, ModuleNotFoundError: as `load`, as far as the names of tensors
        and config.json tell.

    >>> import tempfile
    >>> from attnlab.models import FFN
    >>> from attnlab.pretrained import save
    >>> config = ModelConfig(width=8, num_layers=1, ffn=FFN(activation="gelu_tanh"))
    >>> params = jax.tree.map(lambda a: jnp.ones(a.shape), param_shapes(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, config.build(), params)
    ...     load_config(folder).width
    8
    """
    return _read(find_folder(name, revision), ignore).config


def tokenizer_path(name: str | Path, *, revision: str | None = None) -> Path:
    """The tokenizer.json of a model, which holds a tokenizer whole; `attnlab.data.load_tokenizer`
    reads it.

    Args:
      name, revision: as in `load`.

    Raises:
      ValueError: the model has no such file, or there is no such folder or model on the hub.
      ConnectionError, ModuleNotFoundError: as `load`, for a name on the hub.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "tokenizer.json").write_text("{}")
    ...     tokenizer_path(folder).name
    'tokenizer.json'
    """
    path = find_folder(name, revision) / TOKENIZER
    if not path.is_file():
        raise ValueError(
            f"{name} has no {TOKENIZER}, which holds a tokenizer whole; a folder with vocab.txt or "
            "spiece.model alone needs to be saved again by transformers"
        )
    return path


def _read(folder: Path, ignore: tuple[str, ...]) -> Folder:
    if isinstance(ignore, str):  # its characters would be patterns, such as *
        raise ValueError(f"ignore is a tuple of patterns; write ignore=({ignore!r},)")
    raw = read_json(folder / "config.json")
    family, architecture = _family(raw), _architecture(raw)
    source = Source(architecture)
    tensors = _renamed(family.table_of(source), open_folder(folder), ignore)
    source = Source(architecture, tensors)
    attributes, config = family.read(raw, source, ignore)
    config = dataclasses.replace(config, metadata=read_metadata(raw, folder))
    return Folder(family, architecture, attributes, tensors, config, family.table_of(source))


def _family(raw: JSON) -> Family:
    name = raw.get("model_type")
    if not isinstance(name, str) or len(name) > 100:
        raise bad_value("model_type", name, f"is not supported; known: {', '.join(FAMILIES)}")
    if name in REFUSED:
        raise ValueError(f"config.json: model_type = {name!r}: {REFUSED[name]}")
    return lookup(MappingProxyType(FAMILIES), name, what="model_type")  # no reference: it runs code


def _architecture(raw: JSON) -> str:
    """The first of `architectures`; "" where there is none."""
    names = raw.get("architectures")
    if names is None:
        return ""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_value("architectures", names, "should be a list of names, or null")
    return names[0] if names else ""


def _renamed(table: NameTable, tensors: Tensors, ignore: tuple[str, ...]) -> Tensors:
    """The tensors under the names of the name table: no prefix, today's endings."""
    start = re.match(WRAPPERS, os.path.commonprefix([*tensors]))  # noqa: RUF071 (of characters)
    found = Tensors()
    wrapper = start[0] if start else ""
    for name, tensor in tensors.items():
        if matches(name, ignore):
            continue
        short = name.removeprefix(wrapper).removeprefix(table.prefix)
        for old, new in table.renamed:
            short = short.removesuffix(old) + new if short.endswith(old) else short
        if short in found:
            raise ValueError(f"the tensor {shown(name)} is there twice, under another name as well")
        found[short] = tensor
    return found
