"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838), OLMo 2 (arXiv 2501.00656) and OLMo 3 (2025), in
the names of Hugging Face.
"""

from attnlab.heads import HeadNorm, Standard
from attnlab.models.specs import Norm
from attnlab.pretrained.attributes import JSON
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import changed, sizes, value
from attnlab.pretrained.layer_types import FULL, SLIDING, TypedRotary, every
from attnlab.pretrained.llama import FIELDS, HEADS, DecoderNames, causal_head, decoder

COMMON = changed(
    FIELDS,
    *sizes(vocab_size=50304),
    value("rms_norm_eps", 1e-5, "norm.eps", "heads.norm_eps"),
    without=("mlp_bias", "head_dim"),
)
AFTER = {
    "attention.norm_after": "post_attention_layernorm",
    "ffn.norm_after": "post_feedforward_layernorm",
}
FLAT = tuple(m._replace(kind="vector") if m.kind == "table" else m for m in HEADS)
"""The scales of the norm of all heads lie in one vector."""
NORMED = Standard(num_heads=4, qk_norm=HeadNorm("rms", over="all"))


def _every_fourth(attributes: JSON) -> list[str]:
    return every(attributes["num_hidden_layers"], 4)


OLMO = decoder(
    "olmo",
    Standard(num_heads=4),
    changed(COMMON, without=("rms_norm_eps",)),
    causal_head("Olmo"),
    norm=Norm(scale=False, eps=1e-5),
    other_attributes=OtherAttributes(fixed={"clip_qkv": None}),
)
OLMO2 = decoder(
    "olmo2",
    NORMED,
    COMMON,
    causal_head("Olmo2"),
    names=DecoderNames(attention=FLAT, norms=AFTER),
    norm=Norm(kind="rms", position="after"),
)
OLMO3 = decoder(
    "olmo3",
    NORMED,
    changed(
        COMMON,
        TypedRotary(
            default_types=_every_fourth,
            bases={FULL: ("rope_theta", 5e5), SLIDING: ("rope_theta", 5e5)},
        ),
    ),
    causal_head("Olmo3"),
    names=DecoderNames(attention=FLAT, norms=AFTER),
    norm=Norm(kind="rms", position="after"),
)
