"""BART (Lewis et al. 2019, arXiv 1910.13461) and encoder-decoders like it, in the names of Hugging
Face: Marian (Junczys-Dowmunt et al. 2018, arXiv 1804.00344), mBART (Liu et al. 2020, arXiv
2001.08210) and Pegasus (Zhang et al. 2019, arXiv 1912.08777).
"""

import dataclasses

from attnlab.heads import Standard
from attnlab.models.config import EncoderConfig, ModelConfig
from attnlab.models.specs import Embedding, Init, Learned, Norm, Sinusoidal
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value, derived
from attnlab.pretrained.common_fields import BIASES, CausalHead, activation, numbers
from attnlab.pretrained.family import NO_OTHERS, Family, OtherAttributes, UnreadTensors
from attnlab.pretrained.fields import Field, Source, Values, changed
from attnlab.pretrained.name_table import Layers, Module, NameTable, Stack, linears

STACKS = ("encoder", "decoder")


@dataclasses.dataclass(frozen=True)
class _Stacks(Field):
    """Depth, heads and FFN of encoder and decoder; the FFNs are equally wide. Sizes are those
    where config.json has none."""

    layers: tuple[int, int] = (12, 12)
    num_heads: int = 16
    ffn_width: int = 4096

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        depths = zip(STACKS, self.layers, strict=True)
        return (
            *(Attribute(f"{stack}_layers", depth, is_depth=True) for stack, depth in depths),
            *(Attribute(f"{stack}_attention_heads", self.num_heads) for stack in STACKS),
            *(Attribute(f"{stack}_ffn_dim", self.ffn_width) for stack in STACKS),
        )

    def read(self, attributes: JSON, source: Source) -> Values:
        widths = [attributes[f"{stack}_ffn_dim"] for stack in STACKS]
        if widths[0] != widths[1]:
            why = f"is not supported, only decoder_ffn_dim = {widths[1]}"
            raise bad_value("encoder_ffn_dim", widths[0], why)
        ours, theirs = (attributes[f"{stack}_attention_heads"] for stack in reversed(STACKS))
        return {
            "num_layers": attributes["decoder_layers"],
            "encoder.num_layers": attributes["encoder_layers"],
            "heads.num_heads": ours,
            "encoder.num_heads": None if theirs == ours else theirs,
            "ffn.width": widths[0],
        }

    def write(self, config: ModelConfig) -> JSON:
        if config.encoder is None:
            raise ValueError(f"the model is of kind {config.kind!r} and has no encoder beside it")
        return {
            "encoder_layers": config.encoder_plan.num_layers,
            "decoder_layers": config.num_layers,
            "encoder_attention_heads": config.encoder_layout.num_heads,
            "decoder_attention_heads": config.heads.num_heads,
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), config.ffn.width),
        }


@dataclasses.dataclass(frozen=True)
class _EmbeddingScale(Field):
    """Embeddings are multiplied by the root of the width, or not; `default` is where config.json
    says nothing."""

    default: bool = False

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute("scale_embedding", self.default),)

    def read(self, attributes: JSON, source: Source) -> Values:
        scaled = attributes["scale_embedding"]
        return {"embedding.scale": attributes["d_model"] ** 0.5 if scaled else 1.0}

    def write(self, config: ModelConfig) -> JSON:
        return {"scale_embedding": config.embedding.scale != 1}


class _Positions(Field):
    """Sinusoids, or a table of each stack where the file has one."""

    attributes = ()

    def read(self, attributes: JSON, source: Source) -> Values:
        stored = any(f"{stack}.embed_positions.weight" in source.tensors for stack in STACKS)
        sinusoids = Sinusoidal(halves=True, rates="paper")
        return {"positions": Learned() if stored else sinusoids, "encoder.own_inputs": stored}

    def write(self, config: ModelConfig) -> JSON:
        return {}


@dataclasses.dataclass(frozen=True)
class _Head(CausalHead):
    """The LM head and the tables of both stacks are one table."""

    def read(self, attributes: JSON, source: Source) -> Values:
        if not attributes["tie_word_embeddings"]:
            raise ValueError(
                "config.json: tie_word_embeddings = False is not supported, only True: each stack "
                "would have a table of its own"
            )
        return super().read(attributes, source)

    def write(self, config: ModelConfig) -> JSON:
        if config.output.kind == "own":
            raise ValueError("output.kind must be 'tied' or 'none'")
        return super().write(config) | {"tie_word_embeddings": True}


FIELDS: tuple[Field, ...] = (
    *numbers(vocab_size=50265, max_position_embeddings=1024, d_model=1024),
    *numbers(dropout=0.1, attention_dropout=0.0, activation_dropout=0.0),
    _Stacks(),
    activation("activation_function", "gelu"),
    _EmbeddingScale(),
)
TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def _stack(stack: Stack) -> Layers:
    modules = (
        *linears("self_attn.", "attention", **PROJECTIONS),
        Module("self_attn_layer_norm", "attention.norm", "norm"),
        *linears("encoder_attn.", "cross", **PROJECTIONS),
        Module("encoder_attn_layer_norm", "cross.norm", "norm"),
        *linears("", "ffn", up="fc1", down="fc2"),
        Module("final_layer_norm", "ffn.norm", "norm"),
    )
    outer = (
        Module(f"{stack}.embed_positions", "positions", "table"),
        Module(f"{stack}.layernorm_embedding", "embedding_norm", "norm"),
        Module(f"{stack}.layer_norm", "final_norm", "norm"),
    )
    return Layers(f"{stack}.layers.{{}}.", modules, stack, outer)


# Of training, or of a library before transformers, which computes the same whatever they say.
IGNORED = (
    *("encoder_layerdrop", "decoder_layerdrop", "layerdrop", "init_std", "num_hidden_layers"),
    *("normalize_before", "normalize_embedding", "add_bias_logits", "add_final_layer_norm"),
    *("static_position_embeddings", "extra_pos_embeddings", "force_bos_token_to_be_generated"),
    *("save_step", "classif_dropout", "output_past"),
)


def encoder_decoder(
    name: str,
    architecture: str,
    *fields: Field,
    causal: str = "ForConditionalGeneration",
    other_attributes: OtherAttributes = NO_OTHERS,
    **base: object,
) -> Family:
    """A family whose files name things as BART's do.

    Args:
      name: its `model_type`.
      architecture: how the names of its architectures begin.
      *fields: in the place of BART's.
      causal: how the name of the architecture with an LM head goes on.
      other_attributes: those that set no field of the config, beside BART's.
      **base: fields of the config that no attribute sets, where they differ from BART's.
    """
    others = dataclasses.replace(
        other_attributes,
        ignored=(*IGNORED, *other_attributes.ignored),
        fixed={"is_encoder_decoder": True, **other_attributes.fixed},
        written={"is_encoder_decoder": True},
    )
    return Family(
        name=name,
        base=dataclasses.replace(BASE, **base),  # type: ignore[arg-type]
        fields=(
            *changed(FIELDS, *fields),
            _Head(architecture, tied=True, bias=True, causal=causal),
        ),
        table=NameTable(
            modules=(
                Module("shared", "embedding", "table"),
                Module("final_logits_bias", "lm_head_bias", "plain", axes=1),
            ),
            layers=(_stack("encoder"), _stack("decoder")),
        ),
        prefix="model.",
        task_modules=("lm_head.", "final_logits_bias"),
        other_attributes=others,
        unread=UnreadTensors(
            # The table of tokens may be stored again for each stack.
            repeated=dict.fromkeys(TABLES, "shared.weight"),
            if_tied={"lm_head.weight": "shared.weight"},
        ),
    )


BASE = ModelConfig(
    kind="encoder_decoder",
    heads=Standard(num_heads=4, biases=BIASES),
    norm=Norm(position="post"),
    positions=Learned(offset=2),
    embedding=Embedding(norm=True),
    encoder=EncoderConfig(own_inputs=True),
    init=Init(std=0.02),
)
BART = encoder_decoder("bart", "Bart")
MBART = encoder_decoder("mbart", "MBart", norm=Norm())
# Published models have the token of padding, with which texts begin, at the end.
LAST_TOKENS = tuple(
    Attribute(name, json_type=int, compute=lambda attributes: attributes["vocab_size"] - 1, least=0)
    for name in ("pad_token_id", "decoder_start_token_id")
)
MARIAN = encoder_decoder(
    "marian",
    "Marian",
    *numbers(vocab_size=58101),
    _Positions(),
    causal="MTModel",
    other_attributes=OtherAttributes(
        read=(*LAST_TOKENS, derived("decoder_vocab_size", "vocab_size")),
        fixed={"share_encoder_decoder_embeddings": True},
    ),
    positions=Learned(),
    embedding=Embedding(),
)
PEGASUS = encoder_decoder(
    "pegasus", "Pegasus", _Positions(), norm=Norm(), positions=Learned(), embedding=Embedding()
)
