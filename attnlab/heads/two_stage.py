"""Heads that read projections of x: `TwoStage`, and `LowRankQuery` with queries of few numbers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.factors import Floats, Weights, factor
from attnlab.heads.layout import Blocked, Layout, Rewrite
from attnlab.heads.linear import compress, project_all
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


@register_layout("low_rank_query")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankQuery(Standard):
    """Queries from few numbers, so that heads may be wide (Hu et al. 2024, arXiv 2412.19255).

        q_n = norm(x U) Q_n,  k_n = y K_n,  v_n = z V_n

    Fields are those of `Standard`, and two more.

    Attributes:
      num_kv_heads: K; None is 1.
      head_dim: H; None is 2 D / N.
      query_latent_dim: width of the bottleneck; None is D / 2, rounded up.
      latent_norm: RMS norm of the bottleneck.

    >>> from attnlab.heads import weight_shapes
    >>> shapes = weight_shapes(LowRankQuery(width=64, num_heads=4))
    >>> shapes["q_down"], shapes["q"], shapes["k"]
    ((64, 32), (32, 4, 32), (64, 1, 32))
    """

    equation = "q_n = norm(x U) Q_n,  k_n = y K_n,  v_n = z V_n"
    rank = "width, query_latent_dim, head_dim"
    source = "Hu et al. 2024, Multi-matrix Factorization Attention, arXiv 2412.19255"
    can_tie = "kv"
    default_num_kv_heads = 1
    """One key and value head for all."""

    query_latent_dim: int | None = None
    latent_norm: bool = True

    @property
    def default_head_dim(self) -> int:
        """2 D / N."""
        return 2 * self.slice_width

    @property
    def default_query_latent_dim(self) -> int:
        """D / 2, rounded up."""
        return -(-self.width // 2)

    def weights(self) -> dict[str, Weight]:
        norm = Weight("project_q", out_axes=("query_latent_dim",), constant=1.0)
        made = {"q_down": Weight("project_q", ("width",), ("query_latent_dim",))}
        made |= {"q_down_norm": norm} if self.latent_norm else {}
        q = Weight("project_q", ("query_latent_dim",), ("num_heads", "head_dim"))
        return self.finished(made | self.head_weights() | {"q": q})

    def project(self, params: Params, name: str, x: Array) -> Array:
        x = compress(params, "q_down", x, self.norm_eps) if name == "q" else x
        return project_all(params, name, x)

    def rewritten(self) -> Rewrite | Blocked:
        """Standard, if there is no norm between the two projections of the queries."""
        if self.tie:
            return self.untied()
        if self.latent_norm:
            return Blocked(
                "standard", "a norm is applied between the two projections of the queries"
            )

        def params(weights: Params) -> Params:
            q = jnp.tensordot(weights["q_down"], weights["q"], 1)
            return without(weights, "q_down") | {"q": q}

        heads = self.num_heads * self.size("head_dim")
        flops = 2 * self.width * self.size("query_latent_dim") * heads
        return Rewrite(self.to(Standard), params, flops)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """The queries of all heads, side by side, of the rank of the bottleneck."""
        rank = self.size("query_latent_dim")
        if (found := factor(w["q"].reshape(self.width, -1), rank, tolerance)) is None:
            return None
        return {"q_down": found[0], "q": found[1].reshape(-1, *w["q"].shape[1:])}
