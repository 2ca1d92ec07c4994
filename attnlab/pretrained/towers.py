"""The text and vision models of CLIP (Radford et al. 2021, arXiv 2103.00020) and SigLIP (Zhai et
al. 2023, arXiv 2303.15343), each alone, in the names of Hugging Face.
"""

import dataclasses
from collections.abc import Callable

from attnlab.models.config import ModelConfig
from attnlab.models.specs import Embedding, Norm, OutputHead
from attnlab.nested import JSON
from attnlab.pretrained import bert
from attnlab.pretrained.attributes import Attribute, derived
from attnlab.pretrained.common_fields import activation, numbers
from attnlab.pretrained.family import Family, OtherAttributes, UnreadTensors
from attnlab.pretrained.fields import Choice, Field, Source, Values, changed
from attnlab.pretrained.image_fields import ImageField, image_entries
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.weights import Entry

FIELDS: tuple[Field, ...] = (
    *numbers(hidden_size=768, intermediate_size=3072, num_hidden_layers=12),
    *numbers(num_attention_heads=12, layer_norm_eps=1e-6, attention_dropout=0.0),
    activation("hidden_act", "gelu_pytorch_tanh"),
)
CLIP_FIELDS = changed(FIELDS, *numbers(layer_norm_eps=1e-5), activation("hidden_act", "quick_gelu"))
LAYERS = Layers(
    "encoder.layers.{}.",
    (
        *linears("self_attn.", "attention", q="q_proj", k="k_proj", v="v_proj", o="out_proj"),
        Module("layer_norm1", "attention.norm", "norm"),
        *linears("mlp.", "ffn", up="fc1", down="fc2"),
        Module("layer_norm2", "ffn.norm", "norm"),
    ),
)
PATCHES = "embeddings.patch_embedding"
POSITIONS = Module("embeddings.position_embedding", "positions", "table")
TEXT = (
    Module("embeddings.token_embedding", "embedding", "table"),
    POSITIONS,
    Module("final_layer_norm", "final_norm", "norm"),
)


class _EndToken(Field):
    """The token that is pooled. Configs of the first CLIP say 2 and mean the largest id."""

    attributes = (Attribute("eos_token_id", 49407, least=0),)

    def read(self, attributes: JSON, source: Source) -> Values:
        end = attributes["eos_token_id"]
        return {"output.end_token": None if end == 2 else end}

    def write(self, config: ModelConfig) -> JSON:
        if config.output.end_token == 2:
            raise ValueError("output.end_token 2 would be read as None")
        end = config.output.end_token
        return {"eos_token_id": 2 if end is None else end}


def _tower(
    name: str,
    architecture: str,
    fields: tuple[Field, ...],
    modules: tuple[Module, ...],
    *,
    special: Callable[[ModelConfig], list[Entry]] | None = None,
    read: tuple[Attribute, ...] = (),
    **base: object,
) -> Family:
    """A family of one of the two models.

    Args:
      name: its `model_type`, which ends in "_model".
      architecture: the only one.
      fields: the attributes that set a field of the config.
      modules, special: as in `NameTable`, outside the layers.
      read: attributes that set no field of the config.
      **base: fields of the config that no attribute sets.
    """
    plain = dict(norm=Norm(), embedding=Embedding()) | base
    return Family(
        name=name,
        base=dataclasses.replace(bert.BASE, **plain),  # type: ignore[arg-type]
        fields=fields,
        table=NameTable(modules, (LAYERS,), special=special),
        prefix="text_model." if "text" in name else "vision_model.",
        other_attributes=OtherAttributes(read=read, written={"architectures": [architecture]}),
        unread=UnreadTensors(always=("embeddings.position_ids",)),
    )


PROJECTION = (Attribute("projection_dim"),)
"""Of the model with both towers."""
CLIP_TEXT = _tower(
    "clip_text_model",
    "CLIPTextModel",
    (
        *changed(
            CLIP_FIELDS, *numbers(hidden_size=512, intermediate_size=2048, num_attention_heads=8)
        ),
        *numbers(vocab_size=49408, max_position_embeddings=77),
        _EndToken(),
    ),
    TEXT,
    read=PROJECTION,
    kind="decoder",
    output=OutputHead(kind="none", pooler="end"),
)
CLIP_VISION = _tower(
    "clip_vision_model",
    "CLIPVisionModel",
    (*CLIP_FIELDS, ImageField(patch_size=32, bias=False)),
    (
        POSITIONS,
        Module("pre_layrnorm", "embedding_norm", "norm"),
        Module("post_layernorm", "pooler_norm", "norm"),
    ),
    special=image_entries(PATCHES, class_token=("embeddings.class_embedding", ())),
    read=PROJECTION,
    norm=Norm(position="pre_open"),
    embedding=Embedding(norm=True),
    output=OutputHead(kind="none", pooler="first_norm"),
)
SIGLIP_TEXT = _tower(
    "siglip_text_model",
    "SiglipTextModel",
    (*FIELDS, *numbers(vocab_size=32000, max_position_embeddings=64)),
    (*TEXT, Module("head", "pooler")),
    read=(derived("projection_size", "hidden_size"),),
    output=OutputHead(kind="none", pooler="last_linear"),
)
SIGLIP_VISION = _tower(
    "siglip_vision_model",
    "SiglipVisionModel",
    (
        *FIELDS,
        ImageField(class_token=False),
        Choice("vision_use_head", True, "output.pooler", {True: "attention", False: None}),
    ),
    (
        POSITIONS,
        Module("post_layernorm", "final_norm", "norm"),
        Module("head.attention.in_proj_", ("pooler_q", "pooler_k", "pooler_v")),
        Module("head.attention.out_proj", "pooler_o"),
        Module("head.layernorm", "pooler_norm", "norm"),
        Module("head.mlp.fc1", "pooler_up"),
        Module("head.mlp.fc2", "pooler_down"),
        Module("head.probe", "pooler_query", "plain", axes=1),
    ),
    special=image_entries(PATCHES),
)
