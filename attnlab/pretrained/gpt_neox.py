"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023), in the names of Hugging Face."""

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Init
from attnlab.pretrained.family import Family, UnreadTensors
from attnlab.pretrained.fields import ACTIVATIONS, BIASES, CausalHead, Choice, sizes, value
from attnlab.pretrained.gpt2 import QKV
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.pretrained.rope import RotaryField

GPT_NEOX = Family(
    name="gpt_neox",
    base=ModelConfig(heads=Standard(num_heads=4), init=Init(std=0.02)),
    fields=(
        *sizes(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64),
        *sizes(intermediate_size=24576, max_position_embeddings=2048),
        Choice("hidden_act", "gelu", "ffn.activation", ACTIVATIONS),
        value("attention_dropout", 0.0, "dropout.attention"),
        value("hidden_dropout", 0.0, "dropout.rate"),
        value("layer_norm_eps", 1e-5, "norm.eps"),
        Choice("use_parallel_residual", True, "norm.position", {True: "parallel", False: "pre"}),
        Choice("attention_bias", True, "heads.biases", {True: BIASES, False: ()}),
        RotaryField("rotary_emb_base", "rotary_pct", 0.25),
        CausalHead("GPTNeoXModel", "GPTNeoXForCausalLM"),
    ),
    table=NameTable(
        modules=(
            Module("embed_in", "embedding", "table"),
            Module("final_layer_norm", "final_norm", "norm"),
            Module("embed_out", "lm_head"),
        ),
        layers=(
            Layers(
                "layers.{}.",
                (
                    Module("attention.query_key_value", QKV, by_head=True),
                    Module("attention.dense", "attention.o"),
                    Module("input_layernorm", "attention.norm", "norm"),
                    *linears("mlp.", "ffn", up="dense_h_to_4h", down="dense_4h_to_h"),
                    Module("post_attention_layernorm", "ffn.norm", "norm"),
                ),
            ),
        ),
    ),
    prefix="gpt_neox.",
    task_modules=("embed_out.",),
    renamed=(("lm_head.weight", "embed_out.weight"),),
    unread=UnreadTensors(
        # The causal mask, stored as if it were a bias; rates of the rotary positions.
        always=(
            "layers.*.attention.bias",
            "layers.*.attention.masked_bias",
            "layers.*.attention.rotary_emb.inv_freq",
        ),
        if_tied=("embed_out.weight",),
    ),
)
