"""One transformer layer as a pure function: norms, attention, feed-forward, dropout, residuals."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.cache import Cache
from attnlab.heads import HeadSpec, Weights, init_heads
from attnlab.multihead import multi_head_attention
from attnlab.names import find

ACTIVATIONS: dict[str, Callable] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class BlockSpec(NamedTuple):
    """What one layer does, apart from its weights."""

    heads: HeadSpec
    ffn_width: int
    norm: str = "pre"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    activation: str = "gelu"
    ffn_bias: bool = True
    is_causal: bool = False
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    ffn_dropout_rate: float = 0.0
    window: int | None = None
    talking_heads: bool = False
    order: str | None = None
    implementation: str | None = None


def layer_norm(w: Weights, x: Float[Array, "... D"], *, eps: float = 1e-5) -> Float[Array, "... D"]:
    """(x - mean) / sqrt(var + eps) * scale + bias, in float32 at least (Ba et al. 2016)."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    y = y * w["scale"].astype(y.dtype)
    return (y + w["bias"].astype(y.dtype) if "bias" in w else y).astype(x.dtype)


def feed_forward(
    w: Weights,
    x: Float[Array, "*B D"],
    *,
    activation: str = "gelu",
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Float[Array, "*B D"]:
    """act(x W_up + b) W_down + b, position by position (Vaswani et al. 2017, section 3.3)."""
    act = find("activation", activation, ACTIVATIONS)
    flat = _linear(w, "up", x.reshape(-1, x.shape[-1]))
    flat = dropout(act(flat), dropout_rate, dropout_key)
    return _linear(w, "down", flat).reshape(x.shape)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zero with probability `rate`, else x / (1 - rate); no key, no change."""
    if not rate or key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def init_norm(width: int, *, bias: bool = True) -> Weights:
    """Scale one, bias zero."""
    return {"scale": jnp.ones(width)} | ({"bias": jnp.zeros(width)} if bias else {})


def init_feed_forward(
    key: Array, width: int, ffn_width: int, *, bias: bool = True, std: float | None = None
) -> Weights:
    """Normal with standard deviation 1/sqrt(fan in), or `std`; biases zero."""
    up, down = jax.random.split(key)
    w = {
        "up": jax.random.normal(up, (width, ffn_width)) * (std or width**-0.5),
        "down": jax.random.normal(down, (ffn_width, width)) * (std or ffn_width**-0.5),
    }
    return w | ({"up_bias": jnp.zeros(ffn_width), "down_bias": jnp.zeros(width)} if bias else {})


def init_mix(num_heads: int) -> Weights:
    """Talking heads that say nothing yet: both mixing matrices the identity."""
    return {"before": jnp.eye(num_heads), "after": jnp.eye(num_heads)}


def init_block(
    spec: BlockSpec, *, std: float | None = None, residual_scale: float = 1.0
) -> dict[str, Callable]:
    """part -> (key -> one slot of its weights). Both parts own the norm that goes with them, the
    attention also the matrices of talking heads.

    `residual_scale` multiplies the two matrices that write into the residual stream (o, down);
    GPT-2 takes 1/sqrt(2 L) (Radford et al. 2019, section 2.3).
    """

    def part(init: Callable, *residual: str) -> Callable:
        def make(key: Array) -> Weights:
            w = init(key)
            w |= {name: w[name] * residual_scale for name in residual if name in w}
            return w | {"norm": init_norm(spec.heads.width, bias=spec.norm_bias)}

        return make

    def ffn(key: Array) -> Weights:
        width = spec.heads.width
        return init_feed_forward(key, width, spec.ffn_width, bias=spec.ffn_bias, std=std)

    def attention(key: Array) -> Weights:
        w = init_heads(key, spec.heads, std=std)
        return w | ({"mix": init_mix(spec.heads.num_heads)} if spec.talking_heads else {})

    return {
        "attention": part(attention, "o", "vo"),
        "ffn": part(ffn, "down"),
    }


def transformer_block(
    w: dict[str, Weights],
    x: Float[Array, "B T D"],
    *,
    spec: BlockSpec,
    mask: Array | None = None,
    rotary: Array | None = None,
    head_gate: Array | None = None,
    dropout_key: Array | None = None,
    cache: Cache | None = None,
    return_probs: bool = False,
) -> tuple[Float[Array, "B T D"], Array | None, Cache | None]:
    """x + f(norm(x)) for pre-norm, norm(x + f(x)) for post-norm; f is attention, then the FFN.

    Returns the new x; where asked the attention probabilities [B, N, T, S]; and the cache, with x
    added, where one was given.
    """
    keys = (None,) * 4 if dropout_key is None else jax.random.split(dropout_key, 4)
    heads = {name: a for name, a in w["attention"].items() if name not in ("norm", "mix")}
    mix = w["attention"].get("mix")
    seen: list[Any] = []

    def attention(x):
        out = multi_head_attention(
            heads,
            x,
            spec=spec.heads,
            mask=mask,
            is_causal=spec.is_causal,
            local_window_size=_window(spec),
            rotary=rotary,
            head_gate=head_gate,
            mix=mix and (mix["before"], mix["after"]),
            dropout_rate=0.0 if keys[0] is None else spec.attention_dropout_rate,
            dropout_key=keys[0],
            cache=cache,
            order=spec.order,
            return_probs=return_probs,
            implementation=spec.implementation,
        )
        out, *seen[:] = out if isinstance(out, tuple) else (out,)
        return dropout(out, spec.dropout_rate, keys[1])

    def ffn(x):
        out = feed_forward(
            w["ffn"],
            x,
            activation=spec.activation,
            dropout_rate=spec.ffn_dropout_rate,
            dropout_key=keys[2],
        )
        return dropout(out, spec.dropout_rate, keys[3])

    residual: Any = find("norm", spec.norm, NORMS)
    x = residual(w["attention"]["norm"], attention, x, spec.norm_eps)
    x = residual(w["ffn"]["norm"], ffn, x, spec.norm_eps)
    probs = seen.pop(0) if return_probs else None
    return x, probs, seen.pop() if cache is not None else None


def _window(spec: BlockSpec) -> tuple[int, int] | None:
    """So many tokens back, and as many ahead where the layer may look ahead."""
    if spec.window is None:
        return None
    return spec.window, 0 if spec.is_causal else spec.window


NORMS: dict[str, Callable] = {
    "pre": lambda w, f, x, eps: x + f(layer_norm(w, x, eps=eps)),
    "post": lambda w, f, x, eps: layer_norm(w, x + f(x), eps=eps),
}


def _linear(w: Weights, name: str, x: Array) -> Array:
    y = x @ w[name].astype(x.dtype)
    bias = f"{name}_bias"
    return y + w[bias].astype(y.dtype) if bias in w else y
