"""Attention over the edges of a graph: costs O(edges), not O(pairs of nodes)."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from attnlab.attention import masks
from attnlab.attention.dropout import dropout_seed, keep_at
from attnlab.attention.jax_nn import refuse_dense_only
from attnlab.attention.options import AttentionOutput, Call, Settings
from attnlab.attention.score_mods import apply_score_mods
from attnlab.attention.scores import add_sink, lowest
from attnlab.remat import save_for_backward
from attnlab.tap import Tap


def attention_over_edges(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S Kv V"],
    edges: masks.Edges,
    bias: Float[Array, "..."] | None = None,
    *,
    scale: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    tap: Tap | None = None,
) -> Float[Array, "*B T N V"]:
    """sum_e p_e v[senders[e]] over the edges e to node t, where p is the softmax of their scores.

    The score of edge e is scale q[receivers[e]] . k[senders[e]] + bias[e]. Equals
    `dot_product_attention` with `mask=edges` if each edge is listed once. An edge listed twice
    counts twice here (each with its own bias) and once in the mask.
    Attention over neighbours: Velickovic et al. 2018, arXiv 1710.10903.

    Args:
      query: [B, T, N, H] of the nodes that receive.
      key, value: [B, S, K, H] and [B, S, Kv, V] of the nodes that send (the same nodes in a plain
        graph). Any leading axes B, or none; all of them share the edges. K and Kv each divide N:
        query head n uses key head n // (N/K).
      edges: senders and receivers [edges], integers. An edge is directed; list both directions of
        an undirected one, and a self-loop where a node should attend to itself. Pad to a fixed
        length with senders = S and receivers = T (see `masks.edge_ends`).
      bias: [edges] or broadcastable to [B, edges, N]. -inf removes an edge (not with a soft cap).
      scale: None is 1/sqrt(H).
      logits_soft_cap: c tanh(scores / c), after scale and bias.
      tap: records "probs" [B, edges, N], 0 on padding; this does not change the output.

    Returns:
      [B, T, N, V] in the dtype of the values. Softmax and sums run in float32 at least. A node
      without edges gives zeros and zero gradient; nodes that send along no edge reach nothing.

    Raises:
      ValueError: shapes that do not fit, indices outside the nodes, or a tap that replaces values.
      TypeError: indices that are not integers.

    >>> x = jnp.arange(6.0).reshape(3, 1, 2)
    >>> edges = masks.Edges(senders=jnp.array([0, 1]), receivers=jnp.array([2, 2]))
    >>> attention_over_edges(0 * x, x, x, edges)[:, 0].tolist()
    [[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]
    """
    _check_shapes(query, key, value)
    if tap is not None and "probs" in tap.patch:
        raise ValueError("attention_over_edges records probs and cannot replace them")
    num_nodes, num_keys, n = query.shape[-3], key.shape[-3], query.shape[-2]
    senders, receivers = masks.edge_ends(*edges, num_nodes, num_keys)
    settings = Settings(query.shape[-1] ** -0.5 if scale is None else scale, logits_soft_cap)
    run = functools.partial(_one_graph, settings)
    if bias is not None:
        bias = bias[:, None] if bias.ndim == 1 else bias
        # on padding it may hold anything
        bias = jnp.where((receivers < num_nodes)[:, None], bias, 0)
        bias = jnp.broadcast_to(bias, (*query.shape[:-3], len(senders), n))
    for _ in range(query.ndim - 3):
        run = jax.vmap(run, (0, 0, 0, None, None, None if bias is None else 0))
    output, probs, _ = run(query, key, value, senders, receivers, bias)
    if tap is not None and "probs" in tap.capture:
        tap.captured["probs"] = probs
    return output


def edges(call: Call) -> AttentionOutput:
    """The backend for a mask that is a list of edges: O(edges)."""
    settings, bias, (b, n, t, _) = call.settings, call.bias, call.scores_shape
    rate, seed = settings.dropout_rate, dropout_seed(settings.dropout_rate, settings.dropout_key)
    assert call.mask.edges is not None  # refused otherwise
    ends = [jnp.broadcast_to(e, (b, e.shape[-1])) for e in call.mask.edges]
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
        if seed is not None:
            flat = (batch_row * n + head) * t + receivers[:, None]
            flat, keys = (
                jnp.broadcast_to(a, (len(senders), n)).astype(jnp.uint32)
                for a in (flat, senders[:, None])
            )
            keep = keep_at(seed, rate, flat, keys) / (1 - rate)
        output, _, residual = _one_graph(settings, q, k, v, senders, receivers, of_edges, keep)
        return output, residual

    output, residual = jax.vmap(one)(jnp.arange(b), call.query, call.key, call.value, *ends)
    if settings.sink is not None:
        output, residual = add_sink(output, residual, settings.sink)
    output = save_for_backward(output)
    return AttentionOutput(output, residual if settings.return_residual else None)


def refuse_edges(call: Call) -> str | None:
    """Why the call needs more than a list of edges."""
    if call.mask.only_edges is None:
        return "it needs a mask that is masks.Edges, and nothing else that hides"
    if call.settings.talking_heads != (None, None):
        return "talking_heads needs the scores of all pairs"
    return refuse_dense_only(call.settings)


def _one_graph(
    settings: Settings,
    q: Array,
    k: Array,
    v: Array,
    senders: Array,
    receivers: Array,
    bias: Array | None = None,
    keep: Array | None = None,
) -> tuple[Array, Array, Array]:
    """[T, N, V], the probabilities [edges, N] and log sum exp [T, N]; `keep` [edges, N] multiplies
    the probabilities at last."""
    num_nodes, n, num_keys, dtype = q.shape[0], q.shape[1], k.shape[0], v.dtype
    kv, num_edges, wide = v.shape[1], len(senders), jnp.promote_types(q.dtype, jnp.float32)
    # Widened first: the gradient of a gather sums over edges too.
    q, k, v = (_at(a.astype(wide), e) for a, e in ((q, receivers), (k, senders), (v, senders)))
    scores = _edge_scores(settings, q, k, bias)
    if settings.score_mods:
        real = (receivers < num_nodes)[:, None]  # padding must reach no gradient
        at = jnp.minimum(receivers, num_nodes - 1), jnp.minimum(senders, num_keys - 1)
        scores = jnp.where(real, _modified(settings, scores, *at), scores)
    top = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, num_nodes)
    top = jnp.maximum(top, lowest(wide))  # finite where all edges of a node are -inf
    weights = jnp.exp(scores - _at(top, receivers))
    total = jax.ops.segment_sum(weights, receivers, num_nodes)
    divisor = jnp.where(total > 0, total, 1)
    kept = weights if keep is None else weights * keep
    parts = kept.reshape(num_edges, kv, n // kv, 1) * v[:, :, None]
    out = jax.ops.segment_sum(parts.reshape(num_edges, n, v.shape[-1]), receivers, num_nodes)
    out = (out / divisor[..., None]).astype(dtype)
    # A side branch: recording it cannot change `out`.
    real = (receivers < num_nodes)[:, None]
    probs = jnp.where(real, weights, 0) / jnp.where(real, _at(divisor, receivers), 1)
    return out, probs, jnp.where(total > 0, top + jnp.log(divisor), -jnp.inf)


def _edge_scores(settings: Settings, q: Array, k: Array, bias: Array | None) -> Array:
    """[edges, N], before score modifications."""
    (num_edges, n, h), kk = q.shape, k.shape[1]
    scores = jnp.einsum("ekgh,ekh->ekg", q.reshape(num_edges, kk, n // kk, h), k)
    scores = scores.reshape(num_edges, n) * jnp.asarray(settings.scale, q.dtype)
    scores = scores if bias is None else scores + bias.astype(q.dtype)
    cap = settings.logits_soft_cap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _modified(settings: Settings, scores: Array, receivers: Array, senders: Array) -> Array:
    """The score modifications of each edge: a block of one key for each query."""
    head = jnp.arange(scores.shape[1])[:, None, None]
    block = apply_score_mods(
        settings.score_mods,
        scores.T[None, :, :, None],
        head=head,
        query=receivers[:, None],
        key=senders[:, None],
    )
    return block[0, :, :, 0].T


def _at(a: Array, index: Array) -> Array:
    """Rows of `a`; 0 where the index is out of range, and no gradient flows back from there."""
    return a.at[index].get(mode="fill", fill_value=0)


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    q, k, v = query.shape, key.shape, value.shape
    if len(q) < 3 or q[:-3] != k[:-3] or k[:-2] != v[:-2] or q[-1] != k[-1]:
        raise ValueError(f"query {q}, key {k} and value {v} do not fit together")
    if q[-2] % k[-2] or q[-2] % v[-2]:
        raise ValueError(
            f"{k[-2]} key heads and {v[-2]} value heads must divide {q[-2]} query heads"
        )
