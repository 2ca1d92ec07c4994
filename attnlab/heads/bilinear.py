"""Heads whose keys, or keys and values, are the input itself: `Bilinear` and `Absorbed`."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads.factors import Floats, Weights, factor
from attnlab.heads.layout import OUTPUT, VALUES, Blocked, Entries, Layout, Rewrite, Rotate
from attnlab.heads.linear import add_bias, combine_heads, project_all
from attnlab.heads.registry import register_layout
from attnlab.heads.weights import Params, Weight, without

SCORES = Weight("project_q", ("width",), ("num_heads", "key_width"))
"""A_n of all heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputKeys(Layout):
    """Base of layouts with one matrix A_n [D, E] for the scores of a head.

    Attributes:
      key_width, value_width: of the key and value input; None is `width`.
    """

    rank = "width, key_width"
    num_key_heads = 1
    """All heads have one key."""

    key_width: int | None = None
    value_width: int | None = None

    @property
    def score_width(self) -> int:
        """E, the width of the inputs."""
        return self.size("key_width")

    def project_q(self, params: Params, x: Array, rotate: Rotate) -> Array:
        return rotate(add_bias(params, "q", project_all(params, "qk", x)))


@register_layout("bilinear")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bilinear(InputKeys):
    """One matrix A_n for the scores of each head in place of W_Q and W_K; keys are the input.

        q_n = x A_n,  k_n = y,  v_n = z V_n

    The "general" score of Luong et al. 2015, section 3.1, arXiv 1508.04025.

    Attributes:
      key_width, value_width: of the key and value input; None is `width`.
      num_kv_heads: of values; None is num_heads.
      value_dim: V; None is D / N.

    >>> from attnlab.heads import cache_shapes, weight_shapes
    >>> layout = Bilinear(width=6, num_heads=2)
    >>> weight_shapes(layout)["qk"], cache_shapes(layout)
    ((6, 2, 6), {'v': (2, 3), 'x': (6,)})
    """

    equation = "q_n = x A_n,  k_n = y,  v_n = z V_n"
    source = "Luong et al. 2015, section 3.1 (general score), arXiv 1508.04025"
    rotary_axis = "key_width"
    bias_names = ("q", "v", "o")

    num_kv_heads: int | None = None
    value_dim: int | None = None

    @property
    def default_value_dim(self) -> int:
        """D / N."""
        return self.slice_width

    def weights(self) -> dict[str, Weight]:
        made = self.with_biases({"q": SCORES, "v": VALUES, "o": OUTPUT})
        return {"qk": made.pop("q"), **made}

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        return {"x": rotate(y), "v": project_all(params, "v", z)}

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        return entries["x"][..., None, :], entries["v"]

    def rewritten(self) -> Rewrite | Blocked:
        """Absorbed: W_V,n W_O,n is one matrix per head, the value bias a vector per head."""
        if not self.output_projection:
            return Blocked("absorbed", "there is no W_O to multiply W_V with")
        if extra := self.blocks("vo"):
            return Blocked("absorbed", f"{extra} is applied between W_V and W_O")
        if extra := self.blocks("qk"):  # its values are read by W_O
            return Blocked("absorbed", f"{extra} is applied inside the heads")
        repeats = self.num_heads // self.size("num_kv_heads")

        def params(weights: Params) -> Params:
            v = jnp.repeat(weights["v"], repeats, axis=1)
            made = {"vo": jnp.einsum("WNV,NVO->NWO", v, weights["o"])}
            if "v_bias" in weights:
                bias = jnp.repeat(weights["v_bias"], repeats, axis=0)
                made["v_bias"] = jnp.einsum("NV,NVO->NO", bias, weights["o"])
            return without(weights, "v", "o", "v_bias") | made

        width = self.size("value_width") * self.size("value_dim") * self.size("out_width")
        rotary = "rotary positions cannot rotate the keys of 'absorbed'"
        flops = 2 * self.num_heads * width
        return Rewrite(self.to(Absorbed), params, flops, not_rotary=rotary)

    def inverse(self, w: Weights, other: Layout, tolerance: float) -> dict[str, Floats] | None:
        """W_V W_O (and value biases) of the heads that share a value head, side by side, of rank
        V."""
        groups, rank, width = (self.size(n) for n in ("num_kv_heads", "value_dim", "value_width"))
        both = np.concatenate([w["vo"]] + ([w["v_bias"][:, None]] if "v_bias" in w else []), axis=1)
        heads, rows, out = both.shape
        beside = both.reshape(groups, -1, rows, out).swapaxes(1, 2).reshape(groups, rows, -1)
        if (found := factor(beside, rank, tolerance)) is None:
            return None
        v, right = found
        o = right.reshape(groups, rank, -1, out).swapaxes(1, 2).reshape(heads, rank, out)
        made = {"v": v[:, :width].swapaxes(0, 1), "o": o}
        return made | ({"v_bias": v[:, -1]} if "v_bias" in w else {})


def stacked_scores(w: Weights) -> Floats:
    """[A_n; b_n] of bilinear or absorbed weights: [N, D, E], or [N, D + 1, E] with query biases."""
    rows = [w["qk"].swapaxes(0, 1)] + ([w["q_bias"][:, None]] if "q_bias" in w else [])
    return np.concatenate(rows, axis=1)


@register_layout("absorbed")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Absorbed(InputKeys):
    """One matrix per head for scores and one for values; keys and values are the inputs.

        q_n = x A_n,  k_n = y,  v_n W_O,n = z B_n

    The QK and OV matrices of Elhage et al. 2021, "A Mathematical Framework for Transformer
    Circuits".

    Attributes:
      key_width, value_width: of the key and value input; None is `width`.

    >>> from attnlab.heads import cache_shapes
    >>> cache_shapes(Absorbed(width=6, num_heads=2))  # a cache keeps the input alone
    {'x': (6,)}
    """

    equation = "q_n = x A_n,  k_n = y,  v_n W_O,n = z B_n"
    source = "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (QK and OV)"
    rotary_axis = None
    merges_values = True
    num_value_heads = 1
    """All heads have one value."""
    bias_names = ("q", "v", "o")

    @property
    def head_width(self) -> int:
        """The width of the inputs, and one number for the value bias."""
        return self.size("value_width") + ("v" in self.biases)

    def check(self) -> None:
        if not self.output_projection:
            raise ValueError(f"{self._label} needs output_projection=True")

    def weights(self) -> dict[str, Weight]:
        value = Weight("project_out", ("num_heads", "value_width"), ("out_width",), residual=True)
        # It multiplies the mass of each row of probabilities, so it is a matrix [N, O].
        v_bias = Weight("project_out", ("num_heads",), ("out_width",), constant=0.0)
        biases = {"q": SCORES.bias(), "v": v_bias, "o": OUTPUT.bias()}
        made = {"qk": SCORES, "vo": value}
        return made | {f"{n}_bias": bias for n, bias in biases.items() if n in self.biases}

    def project_kv(self, params: Params, y: Array, z: Array, rotate: Rotate) -> Entries:
        return {"x": y} if y is z else {"x": y, "y": z}

    def keys_values(self, params: Params, entries: Entries) -> tuple[Array, Array]:
        """The inputs. With a value bias a column of ones carries the mass of each row of
        probabilities: less than 1 in rows without a key, under dropout and under talking heads."""
        y, z = entries["x"], entries.get("y", entries["x"])
        if "v" in self.biases:
            z = jnp.concatenate([z, jnp.ones_like(z[..., :1])], axis=-1)
        keys = y[..., None, :]
        return keys, keys if z is y else z[..., None, :]  # one array stays one: see `attend`

    def project_out(self, params: Params, heads: Array) -> Array:
        kernel = params["vo"]
        if "v" in self.biases:
            bias = params["v_bias"][:, None].astype(kernel.dtype)
            kernel = jnp.concatenate([kernel, bias], axis=1)
        output = {"o": kernel}
        if "o" in self.biases:
            output["o_bias"] = params["o_bias"]
        return combine_heads(output, heads)
