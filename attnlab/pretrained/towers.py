"""The text and vision models of CLIP (Radford et al. 2021, arXiv 2103.00020) and SigLIP (Zhai et
al. 2023, arXiv 2303.15343), each alone, in the names of Hugging Face.
"""

import dataclasses

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Embedding, Init, Norm, OutputHead
from attnlab.pretrained.attributes import JSON, Attribute, derived
from attnlab.pretrained.family import Family, OtherAttributes, UnreadTensors
from attnlab.pretrained.fields import (
    ACTIVATIONS,
    BIASES,
    Choice,
    Field,
    Source,
    Values,
    changed,
    hidden_size,
    sizes,
    value,
)
from attnlab.pretrained.image_fields import ImageField, image_entries
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears

BASE = ModelConfig(
    kind="encoder",
    heads=Standard(num_heads=4, biases=BIASES),
    output=OutputHead(kind="none"),
    init=Init(std=0.02),
)
FIELDS: tuple[Field, ...] = (
    *sizes(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12),
    Choice("hidden_act", "gelu_pytorch_tanh", "ffn.activation", ACTIVATIONS),
    value("layer_norm_eps", 1e-6, "norm.eps"),
    value("attention_dropout", 0.0, "dropout.attention"),
)
CLIP_FIELDS = changed(
    FIELDS,
    Choice("hidden_act", "quick_gelu", "ffn.activation", ACTIVATIONS),
    value("layer_norm_eps", 1e-5, "norm.eps"),
)
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
LAYERS = Layers(
    "encoder.layers.{}.",
    (
        *linears("self_attn.", "attention", **PROJECTIONS),
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
IGNORED = ("embeddings.position_ids",)


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


def _output(**options: object) -> OutputHead:
    return dataclasses.replace(BASE.output, **options)  # type: ignore[arg-type]


PROJECTION = (Attribute("projection_dim"),)
"""Of the model with both towers."""
CLIP_TEXT = Family(
    name="clip_text_model",
    base=dataclasses.replace(BASE, kind="decoder", output=_output(pooler="end")),
    fields=(
        *changed(
            CLIP_FIELDS,
            *sizes(hidden_size=512, intermediate_size=2048, num_attention_heads=8),
            *sizes(vocab_size=49408, max_position_embeddings=77),
        ),
        _EndToken(),
    ),
    table=NameTable(TEXT, (LAYERS,)),
    prefix="text_model.",
    other_attributes=OtherAttributes(read=PROJECTION, written={"architectures": ["CLIPTextModel"]}),
    unread=UnreadTensors(always=IGNORED),
)
CLIP_VISION = Family(
    name="clip_vision_model",
    base=dataclasses.replace(
        BASE,
        norm=Norm(position="pre_open"),
        embedding=Embedding(norm=True),
        output=_output(pooler="first_norm"),
    ),
    fields=(*CLIP_FIELDS, ImageField(patch_size=32, bias=False)),
    table=NameTable(
        (
            POSITIONS,
            Module("pre_layrnorm", "embedding_norm", "norm"),
            Module("post_layernorm", "pooler_norm", "norm"),
        ),
        (LAYERS,),
        special=image_entries(PATCHES, class_token=("embeddings.class_embedding", ())),
    ),
    prefix="vision_model.",
    other_attributes=OtherAttributes(
        read=PROJECTION, written={"architectures": ["CLIPVisionModel"]}
    ),
    unread=UnreadTensors(always=IGNORED),
)


SIGLIP_TEXT = Family(
    name="siglip_text_model",
    base=dataclasses.replace(BASE, output=_output(pooler="last_linear")),
    fields=(*FIELDS, *sizes(vocab_size=32000, max_position_embeddings=64)),
    table=NameTable((*TEXT, Module("head", "pooler")), (LAYERS,)),
    prefix="text_model.",
    other_attributes=OtherAttributes(
        read=(derived("projection_size", hidden_size, "hidden_size"),),
        written={"architectures": ["SiglipTextModel"]},
    ),
    unread=UnreadTensors(always=IGNORED),
)
QKV = tuple(f"pooler_{name}" for name in "qkv")
SIGLIP_VISION = Family(
    name="siglip_vision_model",
    base=BASE,
    fields=(
        *FIELDS,
        ImageField(class_token=False),
        Choice("vision_use_head", True, "output.pooler", {True: "attention", False: None}),
    ),
    table=NameTable(
        (
            POSITIONS,
            Module("post_layernorm", "final_norm", "norm"),
            Module("head.attention.in_proj_", QKV),
            Module("head.attention.out_proj", "pooler_o"),
            Module("head.layernorm", "pooler_norm", "norm"),
            Module("head.mlp.fc1", "pooler_up"),
            Module("head.mlp.fc2", "pooler_down"),
            Module("head.probe", "pooler_query", "plain", axes=1),
        ),
        (LAYERS,),
        special=image_entries(PATCHES),
    ),
    prefix="vision_model.",
    other_attributes=OtherAttributes(written={"architectures": ["SiglipVisionModel"]}),
    unread=UnreadTensors(always=IGNORED),
)
