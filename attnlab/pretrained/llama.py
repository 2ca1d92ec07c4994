"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Ministral, Qwen2 (Qwen Team 2024) and
Qwen3 (2025), in the names of Hugging Face.
"""

import dataclasses
from collections.abc import Mapping

from attnlab.heads import HeadNorm, Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Init, Norm
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.common_fields import (
    CausalHead,
    activation,
    biases,
    head_dim,
    kv_heads,
    numbers,
)
from attnlab.pretrained.family import NO_OTHERS, Family, OtherAttributes, UnreadTensors
from attnlab.pretrained.fields import Field, changed, value
from attnlab.pretrained.layer_types import FULL, SLIDING, LayerTypes, Window
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.rope import RotaryField

BASE = ModelConfig(
    heads=Standard(num_heads=4), norm=Norm(kind="rms"), ffn=FFN(bias=False), init=Init(std=0.02)
)
FIELDS: tuple[Field, ...] = (
    *numbers(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
    *numbers(num_attention_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-6),
    *numbers(attention_dropout=0.0),
    kv_heads(),
    head_dim(),
    activation("hidden_act", "silu", gated=True),
    biases("attention_bias", False),
    value("mlp_bias", False, "ffn.bias"),
    RotaryField(),
)
NORMS = {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"}
HEADS = (
    *linears("self_attn.", "attention", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),
    Module("self_attn.q_norm", "attention.q_norm", "table"),
    Module("self_attn.k_norm", "attention.k_norm", "table"),
)
PAIRED = tuple(module._replace(pairs=("q", "k", "q_norm", "k_norm")) for module in HEADS)
"""`HEADS` of families that rotate neighbours."""
GATED_FFN = linears("mlp.", "ffn", gate="gate_proj", up="up_proj", down="down_proj")
RATES = ("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
"""Rates of rotary positions, which older checkpoints hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """What the files of a decoder call its weights; the defaults are Llama's.

    Attributes:
      attention, ffn: modules of a layer.
      norms: weight -> module, of the norms of a layer.
      embedding, final_norm, lm_head: modules outside the layers.
      more: further modules outside the layers.
      layers, prefix: how names of a layer, and of the bare model in a file, begin.
      unread: patterns of tensors that hold no weight.
      renamed: as in `Family`.
    """

    attention: tuple[Module, ...] = HEADS
    ffn: tuple[Module, ...] = GATED_FFN
    norms: Mapping[str, str] = dataclasses.field(default_factory=NORMS.copy)
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    lm_head: str = "lm_head"
    more: tuple[Module, ...] = ()
    layers: str = "layers.{}."
    prefix: str = "model."
    unread: tuple[str, ...] = RATES
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def table(self) -> NameTable:
        """The table of these names."""
        norms = tuple(Module(theirs, ours, "norm") for ours, theirs in self.norms.items())
        return NameTable(
            modules=(
                Module(self.embedding, "embedding", "table"),
                Module(self.final_norm, "final_norm", "norm"),
                *self.more,
                Module(self.lm_head, "lm_head"),
                Module(self.lm_head, "lm_head_bias", "bias", only_without="lm_head"),
            ),
            layers=(Layers(self.layers, (*self.attention, *self.ffn, *norms)),),
        )


LLAMA_NAMES = DecoderNames()


def decoder(
    name: str,
    fields: tuple[Field, ...],
    lm_head: CausalHead,
    *,
    names: DecoderNames = LLAMA_NAMES,
    other_attributes: OtherAttributes = NO_OTHERS,
    **base: object,
) -> Family:
    """A family whose files name things almost as Llama's do.

    Args:
      name: its `model_type`.
      fields: those of the layers and sizes.
      lm_head: architectures with and without an LM head.
      names: of the weights.
      other_attributes: those that set no field of the config.
      **base: fields of the config that no attribute sets, where they differ from Llama's.
    """
    return Family(
        name=name,
        base=dataclasses.replace(BASE, **base),  # type: ignore[arg-type]
        fields=(*fields, lm_head),
        table=names.table,
        other_attributes=other_attributes,
        prefix=names.prefix,
        task_modules=(f"{names.lm_head}.",),
        renamed=names.renamed,
        unread=UnreadTensors(
            # Rates of the rotary positions, which follow from config.json.
            always=names.unread,
            if_tied={f"{names.lm_head}.weight": f"{names.embedding}.weight"},
        ),
    )


def _qwen_types(attributes: JSON) -> list[str]:
    slides = attributes["use_sliding_window"] and attributes["sliding_window"] is not None
    count = attributes["num_hidden_layers"]
    first = attributes["max_window_layers"] if slides else count
    return [FULL if i < first else SLIDING for i in range(count)]


class _QwenTypes(LayerTypes):
    """layer_types, or windows from layer max_window_layers on; where use_sliding_window is true."""

    def types(self, attributes: JSON) -> list[str]:
        types = super().types(attributes)
        if SLIDING in types and not attributes["use_sliding_window"]:
            raise bad_value("layer_types", types, "need use_sliding_window = true")
        return types

    def write(self, config: ModelConfig) -> JSON:
        attributes = super().write(config)
        types = attributes["layer_types"]
        return attributes | {
            "use_sliding_window": SLIDING in types,
            "max_window_layers": types.index(SLIDING) if SLIDING in types else config.num_layers,
        }


QWEN_TYPES = _QwenTypes(
    default_types=_qwen_types,
    more=(Attribute("use_sliding_window", False), Attribute("max_window_layers", 28, least=0)),
)
MISTRAL_FIELDS = changed(
    FIELDS,
    *numbers(intermediate_size=14336, max_position_embeddings=131072),
    kv_heads(8),
    Window(),
    without=("attention_bias", "mlp_bias"),
)
QWEN_FIELDS = changed(
    FIELDS,
    *numbers(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768),
    kv_heads(32),
    QWEN_TYPES,
    without=("attention_bias", "mlp_bias"),
)
RMS_HEADS = Standard(num_heads=4, qk_norm=HeadNorm("rms"))
NORMED = value("rms_norm_eps", 1e-6, "norm.eps", "heads.norm_eps")
"""The epsilon of norms, also of those of queries and keys."""

LLAMA = decoder("llama", FIELDS, CausalHead("Llama"))
MISTRAL = decoder("mistral", MISTRAL_FIELDS, CausalHead("Mistral"))
MINISTRAL = decoder("ministral", changed(MISTRAL_FIELDS, LayerTypes()), CausalHead("Ministral"))
QWEN2 = decoder(
    "qwen2", QWEN_FIELDS, CausalHead("Qwen2"), heads=Standard(num_heads=4, biases=("q", "k", "v"))
)
QWEN3 = decoder(
    "qwen3",
    changed(QWEN_FIELDS, head_dim(128), biases("attention_bias", False), NORMED),
    CausalHead("Qwen3"),
    heads=RMS_HEADS,
)
