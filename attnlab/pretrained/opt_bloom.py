"""OPT (Zhang et al. 2022, arXiv 2205.01068) and BLOOM (BigScience 2022, arXiv 2211.05100), in the
names of Hugging Face.
"""

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Alibi, Embedding, Learned, Norm
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value, derived
from attnlab.pretrained.common_fields import BIASES, AllBiases, CausalHead, activation, numbers
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import Choice, Field, Source, Values, value
from attnlab.pretrained.gpt_neox import MEGATRON_FFN, megatron_heads
from attnlab.pretrained.llama import DecoderNames, decoder
from attnlab.pretrained.name_table import Module, linears


class _TableWidth(Field):
    """word_embed_proj_dim is hidden_size, or null."""

    attributes = (Attribute("word_embed_proj_dim", None, nullable=True, json_type=int),)

    def read(self, attributes: JSON, source: Source) -> Values:
        width = attributes["word_embed_proj_dim"]
        if width not in (None, attributes["hidden_size"]):
            raise bad_value(
                "word_embed_proj_dim",
                width,
                f"is not supported, only hidden_size = {attributes['hidden_size']}: the matrices "
                "project_in and project_out of opt-350m have no place in the model",
            )
        return {}

    def write(self, config: ModelConfig) -> JSON:
        return {"word_embed_proj_dim": config.width}


OPT = decoder(
    "opt",
    (
        *numbers(vocab_size=50272, hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
        *numbers(max_position_embeddings=2048, ffn_dim=3072, dropout=0.1, attention_dropout=0.0),
        activation("activation_function", "relu"),
        Choice("do_layer_norm_before", True, "norm.position", {True: "pre", False: "post"}),
        AllBiases("enable_bias", True),
        _TableWidth(),
    ),
    CausalHead("OPT", tied=True),
    names=DecoderNames(
        attention=linears(
            "self_attn.", "attention", q="q_proj", k="k_proj", v="v_proj", o="out_proj"
        ),
        ffn=linears("", "ffn", up="fc1", down="fc2"),
        norms={"attention.norm": "self_attn_layer_norm", "ffn.norm": "final_layer_norm"},
        embedding="decoder.embed_tokens",
        final_norm="decoder.final_layer_norm",
        more=(Module("decoder.embed_positions", "positions", "table"),),
        layers="decoder.layers.{}.",
    ),
    other_attributes=OtherAttributes(
        ignored=("init_std", "layerdrop", "activation_dropout"),
        fixed={"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    ),
    norm=Norm(eps=1e-5),
    positions=Learned(offset=2),
)


class _FFN(Field):
    """The hidden layer of the FFN is four times as wide as the model, with GPT-2's activation."""

    attributes = ()

    def read(self, attributes: JSON, source: Source) -> Values:
        return {"ffn.width": 4 * attributes["hidden_size"], "ffn.activation": "gelu_tanh"}

    def write(self, config: ModelConfig) -> JSON:
        if (config.ffn.width, config.ffn.activation) != (4 * config.width, "gelu_tanh"):
            raise ValueError(f"ffn must have width {4 * config.width} and activation 'gelu_tanh'")
        return {}


class _NumHeads(Field):
    """n_head, which published configs also call num_attention_heads."""

    attributes = (Attribute("num_attention_heads"), Attribute("n_head"))

    def read(self, attributes: JSON, source: Source) -> Values:
        names = [a.name for a in self.attributes if attributes[a.name] is not None]
        for name in names:
            Attribute(name, 8).check(attributes[name])
            if attributes[name] != attributes[names[0]]:
                raise ValueError(f"config.json: {names[0]} and {name} differ")
        return {"heads.num_heads": attributes[names[0]] if names else 8}

    def write(self, config: ModelConfig) -> JSON:
        return {a.name: config.heads.num_heads for a in self.attributes}


BLOOM = decoder(
    "bloom",
    (
        *numbers(vocab_size=250880, n_layer=2, seq_length=2048),
        value("hidden_size", None, "width", json_type=int, compute=lambda a: a["n_embed"] or 64),
        *numbers(hidden_dropout=0.0, attention_dropout=0.0, layer_norm_epsilon=1e-5),
        _NumHeads(),
        _FFN(),
    ),
    CausalHead("Bloom", tied=True),
    names=DecoderNames(
        attention=megatron_heads("self_attention"),
        ffn=MEGATRON_FFN,
        embedding="word_embeddings",
        final_norm="ln_f",
        more=(Module("word_embeddings_layernorm", "embedding_norm", "norm"),),
        layers="h.{}.",
        prefix="transformer.",
    ),
    other_attributes=OtherAttributes(
        read=(derived("n_embed", "hidden_size"),),  # the older name
        ignored=(
            *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32"),
            *("masked_softmax_fusion", "bias_dropout_fusion", "slow_but_exact"),
        ),
        fixed={"apply_residual_connection_post_layernorm": False, "n_inner": None},
    ),
    heads=Standard(num_heads=4, biases=BIASES),
    norm=Norm(),
    ffn=FFN(),
    positions=Alibi(),
    embedding=Embedding(norm=True),
)
