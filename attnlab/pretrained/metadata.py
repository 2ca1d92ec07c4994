"""What a published folder says and no computation reads: ids of special tokens, names of classes,
settings of generation. `ModelConfig.metadata` holds it as JSON, so that `save` writes it again."""

import json
from pathlib import Path

from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.attributes import KEPT, default_tokens
from attnlab.pretrained.hub import GENERATION
from attnlab.pretrained.tensors import read_json


def read_metadata(raw: JSON, folder: Path) -> str:
    """The metadata of a folder.

    Args:
      raw: the object in its config.json.
      folder: with generation_config.json, or without.
    """
    words = default_tokens(raw["model_type"]) | {n: a for n, a in raw.items() if n in KEPT}
    found: JSON = {"model_type": raw["model_type"], "config": words}
    found |= {"architectures": raw["architectures"]} if raw.get("architectures") else {}
    if (folder / GENERATION).is_file():
        found["generation_config"] = read_json(folder / GENERATION)
    # Without what is no JSON, NaN.
    return json.dumps(json.loads(json.dumps(found), parse_constant=lambda constant: None))


def metadata_of(config: ModelConfig) -> JSON:
    """The object of `read_metadata`; empty for a model that was not loaded.

    Raises:
      ValueError: `config.metadata` is something else.

    >>> metadata_of(ModelConfig())
    {}
    """
    try:
        found: JSON = json.loads(config.metadata or "{}")
        return dict(found)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(
            f"metadata must be JSON as pretrained.load sets it, or '', not {config.metadata!r:.99}"
        ) from None


def kept_words(config: ModelConfig, model_type: str) -> JSON:
    """The words of config.json that metadata decide. An id that the reader of a family would fill
    in and the model does not have is null."""
    found, defaults = metadata_of(config), default_tokens(model_type)
    starts = config.kind == "encoder_decoder"
    if found:
        names = (*defaults, "decoder_start_token_id") if starts else defaults
        return {**dict.fromkeys(names), **found.get("config", {})}
    # A decoder with an encoder begins with some token, so what is usual stays where it is one.
    usual = {n: i for n, i in defaults.items() if starts and i in range(config.vocab_size)}
    return {name: usual.get(name) for name in defaults}
