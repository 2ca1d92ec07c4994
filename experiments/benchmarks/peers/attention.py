"""Attention layers and attention functions of other libraries, as their users call them.

A `Peer` takes our arguments in its own arrangement: weights transposed, axes swapped, trees
renamed. Since that only moves numbers about, gradients are arranged in the same way, and one map
per peer is enough to check outputs and gradients against ours.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.heads import Layout, Params
from experiments.benchmarks.peers import on_torch


class Peer(NamedTuple):
    """A function of another library for the work of one of ours."""

    call: Callable[..., Any]
    """Its arguments -> its output; JAX may trace it, unless `torch`."""
    arrange: Callable[..., tuple] = lambda *args: args
    """Our arguments (or their gradients) -> its own: numbers moved about, none changed."""
    arrange_output: Callable[[Any], Any] = lambda out: out
    """The same for the output."""
    torch: bool = False


def linen_layer(layout: Layout, is_causal: bool) -> Peer:
    """`flax.linen.MultiHeadDotProductAttention`."""
    n, h = layout.num_heads, layout.size("head_dim")
    layer = nn.MultiHeadDotProductAttention(
        n, qkv_features=n * h, out_features=layout.width, use_bias=False, deterministic=True
    )

    def call(params, x):
        mask = nn.make_causal_mask(x[..., 0]) if is_causal else None
        return layer.apply({"params": params}, x, mask=mask)

    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    return Peer(call, lambda w, x: ({theirs: {"kernel": w[n]} for theirs, n in names.items()}, x))


def nnx_layer(layout: Layout, is_causal: bool) -> Peer:
    """`flax.nnx.MultiHeadAttention`, split from its weights so that JAX compiles it."""
    n, h, d = layout.num_heads, layout.size("head_dim"), layout.width
    layer = nnx.MultiHeadAttention(
        n, d, n * h, d, use_bias=False, decode=False, deterministic=True, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)
    tree = jax.tree.structure(state)  # key, out, query, value

    def call(state, x):
        mask = nnx.make_causal_mask(x[..., 0]) if is_causal else None
        return nnx.merge(graph, state)(x, mask=mask)

    return Peer(call, lambda w, x: (jax.tree.unflatten(tree, [w[name] for name in "koqv"]), x))


def equinox_layer(layout: Layout, is_causal: bool) -> Peer:
    """`equinox.nn.MultiheadAttention`, one batch row at a time under vmap."""
    import equinox as eqx

    n, d = layout.num_heads, layout.width
    sizes: dict[str, Any] = {
        "qk_size": layout.size("head_dim"),
        "vo_size": layout.size("value_dim"),
        "output_size": d,
    }
    layer = eqx.nn.MultiheadAttention(n, d, **sizes, key=jax.random.key(0))
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    tree = jax.tree.structure(params)  # query, key, value, output

    def call(params, x):
        layer, t = eqx.combine(params, static), x.shape[1]
        mask = jnp.tril(jnp.ones((t, t), bool)) if is_causal else None
        return jax.vmap(lambda row: layer(row, row, row, mask))(x)

    def arrange(w, x):
        read = [w[name].reshape(d, -1).T for name in "qkv"]
        return jax.tree.unflatten(tree, [*read, w["o"].reshape(-1, d).T]), x

    return Peer(call, arrange)


def haiku_layer(layout: Layout, is_causal: bool) -> Peer:
    """`haiku.MultiHeadAttention`."""
    import haiku

    n, h, d = layout.num_heads, layout.size("head_dim"), layout.width

    @haiku.without_apply_rng
    @haiku.transform
    def layer(x):
        sizes = {"model_size": d, "with_bias": False, "w_init": jnp.ones}
        attention = haiku.MultiHeadAttention(n, h, **sizes, name="heads")
        t = x.shape[1]
        mask = jnp.tril(jnp.ones((1, 1, t, t), bool)) if is_causal else None
        return attention(x, x, x, mask)

    def arrange(w, x):
        names = {"query": "q", "key": "k", "value": "v"}
        matrices = {theirs: w[ours].reshape(d, -1) for theirs, ours in names.items()}
        matrices["linear"] = w["o"].reshape(-1, d)
        return {f"heads/{name}": {"w": matrix} for name, matrix in matrices.items()}, x

    return Peer(layer.apply, arrange)


def jax_nn_layer(layout: Layout, is_causal: bool) -> Peer:
    """`jax.nn.dot_product_attention` between projections."""

    def call(w, x):
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", x, w[name]) for name in "qkv")
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
        return jnp.einsum("BTNH,NHD->BTD", heads, w["o"])

    return Peer(call)


def torch_sdpa_layer(layout: Layout, is_causal: bool) -> Peer:
    """`scaled_dot_product_attention` between projections, q, k and v in one product."""
    linear = on_torch.load().nn.functional.linear
    attention = on_torch.load().nn.functional.scaled_dot_product_attention
    n, h = layout.num_heads, layout.size("head_dim")

    def call(qkv, out, x):
        q, k, v = linear(x, qkv).unflatten(-1, (3, n, h)).permute(2, 0, 3, 1, 4)
        return linear(attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2), out)

    return Peer(call, _torch_weights, torch=True)


def _torch_weights(w: Params, x: Any) -> tuple:
    """Torch keeps a matrix as [out, in]."""
    d = x.shape[-1]
    qkv = jnp.concatenate([w[name].reshape(d, -1).T for name in "qkv"])
    return qkv, w["o"].reshape(-1, d).T, x


def jax_nn_function(implementation: Any, is_causal: bool) -> Peer:
    """`jax.nn.dot_product_attention`."""
    options = {"implementation": implementation, "is_causal": is_causal}
    return Peer(functools.partial(jax.nn.dot_product_attention, **options))


def tokamax_function(implementation: Any, is_causal: bool) -> Peer:
    """`tokamax.dot_product_attention`; of its own implementations None takes the first that can."""
    import tokamax

    options = {"implementation": implementation, "is_causal": is_causal}
    return Peer(functools.partial(tokamax.dot_product_attention, **options))


def torch_function(is_causal: bool) -> Peer:
    """`torch.nn.functional.scaled_dot_product_attention`, heads before positions as it likes."""
    attention = on_torch.load().nn.functional.scaled_dot_product_attention
    call = functools.partial(attention, is_causal=is_causal)

    def swap(*arrays):
        return tuple(jnp.swapaxes(a, 1, 2) for a in arrays)

    return Peer(call, swap, lambda out: swap(out)[0], torch=True)


LAYERS: dict[str, Callable[[Layout, bool], Peer]] = {
    "Linen": linen_layer,
    "NNX": nnx_layer,
    "Equinox": equinox_layer,
    "Haiku": haiku_layer,
    "jax.nn": jax_nn_layer,
    "torch sdpa": torch_sdpa_layer,
}

FUNCTIONS: dict[str, Callable[[bool], Peer]] = {
    "jax.nn": functools.partial(jax_nn_function, "xla"),
    "jax.nn cudnn": functools.partial(jax_nn_function, "cudnn"),
    "tokamax": functools.partial(tokamax_function, None),
    "tokamax xla_chunked": functools.partial(tokamax_function, "xla_chunked"),
    "torch sdpa": torch_function,
}
