"""Decoders whose attention and FFN read one norm of the same input, in the names of Hugging Face:
GPT-J (Wang and Komatsuzaki 2021), Phi (Li et al. 2023, arXiv 2309.05463), Cohere (2024) and Falcon
(Almazrouei et al. 2023, arXiv 2311.16867).
"""

from attnlab.heads import HeadNorm, Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Norm, Rotary
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.common_fields import (
    BIASES,
    AllBiases,
    CausalHead,
    activation,
    ffn_width,
    numbers,
)
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import Choice, Field, Source, Values, changed, value
from attnlab.pretrained.gpt_neox import MEGATRON_FFN, megatron_heads
from attnlab.pretrained.llama import FIELDS, PAIRED, RATES, DecoderNames, decoder
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rope import RotaryField

PARALLEL = Norm(position="parallel_one")
ONE_NORM = {"attention.norm": "input_layernorm"}
EPSILON = value("layer_norm_eps", 1e-5, "norm.eps", "heads.norm_eps")
HEAD_NORM, BIASED_HEAD_NORM = HeadNorm("layer", over="own_head"), HeadNorm("layer", bias=True)

COHERE = decoder(
    "cohere",
    changed(
        FIELDS,
        *numbers(vocab_size=256000, hidden_size=8192, intermediate_size=22528),
        *numbers(num_hidden_layers=40, num_attention_heads=64, max_position_embeddings=8192),
        EPSILON,
        Choice("use_qk_norm", False, "heads.qk_norm", {True: HEAD_NORM, False: None}),
        value("logit_scale", 0.0625, "output.scale"),
        RotaryField(required=("rope_theta",)),
        without=("rms_norm_eps", "mlp_bias", "head_dim"),
    ),
    CausalHead("Cohere", tied=True),
    names=DecoderNames(attention=PAIRED, norms=ONE_NORM),
    norm=Norm(position="parallel_one", bias=False),
)
PHI = decoder(
    "phi",
    changed(
        FIELDS,
        *numbers(vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24),
        *numbers(resid_pdrop=0.0, embd_pdrop=0.0),
        activation("hidden_act", "gelu_new"),
        EPSILON,
        Choice("qk_layernorm", False, "heads.qk_norm", {True: BIASED_HEAD_NORM, False: None}),
        RotaryField(fraction="partial_rotary_factor", default_fraction=0.5),
        without=("rms_norm_eps", "attention_bias", "mlp_bias", "head_dim"),
    ),
    CausalHead("Phi", bias=True),
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
        final_norm="final_layernorm",
    ),
    heads=Standard(num_heads=4, biases=BIASES),
    norm=PARALLEL,
    ffn=FFN(),
)


class _RotaryDim(Field):
    """rotary_dim numbers of each head are rotated."""

    attributes = (Attribute("rotary_dim", 64),)

    def read(self, attributes: JSON, source: Source) -> Values:
        size = attributes["n_embd"] / attributes["n_head"]
        if attributes["rotary_dim"] > size:
            why = f"is more than the width of a head, {size:g}"
            raise bad_value("rotary_dim", attributes["rotary_dim"], why)
        return {"positions": Rotary(fraction=attributes["rotary_dim"] / size)}

    def write(self, config: ModelConfig) -> JSON:
        if config.positions != Rotary(fraction=getattr(config.positions, "fraction", 1.0)):
            raise ValueError(f"positions must be rotary with base 10,000, not {config.positions}")
        return {"rotary_dim": config.rotary_size}


GPTJ_HEADS = linears("attn.", "attention", q="q_proj", k="k_proj", v="v_proj", o="out_proj")
GPTJ = decoder(
    "gptj",
    (
        *numbers(vocab_size=50400, n_positions=2048, n_embd=4096, n_layer=28, n_head=16),
        *numbers(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-5),
        ffn_width("n_inner", "n_embd"),
        activation("activation_function", "gelu_new"),
        _RotaryDim(),
    ),
    CausalHead("GPTJ", bias=True),
    names=DecoderNames(
        attention=tuple(module._replace(pairs=("q", "k")) for module in GPTJ_HEADS),
        ffn=linears("mlp.", "ffn", up="fc_in", down="fc_out"),
        norms={"attention.norm": "ln_1"},
        embedding="wte",
        final_norm="ln_f",
        layers="h.{}.",
        prefix="transformer.",
        unread=(*RATES, "h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    other_attributes=OtherAttributes(fixed={"rotary": True, "scale_attn_weights": True}),
    norm=PARALLEL,
    ffn=FFN(),
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
            raise bad_value(
                "num_ln_in_parallel_attn",
                norms,
                f"and parallel_attn = {attributes['parallel_attn']} are not supported where "
                f"new_decoder_architecture = {new}",
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


FALCON = decoder(
    "falcon",
    (
        *numbers(vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71),
        *numbers(max_position_embeddings=2048, attention_dropout=0.0, hidden_dropout=0.0),
        *numbers(layer_norm_epsilon=1e-5),
        ffn_width("ffn_hidden_size", "hidden_size"),
        activation("activation", "gelu"),
        _Falcon(),
        AllBiases("bias", False),
        RotaryField(),
    ),
    CausalHead("Falcon", tied=True),
    names=DecoderNames(
        attention=(
            *megatron_heads("self_attention"),
            Module("ln_attn", "attention.norm", "norm", only_norms=("parallel",)),
            Module("ln_mlp", "ffn.norm", "norm", only_norms=("parallel",)),
            Module("input_layernorm", "attention.norm", "norm", only_norms=("parallel_one", "pre")),
            Module("post_attention_layernorm", "ffn.norm", "norm", only_norms=("pre",)),
        ),
        ffn=MEGATRON_FFN,
        norms={},
        embedding="word_embeddings",
        final_norm="ln_f",
        layers="h.{}.",
        prefix="transformer.",
        unread=(*RATES, "h.*.self_attention.rotary_emb.inv_freq"),
    ),
    other_attributes=OtherAttributes(
        fixed={"alibi": False, "apply_residual_connection_post_layernorm": False}
    ),
    norm=PARALLEL,
)
