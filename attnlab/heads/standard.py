"""Heads that read all of x: `Standard` (grouped and multi-query too) and `Wide`."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.bilinear import Bilinear, stacked_scores
from attnlab.heads.factors import Floats, Weights, factor
from attnlab.heads.head_norm import HeadNorm
from attnlab.heads.layout import OUTPUT, VALUES, Bias, Blocked, Entries, Layout, Rewrite, Rotate
from attnlab.heads.linear import project_all
from attnlab.heads.registry import register_layout
from attnlab.heads.weights import Params, Weight, without

Tie = Literal["", "kv", "qk", "qkv"]
UNTIED: dict[str, dict[Bias, Bias]] = {
    "": {},
    "kv": {"v": "k"},
    "qk": {"k": "q"},
    "qkv": {"k": "q", "v": "q"},
}
"""`tie` -> projection -> the projection whose weight it uses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separate(Layout):
    """Base of layouts with a projection each for q, k and v, which `project` applies.

    Attributes:
      head_dim: H, of a query and key; None is D / N.
      value_dim: V, of a value; None is `head_dim`.
      qk_norm: norm of queries and keys per head.
      tie: projections that use one weight: "kv" (a value is its key before norm and rotary, so
        that a cache may hold one of them), "qk" or "qkv".
    """

    can_tie: ClassVar[Tie] = "qkv"

    head_dim: int | None = None
    value_dim: int | None = None
    qk_norm: HeadNorm | None = None
    tie: Tie = ""

    def check(self) -> None:
        """The projections that are tied have one shape."""
        known = [tie for tie in UNTIED if set(tie) <= set(self.can_tie)]
        if self.tie not in known:
            raise ValueError(
                f"{self._label}: tie must be one of {', '.join(map(repr, known))}, not {self.tie!r}"
            )
        widths = dict(zip("qkv", self.input_widths, strict=True))
        for ours, theirs in UNTIED[self.tie].items():
            if ours in self.biases:
                raise ValueError(f"tie={self.tie!r}: leave {ours!r} out of biases")
            one, two = ((widths[name], *self.head_shape(name)) for name in (ours, theirs))
            if one != two:
                raise ValueError(
                    f"tie={self.tie!r} makes {ours} and {theirs} one projection, but they differ: "
                    f"(input width, heads, width of a head) {one} and {two}"
                )

    def head_shape(self, name: str) -> tuple[int, int]:
        """(number of heads, width of a head) of q, k or v."""
        return self.num_heads, self.size("value_dim" if name == "v" else "head_dim")

    def project(self, params: Params, name: str, x: Array) -> Array:
        """Applies projection `name` ("q", "k" or "v") to x."""
        return project_all(params, name, x)

    def tied(self, weights: dict[str, Weight]) -> dict[str, Weight]:
        """The weights without tied duplicates."""
        for ours, theirs in UNTIED[self.tie].items():
            for end in ("", "_outer"):
                if f"{ours}{end}" in weights:
                    gone, kept = weights.pop(f"{ours}{end}"), weights[f"{theirs}{end}"]
                    weights[f"{theirs}{end}"] = dataclasses.replace(
                        kept,
                        stage=tuple(dict.fromkeys(kept.stages + gone.stages)),
                        changes=kept.changed + gone.changed,
                    )
        return weights

    def finished(self, weights: dict[str, Weight]) -> dict[str, Weight]:
        """The weights with ties, an optional output projection, biases and norms."""
        weights = self.with_biases(self.tied(weights))
        if self.qk_norm and self.qk_norm.over != "head" and self.num_score_maps != self.num_heads:
            raise ValueError(f"{self._label} has two queries a head; use HeadNorm(over='head')")
        norms = self.qk_norm.weights() if self.qk_norm else {}
        return weights | norms

    def project_q(self, params: Params, x: Array, rotate: Rotate) -> Array:
        q = self.project(params, "q", x)
        return rotate(self.qk_norm.apply(params, "q", q, self.norm_eps) if self.qk_norm else q)

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        by = {"k": "k", "v": "v", **UNTIED[self.tie]}
        k = self.project(params, by["k"], y)
        v = k if by["v"] == by["k"] and z is y else self.project(params, by["v"], z)
        k = rotate(self.qk_norm.apply(params, "k", k, self.norm_eps) if self.qk_norm else k)
        return {"k": k} if k is v else {"k": k, "v": v}

    def untied(self) -> Rewrite:
        """The same layout with a weight for each projection."""
        sources = UNTIED[self.tie]

        def params(weights: Params) -> Params:
            copies = {
                f"{ours}{end}": weights[f"{theirs}{end}"]
                for ours, theirs in sources.items()
                for end in ("", "_outer", "_bias")
                if f"{theirs}{end}" in weights
            }
            return {**weights, **copies}

        more = tuple(ours for ours, theirs in sources.items() if theirs in self.biases)
        return Rewrite(dataclasses.replace(self, tie="", biases=self.biases + more), params)

    def to_bilinear(
        self, params: Callable[[Params], tuple[Array, Array | None]]
    ) -> Rewrite | Blocked:
        """The bilinear layout: A_n = W_Q,n W_K,n^T. The key bias cancels in the softmax, the query
        bias becomes a vector per head.

        Args:
          params: weights -> A_n [D, N, E], and the vectors [N, E] if queries have a bias.
        """
        between = "qk_norm" if self.qk_norm else self.blocks("qk")
        if between:
            return Blocked("bilinear", f"{between} is applied between W_Q and W_K")
        not_shifted = ""
        if "k" in self.biases:
            not_shifted = "a soft cap or a sink sees the key bias, which this form drops"
            if not all(extra.shift_invariant for extra in self.extras):
                return Blocked("bilinear", not_shifted)

        def rewrite(weights: Params) -> Params:
            qk, q_bias = params(weights)
            made = {"qk": qk} if q_bias is None else {"qk": qk, "q_bias": q_bias}
            return without(weights, "q", "k", "mixing", "q_bias", "k_bias") | made

        bilinear = self.to(
            Bilinear, scale=self.score_scale, biases=tuple(b for b in self.biases if b != "k")
        )
        flops = 2 * self.width * self.num_heads * self.size("key_width") * self.size("head_dim")
        rotary = "rotary positions are applied between W_Q and W_K"
        return Rewrite(bilinear, rewrite, flops, not_rotary=rotary, not_shifted=not_shifted)


@register_layout("standard")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Standard(Separate):
    """Every head reads all of x (Vaswani et al. 2017, section 3.2.2, arXiv 1706.03762).

        q_n = x Q_n,  k_n = y K_n,  v_n = z V_n

    Fields of every layout, such as `biases` and `extras`, are in `Layout`.

    Attributes:
      num_kv_heads: K; fewer than num_heads is grouped-query attention (Ainslie et al. 2023, arXiv
        2305.13245), 1 is multi-query attention (Shazeer 2019, arXiv 1911.02150). None is num_heads.
      head_dim: H, of a query and key; None is D / N.
      value_dim: V, of a value; None is `head_dim`.
      key_width, value_width: of the key and value input; None is `width`.
      qk_norm: norm of queries and keys per head.
      tie: projections that use one weight: "kv" (a value is its key before norm and rotary, so
        that a cache may hold one of them), "qk" or "qkv".

    >>> Standard(width=512, num_heads=8, num_kv_heads=2).size("head_dim")
    64
    """

    equation = "q_n = x Q_n,  k_n = y K_n,  v_n = z V_n"
    rank = "width, head_dim"
    source = "Vaswani et al. 2017, section 3.2.2, arXiv 1706.03762"

    num_kv_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None

    def head_shape(self, name: str) -> tuple[int, int]:
        heads = self.num_heads if name == "q" else self.size("num_kv_heads")
        return heads, self.size("value_dim" if name == "v" else "head_dim")

    def head_weights(self) -> dict[str, Weight]:
        """q, k and v of each head, and the output projection."""
        return {
            "q": Weight("project_q", ("width",), ("num_heads", "head_dim")),
            "k": Weight("project_kv", ("key_width",), ("num_kv_heads", "head_dim"), changes=("k",)),
            "v": VALUES,
            "o": OUTPUT,
        }

    def weights(self) -> dict[str, Weight]:
        return self.finished(self.head_weights())

    def rewritten(self) -> Rewrite | Blocked:
        """Bilinear: A_n = W_Q,n W_K,n^T."""
        if self.tie:
            return self.untied()
        repeats = self.num_heads // self.size("num_kv_heads")

        def params(weights: Params) -> tuple[Array, Array | None]:
            k = jnp.repeat(weights["k"], repeats, axis=1)
            bias = weights.get("q_bias")
            q_bias = None if bias is None else jnp.einsum("NH,ENH->NE", bias, k)
            return jnp.einsum("DNH,ENH->DNE", weights["q"], k), q_bias

        return self.to_bilinear(params)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """The score matrices (and query biases) that share a key head, below each other, of rank
        H."""
        keys, h = self.size("num_kv_heads"), self.size("head_dim")
        rows = stacked_scores(w).reshape(keys, -1, self.size("key_width"))
        if (found := factor(rows, h, tolerance)) is None:
            return None
        q = found[0].reshape(self.num_heads, -1, h)
        made = {"q": q[:, : self.width].swapaxes(0, 1), "k": np.moveaxis(found[1], 2, 0)}
        return made | ({"q_bias": q[:, -1]} if "q_bias" in w else {})


@register_layout("wide")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide(Standard):
    """`Standard` with every head as wide as the model, H = V = D (pbloem/former).

    Fields are those of `Standard`; `head_dim` None is D.

    >>> Wide(width=512, num_heads=8).size("head_dim")
    512
    """

    equation = "q_n = x Q_n,  k_n = y K_n,  v_n = z V_n,  H = V = D"
    source = "pbloem/former, SelfAttentionWide"

    @property
    def default_head_dim(self) -> int:
        """D."""
        return self.width
