"""Inputs of a call of heads: `HeadInputs`, its checks, and the names of intermediate values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attnlab.attention.checks import check_padding_shape
from attnlab.heads.cache import Cache
from attnlab.heads.layout import Entries, Layout
from attnlab.heads.params import check_params
from attnlab.heads.weights import Params

HEAD_VALUES = {
    "q": "B T N H",
    "k": "B S K H",
    "v": "B S Kv V",
    "scores": "B N T S",
    "probs": "B N T S",
    "heads": "B T N V",
    "outputs": "B N T O",
}
"""Value -> axes. q and k are those of the scores (normalized, rotated), with a cache all that it
holds. "scores" are before the mask, "probs" before dropout, "heads" after the gate; "outputs" is
what each head adds to the output, without the bias."""

OF_FORM = ("q", "k", "v", "scores", "heads")
"""Values that differ between forms of a layout; their names mean the layout as it is."""

Rotary = Array | tuple[Array, Array]
"""Angles of `positions.rotary_angles` for queries and keys, or a pair (for queries, for keys)."""
Context = Array | tuple[Array, Array]
"""Key/value input, or a pair (key input, value input)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """Inputs of a call of heads, apart from params, x and the options of attention.

    A pytree: it may be an argument of a function under `jit`.

    Attributes:
      context: key/value input [B, S, E], or a pair (key input, value input); None is x.
      rotary: angles for queries and keys, or a pair.
      cache: of `init_cache`; x are the next tokens.
      padding_mask: [B, T], True = a token. Padding is attended to by none, is not kept in a cache
        and has no position there, so batch rows have lengths of their own.
      token_mask: [B, T], True = a token that counts in auxiliary losses; None: those of
        `padding_mask`.
      shared_kv: cache entries of an earlier layer to attend to in place of those of x (cross-layer
        attention; Brandon et al. 2024, arXiv 2405.12981).
      head_mask: multiplies each head, [N] or [B, N]; 0 removes a head.
      query_scale: multiplies q.
      layer: index of the layer, counted from 0; may be traced.
      order: form of the layout to compute with, see `multi_head_attention`.

    >>> from attnlab.heads import Standard, attend_heads, weight_shapes
    >>> layout = Standard(width=6, num_heads=2)
    >>> params = {name: jnp.ones(shape) for name, shape in weight_shapes(layout).items()}
    >>> inputs = HeadInputs(context=jnp.ones((1, 7, 6)), head_mask=jnp.array([1.0, 0.0]))
    >>> call = lambda params, x, inputs: attend_heads(params, x, layout, inputs)
    >>> outputs = jax.eval_shape(call, params, jnp.ones((1, 5, 6)), inputs)
    >>> outputs.output.shape, outputs.entries["k"].shape
    ((1, 5, 6), (1, 7, 2, 3))
    """

    context: Context | None = None
    rotary: Rotary | None = None
    cache: Cache | None = None
    padding_mask: Bool[Array, "B T"] | None = None
    token_mask: Bool[Array, "B T"] | None = None
    shared_kv: Entries | None = None
    head_mask: Float[Array, "*B N"] | None = None
    query_scale: ArrayLike | None = None
    layer: ArrayLike = 0
    order: str | None = dataclasses.field(default=None, metadata={"static": True})


NO_INPUTS = HeadInputs()


def head_values(layout: Layout) -> dict[str, str]:
    """Names of the values that heads of this layout have -> their axes.

    >>> from attnlab.heads import Differential
    >>> head_values(Differential(width=8, num_heads=2))["v"]
    'B S Kv V'
    """
    values = HEAD_VALUES | dict(layout.values)
    for extra in layout.extras:
        values |= extra.values(layout)
    return values


def check_inputs(params: Params, x: Array, layout: Layout, inputs: HeadInputs) -> None:
    """Raises TypeError or ValueError naming the array, its shape and what is needed."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout is of type {type(layout).__name__}; the order is (params, x, layout), with a "
            "layout such as attnlab.heads.Standard(width=64, num_heads=4)"
        )
    check_params(params, layout)
    if isinstance(inputs.context, tuple) and len(inputs.context) != 2:
        raise ValueError(
            f"context is an array, or a pair (key input, value input), not {len(inputs.context)} "
            "arrays"
        )
    y, z = inputs.context if isinstance(inputs.context, tuple) else (inputs.context,) * 2
    keys = x if y is None else y
    values = keys if z is None else z
    names = ("x", "context", "value context")
    for name, a, width in zip(names, (x, keys, values), layout.input_widths, strict=True):
        _check_input(name, a, width, x)
        if 0 in a.shape:
            raise ValueError(f"{name} {a.shape}: no axis may have size 0")
    _check_masks(inputs, layout, x)
    if values.shape[1] != keys.shape[1]:
        raise ValueError(f"value context {values.shape} must be as long as context {keys.shape}")
    if inputs.context is not None:
        _check_without_context(inputs)
    _check_rotary(inputs, layout, (x.shape[1], keys.shape[1]))


def _check_masks(inputs: HeadInputs, layout: Layout, x: Array) -> None:
    for name in ("padding_mask", "token_mask"):
        mask = getattr(inputs, name)
        if mask is None:
            continue
        check_padding_shape(name, mask, x.shape[:2])
        if getattr(mask, "dtype", None) != np.bool_:
            raise TypeError(f"{name} must be a boolean array, True where there is a token")
    heads = (layout.num_heads,)
    if inputs.head_mask is None or np.shape(inputs.head_mask) in (heads, (1, *heads)):
        return
    if np.shape(inputs.head_mask) != (x.shape[0], *heads):
        raise ValueError(
            f"head_mask {np.shape(inputs.head_mask)} must be [heads] = {heads} or [batch, heads] = "
            f"{(x.shape[0], *heads)}"
        )


def _check_without_context(inputs: HeadInputs) -> None:
    if inputs.shared_kv is not None:
        raise ValueError("shared_kv replaces the keys and values of x; leave context out")
    if inputs.cache is not None:
        raise ValueError("a cache is for self-attention; leave context out")
    if inputs.padding_mask is not None:
        raise ValueError("padding_mask is of x; mask the padding of the context by mask")


def _check_rotary(inputs: HeadInputs, layout: Layout, lengths: tuple[int, int]) -> None:
    if inputs.rotary is None:
        return
    size = layout.rotary_size
    if size is None:
        raise ValueError(
            f"rotary positions cannot be applied to the keys of layout {layout.name!r}, which are "
            "its inputs; use layout 'bilinear' or positions that are added to x"
        )
    pair = inputs.rotary if isinstance(inputs.rotary, tuple) else (inputs.rotary,) * 2
    for angles, length in zip(pair, lengths, strict=True):
        if np.ndim(angles) < 2 or angles.shape[-2] not in (1, length):
            raise ValueError(
                f"rotary {np.shape(angles)} must be angles [length, n] of the {length} tokens, as "
                "positions.rotary_angles makes them, or a pair (for queries, for keys)"
            )
        if 2 * angles.shape[-1] > size:
            raise ValueError(
                f"rotary {angles.shape} has {angles.shape[-1]} angles, which rotate "
                f"{2 * angles.shape[-1]} numbers; {layout.rotary_axis} of {layout} is {size}; use "
                f"rotary_angles(positions, {size - size % 2})"
            )


def _check_input(name: str, a: Array, width: int, x: Array) -> None:
    if not hasattr(a, "shape") or not jnp.issubdtype(a.dtype, jnp.floating):
        kind = f"{a.dtype} {a.shape}" if hasattr(a, "shape") else type(a).__name__
        raise TypeError(f"{name} must be a float array [batch, length, {width}], not {kind}")
    if len(a.shape) != 3:
        raise ValueError(f"{name} {a.shape} must be [batch, length, {width}]")
    if a.shape[2] != width:
        raise ValueError(f"{name} {a.shape} must end in width {width}, that of the layout")
    if a.shape[0] != x.shape[0]:
        raise ValueError(f"{name} {a.shape} and x {x.shape} must have one batch size")
