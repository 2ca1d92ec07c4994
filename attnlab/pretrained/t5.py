"""T5, versions 1.0 and 1.1 (Raffel et al. 2020; Shazeer 2020), in the names of Hugging Face."""

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Dropout, Norm, Relative
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import ACTIVATIONS, Field, Source, Tensors, Values, choose, value
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.sharing.bits import same_bits

ANY_LENGTH = 2**20


class _Stacks(Field):
    """Which stacks there are, and their depth."""

    attributes = (
        Attribute("num_layers", 6, is_depth=True),
        Attribute("num_decoder_layers", None, nullable=True, json_type=int, is_depth=True),
        Attribute("is_encoder_decoder", True),
        Attribute("n_positions", 512),  # of the training data; relative positions go on
    )

    def read(self, given: JSON, source: Source) -> Values:
        layers = given["num_layers"]
        if source.architecture == "T5EncoderModel":
            return {"kind": "encoder", "encoder": None, "num_layers": layers}
        decoder = given["num_decoder_layers"]
        return {
            "num_layers": layers if decoder is None else decoder,
            "encoder.num_layers": layers,
        }

    def write(self, config: ModelConfig) -> JSON:
        alone = config.encoder is None
        return {
            "num_layers": config.num_layers if alone else config.encoder_plan.num_layers,
            "num_decoder_layers": config.num_layers,
            "is_encoder_decoder": not alone,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


class _Activation(Field):
    """feed_forward_proj: "gated-gelu" means the tanh kind, "gelu" alone the exact one."""

    attributes = (
        Attribute("feed_forward_proj", "relu"),
        Attribute("is_gated_act", None, nullable=True, json_type=bool),
        Attribute("dense_act_fn", None, nullable=True, json_type=str),
    )

    def read(self, given: JSON, source: Source) -> Values:
        name = given["feed_forward_proj"]
        *gate, last = name.split("-")
        theirs = "gelu_new" if gate and last == "gelu" else last
        for other, derived in {"is_gated_act": bool(gate), "dense_act_fn": theirs}.items():
            if given[other] not in (None, derived):
                raise ValueError(
                    f"config.json: {other} = {given[other]!r} contradicts feed_forward_proj = "
                    f"{name!r}, which says {derived!r}"
                )
        if gate not in ([], ["gated"]):
            raise ValueError(
                f"config.json: feed_forward_proj = {name!r} is not supported; known: the name of "
                "an activation, with 'gated-' before it or not"
            )
        plain = choose("feed_forward_proj", theirs, ACTIVATIONS)
        return {"ffn.activation": f"gated_{plain}" if gate else plain}

    def write(self, config: ModelConfig) -> JSON:
        gated = config.ffn.activation.startswith("gated_")
        ours = config.ffn.activation.removeprefix("gated_")
        plain = next(theirs for theirs, one in ACTIVATIONS.items() if one == ours)
        if gated and plain == "gelu":
            raise ValueError("feed_forward_proj has no name for the exact gelu with a gate")
        last = "gelu" if gated and plain == "gelu_new" else plain
        return {
            "feed_forward_proj": f"gated-{last}" if gated else last,
            "is_gated_act": gated,
            "dense_act_fn": plain,
        }


class _Head(Field):
    """The LM head. The file decides: one that differs from the table is used, a copy is not."""

    attributes = (
        Attribute("tie_word_embeddings", True),
        Attribute("scale_decoder_outputs", None, nullable=True, json_type=bool),
    )

    def read(self, given: JSON, source: Source) -> Values:
        if source.architecture in ("T5EncoderModel", "T5Model"):
            return {"output.kind": "none"}
        scaled = given["scale_decoder_outputs"]
        scaled = given["tie_word_embeddings"] if scaled is None else scaled
        return {
            "output.kind": "own" if _has_own_head(source.tensors) else "tied",
            "output.scale": given["d_model"] ** -0.5 if scaled else 1.0,
        }

    def write(self, config: ModelConfig) -> JSON:
        bare = config.output.kind == "none"
        scaled = config.output.scale != 1 or bare
        name = "T5ForConditionalGeneration"
        if bare:
            name = "T5EncoderModel" if config.kind == "encoder" else "T5Model"
        # What a reader before version 5 takes for "scaled", and for "tied".
        names = ("tie_word_embeddings", "scale_decoder_outputs")
        return dict.fromkeys(names, scaled) | {"architectures": [name]}


def _has_own_head(tensors: Tensors) -> bool:
    own, table = tensors.get("lm_head.weight"), tensors.get("shared.weight")
    if own is None or table is None:
        return "lm_head.weight" in tensors
    return not same_bits(own, table)


def _layers(stack: str, ffn: int) -> tuple[Module, ...]:
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


def _stack(stack: str, ffn: int) -> Layers:
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return Layers(
        f"{stack}.block.{{}}.",
        _layers(stack, ffn),
        "encoder" if stack == "encoder" else "decoder",
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
        value("vocab_size", 32128, "vocab_size"),
        value("d_model", 512, "width"),
        value("d_kv", 64, "heads.head_dim"),
        value("d_ff", 2048, "ffn.width"),
        value("num_heads", 8, "heads.num_heads"),
        _Stacks(),
        value("relative_attention_num_buckets", 32, "positions.buckets"),
        value("relative_attention_max_distance", 128, "positions.max_distance"),
        value("dropout_rate", 0.1, "dropout.rate", "dropout.attention", "dropout.ffn"),
        value("layer_norm_epsilon", 1e-6, "norm.eps"),
        _Activation(),
        _Head(),
    ),
    table=NameTable(
        modules=(Module("shared", "embedding", "table"), Module("lm_head", "lm_head")),
        layers=(_stack("encoder", 1), _stack("decoder", 2)),
    ),
    # The table may be stored again for each stack and as LM head, and a bias that no release used.
    ignored=(
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "lm_head.weight",
    ),
)
