"""Parameters, FLOPs and cache bytes of one set of heads, by formula from the axes of its weights.

FLOPs are those of matrix products in the forward pass, 2 for a multiply-add: every weight that is
applied, the scores, the value product over all keys (a causal mask saves none here).
"""

import math

from attnlab.heads.layouts import LAYOUTS
from attnlab.heads.spec import MEMORY_NAMES, HeadSpec, weight_axes


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
    spec: HeadSpec, batch: int, num_queries: int, num_keys: int, *, cross: bool = False
) -> int:
    """Forward FLOPs of one call: projections of queries and of keys, scores, value product."""
    s, queries, keys = spec.sizes, 0, 0
    for name, axes in weight_axes(spec):
        count = multiply_adds(spec, name, axes)
        on_keys = name in MEMORY_NAMES and axes != "NO"  # an absorbed value bias joins the output
        queries += 0 if on_keys else count
        keys += count if on_keys or (cross and name == "down") else 0
    scores = s["N"] * num_queries * num_keys * (s["H"] + s["V"])
    return 2 * batch * (num_queries * queries + num_keys * keys + scores)


def cache_bytes_per_token(spec: HeadSpec, bytes_per_number: int = 4) -> int:
    """What decoding stores per token and application: keys and values, or x where they are x.

    >>> cache_bytes_per_token(HeadSpec("standard", width=512, num_heads=8, num_kv_heads=1))
    512
    """
    s, row = spec.sizes, LAYOUTS[spec.layout]
    key_heads = 1 if row.one_key_head else s["K"]
    numbers = s["E"] if row.reads_inputs else key_heads * s["H"] + s["K"] * s["V"]
    return numbers * bytes_per_number


def multiply_adds(spec: HeadSpec, name: str, axes: str) -> int:
    """Of one weight per token. Vectors that are added or multiplied in count nothing."""
    if name == "m" or (name[1:] in ("_bias", "_norm") and axes != "NO"):
        return 0  # a bias [N, O] sums over the heads, as a matrix does
    tied = "C" in axes and "N" not in axes  # one matrix, applied to every chunk
    return math.prod(spec.shapes[name]) * (spec.num_heads if tied else 1)
