"""The public functions: `dot_product_attention`, `attend`, `explain`.

They resolve masks before any backend runs, so that all backends mean the same.
"""

from __future__ import annotations  # `help` shows ArrayLike, not all that it stands for

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from attnlab.attention import backends
from attnlab.attention.call import (
    DEFAULT_OPTIONS,
    AttentionCall,
    AttentionOptions,
    AttentionOutput,
    Implementation,
    TalkingHeads,
    check_call,
)
from attnlab.attention.dense import scores_and_probs
from attnlab.attention.masks import Booleans, Edges
from attnlab.attention.score_mods import ScoreMod
from attnlab.attention.segments import Segments
from attnlab.ops import save_for_backward
from attnlab.tap import Tap

TAPPED = ("scores", "probs")
"""The values that a tap can record or replace."""
EXPLAINED: ContextVar[list[dict[str, Any]] | None] = ContextVar("explained", default=None)
"""The explanations of the calls inside `explaining`; None outside."""


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Edges | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Any,
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Edges | None = None,
    *,
    return_residual: Literal[True],
    **options: Any,
) -> tuple[Array, Array]: ...
def dot_product_attention(  # type: ignore[misc]  # **options above: they are listed once
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Edges | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segments: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    logits_soft_cap: float | None = None,
    score_mods: Sequence[ScoreMod] = (),
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    talking_heads: TalkingHeads | None = None,
    sink: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: Implementation | None = None,
    tap: Tap | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(scale q k^T + bias) v, per head (Vaswani et al. 2017, section 3.2.1).

    Names and axes are those of `jax.nn.dot_product_attention`.

    Args:
      query: [B, T, N, H]; B may be left out.
      key: [B, S, K, H]. K divides N: query head n uses key head n // (N/K).
      value: [B, S, Kv, V]. V may differ from H, and Kv from K; Kv divides N.
      bias: added to the scores, broadcastable to [B, N, T, S]. -inf hides a key, without a soft
        cap; NaN in this key or its value still reaches the output, unlike under a mask. A finite
        number never hides: a row in which all allowed keys have the smallest one gives the mean of
        their values, in every backend.
      mask: boolean, True = may attend: [T, S], [N, T, S] or [B, N, T, S], each axis 1 or as long,
        or `masks.Edges`.
      scale: multiplies q k^T; None is 1/sqrt(H).
      is_causal: query t attends to keys 0..t (top-left aligned where T != S, as in jax.nn).
      query_seq_lengths, key_value_seq_lengths: valid positions per batch row [B]; each works alone.
        A length above the axis means the whole axis.
      local_window_size: (left, right): query t attends to keys t-left..t+right; w means (w, w).
      segments: packed texts: integers [B, T], or a pair (of queries [B, T], of keys [B, S]). A
        query attends only to keys of its own number, in addition to all other rules, which count
        positions of the row. 0 is padding: it attends to nothing, and nothing attends to it. NaN
        and infinities in q, k and v of one text reach no other.
      logits_soft_cap: c tanh(scores / c), after scale and bias, before the mask.
      score_mods: modifications of the scores, such as `ALiBi`; applied in order after
        `logits_soft_cap`, before talking heads and the mask. Gradients flow to their arrays.
      dropout_rate, dropout_key: dropout on the probabilities. One key drops the same ones in
        every backend.
      talking_heads: matrices [N, M] and [M, N] that mix heads before and after the softmax; either
        may be None (Shazeer et al. 2020, arXiv 2003.02436). The softmax, and with it the sink, log
        sum exp and "scores", then has M heads in place of N.
      sink: broadcastable to [B, N, T, 1]: one more score in each row, whose probability is
        not used, so that the others sum to less than 1. 0 adds one to the sum of the softmax.
      return_residual: also return log sum exp of the scores [B, T, N], a sink included; -inf for
        rows without a key and without a sink.
      implementation: a key of `BACKENDS`; None chooses (see `explain`). "blockwise" and "cudnn"
        have no second and forward-mode derivatives; "dense" always has.
      tap: records or replaces "scores" and "probs" [B, N, T, S]. The scores are those that the
        softmax reads, before the mask; the probs are taken before dropout. Recorded values are
        computed aside: they change neither the output nor the backend. Only "dense" can replace
        values. The mask still hides replaced scores; replaced probs multiply the values as they
        are, also at hidden keys, but for queries that attend to nothing and keys of no query.

    Returns:
      [B, T, N, V] in the dtype of the values, or (output, log sum exp) with `return_residual`. The
      softmax and the sums run in float32 at least. A query with nothing to attend to gives zeros
      and zero gradient. Keys and values that no query of their batch row may attend to reach
      neither outputs nor gradients, whatever they hold (NaN, inf).

    Raises:
      TypeError: an argument of the wrong kind, such as a mask that is not boolean, or an unknown
        keyword.
      ValueError: shapes that do not fit, a missing dropout key, or a backend that cannot run the
        call.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (1, 3, 2, 4)
    """
    options = AttentionOptions(
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segments=segments,
        logits_soft_cap=logits_soft_cap,
        score_mods=score_mods,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        talking_heads=talking_heads,
        sink=sink,
        implementation=implementation,
    )
    output, logsumexp = attend(query, key, value, options, tap=tap, return_residual=return_residual)
    return output if logsumexp is None else (output, logsumexp)


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    tap: Tap | None = None,
    return_residual: bool = False,
) -> AttentionOutput:
    """`dot_product_attention` for other modules, with its options as one record.

    Args:
      query, key, value, tap, return_residual: as in `dot_product_attention`.
      options: the others.

    Returns:
      (output, log sum exp of the scores, or None).

    Raises:
      What `dot_product_attention` raises.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> output, logsumexp = attend(x, x, x, AttentionOptions(is_causal=True))
    >>> output.shape, logsumexp
    ((1, 3, 2, 4), None)
    """
    batched = np.ndim(query) == 4
    patch = _patches(tap, batched) if tap is not None and tap.patch else None
    call = check_call(query, key, value, options, return_residual, patch)
    choice = backends.choose(call, options.implementation)
    name = choice.backend
    if (explained := EXPLAINED.get()) is not None:
        explained.append(backends.explain_choice(call, choice))
        name = "dense"  # the device of the explanation may not be this one
    elif options.implementation is not None and (reason := backends.refusal(name, call)):
        shapes = f"query {call.query.shape}, key {call.key.shape}, value {call.value.shape}"
        raise ValueError(
            f"implementation={name!r} cannot run {shapes}: {reason}; use implementation='dense' or "
            "None"
        )
    call, attending, spoiled = _without_unused(call)
    output, logsumexp = backends.BACKENDS[name].run(call)
    if spoiled is not None:
        output = jnp.where(spoiled, jnp.nan, output)
        logsumexp = None if logsumexp is None else jnp.where(spoiled[..., 0], jnp.nan, logsumexp)
    if attending is not None:
        # Kernels of other libraries give a uniform mean in an empty row; ours gives zeros.
        output = jnp.where(attending, output, 0)
    if tap is not None and tap.capture:
        _record(tap, call, batched)
    if batched:
        return AttentionOutput(output, logsumexp)
    return AttentionOutput(output[0], None if logsumexp is None else logsumexp[0])


def explain(
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    *,
    tap: Tap | None = None,
    return_residual: bool = False,
    **options: Any,
) -> dict[str, str]:
    """Which backend would run this call, and why the others would or could not.

    Args:
      query, key, value, tap, return_residual, options: as in `dot_product_attention`; arrays may be
        `jax.ShapeDtypeStruct`s.

    Returns:
      Backend -> "chosen: " and why, "could run", or the reason why it could not. A choice is
      "requested", "measured on ..." or "not measured" on devices like this one (`CHOICES`).
      Behind it stands what a bias, a soft cap and score modifications cost, and which backends
      could run without each.

    Raises:
      What that call would raise, except for a requested backend that cannot run.

    >>> q, v = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4))
    >>> explain(q, q, v)["xla"]
    'it needs as many key heads (2) as value heads (1)'
    """
    # Recorded values do not matter: no backend may depend on what is recorded.
    patches = None if tap is None else Tap(patch=tap.patch, layer=tap.layer)
    call = functools.partial(dot_product_attention, tap=patches, return_residual=return_residual)
    with explaining() as explained:
        trace(call, query=query, key=key, value=value, **options)
    return explained[0]


@contextlib.contextmanager
def explaining() -> Iterator[list[dict[str, Any]]]:
    """Inside, every call of attention adds what `explain` returns of it to the list, every call of
    heads what `explain_heads` returns.

    To explain a function that calls attention, trace it (`trace`, `jax.eval_shape`) inside. A
    backend that cannot run is then part of the explanation, not an error.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> with explaining() as explained:
    ...     trace(attend, query=x, key=x, value=x)
    >>> len(explained), explained[0]["edges"]
    (1, 'it needs a mask that is masks.Edges, and nothing else that hides')
    """
    explained: list[dict[str, Any]] = []
    before = EXPLAINED.set(explained)
    try:
        yield explained
    finally:
        EXPLAINED.reset(before)


def trace(function: Callable[..., object], **arguments: object) -> None:
    """Traces function(**arguments); arrays of JAX may be shapes alone, the rest is passed as it is,
    NumPy too, whose values a call may know when JAX traces."""
    kinds = (jax.Array, jax.ShapeDtypeStruct)
    leaves, tree = jax.tree.flatten(arguments)
    arrays = {i: a for i, a in enumerate(leaves) if isinstance(a, kinds)}

    def run(arrays: dict[int, Array]) -> None:
        function(**jax.tree.unflatten(tree, [arrays.get(i, a) for i, a in enumerate(leaves)]))

    jax.eval_shape(run, arrays)


def _without_unused(call: AttentionCall) -> tuple[AttentionCall, Booleans | None, Array | None]:
    """The call with zeros at unused keys and values; which outputs attend to a key (None: all), and
    which are NaN in spite of zeros (None: none).

    Zero times NaN is NaN, in the gradient too, so hidden numbers must not be multiplied at all.
    """
    attending, used = call.mask.used()
    query, keys = call.query, [call.key]
    if call.value is not call.key:  # one array stays one: a backend may read it once
        keys.append(call.value)
    if used is not None:
        used = used[:, :, None, None]
        keys = [jnp.where(used, a, 0) for a in keys]
    if attending is not None:
        if call.options.talking_heads != (None, None):
            attending = jnp.any(attending, axis=1, keepdims=True)  # each head reads the others
        attending = attending.swapaxes(1, 2)[..., None]
        query = jnp.where(attending, query, 0)
    spoiled = None
    if call.mask.segments is not None:
        query, keys, spoiled = _isolated(call.mask.segments, query, keys)
        assert attending is not None  # as there are segments
        spoiled = spoiled & attending
    query, keys = save_for_backward((query, keys))
    return call._replace(query=query, key=keys[0], value=keys[-1]), attending, spoiled


def _isolated(
    segments: Segments, query: Array, keys: list[Array]
) -> tuple[Array, list[Array], Array]:
    """Zeros where packed texts hold NaN or infinities, which must reach no other text; and the
    queries [B, T, 1, 1] that are spoiled: they hold some, or attend to a key or value that does."""
    bad, *others = (~jnp.all(jnp.isfinite(a), axis=(2, 3)) for a in (query, *keys))
    bad_key = functools.reduce(jnp.logical_or, others)
    spoiled = bad | segments.any_of_keys(bad_key)
    keys = [jnp.where(bad_key[..., None, None], 0, a) for a in keys]
    return jnp.where(bad[..., None, None], 0, query), keys, spoiled[..., None, None]


def _patches(tap: Tap, batched: bool) -> dict[str, Callable[[Array], Array]]:
    """The functions of a tap that replace values with a batch axis."""

    def replace(name: str, value: Array) -> Array:
        return tap.replace(name, value) if batched else tap.replace(name, value[0])[None]

    return {name: functools.partial(replace, name) for name in TAPPED if name in tap.patch}


def _record(tap: Tap, call: AttentionCall, batched: bool) -> None:
    if names := [name for name in TAPPED if name in tap.capture]:
        values = scores_and_probs(call)
        tap.captured |= {name: values[name] if batched else values[name][0] for name in names}
