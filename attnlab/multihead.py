"""Heads and attention in one pure call."""

from typing import Any

from jaxtyping import Array, Bool, Float, Num

from attnlab.attention import Mix, dot_product_attention
from attnlab.heads import HeadSpec, Weights, merge_heads, project_heads
from attnlab.positions import rotate


def multi_head_attention(
    w: Weights,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    *,
    spec: HeadSpec,
    value_context: Float[Array, "B S W"] | None = None,
    mask: Num[Array, "..."] | Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    is_causal: bool = False,
    rotary: Float[Array, "*B T half"] | tuple[Array, Array] | None = None,
    head_gate: Float[Array, "*B N"] | None = None,
    mix: Mix | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    return_probs: bool = False,
    implementation: str | None = None,
) -> Any:
    """sum_i gate_i softmax(scale q_i k_i^T) v_i W_O[i] with q, k, v from the layout of `spec`.

    Args:
      w: the weights of `init_heads(key, spec)`.
      x: what asks; context: what is attended to (default x); value_context: default context.
      rotary: angles of `positions.rotary_angles` for q and k, or a pair (for q, for k).
      head_gate: multiplies each head's output, [N] or [B, N]; 0 removes a head.
      Everything else as in `dot_product_attention`.

    Returns: [B, T, O], and with `return_probs` also the probabilities [B, N, T, S].

    >>> import jax, jax.numpy as jnp
    >>> from attnlab import init_heads
    >>> spec = HeadSpec("wide", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> multi_head_attention(w, jnp.ones((1, 5, 6)), spec=spec, is_causal=True).shape
    (1, 5, 6)
    """
    q, k, v = project_heads(w, x, context, value_context, spec=spec)
    if rotary is not None:
        q_angles, k_angles = rotary if isinstance(rotary, tuple) else (rotary, rotary)
        q, k = rotate(q, q_angles), rotate(k, k_angles)
    result = dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=spec.scale,
        is_causal=is_causal,
        mix=mix,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_probs=return_probs,
        implementation=implementation,
    )
    heads, *probs = result if return_probs else (result,)
    if head_gate is not None:
        heads = heads * head_gate[..., None, :, None].astype(heads.dtype)
    out = merge_heads(w, heads, spec=spec)
    return (out, *probs) if probs else out
