"""Parameters, FLOPs and cache bytes of one set of heads, by formula from its weights.

FLOPs are those of matrix products in the forward pass, 2 for a multiply-add: every weight that is
applied, the scores, and the product with the values over all keys (a causal mask saves none here).
They equal the multiply-adds of the traced program, which the tests count.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.layout import Entries, Layout
from attnlab.heads.weights import Params


def num_parameters(layout: Layout) -> int:
    """Parameters of one set of heads, biases included.

    >>> from attnlab.heads import Standard
    >>> num_parameters(Standard(width=512, num_heads=8)) == 4 * 512**2
    True
    """
    _check_layout("num_parameters", layout)
    return sum(map(math.prod, layout.shapes.values()))


def flops_per_token(layout: Layout, num_keys: int) -> int:
    """Forward FLOPs per token of self-attention over `num_keys` tokens.

    Args:
      layout: the heads.
      num_keys: T, tokens of the text; each attends to all T keys.

    >>> from attnlab.heads import Wide
    >>> flops_per_token(Wide(width=512, num_heads=8), 512)
    25165824
    """
    _check_layout("flops_per_token", layout)
    return call_flops(layout, 1, num_keys, num_keys) // num_keys


def call_flops(
    layout: Layout,
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    cross: bool = False,
    num_new: int | None = None,
) -> int:
    """Forward FLOPs of one call.

    A projection that makes queries and keys counts once for tokens that are both: the compiler
    makes one product of the two.

    Args:
      layout: the heads.
      batch, num_queries, num_keys: B, T, S.
      cross: keys are of another text than queries.
      num_new: so many of the keys are projected in this call (default: all); a cache holds the
        rest.

    >>> from attnlab.heads import Standard
    >>> layout = Standard(width=512, num_heads=8)
    >>> call_flops(layout, 1, 1, 100, num_new=1) == 2 * (4 * 512**2 + 8 * 100 * (64 + 64))
    True
    """
    cost = layout.multiply_adds
    return cost.flops(batch, num_queries, num_keys, cross=cross, num_new=num_new)


def cache_shapes(layout: Layout, *, rotary: bool = False) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a cache keeps of a token.

    The shapes are without the axes [B, size] of the cache. With `rotary`, keys are rotated and
    differ from the values they are tied to.

    Args:
      layout: the heads.
      rotary: rotary positions are applied.

    >>> from attnlab.heads import Standard
    >>> cache_shapes(Standard(width=512, num_heads=8, num_kv_heads=1))
    {'k': (1, 64), 'v': (1, 64)}
    """
    return dict(_cache_shapes(layout, rotary))


@functools.cache
def _cache_shapes(layout: Layout, rotary: bool) -> dict[str, tuple[int, ...]]:
    """By tracing `project_kv`."""

    def trace(params: Params, y: Array, z: Array) -> Entries:
        y = layout.prepare(params, y)
        z = y if len(set(layout.input_widths)) == 1 else layout.prepare(params, z)
        return layout.project_kv(params, y, z, lambda a: a + 0 if rotary else a)

    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {name: array(shape) for name, shape in layout.shapes.items()}
    _, *widths = layout.input_widths
    entries = jax.eval_shape(trace, params, *(array((1, 1, width)) for width in widths))
    return {name: a.shape[2:] for name, a in entries.items()}


def cache_bytes_per_token(
    layout: Layout, bytes_per_number: int = 4, *, rotary: bool = False
) -> int:
    """What a cache keeps of a token, in bytes.

    Args:
      layout: the heads.
      bytes_per_number: 4 for float32, 2 for bfloat16.
      rotary: as in `cache_shapes`.

    >>> from attnlab.heads import Standard
    >>> cache_bytes_per_token(Standard(width=512, num_heads=8, num_kv_heads=1))
    512
    """
    shapes = cache_shapes(layout, rotary=rotary).values()
    return sum(map(math.prod, shapes)) * bytes_per_number


def _check_layout(function: str, layout: object) -> None:
    """Raises TypeError for the config of a model, which a function of the same name takes."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"attnlab.heads.{function} takes a head layout, not {type(layout).__name__}; that of a "
            f"ModelConfig is attnlab.{function}"
        )
