"""OPT (Zhang et al. 2022, arXiv 2205.01068) and BLOOM (BigScience 2022, arXiv 2211.05100), in the
names of Hugging Face.
"""

from attnlab.heads import Standard
from attnlab.models import FFN, Alibi, Embedding, Learned, Norm
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.gpt_neox import MEGATRON_FFN, megatron_heads
from attnlab.pretrained.families.llama import LLAMA, QKVO, decoder_table
from attnlab.pretrained.name_table import linears
from attnlab.pretrained.tasks import LAST, OLDER, questions

NOT_LLAMA = "intermediate_size rms_norm_eps num_key_value_heads head_dim attention_bias mlp_bias "
NOT_LLAMA += "hidden_act rope_parameters"


class _TableWidth(f.Field):
    """word_embed_proj_dim is hidden_size, or null."""

    attributes = (Attribute("word_embed_proj_dim", kind=int),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
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


OPT = LLAMA.variant(
    "opt",
    dict(vocab_size=50272, hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    f.CausalHead("OPT", tied=True),
    *f.numbers(ffn_dim=3072, dropout=0.1),
    f.activation("activation_function", "relu"),
    f.Choice("do_layer_norm_before", True, "norm.position", {True: "pre", False: "post"}),
    *f.all_biases("enable_bias", True),
    _TableWidth(),
    f.Words(
        ignored="init_std layerdrop activation_dropout",
        only={"_remove_final_layer_norm": False},
    ),
    f.value("layer_norm_elementwise_affine", True, "norm.scale"),
    without=NOT_LLAMA,
    table=decoder_table(
        attention=linears("self_attn.", "attention", **QKVO | {"o": "out_proj"}),
        ffn=linears("", "ffn", up="fc1", down="fc2"),
        norms={"attention.norm": "self_attn_layer_norm", "ffn.norm": "final_layer_norm"},
        outside={
            "embedding": "decoder.embed_tokens",
            "final_norm": "decoder.final_layer_norm",
            "positions": "decoder.embed_positions",
        },
        layers="decoder.layers.{}.",
    ),
    norm=Norm(eps=1e-5),
    positions=Learned(offset=2),
    tasks=(LAST, questions()),
)


class _FFN(f.Field):
    """The hidden layer of the FFN is four times as wide as the model, with GPT-2's activation."""

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        return {"ffn.width": 4 * attributes["hidden_size"], "ffn.activation": "gelu_tanh"}


class _NumHeads(f.Field):
    """n_head, which published configs also call num_attention_heads."""

    attributes = (Attribute("num_attention_heads", kind=int), Attribute("n_head", kind=int))

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        one, other = (attributes[a.name] for a in self.attributes)
        if None not in (one, other) and one != other:
            raise bad_value("n_head", other, f"contradicts num_attention_heads = {one}")
        return {"heads.num_heads": one or other or 8}

    def write(self, config: ModelConfig) -> JSON:
        return {a.name: config.heads.num_heads for a in self.attributes}


BLOOM = LLAMA.variant(
    "bloom",
    dict(vocab_size=250880),
    f.CausalHead("Bloom", tied=True),
    f.value("hidden_size", None, "width", kind=int, compute=lambda said: said["n_embed"] or 64),
    *f.numbers(n_layer=2, seq_length=2048, hidden_dropout=0.0, layer_norm_epsilon=1e-5),
    _NumHeads(),
    _FFN(),
    f.Words(
        follows={"n_embed": ("hidden_size", int)},  # the older name
        ignored="offset_alibi skip_bias_add skip_bias_add_qkv attention_softmax_in_fp32 "
        "masked_softmax_fusion bias_dropout_fusion slow_but_exact",
        only={"apply_residual_connection_post_layernorm": False, "n_inner": None},
    ),
    without=f"{NOT_LLAMA} num_hidden_layers max_position_embeddings",
    table=decoder_table(
        attention=megatron_heads("self_attention"),
        ffn=MEGATRON_FFN,
        outside={
            "embedding": "word_embeddings",
            "final_norm": "ln_f",
            "embedding_norm": "word_embeddings_layernorm",
        },
        layers="h.{}.",
        prefix="transformer.",
    ),
    heads=Standard(num_heads=4, biases=f.BIASES),
    norm=Norm(),
    ffn=FFN(),
    positions=Alibi(),
    embedding=Embedding(norm=True),
    tasks=OLDER,
)
