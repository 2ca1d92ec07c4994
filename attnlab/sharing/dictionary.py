"""Slots that are mixed: every layer reads a sum of all of them, with coefficients of its own.

Weight by weight W_l = sum_s c[l, s] A_s. The A_s are the slots of a part ("atoms"), the learnt c
are those of the part whose name ends in "_mixture"; each weight of a slot has its own [L, S], as
the dictionaries of q, k, v and o are apart in MASA (Zhussip et al. 2025, arXiv 2508.04581), which
mixes these alone. Here norms and biases are mixed as all else, so that one 1 among zeros is a slot
whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from attnlab.sharing.plan import Plan, mixtures

Weights = dict[str, Any]


@jax.custom_jvp
def mix(c: Float[Array, " S"], atoms: Float[Array, "slots ..."]) -> Array:
    """sum_s c[s] atoms[s].

    What has the coefficient 0 takes no part in it, be it infinite, and what has 1 stands as it is:
    with one 1 among zeros the sum is that atom bit for bit, its -0.0 included. Numbers are
    multiplied and added one by one, so no device rounds them as it rounds products of matrices.

    >>> mix(jnp.array([0.0, 1.0]), jnp.array([[jnp.inf, 5.0], [-0.0, 7.0]])).tolist()
    [-0.0, 7.0]
    """
    if c.shape != atoms.shape[:1]:
        raise ValueError(f"{c.size} coefficients for {len(atoms)} slots; give one for each")
    c = jnp.expand_dims(c, tuple(range(1, atoms.ndim)))
    terms = jnp.where(c == 0, -0.0, c * atoms)  # x + -0.0 is x, also where x is -0.0
    # Not jnp.sum, nor lax.add here, which would be jnp.sum: that begins with 0.0.
    return lax.reduce(terms, np.array(-0.0, terms.dtype), lambda a, b: a + b, (0,))


@mix.defjvp
def _mix_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Of the plain sum: what has the coefficient 0 must learn it, too."""
    (c, atoms), (dc, d_atoms) = primals, tangents
    wide = lambda a: jnp.expand_dims(a, tuple(range(1, atoms.ndim)))
    return mix(c, atoms), jnp.sum(wide(dc) * atoms + wide(c) * d_atoms, axis=0)


def taken(pool: Weights, index: Mapping[str, Any]) -> Weights:
    """part -> what an application reads of a pool [G, ...]: the slot that `index` names or, where
    it names coefficients, the mixture.

    >>> pool = {"scale": jnp.array([2.0, 3.0]), "scale_mixture": jnp.array([[1.0, 10.0]])}
    >>> float(taken(pool, {"scale": 1})["scale"])
    3.0
    >>> float(taken(pool, {"scale": 1, "scale_mixture": 0})["scale"])
    32.0
    """
    mixed = mixtures(index)
    slot = lambda part: jax.tree.map(lambda a: a[index[part]], pool[part])
    return {
        part: jax.tree.map(mix, slot(mixed[part]), pool[part]) if part in mixed else slot(part)
        for part in index
        if part not in mixed.values()
    }


def one_hot(made: Any, plan: Plan, part: str) -> Any:
    """The coefficients with which the mixtures of `part` begin: 1 for the slot that the plan names,
    0 for the others; `made` has their shapes [rows, S].

    So a model starts as the function that it would be without mixtures, with weights of the scale
    that their initialiser chose, every slot in use and every layer free to leave its own.

    >>> plan = Plan(scale=(0, 1, 0), scale_mixture=(0, 1, 2))
    >>> one_hot(jnp.zeros((3, 2)), plan, "scale").tolist()
    [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    slots, rows = plan.indices(part), plan.indices(mixtures(plan)[part])
    named = [slots[rows.index(row)] for row in sorted({*rows})]
    return jax.tree.map(lambda a: jnp.eye(a.shape[1], dtype=a.dtype)[np.array(named)], made)


def check_mixtures(plan: Plan, parts: Iterable[str]) -> None:
    """Raises ValueError where a plan mixes what is not among `parts`, or is told two ways to begin:
    layers of one row of coefficients have one set of weights, so they need one slot."""
    for part, mixture in mixtures(plan).items():
        if part not in parts:
            raise ValueError(
                f"{mixture}: mixed are {', '.join(parts)}, not {part!r}; of keys and values that "
                "layers may read of each other, and of deltas, each has its own: leave it out"
            )
        rows = plan.indices(mixture)
        for row, slot in zip(rows, plan.indices(part), strict=True):
            first = plan.indices(part)[rows.index(row)]
            if slot != first:
                raise ValueError(
                    f"{mixture}: layers with coefficients {row} have the slots {first} and {slot} "
                    f"of {part!r}; one set of coefficients begins at one slot"
                )


def fit_mixture(
    wanted: Sequence[Weights], slots: Sequence[Weights], named: Sequence[int]
) -> tuple[Weights, Weights]:
    """(atoms [S, ...], coefficients [L, S]) that bring the mixtures nearest to what each layer is
    `wanted` to read: these slots where they are that, else least squares, weight by weight
    (truncated SVD of all layers side by side; Eckart and Young 1936).

    Of all atoms that say the same it takes those whose coefficients, orthogonal columns of length
    sqrt(L / S), are nearest to the slots that the plan names.

    >>> layers = [{"q": jnp.array([1.0, 5.0])}, {"q": jnp.array([2.0, 1.0])}]
    >>> atoms, c = fit_mixture([*layers, {"q": jnp.array([3.0, 4.0])}], layers, (0, 1, 0))
    >>> [[round(float(x), 4) for x in mix(row, atoms["q"])] for row in c["q"]]
    [[1.0, 5.0], [2.0, 1.0], [3.0, 4.0]]
    """
    count, start = len(slots), np.eye(len(slots))[np.array(named)]

    def fit(*leaves: Any) -> tuple[Any, Any]:
        rows = np.stack([np.asarray(a, np.float64).reshape(-1) for a in leaves])
        layers, atoms, c = rows[: len(wanted)], rows[len(wanted) :], start
        if not np.array_equal(atoms[np.array(named)], layers):
            left, sizes, right = np.linalg.svd(layers, full_matrices=False)
            room = max(count - len(sizes), 0)  # a vector shorter than there are slots
            left = np.pad(left, ((0, 0), (0, room)))[:, :count]
            right = np.pad(sizes[:, None] * right, ((0, room), (0, 0)))[:count]
            one, _, other = np.linalg.svd(left.T @ start)  # the rotation nearest to it
            turn, length = one @ other, (len(wanted) / count) ** 0.5
            atoms, c = turn.T @ right / length, left @ turn * length
        a = leaves[0]
        return jnp.asarray(atoms.reshape(count, *a.shape), a.dtype), jnp.asarray(c, a.dtype)

    pairs = jax.tree.map(fit, *wanted, *slots)
    pick = lambda i: jax.tree.map(lambda a: a[i], pairs, is_leaf=lambda a: isinstance(a, tuple))
    return pick(0), pick(1)
