"""`compare_pairs`: which of two variants has the lower scores, and how sure that is."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from attnlab.lab.spec import Tag
from attnlab.lab.statistics import (
    ALPHA,
    Difference,
    anytime_difference,
    holm,
    mixed_difference,
    paired_difference,
)

Variant: TypeAlias = tuple[tuple[str, Tag], ...]
"""The tags of runs that differ in their seed (and text) only."""
Scores: TypeAlias = Mapping[tuple[str, int], float]
"""(text, seed) -> the score of a run."""
Conclusion: TypeAlias = Literal["lower", "higher", "equivalent", "inconclusive"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A variant against a baseline.

    Attributes:
      variant, baseline: which.
      difference: variant - baseline, by the test that judges.
      paired: by Student's paired t of this pair alone.
      anytime: by the test that holds if seeds were added after looking.
      p_holm: of no difference, after Holm's correction over the family.
      p_equivalent: of a difference outside of the margin, after the same correction.
      texts: with scores of both.
      family: comparisons that the correction counts.
    """

    variant: Variant
    baseline: Variant
    difference: Difference
    paired: Difference
    anytime: Difference
    p_holm: float
    p_equivalent: float
    texts: int
    family: int

    @property
    def conclusion(self) -> Conclusion:
        """ "lower" or "higher" if significant; else "equivalent" if within the margin for sure.

        Both are corrected, so an uncorrected equivalence never outranks a corrected difference.
        """
        if self.p_holm < ALPHA:
            return "lower" if self.difference.mean < 0 else "higher"
        return "equivalent" if self.p_equivalent < ALPHA else "inconclusive"

    @property
    def reason(self) -> str:
        """Why it is inconclusive; else empty."""
        if self.conclusion != "inconclusive":
            return ""
        if math.isnan(self.difference.p):
            return "one seed" if self.difference.count else "no seed in common"
        if math.isinf(self.difference.high):
            return "too few seeds"
        if self.difference.includes_zero:
            return "the interval includes zero"
        return f"too few seeds for {self.family} comparisons"


def compare_pairs(
    scores: Mapping[Variant, Scores],
    pairs: Sequence[tuple[Variant, Variant]],
    *,
    margin: float = 0.0,
    seeds_added: bool = False,
) -> list[Comparison]:
    """Compares (variant, baseline) pairs over the seeds and texts that both have.

    Seed n starts from the same random key and reads the same batches in every variant, so
    differences are paired. Which test judges:

    - several texts: a mixed model with texts and seeds as sources of variation; where seeds were
      added after looking at scores, its p-values count twice, for the looks;
    - one text, and seeds were added: the test that holds at any time;
    - else Student's paired t of this pair alone, which assumes nothing about the spread of other
      variants.

    Args:
      scores: of each variant.
      pairs: one family for Holm's correction.
      margin: a difference below it is of no interest; 0: no test of equivalence.
      seeds_added: could seeds be added after looking?
    """
    found = []
    for variant, baseline in pairs:
        a, b = scores[variant], scores[baseline]
        keys = sorted(set(a) & set(b))
        gaps = [a[key] - b[key] for key in keys]
        texts = [text for text, _ in keys]
        paired, anytime = paired_difference(gaps, margin), anytime_difference(gaps, margin)
        judge = paired
        if len(set(texts)) > 1:
            judge = mixed_difference(gaps, texts, margin, looks=2 if seeds_added else 1)
        elif seeds_added:
            judge = anytime
        found.append((variant, baseline, judge, paired, anytime, len(set(texts))))
    p_holm = holm([judge.p for _, _, judge, *_ in found])
    p_equivalent = holm([judge.p_outside for _, _, judge, *_ in found])
    return [
        Comparison(v, b, judge, paired, anytime, float(p), float(q), texts, len(found))
        for (v, b, judge, paired, anytime, texts), p, q in zip(
            found, p_holm, p_equivalent, strict=True
        )
    ]


@dataclasses.dataclass(frozen=True)
class Effect:
    """Two values of a tag, each a mean over all variants that have it, compared.

    Attributes:
      tag: which.
      over: the other tags, whose values are averaged over.
      comparison: its variants have one tag.
      single: the same difference for each combination of the other tags.
    """

    tag: str
    over: tuple[str, ...]
    comparison: Comparison
    single: tuple[float, ...]


def average_effects(
    scores: Mapping[Variant, Scores],
    *,
    reference: Mapping[str, Tag] | None = None,
    tags: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    margin: float = 0.0,
    seeds_added: bool = False,
) -> list[Effect]:
    """Each value of a tag against the reference value, averaged over the values of other tags.

    For variants that are all combinations of two or more tags; else empty. A seed is one
    observation: the mean of its scores, so an interval has (seeds - 1) degrees of freedom, whatever
    the spread of the variants. All effects are one family.

    Args:
      scores: of each variant.
      reference: tag -> value to compare with; where left out, the first one.
      tags: those to average over others; None: all.
      seeds: those that count, such as those planned before any score was seen; None: all.
      margin, seeds_added: as of `compare_pairs`; could seeds among those that count be added?
    """
    values = _crossed(list(scores))
    kept = {
        variant: {k: v for k, v in some.items() if seeds is None or k[1] in seeds}
        for variant, some in scores.items()
    }
    means: dict[Variant, Scores] = {}
    pairs, about = [], []
    for tag in (tag for tag in values if tags is None or tag in tags):
        base = (reference or {}).get(tag, values[tag][0])
        base = base if base in values[tag] else values[tag][0]
        for value in values[tag]:
            sides = [[v for v in scores if dict(v)[tag] == one] for one in (value, base)]
            for one, side in zip((value, base), sides, strict=True):
                means[((tag, one),)] = _mean([kept[v] for v in side])
            if value != base:
                pairs.append((((tag, value),), ((tag, base),)))
                single = [_mean_gap(kept[v], kept[_replace(v, tag, base)]) for v in sides[0]]
                about.append((tag, tuple(t for t in values if t != tag), tuple(single)))
    found = compare_pairs(means, pairs, margin=margin, seeds_added=seeds_added)
    return [Effect(t, over, c, single) for (t, over, single), c in zip(about, found, strict=True)]


def _crossed(variants: Sequence[Variant]) -> dict[str, list[Tag]]:
    """Tag -> values, of tags that vary, if there are two or more and all combinations; else {}."""
    names = list(dict.fromkeys(name for variant in variants for name, _ in variant))
    if any([name for name, _ in variant] != names for variant in variants):
        return {}
    values = {name: list(dict.fromkeys(dict(v)[name] for v in variants)) for name in names}
    values = {name: some for name, some in values.items() if len(some) > 1}
    whole = math.prod(map(len, values.values())) == len(variants)
    return values if len(values) > 1 and whole else {}


def _mean(many: Sequence[Scores]) -> dict[tuple[str, int], float]:
    keys = set.intersection(*(set(scores) for scores in many))
    return {key: float(np.mean([scores[key] for scores in many])) for key in sorted(keys)}


def _mean_gap(a: Scores, b: Scores) -> float:
    keys = set(a) & set(b)
    return float(np.mean([a[key] - b[key] for key in keys])) if keys else math.nan


def _replace(variant: Variant, tag: str, value: Tag) -> Variant:
    return tuple((name, value if name == tag else old) for name, old in variant)
