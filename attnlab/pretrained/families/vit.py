"""ViT (Dosovitskiy et al. 2021, arXiv 2010.11929) and DINOv2 (Oquab et al. 2023, arXiv 2304.07193),
in the names of Hugging Face.
"""

import dataclasses
from collections.abc import Callable

from attnlab.models import Dropout, Embedding, Images, Norm, OutputHead
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.bert import BERT, FFN_NAMES, QKV
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.tasks import Task
from attnlab.pretrained.weights import Entry


def _sides(attributes: JSON, name: str, default: int) -> list[int]:
    """Height and width, which may be one number."""
    said = default if attributes[name] is None else attributes[name]
    sides = said if isinstance(said, list) else [said, said]
    if len(sides) != 2 or not all(type(side) is int and 0 < side < 2**16 for side in sides):
        why = "should be a whole number, or height and width, from 1 to 65,535"
        raise bad_value(name, said, why)
    return sides


def _short(height: int, width: int) -> int | list[int]:
    """One number for a square."""
    return height if height == width else [height, width]


@dataclasses.dataclass(frozen=True)
class _Images(f.Field):
    """Sizes of images and patches.

    Attributes:
      patch_size: where config.json has none.
      mask_token: a tensor that is there if the model has a vector for hidden patches.
      has_mask: an attribute that says whether it has.
    """

    patch_size: int = 16
    mask_token: str = ""
    has_mask: str = ""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        # encoder_stride is of a decoder to pixels, which no model has here.
        own = Attribute(self.has_mask, True) if self.has_mask else Attribute("encoder_stride")
        sides = Attribute("image_size"), Attribute("patch_size")
        return (*sides, Attribute("num_channels", 3), own)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        height, width = _sides(attributes, "image_size", 224)
        patch_height, patch_width = _sides(attributes, "patch_size", self.patch_size)
        try:
            images = Images(
                height=height,
                width=width,
                channels=attributes["num_channels"],
                patch_height=patch_height,
                patch_width=patch_width,
                crop=bool(height % patch_height or width % patch_width),
                class_token=True,
                bias=True,
                mask_token=attributes.get(self.has_mask, self.mask_token in source.tensors),
            )
        except ValueError as error:
            raise bad_value("image_size", [height, width], f"is not supported: {error}") from None
        return {
            "embedding.images": images,
            "vocab_size": images.num_features,
            "max_len": images.num_tokens,
        }

    def write(self, config: ModelConfig) -> JSON:
        images = config.embedding.images
        if images is None:
            raise ValueError("it reads images, and this model has none")
        mask = {self.has_mask: images.mask_token}
        return (mask if self.has_mask else {"encoder_stride": images.patch_height}) | {
            "image_size": _short(images.height, images.width),
            "patch_size": _short(images.patch_height, images.patch_width),
            "num_channels": images.channels,
        }


def _embeddings(*mask_axes: int) -> Callable[[ModelConfig], list[Entry]]:
    """The tensors of the embedding table; `mask_axes`: axes of 1 of the mask token, in front."""
    at, table = "embeddings.", (("embedding",),)
    projection = f"{at}patch_embeddings.projection"
    marks = {"class": (f"{at}cls_token", (1, 1)), "mask": (f"{at}mask_token", mask_axes)}

    def entries(config: ModelConfig) -> list[Entry]:
        images, width = config.embedding.images, config.width
        assert images is not None
        window = (width, images.channels, images.patch_height, images.patch_width)
        pixels, stored = slice(images.num_pixels), (1, config.max_len, width)
        made = [Entry(f"{projection}.weight", table, pixels, "conv2d", stored=window)]
        for place, mark in enumerate(images.marks, images.num_pixels):
            name, axes = marks.get(mark, (f"{projection}.bias", ()))
            made.append(Entry(name, table, place, stored=(*axes, width)))
        return [*made, Entry(f"{at}position_embeddings", (("positions",),), stored=stored)]

    return entries


class _Head(f.Field):
    """A pooler, if its tensors are there."""

    stem = "ViT"
    attributes = (Attribute("pooler_output_size", kind=int, least=0),)
    architectures = ("ViTModel",)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        if attributes["pooler_output_size"] not in (None, 0, attributes["hidden_size"]):
            why = f"is not supported, only hidden_size = {attributes['hidden_size']}"
            raise bad_value("pooler_output_size", attributes["pooler_output_size"], why)
        return {"output.pooler": "first" if "pooler.dense.weight" in source.tensors else None}

    def write(self, config: ModelConfig) -> JSON:
        return {"pooler_output_size": config.width, "architectures": ["ViTModel"]}


HEADS = (
    *linears("attention.attention.", "attention", **QKV),
    Module("attention.output.dense", "attention.o"),
)
VIT = BERT.variant(
    "vit",
    f.Choice("qkv_bias", "heads.biases", {True: f.BIASES, False: ("o",)}),
    _Images(mask_token="embeddings.mask_token"),
    _Head(),
    f.Choice("pooler_act", "output.pooler_activation", f.ACTIVATIONS),
    without="vocab_size max_position_embeddings type_vocab_size tie_word_embeddings",
    table=NameTable(
        modules=(Module("layernorm", "final_norm", "norm"), Module("pooler.dense", "pooler")),
        layers=(
            Layers(
                "encoder.layer.{}.",
                (
                    *HEADS,
                    Module("layernorm_before", "attention.norm", "norm"),
                    *linears("", "ffn", **FFN_NAMES),
                    Module("layernorm_after", "ffn.norm", "norm"),
                ),
            ),
        ),
        special=_embeddings(1, 1),
        prefix="vit.",
    ),
    tasks=(
        Task(
            "ForImageClassification",
            (Module("classifier", "classifier"),),
            {"pooler": "first_plain"},
        ),
    ),
    norm=Norm(),
    embedding=Embedding(),
)


class _FFN(f.Field):
    """Its width is mlp_ratio times that of the model; two thirds of it, up to a multiple of 8,
    where there is a gate."""

    attributes = (
        Attribute("mlp_ratio", 4, float),
        Attribute("use_swiglu_ffn", False),
        Attribute("hidden_act", "gelu"),
    )

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        width = int(attributes["hidden_size"] * attributes["mlp_ratio"])
        activation = f.choose("hidden_act", attributes["hidden_act"], f.ACTIVATIONS)
        if not attributes["use_swiglu_ffn"]:
            return {"ffn.width": width, "ffn.activation": activation}
        return {"ffn.width": (int(width * 2 / 3) + 7) // 8 * 8, "ffn.activation": "gated_silu"}

    def write(self, config: ModelConfig) -> JSON:
        width, gated = config.ffn.width, config.ffn.activation == "gated_silu"
        act = {"hidden_act": "gelu"} if gated else f.activation("hidden_act").write(config)
        for ratio in (width / config.width, 1.5 * width / config.width, 4):
            attributes = act | {
                "hidden_size": config.width,
                "mlp_ratio": int(ratio) if ratio == int(ratio) else ratio,
                "use_swiglu_ffn": gated,
            }
            if self.read(attributes, f.Source())["ffn.width"] == width:
                return attributes
        raise ValueError(f"no mlp_ratio makes ffn.width {width} of width {config.width}")


DINOV2 = VIT.variant(
    "dinov2",
    f.value("layerscale_value", float, "norm.layer_scale"),
    _FFN(),
    _Images(patch_size=14, has_mask="use_mask_token"),
    f.Words(
        # Dropped paths are of training; the rest says what a backbone returns.
        ignored="drop_path_rate stage_names out_features out_indices apply_layernorm "
        "reshape_hidden_states intermediate_size",
        written={"architectures": ["Dinov2Model"]},
    ),
    without="pooler_output_size pooler_act",
    table=NameTable(
        modules=(Module("layernorm", "final_norm", "norm"),),
        layers=(
            Layers(
                "encoder.layer.{}.",
                (
                    *HEADS,
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
        prefix="dinov2.",
    ),
    tasks=(),
    norm=Norm(layer_scale=1.0),
    dropout=Dropout(places=("embeddings",)),
    output=OutputHead(kind="none", pooler="first_plain"),  # the class token
)
