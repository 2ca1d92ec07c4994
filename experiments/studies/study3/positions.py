"""The page of part A: how the best width of a head depends on positions."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from attnlab.report.page import p_equation
from experiments.studies.study3 import analysis
from experiments.studies.study3.comparisons import (
    CONDITIONS,
    Comparison,
    Term,
    by_text,
    compare,
    cost_of_four,
    first_seeds,
    interval,
    means_table,
    missing,
    points_of,
    registered_table,
)
from experiments.studies.study3.parts import PARTS
from experiments.studies.study3.spec import Variant

NAMES = {"rotary": "rotary", "t5": "T5's bias", "half": "rotary on half a head"}
"""Positions -> their name in tables."""
WAITING = {1: "A2, A3 and A4 are", 2: "A3 and A4 are", 3: "A4 is"}
"""Complete groups of part A -> the tests that wait for others (amendments 2 and 7)."""
FIGURE = "![Mean held-out bits per byte over head_dim, a line a kind of positions](positions.svg)"


def part_a(table: pd.DataFrame, left: int = 0) -> str:
    """A1, and those of A2, A3 and A4 whose runs are there, while `left` judged runs are missing."""
    complete = complete_groups(table)
    tests = later_tests(table, complete)
    p_values = corrected(tests)
    table = first_seeds(table)
    cost, first, said = first_test(table)
    positions = complete_positions(complete)
    costs = cost | {p: compare(table, "", "", *cost_of_four(p)) for p in positions[2:]}
    stated = "; ".join(f"{interval(one.found)} with {NAMES[p]}" for p, one in costs.items())
    waiting = f"{WAITING[complete]} not run: {left} judged runs are missing. " if left else ""
    title, best, widths = "What heads of 4 cost, by positions", "", ""
    variants = [cell.variant for cell in PARTS["A"][0].cells]
    if tests:
        title = "How the best width of a head depends on positions"
        best = f"\n{best_widths(table, tests[0], p_values['A2'])}"
        widths = f"\n{FIGURE}\n\n{widths_table(table, positions)}\n"
        variants = points_of(*positions)
    return f"""# {title}

**Heads of 4 minus heads of 16, bits per byte: {stated}. Rotary less T5 {interval(first.found)},
{p_equation(first.found.p)}. {said}**{best}
{CONDITIONS}Muon, {first.found.count} texts, one seed each.
{widths}
Differences in bits per byte; 16x4 is 16 heads of 4, and above 0 these are worse:

{registered_table([first, *tests, *cost.values()], p_values, equal="A3")}

A1 is the primary test of part A; rows without a name are exploratory, their p-values not corrected.
Holm's correction is over A2, A3 and A4; while one is not run, p-values are multiplied by 3. That of
A3 is of equivalence within {analysis.MARGIN} bits. {waiting}T5's bias also gives each head a prior
of distance, and 32 numbers a head ([plan](plan.md), amendments 2 and 7).

Heads of 4 minus heads of 16, bits per byte of each text:

{by_text(table, {NAMES[p]: cost_of_four(p) for p in positions})}

Mean held-out bits per byte of each variant:

{means_table(table, variants)}
"""


def complete_groups(table: pd.DataFrame) -> int:
    """How many of the first groups of part A have all their judged runs."""
    groups = PARTS["A"]
    return next((n for n, one in enumerate(groups) if missing([one], table)), len(groups))


def complete_positions(complete: int) -> tuple[str, ...]:
    """Those whose heads of all widths are in so many groups, once A2 can be read."""
    return ("rotary", "t5", "half")[: 3 if complete == len(PARTS["A"]) else 2]


class FirstTest(NamedTuple):
    """A1: what heads of 4 cost against heads of 16 by positions, and how that differs."""

    cost: dict[str, Comparison]
    difference: Comparison
    said: str
    """The sentence of the plan."""


def first_test(table: pd.DataFrame) -> FirstTest:
    """A1 and its two costs, from rows of first seeds."""
    cost = {
        p: compare(table, "", f"16x4 less 4x16: {name}", *cost_of_four(p))
        for p, name in (("rotary", "rotary"), ("t5", "T5"))
    }
    difference = compare(
        table, "A1", "16x4 less 4x16: rotary less T5",
        *cost_of_four("rotary"), *cost_of_four("t5", -1),
    )  # fmt: skip
    found = difference.found
    said = {
        True: "So positions decide a large part of what a small head_dim costs.",
        False: "That positions decide what a small head_dim costs is not shown.",
    }[found.p < analysis.ALPHA and found.mean > 0]
    return FirstTest(cost, difference, said)


def later_tests(table: pd.DataFrame, complete: int) -> list[Comparison]:
    """Those of A2, A3 and A4 whose groups are among the first `complete` ones."""
    first, tests = first_seeds(table), []
    if complete > 1:
        found = analysis.width_shift(by_width(first, "rotary"), by_width(first, "t5"))
        tests.append(Comparison("A2", "log2 of the best h: T5 less rotary", found))
    if complete > 2:
        terms = less_16(Variant(8, 8, positions="t5"))
        tests.append(compare(table, "A3", "8x8 less 4x16, T5, two seeds", *terms))
    if complete > 3:
        both = *cost_of_four("rotary"), *cost_of_four("half", -1)
        tests.append(compare(first, "A4", "16x4 less 4x16: rotary less half", *both))
    return tests


def corrected(tests: Sequence[Comparison]) -> dict[str, float]:
    """Holm's p-values of A2 to A4; while one is missing, three times theirs (amendment 7).

    Of A3 the hypothesis is that both are equal, so its p-value is that of the equivalence.
    """
    p = {
        test.name: analysis.p_equivalence(test.found) if test.name == "A3" else test.found.p
        for test in tests
    }
    if len(p) == 3:
        return analysis.corrected(p)
    return {name: min(3 * value, 1.0) for name, value in p.items()}


def by_width(table: pd.DataFrame, positions: str) -> dict[int, analysis.ByText]:
    """head_dim -> bits of each text."""
    return {v.head_dim: analysis.scores(table, v) for v in points_of(positions)}


def less_16(variant: Variant) -> tuple[Term, Term]:
    """A variant less 4 heads of 16 with the same positions."""
    return (1, variant), (-1, dataclasses.replace(variant, num_heads=4, head_dim=16))


def best_widths(table: pd.DataFrame, shift: Comparison, p: float) -> str:
    """A2 in words: the widths at the minimum of the parabolas, and whether they differ."""
    best = {}
    for positions in ("rotary", "t5"):
        found = by_width(table, positions)
        means = {h: float(np.mean([*bits.values()])) for h, bits in found.items()}
        best[positions] = 2 ** analysis.best_width(means)
    smaller = p < analysis.ALPHA and shift.found.mean < 0
    return f"""**The best width, at the minimum of a parabola in log2 h, is {best["rotary"]:.1f}
with rotary positions and {best["t5"]:.1f} with T5's bias (log2 of their ratio
{interval(shift.found, 2)}, corrected {p_equation(p)}): that it is smaller with T5's bias is
{"shown" if smaller else "not shown"}.**"""


def widths_table(table: pd.DataFrame, positions: Sequence[str]) -> str:
    """What each width costs against heads of 16, by positions."""
    rows = [
        {"difference": f"{v.num_heads}x{v.head_dim} less 4x16"}
        | {
            NAMES[p]: interval(
                compare(table, "", "", *less_16(dataclasses.replace(v, positions=p))).found
            )
            for p in positions
        }
        for v in points_of("rotary")
        if v.head_dim != 16
    ]
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))
