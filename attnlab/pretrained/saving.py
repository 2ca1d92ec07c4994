"""Write a model as a published folder."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from textwrap import shorten

import jax
import numpy as np

from attnlab.extras import extra
from attnlab.models.config import FlaxModel, ModelConfig
from attnlab.models.params import check_params
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import Source, config_value
from attnlab.pretrained.folders import write_together
from attnlab.pretrained.hub import GENERATION
from attnlab.pretrained.metadata import metadata_of
from attnlab.pretrained.registry import FAMILIES
from attnlab.pretrained.tensors import INDEX, Arrays, is_floating, write_file
from attnlab.pretrained.weights import leaves_by_path, unfill
from attnlab.sharing import Params
from attnlab.transforms import unshare

NUM_REASONS = 3
"""Of an error, at most."""
WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of files that `load` would read as weights, or as their index."""


def save(
    folder: str | Path,
    model: FlaxModel,
    params: Params,
    *,
    family: str = "",
    allow_nonfinite: bool = False,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json and model.safetensors, which transformers loads with equal outputs.

    Ids of special tokens, names of classes and generation_config.json of the folder that the model
    was loaded from (`ModelConfig.metadata`) are written too; a new model has no special tokens.

    The folder is written whole or not at all: after an error it is as it was, other files in it
    included (see `folders.write_together`). `params` are compared with the model first.

    Layers that share weights are written once each where the format cannot say that they do; deltas
    are added to the weights that they belong to. Each tensor keeps the dtype of its weight;
    weights of several dtypes in one tensor take the one that holds both. The dtype in config.json,
    in which transformers loads all tensors, is the one that holds those of all.

    Args:
      folder: made if missing; "~" is the home, as for `load`.
      model: of `ModelConfig.build`.
      params: its weights, or the variables {"params": ...}.
      family: a name of `FAMILIES`; "" takes the one that the model was loaded as, or the first,
        whose config.json can describe the model.
      allow_nonfinite: write NaN and infinite weights too.
      max_shard_bytes: weights of more bytes become several files and an index, as
        `model-00001-of-00003.safetensors`. One tensor is never divided.

    Raises:
      ValueError: no family computes the same as the model, or not the one that is named; `params`
        are not its weights: names the first that differs, what it is and what the model expects;
        or `folder` is a file.
      TypeError: `params` are no dict.
      OSError: the folder cannot be written.
      ModuleNotFoundError: safetensors or huggingface_hub is missing.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from attnlab.models import FFN
    >>> model = ModelConfig(width=8, ffn=FFN(activation="gelu_tanh")).build()
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, model, params)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['config.json', 'model.safetensors']
    """
    config = model.config
    sublayers = {*config.plan} | ({*config.encoder_model.plan} if config.encoder else set())
    if {"kv", "delta"} & sublayers:  # no format has these
        params = check_weights(config, params, allow_nonfinite=allow_nonfinite)
        config, params = unshare(config, params)
    chosen = _choose_family(config, family)
    params = check_weights(config, params, allow_nonfinite=allow_nonfinite)
    attributes, tensors = _contents(chosen, config, params)
    texts = {"config.json": attributes, GENERATION: metadata_of(config).get("generation_config")}
    written = {
        name: json.dumps(one, indent=2, sort_keys=True, allow_nan=False) + "\n"
        for name, one in texts.items()
        if one is not None
    }
    _write(folder, written, tensors, max_shard_bytes)


def check_weights(config: ModelConfig, params: Params, *, allow_nonfinite: bool = False) -> Params:
    """The weights of `config.build()`, after checking their names, shapes, dtypes and values.

    Any floating-point dtype is accepted; each weight may have its own.

    Raises:
      TypeError: params are no dict.
      ValueError: names the first weight that is wrong, what it is and what the model expects.
    """
    params = check_params(config, params)
    for path, leaf in leaves_by_path(params).items():
        name, a = ".".join(path), np.asarray(leaf)
        if not is_floating(a.dtype):
            raise ValueError(f"params: {name} is {a.dtype}, the model expects a floating dtype")
        if not allow_nonfinite and not (finite := np.isfinite(a)).all():
            index = np.unravel_index(np.argmin(finite), a.shape)
            place = ", ".join(map(str, index)) or "its only place"
            raise ValueError(
                f"params: {name} has {float(a[index])} at {place}; if it is meant to, pass "
                "allow_nonfinite=True"
            )
    return params


def _contents(family: Family, config: ModelConfig, params: Params) -> tuple[JSON, Arrays]:
    """config.json, and name in the file -> tensor."""
    attributes = family.write(config)
    architecture = attributes["architectures"][0]
    table = family.table_of(Source(architecture))
    tensors = unfill(jax.tree.map(np.asarray, params), table.entries(config, attributes))
    tensors |= {name: tensors[other] for name, other in table.copies_in(config).items()}
    if architecture != family.architectures[0]:  # the bare model
        own = table.task_modules
        tensors = {n if n.startswith(own) else table.prefix + n: a for n, a in tensors.items()}
    attributes |= {"model_type": family.name}
    dtypes = {a.dtype for a in tensors.values()}
    if len(dtypes) > 1:  # which holds 16 and 8 bits of any kind
        dtypes = {max(*dtypes, np.dtype("float32"), key=lambda one: one.itemsize)}
    return attributes | {"dtype": str(dtypes.pop())}, tensors


def _write(folder: str | Path, texts: dict[str, str], tensors: Arrays, max_bytes: int) -> None:
    with extra("pretrained"):
        from huggingface_hub import split_state_dict_into_shards_factory as split_shards
    shards = split_shards(
        tensors,
        get_storage_size=lambda a: a.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        texts[INDEX] = json.dumps(index, indent=2) + "\n"

    def write(new: Path) -> None:
        for name, held in shards.filename_to_tensors.items():
            write_file(new / name, {tensor: tensors[tensor] for tensor in held})
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")

    # What a save before has left would be read in place of these.
    stale = lambda name: name == GENERATION or WEIGHT_FILE.fullmatch(name) is not None
    write_together(Path(os.path.expanduser(folder)), write, remove=stale)


def _choose_family(config: ModelConfig, family: str) -> Family:
    """The family of this name, that of the loaded folder, or the first, that can describe the
    model."""
    families = [lookup(FAMILIES, family, what="family")] if family else list(FAMILIES.values())
    loaded = metadata_of(config).get("model_type")
    families.sort(key=lambda one: one.name != loaded)
    reasons: list[tuple[bool, float, str]] = []
    for one in families:
        count, reason = _difference(one, config)
        if not count:
            return one
        reasons.append((one.name != loaded, count, f"{one.name}: {reason}"))
    nearest = [shorten(reason, 200) for *_, reason in sorted(reasons)[:NUM_REASONS]]
    raise ValueError(
        f"no published format can store this model. {'; '.join(nearest)}. Change these fields, or "
        "keep it as a checkpoint (attnlab.training.Checkpoints)"
    )


def _difference(family: Family, config: ModelConfig) -> tuple[float, str]:
    """How many fields a config.json of the family cannot describe, and the first of them."""
    try:
        attributes = family.write(config)
        source = Source(attributes["architectures"][0])
        entries = family.table_of(source).entries(config, attributes)
        source = source._replace(tensors=dict.fromkeys(entry.name for entry in entries))
        _, read = family.read(attributes, source)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return math.inf, str(error) or type(error).__name__
    ours, theirs = computed_values(config), computed_values(read)
    pairs = {
        path: (theirs.get(path, "nothing"), ours.get(path, "nothing"))
        for path in {**ours, **theirs}
    }
    wrong = [f"{path} would be {a}, not {b}" for path, (a, b) in pairs.items() if a != b]
    return len(wrong), "".join(wrong[:1])


FREE = {"sharing", "compute", "init", "layer_types", "delta_rank", "dropout", "metadata"}
FREE |= {"encoder.sharing", "encoder.shares_decoder", "attention.order", "attention.implementation"}
"""Fields that do not change the function of a model, or are compared in another form."""


def computed_values(config: ModelConfig) -> dict[str, object]:
    """The fields that decide what is computed, each None resolved; with layer types of each layer.

    >>> computed_values(ModelConfig())["heads.head_dim"]
    16
    """
    if config.layer_types:
        each = {name: computed_values(c) for name, c in config.stacks.items()}
        layers = [each[name] | {"num_layers": config.num_layers} for name in config.layer_names]
        return {f"{n} of layer {i}": a for i, one in enumerate(layers) for n, a in one.items()}
    values: dict[str, object] = {}
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        is_record = dataclasses.is_dataclass(part)
        values[field.name] = type(part).__name__ if is_record else part
        for own in dataclasses.fields(part) if is_record and field.name not in FREE else ():
            path = f"{field.name}.{own.name}"
            values[path] = config_value(config, path)
    values["heads.scale"] = config.layout.score_scale
    values["norm.bias"] = config.norm.has_bias
    if config.encoder is not None:
        values["encoder.num_layers"] = config.encoder_model.num_layers
        values["encoder.num_heads"] = config.encoder_model.heads.num_heads
    dropout = config.dropout
    at = dict.fromkeys(dropout.places, dropout.rate)
    if dropout.embedding is not None:
        at["embeddings"] = dropout.embedding
    # A place where nothing is dropped does not count.
    values["dropout at each place"] = {place: rate for place, rate in at.items() if rate}
    values["dropout of attention and ffn"] = dropout.attention, dropout.ffn
    unread = set(FREE)
    if config.positions.is_relative and not config.positions.is_learned:
        unread.add("max_len")
    if not any("norm" in name for name in config.layout.all_weights):
        unread.add("heads.norm_eps")
    return {path: value for path, value in values.items() if path not in unread}
