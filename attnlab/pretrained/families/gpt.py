"""Decoders of the family of GPT, in the names of Hugging Face: GPT-2 (Radford et al. 2019), GPT-J
(Wang and Komatsuzaki 2021), GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023), OPT
(Zhang et al. 2022, arXiv 2205.01068), BLOOM (BigScience 2022, arXiv 2211.05100) and Falcon
(Almazrouei et al. 2023, arXiv 2311.16867).
"""

import math

from attnlab.heads import Standard
from attnlab.models import FFN, Alibi, Embedding, Init, Learned, Norm, Rotary
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.llama import LLAMA, QKVO, RATES, decoder_table
from attnlab.pretrained.family import Family
from attnlab.pretrained.name_table import PACKED, Module, linears
from attnlab.pretrained.rotary import RotaryField
from attnlab.pretrained.tasks import LAST, OLDER, questions


class _LayerScales(f.Field):
    """Scores of layer i divided by i + 1."""

    attributes = (Attribute("scale_attn_by_inverse_layer_idx", False),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        scales = tuple(1 / (i + 1) for i in range(attributes["n_layer"]))
        used = attributes["scale_attn_by_inverse_layer_idx"]
        return {"attention.layer_scales": scales if used else None}

    def write(self, config: ModelConfig) -> JSON:
        return {"scale_attn_by_inverse_layer_idx": config.attention.layer_scales is not None}


GPT2 = Family(
    name="gpt2",
    base=ModelConfig(
        heads=Standard(num_heads=4, biases=f.BIASES), init=Init(std=0.02, residual="depth")
    ),
    fields=(
        *f.numbers("vocab_size n_positions n_embd n_layer n_head"),
        *f.numbers("resid_pdrop embd_pdrop attn_pdrop layer_norm_epsilon"),
        f.ffn_width("n_inner", "n_embd"),
        f.activation("activation_function"),
        f.Choice("scale_attn_weights", "heads.scale", {True: None, False: 1.0}),
        _LayerScales(),
        # The bare model has the same weights: its LM head is there, tied, for whoever asks.
        f.CausalHead("GPT2", causal="GPT2LMHeadModel", bare_kind="tied"),
    ),
    table=decoder_table(
        attention=(
            Module("attn.c_attn", PACKED, "conv1d"),
            Module("attn.c_proj", "attention.o", "conv1d"),
        ),
        ffn=(Module("mlp.c_fc", "ffn.up", "conv1d"), Module("mlp.c_proj", "ffn.down", "conv1d")),
        norms={"attention.norm": "ln_1", "ffn.norm": "ln_2"},
        outside={"embedding": "wte", "final_norm": "ln_f", "positions": "wpe"},
        layers="h.{}.",
        prefix="transformer.",
        # The causal mask, stored as if it were a bias.
        unread=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    tasks=OLDER,
)


def megatron_heads(attention: str) -> tuple[Module, ...]:
    """Modules of self-attention with Megatron-LM's names, behind the name of the attention."""
    return (
        Module(f"{attention}.query_key_value", PACKED, by_head=True),
        Module(f"{attention}.dense", "attention.o"),
    )


MEGATRON_FFN = linears("mlp.", "ffn", up="dense_h_to_4h", down="dense_4h_to_h")
GPT_NEOX = LLAMA.variant(
    "gpt_neox",
    f.CausalHead("GPTNeoX"),
    *f.numbers("layer_norm_eps hidden_dropout"),
    f.activation("hidden_act"),
    f.Choice("use_parallel_residual", "norm.position", {True: "parallel", False: "pre"}),
    RotaryField("rotary_emb_base", "rotary_pct", 0.25),
    # transformers reads attention_dropout and hidden_dropout, rotary_emb_base and rotary_pct alone.
    f.Words(
        ignored="attention_probs_dropout_prob hidden_dropout_prob rope_theta partial_rotary_factor"
    ),
    without="rms_norm_eps num_key_value_heads head_dim mlp_bias",
    table=decoder_table(
        attention=megatron_heads("attention"),
        ffn=MEGATRON_FFN,
        outside={"embedding": "embed_in", "final_norm": "final_layer_norm", "lm_head": "embed_out"},
        prefix="gpt_neox.",
        # The causal mask, stored as if it were a bias; rates of the rotary positions.
        unread=(
            "layers.*.attention.bias",
            "layers.*.attention.masked_bias",
            "layers.*.attention.rotary_emb.inv_freq",
        ),
        renamed=(("lm_head.weight", "embed_out.weight"),),
    ),
    norm=Norm(),
    ffn=FFN(),
    tasks=OLDER,
)
NOT_LLAMA = "intermediate_size rms_norm_eps num_key_value_heads head_dim attention_bias mlp_bias "
NOT_LLAMA += "hidden_act"


OPT = LLAMA.variant(
    "opt",
    f.CausalHead("OPT"),
    *f.numbers("ffn_dim dropout"),
    f.activation("activation_function"),
    f.Choice("do_layer_norm_before", "norm.position", {True: "pre", False: "post"}),
    *f.all_biases("enable_bias"),
    f.Words(
        ignored="init_std layerdrop activation_dropout",
        # The matrices project_in and project_out of opt-350m have no place in the model.
        follows={"word_embed_proj_dim": ("hidden_size", int)},
        only={"_remove_final_layer_norm": False},
    ),
    f.value("layer_norm_elementwise_affine", bool, "norm.scale"),
    without=f"{NOT_LLAMA} rope_parameters",
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
    dropout=f.IN_LAYERS,
    positions=Learned(offset=2),
    tasks=(LAST, questions()),
)


class _BloomFFN(f.Field):
    """The hidden layer of the FFN is four times as wide as the model, with GPT-2's activation.

    Sums over slices of the weights, as for tensor parallelism, leave out biases in transformers.
    """

    attributes = Attribute("slow_but_exact", False), Attribute("pretraining_tp", 1)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        if attributes["slow_but_exact"] and attributes["pretraining_tp"] > 1:
            raise bad_value("slow_but_exact", True, "is supported with pretraining_tp = 1 alone")
        return {"ffn.width": 4 * attributes["hidden_size"], "ffn.activation": "gelu_tanh"}


BLOOM = LLAMA.variant(
    "bloom",
    dict(hidden_size=None, n_head=None, seq_length=2048),  # the first may have other names
    f.CausalHead("Bloom"),
    f.value("hidden_size", int, "width", compute=lambda said: said["n_embed"] or 64),
    *f.numbers("n_layer seq_length hidden_dropout layer_norm_epsilon"),
    f.value(
        "n_head", int, "heads.num_heads", compute=lambda said: said["num_attention_heads"] or 8
    ),
    _BloomFFN(),
    f.Words(
        # Other names that published configs have.
        follows={"n_embed": ("hidden_size", int), "num_attention_heads": ("n_head", int)},
        ignored="offset_alibi skip_bias_add skip_bias_add_qkv attention_softmax_in_fp32 "
        "masked_softmax_fusion bias_dropout_fusion",
        only={"apply_residual_connection_post_layernorm": False, "n_inner": None},
    ),
    without=f"{NOT_LLAMA} rope_parameters num_hidden_layers max_position_embeddings",
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
    dropout=f.IN_LAYERS,
    positions=Alibi(),
    embedding=Embedding(norm=True),
    tasks=OLDER,
)


PARALLEL = Norm(position="parallel_one")


class _RotaryDim(f.Field):
    """rotary_dim numbers of each head are rotated."""

    attributes = (Attribute("rotary_dim", 64),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        size = attributes["n_embd"] / attributes["n_head"]
        if attributes["rotary_dim"] > size:
            why = f"is more than the width of a head, {size:g}"
            raise bad_value("rotary_dim", attributes["rotary_dim"], why)
        fraction = attributes["rotary_dim"] / size
        while int(size * fraction) < attributes["rotary_dim"]:  # rounding
            fraction = math.nextafter(fraction, 1)
        return {"positions": Rotary(fraction=fraction)}

    def write(self, config: ModelConfig) -> JSON:
        return {"rotary_dim": config.rotary_size}


GPTJ_HEADS = linears("attn.", "attention", **QKVO | {"o": "out_proj"})
GPTJ = GPT2.variant(
    "gptj",
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
            why = f"with parallel_attn = {attributes['parallel_attn']} is not supported where"
            why += f" new_decoder_architecture = {new}"
            raise bad_value("num_ln_in_parallel_attn", norms, why)
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
    f.CausalHead("Falcon"),
    *f.numbers("hidden_dropout layer_norm_epsilon"),
    f.ffn_width("ffn_hidden_size", "hidden_size"),
    f.activation("activation"),
    _Falcon(),
    *f.all_biases("bias"),
    f.Words(only={"alibi": False, "apply_residual_connection_post_layernorm": False}),
    without=NOT_LLAMA,
    norm=PARALLEL,
    # transformers drops the sum of attention and FFN; without parallel_attn, the attention at the
    # rate attention_dropout. Here both are dropped by themselves at the rate hidden_dropout.
    dropout=f.IN_LAYERS,
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
