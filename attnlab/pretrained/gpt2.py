"""GPT-2 (Radford et al. 2019), in the names of Hugging Face."""

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Init
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.family import Family, UnreadTensors
from attnlab.pretrained.fields import (
    ACTIVATIONS,
    BIASES,
    CausalHead,
    Choice,
    Field,
    Source,
    Values,
    value,
)
from attnlab.pretrained.name_table import Layers, Module, NameTable


def hidden_width(attributes: JSON) -> int:
    return 4 * int(attributes["n_embd"])


class _LayerScales(Field):
    """Scores of layer i divided by i + 1."""

    attributes = (Attribute("scale_attn_by_inverse_layer_idx", False),)

    def read(self, attributes: JSON, source: Source) -> Values:
        scales = tuple(1 / (i + 1) for i in range(attributes["n_layer"]))
        used = attributes["scale_attn_by_inverse_layer_idx"]
        return {"attention.layer_scales": scales if used else None}

    def write(self, config: ModelConfig) -> JSON:
        return {"scale_attn_by_inverse_layer_idx": config.attention.layer_scales is not None}


QKV = ("attention.q", "attention.k", "attention.v")
GPT2 = Family(
    name="gpt2",
    base=ModelConfig(
        heads=Standard(num_heads=4, biases=BIASES), init=Init(std=0.02, residual="depth")
    ),
    fields=(
        value("vocab_size", 50257, "vocab_size"),
        value("n_positions", 1024, "max_len"),
        value("n_embd", 768, "width"),
        value("n_layer", 12, "num_layers", is_depth=True),
        value("n_head", 12, "heads.num_heads"),
        value("n_inner", None, "ffn.width", json_type=int, compute=hidden_width),
        Choice("activation_function", "gelu_new", "ffn.activation", ACTIVATIONS),
        value("resid_pdrop", 0.1, "dropout.rate"),
        value("embd_pdrop", 0.1, "dropout.embedding", default_path="dropout.rate"),
        value("attn_pdrop", 0.1, "dropout.attention"),
        value("layer_norm_epsilon", 1e-5, "norm.eps"),
        Choice("scale_attn_weights", True, "heads.scale", {True: None, False: 1.0}),
        _LayerScales(),
        # The bare model has the same weights: its LM head is there, tied, for whoever asks.
        CausalHead("GPT2Model", "GPT2LMHeadModel", tied=True, bare_kind="tied"),
    ),
    table=NameTable(
        modules=(
            Module("wte", "embedding", "table"),
            Module("wpe", "positions", "table"),
            Module("ln_f", "final_norm", "norm"),
            Module("lm_head", "lm_head"),
        ),
        layers=(
            Layers(
                "h.{}.",
                (
                    Module("attn.c_attn", QKV, "conv1d"),
                    Module("attn.c_proj", "attention.o", "conv1d"),
                    Module("ln_1", "attention.norm", "norm"),
                    Module("mlp.c_fc", "ffn.up", "conv1d"),
                    Module("mlp.c_proj", "ffn.down", "conv1d"),
                    Module("ln_2", "ffn.norm", "norm"),
                ),
            ),
        ),
    ),
    prefix="transformer.",
    task_modules=("lm_head.",),
    unread=UnreadTensors(
        # The causal mask, stored as if it were a bias.
        always=("h.*.attn.bias", "h.*.attn.masked_bias"),
        if_tied=("lm_head.weight",),
    ),
)
