"""The Transformer of tensor2tensor (Vaswani et al. 2017), in the names of its graph."""

import re

import numpy as np

from attnlab.heads import Standard
from attnlab.models.config import EncoderConfig, ModelConfig
from attnlab.models.specs import FFN, Embedding, Norm, NormPosition, Sinusoidal
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.name_table import Layers, Module, NameTable, Stack, Suffixes, linears
from attnlab.pretrained.systems.arrays import Built, depth, require, take
from attnlab.pretrained.tensors import Arrays

NORMS: dict[str, tuple[NormPosition, str]] = {
    "da": ("pre", "layer_prepostprocess"),
    "dan": ("post", "layer_postprocess"),
}
"""layer_postprocess_sequence -> (position of norms, where their variables are)."""


def _stack(stack: Stack, place: str, three: bool) -> Layers:
    """`three`: projections have three axes; `place`: where the norms are named."""
    norm, modules = f"{place}/layer_norm/layer_norm", list[Module]()
    for sublayer, name in {"attention": "self_attention", "cross": "encdec_attention"}.items():
        at = f"{name}/multihead_attention/"
        output = "o" if three else "output_transform"
        projections = linears(at, sublayer, q="q", k="k", v="v", o=output)
        modules += [one._replace(kind="table" if three else "linear") for one in projections]
        modules.append(Module(f"{name}/{norm}", f"{sublayer}.norm", "norm"))
    modules += linears("ffn/", "ffn", up="conv1", down="conv2")
    modules.append(Module(f"ffn/{norm}", "ffn.norm", "norm"))
    outer = (Module(f"body/{stack}/{norm}", "final_norm", "norm"),)
    return Layers(f"body/{stack}/layer_{{}}/", tuple(modules), stack, outer)


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
    position, place = lookup(NORMS, after, what="layer_postprocess_sequence")
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
    stacks = (_stack("encoder", place, three), _stack("decoder", place, three))
    table = NameTable((Module("embedding", "embedding", "table"),), stacks, SUFFIXES)
    return model, table.entries(model)
