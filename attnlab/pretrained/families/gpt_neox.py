"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023), in the names of Hugging Face."""

from attnlab.models import FFN, Norm
from attnlab.pretrained import fields as f
from attnlab.pretrained.families.llama import LLAMA, decoder_table
from attnlab.pretrained.name_table import PACKED, Module, linears
from attnlab.pretrained.rotary import RotaryField
from attnlab.pretrained.tasks import OLDER


def megatron_heads(attention: str) -> tuple[Module, ...]:
    """Modules of self-attention with Megatron-LM's names, behind the name of the attention."""
    return (
        Module(f"{attention}.query_key_value", PACKED, by_head=True),
        Module(f"{attention}.dense", "attention.o"),
    )


MEGATRON_FFN = linears("mlp.", "ffn", up="dense_h_to_4h", down="dense_4h_to_h")
GPT_NEOX = LLAMA.variant(
    "gpt_neox",
    dict(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64),
    dict(intermediate_size=24576, attention_bias=True),
    f.CausalHead("GPTNeoX"),
    *f.numbers(layer_norm_eps=1e-5, hidden_dropout=0.0),
    f.activation("hidden_act", "gelu"),
    f.Choice("use_parallel_residual", True, "norm.position", {True: "parallel", False: "pre"}),
    RotaryField("rotary_emb_base", "rotary_pct", 0.25),
    # Of training; what transformers reads are attention_dropout and hidden_dropout.
    f.Words(ignored="attention_probs_dropout_prob hidden_dropout_prob"),
    without="rms_norm_eps num_key_value_heads head_dim mlp_bias",
    table=decoder_table(
        attention=megatron_heads("attention"),
        ffn=MEGATRON_FFN,
        outside={
            "embedding": "embed_in",
            "final_norm": "final_layer_norm",
            "lm_head": "embed_out",
        },
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
