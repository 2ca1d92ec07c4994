"""`HeadNorm`: an optional norm of queries and keys."""

import dataclasses
from typing import Literal

from attnlab.heads.layout import short_repr
from attnlab.heads.weights import Method, Weight
from attnlab.norms import STARTS


@dataclasses.dataclass(frozen=True)
class HeadNorm:
    """A norm of each query and key head, with a learnt scale, before rotary embedding.

    >>> HeadNorm("layer", bias=True)
    HeadNorm(kind='layer', bias=True)

    Attributes:
      kind: "layer" (Dehghani et al. 2023, arXiv 2302.05442; `normalize_qk` in Flax) or "rms".
      bias: a learnt bias of a layer norm.
    """

    kind: Literal["layer", "rms", "rms_plus_one"] = "rms"
    bias: bool = False

    def __post_init__(self) -> None:
        if self.kind not in STARTS:
            raise ValueError(
                f"kind of HeadNorm must be one of {', '.join(map(repr, STARTS))}, not {self.kind!r}"
            )
        if self.bias and self.kind != "layer":
            raise ValueError(
                f"a norm of kind {self.kind!r} has no bias; use kind='layer' or bias=False"
            )

    def __repr__(self) -> str:
        return short_repr(self)

    def weights(self, axis: str) -> dict[str, Weight]:
        """Scales, then biases, of the norms of queries and keys of this width."""
        methods: dict[str, Method] = {"q": "project_q", "k": "project_kv"}
        made = {}
        for name, method in methods.items():
            made[f"{name}_norm"] = Weight(method, makes=(axis,), constant=STARTS[self.kind])
            if self.bias:
                made[f"{name}_norm_bias"] = Weight(method, makes=(axis,), constant=0.0)
        return made
