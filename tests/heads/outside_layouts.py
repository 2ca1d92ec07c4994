"""A layout and two extras that are not attnlab's, as a user would write them in one file."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab import attention
from attnlab.heads import (
    Call,
    Extra,
    Layout,
    Params,
    Standard,
    Weight,
    register_extra,
    register_layout,
)
from attnlab.heads.linear import normalize


@register_layout("differential")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Differential(Standard):
    """Differential attention (Ye et al. 2024, arXiv 2410.05258).

        heads_n = (1 - l0) norm((softmax(q1 k1^T) - l softmax(q2 k2^T)) v)
        l = exp(a1 b1) - exp(a2 b2) + l0,  l0 = 0.8 - 0.6 exp(-0.3 layer)

    The softmax distributions are ordered [key head, first or second, query head of this key head].
    """

    equation = "q_n = x [Q1_n ; Q2_n],  k_n = y [K1_n ; K2_n],  v_n = z V_n"
    source = "Ye et al. 2024, arXiv 2410.05258"
    can_tie = ""
    values: ClassVar[dict[str, str]] = {"lambda": ""}
    head_axes = (*Standard.head_axes, "queries_per_key")

    @property
    def default_head_dim(self) -> int:
        return self.slice_width // 2

    @property
    def default_value_dim(self) -> int:
        return 2 * self.size("head_dim")

    @property
    def num_score_maps(self) -> int:
        return 2 * self.num_heads

    @property
    def queries_per_key(self) -> int:
        return self.num_heads // self.size("num_kv_heads")

    def weights(self) -> dict[str, Weight]:
        pair = ("num_kv_heads", 2)
        q = Weight("project_q", ("width",), (*pair, "queries_per_key", "head_dim"))
        k = Weight("project_kv", ("key_width",), (*pair, "head_dim"))
        replaced = super().weights() | {"q": q, "k": k}
        biases = {f"{n}_bias": replaced[n].bias() for n in "qk" if n in self.biases}
        return {
            **replaced,
            **biases,
            "lambda_q": Weight("attend", makes=(2, "head_dim"), std=0.1),
            "lambda_k": Weight("attend", makes=(2, "head_dim"), std=0.1),
            "head_norm": Weight("attend", makes=("value_dim",), constant=1.0),
        }

    def project(self, params: Params, name: str, x: Array) -> Array:
        made = super().project(params, name, x)
        return made.reshape(*made.shape[:2], -1, made.shape[-1])

    def attend(self, params: Params, q: Array, k: Array, v: Array, call: Call) -> Array:
        start = 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(call.layer))
        one, two = jnp.exp(jnp.sum(params["lambda_q"] * params["lambda_k"], axis=-1))
        factor = call.tap("lambda", one - two + start)
        maps = call.attention(q, k, v)
        maps = maps.reshape(*maps.shape[:2], self.size("num_kv_heads"), 2, -1, maps.shape[-1])
        heads = maps[:, :, :, 0] - factor * maps[:, :, :, 1]
        heads = heads.reshape(*heads.shape[:2], self.num_heads, heads.shape[-1])
        return (1 - start) * normalize(params, "head_norm", heads, "rms", 1e-5)

    def rewritten(self, *, rotary: bool = False, shift_invariant: bool = True):
        return Layout.rewritten(self)


@register_extra("mixture_of_heads")
@dataclasses.dataclass(frozen=True)
class MixtureOfHeads(Extra):
    """Each token uses the first `shared` heads and `top` of the others, weighed by a router.

    Jin et al. 2024, arXiv 2410.11842; scaled as in its code, so that gates are 1 on average.
    """

    losses: ClassVar[tuple[str, ...]] = ("head_balance",)
    top: int = 2
    shared: int = 1

    def check(self, layout: Layout) -> None:
        if not 1 <= self.top <= layout.num_heads - self.shared:
            raise ValueError(f"top {self.top} must be from 1 to num_heads - shared")

    def weights(self, layout: Layout) -> dict[str, Weight]:
        return {
            "router": Weight("attend", ("width",), (layout.num_heads - self.shared,)),
            "router_shared": Weight("attend", ("width",), (self.shared,)),
            "router_groups": Weight("attend", ("width",), (2,)),
        }

    def values(self, layout: Layout) -> dict[str, str]:
        return {"head_gates": "B T N", "head_balance": ""}

    def after_attention(self, params: Params, x: Array, heads: Array, call: Call) -> Array:
        groups = 2 * jax.nn.softmax(x @ params["router_groups"])
        shared = self.shared * jax.nn.softmax(x @ params["router_shared"])
        probs = jax.nn.softmax(x @ params["router"])
        routed = probs.shape[-1]
        used = jax.nn.one_hot(jax.lax.top_k(probs, self.top)[1], routed, dtype=x.dtype).sum(-2)
        call.tap("head_balance", routed * jnp.sum(probs.mean((0, 1)) * used.mean((0, 1))))
        weighed = self.top * probs * used / jnp.sum(probs * used, axis=-1, keepdims=True)
        gates = jnp.concatenate([groups[..., :1] * shared, groups[..., 1:] * weighed], axis=-1)
        return heads * call.tap("head_gates", gates)[..., None]


@register_extra("learnt_soft_cap")
@dataclasses.dataclass(frozen=True)
class LearntSoftCap(Extra):
    """c_n tanh(scores / c_n) with a learnt c_n = exp(log_soft_cap_n) for each head."""

    shift_invariant: ClassVar[bool] = False
    start: float = 3.0

    def weights(self, layout: Layout) -> dict[str, Weight]:
        start = float(jnp.log(self.start))
        return {"log_soft_cap": Weight("attend", makes=("num_score_maps",), constant=start)}

    def before_attention(self, params: Params, call: Call) -> Call:
        cap = attention.SoftCap(jnp.exp(params["log_soft_cap"]))
        return call.bind(score_mods=(*call.options.get("score_mods", ()), cap))
