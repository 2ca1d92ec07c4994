"""A layout and an extra that are not attnlab's, as a user would write them in one file."""

import dataclasses

from jaxtyping import Array

from attnlab.heads import (  # fmt: skip
    Extra,
    HeadCall,
    Layout,
    Params,
    Standard,
    Weight,
    register_extra,
    register_layout,
)


@register_layout("half_keys")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfKeys(Standard):
    """`Standard` with queries and keys of half the width of values."""

    @property
    def default_head_dim(self) -> int:
        return self.slice_width // 2

    @property
    def default_value_dim(self) -> int:
        return self.slice_width


@register_extra("head_scale")
@dataclasses.dataclass(frozen=True)
class HeadScale(Extra):
    """A learnt number for each head multiplies it."""

    between = ""
    start: float = 1.0

    def weights(self, layout: Layout) -> dict[str, Weight]:
        return {"head_scale": Weight("attend", out_axes=("num_heads",), constant=self.start)}

    def after_attention(
        self, params: Params, x: Array, heads: Array, call: HeadCall
    ) -> tuple[Array, dict[str, Array]]:
        return heads * params["head_scale"][:, None], {}
