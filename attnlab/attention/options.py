"""The options of attention, what it returns, and the checked call that backends take."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict

from jax import Array
from jax.typing import ArrayLike

from attnlab.attention.mask_spec import MaskSpec
from attnlab.attention.masks import Edges
from attnlab.attention.score_mods import ScoreMod

Implementation: TypeAlias = Literal["dense", "blockwise", "xla", "cudnn", "edges"] | str
"""A key of `BACKENDS`."""

TalkingHeads: TypeAlias = tuple[ArrayLike | None, ArrayLike | None]
"""[N, M] applied to the scores and [M, N] applied to the probabilities; either may be None."""


class AttentionKeywords(TypedDict, total=False):
    """The options of `dot_product_attention` that are keywords alone.

    They are those of `jax.nn.dot_product_attention` and six more; inside, a call is the smaller
    records `MaskSpec`, `Settings` and `Call`.
    """

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    logits_soft_cap: float | None
    score_mods: Sequence[ScoreMod]
    dropout_rate: float
    dropout_key: Array | None
    talking_heads: TalkingHeads | None
    sink: ArrayLike | None
    implementation: Implementation | None


class AttentionOptions(AttentionKeywords, total=False):
    """The options of `dot_product_attention`, without `tap` and `return_residual`.

    For functions that pass options on: `def f(..., **options: Unpack[AttentionOptions])`.

    >>> from typing import Unpack
    >>> from attnlab import dot_product_attention
    >>> def causal_attention(q, k, v, **options: Unpack[AttentionOptions]):
    ...     return dot_product_attention(q, k, v, is_causal=True, **options)
    """

    bias: ArrayLike | None
    mask: ArrayLike | Edges | None


class AttentionOutput(NamedTuple):
    """Result of `attend`.

    >>> import jax.numpy as jnp
    >>> from attnlab.attention import attend
    >>> x = jnp.zeros((1, 3, 2, 4))
    >>> residual = attend(x, x, x, is_causal=True, return_residual=True).residual
    >>> jnp.exp(residual[0, :, 0]).round().tolist()  # scores are 0: the number of keys
    [1.0, 2.0, 3.0]
    """

    output: Array
    """[B, T, N, V] in the dtype of the values"""
    residual: Array | None = None
    """log sum exp of the scores [B, T, N], if requested"""


class Settings(NamedTuple):
    """The checked options of a call, apart from its mask.

    >>> import jax.numpy as jnp
    >>> from attnlab.attention.validate import validate
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> settings = validate(x, x, x, sink=jnp.zeros(()))[0].settings
    >>> settings.scale, settings.sink.ndim
    (0.5, 4)
    """

    scale: ArrayLike
    logits_soft_cap: float | None = None
    score_mods: tuple[ScoreMod, ...] = ()
    dropout_rate: float = 0.0
    dropout_key: Array | None = None
    talking_heads: tuple[Array | None, Array | None] = (None, None)
    sink: Array | None = None
    """broadcasts to [B, N, T, 1]"""
    return_residual: bool = False
    patch: Mapping[str, Callable[[Array], Array]] = {}
    """"scores", "probs" -> the function that replaces them"""


class Call(NamedTuple):
    """A checked call of attention: what every backend takes.

    >>> import jax.numpy as jnp
    >>> from attnlab.attention.validate import validate
    >>> q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 5, 2, 8))
    >>> call, _ = validate(q, kv, kv)
    >>> call.scores_shape, call.key.shape  # K = 2 key heads for N = 4 query heads
    ((1, 4, 3, 5), (1, 5, 2, 8))
    """

    query: Array
    """[B, T, N, H]"""
    key: Array
    """[B, S, K, H]"""
    value: Array
    """[B, S, Kv, V]"""
    bias: Array | None
    """broadcasts to [B, N, T, S]"""
    mask: MaskSpec
    settings: Settings

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """B, N, T, S."""
        b, t, n, _ = self.query.shape
        return b, n, t, self.key.shape[1]
