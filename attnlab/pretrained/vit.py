"""ViT (Dosovitskiy et al. 2021, arXiv 2010.11929), in the names of Hugging Face."""

import dataclasses

from attnlab.models.config import ModelConfig
from attnlab.models.specs import Embedding, Images, Norm
from attnlab.pretrained.attributes import JSON, Attribute, shown
from attnlab.pretrained.bert import BASE, FIELDS, QKV
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import BIASES, Choice, Field, Source, Values, changed, value
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.weights import Entry

CLASSIFIER = "ViTForImageClassification"


def _sides(given: JSON, name: str, default: int) -> list[int]:
    """Height and width, which may be one number."""
    said = default if given[name] is None else given[name]
    sides = said if isinstance(said, list) else [said, said]
    if len(sides) != 2 or not all(type(side) is int and 0 < side < 2**16 for side in sides):
        raise ValueError(
            f"config.json: {name} = {shown(said)} should be a whole number, or height and width, "
            "from 1 to 65,535"
        )
    return sides


class _Images(Field):
    """Sizes of images and patches."""

    attributes = (
        Attribute("image_size"),
        Attribute("patch_size"),
        Attribute("num_channels", 3),
        Attribute("encoder_stride", None),  # of a decoder to pixels, which no model has here
    )

    def read(self, given: JSON, source: Source) -> Values:
        height, width = _sides(given, "image_size", 224)
        patch_height, patch_width = _sides(given, "patch_size", 16)
        try:
            images = Images(
                height=height,
                width=width,
                channels=given["num_channels"],
                patch_height=patch_height,
                patch_width=patch_width,
            )
        except ValueError as error:
            raise ValueError(f"config.json: image_size = {[height, width]}: {error}") from None
        return {
            "embedding.images": images,
            "vocab_size": images.num_features,
            "max_len": images.num_tokens,
        }

    def write(self, config: ModelConfig) -> JSON:
        images = config.embedding.images
        if images is None:
            raise ValueError("it reads images, and this model has none")
        return {
            "image_size": _short(images.height, images.width),
            "patch_size": _short(images.patch_height, images.patch_width),
            "num_channels": images.channels,
            "encoder_stride": images.patch_height,
        }


def _short(height: int, width: int) -> int | list[int]:
    """One number for a square."""
    return height if height == width else [height, width]


class _Head(Field):
    """Pooler or classifier: what the architecture needs, or whose tensors are there."""

    attributes = (
        Attribute("pooler_output_size", None, nullable=True, json_type=int, least=0),
        Attribute("id2label", None, nullable=True, json_type=dict),
    )

    def read(self, given: JSON, source: Source) -> Values:
        if given["pooler_output_size"] not in (None, 0, given["hidden_size"]):
            raise ValueError(
                f"config.json: pooler_output_size = {given['pooler_output_size']!r} is not "
                f"supported, only hidden_size = {given['hidden_size']}"
            )
        if source.architecture == CLASSIFIER or "classifier.weight" in source.tensors:
            labels = given["id2label"]
            count = 2 if labels is None else len(labels)
            return {"output.pooler": "first_plain", "output.num_classes": count}
        return {"output.pooler": "first" if "pooler.dense.weight" in source.tensors else None}

    def write(self, config: ModelConfig) -> JSON:
        given: JSON = {"pooler_output_size": config.width, "architectures": ["ViTModel"]}
        if config.output.pooler != "first_plain":
            return given
        labels = {str(i): f"LABEL_{i}" for i in range(config.output.num_classes)}
        back = {label: int(i) for i, label in labels.items()}
        return given | {"id2label": labels, "label2id": back, "architectures": [CLASSIFIER]}


def _embedding(config: ModelConfig) -> list[Entry]:
    """The table holds the projection of the patches, the class token and the bias."""
    images, at, table = config.embedding.images, "embeddings.", (("embedding",),)
    assert images is not None
    pixels, width = config.vocab_size - 2, config.width
    window = (width, images.channels, images.patch_height, images.patch_width)
    projection = f"{at}patch_embeddings.projection"
    return [
        Entry(f"{projection}.weight", table, slice(pixels), "conv2d", stored=window),
        Entry(f"{at}cls_token", table, pixels, stored=(1, 1, width)),
        Entry(f"{projection}.bias", table, pixels + 1),
        Entry(f"{at}position_embeddings", (("positions",),), stored=(1, config.max_len, width)),
    ]


VIT = Family(
    name="vit",
    base=dataclasses.replace(BASE, norm=Norm(), embedding=Embedding()),
    fields=changed(
        FIELDS,
        value("hidden_dropout_prob", 0.0, "dropout.rate"),
        value("attention_probs_dropout_prob", 0.0, "dropout.attention"),
        Choice("qkv_bias", True, "heads.biases", {True: BIASES, False: ("o",)}),
        _Images(),
        _Head(),
        without=("vocab_size", "max_position_embeddings", "type_vocab_size"),
    ),
    table=NameTable(
        modules=(
            Module("layernorm", "final_norm", "norm"),
            Module("pooler.dense", "pooler"),
            Module("classifier", "classifier"),
        ),
        layers=(
            Layers(
                "encoder.layer.{}.",
                (
                    *linears("attention.attention.", "attention", **QKV),
                    Module("attention.output.dense", "attention.o"),
                    Module("layernorm_before", "attention.norm", "norm"),
                    *linears("", "ffn", up="intermediate.dense", down="output.dense"),
                    Module("layernorm_after", "ffn.norm", "norm"),
                ),
            ),
        ),
        special=_embedding,
    ),
    prefix="vit.",
    task_modules=("classifier.",),
    fixed={"pooler_act": "tanh"},
)
