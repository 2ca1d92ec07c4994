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

    Node t gets sum_e p_e v[senders[e]] over its edges e; p is the softmax of their scores.
    """
    options, bias, (b, n, t, s) = call.options, call.options.bias, call.scores_shape
    rate, seed = options.dropout_rate, dropout_seed(options.dropout_rate, options.dropout_key)
    assert call.mask.edges is not None  # refused otherwise
    once = jax.vmap(functools.partial(_once, t, s))(*call.mask.edges)
    ends = [jnp.broadcast_to(e, (b, e.shape[-1])) for e in once]
    head = jnp.arange(n)

    def index(ends: Array, size: int) -> Array:
        return jnp.minimum(ends, size - 1)[:, None]

    def one(
        batch_row: Array, q: Array, k: Array, v: Array, senders: Array, receivers: Array
    ) -> tuple[Array, Array]:
        of_edges = keep = None
        if bias is not None:
            of_edges = bias[
                index(batch_row[None], bias.shape[0]),
                jnp.minimum(head, bias.shape[1] - 1),
                index(receivers, bias.shape[2]),
                index(senders, bias.shape[3]),
            ]
            # Padding reads the last pair, which may hold anything if no edge joins it.
            of_edges = jnp.where((receivers < t)[:, None], of_edges, 0)
        if seed is not None:
            flat = (batch_row * n + head) * t + receivers[:, None]
            flat, keys = (
                jnp.broadcast_to(a, (len(senders), n)).astype(jnp.uint32)
                for a in (flat, senders[:, None])
            )
            keep = keep_at(seed, rate, flat, keys) / (1 - rate)
        return _one_graph(options, q, k, v, senders, receivers, of_edges, keep)

    output, logsumexp = jax.vmap(one)(jnp.arange(b), call.query, call.key, call.value, *ends)
    if options.sink is not None:
        output, logsumexp = add_sink(output, logsumexp, options.sink)
    output = save_for_backward(output)
    return AttentionOutput(output, logsumexp if call.return_residual else None)


def refuse_edges(call: AttentionCall) -> str | None:
    """Why the call needs more than a list of edges."""
    if call.mask.only_edges is None:
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


def _one_graph(
    options: AttentionOptions,
    q: Array,
    k: Array,
    v: Array,
    senders: Array,
    receivers: Array,
    bias: Array | None,
    keep: Array | None,
) -> tuple[Array, Array]:
    """[T, N, V] and log sum exp [T, N]; `keep` [edges, N] multiplies the probabilities at last."""
    num_nodes, n, num_keys, dtype = q.shape[0], q.shape[1], k.shape[0], v.dtype
    kv, num_edges, acc_dtype = v.shape[1], len(senders), jnp.promote_types(q.dtype, jnp.float32)
    # Widened first: the gradient of a gather sums over edges too.
    q, k, v = (_at(a.astype(acc_dtype), e) for a, e in ((q, receivers), (k, senders), (v, senders)))
    bias = None if bias is None else bias[..., None, None]  # each edge: one query and one key
    cap = options.logits_soft_cap
    scores = scaled_scores(q[:, :, None], k[:, :, None], bias, options.scale, cap)[:, :, 0, 0]
    if options.score_mods:
        real = (receivers < num_nodes)[:, None]  # padding must reach no gradient
        at = jnp.minimum(receivers, num_nodes - 1), jnp.minimum(senders, num_keys - 1)
        scores = jnp.where(real, _modified(options, scores, *at), scores)
    top = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, num_nodes)
    # Finite where all edges of a node are -inf.
    top = jnp.maximum(top, float(np.finfo(acc_dtype).min))
    weights = jnp.exp(scores - _at(top, receivers))
    total = jax.ops.segment_sum(weights, receivers, num_nodes)
    divisor = jnp.where(total > 0, total, 1)
    kept = weights if keep is None else weights * keep
    parts = kept.reshape(num_edges, kv, n // kv, 1) * v[:, :, None]
    out = jax.ops.segment_sum(parts.reshape(num_edges, n, v.shape[-1]), receivers, num_nodes)
    logsumexp = jnp.where(total > 0, top + jnp.log(divisor), -jnp.inf)
    return (out / divisor[..., None]).astype(dtype), logsumexp


def _modified(options: AttentionOptions, scores: Array, receivers: Array, senders: Array) -> Array:
    """The score modifications of each edge: a block of one key for each query."""
    head = jnp.arange(scores.shape[1])[:, None, None]
    block = apply_score_mods(
        options.score_mods,
        scores.T[None, :, :, None],
        head=head,
        query=receivers[:, None],
        key=senders[:, None],
    )
    return block[0, :, :, 0].T


def _at(a: Array, index: Array) -> Array:
    """Rows of `a`; 0 where the index is out of range, and no gradient flows back from there."""
    return a.at[index].get(mode="fill", fill_value=0)
