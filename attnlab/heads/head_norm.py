"""`HeadNorm`: an optional norm of queries and keys."""

import dataclasses
from typing import Literal

from jax import Array

from attnlab.fields import Spec
from attnlab.heads.linear import normalize
from attnlab.heads.weights import HeadValue, Params, Stage, Weight
from attnlab.ops import NORM_STARTS


@dataclasses.dataclass(frozen=True, repr=False)
class HeadNorm(Spec, prefix="qk_norm."):
    """A norm of each query and key head, with a learnt scale, before rotary embedding.

    >>> HeadNorm("layer", bias=True)
    HeadNorm(kind='layer', bias=True)

    Attributes:
      kind: "layer" (Dehghani et al. 2023, arXiv 2302.05442; `normalize_qk` in Flax) or "rms".
      bias: a learnt bias of a layer norm.
      over: numbers that are normalized together: those of a head, with one scale for all heads
        ("head") or a scale for each ("own_head": Cohere, StableLM), or those of all heads ("all":
        OLMo 2, arXiv 2501.00656).
    """

    kind: Literal["layer", "rms", "rms_plus_one"] = "rms"
    bias: bool = False
    over: Literal["head", "own_head", "all"] = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias and self.kind != "layer":
            raise ValueError(f"qk_norm: an {self.kind} norm has no bias; leave bias out")

    def weights(self) -> dict[str, Weight]:
        """Scales, then biases, of the norms of queries and keys."""
        parts: tuple[tuple[HeadValue, Stage, str], ...] = (
            ("q", "project_q", "num_heads"),
            ("k", "project_kv", "num_kv_heads"),
        )
        made = {}
        for name, method, heads in parts:
            axes = ("head_dim",) if self.over == "head" else (heads, "head_dim")
            scale = Weight(method, out_axes=axes, constant=NORM_STARTS[self.kind], changes=(name,))
            made[f"{name}_norm"] = scale
            if self.bias:
                made[f"{name}_norm_bias"] = scale.bias()
        return made

    def apply(self, params: Params, name: str, a: Array, eps: float) -> Array:
        """q or k [B, T, heads, H] after its norm.

        >>> import jax.numpy as jnp
        >>> a, ones = jnp.array([[[[3.0], [4.0]]]]), {"q_norm": jnp.ones((2, 1))}
        >>> (HeadNorm(over="all").apply(ones, "q", a, 0.0) * 12.5**0.5).ravel().round(4).tolist()
        [3.0, 4.0]
        """
        if self.over != "all":
            return normalize(params, f"{name}_norm", a, self.kind, eps)
        flat = {n: w.reshape(-1) for n, w in params.items() if n.startswith(f"{name}_norm")}
        joined = a.reshape(*a.shape[:-2], -1)
        return normalize(flat, f"{name}_norm", joined, self.kind, eps).reshape(a.shape)
