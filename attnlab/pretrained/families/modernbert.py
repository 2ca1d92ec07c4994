"""ModernBERT (Warner et al. 2024, arXiv 2412.13663), in the names of Hugging Face."""

import dataclasses

from attnlab.models import Dropout, Norm
from attnlab.models.config import ModelConfig
from attnlab.models.specs import NormPosition
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.bert import BERT, MaskedHead
from attnlab.pretrained.name_table import PACKED, Layers, Module
from attnlab.pretrained.rotary import FULL, SLIDING, LayerTypes, overrides_of, types_of
from attnlab.pretrained.tasks import Task

FIRST: NormPosition = "pre_ffn"


class _LayerTypes(LayerTypes):
    """A window to both sides in some layers; the first layer reads embeddings that are normalized,
    and has no norm before self-attention."""

    @property
    def window_attribute(self) -> Attribute:
        return Attribute("local_attention", self.default_window)

    def window(self, attributes: JSON) -> int:
        return int(attributes["local_attention"]) // 2

    def write_window(self, window: int | None) -> JSON:
        return {"local_attention": self.default_window if window is None else 2 * window or 1}

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        if attributes["rope_scaling"] is not None:
            # Some versions of transformers pass it over, others scale all layers.
            why = "is not supported, only rope_parameters of each type of layer"
            raise bad_value("rope_scaling", attributes["rope_scaling"], why)
        values = super().read(attributes, source)
        first, *rest = overrides_of(values, attributes["num_hidden_layers"])
        if not rest:
            return values | {"norm.position": FIRST}
        norm = Norm(position=FIRST, eps=attributes["norm_eps"], bias=attributes["norm_bias"])
        return values | types_of([dataclasses.replace(first, norm=norm), *rest])

    def write(self, config: ModelConfig) -> JSON:
        return super().write(config) | {"rope_scaling": None}


def _types(attributes: JSON) -> list[str]:
    every = attributes["global_attn_every_n_layers"]
    return [SLIDING if i % every else FULL for i in range(attributes["num_hidden_layers"])]


HEAD = MaskedHead(
    stem="ModernBert",
    transform="head.dense",
    norm="head.norm",
    lm_head="decoder",
    embedding="embeddings.tok_embeddings",
    activation=None,
)
POOLERS: JSON = {"cls": "first_plain", "mean": "mean"}


class _Pooling(f.Field):
    """What classifies a text: its first token, or the mean of all."""

    attributes = (Attribute("classifier_pooling", "cls"),)

    def write(self, config: ModelConfig) -> JSON:
        return {"classifier_pooling": "mean" if config.output.pooler == "mean" else "cls"}


def _task(end: str, pooler: object, num_classes: int = 0) -> Task:
    """A classifier behind the transform of the masked-LM head."""
    modules = (Module(HEAD.transform, "transform"), Module(HEAD.norm, "transform_norm", "norm"))
    output = {
        "pooler": pooler,
        "transform": lambda said: f.ACTIVATIONS[said["classifier_activation"]],
        "transform_bias": lambda said: said["classifier_bias"],
    }
    return Task(
        end, (*modules, Module("classifier", "classifier")), output, num_classes=num_classes
    )


TASKS = (
    _task("ForTokenClassification", "each"),
    _task("ForQuestionAnswering", "each", 2),
    _task(
        "ForSequenceClassification",
        lambda said: f.choose("classifier_pooling", said["classifier_pooling"], POOLERS),
    ),
)
MODULES = (
    Module("embeddings.tok_embeddings", "embedding", "table"),
    Module("embeddings.norm", "embedding_norm", "norm"),
    Module("final_norm", "final_norm", "norm"),
)
LAYERS = Layers(
    "layers.{}.",
    (
        Module("attn.Wqkv", PACKED),
        Module("attn.Wo", "attention.o"),
        Module("attn_norm", "attention.norm", "norm"),
        Module("mlp.Wi", ("ffn.gate", "ffn.up")),
        Module("mlp.Wo", "ffn.down"),
        Module("mlp_norm", "ffn.norm", "norm"),
    ),
)
MODERNBERT = BERT.variant(
    "modernbert",
    f.Choice("classifier_activation", "output.transform", f.ACTIVATIONS),
    f.value("classifier_bias", bool, "output.transform_bias"),
    f.value("decoder_bias", bool, "output.bias"),
    HEAD,
    *f.numbers("norm_eps embedding_dropout mlp_dropout"),
    f.value("attention_dropout", float, "dropout.rate", "dropout.attention"),
    f.activation("hidden_activation", gated=True),
    f.Choice("norm_bias", "norm.bias", {True: None, False: False}),
    f.biases("attention_bias"),
    f.value("mlp_bias", bool, "ffn.bias"),
    _LayerTypes(
        default_window=128,
        default_types=_types,
        more=(
            Attribute("global_attn_every_n_layers", 3),
            Attribute("global_rope_theta"),
            Attribute("local_rope_theta"),
        ),
        bases={FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)},
    ),
    # How it was trained or is run; the rest is of classifiers.
    f.Words(
        ignored="initializer_cutoff_factor deterministic_flash_attn sparse_prediction "
        "layer_norm_eps sparse_pred_ignore_index reference_compile repad_logits_with_grad"
    ),
    _Pooling(),
    without="hidden_act type_vocab_size hidden_dropout_prob attention_probs_dropout_prob",
    table=HEAD.table(MODULES, LAYERS, "model."),
    tasks=TASKS,
    norm=Norm(bias=False),
    dropout=Dropout(places=("embeddings", "attention")),
)
