"""The options of attention, what it returns, and the checked call that backends take."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jax import Array
from jax.typing import ArrayLike

from attnlab.attention.masks import MaskSpec
from attnlab.attention.score_mods import ScoreMod
from attnlab.names import check_keywords

Implementation: TypeAlias = Literal["dense", "blockwise", "xla", "cudnn", "edges"] | str
"""A key of `BACKENDS`."""

TalkingHeads: TypeAlias = tuple[ArrayLike | None, ArrayLike | None]
"""[N, M] applied to the scores and [M, N] applied to the probabilities; either may be None."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The options of `dot_product_attention`, which says what each means.

    Arrays may be anything that `jnp.asarray` takes; `attend` checks them.

    >>> options = AttentionOptions(is_causal=True).replace(scale=0.5)
    >>> options.is_causal, options.scale, options.bias
    (True, 0.5, None)
    """

    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: bool = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: int | tuple[int, int] | None = None
    segments: Any = None
    logits_soft_cap: float | None = None
    score_mods: Sequence[ScoreMod] = ()
    dropout_rate: float = 0.0
    dropout_key: Array | None = None
    talking_heads: Any = None
    sink: Any = None
    implementation: Implementation | None = None

    def replace(self, **changes: Any) -> "AttentionOptions":
        """The options with other values of some fields."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_keywords(
        cls, function: str, keywords: Mapping[str, Any], *others: str
    ) -> "AttentionOptions":
        """The record of the `**keywords` of a function.

        Raises:
          TypeError: a keyword that is none; the message has the name of the function, and with
            those of the options the names of its `others`.

        >>> AttentionOptions.from_keywords("decode", {"scal": 2}, "cache")
        Traceback (most recent call last):
        TypeError: decode() got an unknown keyword 'scal': did you mean 'scale'? known: cache, \
bias, mask, scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size, \
segments, logits_soft_cap, score_mods, dropout_rate, dropout_key, talking_heads, sink, \
implementation
        """
        if not keywords.keys() <= OPTION_NAMES.keys():
            check_keywords(function, keywords, (*others, *OPTION_NAMES))
        return cls(**keywords)


OPTION_NAMES = dict.fromkeys(field.name for field in dataclasses.fields(AttentionOptions))
DEFAULT_OPTIONS = AttentionOptions()


class AttentionOutput(NamedTuple):
    """Result of `attend`.

    >>> import jax.numpy as jnp
    >>> from attnlab.attention import attend
    >>> x = jnp.zeros((1, 3, 2, 4))
    >>> _, logsumexp = attend(x, x, x, AttentionOptions(is_causal=True), return_residual=True)
    >>> jnp.exp(logsumexp[0, :, 0]).round().tolist()  # scores are 0: the number of keys
    [1.0, 2.0, 3.0]
    """

    output: Array
    """[B, T, N, V] in the dtype of the values"""
    logsumexp: Array | None = None
    """log sum exp of the scores [B, T, N], if requested"""


class AttentionCall(NamedTuple):
    """A checked call of attention with a batch axis: what every backend takes.

    >>> import jax.numpy as jnp
    >>> from attnlab.attention.checks import check_call
    >>> q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 5, 2, 8))
    >>> call = check_call(q, kv, kv, AttentionOptions(sink=0.0))
    >>> call.scores_shape, call.key.shape  # K = 2 key heads for N = 4 query heads
    ((1, 4, 3, 5), (1, 5, 2, 8))
    >>> call.options.sink.shape
    (1, 1, 1, 1)
    """

    query: Array
    """[B, T, N, H]"""
    key: Array
    """[B, S, K, H]"""
    value: Array
    """[B, S, Kv, V]"""
    scores_shape: tuple[int, int, int, int]
    """B, N, T, S"""
    mask: MaskSpec
    """all that hides keys; the mask, causal rule, window, lengths and segments of `options` are
    not read"""
    options: AttentionOptions
    """bias and sink with four axes, a number as scale, score_mods with arrays, a pair of
    talking_heads"""
    return_residual: bool = False
    patch: Mapping[str, Callable[[Array], Array]] = {}
    """"scores", "probs" -> the function that replaces them"""
