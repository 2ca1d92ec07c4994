"""Parameters, FLOPs and cache bytes of one set of heads, by formula from its weights.

FLOPs are those of matrix products in the forward pass, 2 for a multiply-add: every weight that is
applied, the scores, and the product with the values over all keys (a causal mask saves none here).
They equal the multiply-adds of the traced program, which the tests count.
"""

import math
from typing import get_args

from attnlab.heads.layout import Layout, all_weights
from attnlab.heads.params import weight_shapes
from attnlab.heads.shapes import token_shapes
from attnlab.heads.weights import Method, Weight


def num_parameters(layout: Layout) -> int:
    """Parameters of one set of heads, biases included.

    >>> from attnlab.heads import Standard
    >>> num_parameters(Standard(width=512, num_heads=8)) == 4 * 512**2
    True
    """
    _check_layout("num_parameters", layout)
    return sum(map(math.prod, weight_shapes(layout).values()))


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
    new = num_keys if num_new is None else num_new
    times = {
        "prepare": num_queries + (new if cross else 0),
        "project_q": num_queries,
        "project_kv": new,
        "keys_values": num_keys,
        "attend": num_queries,
        "project_out": num_queries,
    }
    total = sum(times[method] * count for method, count in multiply_adds(layout).items())
    if not cross:
        total -= min(num_queries, new) * _of_queries_and_keys(layout)
    token = token_shapes(layout)
    attended = num_keys + sum(extra.num_keys for extra in layout.extras)
    per_score = token.q[0] * (token.q[-1] + token.v[-1])
    per_score += sum(_multiply_adds(layout, w) for w in all_weights(layout).values() if w.per_score)
    total += num_queries * attended * per_score
    return 2 * batch * total


def multiply_adds(layout: Layout) -> dict[str, int]:
    """Method -> multiply-adds per token of its weights and other products.

    >>> from attnlab.heads import Standard
    >>> multiply_adds(Standard(width=512, num_heads=8))["project_out"] == 512**2
    True
    """
    counts: dict[str, int] = dict.fromkeys(get_args(Method), 0)
    for weight in all_weights(layout).values():
        for method in () if weight.per_score else weight.methods:
            counts[method] += _multiply_adds(layout, weight)
    for name, count in layout.extra_multiply_adds().items():
        counts[name] += count
    return counts


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
    return dict(token_shapes(layout, rotary).entries)


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


def _multiply_adds(layout: Layout, weight: Weight) -> int:
    axes = weight.axes + weight.applied_per
    return math.prod(map(layout.size, axes)) if weight.reads else 0


def _of_queries_and_keys(layout: Layout) -> int:
    both = {"project_q", "project_kv"}
    weights = all_weights(layout).values()
    return sum(_multiply_adds(layout, w) for w in weights if both <= set(w.methods))
