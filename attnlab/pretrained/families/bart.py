"""BART (Lewis et al. 2019, arXiv 1910.13461) and encoder-decoders like it, in the names of Hugging
Face: Marian (Junczys-Dowmunt et al. 2018, arXiv 1804.00344), mBART (Liu et al. 2020, arXiv
2001.08210) and Pegasus (Zhang et al. 2019, arXiv 1912.08777).
"""

import dataclasses

from attnlab.heads import Standard
from attnlab.models import Embedding, Init, Learned, Norm, Sinusoidal
from attnlab.models.config import EncoderConfig, ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.llama import QKVO
from attnlab.pretrained.family import Family
from attnlab.pretrained.name_table import Layers, Module, NameTable, Stack, linears

STACKS = ("encoder", "decoder")


class _EmbeddingScale(f.Field):
    """Embeddings are multiplied by the root of the width, or not."""

    attributes = (Attribute("scale_embedding", False),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        scaled = attributes["scale_embedding"]
        return {"embedding.scale": attributes["d_model"] ** 0.5 if scaled else 1.0}

    def write(self, config: ModelConfig) -> JSON:
        return {"scale_embedding": config.embedding.scale != 1}


class _Positions(f.Field):
    """Sinusoids, or a table of each stack where the file has one."""

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        stored = any(f"{stack}.embed_positions.weight" in source.tensors for stack in STACKS)
        if not stored and attributes["d_model"] % 2:
            why = "is odd: sinusoids of an odd width are not supported, only stored positions"
            raise bad_value("d_model", attributes["d_model"], why)
        sinusoids = Sinusoidal(halves=True, rates="paper")
        return {"positions": Learned() if stored else sinusoids, "encoder.own_inputs": stored}


@dataclasses.dataclass(frozen=True)
class _Head(f.CausalHead):
    """The LM head and the tables of both stacks are one table."""

    bias: bool = True
    causal: str = "ForConditionalGeneration"

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        if not attributes["tie_word_embeddings"]:
            why = "is not supported, only True: each stack would have a table of its own"
            raise bad_value("tie_word_embeddings", False, why)
        return super().read(attributes, source)

    def write(self, config: ModelConfig) -> JSON:
        return super().write(config) | {"tie_word_embeddings": True}


def _stack(stack: Stack) -> Layers:
    names = QKVO | {"o": "out_proj"}
    modules = (
        *linears("self_attn.", "attention", **names),
        Module("self_attn_layer_norm", "attention.norm", "norm"),
        *linears("encoder_attn.", "cross", **names),
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


BART = Family(
    name="bart",
    base=ModelConfig(
        kind="encoder_decoder",
        heads=Standard(num_heads=4, biases=f.BIASES),
        norm=Norm(position="post"),
        positions=Learned(offset=2),
        embedding=Embedding(norm=True),
        encoder=EncoderConfig(own_inputs=True),
        init=Init(std=0.02),
    ),
    fields=(
        *f.numbers("vocab_size max_position_embeddings d_model dropout attention_dropout"),
        *f.numbers("activation_dropout decoder_layers decoder_attention_heads decoder_ffn_dim"),
        f.value(
            "encoder_layers", int, "encoder.num_layers", default_path="num_layers", is_depth=True
        ),
        f.value(
            "encoder_attention_heads",
            int,
            "encoder.num_heads",
            default_path="heads.num_heads",
            same_as="decoder_attention_heads",
        ),
        f.activation("activation_function"),
        _EmbeddingScale(),
        f.Words(
            # Of training, or of a library before transformers, which computes the same whatever
            # they say.
            ignored="encoder_layerdrop decoder_layerdrop layerdrop init_std normalize_before "
            "normalize_embedding add_bias_logits add_final_layer_norm "
            "static_position_embeddings extra_pos_embeddings force_bos_token_to_be_generated "
            "save_step classif_dropout output_past",
            only={"is_encoder_decoder": True},
            follows={"encoder_ffn_dim": ("decoder_ffn_dim", int)}
            | {"num_hidden_layers": ("encoder_layers", int)},  # another name of it
            written={"is_encoder_decoder": True},
        ),
        _Head("Bart"),
    ),
    table=NameTable(
        modules=(
            Module("shared", "embedding", "table"),
            Module("final_logits_bias", "lm_head_bias", "plain", axes=1),
        ),
        layers=(_stack("encoder"), _stack("decoder")),
        prefix="model.",
        task_modules=("lm_head.", "final_logits_bias"),
        unread=("encoder.version", "decoder.version"),  # of older files
        # The table of tokens may be stored again for each stack.
        repeated={f"{stack}.embed_tokens.weight": "shared.weight" for stack in STACKS},
        if_tied={"lm_head.weight": "shared.weight"},
    ),
    defaults={"encoder_ffn_dim": 4096},
)
MBART = BART.variant("mbart", _Head("MBart"), norm=Norm())
MARIAN = BART.variant(
    "marian",
    _Positions(),
    f.Words(
        # Published models have the token of padding, with which texts begin, at the end.
        used=tuple(
            Attribute(name, kind=int, least=0, compute=lambda said: said["vocab_size"] - 1)
            for name in ("pad_token_id", "decoder_start_token_id")
        ),
        follows={"decoder_vocab_size": ("vocab_size", int)},
        only={"share_encoder_decoder_embeddings": True},
    ),
    _Head("Marian", causal="MarianMTModel"),
    positions=Learned(),
    embedding=Embedding(),
)
PEGASUS = BART.variant(
    "pegasus",
    _Positions(),
    _Head("Pegasus"),
    norm=Norm(),
    positions=Learned(),
    embedding=Embedding(),
)
