"""Mixtures of experts: routing of tokens, and products with a matrix for each group of rows.

Rows are sorted by expert, so that an expert's rows lie together. On a GPU or TPU their products are
`jax.lax.ragged_dot`. On a CPU that computes every row with every expert (JAX 0.10: 14 times a dense
product for 8 experts), so a loop over blocks of rows is used instead.

Time relative to a dense FFN of equal active FLOPs, medians of 11 interleaved rounds on 2 cores,
forward and with gradients: 1.3 and 1.4 times at width 512 with 2 of 8 experts of width 1024 and
4096 tokens. Small experts cost more: 1.7 and 1.7 at width 256 with 4 of 16 experts of 256 and 2048
tokens, 2.1 and 2.3 with 8 of 64 of 128. Not measured on a GPU.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.blocks import same_varying_axes
from attnlab.heads.weights import Params
from attnlab.models.specs import Experts
from attnlab.tap import Tap

BALANCE = "expert_balance"
"""Name of the auxiliary loss."""
BIAS_STEP = 1e-3
"""Size of the gradient of the balance bias: the speed of DeepSeek-V3, in plain gradient descent
with a learning rate of 1."""


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Int[Array, "M k"]
    weights: Float[Array, "M k"]
    """Factor of the output of each of them."""
    scores: Float[Array, "M E"]
    """Of all experts."""


def route(params: Params, logits: Float[Array, "M E"], spec: Experts) -> Routing:
    """The `top_k` experts of each token and their weights.

        s = softmax(logits) or sigmoid(logits);  chosen by s + balance_bias
        weights = scale * s / (sum of the chosen s, if `normalize`)

    With `num_groups` above 1 a token chooses among the experts of its `top_groups` groups, those
    with the largest sum of their two largest scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
      params: with "balance_bias" [E] where the spec has one.
      logits: x W_router, in float32 at least.
      spec: the experts.

    >>> spec = Experts(num_experts=3, top_k=2, scores="sigmoid")
    >>> route({}, jnp.array([[0.0, -9.0, 0.0]]), spec).weights.tolist()
    [[0.5, 0.5]]
    """
    scores = jax.nn.softmax(logits) if spec.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores
    if spec.balance_bias:
        choice = scores + lax.stop_gradient(params["balance_bias"].astype(scores.dtype))
    if spec.num_groups > 1:
        grouped = choice.reshape(-1, spec.num_groups, spec.num_experts // spec.num_groups)
        best = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        chosen = lax.top_k(best, spec.top_groups)[1]
        allowed = jnp.any(chosen[..., None] == jnp.arange(spec.num_groups), axis=1)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    experts = lax.top_k(choice, spec.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if spec.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts, spec.scale * weights, scores)


def balance_loss(
    params: Params, routing: Routing, spec: Experts, token_mask: Bool[Array, " M"] | None = None
) -> Float[Array, ""]:
    """balance * E * sum_e f_e P_e, which is `balance` where all experts are used equally.

    f_e is the share of choices that fall on expert e, P_e its mean score, the scores of a token
    divided by their sum (Fedus et al. 2021, arXiv 2101.03961, section 2.2). Its gradient reaches
    the router through P_e alone.

    For a balance bias it adds 0, with the gradient 0.001 sign(f_e - 1/E): gradient descent makes
    experts that are used more often than the mean less likely to be chosen, by the rule of
    DeepSeek-V3 (arXiv 2408.15664).

    Args:
      params: with "balance_bias" [E] where the spec has one.
      routing: of M tokens.
      spec: the experts.
      token_mask: True = a token; padding does not count.
    """
    used = jnp.sum(jax.nn.one_hot(routing.experts, spec.num_experts), axis=1) / spec.top_k
    totals = jnp.sum(routing.scores, axis=-1, keepdims=True)
    scores = routing.scores / jnp.where(totals > 0, totals, 1)  # sigmoids may all be 0
    if token_mask is None:
        shares, means = jnp.mean(used, axis=0), jnp.mean(scores, axis=0)
    else:
        kept = token_mask[:, None]
        count = jnp.maximum(jnp.sum(kept), 1)
        shares, means = (jnp.sum(jnp.where(kept, a, 0), axis=0) / count for a in (used, scores))
    loss = spec.balance * spec.num_experts * jnp.sum(shares * means)
    if spec.balance_bias:
        bias = params["balance_bias"]
        direction = lax.stop_gradient(jnp.sign(shares - 1 / spec.num_experts))
        loss += BIAS_STEP * jnp.sum((bias - lax.stop_gradient(bias)) * direction)
    return loss


def tap_routing(tap: Tap, routing: Routing, shape: tuple[int, ...]) -> Routing:
    """The routing after a tap has taken "expert_weights" [..., E], 0 for experts not used."""
    if not tap.wants("expert_weights"):
        return routing
    rows = jnp.arange(len(routing.experts))[:, None]
    dense = jnp.zeros_like(routing.scores).at[rows, routing.experts].set(routing.weights)
    dense = tap("expert_weights", dense.reshape(*shape, -1)).reshape(dense.shape)
    return routing._replace(weights=jnp.take_along_axis(dense, routing.experts, axis=-1))


# Rows sorted by expert ----------------------------------------------------------------------------


class Groups(NamedTuple):
    """M tokens with k experts each, as R rows sorted by expert."""

    source: Int[Array, " R"]
    """For each row the index m k + i of a token and choice; M k for padding rows."""
    target: Int[Array, "M k"]
    """For each token and choice its row."""
    starts: Int[Array, " E"]
    """First row of each expert."""
    sizes: Int[Array, " E"]
    """Number of rows of each expert."""


def group_rows(experts: Int[Array, "M k"], num_experts: int, block: int = 0) -> Groups:
    """The rows of each expert, followed by `block` padding rows.

    >>> group_rows(jnp.array([[2, 0], [0, 1]]), 3).source.tolist()
    [1, 2, 3, 0]
    """
    flat = experts.reshape(-1)
    source = jnp.argsort(flat)
    target = jnp.zeros_like(source).at[source].set(jnp.arange(len(flat), dtype=source.dtype))
    sizes = jnp.bincount(flat, length=num_experts)
    source = jnp.concatenate([source, jnp.full(block, len(flat), source.dtype)])
    return Groups(source, target.reshape(experts.shape), jnp.cumsum(sizes) - sizes, sizes)


def to_rows(x: Float[Array, "M D"], groups: Groups) -> Float[Array, "R D"]:
    """The token of each row."""
    index = groups.source // groups.target.shape[1]
    return _gather(*same_varying_axes((x, index, groups.target)))


def from_rows(rows: Float[Array, "R D"], groups: Groups) -> Float[Array, "M k D"]:
    """The row of each token and choice."""
    found = _gather(rows, groups.target.reshape(-1), groups.source[:, None])
    return found.reshape(*groups.target.shape, rows.shape[-1])


@jax.custom_vjp
def _gather(a: Array, index: Array, inverse: Array) -> Array:
    """a[index], zeros for an index past the end; `inverse` [len(a), n] are the places of each row
    of a in the result, so that the gradient is a gather too and not a scatter."""
    return jnp.take(a, index, axis=0, mode="fill", fill_value=0)


def _gather_forward(a: Array, index: Array, inverse: Array) -> tuple[Array, Array]:
    return _gather(a, index, inverse), inverse


def _gather_backward(inverse: Array, grad: Array) -> tuple[Array, None, None]:
    each = jnp.take(grad, inverse, axis=0, mode="fill", fill_value=0)
    return jnp.sum(each, axis=1), None, None


_gather.defvjp(_gather_forward, _gather_backward)


# Products -----------------------------------------------------------------------------------------

Product: TypeAlias = Callable[[Array, Array, Array, Array], Array]


def block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a block of the loop on a CPU; 0 elsewhere, where rows are not divided.

    Half of an expert's mean number of rows, a power of two from 8 to 128: a small block computes
    few rows of the next expert, a large one has fast products.
    """
    if jax.default_backend() != "cpu":
        return 0
    half = max(1, num_rows // (2 * num_experts))
    return min(128, max(8, 1 << (half - 1).bit_length()))


def grouped_dense(
    params: Params, name: str, rows: Float[Array, "R I"], groups: Groups, block: int
) -> Float[Array, "R O"]:
    """row W_e + b_e with the expert e of each row; W = params[name] [E, I, O].

    It has first derivatives in reverse mode alone.

    Args:
      params: with the bias [E, O] in `params[name + "_bias"]`, if there is one.
      name: of the weight.
      rows: sorted by expert; the last `block` are padding.
      groups: the rows of each expert.
      block: 0 computes with `jax.lax.ragged_dot`, another number with a loop over so many rows.
    """
    arrays = rows, params[name].astype(rows.dtype), groups.starts, groups.sizes
    out = _grouped(block, *same_varying_axes(arrays))
    bias = params.get(f"{name}_bias")
    if bias is None:
        return out
    # A product, since the gradient of a look-up is a scatter.
    past = groups.starts[:, None] <= jnp.arange(len(rows))
    before = jnp.arange(len(rows)) < (groups.starts + groups.sizes)[:, None]
    return out + (past & before).astype(rows.dtype).T @ bias.astype(rows.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(block: int, rows: Array, w: Array, starts: Array, sizes: Array) -> Array:
    return _products(block, False)(rows, w, starts, sizes)


def _grouped_forward(
    block: int, rows: Array, w: Array, starts: Array, sizes: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    return _grouped(block, rows, w, starts, sizes), (rows, w, starts, sizes)


def _grouped_backward(
    block: int, saved: tuple[Array, Array, Array, Array], grad: Array
) -> tuple[Array, Array, None, None]:
    rows, w, starts, sizes = saved
    d_rows = _products(block, True)(grad, w, starts, sizes)
    return d_rows, _weight_gradient(block)(rows, grad, starts, sizes), None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


@functools.cache
def _products(block: int, transposed: bool) -> Product:
    """(rows, w, starts, sizes) -> rows W_e, or rows W_e^T.

    Under `vmap` one after the other: the loops have different lengths, and JAX has no gradient of a
    ragged product under `vmap`.
    """

    def blocked(rows: Array, w: Array, starts: Array, sizes: Array) -> Array:
        width = w.shape[1 if transposed else 2]

        def of_expert(i: int, out: Array) -> Array:
            one = lax.dynamic_index_in_dim(w, experts[i], keepdims=False)
            one = one.T if transposed else one

            def of_block(j: int, out: Array) -> Array:
                # The last block computes rows of the next expert too, who writes them again.
                first = starts[experts[i]] + j * block
                made = lax.dynamic_slice_in_dim(rows, first, block) @ one
                return lax.dynamic_update_slice_in_dim(out, made, first, axis=0)

            new: Array = lax.fori_loop(0, -(-sizes[experts[i]] // block), of_block, out)
            return new

        experts, count = _used(sizes)
        _, empty = same_varying_axes((starts, jnp.zeros((len(rows), width), rows.dtype)))
        filled: Array = lax.fori_loop(0, count, of_expert, empty)
        return filled

    def ragged(rows: Array, w: Array, starts: Array, sizes: Array) -> Array:
        return lax.ragged_dot(rows, w.swapaxes(1, 2) if transposed else w, sizes)

    product: Product = jax.custom_batching.sequential_vmap(jax.jit(blocked if block else ragged))
    return product


@functools.cache
def _weight_gradient(block: int) -> Product:
    """(rows, grad, starts, sizes) -> the gradient of the weights, rows^T grad of each expert."""

    def blocked(rows: Array, grad: Array, starts: Array, sizes: Array) -> Array:
        inside, outside = rows.shape[1], grad.shape[1]

        def of_expert(i: int, out: Array) -> Array:
            expert = experts[i]
            end = starts[expert] + sizes[expert]

            def of_block(j: int, total: Array) -> Array:
                first = starts[expert] + j * block
                x = lax.dynamic_slice_in_dim(rows, first, block)
                mine = first + jnp.arange(block) < end
                g = jnp.where(mine[:, None], lax.dynamic_slice_in_dim(grad, first, block), 0)
                return total + lax.dot(x.T, g, preferred_element_type=total.dtype)

            zeros = jnp.zeros_like(out[0], jnp.promote_types(rows.dtype, jnp.float32))
            total = lax.fori_loop(0, -(-sizes[expert] // block), of_block, zeros)
            new: Array = lax.dynamic_update_index_in_dim(
                out, total.astype(out.dtype), expert, axis=0
            )
            return new

        experts, count = _used(sizes)
        zeros = jnp.zeros((len(sizes), inside, outside), rows.dtype)
        _, empty = same_varying_axes((starts, zeros))
        filled: Array = lax.fori_loop(0, count, of_expert, empty)
        return filled

    def ragged(rows: Array, grad: Array, starts: Array, sizes: Array) -> Array:
        zeros = jnp.zeros((len(sizes), rows.shape[1], grad.shape[1]), rows.dtype)
        _, w = same_varying_axes((starts, zeros))
        _, pull = jax.vjp(lambda w: lax.ragged_dot(rows, w, sizes), w)
        gradient: Array = pull(grad)[0]
        return gradient

    product: Product = jax.custom_batching.sequential_vmap(jax.jit(blocked if block else ragged))
    return product


def _used(sizes: Int[Array, " E"]) -> tuple[Int[Array, " E"], Int[Array, ""]]:
    """The experts with rows, ascending, and how many there are."""
    has_rows = sizes > 0
    return jnp.argsort(~has_rows), jnp.sum(has_rows)
