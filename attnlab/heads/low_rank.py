"""`LowRankQuery`: queries through a narrow bottleneck, wide heads that share one key and value."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.factors import Floats, Weights, factor
from attnlab.heads.layout import Blocked, Layout, Rewrite
from attnlab.heads.linear import compress, project_all
from attnlab.heads.narrow import as_standard
from attnlab.heads.registry import register_layout
from attnlab.heads.standard import Standard
from attnlab.heads.weights import Params, Weight, without


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

    query_latent_dim: int | None = None
    latent_norm: bool = True

    @property
    def default_num_kv_heads(self) -> int:
        """One key and value head for all."""
        return 1

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

        standard = dataclasses.replace(as_standard(self), num_kv_heads=self.size("num_kv_heads"))
        heads = self.num_heads * self.size("head_dim")
        return Rewrite(standard, params, 2 * self.width * self.size("query_latent_dim") * heads)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """The queries of all heads, side by side, of the rank of the bottleneck."""
        rank = self.size("query_latent_dim")
        if (found := factor(w["q"].reshape(self.width, -1), rank, tolerance)) is None:
            return None
        return {"q_down": found[0], "q": found[1].reshape(-1, *w["q"].shape[1:])}
