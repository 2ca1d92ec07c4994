"""The one form that a function of plain heads has: a score matrix and a value map for each head.

Heads of different scores give linearly independent probabilities, so the score matrices [A_n; b_n]
and value maps W_V W_O of the heads that differ and are not zero are settled by the function, up to
their order. A target of other ranks is then another function.
"""

from typing import NamedTuple

import numpy as np

from attnlab.conversion.factors import numerical_rank, stacked_scores, stacked_values
from attnlab.conversion.measure import MEASURABLE
from attnlab.conversion.question import Question
from attnlab.conversion.scaling import is_plain

PLAIN = ("rotary", "qk_norm", "cap")


class Forms(NamedTuple):
    """The heads that differ and are not zero."""

    scores: np.ndarray
    values: np.ndarray


def forms_of(ask: Question) -> Forms | None:
    """Score matrices and value maps, heads of equal scores added up; None if not settled."""
    beside = any(spec.gate or spec.sink or spec.extra_keys for spec in (ask.source, ask.target))
    if ask.absorbed is None or beside or not is_plain(ask.target):
        return None
    if ask.situation.forbids(PLAIN, ask.target):
        return None
    scores, values = stacked_scores(ask.absorbed), stacked_values(ask.absorbed)
    kept: list[list[np.ndarray]] = []
    small = MEASURABLE * np.max(np.abs(scores), initial=0)
    for a, b in zip(scores, values, strict=True):
        twin = next((k for k in kept if np.max(np.abs(k[0] - a)) <= small), None)
        if twin:
            twin[1] = twin[1] + b
        else:
            kept.append([a, b])
    alive = [k for k in kept if np.max(np.abs(k[1])) > MEASURABLE * np.max(np.abs(values))]
    return Forms(*map(np.stack, zip(*alive, strict=True))) if alive else None


def ranks_of(a: np.ndarray) -> list[int]:
    """Numerical rank of each matrix."""
    values = np.linalg.svd(a, compute_uv=False)
    return [numerical_rank(one, *a.shape[-2:]) for one in values]


def beyond(a: np.ndarray, allowed: int) -> str:
    values = np.linalg.svd(a, compute_uv=False)
    if allowed >= len(values):
        return ""
    return f" (singular value {allowed + 1}: {values[allowed]:.2g}, largest {values[0]:.2g})"
