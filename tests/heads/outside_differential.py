"""Differential attention (Ye et al. 2024, arXiv 2410.05258) from a file outside the package.

python -m experiments.run --config=outside_differential.py:layout=my_differential --workdir=DIR
"""

import dataclasses

import jax.numpy as jnp

from attnlab.heads import Standard, Weight, register_layout
from experiments.configs import byte_lm

get_config = byte_lm.get_config


@register_layout("my_differential")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MyDifferential(Standard):
    """heads_n = (1 - l0) norm((softmax(q1 k1^T) - l softmax(q2 k2^T)) v), with l0 of the layer."""

    equation = "q_n = x [Q1_n ; Q2_n],  k_n = y [K1_n ; K2_n],  v_n = z V_n"
    can_tie = ""

    @property
    def default_head_dim(self):
        return self.slice_width // 2

    @property
    def default_value_dim(self):
        return 2 * self.size("head_dim")

    @property
    def num_score_maps(self):
        return 2 * self.num_heads

    @property
    def num_key_heads(self):
        return 2 * self.size("num_kv_heads")

    def weights(self):
        """First the queries of all first maps, then of all second maps; keys alike."""
        return super().weights() | {
            "q": Weight("project_q", ("width",), (2, "num_heads", "head_dim")),
            "k": Weight("project_kv", ("key_width",), (2, "num_kv_heads", "head_dim")),
            "lambda_q": Weight("attend", out_axes=(2, "head_dim"), std=0.1),
            "lambda_k": Weight("attend", out_axes=(2, "head_dim"), std=0.1),
            "head_norm": Weight("attend", out_axes=("value_dim",), constant=1.0),
        }

    def project(self, params, name, x):
        made = super().project(params, name, x)
        return made.reshape(*made.shape[:2], -1, made.shape[-1])

    def attend(self, params, q, k, v, call):
        start = 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(call.layer))
        one, two = jnp.exp(jnp.sum(params["lambda_q"] * params["lambda_k"], axis=-1))
        maps = call.attention(q, k, jnp.tile(v, (1, 1, 2, 1)))
        first, second = jnp.split(maps, 2, axis=2)
        heads = first - (one - two + start) * second
        mean_square = jnp.mean(heads**2, axis=-1, keepdims=True)
        normalized = heads * params["head_norm"] / jnp.sqrt(mean_square + 1e-5)
        return ((1 - start) * normalized).astype(v.dtype)
