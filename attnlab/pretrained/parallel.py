"""Decoders whose attention and FFN read one norm of the same input, in the names of Hugging Face:
GPT-J (Wang and Komatsuzaki 2021), Phi (Li et al. 2023, arXiv 2309.05463), Cohere (2024) and Falcon
(Almazrouei et al. 2023, arXiv 2311.16867).
"""

from attnlab.heads import HeadNorm, Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Norm, Rotary
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import (
    ACTIVATIONS,
    BIASES,
    AllBiases,
    Choice,
    Field,
    Source,
    Values,
    changed,
    grouped_heads,
    sizes,
    value,
)
from attnlab.pretrained.gpt2 import QKV, hidden_width
from attnlab.pretrained.llama import FIELDS, PAIRED, DecoderNames, causal_head, decoder
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rope import RotaryField

PARALLEL = Norm(position="parallel_one")
ONE_NORM = {"attention.norm": "input_layernorm"}

COHERE = decoder(
    "cohere",
    Standard(num_heads=4),
    changed(
        FIELDS,
        *sizes(vocab_size=256000, hidden_size=8192, intermediate_size=22528, num_hidden_layers=40),
        *sizes(num_attention_heads=64, max_position_embeddings=8192),
        *grouped_heads()[:1],
        value("layer_norm_eps", 1e-5, "norm.eps", "heads.norm_eps"),
        Choice(
            "use_qk_norm",
            False,
            "heads.qk_norm",
            {True: HeadNorm("layer", over="own_head"), False: None},
        ),
        value("logit_scale", 0.0625, "output.scale"),
        RotaryField(default_base=5e5),
        without=("rms_norm_eps", "mlp_bias", "head_dim"),
    ),
    causal_head("Cohere", tied=True),
    names=DecoderNames(attention=PAIRED, norms=ONE_NORM),
    norm=Norm(position="parallel_one", bias=False),
)
PHI = decoder(
    "phi",
    Standard(num_heads=4, biases=BIASES),
    changed(
        FIELDS,
        *sizes(vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24),
        Choice("hidden_act", "gelu_new", "ffn.activation", ACTIVATIONS),
        value("layer_norm_eps", 1e-5, "norm.eps", "heads.norm_eps"),
        value("resid_pdrop", 0.0, "dropout.rate"),
        value("embd_pdrop", 0.0, "dropout.embedding", default_path="dropout.rate"),
        Choice(
            "qk_layernorm",
            False,
            "heads.qk_norm",
            {True: HeadNorm("layer", bias=True), False: None},
        ),
        RotaryField(fraction="partial_rotary_factor", default_fraction=0.5),
        without=("rms_norm_eps", "attention_bias", "mlp_bias", "head_dim"),
    ),
    causal_head("Phi", bias=True),
    names=DecoderNames(
        attention=(
            *linears("self_attn.", "attention", q="q_proj", k="k_proj", v="v_proj", o="dense"),
            Module("self_attn.q_layernorm", "attention.q_norm", "table"),
            Module("self_attn.q_layernorm", "attention.q_norm_bias", "bias"),
            Module("self_attn.k_layernorm", "attention.k_norm", "table"),
            Module("self_attn.k_layernorm", "attention.k_norm_bias", "bias"),
        ),
        ffn=linears("mlp.", "ffn", up="fc1", down="fc2"),
        norms=ONE_NORM,
        embedding="embed_tokens",
        final_norm="final_layernorm",
    ),
    norm=PARALLEL,
    ffn_bias=True,
)


class _RotaryDim(Field):
    """rotary_dim numbers of each head are rotated."""

    attributes = (Attribute("rotary_dim", 64),)

    def read(self, attributes: JSON, source: Source) -> Values:
        size = attributes["n_embd"] / attributes["n_head"]
        if attributes["rotary_dim"] > size:
            raise ValueError(
                f"config.json: rotary_dim = {attributes['rotary_dim']} is more than the width of a "
                f"head, {size:g}"
            )
        return {"positions": Rotary(fraction=attributes["rotary_dim"] / size)}

    def write(self, config: ModelConfig) -> JSON:
        if config.positions != Rotary(fraction=getattr(config.positions, "fraction", 1.0)):
            raise ValueError(f"positions must be rotary with base 10,000, not {config.positions}")
        return {"rotary_dim": config.rotary_size}


GPTJ = decoder(
    "gptj",
    Standard(num_heads=4),
    (
        value("vocab_size", 50400, "vocab_size"),
        value("n_positions", 2048, "max_len"),
        value("n_embd", 4096, "width"),
        value("n_layer", 28, "num_layers", is_depth=True),
        value("n_head", 16, "heads.num_heads"),
        value("n_inner", None, "ffn.width", json_type=int, compute=hidden_width),
        Choice("activation_function", "gelu_new", "ffn.activation", ACTIVATIONS),
        value("resid_pdrop", 0.0, "dropout.rate"),
        value("embd_pdrop", 0.0, "dropout.embedding", default_path="dropout.rate"),
        value("attn_pdrop", 0.0, "dropout.attention"),
        value("layer_norm_epsilon", 1e-5, "norm.eps"),
        _RotaryDim(),
    ),
    causal_head("GPTJ", bias=True),
    names=DecoderNames(
        attention=tuple(
            module._replace(pairs=("q", "k"))
            for module in linears(
                "attn.", "attention", q="q_proj", k="k_proj", v="v_proj", o="out_proj"
            )
        ),
        ffn=linears("mlp.", "ffn", up="fc_in", down="fc_out"),
        norms={"attention.norm": "ln_1"},
        embedding="wte",
        final_norm="ln_f",
        layers="h.{}.",
        prefix="transformer.",
        unread=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    norm=PARALLEL,
    ffn_bias=True,
    other_attributes=OtherAttributes(fixed={"rotary": True, "scale_attn_weights": True}),
)


class _Falcon(Field):
    """Which norms there are, and how many key heads."""

    attributes = (
        Attribute("new_decoder_architecture", False),
        Attribute("multi_query", True),
        Attribute("parallel_attn", True),
        Attribute("num_kv_heads", None, nullable=True, json_type=int),
        Attribute("num_ln_in_parallel_attn", None, nullable=True, json_type=int),
    )

    def read(self, attributes: JSON, source: Source) -> Values:
        new, heads = attributes["new_decoder_architecture"], attributes["num_attention_heads"]
        norms = attributes["num_ln_in_parallel_attn"] or (2 if new else 1)
        if (new and not attributes["parallel_attn"]) or norms > (2 if new else 1):
            raise ValueError(
                f"config.json: num_ln_in_parallel_attn = {norms} and parallel_attn = "
                f"{attributes['parallel_attn']} are not supported where "
                f"new_decoder_architecture = {new}"
            )
        old = 1 if attributes["multi_query"] else heads
        position = "parallel" if norms == 2 else "parallel_one"
        return {
            "heads.num_kv_heads": (attributes["num_kv_heads"] or heads) if new else old,
            "norm.position": position if attributes["parallel_attn"] else "pre",
        }

    def write(self, config: ModelConfig) -> JSON:
        position, heads = config.norm.position, config.heads.num_heads
        count = config.layout.size("num_kv_heads")
        new = position == "parallel" or count not in (1, heads)
        if position not in ("parallel", "parallel_one") and (position != "pre" or new):
            raise ValueError(f"norm.position must be 'parallel', not {position!r}")
        return {
            "new_decoder_architecture": new,
            "num_kv_heads": count if new else heads,
            "multi_query": count == 1,
            "parallel_attn": position != "pre",
            "num_ln_in_parallel_attn": 2 if position == "parallel" else 1 if new else None,
        }


def _ffn_width(attributes: JSON) -> int:
    return 4 * int(attributes["hidden_size"])


FALCON = decoder(
    "falcon",
    Standard(num_heads=4),
    (
        *sizes(vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71),
        *sizes(max_position_embeddings=2048),
        value("ffn_hidden_size", None, "ffn.width", json_type=int, compute=_ffn_width),
        Choice("activation", "gelu", "ffn.activation", ACTIVATIONS),
        value("attention_dropout", 0.0, "dropout.attention"),
        value("hidden_dropout", 0.0, "dropout.rate"),
        value("layer_norm_epsilon", 1e-5, "norm.eps"),
        _Falcon(),
        AllBiases("bias", False),
        RotaryField(),
    ),
    causal_head("Falcon", tied=True),
    names=DecoderNames(
        attention=(
            Module("self_attention.query_key_value", QKV, by_head=True),
            Module("self_attention.dense", "attention.o"),
            Module("ln_attn", "attention.norm", "norm", only_norms=("parallel",)),
            Module("ln_mlp", "ffn.norm", "norm", only_norms=("parallel",)),
            Module("input_layernorm", "attention.norm", "norm", only_norms=("parallel_one", "pre")),
            Module("post_attention_layernorm", "ffn.norm", "norm", only_norms=("pre",)),
        ),
        ffn=linears("mlp.", "ffn", up="dense_h_to_4h", down="dense_4h_to_h"),
        norms={},
        embedding="word_embeddings",
        final_norm="ln_f",
        layers="h.{}.",
        prefix="transformer.",
        unread=("h.*.self_attention.rotary_emb.inv_freq",),
    ),
    norm=PARALLEL,
    other_attributes=OtherAttributes(fixed={"alibi": False}),
)
