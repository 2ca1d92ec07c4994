"""torch.nn.MultiheadAttention and torch.nn's layers: TransformerEncoderLayer,
TransformerDecoderLayer, several of them (TransformerEncoder, TransformerDecoder), and Transformer.

The layers take vectors, which a model here reads as floats [B, T, d_model] through a table that is
the identity; there are no positions and no LM head, `Outputs.hidden` is what they return.

A decoder alone is that of an encoder-decoder whose encoder uses its weights (shares_decoder), and
does not run: it is given the memory as `encoded`.
"""

from types import MappingProxyType

import numpy as np

from attnlab.heads import ExtraKeys, Sink, Standard
from attnlab.heads.layout import Extra
from attnlab.models.config import EncoderConfig, ModelConfig
from attnlab.models.specs import FFN, NoPositions, Norm, NormPosition, OutputHead
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.fields import ACTIVATIONS, BIASES
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.systems.arrays import Built, depth, require, take
from attnlab.pretrained.tensors import Arrays
from attnlab.pretrained.weights import Entry

NORMS: dict[tuple[bool, bool], NormPosition] = {
    (False, False): "post",
    (False, True): "post_final",
    (True, False): "pre_open",
    (True, True): "pre",
}
"""(norm_first, is there a norm behind the layers?) -> position of the norms."""


def build_attention(config: JSON, tensors: Arrays) -> Built:
    """torch.nn.MultiheadAttention."""
    width, heads, kdim, vdim, add_bias_kv, add_zero_attn, _ = take(
        config, "embed_dim", "num_heads", kdim=None, vdim=None, add_bias_kv=None,
        add_zero_attn=False, batch_first=True,
    )  # fmt: skip
    has_biases, has_keys = "in_proj_bias" in tensors, "bias_k" in tensors
    if add_bias_kv is not None and bool(add_bias_kv) != has_keys:
        found = "" if has_keys else "not "
        raise ValueError(f"add_bias_kv is {add_bias_kv}, and bias_k is {found}there")
    extras: list[Extra] = [ExtraKeys(1)] if has_keys else []
    extras += [Sink(learnt=False)] if add_zero_attn else []
    layout = Standard(
        width=width,
        num_heads=heads,
        key_width=kdim,
        value_width=vdim,
        biases=BIASES if has_biases else (),
        extras=tuple(extras),
    )
    paths = tuple(("heads", n) for n in "qkv")
    biases = tuple(("heads", f"{n}_bias") for n in "qkv")
    if "in_proj_weight" in tensors:
        entries = [Entry("in_proj_weight", paths, ..., "linear")]
    else:
        entries = [Entry(f"{path[-1]}_proj_weight", (path,), ..., "linear") for path in paths]
    entries.append(Entry("out_proj.weight", (("heads", "o"),), ..., "linear", num_in=2))
    if has_biases:
        entries.append(Entry("in_proj_bias", biases, ..., "vector"))
        entries.append(Entry("out_proj.bias", (("heads", "o_bias"),), ..., "vector"))
    for n in "kv" if has_keys else "":
        tensors[f"bias_{n}"] = np.ravel(tensors.get(f"bias_{n}", np.zeros(0)))  # torch: [1, 1, E]
        entries.append(Entry(f"bias_{n}", (("heads", f"extra_{n}"),), ..., "vector"))
    return layout, entries


def _stack(stack: str, prefix: str, numbered: bool, paired: bool) -> Layers:
    """The layers of a stack; `paired`: there is an encoder and a decoder."""
    sublayers = {"attention": "self_attn.", "cross": "multihead_attn."}
    sublayers = sublayers if stack == "decoder" else {"attention": "self_attn."}
    modules: list[Module] = []
    for number, (sublayer, name) in enumerate(sublayers.items(), 1):
        packed = tuple(f"{sublayer}.{n}" for n in "qkv")
        modules.append(Module(f"{name}in_proj_", packed))
        modules.append(Module(f"{name}out_proj", f"{sublayer}.o"))
        modules.append(Module(f"norm{number}", f"{sublayer}.norm", "norm"))
    modules += linears("", "ffn", up="linear1", down="linear2")
    modules.append(Module(f"norm{len(sublayers) + 1}", "ffn.norm", "norm"))
    outer = (Module(f"{prefix}norm", "final_norm", "norm"),)
    at = f"{prefix}layers.{{}}." if numbered else prefix
    return Layers(at, tuple(modules), "encoder" if paired and stack == "encoder" else "", outer)


def build_layers(config: JSON, tensors: Arrays) -> Built:
    """torch.nn's layers and stacks of them; adds the table of the identity to `tensors`."""
    heads, norm_first, activation, eps, max_len, *_ = take(
        config, "nhead", norm_first=False, activation="relu", layer_norm_eps=1e-5, max_length=1024,
        batch_first=True,
    )  # fmt: skip
    paired = any(name.startswith("decoder.") for name in tensors)
    alone = "decoder" if any("multihead_attn." in name for name in tensors) else "encoder"
    prefixes = {"encoder": "encoder.", "decoder": "decoder."} if paired else {alone: ""}
    depths = {s: depth(tensors, rf"{p}layers\.(\d+)\.") for s, p in prefixes.items()}
    first, prefix = next(iter(prefixes.items()))
    sample = f"{prefix}layers.0." if depths[first] else prefix
    require(tensors, f"{sample}linear1.weight")
    ffn_width, width = np.shape(tensors[f"{sample}linear1.weight"])
    tensors["embedding"] = np.eye(width, dtype=np.float32)
    bias, decodes = f"{sample}linear1.bias" in tensors, "decoder" in depths
    encoder = EncoderConfig(num_layers=max(depths.get("encoder", 1), 1), shares_decoder=not paired)
    model = ModelConfig(
        kind="encoder_decoder" if decodes else "encoder",
        vocab_size=width,
        max_len=max_len,
        width=width,
        num_layers=max([*depths.values()][-1], 1),
        heads=Standard(num_heads=heads, biases=BIASES if bias else ()),
        ffn=FFN(
            width=ffn_width,
            bias=bias,
            activation=lookup(MappingProxyType(ACTIVATIONS), activation, what="activation"),
        ),
        norm=Norm(
            position=NORMS[norm_first, f"{prefix}norm.weight" in tensors], eps=eps, bias=bias
        ),
        positions=NoPositions(),
        output=OutputHead(kind="none"),
        encoder=encoder if decodes else None,
    )
    stacks = tuple(_stack(s, p, depths[s] > 0, paired) for s, p in prefixes.items())
    entries = NameTable((), stacks).entries(model)
    return model, [Entry("embedding", (("embedding",),)), *entries]
