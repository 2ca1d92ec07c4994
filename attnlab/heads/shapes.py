"""Shapes that follow from the methods of a layout, by tracing them."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.weights import Params

if TYPE_CHECKING:
    from attnlab.heads.layout import Entries, Layout


class TokenShapes(NamedTuple):
    """Shapes of what a layout makes of one token.

    >>> from attnlab.heads import Bilinear
    >>> token_shapes(Bilinear(width=6, num_heads=2))
    TokenShapes(q=(2, 6), entries={'v': (2, 3), 'x': (6,)}, k=(1, 6), v=(2, 3))
    """

    q: tuple[int, ...]
    """(N, H)"""
    entries: dict[str, tuple[int, ...]]
    """Cache entries by name"""
    k: tuple[int, ...]
    """(K, H)"""
    v: tuple[int, ...]
    """(Kv, V)"""


@functools.cache
def token_shapes(layout: "Layout", rotary: bool = False) -> TokenShapes:
    """Shapes of q, cache entries, k and v of one token.

    Args:
      layout: the heads.
      rotary: keys are rotated, so that they differ from values they are tied to.

    >>> from attnlab.heads import Standard
    >>> token_shapes(Standard(width=8, num_heads=2, num_kv_heads=1)).k
    (1, 4)
    """

    def rotate(a: Array) -> Array:
        return a + 0 if rotary else a

    def trace(
        params: Params, x: Array, y: Array, z: Array
    ) -> tuple[Array, "Entries", Array, Array]:
        x, y = layout.prepare(params, x), layout.prepare(params, y)
        z = y if len(set(layout.input_widths)) == 1 else layout.prepare(params, z)
        entries = layout.project_kv(params, y, z, rotate)
        k, v = layout.keys_values(params, entries)
        return layout.project_q(params, x, rotate), entries, k, v

    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {name: array(layout.shape(weight)) for name, weight in layout.weights().items()}
    inputs = (array((1, 1, width)) for width in layout.input_widths)
    q, entries, k, v = jax.eval_shape(trace, params, *inputs)
    return TokenShapes(
        q.shape[2:], {n: a.shape[2:] for n, a in entries.items()}, k.shape[2:], v.shape[2:]
    )


def score_scale(layout: "Layout") -> float:
    """What multiplies q k^T: `layout.scale`, or 1/sqrt(width of q).

    >>> from attnlab.heads import Standard
    >>> score_scale(Standard(width=8, num_heads=2))
    0.5
    """
    return float(token_shapes(layout).q[-1] ** -0.5) if layout.scale is None else layout.scale
