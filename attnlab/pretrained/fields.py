"""How attributes of a config.json become fields of `ModelConfig`, and the way back.

A family lists such fields. Values go by their path in the config: "ffn.width", "heads.head_dim".
"""

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from attnlab.heads import Layout
from attnlab.heads.layout import Bias
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Activation, Dropout
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.tensors import Tensor

T = TypeVar("T")
Values = dict[str, Any]
"""Path in a `ModelConfig` -> value."""

BIASES: tuple[Bias, ...] = ("q", "k", "v", "o")
NUMBERS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "max_len": "max_position_embeddings n_positions seq_length",
    "width": "hidden_size n_embd d_model dim",
    "num_layers": "num_hidden_layers n_layer n_layers decoder_layers",
    "heads.num_heads": "num_attention_heads n_head n_heads num_heads decoder_attention_heads",
    "heads.head_dim": "d_kv",
    "ffn.width": "intermediate_size ffn_dim d_ff hidden_dim decoder_ffn_dim",
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
IN_LAYERS = Dropout(places=("attention", "ffn"))
"""Of families that drop nothing of the embeddings."""
GATED = {theirs: cast(Activation, f"gated_{ours}") for theirs, ours in ACTIVATIONS.items()}


class Source(NamedTuple):
    """Information, other than attributes, about the model in a folder."""

    architecture: str = ""
    """The first of `architectures` in config.json."""
    tensors: Mapping[str, Tensor | None] = types.MappingProxyType({})
    """The tensors of the folder, by the names of the family's table; None where only the name is
    known."""


NO_FOLDER = Source()


class Field:
    """Attributes of config.json that set fields of a `ModelConfig` together."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """What `architectures` may say, where the field decides about output heads."""
        return ()

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """The attributes that it reads and writes."""
        return ()

    def read(self, attributes: JSON, source: Source) -> Values:
        """Attributes of the family -> values of the config.

        Raises:
          ValueError: names the attribute whose value is not supported.
        """
        return {}

    def write(self, config: ModelConfig) -> JSON:
        """The inverse. May raise ValueError; `save` reads what is written again and compares."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words(Field):
    """Words of config.json that set no field of the config.

    Attributes:
      ignored: names of those that change nothing that a model computes.
      only: name -> the one value that is supported.
      used: attributes from which others are read or computed.
      follows: name -> (names of others, function of their values that it must be, or null).
      written: name -> the value that is written.
    """

    ignored: str = ""
    only: Mapping[str, object] = dataclasses.field(default_factory=dict)
    used: tuple[Attribute, ...] = ()
    follows: Mapping[str, tuple[str, Callable[..., object]]] = dataclasses.field(
        default_factory=dict
    )
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.written.get("architectures", ()))

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        follows = [
            Attribute(name, compute=functools.partial(self._computed, name))
            for name in self.follows
        ]
        only = [Attribute(name, value, least=0) for name, value in self.only.items()]
        return (*self.used, *follows, *only, *map(Attribute, self.ignored.split()))

    def _computed(self, name: str, attributes: JSON) -> object:
        names, function = self.follows[name]
        return function(*(attributes[other] for other in names.split()))

    def read(self, attributes: JSON, source: Source) -> Values:
        for name, value in self.only.items():
            if attributes[name] != value:
                raise bad_value(name, attributes[name], f"is not supported, only {value!r}")
        for name, (names, _) in self.follows.items():
            if attributes[name] != (value := self._computed(name, attributes)):
                others = " and ".join(f"{other} = {attributes[other]!r}" for other in names.split())
                why = f"contradicts {others}, from which follows {value!r}; correct one of them"
                raise bad_value(name, attributes[name], why)
        return {}

    def write(self, config: ModelConfig) -> JSON:
        return dict(self.written)


@dataclasses.dataclass(frozen=True)
class Value(Field):
    """An attribute that is a field of the config, or several equal ones.

    Attributes:
      attribute: of config.json.
      paths: of the fields; the first is written.
      default_path: the field that stands for the first where that is None.
      same_as: the attribute of that field; None is read where both are equal.
    """

    attribute: Attribute
    paths: tuple[str, ...]
    default_path: str = ""
    same_as: str = ""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (self.attribute,)

    def read(self, attributes: JSON, source: Source) -> Values:
        found = attributes[self.attribute.name]
        same = self.same_as and attributes[self.same_as] == found
        return dict.fromkeys(self.paths, None if same else found)

    def write(self, config: ModelConfig) -> JSON:
        found = config_value(config, self.paths[0])
        if found is None and self.default_path:
            found = config_value(config, self.default_path)
        return {self.attribute.name: found}


def value(
    name: str, kind: type, *paths: str, default_path: str = "", same_as: str = "", **options: Any
) -> Value:
    """A `Value`; `options` are those of `Attribute`.

    >>> value("n_embd", int, "width").read({"n_embd": 12}, Source())
    {'width': 12}
    """
    return Value(Attribute(name, kind=kind, **options), paths, default_path, same_as)


@dataclasses.dataclass(frozen=True)
class Choice(Field):
    """An attribute whose values are mapped to values of a field of the config.

    Attributes:
      name: of the attribute.
      path: of the field.
      values: of the attribute -> of the field; the first that fits is written, the first of all for
        a None that none of them is.
    """

    name: str
    path: str
    values: Mapping[Any, object]

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        kind = type(next(iter(self.values)))
        return (Attribute(self.name, kind=kind, nullable=None in self.values),)

    def read(self, attributes: JSON, source: Source) -> Values:
        return {self.path: choose(self.name, attributes[self.name], self.values)}

    def write(self, config: ModelConfig) -> JSON:
        ours = config_value(config, self.path)
        for theirs, one in self.values.items():
            if one == ours:
                return {self.name: theirs}
        if ours is None:
            return {self.name: next(iter(self.values))}
        known = ", ".join(dict.fromkeys(repr(one) for one in self.values.values()))
        raise ValueError(f"{self.path} must be one of {known}, not {ours!r}")


def choose(name: str, value: object, known: Mapping[Any, T]) -> T:
    """`known[value]`, or a ValueError that lists the known values."""
    if value not in known:
        raise bad_value(name, value, f"is not supported; known: {', '.join(map(str, known))}")
    return known[value]


def numbers(names: str) -> tuple[Field, ...]:
    """Attributes of `NUMBERS`; their defaults are those of transformers.

    >>> numbers("hidden_size")[0].write(ModelConfig())
    {'hidden_size': 64}
    """
    return tuple(_number(name, PATHS[name]) for name in names.split())


def _number(name: str, path: str) -> Value:
    kind = float if path.startswith(("norm.", "dropout.")) else int
    second = "dropout.rate" if path == "dropout.embedding" else ""
    is_depth = path == "num_layers"
    return value(name, kind, path, default_path=second, is_depth=is_depth)


def activation(name: str, *, gated: bool = False) -> Choice:
    """The activation of the FFN."""
    return Choice(name, "ffn.activation", GATED if gated else ACTIVATIONS)


def ffn_width(name: str, width: str) -> Field:
    """The hidden width of the FFN; null is four times the attribute `width`."""
    return value(name, int, "ffn.width", compute=lambda said: 4 * said[width])


def biases(name: str, which: tuple[Bias, ...] = BIASES) -> Choice:
    """Whether projections have biases, and which."""
    return Choice(name, "heads.biases", {True: which, False: ()})


def kv_heads() -> Field:
    """num_key_value_heads; null is a key head for each head."""
    own = operator.itemgetter("num_attention_heads")
    return value("num_key_value_heads", int, "heads.num_kv_heads", compute=own)


def head_dim() -> Field:
    """head_dim; null is hidden_size / num_attention_heads."""

    def own(attributes: JSON) -> int | None:
        width, heads = attributes["hidden_size"], attributes["num_attention_heads"]
        return None if width % heads else int(width // heads)

    return value("head_dim", int, "heads.head_dim", compute=own)


def all_biases(name: str) -> tuple[Field, ...]:
    """One attribute for the biases of all matrices."""
    return biases(name), value(name, bool, "ffn.bias")


@dataclasses.dataclass(frozen=True)
class CausalHead(Field):
    """The LM head of a decoder.

    Attributes:
      stem: how the names of its architectures begin; STEMModel has no LM head.
      bias: the LM head has one.
      causal: the name of the architecture with an LM head; one that begins with "For" comes behind
        the stem.
      bare_kind: the LM head of the bare architecture where it is not tied.
    """

    stem: str
    bias: bool = False
    causal: str = "ForCausalLM"
    bare_kind: str = "none"

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute("tie_word_embeddings", kind=bool),)

    @property
    def architectures(self) -> tuple[str, ...]:
        causal = self.stem + self.causal if self.causal.startswith("For") else self.causal
        return (f"{self.stem}Model", causal)

    def read(self, attributes: JSON, source: Source) -> Values:
        is_bare = source.architecture == self.architectures[0]
        # The bare architecture has a tied LM head too, but not its bias.
        if attributes["tie_word_embeddings"] and not (is_bare and self.bias):
            kind = "tied"
        else:
            kind = self.bare_kind if is_bare else "own"
        return {"output.kind": kind, "output.bias": self.bias and kind != "none"}

    def write(self, config: ModelConfig) -> JSON:
        kind = config.output.kind
        name = self.architectures[kind != "none"]
        return {"tie_word_embeddings": kind == "tied", "architectures": [name]}


def config_value(config: ModelConfig, path: str) -> Any:
    """The value of a field of a config; sizes of heads and their biases are resolved.

    >>> config_value(ModelConfig(), "heads.head_dim")
    16
    """
    part, _, name = path.partition(".")
    owner: object = getattr(config, part) if name else config
    if not hasattr(owner, name or part):
        raise ValueError(f"the model has no {path}")
    found = getattr(owner, name or part)
    if not isinstance(owner, Layout):
        return found
    if name == "biases":
        return tuple(bias for bias in owner.bias_names if bias in owner.biases)
    known = hasattr(type(owner), f"default_{name}") and name != "query_latent_dim"
    return owner.with_width(config.width).size(name) if found is None and known else found


def build_config(base: ModelConfig, values: Values) -> ModelConfig:
    """`base` with these values. Raises ValueError if they do not fit each other.

    >>> build_config(ModelConfig(), {"width": 8, "ffn.width": 3}).ffn.width
    3
    """
    whole = {path: new for path, new in values.items() if "." not in path}
    parts: dict[str, Values] = {}
    for path, new in values.items():
        part, _, name = path.partition(".")
        if name:
            parts.setdefault(part, {})[name] = new
    for part, own in parts.items():
        try:
            whole[part] = dataclasses.replace(whole.get(part, getattr(base, part)), **own)
        except TypeError as error:
            raise ValueError(f"{part}: {error}") from None
    return dataclasses.replace(base, **whole)
