"""`TensorProduct`: queries, keys and values of a token are matrices N x H of low rank."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.layout import OUTPUT, Entries, Layout, Rotate
from attnlab.heads.linear import project_all
from attnlab.heads.registry import register_layout
from attnlab.heads.weights import HeadValue, Params, Stage, Weight


@register_layout("tensor_product")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorProduct(Layout):
    """Tensor product attention, T6 (Zhang et al. 2025, arXiv 2501.06425).

        q = 1/X sum_r a_r(x) b_r(x)^T,  a_r(x) = x A_r + alpha_r [N],  b_r(x) = rotate(x B_r) [H]

    Keys (rank Y) and values (rank Z, not rotated) likewise. A cache keeps the factors: (Y + Z)
    (N + H) numbers a token in place of 2 N H, where V = H. The factors a_r are numbers, so rotating
    b_r rotates q. The constants alpha exist where `biases` has "factors"; with A = 0 they are the
    paper's non-contextual factors, of which standard, grouped and multi-query heads are cases.

    Attributes:
      head_dim: H; None is D / N.
      value_dim: V; None is H.
      key_width, value_width: of the key and value input; None is `width`.
      query_rank, key_rank, value_rank: X, Y, Z; the paper's 6, 2 and 2.

    >>> from attnlab.heads import cache_shapes
    >>> cache_shapes(TensorProduct(width=64, num_heads=4))
    {'k': (2, 16), 'k_heads': (2, 4), 'v': (2, 16), 'v_heads': (2, 4)}
    """

    equation = (
        "q_n = 1/X sum_r (x A_r)_n rotate(x B_r),  k_n = 1/Y sum_r (y A'_r)_n rotate(y B'_r),"
        "  v_n = 1/Z sum_r (z A''_r)_n (z B''_r)"
    )
    rank = "head_dim"
    source = "Zhang et al. 2025, Tensor Product Attention, arXiv 2501.06425"
    bias_names = ("o", "factors")

    head_dim: int | None = None
    value_dim: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    query_rank: int = 6
    key_rank: int = 2
    value_rank: int = 2

    def weights(self) -> dict[str, Weight]:
        parts: tuple[tuple[HeadValue, Stage, str, str, str], ...] = (
            ("q", "project_q", "width", "query_rank", "head_dim"),
            ("k", "project_kv", "key_width", "key_rank", "head_dim"),
            ("v", "project_kv", "value_width", "value_rank", "value_dim"),
        )
        made, constants = {}, {}
        for name, stage, width, rank, size in parts:
            # A mean of X products of two factors of unit scale has scale 1/sqrt(X).
            heads = Weight(stage, (width,), (rank, "num_heads"), mean_axes=(rank,), changes=(name,))
            made[f"{name}_heads"] = heads
            made[name] = Weight(stage, (width,), (rank, size), changes=(name,))
            constants[f"{name}_heads_bias"] = heads.bias()
        made |= constants if "factors" in self.biases else {}
        return made | self.with_biases({"o": OUTPUT})

    def project_q(self, params: Params, x: Array, rotate: Rotate) -> Array:
        return mean_of_products(
            project_all(params, "q_heads", x), rotate(project_all(params, "q", x))
        )

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        """The factors of keys and of values."""
        return {
            "k_heads": project_all(params, "k_heads", y),
            "k": rotate(project_all(params, "k", y)),
            "v_heads": project_all(params, "v_heads", z),
            "v": project_all(params, "v", z),
        }

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        k = mean_of_products(entries["k_heads"], entries["k"])
        return k, mean_of_products(entries["v_heads"], entries["v"])

    def extra_multiply_adds(self) -> dict[str, int]:
        keys = self.key_rank * self.num_heads * self.size("head_dim")
        values = self.value_rank * self.num_heads * self.size("value_dim")
        queries = self.query_rank * self.num_heads * self.size("head_dim")
        return {"project_q": queries, "keys_values": keys + values}


def mean_of_products(a: Array, b: Array) -> Array:
    """[B, T, R, N] and [B, T, R, H] -> [B, T, N, H]: the mean over R of the outer products."""
    return jnp.einsum("BTRN,BTRH->BTNH", a, b) / a.shape[2]
