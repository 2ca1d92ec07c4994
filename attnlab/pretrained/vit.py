"""ViT (Dosovitskiy et al. 2021, arXiv 2010.11929), DeiT (Touvron et al. 2021) and DINOv2 (Oquab et
al. 2023, arXiv 2304.07193), in the names of Hugging Face.
"""

import dataclasses
from collections.abc import Callable

from attnlab.models.config import ModelConfig
from attnlab.models.specs import Embedding, Norm, OutputHead
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.bert import BASE, FIELDS, QKV
from attnlab.pretrained.common_fields import ACTIVATIONS, BIASES, activation, numbers
from attnlab.pretrained.family import Family, OtherAttributes
from attnlab.pretrained.fields import Choice, Field, Source, Values, changed, choose, value
from attnlab.pretrained.image_fields import ImageField, image_entries
from attnlab.pretrained.metadata import metadata_of
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.weights import Entry


@dataclasses.dataclass(frozen=True)
class _Images(ImageField):
    """Sizes, and the stride of a decoder to pixels, which no model has here."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (*super().attributes, Attribute("encoder_stride", None))

    def write(self, config: ModelConfig) -> JSON:
        attributes = super().write(config)
        images = config.embedding.images
        return attributes | {"encoder_stride": images.patch_height if images else None}


class _Head(Field):
    """Pooler or classifier: what the architecture needs, or whose tensors are there."""

    attributes = (
        Attribute("pooler_output_size", None, nullable=True, json_type=int, least=0),
        Attribute("id2label", None, nullable=True, json_type=dict),
    )
    architectures = ("ViTModel", "ViTForImageClassification")

    def read(self, attributes: JSON, source: Source) -> Values:
        if attributes["pooler_output_size"] not in (None, 0, attributes["hidden_size"]):
            why = f"is not supported, only hidden_size = {attributes['hidden_size']}"
            raise bad_value("pooler_output_size", attributes["pooler_output_size"], why)
        if source.architecture.endswith("Classification") or "classifier.weight" in source.tensors:
            labels = attributes["id2label"]  # 2 without it, as in transformers
            classes = 2 if labels is None else len(labels)
            return {"output.pooler": "first_plain", "output.num_classes": classes}
        return {"output.pooler": "first" if "pooler.dense.weight" in source.tensors else None}

    def write(self, config: ModelConfig) -> JSON:
        attributes: JSON = {"pooler_output_size": config.width, "architectures": ["ViTModel"]}
        if config.output.pooler != "first_plain":
            return attributes
        # The names that transformers gives classes without one.
        labels = {str(i): f"LABEL_{i}" for i in range(config.output.num_classes)}
        kept = metadata_of(config).get("config", {})
        if len(kept.get("id2label") or {}) == len(labels):
            labels = kept["id2label"]
        return attributes | {
            "id2label": labels,
            "label2id": {label: int(i) for i, label in labels.items()},
            "architectures": ["ViTForImageClassification"],
        }


BLOCK = (
    *linears("attention.attention.", "attention", **QKV),
    Module("attention.output.dense", "attention.o"),
)
VIT_LAYERS = Layers(
    "encoder.layer.{}.",
    (
        *BLOCK,
        Module("layernorm_before", "attention.norm", "norm"),
        *linears("", "ffn", up="intermediate.dense", down="output.dense"),
        Module("layernorm_after", "ffn.norm", "norm"),
    ),
)


def _embeddings(*mask_axes: int) -> Callable[[ModelConfig], list[Entry]]:
    """The tensors of the embedding table; `mask_axes`: axes of 1 of the mask token, in front."""
    return image_entries(
        "embeddings.patch_embeddings.projection",
        "embeddings.position_embeddings",
        class_token=("embeddings.cls_token", (1, 1)),
        mask_token=("embeddings.mask_token", mask_axes),
    )


VIT_FIELDS = changed(
    FIELDS,
    *numbers(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    Choice("qkv_bias", True, "heads.biases", {True: BIASES, False: ("o",)}),
    without=("vocab_size", "max_position_embeddings", "type_vocab_size"),
)
VIT = Family(
    name="vit",
    base=dataclasses.replace(BASE, norm=Norm(), embedding=Embedding()),
    fields=(*VIT_FIELDS, _Images(mask_token="embeddings.mask_token"), _Head()),
    table=NameTable(
        modules=(
            Module("layernorm", "final_norm", "norm"),
            Module("pooler.dense", "pooler"),
            Module("classifier", "classifier"),
        ),
        layers=(VIT_LAYERS,),
        special=_embeddings(1, 1),
    ),
    prefix="vit.",
    task_modules=("classifier.",),
    other_attributes=OtherAttributes(fixed={"pooler_act": "tanh"}),
)


class _FFN(Field):
    """Its width is mlp_ratio times that of the model; two thirds of it, up to a multiple of 8,
    where there is a gate."""

    attributes = (
        Attribute("mlp_ratio", 4, json_type=float),
        Attribute("use_swiglu_ffn", False),
        Attribute("hidden_act", "gelu"),
    )

    def read(self, attributes: JSON, source: Source) -> Values:
        width = int(attributes["hidden_size"] * attributes["mlp_ratio"])
        activation = choose("hidden_act", attributes["hidden_act"], ACTIVATIONS)
        if not attributes["use_swiglu_ffn"]:
            return {"ffn.width": width, "ffn.activation": activation}
        return {"ffn.width": (int(width * 2 / 3) + 7) // 8 * 8, "ffn.activation": "gated_silu"}

    def write(self, config: ModelConfig) -> JSON:
        width, gated = config.ffn.width, config.ffn.activation == "gated_silu"
        for ratio in (width / config.width, 1.5 * width / config.width, 4):
            attributes: JSON = {
                "hidden_size": config.width,
                "mlp_ratio": int(ratio) if ratio == int(ratio) else ratio,
                "use_swiglu_ffn": gated,
                "hidden_act": "gelu",
            }
            if not gated:
                attributes |= activation("hidden_act", "gelu").write(config)
            if self.read(attributes, Source())["ffn.width"] == width:
                return attributes
        raise ValueError(f"no mlp_ratio makes ffn.width {width} of width {config.width}")


DINOV2 = Family(
    name="dinov2",
    base=dataclasses.replace(
        VIT.base,
        norm=Norm(layer_scale=1.0),
        output=OutputHead(kind="none", pooler="first_plain"),  # the class token
    ),
    fields=(
        *changed(
            VIT_FIELDS,
            *numbers(layer_norm_eps=1e-6),
            value("layerscale_value", 1.0, "norm.layer_scale"),
            without=("intermediate_size", "hidden_act"),
        ),
        _FFN(),
        ImageField(patch_size=14, has_mask="use_mask_token"),
    ),
    table=NameTable(
        modules=(Module("layernorm", "final_norm", "norm"),),
        layers=(
            Layers(
                "encoder.layer.{}.",
                (
                    *BLOCK,
                    Module("norm1", "attention.norm", "norm"),
                    Module("layer_scale1.lambda1", "attention.layer_scale.scale", "plain"),
                    Module("mlp.weights_in", ("ffn.gate", "ffn.up"), only_with="gate"),
                    Module("mlp.weights_out", "ffn.down", only_with="gate"),
                    *(
                        one._replace(only_without="gate")
                        for one in linears("mlp.", "ffn", up="fc1", down="fc2")
                    ),
                    Module("norm2", "ffn.norm", "norm"),
                    Module("layer_scale2.lambda1", "ffn.layer_scale.scale", "plain"),
                ),
            ),
        ),
        special=_embeddings(1),
    ),
    prefix="dinov2.",
    other_attributes=OtherAttributes(
        # Dropped paths are of training; the rest says what a backbone returns.
        ignored=(
            *("drop_path_rate", "stage_names", "out_features", "out_indices", "apply_layernorm"),
            *("reshape_hidden_states", "intermediate_size"),
        ),
        written={"architectures": ["Dinov2Model"]},
    ),
)
