"""`GroupedTied`: one state per key/value head is the value and, but for positions, the key."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.layout import OUTPUT, Blocked, Entries, Layout, Rewrite, Rotate
from attnlab.heads.linear import concat_shared, project_all
from attnlab.heads.registry import register_layout
from attnlab.heads.standard import Standard
from attnlab.heads.weights import Params, Weight, without


@register_layout("grouped_tied")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedTied(Layout):
    """Grouped-tied attention (Zadouri et al. 2025, arXiv 2505.21487).

        s_n = y T_n [V],  r = rotate(y R) [P],  k_n = [first H of s_n ; r],  v_n = s_n
        q_n = [x Q_n ; rotate(x P_n)]

    No number of the state is rotated: positions are in P numbers whose key is the same for all
    heads. A cache keeps K V + P numbers a token, where grouped heads keep 2 K V. Scores are scaled
    by 1/sqrt(H + P).

    Attributes:
      num_kv_heads: K; None is num_heads.
      value_dim: V; None is D / N.
      head_dim: H, the part of the state that is the key; None is V / 2, rounded up.
      rotary_dim: P; None is V / 2, made even.

    >>> from attnlab.heads import cache_shapes
    >>> cache_shapes(GroupedTied(width=64, num_heads=4, num_kv_heads=2))
    {'kv': (2, 16), 'r': (8,)}
    """

    equation = (
        "q_n = [x Q_n ; rotate(x P_n)],  k_n = [first H of y T_n ; rotate(y R)],  v_n = z T_n"
    )
    rank = "width, head_dim + rotary_dim"
    source = "Zadouri et al. 2025, Hardware-Efficient Attention, arXiv 2505.21487"
    rotary_axis = "rotary_dim"
    bias_names = ("o",)

    num_kv_heads: int | None = None
    value_dim: int | None = None
    head_dim: int | None = None
    rotary_dim: int | None = None

    @property
    def default_value_dim(self) -> int:
        """D / N."""
        return self.slice_width

    @property
    def default_head_dim(self) -> int:
        """V / 2, rounded up."""
        return -(-self.size("value_dim") // 2)

    @property
    def default_rotary_dim(self) -> int:
        """V / 2, rounded up to an even number."""
        return 2 * -(-self.size("value_dim") // 4)

    @property
    def score_width(self) -> int:
        """H + P."""
        return self.size("head_dim") + self.size("rotary_dim")

    def check(self) -> None:
        head_dim, value_dim = self.sizes(("head_dim", "value_dim"))
        if head_dim > value_dim:
            raise ValueError(f"head_dim {head_dim}, of the value, is at most value_dim {value_dim}")

    def weights(self) -> dict[str, Weight]:
        return {
            "q": Weight("project_q", ("width",), ("num_heads", "head_dim")),
            "q_rotary": Weight("project_q", ("width",), ("num_heads", "rotary_dim")),
            "kv": Weight("project_kv", ("width",), ("num_kv_heads", "value_dim")),
            "k_rotary": Weight("project_kv", ("width",), ("rotary_dim",)),
            **self.with_biases({"o": OUTPUT}),
        }

    def project_q(self, params: Params, x: Array, rotate: Rotate) -> Array:
        parts = project_all(params, "q", x), rotate(project_all(params, "q_rotary", x))
        return jnp.concatenate(parts, axis=-1)

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        """The states "kv", the key with positions "r"; "y" are states of another value input."""
        entries = {
            "kv": project_all(params, "kv", y),
            "r": rotate(project_all(params, "k_rotary", y)),
        }
        return entries if y is z else entries | {"y": project_all(params, "kv", z)}

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        k = concat_shared(entries["kv"][..., : self.size("head_dim")], entries["r"])
        return k, entries.get("y", entries["kv"])

    def rewritten(self) -> Rewrite | Blocked:
        """Standard: keys and values apart, the rotated part a copy per head."""
        heads, head_dim = self.size("num_kv_heads"), self.size("head_dim")

        def params(weights: Params) -> Params:
            k_rotary = weights["k_rotary"]
            shared = jnp.repeat(k_rotary[:, None], heads, axis=1)
            made = {
                "q": jnp.concatenate([weights["q"], weights["q_rotary"]], axis=-1),
                "k": jnp.concatenate([weights["kv"][..., :head_dim], shared], axis=-1),
                "v": weights["kv"],
            }
            return made | without(weights, *made, "q_rotary", "kv", "k_rotary")

        standard = self.to(Standard, head_dim=self.score_width, value_dim=self.size("value_dim"))
        rotary = "rotary positions rotate a part of each head only"
        return Rewrite(standard, params, not_rotary=rotary)
