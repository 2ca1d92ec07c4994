"""T5, versions 1.0 and 1.1 (Raffel et al. 2020; Shazeer 2020), mT5 (Xue et al. 2021, arXiv
2010.11934) and UMT5 (Chung et al. 2023, arXiv 2304.09151), in the names of Hugging Face.
"""

import dataclasses
import operator

from attnlab.heads import Standard
from attnlab.models import FFN, Dropout, Norm, Relative
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.family import Family
from attnlab.pretrained.name_table import Layers, Module, NameTable, Stack, linears
from attnlab.pretrained.tasks import per_token
from attnlab.pretrained.weights import Entry

ANY_LENGTH = 2**20
TOKENS = per_token("classifier", prefix="transformer.")
# "gated-gelu" means the tanh kind, "gelu" alone the exact one.
FEED_FORWARD = f.ACTIVATIONS | {f"gated-{theirs}": ours for theirs, ours in f.GATED.items()}
FEED_FORWARD["gated-gelu"] = f.GATED["gelu_new"]


def _activation(name: str) -> str:
    return "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")


@dataclasses.dataclass(frozen=True)
class _StacksAndHead(f.Field):
    """Which stacks there are, their depth, and the LM head. The file decides about the head: one
    that differs from the table is used, a copy is not.

    Attributes:
      stem: how the names of architectures begin.
      can_scale: an attribute says whether what the LM head reads is scaled.
    """

    stem: str = "T5"
    can_scale: bool = True

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        depth, tied = map(operator.itemgetter, ("num_layers", "tie_word_embeddings"))
        return (
            Attribute("num_layers", 6, is_depth=True),
            Attribute("num_decoder_layers", kind=int, is_depth=True, compute=depth),
            Attribute("is_encoder_decoder", True),
            Attribute("tie_word_embeddings", True),
            Attribute("scale_decoder_outputs", kind=bool, compute=tied if self.can_scale else None),
        )

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.stem + t for t in ("Model", "EncoderModel", "ForConditionalGeneration"))

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        layers, end = attributes["num_layers"], source.architecture.removeprefix(self.stem)
        values: f.Values = {"output.kind": "none"}
        if end in ("EncoderModel", TOKENS.end):
            return values | {"kind": "encoder", "encoder": None, "num_layers": layers}
        values |= {"num_layers": attributes["num_decoder_layers"], "encoder.num_layers": layers}
        if end == "Model":
            return values
        own, table = (source.tensors.get(f"{name}.weight") for name in ("lm_head", "shared"))
        copied = own is not None and table is not None and own.equals(table)
        has_own = "lm_head.weight" in source.tensors and not copied
        scaled = self.can_scale and attributes["scale_decoder_outputs"]
        return values | {
            "output.kind": "own" if has_own else "tied",
            "output.scale": attributes["d_model"] ** -0.5 if scaled else 1.0,
        }

    def write(self, config: ModelConfig) -> JSON:
        alone, bare = config.encoder is None, config.output.kind == "none"
        bare_name = "EncoderModel" if config.kind == "encoder" else "Model"
        # What a reader before version 5 takes for "scaled", and for "tied".
        scaled = config.output.scale != 1 or bare
        scale = {"scale_decoder_outputs": scaled} if self.can_scale else {}
        return scale | {
            "num_layers": config.num_layers if alone else config.encoder_model.num_layers,
            "num_decoder_layers": config.num_layers,
            "is_encoder_decoder": not alone,
            "tie_word_embeddings": scaled or not self.can_scale,
            "architectures": [self.stem + (bare_name if bare else "ForConditionalGeneration")],
        }


def _stack(stack: Stack, *, one_table: bool = True) -> Layers:
    """The FFN is the last sublayer of a layer; all have `one_table` of relative positions, or each
    its own."""
    sublayers = {"SelfAttention": "attention"}
    sublayers |= {"EncDecAttention": "cross"} if stack == "decoder" else {}
    modules = list[Module]()
    for number, (theirs, ours) in enumerate(sublayers.items()):
        at = f"layer.{number}."
        modules += linears(f"{at}{theirs}.", ours, q="q", k="k", v="v", o="o")
        modules.append(Module(f"{at}layer_norm", f"{ours}.norm", "norm"))
    at = f"layer.{len(sublayers)}."
    modules += (
        Module(f"{at}DenseReluDense.wi", "ffn.up", only_without="gate"),
        Module(f"{at}DenseReluDense.wi_1", "ffn.up", only_with="gate"),
        *linears(f"{at}DenseReluDense.", "ffn", gate="wi_0", down="wo"),
        Module(f"{at}layer_norm", "ffn.norm", "norm"),
    )
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    outer = (
        *((Module(bias, "relative_bias", "table"),) if one_table else ()),
        Module(f"{stack}.final_layer_norm", "final_norm", "norm"),
    )
    return Layers(f"{stack}.block.{{}}.", tuple(modules), stack, outer)


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
        *f.numbers("vocab_size d_model d_kv d_ff num_heads layer_norm_epsilon"),
        _StacksAndHead(),
        f.value("relative_attention_num_buckets", int, "positions.buckets"),
        f.value("relative_attention_max_distance", int, "positions.max_distance"),
        f.value("dropout_rate", float, "dropout.rate", "dropout.attention", "dropout.ffn"),
        f.Choice("feed_forward_proj", "ffn.activation", FEED_FORWARD),
        f.Words(
            ignored="n_positions",  # of the training data; relative positions go on
            follows={
                "is_gated_act": ("feed_forward_proj", lambda name: name.startswith("gated-")),
                "dense_act_fn": ("feed_forward_proj", _activation),
            },
            written={"decoder_start_token_id": 0},
        ),
    ),
    table=NameTable(
        modules=(Module("shared", "embedding", "table"), Module("lm_head", "lm_head")),
        layers=(_stack("encoder"), _stack("decoder")),
        # The LM head is there again where it is tied; a bias that no release used.
        unread=(
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            "lm_head.weight",
        ),
        repeated=dict.fromkeys(
            ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
        ),
    ),
    tasks=(TOKENS,),
)


def _layer_tables(config: ModelConfig) -> list[Entry]:
    """The relative positions of every layer of both stacks."""
    stacks = {"encoder": (config, "")} if config.kind == "encoder" else {"decoder": (config, "")}
    if config.encoder is not None:
        stacks["encoder"] = config.encoder_model, "encoder_"
    return [
        Entry(
            f"{name}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight",
            ((f"{prefix}relative_bias",),),
            i,
        )
        for name, (stack, prefix) in stacks.items()
        for i in range(stack.num_layers)
    ]


MT5 = T5.variant("mt5", _StacksAndHead("MT5", can_scale=False))
UMT5 = T5.variant(
    "umt5",
    _StacksAndHead("UMT5"),
    table=T5.table._replace(
        layers=tuple(_stack(name, one_table=False) for name in ("encoder", "decoder")),
        special=_layer_tables,
    ),
    positions=Relative(per_layer=True),
)
