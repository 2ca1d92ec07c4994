"""Every implementation of attention that is installed, as `System`s for `pitfalls.py`."""

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import attnlab.contrib  # noqa: F401  (its backends are entries too)
from attnlab import adapters, heads
from attnlab.attention import BACKENDS, dot_product_attention
from attnlab.tap import capture


class System(NamedTuple):
    """One implementation of attention."""

    attend: Callable
    """(q, k, v, **what it offers of bias, mask, is_causal, return_residual) -> [B, T, N, V]"""
    with_probs: Callable | None = None
    """(q, k, v) -> the output of a call that is also asked for the probabilities"""
    init: Callable | None = None
    """(key, width, num_heads, head_dim) -> (q kernel, o kernel) of its default initialiser"""
    decode: Callable | None = None
    """(x [1, steps, 8], size) -> outputs [steps, 8], token by token into a cache of `size`"""


class NotOfferedError(Exception):
    """The system has no such option."""


class Sow:
    """Stands in for the Flax module that the probabilities are sown into."""

    def sow(self, *args: Any, **options: Any) -> None:
        """Ignores them; the pitfalls read the output alone."""


def systems() -> dict[str, System]:
    """Name -> system, for all that are installed and run on this device."""
    return {name: system for make in (ours, flax, others) for name, system in make()}


def ours() -> Iterator[tuple[str, System]]:
    """attnlab's backends, and attnlab under Flax's keywords."""

    def init(key, width, num_heads, head_dim):
        layout = heads.Standard(width=width, num_heads=num_heads, head_dim=head_dim)
        params = heads.init(key, layout)
        return params["q"], params["o"]

    def decode(x, size, implementation=None):
        layout = heads.Standard(width=8, num_heads=2)
        params, cache = heads.init(jax.random.key(0), layout), heads.init_cache(layout, 1, size)
        run = functools.partial(heads.decode, layout=layout, implementation=implementation)
        outs = []
        for t in range(x.shape[1]):
            out, cache = jax.jit(run)(params, x[:, t : t + 1], cache=cache)
            outs.append(out[0, 0])
        return jnp.stack(outs)

    q = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
    for name in BACKENDS:
        if name == "splash" and jax.default_backend() != "tpu":  # interpreted: minutes
            continue
        attend = functools.partial(dot_product_attention, implementation=name)
        with_probs = lambda *a, attend=attend: capture(attend, *a, names=("probs",))[0]
        try:
            jax.eval_shape(attend, q, q, q)
        except ValueError:  # not on this device
            continue
        of_backend = functools.partial(decode, implementation=name)
        yield f"attnlab {name}", System(attend, with_probs, init, of_backend)
    sows = functools.partial(adapters.attention_fn, module=Sow())
    yield "attnlab in Flax", System(adapters.attention_fn, sows, init)


def flax() -> Iterator[tuple[str, System]]:
    """jax.nn and what Flax makes of it."""
    from flax import linen as nn
    from flax import nnx

    yield "jax.nn", System(jax.nn.dot_product_attention)

    def linen(key, width, heads, head_dim):
        module = nn.MultiHeadDotProductAttention(heads, qkv_features=heads * head_dim)
        w = module.init(key, jnp.ones((1, 2, width)))["params"]
        return w["query"]["kernel"], w["out"]["kernel"]

    def linen_decode(x, size):
        module = nn.MultiHeadDotProductAttention(2, decode=True)
        held = module.init(jax.random.key(0), jnp.ones((1, size, 8)))
        params, cache, outs = held["params"], held["cache"], []
        for t in range(x.shape[1]):
            out, new = module.apply(
                {"params": params, "cache": cache}, x[:, t : t + 1], mutable=["cache"]
            )
            cache = new["cache"]
            outs.append(out[0, 0])
        return jnp.stack(outs)

    def nnx_decode(x, size):
        module = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
        module.init_cache((1, size, 8))
        return jnp.stack([module(x[:, t : t + 1])[0, 0] for t in range(x.shape[1])])

    def of_nnx(key, width, heads, head_dim):
        rngs = nnx.Rngs(params=key)
        module = nnx.MultiHeadAttention(heads, width, heads * head_dim, decode=False, rngs=rngs)
        return module.query.kernel[...], module.out.kernel[...]

    for name, attend, init, decode in (
        ("linen", nn.dot_product_attention, linen, linen_decode),
        ("nnx", nnx.dot_product_attention, of_nnx, nnx_decode),
    ):
        with_probs = lambda *a, attend=attend: attend(*a, module=Sow())
        yield name, System(attend, with_probs, init, decode)


def others() -> Iterator[tuple[str, System]]:
    """Equinox and Haiku offer attention as a module only: one whose projections are identities."""
    if installed("equinox"):
        import equinox as eqx

        def module(q, v, key=None):
            (n, h), vo = q.shape[-2:], v.shape[-1]
            return eqx.nn.MultiheadAttention(
                n,
                n * h,
                value_size=n * vo,
                output_size=n * vo,
                qk_size=h,
                vo_size=vo,
                key=jax.random.key(0) if key is None else key,
            )

        def equinox(q, k, v, *, mask=None):
            (b, t, n, _), s = q.shape, k.shape[1]
            one_head_count(q, k, v)
            maps = lambda m: (m.query_proj, m.key_proj, m.value_proj, m.output_proj)
            weights = lambda m: tuple(p.weight for p in maps(m))
            eyes = [jnp.eye(w.shape[0], dtype=q.dtype) for w in weights(module(q, v))]
            run = eqx.tree_at(weights, module(q, v), eyes)
            mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
            mask = jnp.broadcast_to(mask, (b, n, t, s))
            flat = (a.reshape(*a.shape[:2], -1) for a in (q, k, v))
            return jax.vmap(run)(*flat, mask).reshape(b, t, n, -1)

        def init(key, width, heads, head_dim):
            m = eqx.nn.MultiheadAttention(heads, width, qk_size=head_dim, vo_size=head_dim, key=key)
            return m.query_proj.weight.T, m.output_proj.weight.T.reshape(heads, head_dim, -1)

        yield "equinox", System(equinox, None, init)
    if installed("dm-haiku"):
        import haiku as hk

        def haiku(q, k, v, *, mask=None):
            (n, h), vo = q.shape[-2:], v.shape[-1]
            one_head_count(q, k, v)
            eye = lambda shape, dtype: jnp.eye(shape[0], shape[1], dtype=dtype)
            run: Any = hk.without_apply_rng(
                hk.transform(
                    lambda *a: hk.MultiHeadAttention(
                        n, h, w_init=eye, with_bias=False, value_size=vo, model_size=n * vo
                    )(*a)
                )
            )
            flat = [a.reshape(*a.shape[:2], -1) for a in (q, k, v)]
            return run.apply(run.init(None, *flat), *flat, mask).reshape(*q.shape[:3], vo)

        yield "haiku", System(haiku)


def one_head_count(*qkv: Any) -> None:
    """Those modules have one number of heads: there is no way to ask for more."""
    if len({a.shape[2] for a in qkv}) > 1:
        raise NotOfferedError("key and value head counts")


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
