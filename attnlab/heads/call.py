"""`Call`: the options and softmax attention of one call, for layouts and extras."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from attnlab.attention import AttentionOptions, AttentionOutput, attend
from attnlab.tap import Tap

Wrapper = Callable[["Call", Array, Array, Array], Array]
"""(inner call, q, k, v) -> heads: code around the softmax attention of a call."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of attention, passed to `Layout.attend` and to extras.

    Attributes:
      options: mask, bias, is_causal, dropout_rate, score_mods, ...
      tap: takes named values.
      layer: index of the layer, counted from 0; may be traced.
      token_mask: [B, T], True = a token of x; None: all are.
      wrappers: code around the softmax attention, the last one outermost.

    >>> import jax.numpy as jnp
    >>> call = Call(AttentionOptions(scale=0.5)).with_new(is_causal=True)
    >>> q, v = jnp.ones((1, 2, 1, 4)), jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> call.attention(q, q, v).ravel().tolist()
    [1.0, 2.0]
    """

    options: AttentionOptions
    tap: Tap = dataclasses.field(default_factory=Tap)
    layer: ArrayLike = 0
    token_mask: Bool[Array, "B T"] | None = None
    wrappers: tuple[Wrapper, ...] = ()

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        """Softmax attention under the options of the call.

        Args:
          q: [B, T, N, H]. k: [B, S, K, H]. v: [B, S, Kv, V].

        Returns:
          [B, T, N, V].
        """
        if self.wrappers:
            *inner, outermost = self.wrappers
            return outermost(dataclasses.replace(self, wrappers=tuple(inner)), q, k, v)
        return self.softmax(q, k, v).output

    def softmax(
        self, q: Array, k: Array, v: Array, *, return_residual: bool = False
    ) -> AttentionOutput:
        """The backend alone: output and, on request, log sum exp of the scores [B, T, N]."""
        return attend(q, k, v, self.options, tap=self.tap, return_residual=return_residual)

    def bind(self, **options: Any) -> "Call":
        """The call with other options."""
        return dataclasses.replace(self, options=self.options.replace(**options))

    def with_new(self, **options: Any) -> "Call":
        """The call with options that it does not have yet.

        Raises:
          ValueError: the call has one of them, which would be replaced silently.
        """
        for name in options:
            if getattr(self.options, name) is not None:
                raise ValueError(
                    f"{name} is set twice, as an option of the call and by an extra of the layout; "
                    "leave one out"
                )
        return self.bind(**options)

    def wrap(self, wrapper: Wrapper) -> "Call":
        """The call with code around its softmax attention."""
        return dataclasses.replace(self, wrappers=(*self.wrappers, wrapper))
