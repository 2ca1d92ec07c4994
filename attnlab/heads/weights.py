"""What a weight of attention heads is: the stage that uses it, its axes and its initial values.

Shapes, fan-in, initial scale, FLOPs and sharding axes of a layout all follow from its `Weight`s.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jax import Array

Params = Mapping[str, Array]
"""Weights of one set of heads by name."""

Stage = Literal["prepare", "project_q", "project_kv", "keys_values", "attend", "project_out"]
"""The methods of `Layout` that use weights, in the order in which a call uses them."""

HeadValue = Literal["q", "k", "v", "scores", "probs", "heads", "outputs"]
"""The values of `HEAD_VALUES`."""
CHANGED_BY: Mapping[Stage, tuple[HeadValue, ...]] = {
    "prepare": ("q", "k", "v"),
    "project_q": ("q",),
    "project_kv": ("k", "v"),
    "keys_values": ("k", "v"),
    "attend": ("scores",),
    "project_out": ("outputs",),
}
"""The first values that a stage changes."""

Axes = tuple[str | int, ...]
"""Axes of a weight: names of fields or properties of the layout, or sizes."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight. Its shape is [*batch_axes, *in_axes, *out_axes], in the words of Flax.

    Attributes:
      stage: the method that applies it; several where one matrix makes queries and keys.
      in_axes: axes that one output sums over, the fan-in. Empty for biases and scales.
      out_axes: axes of one output.
      batch_axes: axes with a matrix of their own each, as heads that read their own slice of x.
      tied_axes: axes that apply the same matrix, which counts for FLOPs only.
      mean_axes: axes that a later mean is taken over; the initial standard deviation is larger by
        the root of their size, so that the mean has the usual scale.
      constant: all initial values are this number.
      identity: a square matrix that is initially the identity.
      std: initial standard deviation; None is 1/sqrt(fan-in).
      residual: it writes into the residual stream, so `residual_scale` scales its initial values.
      changes: the first values that it changes, if not those of its stage in `CHANGED_BY`: "k" or
        "v" alone, "probs" or "heads" of a weight of an extra.
      per_score: it is applied to every pair of a query and a key, not to every token.

    >>> Weight("project_q", in_axes=("width",), out_axes=("num_heads", "head_dim")).axes
    ('width', 'num_heads', 'head_dim')
    """

    stage: Stage | tuple[Stage, ...]
    in_axes: Axes = ()
    out_axes: Axes = ()
    batch_axes: Axes = ()
    tied_axes: Axes = ()
    mean_axes: Axes = ()
    constant: float | None = None
    identity: bool = False
    std: float | None = None
    residual: bool = False
    changes: tuple[HeadValue, ...] = ()
    per_score: bool = False

    @property
    def axes(self) -> Axes:
        """Axes of the array."""
        return self.batch_axes + self.in_axes + self.out_axes

    @property
    def stages(self) -> tuple[Stage, ...]:
        """`stage` as a tuple."""
        return self.stage if isinstance(self.stage, tuple) else (self.stage,)

    @property
    def changed(self) -> tuple[HeadValue, ...]:
        """The first values that it changes."""
        return self.changes or tuple(v for stage in self.stages for v in CHANGED_BY[stage])

    def bias(self) -> "Weight":
        """The bias added to what this weight makes; initially zero."""
        axes = self.batch_axes + self.out_axes
        return Weight(self.stage, out_axes=axes, constant=0.0, changes=self.changes)


def without(params: Params, *names: str) -> dict[str, Array]:
    """The parameters except those of these names."""
    return {name: a for name, a in params.items() if name not in names}
