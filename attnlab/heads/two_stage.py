"""`TwoStage`: one projection of x for all heads, then one for each head."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.factors import Floats, Weights
from attnlab.heads.layout import Blocked, Layout, Rewrite
from attnlab.heads.linear import project_all
from attnlab.heads.registry import register_layout
from attnlab.heads.standard import Standard
from attnlab.heads.weights import Params, Weight, without


@register_layout("two_stage")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoStage(Standard):
    """W^Q, W^K, W^V before the projections of each head, as one reads the paper's Q W_i^Q.

    q_n = x Q Q_n,  k_n = y K K_n,  v_n = z V V_n

    Fields are those of `Standard`.

    >>> TwoStage(width=6, num_heads=2).rewritten().layout  # whose q is the product of Q and Q_n
    Standard(width=6, num_heads=2)
    """

    equation = "q_n = x Q Q_n,  k_n = y K K_n,  v_n = z V V_n"
    source = "Vaswani et al. 2017, section 3.2.2, with Q = X W^Q read into it"

    def weights(self) -> dict[str, Weight]:
        outer = {
            "q_outer": Weight("project_q", ("width",), (self.size("width"),)),
            "k_outer": Weight("project_kv", ("key_width",), (self.size("key_width"),)),
            "v_outer": Weight("project_kv", ("value_width",), (self.size("value_width"),)),
        }
        return self.finished(outer | self.head_weights())

    def project(self, params: Params, name: str, x: Array) -> Array:
        return project_all(params, name, project_all(params, f"{name}_outer", x))

    def rewritten(self) -> Rewrite | Blocked:
        """Standard: W^Q W_i^Q is one matrix per head."""
        if self.tie:
            return self.untied()

        def params(weights: Params) -> Params:
            folded = {n: jnp.tensordot(weights[f"{n}_outer"], weights[n], 1) for n in "qkv"}
            return without(weights, "q_outer", "k_outer", "v_outer") | folded

        heads, kv = self.num_heads * self.size("head_dim"), self.size("num_kv_heads")
        flops = self.width**2 * heads
        flops += kv * self.size("key_width") ** 2 * self.size("head_dim")
        flops += kv * self.size("value_width") ** 2 * self.size("value_dim")
        return Rewrite(self.to(Standard), params, 2 * flops)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats]:
        """Outer matrices that are identities."""
        sizes = zip("qkv", self.input_widths, strict=True)
        return {f"{name}_outer": np.eye(size) for name, size in sizes}
