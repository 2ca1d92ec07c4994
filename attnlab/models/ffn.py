"""Functions of each position alone: norms, dropout, dense layers, and the feed-forward network
(FFN), alone or as a mixture of experts."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.heads.linear import add_bias
from attnlab.heads.params import normal
from attnlab.models import experts as moe
from attnlab.models.specs import FFN, Norm
from attnlab.ops import NORM_KINDS, NORM_STARTS, save_for_backward
from attnlab.sharing import Params, PyTree
from attnlab.tap import Tap

Shapes: TypeAlias = dict[str, "tuple[int, ...] | Shapes"]
GATED = "gated_"


def dense(
    params: Mapping[str, Array], name: str, x: Float[Array, "... I"]
) -> Float[Array, "... O"]:
    """x W + b with W = params[name]; b = params[name_bias], if there is one.

    >>> dense({"up": jnp.ones((2, 1)), "up_bias": jnp.ones(1)}, "up", jnp.array([3.0, 4.0]))
    Array([8.], dtype=float32)
    """
    return add_bias(params, name, x @ params[name].astype(x.dtype))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """0 with probability `rate`, else x / (1 - rate). Without a key, x.

    >>> dropout(jnp.ones(2), 0.5, None).tolist()
    [1.0, 1.0]
    """
    if not rate or key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def normalize(params: Params, x: Float[Array, "... D"], norm: Norm) -> Float[Array, "... D"]:
    """The norm of kind `norm.kind` of x, times a scale and plus a bias.

    >>> params = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    >>> normalize(params, jnp.array([1.0, 3.0]), Norm(eps=0.0)).tolist()
    [-1.0, 1.0]
    """
    return NORM_KINDS[norm.kind](params, x, eps=norm.eps)


def norm_shapes(width: int, norm: Norm) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of one norm by name; none without a scale."""
    names = ("scale", "bias") if norm.has_bias else ("scale",)
    return dict.fromkeys(names if norm.scale else (), (width,))


def init_norm(width: int, norm: Norm) -> dict[str, Array]:
    """Initial parameters: a neutral scale, and a zero bias if the norm has one."""
    starts = {"scale": NORM_STARTS[norm.kind], "bias": 0.0}
    # With a dtype: JAX calls an array of a Python number weakly typed, and so compiles anew for the
    # parameters of the second step.
    return {n: jnp.full(shape, starts[n], float) for n, shape in norm_shapes(width, norm).items()}


# The FFN ------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    # Hendrycks and Gimpel 2016: x Phi(x), exact, and approximated by tanh (GPT-2) or a sigmoid.
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
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
    return ACTIVATIONS[name.removeprefix(GATED)]


def is_gated(activation: str) -> bool:
    """Whether the FFN has a gate matrix W_gate."""
    return activation.startswith(GATED)


def ffn_shapes(width: int, ffn: FFN) -> Shapes:
    """Shape of every weight of the FFN by name. Those of experts have an axis of experts in front.

    >>> ffn_shapes(4, FFN(width=6, activation="gated_silu", bias=False))
    {'gate': (4, 6), 'up': (4, 6), 'down': (6, 4)}
    >>> from attnlab.models import Experts
    >>> ffn_shapes(4, FFN(width=6, bias=False, experts=Experts(num_experts=3)))
    {'up': (3, 4, 6), 'down': (3, 6, 4), 'router': (4, 3)}
    """
    if not ffn.width:
        return {}
    experts = ffn.experts
    front = () if experts is None else (experts.num_experts,)
    names = ("gate", "up") if is_gated(ffn.activation) else ("up",)
    matrices = dict.fromkeys(names, (*front, width, ffn.width))
    matrices["down"] = (*front, ffn.width, width)
    shapes: Shapes = {**matrices}
    if ffn.bias:
        shapes |= {f"{name}_bias": (*front, shape[-1]) for name, shape in matrices.items()}
    if experts is None:
        return shapes
    shapes["router"] = (width, *front)
    shapes |= {"router_bias": front} if experts.router_bias else {}
    shapes |= {"balance_bias": front} if experts.balance_bias else {}
    if ffn.shared is not None:
        shapes["shared"] = ffn_shapes(width, ffn.shared)
    return shapes | ({"shared_gate": (width, 1)} if experts.shared_gate else {})


def ffn_flops(width: int, ffn: FFN) -> int:
    """FLOPs of the matrix products for one token; of experts, those that it uses.

    >>> from attnlab.models import Experts
    >>> ffn_flops(4, FFN(width=6)), ffn_flops(4, FFN(width=6, experts=Experts(num_experts=3)))
    (96, 216)
    """
    if ffn.experts is None:
        shapes = (s for s in ffn_shapes(width, ffn).values() if isinstance(s, tuple))
        return 2 * sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    spec, one = ffn.experts, dataclasses.replace(ffn, experts=None)
    shared = (
        0 if ffn.shared is None else ffn_flops(width, ffn.shared) + 2 * width * spec.shared_gate
    )
    return spec.top_k * ffn_flops(width, one) + 2 * width * spec.num_experts + shared


def inactive_parameters(width: int, ffn: FFN) -> int:
    """Parameters of the experts that a token does not use.

    >>> from attnlab.models import Experts
    >>> inactive_parameters(4, FFN(width=6, bias=False, experts=Experts(num_experts=3)))
    48
    """
    if ffn.experts is None:
        return 0
    one = ffn_shapes(width, dataclasses.replace(ffn, experts=None)).values()
    size = sum(math.prod(shape) for shape in one if isinstance(shape, tuple))
    return (ffn.experts.num_experts - ffn.experts.top_k) * size


def init_ffn(
    key: Array, width: int, ffn: FFN, *, std: float | None = None, residual_scale: float = 1.0
) -> Params:
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
    names = ["up", "down", "gate"]
    if ffn.experts is not None:
        names += ["router", "shared", "shared_gate"]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    params: Params = {}
    for name, shape in ffn_shapes(width, ffn).items():
        if isinstance(shape, dict):
            assert ffn.shared is not None
            made = init_ffn(keys[name], width, ffn.shared, std=std, residual_scale=residual_scale)
            params[name] = made
        elif name.endswith("bias"):
            params[name] = jnp.zeros(shape)
        else:
            params[name] = normal(keys[name], shape) * (shape[-2] ** -0.5 if std is None else std)
    if params:
        params["down"] = params["down"] * residual_scale
    return params


def ffn_values(ffn: FFN) -> dict[str, str]:
    """Names of the values inside of the FFN -> their axes."""
    if not ffn.width:
        return {}
    if ffn.experts is not None:
        return {"router_logits": "B T E", "expert_weights": "B T E"}
    return {"ffn_hidden": "B T F"}


def feed_forward(
    params: Mapping[str, PyTree],
    x: Float[Array, "*B D"],
    ffn: FFN,
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    tap: Tap | None = None,
) -> Float[Array, "*B D"]:
    """act(x W_up + b) W_down + b, at each position (Vaswani et al. 2017, section 3.3).

    A gated FFN computes (act(x W_gate + b) * (x W_up + b)) W_down + b (Shazeer 2020). With experts
    it is the weighted sum of those that the router chooses, see `Experts`; products are computed
    for these alone.

    Args:
      params: of `init_ffn`.
      x: [..., D].
      ffn: activation and experts; the widths are those of params.
      dropout_rate, dropout_key: dropout of the hidden layer; without a key there is none.
      tap: takes "ffn_hidden" [..., F], what W_down reads, before dropout. With experts it takes
        "router_logits" and "expert_weights" [..., E].

    >>> params = {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2))}
    >>> float(feed_forward(params, jnp.array([[1.0, 2.0]]), FFN(activation="relu"))[0, 1])
    9.0
    """
    out, _ = apply_ffn(params, x, ffn, dropout_rate=dropout_rate, dropout_key=dropout_key, tap=tap)
    return out


def apply_ffn(
    params: Mapping[str, PyTree],
    x: Float[Array, "*B D"],
    ffn: FFN,
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    token_mask: Bool[Array, "*B"] | None = None,
    tap: Tap | None = None,
) -> tuple[Float[Array, "*B D"], dict[str, Array]]:
    """`feed_forward`, and its auxiliary losses by name: "expert_balance" where experts have one.

    Args:
      params, x, ffn, dropout_rate, dropout_key, tap: as in `feed_forward`.
      token_mask: [...], True = a token; others do not count in the loss.
    """
    tap, flat = tap or Tap(), x.reshape(-1, x.shape[-1])
    if ffn.experts is not None:
        drop = dropout_rate, dropout_key
        mask = None if token_mask is None else token_mask.reshape(-1)
        out, losses = _apply_experts(params, flat, ffn, drop, mask, tap, x.shape[:-1])
        return out.reshape(x.shape), losses
    hidden = _hidden(ffn, lambda name: dense(params, name, flat))
    if tap.wants("ffn_hidden"):
        shaped = hidden.reshape(*x.shape[:-1], hidden.shape[-1])
        hidden = tap("ffn_hidden", shaped).reshape(hidden.shape)
    hidden = dropout(hidden, dropout_rate, dropout_key)
    return dense(params, "down", hidden).reshape(x.shape), {}


def _hidden(ffn: FFN, project: Callable[[str], Array]) -> Array:
    """The hidden layer; `project` applies the matrix of a name to the input."""
    activation = activation_function(ffn.activation)
    if not is_gated(ffn.activation):
        return activation(save_for_backward(project("up")))
    gate, up = save_for_backward(project("gate")), save_for_backward(project("up"))
    if ffn.clip is not None:
        gate, up = jnp.minimum(gate, ffn.clip), jnp.clip(up, -ffn.clip, ffn.clip) + 1
    return activation(gate) * up


def _apply_experts(
    params: Mapping[str, PyTree],
    x: Float[Array, "M D"],
    ffn: FFN,
    drop: tuple[float, Array | None],
    token_mask: Array | None,
    tap: Tap,
    shape: tuple[int, ...],
) -> tuple[Float[Array, "M D"], dict[str, Array]]:
    """The FFN of experts for M tokens, of an input [*shape, D], and its losses."""
    spec = ffn.experts
    assert spec is not None
    wide = jnp.promote_types(x.dtype, jnp.float32)
    router = {name: a.astype(wide) for name, a in params.items() if name.startswith("router")}
    logits = add_bias(router, "router", x.astype(wide) @ router["router"])
    if tap.wants("router_logits"):
        logits = tap("router_logits", logits.reshape(*shape, -1)).reshape(logits.shape)
    routing = moe.tap_routing(tap, moe.route(params, logits, spec), shape)
    losses = {}
    if spec.balance or spec.balance_bias:
        losses[moe.BALANCE] = moe.balance_loss(params, routing, spec, token_mask)
    block = moe.block_rows(routing.experts.size, spec.num_experts)
    groups = moe.group_rows(routing.experts, spec.num_experts, block)
    rows = moe.to_rows(x, groups)
    hidden = _hidden(ffn, lambda name: moe.grouped_dense(params, name, rows, groups, block))
    hidden = dropout(hidden, *drop)
    each = moe.from_rows(moe.grouped_dense(params, "down", hidden, groups, block), groups)
    out = jnp.einsum("mkd,mk->md", each, routing.weights.astype(x.dtype))
    if ffn.shared is None:
        return out, losses
    rate, key = drop
    key = None if key is None else jax.random.fold_in(key, 1)
    shared = feed_forward(params["shared"], x, ffn.shared, dropout_rate=rate, dropout_key=key)
    if spec.shared_gate:
        shared = jax.nn.sigmoid(dense(params, "shared_gate", x)) * shared
    return out + shared, losses
