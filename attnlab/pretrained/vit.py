"""ViT (Dosovitskiy et al. 2021, arXiv 2010.11929), in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.model.images import Images, read_images
from attnlab.pretrained.bert import layer_rows
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.rows import Row, dense, norm
from attnlab.pretrained.settings import SIZES, Null, activation, shown, their_activation

OF_VIT = {ours: theirs for ours, theirs in SIZES.items() if ours not in ("vocab_size", "max_len")}
SETTINGS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "image_size": None,
    "patch_size": None,
    "num_channels": 3,
    "qkv_bias": True,
    "pooler_output_size": Null(int),
    "encoder_stride": None,  # of a readout that gives pixels back, which has no place here
    "id2label": Null(dict),
}
CLASSIFIER = "ViTForImageClassification"


def _sides(s: dict[str, Any], name: str, default: int) -> list[int]:
    """Height and width, which may be one number."""
    said = default if s[name] is None else s[name]
    sides = said if isinstance(said, list) else [said, said]
    if len(sides) != 2 or not all(type(side) is int and 0 < side < 2**16 for side in sides):
        raise ValueError(
            f"config.json: {name} = {shown(said)} should be a whole number, or height and width, "
            "from 1 to 65,535"
        )
    return sides


def _images(s: dict[str, Any]) -> Images:
    height, width = _sides(s, "image_size", 224)
    p, q = _sides(s, "patch_size", 16)
    try:
        return read_images(str(Images(height, width, s["num_channels"], (p, q))))
    except ValueError as error:
        raise ValueError(f"config.json: image_size = {[height, width]}: {error}") from None


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    if s["pooler_output_size"] not in (None, 0, s["hidden_size"]):
        raise ValueError(
            f"config.json: pooler_output_size = {s['pooler_output_size']!r} is not supported, only "
            f"hidden_size = {s['hidden_size']}"
        )
    images = _images(s)
    pooler = "first" if "pooler.dense.weight" in tensors else None
    classes = 0
    if architecture == CLASSIFIER or "classifier.weight" in tensors:
        pooler, classes = "first_plain", 2 if s["id2label"] is None else len(s["id2label"])
    return dict(
        kind="encoder",
        **{ours: s[theirs] for ours, theirs in OF_VIT.items()},
        images=str(images),
        vocab_size=images.num_features,
        max_len=images.num_tokens,
        attention_biases="qkvo" if s["qkv_bias"] else "o",
        norm="pre",
        norm_eps=s["layer_norm_eps"],
        activation=activation(s, "hidden_act"),
        readout="none",
        pooler=pooler,
        pooled_classes=classes,
        dropout_rate=s["hidden_dropout_prob"],
        attention_dropout_rate=s["attention_probs_dropout_prob"],
        init_std=0.02,
    )


def _short(height: int, width: int) -> int | list[int]:
    """One number for a square."""
    return height if height == width else [height, width]


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    if c.images is None:
        raise ValueError("it reads images, and this model has none")
    images = read_images(c.images)
    settings = dict(
        **{theirs: getattr(c, ours) for ours, theirs in OF_VIT.items()},
        image_size=_short(images.height, images.width),
        patch_size=_short(*images.patch),
        num_channels=images.channels,
        qkv_bias="q" in c.attention_biases,
        layer_norm_eps=c.norm_eps,
        hidden_act=their_activation(c.activation),
        hidden_dropout_prob=c.dropout_rate,
        attention_probs_dropout_prob=c.attention_dropout_rate,
        pooler_output_size=c.width,
        encoder_stride=images.patch[0],
    )
    if c.pooler != "first_plain":
        return settings, "ViTModel"
    labels = {str(i): f"LABEL_{i}" for i in range(c.pooled_classes)}
    return settings | dict(
        id2label=labels, label2id={label: int(i) for i, label in labels.items()}
    ), CLASSIFIER


NAMES = {
    "q": "attention.attention.query",
    "k": "attention.attention.key",
    "v": "attention.attention.value",
    "o": "attention.output.dense",
    "attention": "layernorm_before",
    "up": "intermediate.dense",
    "down": "output.dense",
    "ffn": "layernorm_after",
}


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    images, at, table = read_images(c.images or ""), "embeddings.", (("embedding",),)
    whole, bias = c.vocab_size - 2, c.vocab_size - 1
    window = (c.width, images.channels, *images.patch)
    rows = [
        Row(
            f"{at}patch_embeddings.projection.weight", table, slice(whole), "conv2d", stored=window
        ),
        Row(f"{at}cls_token", table, whole, stored=(1, 1, c.width)),
        Row(f"{at}patch_embeddings.projection.bias", table, bias),
        Row(f"{at}position_embeddings", (("positions",),), stored=(1, c.max_len, c.width)),
    ]
    rows += layer_rows(c, NAMES, "encoder.layer.{}.") + norm("layernorm", "final_norm")
    rows += dense("pooler.dense", "pooler") if c.pooler == "first" else []
    return rows + (dense("classifier", "classes") if c.pooled_classes else [])


VIT = Family(
    name="vit",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    prefix="vit.",
    readouts=("classifier.",),
    fixed={"pooler_act": "tanh"},
)
