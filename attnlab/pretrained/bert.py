"""BERT (Devlin et al. 2018), in the names of Hugging Face."""

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Embedding, Init, Norm, OutputHead
from attnlab.pretrained.family import Family, UnreadTensors
from attnlab.pretrained.fields import ACTIVATIONS, BIASES, Choice, Field, MaskedHead, sizes, value
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears

BASE = ModelConfig(
    kind="encoder",
    heads=Standard(num_heads=4, biases=BIASES),
    norm=Norm(position="post"),
    embedding=Embedding(norm=True),
    output=OutputHead(kind="none"),
    init=Init(std=0.02),
)
FIELDS: tuple[Field, ...] = (
    *sizes(vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    *sizes(intermediate_size=3072, max_position_embeddings=512),
    Choice("hidden_act", "gelu", "ffn.activation", ACTIVATIONS),
    value("hidden_dropout_prob", 0.1, "dropout.rate"),
    value("attention_probs_dropout_prob", 0.1, "dropout.attention"),
    value("type_vocab_size", 2, "embedding.token_types", least=0),
    value("layer_norm_eps", 1e-12, "norm.eps"),
)
EMBEDDINGS = (
    Module("embeddings.word_embeddings", "embedding", "table"),
    Module("embeddings.position_embeddings", "positions", "table"),
    Module("embeddings.token_type_embeddings", "token_types", "table"),
    Module("embeddings.LayerNorm", "embedding_norm", "norm"),
)
QKV = {"q": "query", "k": "key", "v": "value"}
LAYERS = Layers(
    "encoder.layer.{}.",
    (
        *linears("attention.self.", "attention", **QKV),
        Module("attention.output.dense", "attention.o"),
        Module("attention.output.LayerNorm", "attention.norm", "norm"),
        *linears("", "ffn", up="intermediate.dense", down="output.dense"),
        Module("output.LayerNorm", "ffn.norm", "norm"),
    ),
)
OLD_NORMS = ((".gamma", ".weight"), (".beta", ".bias"))
"""Endings of norms in checkpoints made from TensorFlow's."""


def masked_head(transform: str, norm: str, tied_bias: str, decoder: str) -> tuple[Module, ...]:
    """The modules of a masked-LM head; a tied one has only a bias, in a module of its own."""
    return (
        Module(transform, "transform"),
        Module(norm, "transform_norm", "norm"),
        Module(tied_bias, "lm_head_bias", "bias", only_without="lm_head"),
        Module(decoder, "lm_head"),
    )


HEAD = MaskedHead(
    "Bert",
    transform="cls.predictions.transform.dense",
    pooler="pooler.dense",
    classifier="cls.seq_relationship",
)
BERT = Family(
    name="bert",
    base=BASE,
    fields=(*FIELDS, HEAD),
    table=NameTable(
        modules=(
            *EMBEDDINGS,
            Module("pooler.dense", "pooler"),
            Module("cls.seq_relationship", "classifier"),
            *masked_head(
                "cls.predictions.transform.dense",
                "cls.predictions.transform.LayerNorm",
                "cls.predictions",
                "cls.predictions.decoder",
            ),
        ),
        layers=(LAYERS,),
    ),
    prefix="bert.",
    task_modules=("cls.",),
    renamed=OLD_NORMS,
    unread=UnreadTensors(
        always=("embeddings.position_ids",),
        # A tied decoder may be stored again; an own one has its own bias, and the other is unused.
        if_tied=("cls.predictions.decoder.*",),
        copies={"cls.predictions.bias": "cls.predictions.decoder.bias"},
    ),
)
