"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838), OLMo 2 (arXiv 2501.00656) and OLMo 3 (2025), in
the names of Hugging Face.
"""

from attnlab.heads import HeadNorm, Standard
from attnlab.models.specs import Norm
from attnlab.nested import JSON
from attnlab.pretrained.attributes import bad_value
from attnlab.pretrained.common_fields import CausalHead, numbers
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import changed, value
from attnlab.pretrained.layer_types import FULL, SLIDING, TypedRotary, every
from attnlab.pretrained.llama import FIELDS, HEADS, DecoderNames, decoder
from attnlab.pretrained.rope import RotaryField

COMMON = changed(
    FIELDS,
    *numbers(vocab_size=50304),
    value("rms_norm_eps", 1e-5, "norm.eps", "heads.norm_eps"),
    without=("mlp_bias", "head_dim"),
)
AFTER = {
    "attention.norm_after": "post_attention_layernorm",
    "ffn.norm_after": "post_feedforward_layernorm",
}
FLAT = tuple(m._replace(kind="vector") if m.kind == "table" else m for m in HEADS)
"""The scales of the norm of all heads lie in one vector."""
NAMES = DecoderNames(attention=FLAT, norms=AFTER)
NORMED = Standard(num_heads=4, qk_norm=HeadNorm("rms", over="all"))
NORM = Norm(kind="rms", position="after")

OLMO = decoder(
    "olmo",
    changed(COMMON, without=("rms_norm_eps",)),
    CausalHead("Olmo"),
    other_attributes=OtherAttributes(fixed={"clip_qkv": None}),
    norm=Norm(scale=False, eps=1e-5),
)
OLMO2 = decoder("olmo2", COMMON, CausalHead("Olmo2"), names=NAMES, heads=NORMED, norm=NORM)


class _Types(TypedRotary):
    """Some versions of transformers read rope_theta for layers without a window alone, and have
    500,000 for the others."""

    def _of_type(self, attributes: JSON, type_: str) -> JSON:
        own, theta = (attributes["rope_parameters"] or {}).get(type_), attributes["rope_theta"]
        if type_ == SLIDING and not own and theta not in (None, 5e5):
            why = "is not supported without rope_parameters of each type of layer"
            raise bad_value("rope_theta", theta, why)
        return super()._of_type(attributes, type_)


OLMO3_TYPES = _Types(
    default_types=lambda attributes: every(attributes["num_hidden_layers"], 4),
    bases={FULL: ("rope_theta", None), SLIDING: ("rope_theta", None)},
    rope=RotaryField(required=("rope_theta",)),
)
OLMO3 = decoder(
    "olmo3",
    changed(COMMON, OLMO3_TYPES),
    CausalHead("Olmo3"),
    names=NAMES,
    heads=NORMED,
    norm=NORM,
)
