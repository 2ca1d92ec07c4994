"""A layout and an extra that are not attnlab's, in one file, which is a config file too.

python -m experiments.run --config=outside_layouts.py:layout=gated_differential --workdir=DIR
"""

import dataclasses

import jax
import jax.numpy as jnp

from attnlab.heads import Extra, Standard, Weight, register_extra, register_layout
from experiments.configs import byte_lm

get_config = byte_lm.get_config


@register_layout("gated_differential")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDifferential(Standard):
    """heads_n = (softmax(q1_n k^T) - sigmoid(x w_n) softmax(q2_n k^T)) v."""

    equation = "q_n = x [Q1_n ; Q2_n],  k_n = y K_n,  v_n = z V_n"
    can_tie = ""
    bias_names = ("k", "v", "o")

    @property
    def num_score_maps(self):
        return 2 * self.num_heads

    def weights(self):
        """Heads that share a key stand side by side, and so do the two queries of a head."""
        q = Weight("project_q", ("width",), ("num_heads", 2, "head_dim"))
        gate = Weight("attend", ("width",), ("num_heads",), changes=("heads",))
        return super().weights() | {"q": q, "lambda": gate}

    def project(self, params, name, x):
        projected = super().project(params, name, x)
        return projected.reshape(*projected.shape[:2], -1, projected.shape[-1])

    def attend(self, params, q, k, v, call):
        maps = call.attention(q, k, v)
        first, second = maps[:, :, ::2], maps[:, :, 1::2]
        return first - jax.nn.sigmoid(call.x @ params["lambda"])[..., None] * second


@register_extra("head_scale")
@dataclasses.dataclass(frozen=True)
class HeadScale(Extra):
    """A learnt number for each head multiplies it, with a loss that keeps it near 1."""

    between = ""
    losses = ("scale_loss",)
    start: float = 1.0

    def weights(self, layout):
        return {"head_scale": Weight("attend", out_axes=("num_heads",), constant=self.start)}

    def values(self, layout):
        return {"scale_loss": ""}

    def after_attention(self, params, heads, call):
        scale = params["head_scale"]
        loss = call.tap("scale_loss", jnp.mean((scale - 1) ** 2))
        return heads * scale[:, None].astype(heads.dtype), {"scale_loss": loss}
