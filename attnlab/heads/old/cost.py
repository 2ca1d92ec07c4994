"""Parameters, FLOPs and cache bytes of one set of heads, by formula from the axes of its weights.

FLOPs are those of matrix products in the forward pass, 2 for a multiply-add: every weight that is
applied, the scores, the value product over all keys (a causal mask saves none here).
"""

import math

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import RUNS, Map
from attnlab.heads.old.spec import HeadSpec


def head_parameters(spec: HeadSpec) -> int:
    """Parameters of one set of heads, biases included.

    >>> head_parameters(HeadSpec("standard", width=512, num_heads=8)) == 4 * 512**2
    True
    """
    return sum(math.prod(shape) for shape in spec.shapes.values())


def head_flops(spec: HeadSpec, num_keys: int) -> int:
    """Forward FLOPs per token of one set of heads that attends to `num_keys` keys of its own text.

    >>> head_flops(HeadSpec("wide", width=512, num_heads=8), 512)
    25165824
    """
    return call_flops(spec, 1, num_keys, num_keys) // num_keys


def call_flops(
    spec: HeadSpec,
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    cross: bool = False,
    num_new: int | None = None,
    num_source: int = 0,
) -> int:
    """Forward FLOPs of one call: each map as often as it runs, scores, value product.

    A map of queries that is that of keys too runs once for a text that asks itself: the compiler
    makes one product of the two.

    `cross`: keys are of another text than queries, which is prepared too. `num_new`: so many of
    the keys are stored in this call (default: all); the rest was there, in a cache. `num_source`
    keys of a second text stand beside the `num_keys`, made in this call.

    >>> spec = HeadSpec("standard", width=512, num_heads=8)
    >>> call_flops(spec, 1, 1, 100, num_new=1) == 2 * (4 * 512**2 + 8 * 100 * (64 + 64))
    True
    """
    new, row = num_keys if num_new is None else num_new, LAYOUTS[spec.layout]
    times = {
        "prepare": num_queries + (new if cross else 0) + num_source,
        "query": num_queries,
        "store": new + num_source,
        "read": num_keys + num_source,
        "merge": num_queries,
    }
    maps = sum(times[runs] * count for runs, count in multiply_adds(spec).items())
    maps -= 0 if cross else min(num_queries, new) * _of_both(spec)
    width = spec.size(row.scores) + spec.size(row.values)
    seen = num_keys + num_source + (spec.extra_keys or 0)
    return 2 * batch * (maps + spec.num_heads * num_queries * seen * width)


def decode_flops(spec: HeadSpec, num_keys: int) -> int:
    """Forward FLOPs of one more token, which sees `num_keys` keys with its own.

    >>> decode_flops(HeadSpec("standard", width=512, num_heads=8), 100)
    2301952
    """
    return call_flops(spec, 1, 1, num_keys, num_new=1)


def multiply_adds(spec: HeadSpec) -> dict[str, int]:
    """Function of the row -> multiply-adds of its maps and products for a token. A map of queries
    that is that of keys too counts as both.

    >>> multiply_adds(HeadSpec("standard", width=512, num_heads=8))["merge"] == 512**2
    True
    """
    counts = dict.fromkeys(RUNS, 0)
    for one in spec.maps.values():
        counts[one.runs] += _products(spec, one)
    counts["store"] += _of_both(spec)
    for text in LAYOUTS[spec.layout].products:
        runs, letters = text.split(": ")
        counts[runs] += math.prod(spec.sizes[a] for a in letters.split())
    return counts


def _products(spec: HeadSpec, one: Map) -> int:
    return math.prod(spec.sizes[a] for a in one.products) if one.products else 0


def _of_both(spec: HeadSpec) -> int:
    """Multiply-adds for a token of the maps that make queries and keys."""
    shared = ("q", "q_outer") if "q" in spec.ties else ()
    return sum(_products(spec, one) for name, one in spec.maps.items() if name in shared)


def cache_shapes(spec: HeadSpec, rotary: bool = False) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what decoding stores for a token; keys that `rotary` positions turn are no
    longer the values that they are tied to.

    >>> cache_shapes(HeadSpec("standard", width=512, num_heads=8, num_kv_heads=1))
    {'k': (1, 64), 'v': (1, 64)}
    """
    cache = LAYOUTS[spec.layout].cache
    shapes = {name: tuple(spec.sizes[a] for a in axes.split()) for name, axes in cache.items()}
    if spec.keys_are_values(rotary):
        del shapes["v"]
    return shapes


def cache_bytes_per_token(spec: HeadSpec, bytes_per_number: int = 4, rotary: bool = False) -> int:
    """What decoding stores per token and application.

    >>> cache_bytes_per_token(HeadSpec("standard", width=512, num_heads=8, num_kv_heads=1))
    512
    """
    return sum(map(math.prod, cache_shapes(spec, rotary).values())) * bytes_per_number
