"""Attention over the edges of a graph: costs O(edges), not O(pairs of nodes).

Attention over neighbours: Velickovic et al. 2018, arXiv 1710.10903.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnlab.attention.call import AttentionCall, AttentionOptions, AttentionOutput
from attnlab.attention.dense import add_sink, scaled_scores
from attnlab.attention.dropout import dropout_seed, keep_at
from attnlab.attention.masks import Nodes
from attnlab.attention.score_mods import apply_score_mods
from attnlab.ops import save_for_backward


def edges(call: AttentionCall) -> AttentionOutput:
    """The backend for a mask that is a list of edges.

    Node t gets sum_e p_e v[senders[e]] over its edges e; p is the softmax of their scores. All
    batch rows are one graph of B T queries and B S keys.
    """
    assert call.mask.edges is not None  # refused otherwise
    options, (b, n, t, s), kv = call.options, call.scores_shape, call.value.shape[2]
    once = jax.vmap(functools.partial(_once, t, s))(*call.mask.edges)
    senders, receivers = (jnp.broadcast_to(e, (b, e.shape[-1])) for e in once)
    row = jnp.broadcast_to(jnp.arange(b)[:, None], receivers.shape)
    to_query = jnp.where(receivers < t, row * t + receivers, b * t).ravel()
    of_key = jnp.where(senders < s, row * s + senders, b * s).ravel()
    is_real = (to_query < b * t)[:, None]
    acc_dtype = jnp.promote_types(call.query.dtype, jnp.float32)
    # Widened first: the gradient of a gather sums over edges too.
    q, k, v = (
        _at(a.astype(acc_dtype).reshape(-1, *a.shape[2:]), index)
        for a, index in ((call.query, to_query), (call.key, of_key), (call.value, of_key))
    )
    # Padding has the indices of the last pair.
    ends = (row, jnp.minimum(receivers, t - 1), jnp.minimum(senders, s - 1))
    row, query, key = (a.reshape(-1, 1) for a in ends)
    scores = _scores(options, q, k, is_real, (row, jnp.arange(n)[None], query, key))
    top = jax.ops.segment_max(jax.lax.stop_gradient(scores), to_query, b * t)
    top = jnp.maximum(top, float(np.finfo(acc_dtype).min))  # where all edges are -inf
    weights = jnp.exp(scores - _at(top, to_query))
    total = jax.ops.segment_sum(weights, to_query, b * t)
    divisor = jnp.where(total > 0, total, 1)
    seed, rate = dropout_seed(options.dropout_rate, options.dropout_key), options.dropout_rate
    if seed is not None:
        index, key = jnp.broadcast_arrays((row * n + jnp.arange(n)[None]) * t + query, key)
        kept = keep_at(seed, rate, index.astype(jnp.uint32), key.astype(jnp.uint32))
        weights *= kept / (1 - rate)
    parts = weights.reshape(len(v), kv, n // kv, 1) * v[:, :, None]
    output = jax.ops.segment_sum(parts.reshape(len(v), n, v.shape[-1]), to_query, b * t)
    output = (output / divisor[..., None]).astype(call.value.dtype).reshape(b, t, n, -1)
    logsumexp = jnp.where(total > 0, top + jnp.log(divisor), -jnp.inf).reshape(b, t, n)
    if options.sink is not None:
        output, logsumexp = add_sink(output, logsumexp, options.sink)
    return AttentionOutput(save_for_backward(output), logsumexp if call.return_residual else None)


def _scores(
    options: AttentionOptions, q: Array, k: Array, is_real: Array, at: tuple[Array, ...]
) -> Array:
    """What the softmax reads of each edge [edges, N].

    Args:
      q, k: of each edge [edges, N, H] and [edges, K, H].
      is_real: [edges, 1], False = padding, where bias and modifications may be anything.
      at: the indices of each edge in [B, N, T, S]; they broadcast to [edges, N].
    """
    bias, cap = options.bias, options.logits_soft_cap
    if bias is not None:
        bias = bias[tuple(jnp.minimum(i, d - 1) for i, d in zip(at, bias.shape, strict=True))]
        bias = jnp.where(is_real, bias, 0)[..., None, None]
    scores = scaled_scores(q[:, :, None], k[:, :, None], bias, options.scale, cap)[:, :, 0, 0]
    if options.score_mods:  # a block of one key for each query
        _, head, query, key = at
        block, head = scores.T[None, :, :, None], head[0, :, None, None]
        block = apply_score_mods(options.score_mods, block, head=head, query=query, key=key)
        scores = jnp.where(is_real, block[0, :, :, 0].T, scores)
    return scores


def refuse_edges(call: AttentionCall) -> str | None:
    """Why the call needs more than a list of edges."""
    mask = call.mask
    if mask.edges is None or mask.mask is not None or mask.ranges() is not None:
        return "it needs a mask that is masks.Edges, and nothing else that hides"
    if call.options.talking_heads != (None, None):
        return "talking_heads needs the scores of all pairs"
    return None


def _once(num_nodes: int, num_keys: int, senders: Nodes, receivers: Nodes) -> tuple[Array, Array]:
    """The edges; where one is listed again, padding."""
    order = jnp.lexsort((senders, receivers))
    same_sender, same_receiver = (jnp.diff(a[order], prepend=-1) == 0 for a in (senders, receivers))
    again = jnp.zeros(len(order), bool).at[order].set(same_sender & same_receiver)
    return jnp.where(again, num_keys, senders), jnp.where(again, num_nodes, receivers)


def _at(a: Array, index: Array) -> Array:
    """Rows of `a`; 0 where the index is out of range, and no gradient flows back from there."""
    return a.at[index].get(mode="fill", fill_value=0)
