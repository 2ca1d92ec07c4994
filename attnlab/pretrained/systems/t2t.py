"""Transformers in the names of their graphs: tensor2tensor's (Vaswani et al. 2017), and SummAE's
(Liu et al. 2019, arXiv 1910.00998; google-research/summae).
"""

import re
from types import MappingProxyType

import numpy as np

from attnlab.heads import Standard
from attnlab.models.config import EncoderConfig, ModelConfig
from attnlab.models.specs import FFN, Embedding, Norm, NormPosition, OutputHead, Sinusoidal
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.name_table import Kind, Layers, Module, NameTable, Stack, Suffixes, linears
from attnlab.pretrained.systems.arrays import Built, depth, require, take
from attnlab.pretrained.tensors import Arrays

NORMS: dict[str, tuple[NormPosition, str]] = {
    "da": ("pre", "layer_prepostprocess"),
    "dan": ("post", "layer_postprocess"),
}
"""layer_postprocess_sequence -> (position of norms, where their variables are)."""


def _stack(
    at: str, stack: Stack, norm: str, heads: dict[str, str], ffn: dict[str, str], kind: Kind
) -> Layers:
    """The layers of a stack.

    Args:
      at: how all names begin.
      stack: "encoder" or "decoder".
      norm: the name of a norm, behind that of its sublayer.
      heads, ffn: weight -> its name, behind that of its sublayer.
      kind: of the projections of heads.
    """
    modules = list[Module]()
    for sublayer, name in {"attention": "self_attention", "cross": "encdec_attention"}.items():
        modules += (Module(f"{name}/{heads[n]}", f"{sublayer}.{n}", kind) for n in heads)
        modules.append(Module(f"{name}/{norm}", f"{sublayer}.norm", "norm"))
    modules += linears("ffn/", "ffn", **ffn)
    modules.append(Module(f"ffn/{norm}", "ffn.norm", "norm"))
    outer = (Module(f"{at}{stack}/{norm}", "final_norm", "norm"),)
    return Layers(f"{at}{stack}/layer_{{}}/", tuple(modules), stack, outer)


STACKS: tuple[Stack, ...] = ("encoder", "decoder")
EMBEDDING = (Module("embedding", "embedding", "table"),)
SUFFIXES = Suffixes("/kernel", "/bias", "_scale", "_bias", table="", linear="conv1d")


def _join_shards(tensors: Arrays) -> None:
    """The table of symbols is stored in pieces of rows: one tensor named "embedding" instead."""
    pattern = r"symbol_modality_(\d+)_\d+/shared/weights_(\d+)"
    found = [one for name in tensors if (one := re.search(pattern, name))]
    found.sort(key=lambda one: int(one[2]))
    if not found:
        raise ValueError("the shards symbol_modality_V_E/shared/weights_0, ... are missing")
    table = np.concatenate([tensors.pop(one.string) for one in found])
    if len(table) != int(found[0][1]):
        raise ValueError(
            f"the {len(found)} shards {found[0].string!r}, ... have {len(table)} rows, their names "
            f"say {found[0][1]}; is one missing?"
        )
    tensors["embedding"] = table


def build(config: JSON, tensors: Arrays) -> Built:
    """Widths and depths are those of the arrays.

    q, k and v of three axes [E, heads, d] carry the scale of the scores in their values.
    """
    num_heads, after, eps, max_len = take(
        config, "num_heads", layer_postprocess_sequence="da", norm_epsilon=1e-6, max_length=256
    )
    for name in list(tensors):  # names begin with the scope of the model, or not
        tensors[name.removeprefix("transformer/")] = tensors.pop(name)
    position, place = lookup(MappingProxyType(NORMS), after, what="layer_postprocess_sequence")
    _join_shards(tensors)
    first = "body/encoder/layer_0/"
    heads = f"{first}self_attention/multihead_attention/"
    three = f"{heads}q" in tensors
    q, v = (f"{heads}{n}" if three else f"{heads}{n}/kernel" for n in "qv")
    kernel = f"{first}ffn/conv1/kernel"
    require(tensors, q, v, kernel)
    vocab, width = tensors["embedding"].shape
    model = ModelConfig(
        kind="encoder_decoder",
        vocab_size=vocab,
        max_len=max_len,
        width=width,
        num_layers=depth(tensors, r"body/decoder/layer_(\d+)/"),
        heads=Standard(
            num_heads=num_heads,
            head_dim=tensors[q].size // width // num_heads,
            value_dim=tensors[v].size // width // num_heads,
            scale=1.0 if three else None,
        ),
        ffn=FFN(width=tensors[kernel].shape[-1], activation="relu"),
        norm=Norm(position=position, eps=eps),
        positions=Sinusoidal(halves=True),
        embedding=Embedding(scale=width**0.5, zero_token=0),
        encoder=EncoderConfig(num_layers=depth(tensors, r"body/encoder/layer_(\d+)/")),
    )
    names = {n: f"multihead_attention/{n}" for n in ("q", "k", "v", "o")}
    if not three:
        names["o"] = "multihead_attention/output_transform"
    norm, ffn = f"{place}/layer_norm/layer_norm", {"up": "conv1", "down": "conv2"}
    kind: Kind = "table" if three else "linear"
    stacks = tuple(_stack("body/", stack, norm, names, ffn, kind) for stack in STACKS)
    return model, NameTable(EMBEDDING, stacks, SUFFIXES).entries(model)


def build_summae(config: JSON, tensors: Arrays) -> Built:
    """SummAE. Its decoder adds the input of the FFN twice, 2 x + f(norm(x)): the residual is added
    once by the sublayer's post-processing and once more by the layer.

    Widths and depths are those of the arrays.
    """
    encoder_heads, num_heads, max_len = take(
        config, "num_encoder_heads", "num_decoder_heads", max_length=256
    )
    kernel = "encoder/layer_0/ffn/ffn/dense/kernel"
    require(tensors, "embedding", kernel)
    vocab, width = tensors["embedding"].shape
    model = ModelConfig(
        kind="encoder_decoder",
        vocab_size=vocab,
        max_len=max_len,
        width=width,
        num_layers=depth(tensors, r"decoder/layer_(\d+)/"),
        heads=Standard(num_heads=num_heads),
        ffn=FFN(width=tensors[kernel].shape[1], activation="relu", residual_scale=2.0),
        norm=Norm(eps=1e-12),
        positions=Sinusoidal(halves=True),
        embedding=Embedding(zero_token=0),
        output=OutputHead(kind="none"),
        encoder=EncoderConfig(
            num_layers=depth(tensors, r"encoder/layer_(\d+)/"), num_heads=encoder_heads
        ),
    )
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "output_proj"}
    ffn = {"up": "ffn/dense", "down": "ffn/dense_1"}
    stacks = tuple(_stack("", s, "preprocess/LayerNorm", names, ffn, "linear") for s in STACKS)
    suffixes = SUFFIXES._replace(scale="/gamma", norm_bias="/beta")
    return model, NameTable(EMBEDDING, stacks, suffixes).entries(model)
