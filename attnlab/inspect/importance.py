"""Which heads are needed? Gates on heads: their gradients, one head taken away, many in some order.

A loss here is a function of an edit (`observe.Edit`) that gives one number for each text:
`token_loss` makes one of a model and its texts, any other will do. `Gates` says which heads are
meant: of every application, or of every parameter group, whose head goes in all its layers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from attnlab.model.config import ModelConfig
from attnlab.model.kinds import heads_in_a_layer
from attnlab.names import find
from attnlab.observe import Edit

Loss = Callable[[Edit], Array]
"""edit -> the loss of each text [B]"""

HEADS = {
    "heads": (False, "attention"),
    "cross.heads": (False, "cross"),
    "encoder.heads": (True, "attention"),
}
"""Name in `observe.NAMES` -> is it the encoder's, and the part of the plan."""


class Gates(NamedTuple):
    """One number for each head that is meant, [R, N]: 1 leaves it, 0 takes it away."""

    name: str
    rows: tuple[int, ...]
    """The row of every layer: its number, or that of its parameter group"""
    num_heads: int

    @property
    def shape(self) -> tuple[int, int]:
        return max(self.rows) + 1, self.num_heads

    def edit(self, gate: Float[Array, "R *B N"], instead: Any = None) -> Edit:
        """gate * heads + (1 - gate) * instead, for `edit` of a call; `instead` [L, B, T, N, V], or
        with axes of size 1, is what stands in the place of a head (None: zeros)."""
        rows, gate = jnp.asarray(self.rows), jnp.asarray(gate)

        def f(heads: Array, layer: Any) -> Array:
            own = gate[rows[layer]][..., None, :, None].astype(heads.dtype)
            return own * heads + (0 if instead is None else (1 - own) * instead[layer])

        return {self.name: f}


def gates_of(config: ModelConfig, name: str = "heads", *, by: str = "layer") -> Gates:
    """The heads of a model: by "layer" (every application of its own) or by "group" (a group of
    shared weights is one, in all layers that use it). `name` "cross.heads" or "encoder.heads" are
    the others of an encoder-decoder.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(num_layers=4, num_heads=2, plan="cycle:2")
    >>> gates_of(config).shape, gates_of(config, by="group")
    ((4, 2), Gates(name='heads', rows=(0, 1, 0, 1), num_heads=2))
    """
    encoder, part = find("heads", name, HEADS)
    find("way to count", by, {"layer": 1, "group": 1})
    if name != "heads" and config.kind != "encoder_decoder":
        raise ValueError(f"a {config.kind} has no {name!r}")
    plan = config.encoder_layer_plan if encoder else config.layer_plan
    if part not in plan:
        raise ValueError(
            f"a model with cross={config.cross!r} has no {name!r}: its 'heads' read both texts"
        )
    rows = plan.distinct_parameters(part) if by == "group" else tuple(range(plan.num_layers))
    both = config.kind == "encoder_decoder"
    own = config.as_encoder if encoder else config
    return Gates(name, rows, own.num_heads if both else heads_in_a_layer(config))


def token_loss(
    config: ModelConfig,
    params: Any,
    *texts: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    weights: Bool[Array, "B T"] | None = None,
    **options: Any,
) -> Loss:
    """edit -> [B] the mean of -ln p(target) over the tokens of a text, in nats; `weights` say which
    count, and how much. `options` go into the call (padding_mask, ...).

    >>> config = ModelConfig(width=8, num_heads=2, num_layers=1, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> loss = token_loss(config, params, tokens[:, :-1], targets=tokens[:, 1:])
    >>> loss({}).shape
    (2,)
    """
    model, targets = config.build(), jnp.asarray(targets)
    used = jnp.ones(targets.shape) if weights is None else jnp.asarray(weights)

    def loss(edit: Edit) -> Array:
        logits = model.apply({"params": params}, *texts, edit=edit, **options)
        logs = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        each = -jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(each * used, axis=1) / jnp.maximum(jnp.sum(used, axis=1), 1)

    return loss


def gate_gradients(loss: Loss, gates: Gates) -> Float[Array, "R N"]:
    """E |d loss / d gate| at gate 1, over texts: how much the loss of a text would feel that head
    (Michel et al. 2019, arXiv 1905.10650, section 4.1). One backward pass. There each layer is
    divided by its own norm over heads before heads of different layers are compared.
    """
    texts = jax.eval_shape(lambda: loss({})).shape[0]
    rows, heads = gates.shape
    ones = jnp.ones((rows, texts, heads))
    found = jax.grad(lambda gate: jnp.sum(loss(gates.edit(gate))))(ones)
    return jnp.mean(jnp.abs(found), axis=1)


def ablations(loss: Loss, gates: Gates, instead: Any = None) -> Float[Array, "R N"]:
    """How much the mean loss grows when one head is taken away: to zero, or to `instead`
    (`mean_values`, `other_values`)."""
    rows, heads = gates.shape
    one = lambda gate: jnp.mean(loss(gates.edit(gate, instead)))
    away = 1 - jnp.eye(rows * heads).reshape(-1, rows, heads)
    return jax.lax.map(one, away).reshape(rows, heads) - jnp.mean(loss({}))


def mean_values(
    heads: Float[Array, "L B T N V"], mask: Bool[Array, "B T"] | None = None
) -> Float[Array, "L 1 1 N V"]:
    """What a head makes on average, over the tokens of all texts (those `mask` counts): `instead`
    for a head that keeps its bias and says nothing of the text. `heads` is what a model shows.

    >>> mean_values(jnp.arange(8.0).reshape(1, 2, 2, 1, 2)).tolist()
    [[[[[3.0, 4.0]]]]]
    """
    used = jnp.ones(heads.shape[1:3]) if mask is None else jnp.asarray(mask)
    used = used[..., None, None].astype(heads.dtype)
    return jnp.sum(heads * used, axis=(1, 2), keepdims=True) / jnp.sum(used)


def other_values(heads: Float[Array, "L B T N V"], shift: int = 1) -> Float[Array, "L B T N V"]:
    """What a head makes of another text of the batch, token by token: `instead` for resampling."""
    if heads.shape[1] < 2:
        raise ValueError("there is one text; another one's values need a batch of two or more")
    return jnp.roll(heads, shift, axis=1)


class Curves(NamedTuple):
    """Mean losses after the first 0, 1, 2, ... heads of an order went, [R N + 1]."""

    named: dict[str, Array]
    random: Float[Array, "C steps"]
    """Of C orders by chance: what an order has to beat"""

    def band(self, share: float = 0.9) -> tuple[Array, Array, Array]:
        """(lowest, mean, highest) of so many of the random orders, at each step."""
        ends = jnp.quantile(self.random, jnp.array([(1 - share) / 2, (1 + share) / 2]), axis=0)
        return ends[0], jnp.mean(self.random, axis=0), ends[1]


def pruning_curve(
    loss: Loss, gates: Gates, order: Int[Array, "RN"], instead: Any = None
) -> Float[Array, "steps"]:
    """The mean loss after the first 0, 1, ..., R N heads of `order` went; head n of row r is number
    r N + n."""
    return jax.lax.map(lambda gate: jnp.mean(loss(gates.edit(gate, instead))), _steps(gates, order))


def compare_orders(
    loss: Loss,
    gates: Gates,
    orders: Mapping[str, Int[Array, "RN"]],
    *,
    key: Array,
    count: int = 10,
    instead: Any = None,
) -> Curves:
    """The curve of each order, beside `count` orders by chance: at each step an order is as good as
    it is below these (Michel et al. 2019 show none)."""
    size = gates.shape[0] * gates.shape[1]
    chance = jax.vmap(lambda key: jax.random.permutation(key, size))(jax.random.split(key, count))
    every = [*map(jnp.asarray, orders.values()), *chance]
    run = lambda order: pruning_curve(loss, gates, order, instead)
    curves = jax.lax.map(run, jnp.stack(every))
    return Curves(dict(zip(orders, curves, strict=False)), curves[len(orders) :])


def order_by(importance: Float[Array, "R N"]) -> Int[Array, "RN"]:
    """The least important first.

    >>> order_by(jnp.array([[0.3, 0.1], [0.0, 0.2]])).tolist()
    [2, 1, 3, 0]
    """
    return jnp.argsort(importance.reshape(-1), stable=True)


def greedy_order(
    loss: Loss, gates: Gates, instead: Any = None
) -> tuple[Int[Array, "RN"], Float[Array, "steps"]]:
    """(order, its curve): each step takes the head whose going leaves the lowest mean loss, all
    those before it gone. (R N)^2 forward passes."""
    rows, heads = gates.shape
    size = rows * heads
    run = lambda gate: jnp.mean(loss(gates.edit(gate.reshape(rows, heads), instead)))

    def step(gate: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        tried = jax.lax.map(run, gate * (1 - jnp.eye(size)))
        best = jnp.argmin(jnp.where(gate > 0, tried, jnp.inf))
        return gate.at[best].set(0), (best, tried[best])

    _, (order, losses) = jax.lax.scan(step, jnp.ones(size), length=size)
    return order, jnp.concatenate([run(jnp.ones(size))[None], losses])


def weakest(importance: Float[Array, "R N"], count: int) -> dict[int, list[int]]:
    """Row -> its `count` least important heads, as `transforms.remove_heads` takes them.

    >>> weakest(jnp.array([[0.3, 0.1, 0.2], [0.0, 0.2, 0.1]]), 2)
    {0: [1, 2], 1: [0, 2]}
    """
    order = np.argsort(np.asarray(importance), axis=1, kind="stable")[:, :count]
    return {row: sorted(map(int, heads)) for row, heads in enumerate(order)}


def _steps(gates: Gates, order: Array) -> Array:
    """[R N + 1, R, N] the gates after each step."""
    size = len(order)
    places = jnp.zeros(size, int).at[order].set(jnp.arange(size))
    return (places >= jnp.arange(size + 1)[:, None]).astype(float).reshape(-1, *gates.shape)
