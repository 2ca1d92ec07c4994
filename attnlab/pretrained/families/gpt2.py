"""GPT-2 (Radford et al. 2019), in the names of Hugging Face."""

from attnlab.heads import Standard
from attnlab.models import Init
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.families.llama import decoder_table
from attnlab.pretrained.family import Family
from attnlab.pretrained.name_table import PACKED, Module
from attnlab.pretrained.tasks import OLDER


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
        *f.numbers(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
        *f.numbers(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, layer_norm_epsilon=1e-5),
        f.ffn_width("n_inner", "n_embd"),
        f.activation("activation_function", "gelu_new"),
        f.Choice("scale_attn_weights", True, "heads.scale", {True: None, False: 1.0}),
        _LayerScales(),
        # The bare model has the same weights: its LM head is there, tied, for whoever asks.
        f.CausalHead("GPT2", tied=True, causal="GPT2LMHeadModel", bare_kind="tied"),
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
