"""What a layer does to every position on its own: norms, the feed-forward part, dropout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.old.maps import add_bias
from attnlab.names import find
from attnlab.remat import save_for_backward

Weights = dict[str, Array]


class Activation(NamedTuple):
    """What stands between the matrices of the feed-forward part."""

    run: Callable
    """(one input per map) -> what W_down reads"""
    maps: tuple[str, ...] = ("up",)
    """The matrices that read x."""


def _gated(f: Callable) -> Activation:
    """f(x W_gate) * (x W_up) (Shazeer 2020, arXiv 2002.05202)."""
    return Activation(lambda gate, up: f(gate) * up, ("gate", "up"))


_PLAIN: dict[str, Callable] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
ACTIVATIONS = {name: Activation(f) for name, f in _PLAIN.items()} | {
    f"gated_{name}": _gated(f) for name, f in _PLAIN.items()
}


def feed_forward(
    w: Weights,
    x: Float[Array, "*B D"],
    *,
    activation: str = "gelu",
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    look: Callable | None = None,
) -> Float[Array, "*B D"]:
    """act(x W_up + b) W_down + b, position by position (Vaswani et al. 2017, section 3.3).

    The rows `gated_*` of `ACTIVATIONS` take (act(x W_gate + b) * (x W_up + b)) W_down + b.
    `look` is a `Look`, for what W_down reads ("ffn_hidden").

    >>> w = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> float(feed_forward(w, jnp.array([[1.0, 2.0]]), activation="relu")[0, 1])
    9.0
    """
    row = find("activation", activation, ACTIVATIONS)
    flat = x.reshape(-1, x.shape[-1])
    flat = row.run(*(save_for_backward(linear(w, name, flat)) for name in row.maps))
    if look is not None:
        flat = look("ffn_hidden", flat, (*x.shape[:-1], flat.shape[-1]))
    flat = dropout(flat, dropout_rate, dropout_key)
    return linear(w, "down", flat).reshape(x.shape)


def linear(w: dict[str, Any], name: str, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    """x W + b with W = w[name]; b = w[name_bias], where there is one.

    >>> linear({"up": jnp.ones((2, 1)), "up_bias": jnp.ones(1)}, "up", jnp.array([3.0, 4.0]))
    Array([8.], dtype=float32)
    """
    return add_bias(x @ w[name].astype(x.dtype), w, name)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zero with probability `rate`, else x / (1 - rate); no key, no change."""
    if not rate or key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def init_feed_forward(
    key: Array,
    width: int,
    ffn_width: int,
    *,
    activation: str = "gelu",
    bias: bool = True,
    std: float | None = None,
    residual_scale: float = 1.0,
) -> Weights:
    """Normal with standard deviation 1/sqrt(fan in), or `std`; biases zero; `residual_scale`
    multiplies the matrix that writes into the residual stream.
    """
    up, down, gate = jax.random.split(key, 3)
    keys = {"up": up, "gate": gate, "down": down}
    w = {
        name: jax.random.normal(keys[name], shape) * (std or shape[0] ** -0.5)
        for name, shape in feed_forward_shapes(width, ffn_width, activation).items()
    }
    w["down"] = w["down"] * residual_scale
    return w | ({f"{name}_bias": jnp.zeros(w[name].shape[1]) for name in w} if bias else {})


def feed_forward_shapes(width: int, ffn_width: int, activation: str) -> dict[str, tuple[int, int]]:
    """Matrix -> [in, out]; each may have a bias [out]."""
    maps = find("activation", activation, ACTIVATIONS).maps
    return dict.fromkeys(maps, (width, ffn_width)) | {"down": (ffn_width, width)}
