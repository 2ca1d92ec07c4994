"""Mixed parameter groups: each layer uses a weighted sum over all groups of a sublayer.

For every weight separately, W_l = sum_g c[l, g] A_g, with the stacked parameters A [G, ...] and
trainable coefficients c [L, G]. A sublayer whose name ends in "_mixture" holds the coefficients.
MASA (Zhussip et al. 2025, arXiv 2508.04581) mixes the projections q, k, v and o, each with its own
dictionary; here norms and biases are mixed too, so that a coefficient of 1 among zeros selects a
whole group.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from attnlab.sharing.plan import Plan, mixtures

PyTree: TypeAlias = Any
"""Arrays in any nesting of containers that JAX knows. The caller chooses, so no type is closer."""

Params: TypeAlias = dict[str, PyTree]
"""sublayer, or weight -> its parameters"""


@jax.custom_jvp
def mix(coefficients: Float[Array, " G"], groups: Float[Array, "G ..."]) -> Array:
    """sum_g coefficients[g] groups[g], exact where one coefficient is 1 and the others are 0.

    A coefficient 0 removes a group even if it holds inf, and with one 1 among zeros the result is
    that group bit for bit, including the sign of -0.0. The sum is computed elementwise, since a
    matrix product may round on accelerators, and in float32 at least.

    Args:
      coefficients: [G].
      groups: [G, ...].

    Returns:
      [...]. The gradient is that of the plain sum, so zero coefficients are trained too.

    Raises:
      ValueError: the number of coefficients is not the number of groups.

    >>> mix(jnp.array([0.0, 1.0]), jnp.array([[jnp.inf, 5.0], [-0.0, 7.0]])).tolist()
    [-0.0, 7.0]
    """
    if coefficients.shape != groups.shape[:1]:
        raise ValueError(
            f"{coefficients.size} coefficients for {len(groups)} parameter groups; give one each"
        )
    c = _as_column(coefficients, groups)
    wide = jnp.promote_types(jnp.result_type(c, groups), jnp.float32)
    c, groups, dtype = c.astype(wide), groups.astype(wide), jnp.result_type(c, groups)
    terms = jnp.where(c == 0, -0.0, c * groups)  # x + -0.0 is x, also for x = -0.0
    # jnp.sum, and lax.reduce with lax.add, start from 0.0, and 0.0 + -0.0 is 0.0.
    zero = np.array(-0.0, terms.dtype)
    total: Array = jax.lax.reduce(terms, zero, lambda a, b: a + b, (0,))
    return total.astype(dtype)


@mix.defjvp
def _mix_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (c, groups), (dc, d_groups) = primals, tangents
    value = mix(c, groups)
    terms = _as_column(dc, groups) * groups + _as_column(c, groups) * d_groups
    return value, jnp.sum(terms, axis=0)


def _as_column(coefficients: Array, groups: Array) -> Array:
    """[G] -> [G, 1, ...], to multiply `groups`."""
    return jnp.expand_dims(coefficients, tuple(range(1, groups.ndim)))


def select_params(stacked: Params, indices: Mapping[str, int | Array]) -> Params:
    """The parameters of one layer.

    Args:
      stacked: sublayer -> parameters [G, ...].
      indices: sublayer -> index of its group, an int or a traced integer. With an index of
        coefficients ("attention_mixture") the sublayer is the mixture of all its groups.

    Returns:
      sublayer -> parameters [...], without the mixtures' coefficients.

    >>> stacked = {"scale": jnp.array([2.0, 3.0]), "scale_mixture": jnp.array([[1.0, 10.0]])}
    >>> float(select_params(stacked, {"scale": 1})["scale"])
    3.0
    >>> float(select_params(stacked, {"scale": 1, "scale_mixture": 0})["scale"])
    32.0
    """
    mixed = mixtures(indices)

    def group(sublayer: str) -> PyTree:
        return jax.tree.map(lambda a: _entry(a, indices[sublayer]), stacked[sublayer])

    return {
        name: jax.tree.map(mix, group(mixed[name]), stacked[name]) if name in mixed else group(name)
        for name in indices
        if name not in mixed.values()
    }


def _entry(a: Array | np.ndarray, index: int | Array) -> Array | np.ndarray:
    """a[index]. Of a traced index in two operations: general indexing makes a model's program half
    as long again."""
    if isinstance(index, int):
        return a[index]  # of NumPy stays NumPy's
    return lax.squeeze(lax.dynamic_slice_in_dim(a, jnp.asarray(index, np.uint32), 1), [0])


def one_hot_coefficients(like: PyTree, plan: Plan, sublayer: str) -> PyTree:
    """Initial coefficients of `sublayer`: 1 for the group that the plan names, 0 for the others.

    The initial model is therefore the same function as without mixtures, with weights of the scale
    of their initialiser.

    Args:
      like: weight -> an array [rows, G] with the shape and dtype of its coefficients.
      plan: has the sublayer and its mixture.
      sublayer: whose groups are mixed.

    Returns:
      weight -> coefficients [rows, G].

    >>> plan = Plan(scale=(0, 1, 0), scale_mixture=(0, 1, 2))
    >>> one_hot_coefficients(jnp.zeros((3, 2)), plan, "scale").tolist()
    [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    groups, rows = plan.indices(sublayer), plan.indices(mixtures(plan)[sublayer])
    initial = np.array([groups[rows.index(row)] for row in sorted(set(rows))])
    return jax.tree.map(lambda a: jnp.eye(a.shape[1], dtype=a.dtype)[initial], like)


def check_mixtures(plan: Plan, sublayers: Iterable[str]) -> None:
    """Checks that a plan mixes only `sublayers`, and that initial coefficients are unambiguous.

    Args:
      plan: the sharing plan.
      sublayers: those that may be mixed.

    Raises:
      ValueError: another sublayer is mixed, or layers share coefficients but not the group.

    >>> check_mixtures(Plan(ffn=(0, 1), ffn_mixture=(0, 1)), ["attention", "ffn"])
    """
    allowed = list(sublayers)
    for sublayer, mixture in mixtures(plan).items():
        if sublayer not in allowed:
            raise ValueError(
                f"{mixture}: {sublayer!r} cannot be mixed, only {', '.join(allowed)}; leave it out"
            )
        groups, rows = plan.indices(sublayer), plan.indices(mixture)
        for row, group in zip(rows, groups, strict=True):
            first = groups[rows.index(row)]
            if group != first:
                raise ValueError(
                    f"{mixture}: layers that share the coefficients {row} have the groups {first} "
                    f"and {group} of {sublayer!r}; coefficients start at one group, so give these "
                    "layers the same one"
                )


def fit_mixture(
    targets: Sequence[Params], groups: Sequence[Params], initial: Sequence[int]
) -> tuple[Params, Params]:
    """Groups and coefficients whose mixtures are nearest to the parameters of each layer.

    Least squares for every weight: the truncated SVD of all layers side by side (Eckart and Young
    1936). Of the equivalent solutions, the one whose coefficients, orthogonal columns of length
    sqrt(L / G), are nearest to `initial`. If `groups` already are exact, they are kept.

    Args:
      targets: for each of L layers, weight -> array.
      groups: for each of G groups, weight -> array.
      initial: for each layer, the group that the plan names.

    Returns:
      (weight -> groups [G, ...], weight -> coefficients [L, G]).

    >>> layers = [{"q": jnp.array([1.0, 5.0])}, {"q": jnp.array([2.0, 1.0])}]
    >>> groups, c = fit_mixture([*layers, {"q": jnp.array([3.0, 4.0])}], layers, (0, 1, 0))
    >>> [[round(float(x), 4) for x in mix(row, groups["q"])] for row in c["q"]]
    [[1.0, 5.0], [2.0, 1.0], [3.0, 4.0]]
    """

    def fit(*leaves: Array) -> tuple[Array, Array]:
        rows = np.stack([np.asarray(a, np.float64).reshape(-1) for a in leaves])
        fitted, c = _fit_matrix(rows[: len(targets)], rows[len(targets) :], np.array(initial))
        shape, dtype = leaves[0].shape, leaves[0].dtype
        return jnp.asarray(fitted.reshape(-1, *shape), dtype), jnp.asarray(c, dtype)

    pairs = jax.tree.map(fit, *targets, *groups)

    def pick(i: int) -> Params:
        picked: Params = jax.tree.map(lambda a: a[i], pairs, is_leaf=lambda a: isinstance(a, tuple))
        return picked

    return pick(0), pick(1)


def _fit_matrix(
    targets: np.ndarray, groups: np.ndarray, initial: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`fit_mixture` of one weight: targets [L, size], groups [G, size], initial [L]."""
    count = len(groups)
    start = np.eye(count)[initial]
    if np.array_equal(groups[initial], targets):
        return groups, start
    left, sizes, right = np.linalg.svd(targets, full_matrices=False)
    missing = max(count - len(sizes), 0)  # the weight has fewer numbers than there are groups
    left = np.pad(left, ((0, 0), (0, missing)))[:, :count]
    right = np.pad(sizes[:, None] * right, ((0, missing), (0, 0)))[:count]
    one, _, other = np.linalg.svd(left.T @ start)
    rotation, length = one @ other, (len(targets) / count) ** 0.5  # the nearest rotation to `start`
    return rotation.T @ right / length, left @ rotation * length
