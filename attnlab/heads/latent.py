"""Multi-head latent attention: `Latent`, and `LatentAbsorbed`, the same function for decoding."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.factors import Floats, Weights, factor
from attnlab.heads.layout import OUTPUT, Blocked, Entries, Layout, Rewrite, Rotate
from attnlab.heads.linear import compress, concat_shared, project_all, project_slices
from attnlab.heads.registry import register_layout
from attnlab.heads.standard import Standard
from attnlab.heads.weights import Params, Weight, without


@register_layout("latent")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent(Layout):
    """Keys and values of all heads are read from one small latent, which is all a cache keeps.

        c = norm(y W_DKV) [M],  r = rotate(y W_KR) [P],  k_n = [c W_UK,n ; r],  v_n = c W_UV,n
        q_n = [u W_Q,n ; rotate(u W_QR,n)],  u = norm(x W_DQ) [Q], or x without query_latent_dim

    DeepSeek-AI 2024, DeepSeek-V2, section 2.1, arXiv 2405.04434. Only P numbers of a head have
    positions; their key is the same for all heads. Scores are scaled by 1/sqrt(H + P).

    Attributes:
      head_dim: H, the part without positions; None is D / N.
      value_dim: V; None is H.
      latent_dim: M; None is 4 H, as in the paper.
      rotary_dim: P; None is H / 2, made even.
      query_latent_dim: Q; None: queries read x.
      latent_norm: RMS norms of the latents; published layouts all have them.

    >>> from attnlab.heads import cache_shapes
    >>> cache_shapes(Latent(width=64, num_heads=4))  # Standard keeps 2 * 64 numbers
    {'c': (64,), 'r': (8,)}
    """

    equation = (
        "q_n = [u Q_n ; rotate(u P_n)],  k_n = [c(y) K_n ; rotate(y R)],  v_n = c(z) V_n,  "
        "c(y) = norm(y C),  u = x or norm(x U)"
    )
    rank = "width, query_latent_dim, head_dim + rotary_dim"
    source = "DeepSeek-AI 2024, DeepSeek-V2, section 2.1, arXiv 2405.04434"
    rotary_axis = "rotary_dim"
    bias_names = ("o",)

    head_dim: int | None = None
    value_dim: int | None = None
    latent_dim: int | None = None
    rotary_dim: int | None = None
    query_latent_dim: int | None = None
    latent_norm: bool = True

    @property
    def default_latent_dim(self) -> int:
        """4 H."""
        return 4 * self.size("head_dim")

    @property
    def default_rotary_dim(self) -> int:
        """H / 2, rounded up to an even number."""
        return 2 * -(-self.size("head_dim") // 4)

    @property
    def default_query_latent_dim(self) -> int:
        """Queries read x."""
        return self.width

    @property
    def score_width(self) -> int:
        """H + P."""
        return self.size("head_dim") + self.size("rotary_dim")

    def latent_weights(self) -> dict[str, Weight]:
        """What makes the latents and the parts with positions."""
        made = {}
        if self.query_latent_dim is not None:
            made["q_down"] = Weight("project_q", ("width",), ("query_latent_dim",))
            if self.latent_norm:
                norm = Weight("project_q", out_axes=("query_latent_dim",), constant=1.0)
                made["q_down_norm"] = norm
        made["q"] = Weight("project_q", ("query_latent_dim",), ("num_heads", "head_dim"))
        made["q_rotary"] = Weight("project_q", ("query_latent_dim",), ("num_heads", "rotary_dim"))
        made["kv_down"] = Weight("project_kv", ("width",), ("latent_dim",))
        if self.latent_norm:
            made["kv_down_norm"] = Weight("project_kv", out_axes=("latent_dim",), constant=1.0)
        made["k_rotary"] = Weight("project_kv", ("width",), ("rotary_dim",))
        return made

    def weights(self) -> dict[str, Weight]:
        up = {
            "k": Weight("keys_values", ("latent_dim",), ("num_heads", "head_dim"), changes=("k",)),
            "v": Weight("keys_values", ("latent_dim",), ("num_heads", "value_dim"), changes=("v",)),
        }
        return self.latent_weights() | up | self.with_biases({"o": OUTPUT})

    def query_parts(self, params: Params, x: Array, rotate: Rotate) -> tuple[Array, Array]:
        """Queries without positions, and their part with positions."""
        u = x if self.query_latent_dim is None else compress(params, "q_down", x, self.norm_eps)
        return project_all(params, "q", u), rotate(project_all(params, "q_rotary", u))

    def project_q(self, params: Params, x: Array, rotate: Rotate) -> Array:
        return jnp.concatenate(self.query_parts(params, x, rotate), axis=-1)

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        """The latent "c", the key with positions "r"; "y" is the latent of another value input."""
        entries = {
            "c": compress(params, "kv_down", y, self.norm_eps),
            "r": rotate(project_all(params, "k_rotary", y)),
        }
        return entries if y is z else entries | {"y": compress(params, "kv_down", z, self.norm_eps)}

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        values = entries.get("y", entries["c"])
        k = concat_shared(project_all(params, "k", entries["c"]), entries["r"])
        return k, project_all(params, "v", values)

    def rewritten(self) -> Rewrite | Blocked:
        """LatentAbsorbed: W_UK moves to the query and W_UV to the output."""
        if extra := self.blocks("vo"):
            return Blocked("latent_absorbed", f"{extra} is applied between W_UV and W_O")
        if extra := self.blocks("qk"):
            return Blocked("latent_absorbed", f"{extra} is applied between W_Q and W_UK")

        def params(weights: Params) -> Params:
            k, v = weights["k"].transpose(1, 2, 0), weights["v"].transpose(1, 0, 2)
            return {**weights, "k": k, "v": v}

        return Rewrite(self.to(LatentAbsorbed, scale=self.score_scale), params)

    def general(self) -> Rewrite | Blocked:
        """Standard, without norms: the matrices into and out of the latents multiplied."""
        if self.latent_norm:
            return Blocked("standard", "a norm is inside the heads")

        def params(w: Params) -> Params:
            q = jnp.concatenate([w["q"], w["q_rotary"]], axis=-1)
            k, v = (jnp.tensordot(w["kv_down"], w[name], 1) for name in "kv")
            shared = jnp.repeat(w["k_rotary"][:, None], self.num_heads, axis=1)
            made = {
                "q": jnp.tensordot(w["q_down"], q, 1) if "q_down" in w else q,
                "k": jnp.concatenate([k, shared], axis=-1),
                "v": v,
            }
            return without(w, "q_down", "kv_down", "q_rotary", "k_rotary") | made

        standard = self.to(Standard, head_dim=self.score_width, value_dim=self.size("value_dim"))
        return Rewrite(standard, params, not_rotary="rotary positions are inside the heads")

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """Keys and values of all heads side by side, of rank M; the last P columns of k are those
        that all heads share."""
        n, h, m = self.num_heads, self.size("head_dim"), self.size("latent_dim")
        both = np.concatenate([w["k"][..., :h], w["v"]], axis=-1).reshape(self.width, -1)
        if (found := factor(both, m, tolerance)) is None:
            return None
        k, v = np.split(found[1].reshape(m, n, -1), [h], axis=-1)
        q, made = w["q"], {"kv_down": found[0], "k": k, "v": v, "k_rotary": w["k"][:, 0, h:]}
        if self.query_latent_dim is not None:
            found = factor(q.reshape(self.width, -1), self.query_latent_dim, tolerance)
            if found is None:
                return None
            made["q_down"], q = found[0], found[1].reshape(-1, n, q.shape[-1])
        return made | {"q": q[..., :h], "q_rotary": q[..., h:]}


@register_layout("latent_absorbed")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAbsorbed(Latent):
    """`Latent` with its up-projections applied to queries and outputs, the form that decodes.

    Every head attends to [c ; r] and receives c. Cheaper than `Latent` where few queries read many
    keys.

    Fields are those of `Latent`.

    >>> absorbed = LatentAbsorbed(width=64, num_heads=4)
    >>> absorbed.num_key_heads, absorbed.score_width  # one key [c ; r] for all heads
    (1, 72)
    """

    equation = (
        "q_n = [u Q_n K_n ; rotate(u P_n)],  k_n = [c(y) ; rotate(y R)],  "
        "v_n W_O,n = c(z) V_n O_n,  c(y) = norm(y C),  u = x or norm(x U)"
    )
    merges_values = True
    num_key_heads = 1
    """All heads have one key."""
    num_value_heads = 1
    """All heads have one value."""
    source = "DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2, arXiv 2405.04434"

    @property
    def score_width(self) -> int:
        """M + P."""
        return self.size("latent_dim") + self.size("rotary_dim")

    @property
    def head_width(self) -> int:
        """M."""
        return self.size("latent_dim")

    def weights(self) -> dict[str, Weight]:
        heads = ("num_heads",)
        up = {
            "k": Weight("project_q", ("head_dim",), ("latent_dim",), batch_axes=heads),
            "v": Weight("project_out", ("latent_dim",), ("value_dim",), batch_axes=heads),
        }
        return self.latent_weights() | up | self.with_biases({"o": OUTPUT})

    def general(self) -> Rewrite:
        """`Latent`, the way back from its `rewritten`."""

        def params(w: Params) -> Params:
            return {**w, "k": w["k"].transpose(2, 0, 1), "v": w["v"].transpose(1, 0, 2)}

        return Rewrite(self.to(Latent, scale=self.score_scale), params)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats]:
        """The axes of the up-projections in another order."""
        return {"k": w["k"].transpose(1, 2, 0), "v": w["v"].transpose(1, 0, 2)}

    def project_q(self, params: Params, x: Array, rotate: Rotate) -> Array:
        q, rotated = self.query_parts(params, x, rotate)
        return jnp.concatenate([project_slices(params, "k", q), rotated], axis=-1)

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        key = jnp.concatenate([entries["c"], entries["r"]], axis=-1)
        return key[..., None, :], entries.get("y", entries["c"])[..., None, :]

    def project_out(self, params: Params, heads: Array) -> Array:
        return super().project_out(params, project_slices(params, "v", heads))
