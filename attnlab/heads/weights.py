"""What a weight of attention heads is: which method uses it, its axes and its initial values.

Shapes, fan-in, initial scale, FLOPs and sharding axes of a layout all follow from its `Weight`s.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jax import Array

Params = Mapping[str, Array]
"""Weights of one set of heads by name."""

Method = Literal["prepare", "project_q", "project_kv", "keys_values", "attend", "project_out"]
"""The methods of `Layout` that use weights."""

HeadValue = Literal["q", "k", "v", "scores", "probs", "heads", "outputs"]
"""The values of `HEAD_VALUES`."""
ENTERED: Mapping[Method, tuple[HeadValue, ...]] = {
    "prepare": ("q", "k", "v"),
    "project_q": ("q",),
    "project_kv": ("k", "v"),
    "keys_values": ("k", "v"),
    "attend": ("scores",),
    "project_out": ("outputs",),
}
"""The first values that a method changes."""

Axes = tuple[str | int, ...]
"""Axes of a weight: names of fields or properties of the layout, or sizes."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight. Its shape is [*per, *reads, *makes].

    Attributes:
      used_in: the method that applies it; several where one matrix makes queries and keys.
      reads: axes that one output sums over, the fan-in. Empty for biases and scales.
      makes: axes of one output.
      per: axes with a matrix of their own each, as heads that read their own slice of x.
      applied_per: axes that apply the same matrix, which counts for FLOPs only.
      constant: all initial values are this number.
      identity: a square matrix that is initially the identity.
      std: initial standard deviation; None is 1/sqrt(fan-in).
      averaged_over: axes that a later mean is taken over; the initial standard deviation is larger
        by the root of their size, so that the mean has the usual scale.
      enters: the first values that it changes, if not those of its method in `ENTERED`: "k" or "v"
        alone, "probs" or "heads" of a weight of an extra.
      per_score: it is applied to every pair of a query and a key, not to every token.

    >>> Weight("project_q", reads=("width",), makes=("num_heads", "head_dim")).axes
    ('width', 'num_heads', 'head_dim')
    """

    used_in: Method | tuple[Method, ...]
    reads: Axes = ()
    makes: Axes = ()
    per: Axes = ()
    applied_per: Axes = ()
    constant: float | None = None
    identity: bool = False
    std: float | None = None
    averaged_over: Axes = ()
    per_score: bool = False
    enters: tuple[HeadValue, ...] = ()

    @property
    def axes(self) -> Axes:
        """Axes of the array."""
        return self.per + self.reads + self.makes

    @property
    def methods(self) -> tuple[Method, ...]:
        """`used_in` as a tuple."""
        return self.used_in if isinstance(self.used_in, tuple) else (self.used_in,)

    @property
    def entered(self) -> tuple[HeadValue, ...]:
        """The first values that it changes."""
        return self.enters or tuple(v for method in self.methods for v in ENTERED[method])

    def bias(self) -> "Weight":
        """The bias added to what this weight makes; initially zero."""
        made = self.per + self.makes
        return Weight(self.used_in, makes=made, constant=0.0, enters=self.enters)


def without(params: Params, *names: str) -> dict[str, Array]:
    """The parameters except those of these names."""
    return {name: a for name, a in params.items() if name not in names}
