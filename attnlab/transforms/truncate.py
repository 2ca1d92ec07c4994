"""Scores at a lower rank, with the error that this costs."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.fields import as_count
from attnlab.heads import Bilinear, Layout, Params, Standard
from attnlab.heads.rewrites import chain
from attnlab.transforms.dtypes import in_float64
from attnlab.transforms.forms import canonical
from attnlab.transforms.matrices import stacked_scores, truncated
from attnlab.transforms.measure import CallOptions, Floats, Weights, compare, float64, generator
from attnlab.transforms.steps import finish, repeated


class Truncation(NamedTuple):
    """A low-rank approximation of the scores, and what it costs.

    >>> import jax
    >>> from attnlab.heads import init
    >>> layout = Standard(width=6, num_heads=2)
    >>> found = truncate(init(jax.random.key(0), layout), layout, rank=1)
    >>> found.layout.size("head_dim"), found.score_error.shape, found.output_error > 0.01
    (1, (2,), True)
    """

    params: dict[str, Array]
    layout: Standard
    """With head_dim = rank, a key head for each head, and the scale of the layout before it."""
    score_error: Floats
    """[N]: |A - A'| / |A| in the Frobenius norm, A = W_Q W_K^T (a query bias is one more row)."""
    output_error: float
    """Largest difference of the outputs on random inputs, relative to the largest output."""


def truncate(params: Params, layout: Layout, rank: int, *, key: Array | None = None) -> Truncation:
    """The scores of each head at a lower rank: the nearest there are, by truncated SVD.

    A_n = W_Q W_K^T (or the matrix of `bilinear`) -> U sqrt(S), V sqrt(S) of its `rank` largest
    singular values (Eckart and Young 1936; Bhojanapalli et al. 2020, arXiv 2002.07028, on the rank
    that scores need). Values stay as they are.

    Args:
      params, layout: the heads.
      rank: the new head_dim.
      key: for the random inputs; None is a fixed one.

    Returns:
      `Truncation`.

    Raises:
      ValueError: a rank that is no whole number of at least 1, a layout without the form
        `bilinear`, NaN or inf.

    >>> from attnlab.heads import Bilinear, init
    >>> layout = Bilinear(width=6, num_heads=2)
    >>> import jax
    >>> found = truncate(init(jax.random.key(0), layout), layout, 2)
    >>> found.layout.name, found.params["q"].shape, bool((found.score_error > 0).all())
    ('standard', (6, 2, 2), True)
    """
    rank = as_count("rank", rank, 1)
    w, restore = in_float64(params, layout)
    with float64():
        reached, new = as_bilinear(w, layout)
        rows = stacked_scores(new)
        left, right, values = truncated(rows, rank)
        made = {"q": left[:, : layout.width].swapaxes(0, 1), "k": np.moveaxis(right, 2, 0)}
        made |= {"q_bias": left[:, -1]} if "q_bias" in new else {}
        found = finish(new, reached.to(Standard, head_dim=rank), **made)
        assert found is not None
        assert isinstance(found[0], Standard)
        squares = np.sum(values**2, axis=1)
        lost = np.sum(values[:, rank:] ** 2, axis=1)
        score_error = np.sqrt(lost / np.where(squares > 0, squares, 1.0))
        cost = compare(found[1], found[0], w, layout, CallOptions(), generator(key))
    return Truncation(restore(found[1]), found[0], score_error, cost.forward)


def as_bilinear(w: Weights, layout: Layout) -> tuple[Bilinear, Weights]:
    """The bilinear form with a value head for each head."""
    steps, blocked = chain(layout)
    reached, new = layout, dict(w)
    for step in steps:
        if isinstance(reached, Bilinear):
            break
        made = step.params({name: jnp.asarray(a) for name, a in new.items()})
        reached, new = step.layout, {name: np.asarray(a) for name, a in made.items()}
    if not isinstance(reached, Bilinear):
        reason = blocked.reason if blocked.layout else f"{layout} has no bilinear form"
        raise ValueError(f"truncate needs plain scores q k^T: {reason}")
    if any(name == "extra_k" for name in new):
        raise ValueError("truncate needs plain scores q k^T: extra_keys are in the basis of k")
    settled = canonical(reached)
    assert isinstance(settled, Bilinear)
    each = repeated(new, settled, settled.num_heads)
    if each is None:
        return settled, new
    assert isinstance(each[0], Bilinear)
    return each[0], each[1]
