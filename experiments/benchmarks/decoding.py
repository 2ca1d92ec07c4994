"""Suite decoding: wide heads, token by token, from each cache that can hold their past.

Keys and values of wide heads are 2 N H numbers a token. The same function can keep the D numbers
of x alone (every head attends to x itself, its matrices multiplied out once, beforehand), or x and
the values. Latent heads, another function, keep one small vector. Rows that are one function have
the same weights, and their outputs are compared before anything is timed.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from attnlab.heads import (
    Latent,
    Layout,
    Params,
    Standard,
    cache_bytes_per_token,
    cache_shapes,
    decode,
    init,
    init_cache,
)
from attnlab.sharing import PyTree
from experiments.benchmarks.attention import Size, check_equal, quick_key
from experiments.benchmarks.measure import Case, Entry, entry_with_state, tried

STEPS = 16
"""Tokens of one call."""
CACHES = (
    Size(16, 4096, 8, 1024, 1024, dtype="bfloat16"),
    Size(16, 16384, 8, 1024, 1024, dtype="bfloat16"),
)
TINY_CACHES = (Size(2, 16, 2, 16, 16, dtype="bfloat16"),)
ON_CPU = (Size(4, 1024, 8, 256, 256),)


def cases(tiny: bool) -> Iterator[Case]:
    """What there is to time on a CPU; that of a GPU is in suite accelerator."""
    return map(decode_case, TINY_CACHES if tiny else ON_CPU)


def decode_case(size: Size) -> Case:
    """`size.T` is how many tokens the cache holds at the end of a call of `STEPS`."""
    steps = min(STEPS, size.T // 2)
    build = functools.partial(_entries, size, steps)
    about = size._asdict() | {"word": "decoding"}
    return Case(f"decoding B{size.B} T{size.T}, {size.dtype}", size.B * steps, build, about)


def _entries(size: Size, steps: int) -> list[Entry]:
    """Wide heads from each of their caches, that of x first, those of Linen, and latent heads."""
    past = size.T - steps
    sizes: dict[str, Any] = {"width": size.D, "num_heads": size.N, "head_dim": size.H}
    wide = Standard(**sizes)
    latent = Latent(**sizes, latent_dim=size.D // 2, rotary_dim=size.D // 8)
    bilinear, absorbed = wide.chain[0]
    ((last,), _) = latent.chain
    keys = jax.random.split(quick_key(0), 4)
    w = init(keys[0], wide, dtype=size.dtype)
    of_x = dict(bilinear.params(w))
    of_latent = last.params(init(keys[2], latent, dtype=size.dtype))
    x = jax.random.normal(keys[1], (size.B, size.T, size.D), size.dtype)
    old, tokens = x.at[:, past:].set(0), x[:, past:]
    read = lambda name: jnp.einsum("BSD,DNH->BSNH", old, w[name])
    held = {"k": read("k"), "v": read("v"), "x": old}
    compressed = {
        name: jax.random.normal(keys[3], (*x.shape[:2], *shape), x.dtype)
        for name, shape in cache_shapes(last.layout).items()
    }

    first: list[Array] = []

    def equal(make: Callable[[], Entry], first: list[Array]) -> Entry:
        entry = make()
        out = entry.run()
        check_equal(out, first[0] if first else out)
        first.append(out)
        return entry

    ours = [
        ("x", absorbed.layout, absorbed.params(of_x)),
        ("x and v", bilinear.layout, of_x),
        ("k and v", wide, w),
    ]
    made: list[Entry] = []
    for name, layout, weights in ours:
        make = functools.partial(_ours, layout, weights, held, tokens, past)
        made += tried(f"attnlab, cache of {name}", functools.partial(equal, make, first), ours=True)
    make = functools.partial(_linen, wide, w, held, tokens, past)
    made += tried("Linen, decode=True", functools.partial(equal, make, first))
    make = functools.partial(_ours, last.layout, of_latent, compressed, tokens, past)
    others = tried("attnlab latent", functools.partial(equal, make, []), ours=True)
    return made + [one._replace(same_work=False) for one in others]


def _ours(layout: Layout, w: Params, held: dict[str, Array], tokens: Array, past: int) -> Entry:
    def step(w, cache, x):
        return decode(w, x[:, None], layout, cache, order="factored")

    begin = {"length": jnp.asarray(past)}
    cache = init_cache(layout, tokens.shape[0], past + tokens.shape[1], tokens.dtype)
    cache |= {name: held[name] for name in cache_shapes(layout)}
    bytes_ = cache_bytes_per_token(layout, tokens.dtype.itemsize)
    return _entry(step, w, cache, begin, tokens, bytes_)


def _linen(layout: Layout, w: Params, held: dict[str, Array], tokens: Array, past: int) -> Entry:
    n, h = layout.num_heads, layout.size("head_dim")
    layer = nn.MultiHeadDotProductAttention(
        n, qkv_features=n * h, out_features=layout.width, use_bias=False, decode=True,
        dtype=tokens.dtype,
    )  # fmt: skip
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    params = {theirs: {"kernel": w[ours]} for theirs, ours in names.items()}

    def step(params, cache, x):
        out, new = layer.apply({"params": params, "cache": cache}, x[:, None], mutable=["cache"])
        return out, new["cache"]

    begin = {"cache_index": jnp.asarray(past)}
    cache = {"cached_key": held["k"], "cached_value": held["v"]}
    return _entry(step, params, cache, begin, tokens, 2 * n * h * tokens.dtype.itemsize)


def _entry(
    step: Callable, w: PyTree, cache: dict[str, Array], begin: dict[str, Array], tokens: Array,
    cache_bytes: int,
) -> Entry:  # fmt: skip
    """`step` (w, cache, x [B, D]) -> (out [B, 1, D], cache), for every one of `tokens` in one
    program. The cache is overwritten in place; `begin` makes it as long as it was."""

    def work(cache, w, tokens):
        def body(cache, x):
            out, cache = step(w, cache, x)
            return cache, out[:, 0]

        cache, outs = jax.lax.scan(body, cache, tokens.swapaxes(0, 1))
        return cache | begin, outs

    entry = entry_with_state(work, cache | begin, w, tokens)
    return entry._replace(numbers={**entry.numbers, "cache_bytes": cache_bytes})
