"""Which of two arms is better, and how sure is that: the tests, the verdict in words, the table."""

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from experiments.reporting.document import Block, Heading, Paragraph, Table
from experiments.reporting.results import SEEDS, Panel, Run
from experiments.reporting.statistics import (
    CONFIDENCE,
    Difference,
    half_width,
    holm,
    paired_difference,
    sequential_difference,
)
from experiments.reporting.wording import p_value, percent, span


class Pair(NamedTuple):
    """Two arms, `a` the better on average, and by how much `b` is worse: seed by seed.

    A test of a fixed number of seeds and one that may be looked at after every seed, each with
    Holm's p over all pairs of the family.
    """

    a: Run
    b: Run
    fixed: Difference
    fixed_p: float
    anytime: Difference
    anytime_p: float
    grows: bool = False
    """May seeds be added until it is decided? Then the second test judges."""
    smallest: float = 0.0
    """Difference of interest: one that is below it for sure is none."""
    of: int = 1
    """Comparisons in the family."""

    @property
    def difference(self) -> Difference:
        """By the test that judges."""
        return self.anytime if self.grows else self.fixed

    @property
    def p(self) -> float:
        """Holm's, of the test that judges."""
        return self.anytime_p if self.grows else self.fixed_p

    @property
    def equal(self) -> bool:
        """Is the interval within the smallest difference of interest?"""
        return -self.smallest < self.difference.low and self.difference.high < self.smallest

    @property
    def sure(self) -> bool:
        """Does the interval leave zero out on the side of `a`, after Holm's correction too?"""
        return not self.equal and self.difference.low > 0 and self.p < 1 - CONFIDENCE

    @property
    def verdict(self) -> str:
        """Better, equal within what is of interest, or cannot tell and why."""
        d = self.difference
        if math.isnan(d.p):
            return "cannot tell (one seed)" if d.pairs else "cannot tell (no seed in common)"
        if self.equal:
            return f"equal within {self.smallest:g}"
        if self.sure:
            return f"**{self.a.name} is better**"
        if math.isinf(d.high):
            return "cannot tell (too few seeds)"
        if d.holds_zero:
            return "cannot tell"
        if d.high < 0:  # `a` is the better by seeds that `b` has not
            return "cannot tell (on the seeds of both the other is better)"
        return f"cannot tell (too few seeds for {self.of} comparisons)"

    def may_be_decided(self, limit: int) -> bool:
        """Is it open, and could seeds up to `limit` decide it?

        That is, if the true mean is within two standard errors of the mean so far and the spread
        stays: would an interval of so many seeds leave out zero, or be within what is of interest?
        """
        d = self.anytime
        if self.sure or self.equal or d.pairs >= limit:
            return False
        if d.pairs < 3:
            return True
        about = 2 * d.spread / math.sqrt(d.pairs)
        apart = d.spread * half_width(limit, 1 - (1 - CONFIDENCE) / self.of)
        within = self.smallest - d.spread * half_width(limit, CONFIDENCE)
        return abs(d.mean) + about > apart or max(abs(d.mean) - about, 0) < within


def compare(panel: Panel) -> list[Pair]:
    """Every two complete arms; those that the question names, where it does; in a published table
    those that hold its base. Holm's family is what is returned."""
    asked = [set(pair) for pair in panel.question.get("pairs", ())]
    question = dict(panel.question)
    if any(SEEDS.search(later.folder.name) for run in panel.complete for later in run.more):
        question["limit"] = max(1, question.get("limit", 0))  # seeds were added where it was open
    return judged(
        [
            (a, b)
            for a, b in combinations(panel.complete, 2)
            if (not panel.base or panel.base in (a, b)) and (not asked or {a.name, b.name} in asked)
        ],
        question,
    )


def judged(pairs: Sequence[tuple[Run, Run]], question: dict[str, Any]) -> list[Pair]:
    """The tests of these pairs, the better one of each first; they are one family.

    Seeds pair: the same seed reads the same batches in the same order in every arm.
    """
    tested = []
    for a, b in (sorted(pair, key=lambda one: one.rank) for pair in pairs):
        both = [seed for seed in a.seeds if seed in b.seeds]
        of_a, of_b = (r.sign * r.heldout[[r.seeds.index(s) for s in both]] for r in (a, b))
        gap = Difference(0, b.rank - a.rank)
        tests = (paired_difference, sequential_difference)
        fixed, anytime = (test(of_a, of_b, CONFIDENCE) if both else gap for test in tests)
        tested.append((a, b, fixed, anytime))
    of_fixed = _family([fixed.p for *_, fixed, _ in tested])
    of_anytime = _family([anytime.p for *_, anytime in tested])
    grows, smallest = question.get("limit", 0) > 0, question.get("smallest", 0.0)
    return [
        Pair(a, b, fixed, p, anytime, q, grows, smallest, len(tested))
        for (a, b, fixed, anytime), p, q in zip(tested, of_fixed, of_anytime, strict=True)
    ]


def more_seeds(panel: Panel) -> dict[Path, tuple[int, ...]]:
    """Folder of an arm -> the seeds to train next: of the arms of pairs that more may decide.

    As many as the arm began with, up to the limit of the question; nothing where all is decided or
    hopeless.
    """
    limit = panel.question.get("limit", 0)
    wanted = [pair for pair in compare(panel) if pair.may_be_decided(limit)]
    found = {}
    for run in {run.folder: run for pair in wanted for run in (pair.a, pair.b)}.values():
        first = max(run.seeds) + 1
        step = len(run.record["config"]["train"]["seeds"])
        count = min(step, limit - len(run.seeds))
        if count > 0:
            found[run.folder] = tuple(range(first, first + count))
    return found


def _family(ps: list[float]) -> list[float]:
    """Holm's p of those that have one."""
    known = iter(holm([p for p in ps if not math.isnan(p)]))
    return [math.nan if math.isnan(p) else next(known) for p in ps]


SEEDS_PAIR = (
    "Seeds pair: seed n starts from the same random key and reads the same batches in the same "
    "order in every arm. Intervals cover what seeds do, not other data or learning rates. "
)
SEEDS_GREW = (
    "Seeds were added until the pairs were decided, so the test that may be looked at after "
    "every seed judges (Wang and Ramdas 2023); Student's t, looked at like that, finds a "
    "difference where there is none in one experiment of six by the tenth seed."
)
SEEDS_FIXED = (
    "Student's t judges: the number of seeds was fixed beforehand. The other test (Wang and Ramdas "
    "2023) would still hold if seeds were added until it decides."
)


def section(panel: Panel) -> list[Block]:
    """The table of pairs and how to read it."""
    pairs = compare(panel)
    if not pairs:
        return []
    level, grows = percent(CONFIDENCE), pairs[0].grows
    table = Table(
        f"Positive: the second arm is worse, by so many {panel.unit}. {level} intervals: of "
        f"Student's paired t, and of a test that holds at any time. Holm's p counts all "
        f"{len(pairs)} comparisons.",
        [
            "better on average",
            "other",
            "verdict",
            "difference",
            f"{level} interval",
            "Holm's p",
            f"{level} interval at any time",
            "Holm's p at any time",
            "pairs",
        ],
        [
            [
                pair.a.name,
                pair.b.name,
                pair.verdict,
                f"{pair.fixed.mean:.3f}",
                span(pair.fixed),
                p_value(pair.fixed_p),
                span(pair.anytime),
                p_value(pair.anytime_p),
                str(pair.fixed.pairs),
            ]
            for pair in pairs
        ],
        [""] * len(pairs),
        words=3,
    )
    how = SEEDS_PAIR + (SEEDS_GREW if grows else SEEDS_FIXED)
    if any(math.isnan(pair.fixed.p) for pair in pairs):
        how += " One seed gives no interval."
    return [Heading(3, "Differences, pair by pair"), Paragraph(how), table]
