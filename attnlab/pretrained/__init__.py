"""Published checkpoints -> (model, params), and back: one name table per family.

Needs neither torch nor transformers. Nothing in a folder is executed.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.model.config import Model, ModelConfig
from attnlab.model.outer import POSITIONS
from attnlab.names import find
from attnlab.pretrained.albert import ALBERT
from attnlab.pretrained.bert import BERT
from attnlab.pretrained.deepseek import DEEPSEEK_V3
from attnlab.pretrained.distilbert import DISTILBERT
from attnlab.pretrained.families import Family
from attnlab.pretrained.gemma import GEMMA3
from attnlab.pretrained.gpt2 import GPT2
from attnlab.pretrained.gpt_neox import GPT_NEOX
from attnlab.pretrained.llama import LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3
from attnlab.pretrained.published import PUBLISHED, TRANSFORMERS, published_config
from attnlab.pretrained.roberta import ROBERTA
from attnlab.pretrained.rows import fill, unfill
from attnlab.pretrained.settings import read_settings
from attnlab.pretrained.shapes import param_shapes
from attnlab.pretrained.t5 import T5
from attnlab.pretrained.tensors import ONE_FILE, Stored, read_folder, read_json, write_file
from attnlab.pretrained.variables import SYSTEMS, from_variables
from attnlab.pretrained.vit import VIT
from attnlab.sharing.plan import mixtures
from attnlab.tokenizer import FILE, Tokenizer, make_tokenizer
from attnlab.transforms import resharing, unshare

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "SYSTEMS",
    "TRANSFORMERS",
    "from_variables",
    "load",
    "load_config",
    "param_shapes",
    "published_config",
    "save",
    "tokenizer",
]

KNOWN = (
    *(ALBERT, BERT, DEEPSEEK_V3, DISTILBERT, GEMMA3, GPT2, GPT_NEOX),
    *(LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3, ROBERTA, T5, VIT),
)
FAMILIES = {family.name: family for family in KNOWN}
REFUSED = {
    "gemma3": "it reads images too, with a vision_config that is not supported; of its text_config "
    "and its tensors under language_model make a folder of model_type 'gemma3_text'",
}
"""model_type -> why there is no such family."""


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


def save(folder: str | Path, model: Model, params: dict[str, Any], *, family: str = "") -> None:
    """Writes config.json and model.safetensors, which transformers loads with equal outputs.

    The family is the one whose config.json can say what the model computes; `family` chooses.
    Layers that share weights are written once each where the format cannot say that they do;
    deltas are added to the weights that they belong to, mixtures summed.

    Raises ValueError where no family computes the same.
    """
    config = model.config
    parts = {*config.layer_plan, *config.encoder_layer_plan}
    if {"kv", "delta"} & parts or mixtures(parts):
        config, params = unshare(config, params)  # no format knows these parts
    families = [find("family", family, FAMILIES)] if family else FAMILIES.values()
    reasons = {f.name: _cannot(f, config) for f in families}
    fits = [name for name, reason in reasons.items() if reason is None]
    if not fits:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"no published format can say this model. {why}")
    chosen = FAMILIES[fits[0]]
    settings, architecture = chosen.describe(config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = unfill(jax.tree.map(np.asarray, params), chosen.rows(config, settings))
    for name, other in chosen.unused(config).items():
        tensors[name] = tensors[other]
    bare = architecture.endswith("Model") and not architecture.endswith("HeadModel")
    if not bare:
        tensors = {
            name if name.startswith(chosen.readouts) else chosen.prefix + name: a
            for name, a in tensors.items()
        }
    write_file(folder / ONE_FILE, tensors)
    dtype = str(jax.tree.leaves(params)[0].dtype)
    about = {"architectures": [architecture], "model_type": chosen.name, "dtype": dtype}
    text = json.dumps(settings | about, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _cannot(family: Family, config: ModelConfig) -> str | None:
    """Why a config.json of the family would describe another model; None where it would not."""
    try:
        settings, architecture = family.describe(config)
        names = {row.name: None for row in family.rows(config, settings)}
        read = ModelConfig(**family.fields(settings, names, architecture))
    except (ValueError, KeyError, StopIteration, TypeError) as error:
        return str(error) or type(error).__name__
    ours, theirs = _meaning(config), _meaning(read)
    for field, value in ours.items():
        if theirs.get(field, NOTHING) != value:
            return f"{field} would be {theirs.get(field, NOTHING)!r}, not {value!r}"
    return None


# How a model computes what it computes, and where its layers keep their weights.
FREE = {"plan", "encoder_plan", "share_encoder", "dtype", "remat", "order", "implementation"}
FREE |= {"init_std", "init_residual"}
DROPOUT = {"dropout_rate", "embedding_dropout_rate", "dropout_places"}
NOTHING = "nothing"


def _meaning(config: ModelConfig) -> dict[str, Any]:
    """The fields that decide what is computed, with every None resolved; of several kinds those of
    every layer."""
    if config.kinds:
        each = {name: _meaning(c) for name, c in config.stacks.items()}
        layers = [each[name] | {"num_layers": config.num_layers} for name in config.layer_names]
        return {f"{n} of layer {i}": a for i, one in enumerate(layers) for n, a in one.items()}
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    values |= {name: config.heads.sizes[a] for name, a in HEAD_SIZES.items()}
    values["attention_scale"] = config.heads.score_scale
    values["attention_biases"] = sorted(config.heads.biases)
    values["encoder_layers"] = config.encoder_layers or config.num_layers
    rate = config.dropout_rate
    first = rate if config.embedding_dropout_rate is None else config.embedding_dropout_rate
    rates = {place: first if place == "embeddings" else rate for place in config.dropout_places}
    # A place where nothing drops is none.
    values["dropout at each place"] = {place: rate for place, rate in rates.items() if rate}
    row = POSITIONS[config.positions]
    unread = FREE | DROPOUT
    unread |= set() if row.rotary else {"rotary_base", "rotary_fraction", "rotary_scaling"}
    unread |= set() if row.skips_padding else {"pad_token"}
    unread |= {"delta_rank"} if "delta" not in config.layer_plan else set()
    unread |= {"max_len"} if row.relative else {"relative_buckets", "relative_distance"}
    return {name: value for name, value in values.items() if name not in unread}


HEAD_SIZES = {"num_kv_heads": "K", "head_dim": "H", "value_dim": "V", "shared_dim": "R"}


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
