"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Ministral, Ministral 3, Qwen2 (Qwen
Team 2024) and Qwen3 (2025), in the names of Hugging Face.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from attnlab.heads import HeadNorm, Standard
from attnlab.models import FFN, Init, Norm
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.family import Family
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.rotary import (
    BY_LENGTH,
    FULL,
    LENGTH,
    SLIDING,
    LayerTypes,
    RotaryField,
    Window,
    is_number,
)
from attnlab.pretrained.tasks import GENERIC, QUESTIONS

NORMS = {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"}
QKVO = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
HEADS = (
    *linears("self_attn.", "attention", **QKVO),
    Module("self_attn.q_norm", "attention.q_norm", "table"),
    Module("self_attn.k_norm", "attention.k_norm", "table"),
)
PAIRED = tuple(module._replace(pairs=("q", "k", "q_norm", "k_norm")) for module in HEADS)
"""`HEADS` of families that rotate neighbours."""
FLAT = tuple(one._replace(kind="vector") if one.kind == "table" else one for one in HEADS)
"""`HEADS` where the scales of the norm of all heads lie in one vector."""
GATED_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
GATED_FFN = linears("mlp.", "ffn", **GATED_NAMES)
OUTSIDE = {"embedding": "embed_tokens", "final_norm": "norm", "lm_head": "lm_head"}
RATES = ("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
"""Rates of rotary positions, which follow from config.json; older checkpoints hold them."""


def decoder_table(
    attention: tuple[Module, ...] = HEADS,
    ffn: tuple[Module, ...] = GATED_FFN,
    norms: Mapping[str, str] = NORMS,
    outside: Mapping[str, str] = OUTSIDE,
    layers: str = "layers.{}.",
    prefix: str = "model.",
    unread: tuple[str, ...] = RATES,
    **options: Any,
) -> NameTable:
    """What the files of a decoder call its weights; the defaults are Llama's.

    Args:
      attention, ffn: modules of a layer.
      norms: weight -> module, of the norms of a layer.
      outside: weight -> module, outside the layers; those of Llama may be left out.
      layers: how names of a layer begin.
      prefix, unread, **options: as in `NameTable`.
    """
    names = OUTSIDE | dict(outside)
    kinds: JSON = {"embedding": "table", "positions": "table", "lm_head": "linear"}
    lm_head = names["lm_head"]
    return NameTable(
        (
            *(Module(names[ours], ours, kinds.get(ours, "norm")) for ours in names),
            Module(lm_head, "lm_head_bias", "bias", only_without="lm_head"),
        ),
        (Layers(layers, (*attention, *ffn, *(Module(norms[n], n, "norm") for n in norms))),),
        prefix=prefix,
        task_modules=(f"{lm_head}.",),
        unread=unread,
        if_tied={f"{lm_head}.weight": f"{names['embedding']}.weight"},
        **options,
    )


LLAMA = Family(
    name="llama",
    base=ModelConfig(
        heads=Standard(num_heads=4), norm=Norm(kind="rms"), ffn=FFN(bias=False), init=Init(std=0.02)
    ),
    fields=(
        *f.numbers("vocab_size hidden_size num_hidden_layers num_attention_heads"),
        *f.numbers("intermediate_size attention_dropout max_position_embeddings rms_norm_eps"),
        f.kv_heads(),
        f.head_dim(),
        f.activation("hidden_act", gated=True),
        f.biases("attention_bias"),
        f.value("mlp_bias", bool, "ffn.bias"),
        RotaryField(),
        f.CausalHead("Llama"),
    ),
    table=decoder_table(),
    tasks=GENERIC,
)
MISTRAL = LLAMA.variant(
    "mistral", f.CausalHead("Mistral"), Window(), without="attention_bias mlp_bias", tasks=QUESTIONS
)
MINISTRAL = MISTRAL.variant("ministral", f.CausalHead("Ministral"), LayerTypes(), tasks=GENERIC)

GROWTH = "llama_4_scaling_beta"
YARN: JSON = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, mscale=1.0, mscale_all_dim=1.0)
YARN |= dict(original_max_position_embeddings=16384)


@dataclasses.dataclass(frozen=True)
class _GrowingQueries(RotaryField):
    """Rotary positions that also say how queries grow with their position."""

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        today, before = attributes["rope_parameters"], attributes["rope_scaling"]
        said = dict(today or before or YARN | {GROWTH: 0.1})
        said.pop("max_position_embeddings", None)
        growth = said.pop(GROWTH, 0)
        if growth != 0 and not is_number(growth):
            raise bad_value(GROWTH, growth, "must be a number of at least 0")
        length = said.get(LENGTH, attributes["max_position_embeddings"])
        if attributes[LENGTH] and said.get("rope_type", said.get("type")) in BY_LENGTH:
            length = attributes[LENGTH]
        own = {"rope_parameters": said, "rope_scaling": before if today else None}
        values = super().read(attributes | own, source)
        grows = {"attention.position_scale": (growth, length)} if growth else {}
        return values | grows

    def write(self, config: ModelConfig) -> JSON:
        attributes = super().write(config)
        growth, length = config.attention.position_scale or (0.0, config.max_len)
        rotary = {GROWTH: growth, LENGTH: int(length)} | attributes["rope_parameters"]
        return attributes | {"rope_scaling": None, "rope_parameters": rotary}


MINISTRAL3 = MISTRAL.variant("ministral3", f.CausalHead("Ministral3"), _GrowingQueries(), Window())


def _qwen_types(attributes: JSON) -> list[str]:
    slides = attributes["use_sliding_window"] and attributes["sliding_window"] is not None
    count = attributes["num_hidden_layers"]
    first = attributes["max_window_layers"] if slides else count
    return [FULL if i < first else SLIDING for i in range(count)]


class _QwenTypes(LayerTypes):
    """Layers from max_window_layers on have a window."""

    def write(self, config: ModelConfig) -> JSON:
        attributes = super().write(config)
        types = attributes["layer_types"]
        first = types.index(SLIDING) if SLIDING in types else config.num_layers
        return attributes | {"max_window_layers": first}


MAX_WINDOW_LAYERS = Attribute("max_window_layers", 28, least=0)
NORMED = f.value("rms_norm_eps", float, "norm.eps", "heads.norm_eps")
"""The epsilon of norms, also of those of queries and keys."""
RMS_HEADS = Standard(num_heads=4, qk_norm=HeadNorm("rms"))
QWEN2 = LLAMA.variant(
    "qwen2",
    f.CausalHead("Qwen2"),
    _QwenTypes(default_types=_qwen_types, more=(MAX_WINDOW_LAYERS,), switch="use_sliding_window"),
    without="attention_bias mlp_bias",
    heads=Standard(num_heads=4, biases=("q", "k", "v")),
)
QWEN3 = QWEN2.variant(
    "qwen3", f.CausalHead("Qwen3"), f.biases("attention_bias"), NORMED, heads=RMS_HEADS
)
