"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838), OLMo 2 (arXiv 2501.00656) and OLMo 3 (2025), in
the names of Hugging Face.
"""

from attnlab.heads import HeadNorm, Standard
from attnlab.models import Norm
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import bad_value
from attnlab.pretrained.families.llama import FLAT, LLAMA, decoder_table
from attnlab.pretrained.rotary import FULL, SLIDING, LayerTypes, RotaryField, every
from attnlab.pretrained.tasks import LAST

AFTER = {
    "attention.norm_after": "post_attention_layernorm",
    "ffn.norm_after": "post_feedforward_layernorm",
}

OLMO = LLAMA.variant(
    "olmo",
    dict(vocab_size=50304),
    f.CausalHead("Olmo"),
    f.Words(only={"clip_qkv": None}),
    without="rms_norm_eps mlp_bias head_dim",
    norm=Norm(scale=False, eps=1e-5),
    tasks=(LAST,),
)
OLMO2 = LLAMA.variant(
    "olmo2",
    dict(vocab_size=50304),
    f.CausalHead("Olmo2"),
    f.value("rms_norm_eps", 1e-5, "norm.eps", "heads.norm_eps"),
    without="mlp_bias head_dim",
    table=decoder_table(FLAT, norms=AFTER),
    heads=Standard(num_heads=4, qk_norm=HeadNorm("rms", over="all")),
    norm=Norm(kind="rms", position="after"),
    tasks=(LAST,),
)


class _Types(LayerTypes):
    """Some versions of transformers read rope_theta for layers without a window alone, and have
    500,000 for the others."""

    def of_type(self, attributes: JSON, type_: str) -> JSON:
        own, theta = (attributes["rope_parameters"] or {}).get(type_), attributes["rope_theta"]
        if type_ == SLIDING and not own and theta not in (None, 5e5):
            why = "is not supported without rope_parameters of each type of layer"
            raise bad_value("rope_theta", theta, why)
        return super().of_type(attributes, type_)


OLMO3 = OLMO2.variant(
    "olmo3",
    f.CausalHead("Olmo3"),
    _Types(
        default_types=every(4),
        bases={FULL: ("rope_theta", None), SLIDING: ("rope_theta", None)},
        rope=RotaryField(required=("rope_theta",)),
    ),
)
