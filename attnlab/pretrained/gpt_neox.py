"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023), in the names of Hugging Face."""

from attnlab.models.specs import FFN, Norm
from attnlab.pretrained.common_fields import CausalHead, activation, biases, numbers
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import Choice
from attnlab.pretrained.llama import DecoderNames, decoder
from attnlab.pretrained.name_table import PACKED, Module, linears
from attnlab.pretrained.rope import RotaryField


def megatron_heads(attention: str) -> tuple[Module, ...]:
    """Modules of self-attention with Megatron-LM's names, behind the name of the attention."""
    return (
        Module(f"{attention}.query_key_value", PACKED, by_head=True),
        Module(f"{attention}.dense", "attention.o"),
    )


MEGATRON_FFN = linears("mlp.", "ffn", up="dense_h_to_4h", down="dense_4h_to_h")
GPT_NEOX = decoder(
    "gpt_neox",
    (
        *numbers(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64),
        *numbers(intermediate_size=24576, max_position_embeddings=2048, layer_norm_eps=1e-5),
        *numbers(attention_dropout=0.0, hidden_dropout=0.0),
        activation("hidden_act", "gelu"),
        Choice("use_parallel_residual", True, "norm.position", {True: "parallel", False: "pre"}),
        biases("attention_bias", True),
        RotaryField("rotary_emb_base", "rotary_pct", 0.25),
    ),
    CausalHead("GPTNeoX"),
    names=DecoderNames(
        attention=megatron_heads("attention"),
        ffn=MEGATRON_FFN,
        embedding="embed_in",
        final_norm="final_layer_norm",
        lm_head="embed_out",
        prefix="gpt_neox.",
        # The causal mask, stored as if it were a bias; rates of the rotary positions.
        unread=(
            "layers.*.attention.bias",
            "layers.*.attention.masked_bias",
            "layers.*.attention.rotary_emb.inv_freq",
        ),
        renamed=(("lm_head.weight", "embed_out.weight"),),
    ),
    # Of training; what transformers reads are attention_dropout and hidden_dropout.
    other_attributes=OtherAttributes(
        ignored=("attention_probs_dropout_prob", "hidden_dropout_prob")
    ),
    norm=Norm(),
    ffn=FFN(),
)
