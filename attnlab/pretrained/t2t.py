"""The Transformer of tensor2tensor (Vaswani et al. 2017), in the names of its graph."""

import re
from typing import Any

import numpy as np

from attnlab.model.config import ModelConfig
from attnlab.names import lookup
from attnlab.pretrained.rows import Row

# hparams -> (our norm, where its variables stand)
NORMS = {"da": ("pre", "layer_prepostprocess"), "dan": ("post", "layer_postprocess")}
WORDS = {"attention": "self_attention", "cross": "encdec_attention"}


def join_shards(tensors: dict[str, np.ndarray]) -> None:
    """The table of symbols is stored in pieces of rows: one tensor named "embedding" instead."""
    found = [name for name in tensors if re.search(r"symbol_modality_\d+_\d+/shared/weights", name)]
    found.sort(key=lambda name: int(name.rsplit("_", 1)[1]))
    if not found:
        raise ValueError("the shards symbol_modality_V_E/shared/weights_0, ... are missing")
    tensors["embedding"] = np.concatenate([tensors.pop(name) for name in found])


def build(
    tensors: dict[str, np.ndarray], num_heads: int, after: str, eps: float, max_len: int
) -> tuple[ModelConfig, list[Row]]:
    """(config, name table). Widths and depths are those of the arrays.

    q, k and v of three axes [E, heads, d] carry the scale of the scores in their values.
    """
    norm, place = lookup(NORMS, after, what="layer_postprocess_sequence")
    join_shards(tensors)
    first = "body/encoder/layer_0/"
    heads = f"{first}self_attention/multihead_attention/"
    three = f"{heads}q" in tensors
    end = "" if three else "/kernel"
    for name in (f"{heads}q{end}", f"{heads}v{end}", f"{first}ffn/conv1/kernel"):
        if name not in tensors:
            raise ValueError(f"the variable {name!r} is missing")
    vocab, width = tensors["embedding"].shape
    depth = {
        stack: len({n.split("/")[2] for n in tensors if re.match(rf"body/{stack}/layer_\d", n)})
        for stack in ("encoder", "decoder")
    }
    config = ModelConfig(
        kind="encoder_decoder",
        vocab_size=vocab,
        max_len=max_len,
        width=width,
        num_layers=depth["decoder"],
        encoder_layers=depth["encoder"],
        num_heads=num_heads,
        head_dim=tensors[f"{heads}q{end}"].size // width // num_heads,
        value_dim=tensors[f"{heads}v{end}"].size // width // num_heads,
        attention_scale=1.0 if three else None,
        attention_biases="",
        ffn_width=tensors[f"{first}ffn/conv1/kernel"].shape[-1],
        norm=norm,
        norm_eps=eps,
        activation="relu",
        positions="sinusoidal_halves",
        embedding_scale=width**0.5,
        zero_token=0,
    )
    return config, _rows(config, three, place)


def _rows(config: ModelConfig, three: bool, place: str) -> list[Row]:
    """The name table. `three`: q, k and v have three axes; `place`: where the norms are named."""
    end, kind = ("", "same") if three else ("/kernel", "conv1d")
    maps = {"q": "q", "k": "k", "v": "v", "o": "o" if three else "output_transform"}
    rows = [Row("embedding", (("embedding",),))]
    plans = {"encoder": config.encoder_layer_plan, "decoder": config.layer_plan}
    for stack, plan in plans.items():
        own = "encoder_" if stack == "encoder" else ""
        for i in range(plan.num_layers):
            layer = f"body/{stack}/layer_{i}/"
            for part in (p for p in WORDS if p in plan):
                where, path = (f"{own}layers", part), layer + WORDS[part]
                for ours, theirs in maps.items():
                    name = f"{path}/multihead_attention/{theirs}{end}"
                    rows.append(Row(name, ((*where, ours),), i, kind))
                rows += _norm_rows(f"{path}/{place}", *where, "norm", slot=i)
            where = (f"{own}layers", "ffn")
            for ours, theirs in {"up": "conv1", "down": "conv2"}.items():
                rows.append(Row(f"{layer}ffn/{theirs}/kernel", ((*where, ours),), i))
                rows.append(Row(f"{layer}ffn/{theirs}/bias", ((*where, f"{ours}_bias"),), i))
            rows += _norm_rows(f"{layer}ffn/{place}", *where, "norm", slot=i)
        if config.norm == "pre":
            rows += _norm_rows(f"body/{stack}/{place}", f"{own}final_norm")
    return rows


def _norm_rows(path: str, *where: str, slot: int | None = None) -> list[Row]:
    file = f"{path}/layer_norm/layer_norm_"
    return [Row(file + n, ((*where, n),), slot) for n in ("scale", "bias")]


def strip(tensors: dict[str, Any]) -> None:
    """Names begin with the scope of the model, or not."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer/")] = tensors.pop(name)
