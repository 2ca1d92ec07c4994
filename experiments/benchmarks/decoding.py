"""Decoding of wide heads, token by token, from each cache that can hold their past.

Keys and values of wide heads are 2 N H numbers a token. The same function can keep the D numbers
of x alone (every head attends to x itself, its matrices multiplied out once, beforehand), or x and
the values. Latent heads, another function, keep one small vector. Rows that are one function have
the same weights, and their outputs are compared before anything is timed.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from attnlab.heads import (
    HeadInputs,
    Latent,
    Layout,
    Params,
    Standard,
    attend_heads,
    cache_bytes_per_token,
    cache_shapes,
    chain,
    init,
    init_cache,
)
from attnlab.sharing import PyTree
from experiments.benchmarks.attention import Size, check_equal, quick_key, reason_of
from experiments.benchmarks.measure import Case, Entry, compile_timed, refuse

Cache: TypeAlias = dict[str, Array]
Tried: TypeAlias = tuple[Entry, Array | None]
STEPS = 16
"""Tokens of one call."""
FROM_X = "attnlab, cache of x"


def decode_case(size: Size) -> Case:
    """`size.T` is how many tokens the cache holds at the end of a call of `STEPS`."""
    dtype, steps = size.dtype, min(STEPS, size.T // 2)
    wide = Standard(width=size.D, num_heads=size.N, head_dim=size.H)
    rewrites, _ = chain(wide)
    bilinear, absorbed = (step.layout for step in rewrites)
    latent = Latent(
        width=size.D,
        num_heads=size.N,
        head_dim=size.H,
        latent_dim=size.D // 2,
        rotary_dim=size.D // 8,
    )

    def build() -> list[Entry]:
        return _entries(size, steps, wide, latent)

    sizes = " ".join(size.labels()[:2])
    held = {"k and v": wide, "x and v": bilinear, "x": absorbed, "latent": latent}
    caches = {
        n: cache_bytes_per_token(layout, jnp.dtype(dtype).itemsize) for n, layout in held.items()
    }
    about = size._asdict() | {"word": "decoding", "bytes a token": caches}
    return Case(f"decoding {sizes}, {dtype}", size.B * steps, build, about=about)


def _entries(size: Size, steps: int, wide: Standard, latent: Latent) -> list[Entry]:
    """Wide heads from each of their caches, those of Linen, and latent heads."""
    past, rewrites = size.T - steps, chain(wide)[0]
    names = ("attnlab, cache of k and v", "attnlab, cache of x and v", FROM_X)
    layouts = (wide, *(step.layout for step in rewrites))

    @jax.jit  # one program, where each product would be one
    def start() -> tuple[list[dict[str, Array]], dict[str, Array], Array]:
        keys = jax.random.split(quick_key(0), 2)
        weights = [init(keys[0], wide, dtype=size.dtype)]
        for step in rewrites:
            weights.append(dict(step.params(weights[-1])))
        x = jax.random.normal(keys[1], (size.B, size.T, size.D), size.dtype)
        old = x.at[:, past:].set(0)
        read = lambda name: jnp.einsum("BSD,DNH->BSNH", old, weights[0][name])
        return weights, {"k": read("k"), "v": read("v"), "x": old}, x[:, past:]

    weights, past_of, tokens = start()
    held = {
        name: (layout, w, {n: past_of[n] for n in cache_shapes(layout)})
        for name, layout, w in zip(names, layouts, weights, strict=True)
    }
    made, expected = [], None
    for name in sorted(held, key=lambda name: name != FROM_X):
        entry, expected = _tried(
            name, functools.partial(_ours, name, *held[name], tokens, past), expected
        )
        made.append(entry._replace(ours=True))
    both = past_of["k"], past_of["v"]
    linen = lambda: _linen("Linen, decode=True", wide, weights[0], both, tokens, past)
    made.append(_tried("Linen, decode=True", linen, expected)[0])
    entry, _ = _tried("attnlab latent", lambda: _latent(latent, size, tokens, past), None)
    return [*made, entry._replace(ours=True)]


def _tried(name: str, make: Callable[[], Entry], expected: Array | None) -> Tried:
    """The entry, or a row that says why there is none; and what later ones have to equal."""
    try:
        entry = make()
        out = entry.run()
        check_equal(name, out, out if expected is None else expected)
    except Exception as error:
        return refuse(name, reason_of(error)), expected
    return entry, out if expected is None else expected


def _ours(
    name: str, layout: Layout, w: Params, held: dict[str, Array], tokens: Array, past: int
) -> Entry:
    cache = init_cache(layout, tokens.shape[0], past + tokens.shape[1], tokens.dtype)
    cache = cache | held | {"length": jnp.asarray(past)}

    def step(w: Params, cache: Cache, x: Array) -> tuple[Array, Cache]:
        inputs = HeadInputs(cache=cache, order="factored")
        outputs = attend_heads(w, x[:, None], layout, inputs, is_causal=True)
        assert outputs.cache is not None
        return outputs.output, outputs.cache

    return _entry(name, step, w, cache, tokens, lambda cache: cache | {"length": jnp.asarray(past)})


def _latent(layout: Layout, size: Size, tokens: Array, past: int) -> Entry:
    """Absorbed: every head attends to the latent. The cache holds normal numbers."""
    ((last,), _) = chain(layout)

    @jax.jit
    def start() -> tuple[Params, dict[str, Array]]:
        w = last.params(init(quick_key(2), layout, dtype=size.dtype))
        shapes = {n: (size.B, size.T, *shape) for n, shape in cache_shapes(last.layout).items()}
        return w, {
            n: jax.random.normal(jax.random.key(3), s, size.dtype) for n, s in shapes.items()
        }

    w, held = start()
    return _ours("attnlab latent", last.layout, w, held, tokens, past)


def _linen(
    name: str, layout: Layout, w: Params, held: tuple[Array, Array], tokens: Array, past: int
) -> Entry:
    n, h = layout.num_heads, layout.size("head_dim")
    layer = nn.MultiHeadDotProductAttention(
        n,
        qkv_features=n * h,
        out_features=layout.width,
        use_bias=False,
        decode=True,
        dtype=tokens.dtype,
    )
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    params = {theirs: {"kernel": w[ours]} for theirs, ours in names.items()}
    cache = {"cached_key": held[0], "cached_value": held[1], "cache_index": jnp.asarray(past)}

    def step(params: PyTree, cache: Cache, x: Array) -> tuple[Array, Cache]:
        out, new = layer.apply({"params": params, "cache": cache}, x[:, None], mutable=["cache"])
        return out, new["cache"]

    back = lambda cache: cache | {"cache_index": jnp.asarray(past)}
    return _entry(name, step, params, cache, tokens, back)


def _entry(
    name: str,
    step: Callable,
    w: PyTree,
    cache: Cache,
    tokens: Array,
    back: Callable[[Cache], Cache],
) -> Entry:
    """`step` (w, cache, x [B, D]) -> (out [B, 1, D], cache), for every one of `tokens` in one
    program. The cache is overwritten in place; `back` makes it as long as it was."""

    def work(w: PyTree, cache: Cache, tokens: Array) -> tuple[Array, Cache]:
        def body(cache: Cache, x: Array) -> tuple[Cache, Array]:
            out, cache = step(w, cache, x)
            return cache, out[:, 0]

        cache, outs = jax.lax.scan(body, cache, tokens.swapaxes(0, 1))
        return outs, back(cache)

    cache = jax.tree.map(jnp.array, cache)  # a copy: others hold the same arrays
    compiled, seconds, temp = compile_timed(work, w, cache, tokens, donate=1)

    def run() -> Array:
        nonlocal cache
        outs, cache = jax.block_until_ready(compiled(w, cache, tokens))
        return outs

    return Entry(name, run, temp_bytes=temp, compile_seconds=seconds)
