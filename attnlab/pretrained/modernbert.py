"""ModernBERT (Warner et al. 2024, arXiv 2412.13663), in the names of Hugging Face."""

import dataclasses

from attnlab.models.config import ModelConfig
from attnlab.models.specs import Dropout, Norm, NormPosition, Positions
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.bert import BASE, MaskedHead, encoder
from attnlab.pretrained.common_fields import activation, biases, numbers
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import Choice, Source, Values, value
from attnlab.pretrained.layer_types import FULL, SLIDING, TypedRotary, overrides_of, types_of
from attnlab.pretrained.name_table import PACKED, Layers, Module

FIRST: NormPosition = "pre_ffn"


class _LayerTypes(TypedRotary):
    """A window to both sides in some layers; the first layer reads embeddings that are normalized,
    and has no norm before self-attention."""

    @property
    def window_attribute(self) -> Attribute:
        return Attribute("local_attention", self.default_window)

    def window(self, attributes: JSON) -> int:
        return int(attributes["local_attention"]) // 2

    def write_window(self, window: int | None) -> JSON:
        return {"local_attention": self.default_window if window is None else 2 * window}

    def positions(self, attributes: JSON) -> dict[str, Positions]:
        if attributes["rope_scaling"] is not None:
            # Some versions of transformers pass it over, others scale all layers.
            why = "is not supported, only rope_parameters of each type of layer"
            raise bad_value("rope_scaling", attributes["rope_scaling"], why)
        return super().positions(attributes)

    def write_positions(self, config: ModelConfig) -> JSON:
        return super().write_positions(config) | {"rope_scaling": None}

    def read(self, attributes: JSON, source: Source) -> Values:
        values = super().read(attributes, source)
        first, *rest = overrides_of(values, attributes["num_hidden_layers"])
        if not rest:
            return values | {"norm.position": FIRST}
        norm = Norm(position=FIRST, eps=attributes["norm_eps"], bias=attributes["norm_bias"])
        return values | types_of([dataclasses.replace(first, norm=norm), *rest])

    def write(self, config: ModelConfig) -> JSON:
        positions = [config.stacks[name].norm.position for name in config.layer_names]
        if positions != [FIRST] + ["pre"] * (config.num_layers - 1):
            raise ValueError(f"norm.position must be {FIRST!r} in the first layer alone")
        return super().write(config)


def _types(attributes: JSON) -> list[str]:
    every = attributes["global_attn_every_n_layers"]
    return [SLIDING if i % every else FULL for i in range(attributes["num_hidden_layers"])]


# How it was trained or is run; the rest is of classifiers.
OTHERS = (
    "initializer_cutoff_factor", "deterministic_flash_attn", "sparse_prediction", "layer_norm_eps",
    "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "classifier_pooling",
)  # fmt: skip
HEAD = MaskedHead(
    name="ModernBert",
    transform="head.dense",
    norm="head.norm",
    lm_head="decoder",
    embedding="embeddings.tok_embeddings",
    activation=Attribute("classifier_activation", "gelu"),
    bias=Attribute("decoder_bias", True),
    transform_bias=Attribute("classifier_bias", False),
)
LIKE_BERT = encoder(
    "modernbert",
    HEAD,
    (
        *numbers(vocab_size=50368, hidden_size=768, num_hidden_layers=22, num_attention_heads=12),
        *numbers(intermediate_size=1152, max_position_embeddings=8192, norm_eps=1e-5),
        *numbers(embedding_dropout=0.0, mlp_dropout=0.0),
        value("attention_dropout", 0.0, "dropout.rate", "dropout.attention"),
        activation("hidden_activation", "gelu", gated=True),
        Choice("norm_bias", False, "norm.bias", {True: None, False: False}),
        biases("attention_bias", False),
        value("mlp_bias", False, "ffn.bias"),
        _LayerTypes(
            default_window=128,
            default_types=_types,
            more=(
                Attribute("global_attn_every_n_layers", 3),
                Attribute("global_rope_theta"),
                Attribute("local_rope_theta"),
                Attribute("rope_theta"),
            ),
            bases={FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)},
        ),
    ),
    base=dataclasses.replace(
        BASE, norm=Norm(bias=False), dropout=Dropout(places=("embeddings", "attention"))
    ),
    modules=(
        Module("embeddings.tok_embeddings", "embedding", "table"),
        Module("embeddings.norm", "embedding_norm", "norm"),
        Module("final_norm", "final_norm", "norm"),
    ),
    layers=Layers(
        "layers.{}.",
        (
            Module("attn.Wqkv", PACKED),
            Module("attn.Wo", "attention.o"),
            Module("attn_norm", "attention.norm", "norm"),
            Module("mlp.Wi", ("ffn.gate", "ffn.up")),
            Module("mlp.Wo", "ffn.down"),
            Module("mlp_norm", "ffn.norm", "norm"),
        ),
    ),
    prefix="model.",
    other_attributes=OtherAttributes(ignored=OTHERS),
)
# There are no checkpoints from before transformers, with its other names and tensors.
MODERNBERT = dataclasses.replace(LIKE_BERT, renamed=(), unread=HEAD.unread)
