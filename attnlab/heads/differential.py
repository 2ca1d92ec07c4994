"""Differential attention: the difference of two softmax distributions."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.attention import Edges
from attnlab.heads.layout import HeadCall
from attnlab.heads.linear import normalize
from attnlab.heads.registry import register_layout
from attnlab.heads.standard import Standard
from attnlab.heads.weights import Params, Weight


@register_layout("differential")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Differential(Standard):
    """Heads with two queries and keys, whose softmax distributions are subtracted.

        heads_n = (1 - l0) norm((softmax(q1 k1^T) - l softmax(q2 k2^T)) v)
        l = exp(a1 b1) - exp(a2 b2) + l0,  l0 = 0.8 - 0.6 exp(-0.3 layer)

    with vectors a and b and an RMS norm per head, layers counted from 0 (Ye et al. 2024, arXiv
    2410.05258, equations 1 to 3). The epsilon of this norm is 1e-5, as published, whatever
    `norm_eps` is. A head is two of half the width: H = D/2N and V = 2H, so it has
    the parameters of `Standard`, but for the norm and a and b. The value "lambda" is l. Softmax
    distributions are ordered [key head, first or second, query head of this key head].

    Fields are those of `Standard`, without ties.

    Attributes:
      head_dim: H, of each of the two queries and keys; None is D / 2N.
      value_dim: V; None is 2H.

    >>> Differential(width=64, num_heads=4).head_shape("q")
    (4, 8)
    """

    equation = "q_n = x [Q1_n ; Q2_n],  k_n = y [K1_n ; K2_n],  v_n = z V_n"
    source = "Ye et al. 2024, arXiv 2410.05258"
    can_tie = ""
    values: ClassVar[dict[str, str]] = {"lambda": ""}
    head_axes = (*Standard.head_axes, "queries_per_key")

    @property
    def default_head_dim(self) -> int:
        """H, half of D / N."""
        return self.slice_width // 2

    @property
    def default_value_dim(self) -> int:
        """V = 2H."""
        return 2 * self.size("head_dim")

    @property
    def num_score_maps(self) -> int:
        """Two for each head."""
        return 2 * self.num_heads

    @property
    def head_of_map(self) -> tuple[int, ...]:
        """Of distributions ordered [key head, first or second, query head of this key head]."""
        size = self.queries_per_key
        return tuple(i // (2 * size) * size + i % size for i in range(self.num_score_maps))

    @property
    def num_key_heads(self) -> int:
        """Two for each key/value head."""
        return 2 * self.size("num_kv_heads")

    @property
    def queries_per_key(self) -> int:
        """N / K."""
        return self.num_heads // self.size("num_kv_heads")

    def head_weights(self) -> dict[str, Weight]:
        pair = ("num_kv_heads", 2)
        q = Weight("project_q", ("width",), (*pair, "queries_per_key", "head_dim"))
        k = Weight("project_kv", ("key_width",), (*pair, "head_dim"), changes=("k",))
        return super().head_weights() | {"q": q, "k": k}

    def weights(self) -> dict[str, Weight]:
        return super().weights() | {
            "lambda_q": Weight("attend", out_axes=(2, "head_dim"), std=0.1),
            "lambda_k": Weight("attend", out_axes=(2, "head_dim"), std=0.1),
            "head_norm": Weight("attend", out_axes=("value_dim",), constant=1.0),
        }

    def project(self, params: Params, name: str, x: Array) -> Array:
        made = super().project(params, name, x)
        return made.reshape(*made.shape[:2], -1, made.shape[-1])

    def attend(self, params: Params, q: Array, k: Array, v: Array, call: HeadCall) -> Array:
        start = 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(call.layer))
        one, two = jnp.exp(jnp.sum(params["lambda_q"] * params["lambda_k"], axis=-1))
        factor = call.tap("lambda", one - two + start)
        given = {name: getattr(call.options, name) for name in ("bias", "mask", "sink")}
        call = call.bind(**{name: self._of_maps(a) for name, a in given.items()})
        maps = call.attention(q, k, v)
        maps = maps.reshape(*maps.shape[:2], self.size("num_kv_heads"), 2, -1, maps.shape[-1])
        heads = maps[:, :, :, 0] - factor * maps[:, :, :, 1]
        heads = heads.reshape(*heads.shape[:2], self.num_heads, heads.shape[-1])
        return (1 - start) * normalize(params, "head_norm", heads, "rms", 1e-5)

    def _of_maps(self, a: Any) -> Any:
        """What each head has, [..., N, T, S], is that of both of its maps; others as they are."""
        shape = () if a is None or isinstance(a, Edges) else jnp.shape(a)
        if len(shape) < 3 or shape[-3] != self.num_heads:
            return a
        return jnp.take(jnp.asarray(a), jnp.array(self.head_of_map), axis=-3)
