"""Decoders whose attention and FFN read one norm of the same input, in the names of Hugging Face:
GPT-J (Wang and Komatsuzaki 2021), Phi (Li et al. 2023, arXiv 2309.05463), Cohere (2024), Cohere 2
(2025, arXiv 2504.00698) and Falcon (Almazrouei et al. 2023, arXiv 2311.16867).
"""

from attnlab.heads import HeadNorm, Standard
from attnlab.models import FFN, Init, Norm, Rotary
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.gpt2 import GPT2
from attnlab.pretrained.families.gpt_neox import MEGATRON_FFN, megatron_heads
from attnlab.pretrained.families.llama import LLAMA, PAIRED, QKVO, RATES, decoder_table
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rotary import RotaryField, StillTypes, every
from attnlab.pretrained.tasks import LAST, OLDER, SCORES, questions

PARALLEL = Norm(position="parallel_one")
ONE_NORM = {"attention.norm": "input_layernorm"}
EPSILON = f.value("layer_norm_eps", 1e-5, "norm.eps", "heads.norm_eps")
HEAD_NORM, BIASED_HEAD_NORM = HeadNorm("layer", over="own_head"), HeadNorm("layer", bias=True)

COHERE = LLAMA.variant(
    "cohere",
    dict(vocab_size=256000, hidden_size=8192, intermediate_size=22528, num_hidden_layers=40),
    dict(num_attention_heads=64, max_position_embeddings=8192),
    f.CausalHead("Cohere", tied=True),
    EPSILON,
    f.Choice("use_qk_norm", False, "heads.qk_norm", {True: HEAD_NORM, False: None}),
    f.value("logit_scale", 0.0625, "output.scale"),
    RotaryField(required=("rope_theta",)),
    without="rms_norm_eps mlp_bias head_dim",
    table=decoder_table(PAIRED, norms=ONE_NORM),
    norm=Norm(position="parallel_one", bias=False),
    tasks=(),
)
COHERE2 = COHERE.variant(
    "cohere2",
    f.CausalHead("Cohere2", tied=True),
    StillTypes(
        default_types=every("sliding_window_pattern"),
        more=(Attribute("sliding_window_pattern", 4),),
        rope=RotaryField(required=("rope_theta",)),
    ),
    f.head_dim(),
    without="use_qk_norm",
)
PHI = LLAMA.variant(
    "phi",
    dict(vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24),
    f.CausalHead("Phi", bias=True),
    *f.numbers(resid_pdrop=0.0, embd_pdrop=0.0),
    f.activation("hidden_act", "gelu_new"),
    EPSILON,
    f.Choice("qk_layernorm", False, "heads.qk_norm", {True: BIASED_HEAD_NORM, False: None}),
    RotaryField(fraction="partial_rotary_factor", default_fraction=0.5),
    without="rms_norm_eps attention_bias mlp_bias head_dim",
    table=decoder_table(
        attention=(
            *linears("self_attn.", "attention", **QKVO | {"o": "dense"}),
            *(Module(f"self_attn.{n}_layernorm", f"attention.{n}_norm", "table") for n in "qk"),
            *(Module(f"self_attn.{n}_layernorm", f"attention.{n}_norm_bias", "bias") for n in "qk"),
        ),
        ffn=linears("mlp.", "ffn", up="fc1", down="fc2"),
        norms=ONE_NORM,
        outside={"final_norm": "final_layernorm"},
    ),
    heads=Standard(num_heads=4, biases=f.BIASES),
    norm=PARALLEL,
    ffn=FFN(),
    tasks=SCORES,
)


class _RotaryDim(f.Field):
    """rotary_dim numbers of each head are rotated."""

    attributes = (Attribute("rotary_dim", 64),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        size = attributes["n_embd"] / attributes["n_head"]
        if attributes["rotary_dim"] > size:
            why = f"is more than the width of a head, {size:g}"
            raise bad_value("rotary_dim", attributes["rotary_dim"], why)
        return {"positions": Rotary(fraction=attributes["rotary_dim"] / size)}

    def write(self, config: ModelConfig) -> JSON:
        return {"rotary_dim": config.rotary_size}


GPTJ_HEADS = linears("attn.", "attention", **QKVO | {"o": "out_proj"})
GPTJ = GPT2.variant(
    "gptj",
    dict(vocab_size=50400, n_positions=2048, n_embd=4096, n_layer=28, n_head=16),
    dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    f.CausalHead("GPTJ", bias=True),
    _RotaryDim(),
    f.Words(only={"rotary": True, "scale_attn_weights": True}),
    without="scale_attn_by_inverse_layer_idx",
    heads=Standard(num_heads=4),
    norm=PARALLEL,
    init=Init(std=0.02),
    table=decoder_table(
        attention=tuple(module._replace(pairs=("q", "k")) for module in GPTJ_HEADS),
        ffn=linears("mlp.", "ffn", up="fc_in", down="fc_out"),
        norms={"attention.norm": "ln_1"},
        outside={"embedding": "wte", "final_norm": "ln_f"},
        layers="h.{}.",
        prefix="transformer.",
        unread=(*RATES, "h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    tasks=(LAST, questions()),
)


class _Falcon(f.Field):
    """Which norms there are, and how many key heads."""

    attributes = (
        Attribute("new_decoder_architecture", False),
        Attribute("multi_query", True),
        Attribute("parallel_attn", True),
        Attribute("num_kv_heads", kind=int),
        Attribute("num_ln_in_parallel_attn", kind=int),
    )

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
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
        return {
            "new_decoder_architecture": new,
            "num_kv_heads": count if new else heads,
            "multi_query": count == 1,
            "parallel_attn": position != "pre",
            "num_ln_in_parallel_attn": 2 if position == "parallel" else 1 if new else None,
        }


FALCON = LLAMA.variant(
    "falcon",
    dict(vocab_size=65024, hidden_size=4544, num_attention_heads=71),
    f.CausalHead("Falcon", tied=True),
    *f.numbers(hidden_dropout=0.0, layer_norm_epsilon=1e-5),
    f.ffn_width("ffn_hidden_size", "hidden_size"),
    f.activation("activation", "gelu"),
    _Falcon(),
    *f.all_biases("bias", False),
    f.Words(only={"alibi": False, "apply_residual_connection_post_layernorm": False}),
    without="intermediate_size rms_norm_eps num_key_value_heads head_dim hidden_act attention_bias "
    "mlp_bias",
    norm=PARALLEL,
    table=decoder_table(
        attention=(
            *megatron_heads("self_attention"),
            Module("ln_attn", "attention.norm", "norm", only_norms=("parallel",)),
            Module("ln_mlp", "ffn.norm", "norm", only_norms=("parallel",)),
            Module("input_layernorm", "attention.norm", "norm", only_norms=("parallel_one", "pre")),
            Module("post_attention_layernorm", "ffn.norm", "norm", only_norms=("pre",)),
        ),
        ffn=MEGATRON_FFN,
        norms={},
        outside={"embedding": "word_embeddings", "final_norm": "ln_f"},
        layers="h.{}.",
        prefix="transformer.",
        unread=(*RATES, "h.*.self_attention.rotary_emb.inv_freq"),
    ),
    tasks=OLDER,
)
