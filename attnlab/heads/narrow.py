"""Heads that read only their own slice of x: `Narrow`, `NarrowTied`, `Alt`."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.factors import Floats, Weights, factor
from attnlab.heads.layout import OUTPUT, Blocked, Layout, Rewrite
from attnlab.heads.linear import project_all, project_slices
from attnlab.heads.registry import register_layout
from attnlab.heads.standard import Separate, Standard
from attnlab.heads.weights import Axes, HeadValue, Params, Stage, Weight, without

WORST_CONDITION = 1e6
"""Of a change of basis that makes heads equal."""


@register_layout("narrow")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow(Separate):
    """Head n reads slice n of x alone, with projections of its own (peterbloem.nl, 2019 to 2023).

        q_n = x_n Q_n,  k_n = y_n K_n,  v_n = z_n V_n

    Fields are those of `Standard`, except num_kv_heads, key_width and value_width.

    >>> from attnlab.heads import weight_shapes
    >>> weight_shapes(Narrow(width=12, num_heads=3))["q"]
    (3, 4, 4)
    """

    equation = "q_n = x_n Q_n,  k_n = y_n K_n,  v_n = z_n V_n"
    rank = "slice_width, head_dim"
    source = "peterbloem.nl/blog/transformers, text of 2019 to 2023"
    batch_axes: ClassVar[Axes] = ("num_heads",)
    tied_axes: ClassVar[Axes] = ()

    def head_weights(self) -> dict[str, Weight]:
        """q, k and v, which read a slice, and the output projection."""

        def reads_slice(name: HeadValue, stage: Stage, size: str) -> Weight:
            return Weight(
                stage, ("slice_width",), (size,), batch_axes=self.batch_axes,
                tied_axes=self.tied_axes, changes=(name,),
            )  # fmt: skip

        return {
            "q": reads_slice("q", "project_q", "head_dim"),
            "k": reads_slice("k", "project_kv", "head_dim"),
            "v": reads_slice("v", "project_kv", "value_dim"),
            "o": OUTPUT,
        }

    def weights(self) -> dict[str, Weight]:
        return self.finished(self.head_weights())

    def project(self, params: Params, name: str, x: Array) -> Array:
        return project_slices(params, name, x)

    def rewritten(self) -> Rewrite | Blocked:
        """Standard: the slices as block-diagonal matrices."""
        if self.tie:
            return self.untied()

        def params(weights: Params) -> Params:
            return {n: block_diagonal(a) if n in "qkv" else a for n, a in weights.items()}

        return Rewrite(self.to(Standard), params)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """The blocks of the diagonal."""
        n = self.num_heads
        blocks = {name: w[name].reshape(n, -1, n, w[name].shape[-1]) for name in "qkv"}
        return {name: np.stack([a[i, :, i] for i in range(n)]) for name, a in blocks.items()}


@register_layout("narrow_tied")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowTied(Narrow):
    """One projection for the slices of all heads (pbloem/former, SelfAttentionNarrow).

        q_n = x_n Q,  k_n = y_n K,  v_n = z_n V

    Published with an output projection and scale 1/sqrt(D) in 2019 and without one in 2021; set
    `output_projection` and `scale` for either.

    Fields are those of `Narrow`.

    >>> from attnlab.heads import weight_shapes
    >>> weight_shapes(NarrowTied(width=12, num_heads=3))["q"]  # one for all heads
    (4, 4)
    """

    equation = "q_n = x_n Q,  k_n = y_n K,  v_n = z_n V"
    source = "pbloem/former, SelfAttentionNarrow"
    batch_axes: ClassVar[Axes] = ()
    tied_axes: ClassVar[Axes] = ("num_heads",)

    def project(self, params: Params, name: str, x: Array) -> Array:
        slices = x.reshape(*x.shape[:2], -1, params[name].shape[0])
        return project_all(params, name, slices)

    def rewritten(self) -> Rewrite | Blocked:
        """Narrow: every head a copy of the one projection."""
        if self.tie:
            return self.untied()
        tied = {f"{name}{end}" for name in "qkv" for end in ("", "_bias")}

        def params(weights: Params) -> Params:
            copies = {
                name: jnp.broadcast_to(weights[name], (self.num_heads, *weights[name].shape))
                for name in tied & weights.keys()
            }
            return {**weights, **copies}

        return Rewrite(self.to(Narrow), params)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """Those of the first head. Where heads differ, in the basis in which the top of q and of v
        is the identity."""
        w = dict(w)
        for one, two in (("q", "k"), ("v", "o")):
            if np.allclose(w[one], w[one][:1], rtol=tolerance, atol=tolerance):
                continue
            top = w[one][:, : w[one].shape[-1]]
            if top.shape[1] < top.shape[2] or np.any(np.linalg.cond(top) > WORST_CONDITION):
                return None
            w[one] = w[one] @ np.linalg.inv(top)
            w[two] = top @ w[two] if two == "o" else w[two] @ top.swapaxes(1, 2)
        tied = {name: w[name][0] for name in w if name.removesuffix("_bias") in ("q", "k", "v")}
        return tied | ({"o": w["o"]} if "o" in w else {})


@register_layout("alt")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Alt(Narrow):
    """One D x D matrix for all heads, then slices (pbloem/former, SelfAttentionAlt).

    q_n = (x M)_n Q_n,  k_n = (y M)_n K_n,  v_n = (z M)_n V_n

    Fields are those of `Narrow`.

    >>> from attnlab.heads import weight_shapes
    >>> shapes = weight_shapes(Alt(width=6, num_heads=2))
    >>> shapes["mix"], shapes["q"]
    ((6, 2, 3), (2, 3, 3))
    """

    equation = "q_n = (x M)_n Q_n,  k_n = (y M)_n K_n,  v_n = (z M)_n V_n"
    source = "pbloem/former, SelfAttentionAlt"

    def weights(self) -> dict[str, Weight]:
        shared = Weight("prepare", ("width",), ("num_heads", "slice_width"))
        return self.finished({"mix": shared, **self.head_weights()})

    def prepare(self, params: Params, x: Array) -> Array:
        return project_all(params, "mix", x)

    def rewritten(self) -> Rewrite | Blocked:
        """Standard: head n reads x through its own columns of the shared matrix."""
        if self.tie:
            return self.untied()

        def params(weights: Params) -> Params:
            mix = weights["mix"]
            folded = {n: jnp.einsum("DNC,NCH->DNH", mix, weights[n]) for n in "qkv"}
            return without(weights, "mix") | folded

        width = 2 * self.size("head_dim") + self.size("value_dim")
        return Rewrite(self.to(Standard), params, 2 * self.width**2 * width)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """[Q_n K_n V_n] of rank D / N, whose left factor is the part of M of head n."""
        side_by_side = np.concatenate([w[name].transpose(1, 0, 2) for name in "qkv"], axis=-1)
        if (found := factor(side_by_side, self.slice_width, tolerance)) is None:
            return None
        h = self.size("head_dim")
        parts = np.split(found[1], [h, 2 * h], axis=-1)
        return dict(zip("qkv", parts, strict=True)) | {"mix": found[0].transpose(1, 0, 2)}


def block_diagonal(kernel: Array) -> Array:
    """[N, C, H] -> [N*C, N, H]: head n keeps the rows of its slice, zeros elsewhere.

    >>> block_diagonal(jnp.ones((2, 1, 1)))[:, :, 0].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    n, _, h = kernel.shape
    return (jnp.eye(n, dtype=kernel.dtype)[:, None, :, None] * kernel[:, :, None]).reshape(-1, n, h)
