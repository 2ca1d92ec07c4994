"""Score modifications: functions of a score and its indices that attention applies block by block.

A modification is a frozen dataclass registered as a pytree. Its arrays are leaves, so gradients
flow to them; static fields are marked as such. A user's own is one subclass of `ScoreMod`.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from attnlab.ops import with_rank


class ScoreMod(abc.ABC):
    """One modification of attention scores: a frozen dataclass registered as a pytree.

    Modifications are applied in order, after scale, bias and `logits_soft_cap`, before talking
    heads and the mask.

    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class Distance(ScoreMod):
    ...     slope: ArrayLike
    ...
    ...     def apply(self, scores, *, head, query, key):
    ...         return scores - self.slope * abs(query - key)
    >>> from attnlab import dot_product_attention
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x, score_mods=[Distance(0.5)]).shape
    (1, 3, 2, 4)
    """

    @abc.abstractmethod
    def apply(self, scores: Array, *, head: Array, query: Array, key: Array) -> Array:
        """The new scores of a block.

        Each new score must depend only on the old score at its place and on its three indices: a
        backend calls this on blocks of any size, and in the backward pass again.

        Args:
          scores: [B, N, t, s] in float32 or more.
          head, query, key: integer arrays that broadcast against `scores`: the query head and the
            positions, counted from the start of the whole call.

        Returns:
          An array of the shape of `scores`.
        """

    def validate(self, num_heads: int) -> None:
        """Raises ValueError if the arrays do not fit a call with this number of query heads."""
        del num_heads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftCap(ScoreMod):
    """cap tanh(score / cap), with one cap or one for each query head (learnt or fixed).

    The scores stay between -cap and cap (Gemma 2, arXiv 2408.00118, section 2).

    Args:
      cap: a number, or an array [N]; above 0.

    >>> SoftCap(2.0).apply(jnp.array([[[[100.0]]]]), head=0, query=0, key=0).item()
    2.0
    """

    cap: ArrayLike

    def apply(self, scores: Array, *, head: Array, query: Array, key: Array) -> Array:
        cap = jnp.asarray(self.cap)
        cap = with_rank(cap[head], scores.ndim) if cap.ndim else cap
        # A bias of -inf would make the gradient of the cap 0 * inf.
        return cap * jnp.tanh(jnp.clip(scores, -1e18, 1e18) / cap)

    def validate(self, num_heads: int) -> None:
        _check_shape("SoftCap.cap", self.cap, ((), (num_heads,)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ALiBi(ScoreMod):
    """score + slope_n (key - query): attention with linear biases.

    Press et al. 2022, arXiv 2108.12409, equation 1. Meant for causal attention, where key <= query.

    Args:
      slopes: [N], usually `alibi_slopes(N)`.

    >>> mod, zeros = ALiBi(jnp.array([0.5])), jnp.zeros((1, 1, 1, 3))
    >>> mod.apply(zeros, head=jnp.array([[[0]]]), query=2, key=jnp.arange(3)).tolist()
    [[[[-1.0, -0.5, 0.0]]]]
    """

    slopes: ArrayLike

    def apply(self, scores: Array, *, head: Array, query: Array, key: Array) -> Array:
        distance = (key - query) * jnp.ones((), scores.dtype)
        slopes = jnp.asarray(self.slopes)[head]
        return scores + with_rank(slopes, scores.ndim) * with_rank(distance, scores.ndim)

    def validate(self, num_heads: int) -> None:
        _check_shape("ALiBi.slopes", self.slopes, ((num_heads,),))


def alibi_slopes(num_heads: int) -> Float[Array, " N"]:
    """The published slopes of ALiBi: 2^(-8 i / N) for i = 1..N where N is a power of two.

    For other N the slopes of the largest power of two P below N, then every second slope of 2P
    (Press et al. 2022, arXiv 2108.12409, section 3 and its code).

    Args:
      num_heads: N, at least 1.

    Returns:
      [N], the largest slope first among those of P.

    Raises:
      ValueError: `num_heads` is below 1.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, not {num_heads}")
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    more = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return jnp.asarray([*slopes, *more[: num_heads - power]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias(ScoreMod):
    """score + table[n, bucket(key - query)]: a learnt bias per head and distance (T5).

    Raffel et al. 2020, arXiv 1910.10683, section 2.1; the buckets are `relative_buckets`.

    Args:
      table: [N, buckets].
      max_distance: distances from here on share a bucket.
      two_sided: True gives later keys half of the buckets; False puts them all into bucket 0.

    >>> mod = RelativeBias(jnp.arange(4.0)[None], max_distance=8, two_sided=False)
    >>> zeros, head = jnp.zeros((1, 1, 1, 3)), jnp.zeros((1, 1, 1), int)
    >>> mod.apply(zeros, head=head, query=jnp.array(2), key=jnp.arange(3)[None]).tolist()
    [[[[2.0, 1.0, 0.0]]]]
    """

    table: ArrayLike
    max_distance: int = dataclasses.field(default=128, metadata={"static": True})
    two_sided: bool = dataclasses.field(default=True, metadata={"static": True})

    def apply(self, scores: Array, *, head: Array, query: Array, key: Array) -> Array:
        table = jnp.asarray(self.table)
        buckets = relative_buckets(
            key - query,
            num_buckets=table.shape[1],
            max_distance=self.max_distance,
            two_sided=self.two_sided,
        )
        # [N, t, s]: the heads first, so that the gradient is summed over the batch before it.
        return scores + with_rank(table[jnp.ravel(head)][:, buckets], scores.ndim)

    def validate(self, num_heads: int) -> None:
        shape = jnp.shape(self.table)
        least = 4 if self.two_sided else 2
        if len(shape) != 2 or shape[0] != num_heads or shape[1] < least or shape[1] % (least // 2):
            raise ValueError(
                f"RelativeBias.table {shape} must be [N, buckets] with N = {num_heads} query heads "
                f"and at least {least} buckets" + ", an even number" * self.two_sided
            )
        exact = shape[1] // least
        if self.max_distance <= exact:
            raise ValueError(
                f"RelativeBias.max_distance {self.max_distance} must be above {exact} for {shape}"
            )


def relative_buckets(
    distance: Int[Array, "..."], *, num_buckets: int, max_distance: int, two_sided: bool
) -> Int[Array, "..."]:
    """Key position - query position -> a bucket (T5: Raffel et al. 2020, arXiv 1910.10683).

    Half the buckets hold one distance each. The width of the others grows as the logarithm of the
    distance, up to `max_distance`.

    Args:
      distance: key position - query position.
      num_buckets: number of buckets.
      max_distance: larger distances are in the last bucket.
      two_sided: True gives later keys half of the buckets; False puts them all into bucket 0.

    Returns:
      Buckets from 0 to num_buckets - 1, of the shape of `distance`.

    >>> relative_buckets(jnp.arange(-4, 3), num_buckets=8, max_distance=20, two_sided=True).tolist()
    [2, 2, 2, 1, 0, 5, 6]
    """
    ahead = jnp.zeros_like(distance)
    if two_sided:
        num_buckets //= 2
        ahead = num_buckets * (distance > 0)
        far = jnp.abs(distance)
    else:
        far = jnp.maximum(-distance, 0)
    exact = num_buckets // 2
    # In float32 whatever the model's precision: the edges are those of the published code.
    steps = jnp.log(jnp.maximum(far, 1).astype(jnp.float32) / exact)
    steps = steps / math.log(max_distance / exact) * (num_buckets - exact)
    grown = jnp.minimum(exact + steps.astype(distance.dtype), num_buckets - 1)
    return ahead + jnp.where(far < exact, far, grown)


def apply_score_mods(
    mods: Sequence[ScoreMod], scores: Array, *, head: Array, query: Array, key: Array
) -> Array:
    """The modifications in order. Raises ValueError if one changes the shape of the scores."""
    for mod in mods:
        new = mod.apply(scores, head=head, query=query, key=key)
        if new.shape != scores.shape:
            name = type(mod).__name__
            raise ValueError(f"{name}.apply returned shape {new.shape} for scores {scores.shape}")
        scores = new.astype(scores.dtype)
    return scores


def check_sequence(mods: object) -> None:
    """Raises TypeError for what is no sequence, such as one modification."""
    if isinstance(mods, ScoreMod) or not isinstance(mods, Sequence):
        raise TypeError(f"score_mods must be a sequence of ScoreMod, not {type(mods).__name__}")


def validate_score_mods(mods: Sequence[ScoreMod], num_heads: int) -> tuple[ScoreMod, ...]:
    """The modifications with arrays as leaves, or an error before anything runs."""
    check_sequence(mods)
    for i, mod in enumerate(mods):
        name = f"score_mods[{i}] ({type(mod).__name__})"
        if not isinstance(mod, ScoreMod):
            raise TypeError(f"{name} must be an instance of a subclass of ScoreMod")
        if jax.tree_util.all_leaves([mod]):
            raise TypeError(
                f"{name} is no pytree; decorate it with jax.tree_util.register_dataclass"
            )
        mod.validate(num_heads)
    return tuple(jax.tree.map(jnp.asarray, mod) for mod in mods)


def _check_shape(name: str, array: ArrayLike, allowed: tuple[tuple[int, ...], ...]) -> None:
    if jnp.shape(array) not in allowed:
        shapes = " or ".join(map(str, allowed))
        raise ValueError(f"{name} {jnp.shape(array)} must have shape {shapes}, one per query head")
