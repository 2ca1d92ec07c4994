"""torch.nn's stacks of layers: TransformerEncoderLayer, TransformerDecoderLayer, several of them
(TransformerEncoder, TransformerDecoder), and Transformer.

They take vectors, which a model of ours reads as floats [B, T, d_model] through a table that is the
identity; there are no positions and no readout, `Outputs.last` is what they return.

A decoder alone is that of an encoder-decoder whose encoder would read its weights (share_encoder),
and does not run: it is given the memory as `encoded`.
"""

import re
from typing import Any

import numpy as np

from attnlab.model.config import ModelConfig
from attnlab.names import lookup
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import ACTIVATIONS

PARTS = {  # part -> (module, number of its norm) in a layer of the encoder, and of the decoder
    "encoder": {"attention": ("self_attn", 1), "ffn": ("", 2)},
    "decoder": {"attention": ("self_attn", 1), "cross": ("multihead_attn", 2), "ffn": ("", 3)},
}
NORMS = {  # (norm_first, is there a norm behind the layers?) -> ours
    (False, False): "post",
    (False, True): "post_final",
    (True, False): "pre_open",
    (True, True): "pre",
}


def build(
    tensors: dict[str, Any], heads: int, first: bool, activation: str, eps: float, length: int
) -> tuple[ModelConfig, list[Row]]:
    """(config, name table); adds the table of the identity to `tensors`."""
    both = any(name.startswith("decoder.") for name in tensors)
    alone = "decoder" if any("multihead_attn." in name for name in tensors) else "encoder"
    prefixes = {"encoder": "encoder.", "decoder": "decoder."} if both else {alone: ""}
    rows = same("embedding", "embedding")
    depth = {stack: _depth(tensors, prefix) for stack, prefix in prefixes.items()}
    first_stack, first_prefix = next(iter(prefixes.items()))
    sample = f"{first_prefix}layers.0." if depth[first_stack] else first_prefix
    if f"{sample}linear1.weight" not in tensors:
        raise ValueError(f"the variable {sample + 'linear1.weight'!r} is missing")
    ffn_width, width = np.shape(tensors[f"{sample}linear1.weight"])
    bias = f"{sample}linear1.bias" in tensors
    final = f"{first_prefix}norm.weight" in tensors
    for stack, count in depth.items():
        own = "encoder_" if both and stack == "encoder" else ""
        prefix = prefixes[stack]
        for i in range(max(count, 1)):
            rows += _layer_rows(f"{prefix}layers.{i}." if count else prefix, stack, own, i, bias)
        rows += norm(f"{prefix}norm", f"{own}final_norm", bias=bias) if final else []
    tensors["embedding"] = np.eye(width, dtype=np.float32)
    config = ModelConfig(
        kind="encoder_decoder" if "decoder" in depth else "encoder",
        vocab_size=width,
        max_len=length,
        width=width,
        num_layers=max([*depth.values()][-1], 1),
        encoder_layers=max(depth["encoder"], 1) if both else None,
        share_encoder=[*depth] == ["decoder"],
        num_heads=heads,
        attention_biases="qkvo" if bias else "",
        ffn_width=ffn_width,
        ffn_bias=bias,
        norm=NORMS[first, final],
        norm_eps=eps,
        norm_bias=bias,
        activation=lookup(ACTIVATIONS, activation, what="activation"),
        positions="none",
        readout="none",
    )
    return config, rows


def _layer_rows(at: str, stack: str, own: str, layer: int, bias: bool) -> list[Row]:
    """The name table of one layer, whose names begin with `at`; `own` begins our names."""
    rows: list[Row] = []
    for part, (module, number) in PARTS[stack].items():
        where = (f"{own}layers", part)
        rows += norm(f"{at}norm{number}", *where, "norm", slot=layer, bias=bias)
        if part == "ffn":
            rows += dense(f"{at}linear1", *where, "up", slot=layer, bias=bias)
            rows += dense(f"{at}linear2", *where, "down", slot=layer, bias=bias)
            continue
        for kind, end in (("linear", "weight"), ("vector", "bias"))[: 1 + bias]:
            ours = tuple((*where, n if end == "weight" else f"{n}_bias") for n in "qkv")
            rows.append(Row(f"{at}{module}.in_proj_{end}", ours, layer, kind))
        rows += dense(f"{at}{module}.out_proj", *where, "o", slot=layer, bias=bias)
    return rows


def _depth(tensors: dict[str, Any], prefix: str) -> int:
    """How many numbered layers; 0 for one that stands alone."""
    found = [re.match(rf"{re.escape(prefix)}layers\.(\d+)\.", name) for name in tensors]
    return 1 + max((int(one[1]) for one in found if one), default=-1)
