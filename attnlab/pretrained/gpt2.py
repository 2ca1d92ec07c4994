"""GPT-2 (Radford et al. 2019), in the names of Hugging Face."""

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Init, Norm
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.common_fields import BIASES, CausalHead, activation, ffn_width, numbers
from attnlab.pretrained.fields import Choice, Field, Source, Values
from attnlab.pretrained.llama import DecoderNames, decoder
from attnlab.pretrained.name_table import PACKED, Module


class _LayerScales(Field):
    """Scores of layer i divided by i + 1."""

    attributes = (Attribute("scale_attn_by_inverse_layer_idx", False),)

    def read(self, attributes: JSON, source: Source) -> Values:
        scales = tuple(1 / (i + 1) for i in range(attributes["n_layer"]))
        used = attributes["scale_attn_by_inverse_layer_idx"]
        return {"attention.layer_scales": scales if used else None}

    def write(self, config: ModelConfig) -> JSON:
        return {"scale_attn_by_inverse_layer_idx": config.attention.layer_scales is not None}


GPT2 = decoder(
    "gpt2",
    (
        *numbers(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
        *numbers(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, layer_norm_epsilon=1e-5),
        ffn_width("n_inner", "n_embd"),
        activation("activation_function", "gelu_new"),
        Choice("scale_attn_weights", True, "heads.scale", {True: None, False: 1.0}),
        _LayerScales(),
    ),
    # The bare model has the same weights: its LM head is there, tied, for whoever asks.
    CausalHead("GPT2", tied=True, causal="LMHeadModel", bare_kind="tied"),
    names=DecoderNames(
        attention=(
            Module("attn.c_attn", PACKED, "conv1d"),
            Module("attn.c_proj", "attention.o", "conv1d"),
        ),
        ffn=(Module("mlp.c_fc", "ffn.up", "conv1d"), Module("mlp.c_proj", "ffn.down", "conv1d")),
        norms={"attention.norm": "ln_1", "ffn.norm": "ln_2"},
        embedding="wte",
        final_norm="ln_f",
        more=(Module("wpe", "positions", "table"),),
        layers="h.{}.",
        prefix="transformer.",
        # The causal mask, stored as if it were a bias.
        unread=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    heads=Standard(num_heads=4, biases=BIASES),
    norm=Norm(),
    ffn=FFN(),
    init=Init(std=0.02, residual="depth"),
)
