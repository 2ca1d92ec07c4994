"""T5, versions 1.0 and 1.1 (Raffel et al. 2020; Shazeer 2020), and mT5 (Xue et al. 2021, arXiv
2010.11934), in the names of Hugging Face.
"""

import dataclasses
import operator

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.params import same_bits
from attnlab.models.specs import FFN, Dropout, Norm, Relative
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.common_fields import ACTIVATIONS, GATED, numbers
from attnlab.pretrained.family import Family, OtherAttributes, UnreadTensors
from attnlab.pretrained.fields import Choice, Field, Source, Tensors, Values, changed, value
from attnlab.pretrained.name_table import Layers, Module, NameTable, Stack, linears

ANY_LENGTH = 2**20
# "gated-gelu" means the tanh kind, "gelu" alone the exact one.
FEED_FORWARD = ACTIVATIONS | {f"gated-{theirs}": ours for theirs, ours in GATED.items()}
FEED_FORWARD["gated-gelu"] = GATED["gelu_new"]


def _is_gated(attributes: JSON) -> bool:
    return str(attributes["feed_forward_proj"]).startswith("gated-")


def _activation(attributes: JSON) -> str:
    name = str(attributes["feed_forward_proj"])
    return "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")


@dataclasses.dataclass(frozen=True)
class _Stacks(Field):
    """Which stacks there are, and their depth.

    Attributes:
      name: how the names of architectures begin.
      num_layers: where config.json has none.
    """

    name: str = "T5"
    num_layers: int = 6

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (
            Attribute("num_layers", self.num_layers, is_depth=True),
            Attribute(
                "num_decoder_layers",
                json_type=int,
                is_depth=True,
                compute=operator.itemgetter("num_layers"),
            ),
            Attribute("is_encoder_decoder", True),
        )

    def read(self, attributes: JSON, source: Source) -> Values:
        layers = attributes["num_layers"]
        if source.architecture == f"{self.name}EncoderModel":
            return {"kind": "encoder", "encoder": None, "num_layers": layers}
        return {"num_layers": attributes["num_decoder_layers"], "encoder.num_layers": layers}

    def write(self, config: ModelConfig) -> JSON:
        alone = config.encoder is None
        return {
            "num_layers": config.num_layers if alone else config.encoder_plan.num_layers,
            "num_decoder_layers": config.num_layers,
            "is_encoder_decoder": not alone,
        }


@dataclasses.dataclass(frozen=True)
class _Head(Field):
    """The LM head. The file decides: one that differs from the table is used, a copy is not."""

    attributes = (
        Attribute("tie_word_embeddings", True),
        Attribute(
            "scale_decoder_outputs",
            json_type=bool,
            compute=operator.itemgetter("tie_word_embeddings"),
        ),
    )
    name: str = "T5"
    can_scale: bool = True

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.name + t for t in ("Model", "EncoderModel", "ForConditionalGeneration"))

    def read(self, attributes: JSON, source: Source) -> Values:
        if source.architecture in (f"{self.name}EncoderModel", f"{self.name}Model"):
            return {"output.kind": "none"}
        scaled = self.can_scale and attributes["scale_decoder_outputs"]
        return {
            "output.kind": "own" if _has_own_head(source.tensors) else "tied",
            "output.scale": attributes["d_model"] ** -0.5 if scaled else 1.0,
        }

    def write(self, config: ModelConfig) -> JSON:
        bare = config.output.kind == "none"
        bare_name = "EncoderModel" if config.kind == "encoder" else "Model"
        name = self.name + (bare_name if bare else "ForConditionalGeneration")
        if not self.can_scale:
            return {"tie_word_embeddings": True, "architectures": [name]}
        # What a reader before version 5 takes for "scaled", and for "tied".
        scaled = config.output.scale != 1 or bare
        names = ("tie_word_embeddings", "scale_decoder_outputs")
        return dict.fromkeys(names, scaled) | {"architectures": [name]}


def _has_own_head(tensors: Tensors) -> bool:
    own, table = tensors.get("lm_head.weight"), tensors.get("shared.weight")
    if own is None or table is None:
        return "lm_head.weight" in tensors
    return not same_bits(own, table)


def _layers(stack: Stack, ffn: int) -> tuple[Module, ...]:
    """The modules of a layer; the FFN is its sublayer number `ffn`."""
    projections = {name: name for name in "qkvo"}
    modules = linears("layer.0.SelfAttention.", "attention", **projections)
    modules += (Module("layer.0.layer_norm", "attention.norm", "norm"),)
    if stack == "decoder":
        modules += linears("layer.1.EncDecAttention.", "cross", **projections)
        modules += (Module("layer.1.layer_norm", "cross.norm", "norm"),)
    at = f"layer.{ffn}.DenseReluDense."
    return (
        *modules,
        Module(f"{at}wi", "ffn.up", only_without="gate"),
        Module(f"{at}wi_1", "ffn.up", only_with="gate"),
        *linears(at, "ffn", gate="wi_0", down="wo"),
        Module(f"layer.{ffn}.layer_norm", "ffn.norm", "norm"),
    )


def _stack(stack: Stack, ffn: int) -> Layers:
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return Layers(
        f"{stack}.block.{{}}.",
        _layers(stack, ffn),
        stack,
        outer=(
            Module(bias, "relative_bias", "table"),
            Module(f"{stack}.final_layer_norm", "final_norm", "norm"),
        ),
    )


T5 = Family(
    name="t5",
    base=ModelConfig(
        kind="encoder_decoder",
        max_len=ANY_LENGTH,
        heads=Standard(num_heads=4, scale=1.0),
        ffn=FFN(bias=False),
        norm=Norm(kind="rms"),
        positions=Relative(),
        dropout=Dropout(places=("embeddings", "attention", "ffn", "final")),
    ),
    fields=(
        *numbers(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_heads=8),
        *numbers(layer_norm_epsilon=1e-6),
        _Stacks(),
        value("relative_attention_num_buckets", 32, "positions.buckets"),
        value("relative_attention_max_distance", 128, "positions.max_distance"),
        value("dropout_rate", 0.1, "dropout.rate", "dropout.attention", "dropout.ffn"),
        Choice("feed_forward_proj", "relu", "ffn.activation", FEED_FORWARD),
        _Head(),
    ),
    table=NameTable(
        modules=(Module("shared", "embedding", "table"), Module("lm_head", "lm_head")),
        layers=(_stack("encoder", 1), _stack("decoder", 2)),
    ),
    other_attributes=OtherAttributes(
        read=(
            Attribute(
                "is_gated_act", json_type=bool, compute=_is_gated, follows=("feed_forward_proj",)
            ),
            Attribute(
                "dense_act_fn", json_type=str, compute=_activation, follows=("feed_forward_proj",)
            ),
            Attribute("n_positions", 512),  # of the training data; relative positions go on
        ),
        written={"decoder_start_token_id": 0},
    ),
    unread=UnreadTensors(
        # The table may be stored again for each stack and as LM head, and a bias that no release
        # used.
        always=(
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            "lm_head.weight",
        ),
        repeated=dict.fromkeys(
            ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
        ),
    ),
)
MT5 = dataclasses.replace(
    T5,
    name="mt5",
    fields=changed(
        T5.fields,
        *numbers(vocab_size=250112, d_ff=1024, num_heads=6),
        _Stacks("MT5", 8),
        Choice("feed_forward_proj", "gated-gelu", "ffn.activation", FEED_FORWARD),
        _Head("MT5", can_scale=False),
    ),
)
