"""Write a model as a published folder."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attnlab.model.config import Model, ModelConfig
from attnlab.model.outer import POSITIONS
from attnlab.names import lookup
from attnlab.pretrained.families import Family
from attnlab.pretrained.folders import write_together
from attnlab.pretrained.registry import FAMILIES
from attnlab.pretrained.rows import unfill
from attnlab.pretrained.shapes import check_params
from attnlab.pretrained.tensors import ONE_FILE, write_file
from attnlab.sharing.plan import mixtures
from attnlab.transforms import unshare


def save(
    folder: str | Path,
    model: Model,
    params: dict[str, Any],
    *,
    family: str = "",
    allow_nonfinite: bool = False,
) -> None:
    """Write config.json and model.safetensors, which transformers loads with equal outputs.

    The folder is written whole or not at all: after an error it is as it was, other files in it
    included (see `folders.write_together`). `params` are compared with the model first.

    Layers that share weights are written once each where the format cannot say that they do; deltas
    are added to the weights that they belong to, mixtures summed. Each tensor keeps the dtype of
    its weight; weights of several dtypes in one tensor take the one that holds both. config.json
    has a dtype only where all tensors have the same.

    Args:
      folder: made if missing.
      model: of `ModelConfig.build`.
      params: its weights, without {"params": ...}.
      family: a name of `FAMILIES`; "" takes the first whose config.json can describe the model.
      allow_nonfinite: write NaN and infinite weights too.

    Raises:
      ValueError: no family computes the same as the model, or `params` are not its weights: names
        the first that differs, what it is and what the model expects.
      OSError: the folder cannot be written.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> model = ModelConfig(width=8, num_heads=2, activation="gelu_tanh").build()
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, model, params)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['config.json', 'model.safetensors']
    """
    config = model.config
    parts = {*config.layer_plan, *config.encoder_layer_plan}
    if {"kv", "delta"} & parts or mixtures(parts):  # no format knows these parts
        check_params(config, params, allow_nonfinite=allow_nonfinite)
        config, params = unshare(config, params)
    chosen = _choose_family(config, family)
    check_params(config, params, allow_nonfinite=allow_nonfinite)
    _write(folder, chosen, config, params)


def _write(folder: str | Path, family: Family, config: ModelConfig, params: dict[str, Any]) -> None:
    settings, architecture = family.describe(config)
    tensors = _tensors(family, config, settings, architecture, params)
    about: dict[str, Any] = {"architectures": [architecture], "model_type": family.name}
    dtypes = {str(a.dtype) for a in tensors.values()}
    about |= {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    text = json.dumps(settings | about, indent=2, sort_keys=True, allow_nan=False)

    def write(new: Path) -> None:
        write_file(new / ONE_FILE, tensors)
        (new / "config.json").write_text(text + "\n", encoding="utf-8")

    write_together(Path(folder), write)


def _choose_family(config: ModelConfig, family: str) -> Family:
    """The family of this name, or the first, that can describe the model."""
    families = [lookup(FAMILIES, family, what="family")] if family else list(FAMILIES.values())
    reasons: dict[str, str] = {}
    for one in families:
        if (reason := _cannot(one, config)) is None:
            return one
        reasons[one.name] = reason
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no published format can say this model. {why}")


def _tensors(
    family: Family,
    config: ModelConfig,
    settings: dict[str, Any],
    architecture: str,
    params: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Name in the file -> tensor."""
    tensors = unfill(jax.tree.map(np.asarray, params), family.rows(config, settings))
    for name, other in family.unused(config).items():
        tensors[name] = tensors[other]
    if architecture.endswith("Model") and not architecture.endswith("HeadModel"):
        return tensors
    own = family.readouts
    return {n if n.startswith(own) else family.prefix + n: a for n, a in tensors.items()}


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
