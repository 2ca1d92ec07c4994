"""Part F: how many layers of its own a sublayer is worth that r layers share.

    L = E + A (N_once + r^phi_a N_attn + r^phi_f N_ffn + r^phi_b N_both)^-alpha + B S^-beta

N are the parameters in stock of the layers' matrices that one layer uses, or r layers (attention,
FFN, or both); S are the bytes read. phi = 1: as good as r layers of their own; 0: as one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize

from attnlab.lab.stats import Difference, paired_difference
from experiments.studies.study3 import analysis, parts
from experiments.studies.study3.analysis import Array
from experiments.studies.study3.spec import BATCH_TOKENS, Variant, num_steps

UNIT = 12 * 64**2, 1920 * BATCH_TOKENS
"""Parameters of a layer at D = 64 and bytes of the longer trainings, the units of N and S."""
LOWER, UPPER = (0.01, 0.01, -1.0, -1.0, -1.0), (2.0, 2.0, 2.0, 2.0, 2.0)
START = (0.3, 0.5, 0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True)
class Design:
    """The models, one entry each.

    Attributes:
      parameters: [models, 4]: N_once, N_attn, N_ffn, N_both, in units of a layer at D = 64.
      repeats: r.
      size: S, in units of the longer trainings.
    """

    parameters: Array
    repeats: Array
    size: Array


@dataclasses.dataclass(frozen=True)
class Law:
    """The fitted exponents."""

    alpha: float
    beta: float
    attention: float
    ffn: float
    both: float


def design_of(variants: Sequence[Variant]) -> Design:
    """The design of variants of part F.

    >>> one = design_of([parts.layers_variant("ffn", 4)])
    >>> one.parameters.round(2).tolist(), one.repeats.tolist()  # 8 attentions, 2 FFNs
    ([[2.67, 0.0, 1.33, 0.0]], [4.0])
    """
    rows = []
    for v in variants:
        layer, groups = v.width**2 / UNIT[0], v.num_layers / v.repeats
        attention, ffn = 4 * layer, 8 * layer
        rows.append({
            "none": (v.num_layers * (attention + ffn), 0.0, 0.0, 0.0),
            "attention": (v.num_layers * ffn, groups * attention, 0.0, 0.0),
            "ffn": (v.num_layers * attention, 0.0, groups * ffn, 0.0),
            "both": (0.0, 0.0, 0.0, groups * (attention + ffn)),
        }[v.shared])  # fmt: skip
    size = [num_steps(v) * BATCH_TOKENS / UNIT[1] for v in variants]
    return Design(np.array(rows), np.array([float(v.repeats) for v in variants]), np.array(size))


def basis(design: Design, law: Law) -> Array:
    """[models, 3]: what E, A and B multiply."""
    exponents = np.array([0.0, law.attention, law.ffn, law.both])
    counted = (design.parameters * design.repeats[:, None] ** exponents).sum(axis=1)
    terms = [np.ones(len(counted)), counted**-law.alpha, design.size**-law.beta]
    return np.stack(terms, axis=1)


def fit(design: Design, losses: Array, start: Law | None = None) -> Law:
    """Least squares. E, A and B solve linear equations at given exponents.

    Args:
      design: of the models.
      losses: mean bits per byte of each.
      start: where to begin; None: `START`.
    """

    def residuals(exponents: Array) -> Array:
        terms = basis(design, Law(*exponents))
        left: Array = losses - terms @ np.linalg.lstsq(terms, losses, rcond=None)[0]
        return left

    begin = dataclasses.astuple(start) if start else START
    inside = np.clip(begin, np.add(LOWER, 1e-6), np.subtract(UPPER, 1e-6))
    found = optimize.least_squares(residuals, inside, bounds=(LOWER, UPPER), x_scale=0.1)
    return Law(*map(float, found.x))


STATISTICS = {
    "phi_a": lambda law: law.attention,
    "phi_f": lambda law: law.ffn,
    "phi_b": lambda law: law.both,
    "F1": lambda law: law.attention - law.ffn,
    "F2": lambda law: law.both - law.attention * law.ffn,
}
"""Name -> what is estimated."""


@dataclasses.dataclass(frozen=True)
class Worth:
    """The estimates of `STATISTICS`.

    Attributes:
      law: fitted to the means over all texts.
      found: of each, by the jackknife over texts.
      bootstrap: 95 % percentile interval of each over texts; empty without draws.
    """

    law: Law
    found: dict[str, Difference]
    bootstrap: dict[str, tuple[float, float]]


def estimate(design: Design, losses: Array, draws: int = 0, seed: int = 0) -> Worth:
    """Fits the law and its intervals.

    Args:
      design: of the models.
      losses: [texts, models].
      draws: of the bootstrap.
      seed: of its draws.
    """
    count = len(losses)
    law = fit(design, losses.mean(axis=0))

    def refit(texts: NDArray[np.int64]) -> Law:
        return fit(design, losses[texts].mean(axis=0), law)

    left_out = [refit(np.delete(np.arange(count), i)) for i in range(count)]
    rng = np.random.default_rng(seed)
    drawn = [refit(rng.integers(count, size=count)) for _ in range(draws)]
    found, bootstrap = {}, {}
    for name, of in STATISTICS.items():
        parts_left = np.array([of(one) for one in left_out])
        apart = (count - 1) * (parts_left.mean() - parts_left)
        found[name] = paired_difference(of(law) + apart)
        if draws:
            low, high = np.percentile([of(one) for one in drawn], [2.5, 97.5])
            bootstrap[name] = float(low), float(high)
    return Worth(law, found, bootstrap)


def planned() -> list[Variant]:
    """The variants of part F."""
    return [cell.variant for group in parts.PARTS["F"] for cell in group.cells]


def losses_of(table: pd.DataFrame) -> tuple[list[str], Array]:
    """(texts that all models have, their held-out bits [texts, models])."""
    scores = [analysis.scores(table, variant) for variant in planned()]
    texts = [text for text in parts.LAYER_TEXTS if all(text in one for one in scores)]
    return texts, np.array([[one[text] for one in scores] for text in texts])
