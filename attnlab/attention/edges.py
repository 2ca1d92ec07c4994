"""Attention over the edges of a graph: the cost of a list of edges, not of all pairs of nodes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.attention import masks
from attnlab.attention.dense import Options, beside_sink, dropout_seed, kept_at, refuse_edit
from attnlab.attention.visible import Visible
from attnlab.remat import save_for_backward


def attention_over_edges(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S Kv V"],
    senders: masks.Nodes,
    receivers: masks.Nodes,
    bias: Float[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    return_probs: bool = False,
) -> Any:
    """sum_e p_e v[senders[e]] over the edges e that reach node t, p = softmax of their scores.

    The score of edge e is scale q[receivers[e]] . k[senders[e]] + bias[e]. It equals
    `dot_product_attention` with `masks.from_edges(senders, receivers, T, S)` at a cost of
    O(edges), where each edge is listed once. An edge listed twice counts twice here (two edges
    between two nodes, each with a bias of its own) and once in the mask. Attention over
    neighbours: Velickovic et al. 2018, arXiv 1710.10903.

    Args:
      query: [B, T, N, H] over the nodes that receive. key, value: [B, S, K, H], [B, S, Kv, V] over
        the nodes that send (the same nodes in a plain graph). Any leading axes B, or none; all of
        them share the edges. K and Kv each divide N: query head n uses key head n // (N/K).
      senders, receivers: [edges], integers. An edge is directed; list both directions of an
        undirected one, and a self-loop where a node should see itself. Pad to a fixed length
        with senders = S and receivers = T (see `masks.edge_ends`).
      bias: [edges] or broadcastable to [B, edges, N]. -inf takes an edge out (not under a
        soft cap).
      scale: None is 1/sqrt(H). logits_soft_cap: c tanh(scores / c), after scale and bias.
      return_probs: also return p [B, edges, N], 0 on padding.

    Returns: [B, T, N, V] in the value's dtype. Softmax and sums run in float32 at least. A node
      that no edge reaches gives zeros and zero gradient; nodes that no edge names reach nothing.

    Raises: ValueError for shapes that do not fit or indices outside the nodes; TypeError for
      indices that are not integers.

    >>> x = jnp.arange(6.0).reshape(3, 1, 2)
    >>> attention_over_edges(0 * x, x, x, jnp.array([0, 1]), jnp.array([2, 2]))[:, 0].tolist()
    [[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]
    """
    _check(query, key, value)
    num_nodes, num_keys, n = query.shape[-3], key.shape[-3], query.shape[-2]
    senders, receivers = masks.edge_ends(senders, receivers, num_nodes, num_keys)
    run = functools.partial(
        _one_graph,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        soft_cap=logits_soft_cap,
    )
    if bias is not None:
        bias = bias[:, None] if bias.ndim == 1 else bias
        bias = jnp.where(
            (receivers < num_nodes)[:, None], bias, 0
        )  # on padding it may hold anything
        bias = jnp.broadcast_to(bias, (*query.shape[:-3], len(senders), n))
    for _ in range(query.ndim - 3):
        run = jax.vmap(run, (0, 0, 0, None, None, None if bias is None else 0))
    out, probs, _ = run(query, key, value, senders, receivers, bias)
    return (out, probs) if return_probs else out


def edges(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """The row `edges` of `BACKENDS`: O(edges), for a mask that is a list of edges."""
    (b, t, n, _), seed, rate = query.shape, dropout_seed(options), options.dropout_rate
    ends = [jnp.broadcast_to(e, (b, e.shape[-1])) for e in visible.edges or ()]
    head = jnp.arange(n)

    def one(row, q, k, v, senders, receivers):
        at = lambda index, size: jnp.minimum(index, size - 1)[:, None]
        of_edges = keep = None
        if bias is not None:
            of_edges = bias[
                at(row[None], bias.shape[0]),
                jnp.minimum(head, bias.shape[1] - 1),
                at(receivers, bias.shape[2]),
                at(senders, bias.shape[3]),
            ]
        if rate:
            flat = (row * n + head) * t + receivers[:, None]
            flat, keys = (
                jnp.broadcast_to(a, (len(senders), n)).astype(jnp.uint32)
                for a in (flat, senders[:, None])
            )
            keep = kept_at(seed, rate, flat, keys) / (1 - rate)
        return _one_graph(
            q, k, v, senders, receivers, of_edges, keep, options.scale, options.logits_soft_cap
        )[::2]

    out, residual = jax.vmap(one)(jnp.arange(b), query, key, value, *ends)
    if options.sink is not None:
        out, residual = beside_sink(out, residual, options.sink)
    out = save_for_backward(out)
    return {"out": out} | ({"residual": residual} if options.return_residual else {})


def refuse_edges(query, key, value, bias, visible: Visible, options: Options) -> str | None:
    if visible.only_edges is None:
        return "it needs a mask that is masks.Edges, and nothing else that hides"
    if options.mix != (None, None):
        return "mix needs the scores of all pairs"
    return refuse_edit(options)


def _one_graph(
    q, k, v, senders, receivers, bias=None, keep=None, scale=1.0, soft_cap=None
) -> tuple[Array, Array, Array]:
    """[T, N, V], the probabilities [edges, N] and log sum exp [T, N]; `keep` [edges, N] multiplies
    the probabilities at last."""
    (num_nodes, n, h), kk, kv, edges = q.shape, k.shape[1], v.shape[1], len(senders)
    wide, dtype = jnp.promote_types(q.dtype, jnp.float32), v.dtype
    real = (receivers < num_nodes)[:, None]
    # Widened first: the gradient of a gather sums over edges too.
    q, k, v = (_at(a.astype(wide), e) for a, e in ((q, receivers), (k, senders), (v, senders)))
    scores = jnp.einsum("ekgh,ekh->ekg", q.reshape(edges, kk, n // kk, h), k)
    scores = scores.reshape(edges, n) * jnp.asarray(scale, wide)
    scores = scores if bias is None else scores + bias.astype(wide)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    top = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, num_nodes)
    top = jnp.maximum(top, jnp.finfo(wide).min)  # finite where all edges of a node are -inf
    weights = jnp.exp(scores - _at(top, receivers))
    total = jax.ops.segment_sum(weights, receivers, num_nodes)
    some = jnp.where(total > 0, total, 1)
    taken = weights if keep is None else weights * keep
    parts = taken.reshape(edges, kv, n // kv, 1) * v[:, :, None]
    out = jax.ops.segment_sum(parts.reshape(edges, n, -1), receivers, num_nodes)
    out = (out / some[..., None]).astype(dtype)
    # A side branch: looking cannot touch `out`.
    probs = jnp.where(real, weights, 0) / jnp.where(real, _at(some, receivers), 1)
    return out, probs, jnp.where(total > 0, top + jnp.log(some), -jnp.inf)


def _at(a: Array, index: Array) -> Array:
    """Rows of `a`; 0 where the index is out of range, and no gradient flows back from there."""
    return a.at[index].get(mode="fill", fill_value=0)


def _check(query: Array, key: Array, value: Array) -> None:
    q, k, v = query.shape, key.shape, value.shape
    if len(q) < 3 or q[:-3] != k[:-3] or k[:-2] != v[:-2] or q[-1] != k[-1]:
        raise ValueError(f"query {q}, key {k} and value {v} do not fit together")
    if q[-2] % k[-2] or q[-2] % v[-2]:
        raise ValueError(
            f"{k[-2]} key heads and {v[-2]} value heads must divide {q[-2]} query heads"
        )
