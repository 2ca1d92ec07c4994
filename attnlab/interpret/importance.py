"""Head importance: gradients of gates, ablation of one head, pruning of many in some order.

A loss here is a function of a patch (`attnlab.tap.Patches`) that returns one number for each text:
`token_loss` makes one of a model and its texts, and you can write others. `HeadGates` holds a gate
for each head of every application, or of every parameter group, whose heads act in all its layers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.fields import check_choice
from attnlab.models.config import ModelConfig, heads_per_layer
from attnlab.models.embed import check_range
from attnlab.models.forward import NO_INPUTS, ModelInputs, run_model
from attnlab.sharing import Params
from attnlab.tap import Patches

Loss: TypeAlias = Callable[[Patches], Array]
"""patch -> the loss of each text [B]"""
By: TypeAlias = Literal["layer", "group"]
HeadsName: TypeAlias = Literal["heads", "cross.heads", "encoder.heads"]

SUBLAYERS: Mapping[HeadsName, tuple[bool, str]] = {
    "heads": (False, "attention"),
    "cross.heads": (False, "cross"),
    "encoder.heads": (True, "attention"),
}
"""Value -> (of the encoder, sublayer of the plan)."""


class HeadGates(NamedTuple):
    """One gate for each head [R, N]: 1 keeps the head, 0 removes it.

    >>> gates = HeadGates("heads", rows=(0, 0), num_heads=2)  # two layers share one parameter group
    >>> patch = gates.patch(jnp.array([[1.0, 0.0]]))
    >>> gates.shape, patch["heads"](jnp.ones((1, 1, 2, 1)), layer=1).reshape(-1).tolist()
    ((1, 2), [1.0, 0.0])
    """

    name: HeadsName
    """The value that is gated, as `capture` and `patch` name it."""
    rows: tuple[int, ...]
    """The row of every layer: the layer itself, or its parameter group."""
    num_heads: int
    """N"""

    @property
    def shape(self) -> tuple[int, int]:
        """(R, N)"""
        return max(self.rows) + 1, self.num_heads

    def patch(self, gates: Float[ArrayLike, "R *B N"], replacement: Array | None = None) -> Patches:
        """gate * heads + (1 - gate) * replacement, for `patch` of a call.

        Args:
          gates: for every head, or for every head and text.
          replacement: [L, B, T, N, V], or with axes of size 1; None: zeros.
        """
        rows, gates = jnp.asarray(self.rows), jnp.asarray(gates)

        def f(heads: Array, layer: ArrayLike) -> Array:
            gate = gates[rows[layer]][..., None, :, None].astype(heads.dtype)
            return gate * heads + (0 if replacement is None else (1 - gate) * replacement[layer])

        return {self.name: f}


def head_gates(config: ModelConfig, name: HeadsName = "heads", *, by: By = "layer") -> HeadGates:
    """Gates of the heads of a model.

    Args:
      config: of the model.
      name: "cross.heads" and "encoder.heads" are the others of an encoder-decoder.
      by: "layer" gates every application on its own; "group" gates a head of a parameter group in
        all layers of this stack that use the group (not in an encoder that shares it).

    Raises:
      ValueError: heads that the model does not have, another `by`, or layers with different numbers
        of heads.

    >>> config = ModelConfig(sharing="cycle:2")
    >>> head_gates(config).shape, head_gates(config, by="group")
    ((4, 4), HeadGates(name='heads', rows=(0, 1, 0, 1), num_heads=4))
    """
    check_choice("heads", name, get_args(HeadsName))
    is_encoder, sublayer = SUBLAYERS[name]
    check_choice("by", by, get_args(By))
    if name != "heads" and config.encoder is None:
        raise ValueError(f"a model of kind {config.kind!r} has no {name!r}")
    stack = config.encoder_model if is_encoder else config
    rows = stack.plan.indices(sublayer) if by == "group" else tuple(range(stack.num_layers))
    num_heads = heads_per_layer(config) if config.encoder is None else stack.heads.num_heads
    return HeadGates(name, rows, num_heads)


def all_head_gates(config: ModelConfig, *, by: By = "layer") -> tuple[HeadGates, ...]:
    """`head_gates` of every attention of a model: three in an encoder-decoder, else one.

    Args:
      config: of the model.
      by: as in `head_gates`.

    Raises:
      ValueError: as `head_gates`.

    >>> len(all_head_gates(ModelConfig())), len(all_head_gates(ModelConfig(kind="encoder_decoder")))
    (1, 3)
    """
    sublayers = {"cross.heads": "cross" in config.plan, "encoder.heads": config.encoder is not None}
    names = [name for name in SUBLAYERS if sublayers.get(name, True)]
    return tuple(head_gates(config, name, by=by) for name in names)


def token_loss(
    config: ModelConfig,
    params: Params,
    tokens: Int[ArrayLike, "B T"],
    inputs: ModelInputs = NO_INPUTS,
    *,
    targets: Int[ArrayLike, "B T"],
    weights: Float[ArrayLike, "B T"] | Bool[ArrayLike, "B T"] | None = None,
) -> Loss:
    """patch -> mean cross-entropy of each text in nats [B].

    Args:
      config, params: of the model.
      tokens, inputs: of the call; `inputs.patch` is replaced.
      targets: the token to predict at each position; where the weight is 0 it may be any number.
      weights: how much each position counts; None: all alike.

    Raises:
      ValueError: shapes that do not fit, a target that counts and is not in the vocabulary, or a
        model without logits.

    >>> config = ModelConfig(width=8, num_layers=1, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> token_loss(config, params, tokens[:, :-1], targets=tokens[:, 1:])({}).shape
    (2,)
    """
    if config.output.kind == "none":
        raise ValueError("output.kind='none' has no logits; write a loss of its hidden states")
    shape = jnp.shape(tokens)[:2]
    targets = jnp.asarray(targets)
    used = jnp.ones(targets.shape) if weights is None else jnp.asarray(weights)
    for name, a in (("targets", targets), ("weights", used)):
        if a.shape != shape:
            raise ValueError(f"{name} {a.shape} must be {shape}, one for each token")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be token ids, not {targets.dtype}")
    check_range("target", targets, config.vocab_size, used != 0)

    def loss(patch: Patches) -> Array:
        call = dataclasses.replace(inputs, patch=patch)
        logits = run_model(params, tokens, config, call).logits
        assert logits is not None
        logs = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        losses = -jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
        total = jnp.sum(used, axis=1)
        sums = jnp.sum(jnp.where(used != 0, losses * used, 0), axis=1)
        return sums / jnp.where(total > 0, total, 1)

    return loss


def head_importance(loss: Loss, gates: HeadGates) -> Float[Array, "R N"]:
    """E |d loss / d gate| at gate 1, over texts, in one backward pass.

    Michel et al. 2019 (arXiv 1905.10650), section 4.1, who divide each layer by its norm over heads
    before they compare heads of different layers.

    Args:
      loss: patch -> the loss of each text [B], as `token_loss` makes it.
      gates: the heads.

    Raises:
      ValueError: the loss is not one number for each text.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> loss = token_loss(config, params, tokens[:, :-1], targets=tokens[:, 1:])
    >>> gates = head_gates(config)
    >>> head_importance(loss, gates).shape
    (2, 4)
    """
    shape, (rows, heads) = jax.eval_shape(lambda: loss({})).shape, gates.shape
    if len(shape) != 1:
        raise ValueError(f"loss {shape} must be [B], one number for each text: leave out the mean")
    ones = jnp.ones((rows, *shape, heads))
    gradients = jax.grad(lambda gate: jnp.sum(loss(gates.patch(gate))))(ones)
    return jnp.mean(jnp.abs(gradients), axis=1)


def ablation_effects(
    loss: Loss, gates: HeadGates, replacement: Array | None = None
) -> Float[Array, "R N"]:
    """By how much the mean loss grows when one head is removed. R N + 1 forward passes.

    Michel et al. 2019 (arXiv 1905.10650), section 3, with zeros in the place of the head.

    Args:
      loss: patch -> the loss of each text [B], as `token_loss` makes it.
      gates: the heads.
      replacement: what stands in the place of a removed head, [L, B, T, N, V] or with axes of size
        1, such as `mean_heads`; None: zeros.

    Returns:
      For each head the mean loss without it minus that of the whole model.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> loss = token_loss(config, params, tokens[:, :-1], targets=tokens[:, 1:])
    >>> gates = head_gates(config)
    >>> ablation_effects(loss, gates).shape
    (2, 4)
    """
    return losses_without_one(loss, gates, replacement) - jnp.mean(loss({}))


def losses_without_one(
    loss: Loss, gates: HeadGates, replacement: Array | None = None
) -> Float[Array, "R N"]:
    """The mean loss without each head."""
    rows, heads = gates.shape
    without_one = 1 - jnp.eye(rows * heads).reshape(-1, rows, heads)
    losses: Array = jax.lax.map(_mean_loss(loss, gates, replacement), without_one)
    return losses.reshape(rows, heads)


def _mean_loss(loss: Loss, gates: HeadGates, replacement: Array | None) -> Callable[[Array], Array]:
    """gates [R, N] -> mean loss."""
    return lambda gate: jnp.mean(loss(gates.patch(gate, replacement)))


def mean_heads(
    heads: Float[Array, "L B T N V"], mask: Bool[ArrayLike, "B T"] | None = None
) -> Float[Array, "L 1 1 N V"]:
    """The mean of each head over all tokens (that `mask` counts): a replacement for mean ablation.

    Args:
      heads: captured "heads".
      mask: True = count this token.

    Raises:
      ValueError: a mask of another shape.

    >>> mean_heads(jnp.arange(8.0).reshape(1, 2, 2, 1, 2)).tolist()
    [[[[[3.0, 4.0]]]]]
    """
    used = jnp.ones(heads.shape[1:3]) if mask is None else jnp.asarray(mask)
    if used.shape != heads.shape[1:3]:
        raise ValueError(f"mask {used.shape} must be {heads.shape[1:3]}, True = count this token")
    dtype = jnp.promote_types(heads.dtype, jnp.float32)  # of float16 a sum may be infinite
    used = used[..., None, None].astype(dtype)
    total: Array = jnp.sum(jnp.where(used != 0, heads * used, 0), axis=(1, 2), keepdims=True)
    return (total / jnp.sum(used)).astype(heads.dtype)


def resampled_heads(heads: Float[Array, "L B T N V"], shift: int = 1) -> Float[Array, "L B T N V"]:
    """The heads of another text of the batch, token by token: a replacement for resampling
    ablation.

    Args:
      heads: captured "heads".
      shift: how many texts further the other text is.

    Raises:
      ValueError: there is no other text, or `shift` comes back to the same one.

    >>> resampled_heads(jnp.arange(4.0).reshape(1, 2, 2, 1, 1))[0, :, :, 0, 0].tolist()
    [[2.0, 3.0], [0.0, 1.0]]
    """
    if shift % heads.shape[1] == 0:
        raise ValueError(
            f"shift {shift} takes each of {heads.shape[1]} texts for its own replacement; use 1 of "
            "two texts or more"
        )
    return jnp.roll(heads, -shift, axis=1)


class PruningCurves(NamedTuple):
    """Mean losses after the first 0, 1, 2, ... heads of an order are removed, [R N + 1].

    >>> curves = PruningCurves({}, random=jnp.array([[1.0, 2.0, 5.0], [1.0, 4.0, 5.0]]))
    >>> low, mean, high = curves.band(share=1.0)
    >>> low.tolist(), mean.tolist(), high.tolist()
    ([1.0, 2.0, 5.0], [1.0, 3.0, 5.0], [1.0, 4.0, 5.0])
    """

    by_order: dict[str, Array]
    """Name of an order -> its curve."""
    random: Float[Array, "C steps"]
    """Mean losses of C random orders, the baseline."""

    def band(self, share: float = 0.9) -> tuple[Array, Array, Array]:
        """(low quantile, mean, high quantile) of the random orders at each step."""
        ends = jnp.quantile(self.random, jnp.array([(1 - share) / 2, (1 + share) / 2]), axis=0)
        return ends[0], jnp.mean(self.random, axis=0), ends[1]


def pruning_curve(
    loss: Loss, gates: HeadGates, order: Int[Array, "RN"], replacement: Array | None = None
) -> Float[Array, "steps"]:
    """The mean loss after the first 0, 1, ..., R N heads of `order` are removed; head n of row r is
    number r N + n.

    Args:
      loss: patch -> the loss of each text [B], as `token_loss` makes it.
      gates: the heads.
      order: numbers of all heads, the first to remove first, such as of `ascending_order`.
      replacement: what stands in the place of a removed head, [L, B, T, N, V] or with axes of size
        1, such as `mean_heads`; None: zeros.

    Raises:
      ValueError: `order` does not hold every head once.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> loss = token_loss(config, params, tokens[:, :-1], targets=tokens[:, 1:])
    >>> gates = head_gates(config)
    >>> pruning_curve(loss, gates, jnp.arange(8)).shape
    (9,)
    """
    order = _checked_order("order", order, gates)
    size = len(order)
    step_of = jnp.zeros(size, int).at[order].set(jnp.arange(size))
    kept = (step_of >= jnp.arange(size + 1)[:, None]).astype(float).reshape(-1, *gates.shape)
    return jnp.asarray(jax.lax.map(_mean_loss(loss, gates, replacement), kept))


def _checked_order(name: str, order: ArrayLike, gates: HeadGates) -> Array:
    size = gates.shape[0] * gates.shape[1]
    order = jnp.asarray(order)
    known = not isinstance(order, jax.core.Tracer)
    if order.shape != (size,) or (known and not np.array_equal(np.sort(order), np.arange(size))):
        raise ValueError(
            f"{name} {order.shape} must hold each of the {size} heads once, as 0 to {size - 1}; "
            "put those that are not to be removed at its end"
        )
    return order


def compare_pruning_orders(
    loss: Loss,
    gates: HeadGates,
    orders: Mapping[str, Int[Array, "RN"]],
    *,
    key: Array,
    count: int = 10,
    replacement: Array | None = None,
) -> PruningCurves:
    """The curve of each order and of `count` random orders, the baseline.

    Args:
      loss: patch -> the loss of each text [B], as `token_loss` makes it.
      gates: the heads.
      orders: name -> order, as in `pruning_curve`.
      key: random key of the random orders.
      count: how many random orders.
      replacement: what stands in the place of a removed head, [L, B, T, N, V] or with axes of size
        1, such as `mean_heads`; None: zeros.

    Raises:
      ValueError: an order does not hold every head once, or there is no order.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> loss = token_loss(config, params, tokens[:, :-1], targets=tokens[:, 1:])
    >>> gates = head_gates(config)
    >>> orders = {"first to last": jnp.arange(8)}
    >>> curves = compare_pruning_orders(loss, gates, orders, key=jax.random.key(0), count=2)
    >>> curves._fields
    ('by_order', 'random')
    """
    if count < (0 if orders else 1):
        raise ValueError(f"count is {count}: take at least 1 random order, or 0 beside `orders`")
    size = gates.shape[0] * gates.shape[1]
    keys = jax.random.split(key, count)
    random = jax.vmap(lambda key: jax.random.permutation(key, size))(keys)
    checked = [_checked_order(repr(name), order, gates) for name, order in orders.items()]
    every = jnp.stack([*checked, *random])
    curves = jax.lax.map(lambda order: pruning_curve(loss, gates, order, replacement), every)
    return PruningCurves(dict(zip(orders, curves, strict=False)), curves[len(orders) :])


def ascending_order(importance: Float[Array, "R N"]) -> Int[Array, "RN"]:
    """Indices of the heads, the least important first.

    >>> ascending_order(jnp.array([[0.3, 0.1], [0.0, 0.2]])).tolist()
    [2, 1, 3, 0]
    """
    return jnp.argsort(importance.reshape(-1), stable=True)


def greedy_order(
    loss: Loss, gates: HeadGates, replacement: Array | None = None
) -> tuple[Int[Array, "RN"], Float[Array, "steps"]]:
    """(order, its curve): each step removes the head without which the mean loss is lowest, given
    those removed before. (R N)^2 forward passes.

    Args:
      loss: patch -> the loss of each text [B], as `token_loss` makes it.
      gates: the heads.
      replacement: what stands in the place of a removed head, [L, B, T, N, V] or with axes of size
        1, such as `mean_heads`; None: zeros.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> loss = token_loss(config, params, tokens[:, :-1], targets=tokens[:, 1:])
    >>> gates = head_gates(config)
    >>> order, curve = greedy_order(loss, gates)
    >>> sorted(order.tolist()), curve.shape
    ([0, 1, 2, 3, 4, 5, 6, 7], (9,))
    """
    rows, heads = gates.shape
    size, mean_loss = rows * heads, _mean_loss(loss, gates, replacement)

    def run(gate: Array) -> Array:
        return mean_loss(gate.reshape(rows, heads))

    def step(gate: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        losses = jax.lax.map(run, gate * (1 - jnp.eye(size)))
        best = jnp.lexsort((losses, gate == 0))[0]  # of those kept, also where losses are infinite
        return gate.at[best].set(0), (best, losses[best])

    _, (order, losses) = jax.lax.scan(step, jnp.ones(size), length=size)
    return order, jnp.concatenate([run(jnp.ones(size))[None], losses])


def least_important(importance: Float[ArrayLike, "R N"], count: int) -> dict[int, list[int]]:
    """Row -> its `count` least important heads, as `transforms.remove_heads` takes them.

    Args:
      importance: of `head_importance` or `ablation_effects`; the rows are layers or parameter
        groups, as `by` of `remove_heads` says.
      count: heads of each row.

    Raises:
      ValueError: a row does not have so many heads, or `count` is negative.

    >>> least_important(jnp.array([[0.3, 0.1, 0.2], [0.0, 0.2, 0.1]]), 2)
    {0: [1, 2], 1: [0, 2]}
    """
    order = np.argsort(np.asarray(importance), axis=1, kind="stable")
    if not 0 <= count <= order.shape[1]:
        raise ValueError(f"count is {count}; a row has 0 to {order.shape[1]} heads to remove")
    return {row: sorted(map(int, heads)) for row, heads in enumerate(order[:, :count])}
