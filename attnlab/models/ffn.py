"""The position-wise feed-forward network (FFN)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.weights import Params
from attnlab.models.dense import dense, dropout
from attnlab.models.specs import FFN
from attnlab.names import lookup
from attnlab.remat import save_for_backward
from attnlab.tap import Tap

GATED = "gated_"


def gelu(x: Array) -> Array:
    """x Phi(x), exact (Hendrycks and Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Array) -> Array:
    """`gelu`, approximated by tanh as in GPT-2."""
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
"""Name -> elementwise function; each also exists as "gated_<name>"."""


def activation_function(name: str) -> Callable[[Array], Array]:
    """The elementwise function of an activation, gated or not.

    >>> activation_function("gated_relu")(jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return lookup(ACTIVATIONS, name.removeprefix(GATED), what="activation")


def is_gated(activation: str) -> bool:
    """Whether the FFN has a gate matrix beside W_up."""
    return activation.startswith(GATED)


def ffn_shapes(width: int, ffn: FFN) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of the FFN by name.

    >>> ffn_shapes(4, FFN(width=6, activation="gated_silu", bias=False))
    {'gate': (4, 6), 'up': (4, 6), 'down': (6, 4)}
    """
    if not ffn.width:
        return {}
    names = ("gate", "up") if is_gated(ffn.activation) else ("up",)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (width, ffn.width))
    shapes["down"] = (ffn.width, width)
    biases = {f"{name}_bias": shape[1:] for name, shape in shapes.items()}
    return shapes | (biases if ffn.bias else {})


def init_ffn(
    key: Array, width: int, ffn: FFN, *, std: float | None = None, residual_scale: float = 1.0
) -> dict[str, Array]:
    """Initial parameters: matrices normal with standard deviation 1/sqrt(fan-in), biases 0.

    Args:
      key: random key.
      width: D, of the model.
      ffn: the FFN.
      std: one standard deviation for all matrices in place of 1/sqrt(fan-in).
      residual_scale: multiplies W_down.

    >>> init_ffn(jax.random.key(0), 4, FFN(width=6))["down"].shape
    (6, 4)
    """
    keys = dict(zip(("up", "down", "gate"), jax.random.split(key, 3), strict=True))
    params = {
        name: jnp.zeros(shape)
        if len(shape) == 1
        else jax.random.normal(keys[name], shape) * (std or shape[0] ** -0.5)
        for name, shape in ffn_shapes(width, ffn).items()
    }
    if params:
        params["down"] = params["down"] * residual_scale
    return params


def feed_forward(
    params: Params,
    x: Float[Array, "*B D"],
    ffn: FFN,
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    tap: Tap | None = None,
) -> Float[Array, "*B D"]:
    """act(x W_up + b) W_down + b, at each position (Vaswani et al. 2017, section 3.3).

    A gated FFN computes (act(x W_gate + b) * (x W_up + b)) W_down + b (Shazeer 2020).

    Args:
      params: of `init_ffn`.
      x: [..., D].
      ffn: activation; the widths are those of params.
      dropout_rate, dropout_key: dropout of the hidden layer; without a key there is none.
      tap: takes "ffn_hidden" [..., F], what W_down reads, before dropout.

    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> float(feed_forward(params, jnp.array([[1.0, 2.0]]), FFN(activation="relu"))[0, 1])
    9.0
    """
    activation = activation_function(ffn.activation)
    flat = x.reshape(-1, x.shape[-1])
    if is_gated(ffn.activation):
        gate = activation(save_for_backward(dense(params, "gate", flat)))
        hidden = gate * save_for_backward(dense(params, "up", flat))
    else:
        hidden = activation(save_for_backward(dense(params, "up", flat)))
    if tap is not None and tap.wants("ffn_hidden"):
        shaped = hidden.reshape(*x.shape[:-1], hidden.shape[-1])
        hidden = tap("ffn_hidden", shaped).reshape(hidden.shape)
    hidden = dropout(hidden, dropout_rate, dropout_key)
    return dense(params, "down", hidden).reshape(x.shape)
