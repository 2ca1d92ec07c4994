"""`Collaborative`: one query and one key projection for all heads, whose dimensions each weighs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.bilinear import stacked_scores
from attnlab.heads.factors import Floats, Weights, factor
from attnlab.heads.layout import OUTPUT, VALUES, Blocked, Entries, Layout, Rewrite
from attnlab.heads.linear import over_tokens, project_all
from attnlab.heads.registry import register_layout
from attnlab.heads.standard import Standard
from attnlab.heads.weights import Params, Weight


@register_layout("collaborative")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Collaborative(Standard):
    """Every head weighs the same H query dimensions (Cordonnier et al. 2020, arXiv 2006.16362).

        q_n = (x Q) * m_n,  k_n = y K,  v_n = z V_n

    Fields are those of `Standard`, without ties.

    Attributes:
      head_dim: H, the number of shared dimensions; None is D.
      value_dim: V; None is D / N.
      num_kv_heads: value heads, since all heads have one key; None is num_heads.

    >>> from attnlab.heads import weight_shapes
    >>> shapes = weight_shapes(Collaborative(width=8, num_heads=2, head_dim=6))
    >>> shapes["q"], shapes["k"], shapes["mixing"]
    ((8, 6), (8, 6), (2, 6))
    """

    equation = "q_n = (x Q) * m_n,  k_n = y K,  v_n = z V_n"
    rank = "width, head_dim"
    source = "Cordonnier et al. 2020, arXiv 2006.16362"
    can_tie = ""
    num_key_heads = 1
    """All heads have one key."""

    @property
    def default_head_dim(self) -> int:
        """D."""
        return self.width

    @property
    def default_value_dim(self) -> int:
        """D / N."""
        return self.slice_width

    def weights(self) -> dict[str, Weight]:
        mixing = Weight("project_q", out_axes=("num_heads", "head_dim"), std=1.0)
        made = {
            "q": Weight("project_q", ("width",), ("head_dim",)),
            "k": Weight("project_kv", ("key_width",), ("head_dim",), changes=("k",)),
            "mixing": mixing,
            "v": VALUES,
            "o": OUTPUT,
        }
        if self.qk_norm is not None and self.qk_norm.over != "head":
            raise ValueError(f"{self._label} has one key head; use HeadNorm(over='head')")
        return self.finished(made)

    def project(self, params: Params, name: str, x: Array) -> Array:
        made = project_all(params, name, x)
        if name != "q":
            return made
        return over_tokens(jnp.multiply, made[..., None, :], params["mixing"])

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        return entries["k"][..., None, :], entries["v"]

    def rewritten(self) -> Rewrite | Blocked:
        """Bilinear: A_n = W_Q diag(m_n) W_K^T."""

        def params(weights: Params) -> tuple[Array, Array | None]:
            keys = jnp.einsum("NR,ER->NER", weights["mixing"], weights["k"])
            bias = weights.get("q_bias")
            q_bias = None if bias is None else jnp.einsum("R,NER->NE", bias, keys)
            return jnp.einsum("DR,NER->DNE", weights["q"], keys), q_bias

        return self.to_bilinear(params)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """Shared dimensions that head n alone weighs, H / N of them, as many as its scores need."""
        n, h = self.num_heads, self.size("head_dim") // self.num_heads
        if (found := factor(stacked_scores(w), h, tolerance)) is None:
            return None
        q = found[0].swapaxes(0, 1).reshape(-1, n * h)
        made = {
            "q": q[: self.width],
            "k": found[1].transpose(2, 0, 1).reshape(-1, n * h),
            "mixing": np.repeat(np.eye(n), h, axis=1),
        }
        made |= {"q_bias": q[-1]} if "q_bias" in w else {}
        spare = self.size("head_dim") - n * h
        return {k: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, spare)]) for k, a in made.items()}
