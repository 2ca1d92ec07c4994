"""Fields of several families."""

import dataclasses
import operator
from typing import cast

from attnlab.heads.layout import Bias
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Activation
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.fields import Choice, Field, Source, Values, value

BIASES: tuple[Bias, ...] = ("q", "k", "v", "o")
NUMBERS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "max_len": "max_position_embeddings n_positions seq_length",
    "width": "hidden_size n_embd d_model dim",
    "num_layers": "num_hidden_layers n_layer n_layers",
    "heads.num_heads": "num_attention_heads n_head n_heads num_heads",
    "heads.head_dim": "d_kv",
    "ffn.width": "intermediate_size ffn_dim d_ff hidden_dim",
    "norm.eps": "layer_norm_eps layer_norm_epsilon rms_norm_eps norm_epsilon norm_eps",
    "dropout.rate": "dropout resid_pdrop hidden_dropout hidden_dropout_prob residual_dropout",
    "dropout.embedding": "embd_pdrop embedding_dropout",
    "dropout.attention": "attention_dropout attn_pdrop attention_probs_dropout_prob",
    "dropout.ffn": "activation_dropout mlp_dropout",
}
"""Path of a number -> its names in config.json."""
PATHS = {name: path for path, names in NUMBERS.items() for name in names.split()}
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
}
"""Hugging Face's names of activations -> ours."""
GATED = {theirs: cast(Activation, f"gated_{ours}") for theirs, ours in ACTIVATIONS.items()}


def numbers(**defaults: int | float) -> tuple[Field, ...]:
    """The attributes of `NUMBERS` with these defaults.

    >>> numbers(hidden_size=768)[0].write(ModelConfig())
    {'hidden_size': 64}
    """
    default_paths = {"dropout.embedding": "dropout.rate"}
    return tuple(
        value(
            name,
            default,
            PATHS[name],
            default_path=default_paths.get(PATHS[name], ""),
            is_depth=PATHS[name] == "num_layers",
        )
        for name, default in defaults.items()
    )


def activation(name: str, default: str, *, gated: bool = False) -> Choice:
    """The activation of the FFN."""
    return Choice(name, default, "ffn.activation", GATED if gated else ACTIVATIONS)


def ffn_width(name: str, width: str) -> Field:
    """The hidden width of the FFN; null is four times the attribute `width`."""
    own = lambda attributes: 4 * attributes[width]
    return value(name, None, "ffn.width", json_type=int, compute=own)


def biases(name: str, default: bool, which: tuple[Bias, ...] = BIASES) -> Choice:
    """Whether projections have biases, and which."""
    return Choice(name, default, "heads.biases", {True: which, False: ()})


@dataclasses.dataclass(frozen=True)
class AllBiases(Field):
    """One attribute for the biases of all matrices."""

    name: str
    default: bool

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute(self.name, self.default),)

    def read(self, attributes: JSON, source: Source) -> Values:
        there = attributes[self.name]
        return {"heads.biases": BIASES if there else (), "ffn.bias": there}

    def write(self, config: ModelConfig) -> JSON:
        if set(config.heads.biases) != (set(BIASES) if config.ffn.bias else set()):
            raise ValueError(
                "heads.biases must be those of all matrices where ffn.bias is, or none"
            )
        return {self.name: config.ffn.bias}


@dataclasses.dataclass(frozen=True)
class CausalHead(Field):
    """The LM head of a decoder.

    Attributes:
      name: how the names of its architectures begin.
      tied: the default of tie_word_embeddings.
      bias: the LM head has one.
      bare, causal: how the names of the architectures without and with an LM head end.
      bare_kind: the LM head of the bare architecture where it is not tied.
    """

    name: str
    tied: bool = False
    bias: bool = False
    bare: str = "Model"
    causal: str = "ForCausalLM"
    bare_kind: str = "none"

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute("tie_word_embeddings", self.tied),)

    @property
    def architectures(self) -> tuple[str, ...]:
        return (self.name + self.bare, self.name + self.causal)

    def read(self, attributes: JSON, source: Source) -> Values:
        is_bare = source.architecture == self.name + self.bare
        # The bare architecture has a tied LM head too, but not its bias.
        if attributes["tie_word_embeddings"] and not (is_bare and self.bias):
            kind = "tied"
        else:
            kind = self.bare_kind if is_bare else "own"
        return {"output.kind": kind, "output.bias": self.bias and kind != "none"}

    def write(self, config: ModelConfig) -> JSON:
        kind = config.output.kind
        if kind != "none" and config.output.bias != self.bias:
            raise ValueError(f"output.bias must be {self.bias}")
        name = self.name + (self.bare if kind == "none" else self.causal)
        return {"tie_word_embeddings": kind == "tied", "architectures": [name]}


def _head_dim(attributes: JSON) -> int | None:
    width, heads = attributes["hidden_size"], attributes["num_attention_heads"]
    return None if width % heads else int(width // heads)


def kv_heads(default: int | None = None) -> Field:
    """num_key_value_heads; null is a key head for each head."""
    own = operator.itemgetter("num_attention_heads")
    name, path = "num_key_value_heads", "heads.num_kv_heads"
    return value(name, default, path, compute=own, json_type=int)


def head_dim(default: int | None = None) -> Field:
    """head_dim; null is hidden_size / num_attention_heads."""
    return value("head_dim", default, "heads.head_dim", compute=_head_dim, json_type=int)
