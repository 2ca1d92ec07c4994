"""The page of part A: how the best width of a head depends on positions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from attnlab.report.page import p_equation
from experiments.studies.study3 import analysis
from experiments.studies.study3.comparisons import (
    CONDITIONS,
    TABLES,
    Comparison,
    Merge,
    Term,
    by_text,
    compare,
    conclude,
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
    costs = cost | {
        p: compare(table, "", f"16x4 less 4x16: {p}", *cost_of_four(p)) for p in positions[2:]
    }
    stated = "; ".join(f"{interval(one.found)} with {NAMES[p]}" for p, one in costs.items())
    waiting = f"{WAITING[complete]} not run: {left} judged runs are missing. " if left else ""
    title, best, widths, drawn = "What heads of 4 cost, by positions", "", "", ""
    variants = [cell.variant for cell in PARTS["A"][0].cells]
    if tests:
        title = "How the best width of a head depends on positions"
        best = f"\n{best_widths(table, tests[0], p_values['A2'])}"
        widths = f"\n{FIGURE}\n\n{widths_table(table, positions)}\n"
        variants = points_of(*positions)
        low, high = analysis.width_shift_bootstrap(*shifted(table))
        drawn = f" A bootstrap over texts, too narrow, gives A2 {low:+.2f} to {high:+.2f}."
    if len(tests) == 3:
        best += f"\n{half_said(tests[2], p_values['A4'])}"
    return f"""# {title}

**Heads of 4 minus heads of 16, bits per byte: {stated}. Rotary less T5 {interval(first.found)},
{p_equation(first.found.p)}. {said}**{best}
{CONDITIONS}Muon, {first.found.count} texts, one seed each.
{widths}
Differences in bits per byte; 16x4 is 16 heads of 4, and above 0 these are worse:

{registered_table([first, *tests, *costs.values()], p_values, equal="A3")}

A1 is the primary test of part A; rows without a name are exploratory, their p-values not corrected.
{correction(tests, p_values)} That of
A3 is of equivalence within {analysis.MARGIN} bits.{drawn} {waiting}T5's bias also gives each head a
prior of distance, and 32 numbers a head ([plan](plan.md), amendments 2 and 7).

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
        found, other = (analysis.width_shift(*shifted(first, column)) for column in TABLES.values())
        units = analysis.width_shift(*shifted(first, merge=analysis.without_pair))
        tests.append(Comparison("A2", "log2 of the best h: T5 less rotary", found, other, units))
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


def correction(tests: Sequence[Comparison], p_values: Mapping[str, float]) -> str:
    """Which correction p-values have; of Holm's, whose conclusions it changes (amendment 7)."""
    if len(tests) < 3:
        return (
            "Holm's correction is over A2, A3 and A4; while one is not run, p-values are "
            "multiplied by 3."
        )
    early = corrected(tests[:2])
    changed = [
        f"{test.name} from {before} to {after}"
        for test in tests[:2]
        if (before := conclude(test, early, "A3")) != (after := conclude(test, p_values, "A3"))
    ]
    return (
        "Holm's correction is over A2, A3 and A4. Before A4 was run, p-values of A2 and A3 were "
        f"multiplied by 3; Holm's change {' and '.join(changed) or 'no conclusion'}."
    )


def half_said(test: Comparison, p: float) -> str:
    """A4 in words, by its corrected p-value."""
    found, said = test.found, analysis.conclusion(test.found, p)
    more = {
        "equivalent": f"; both costs are equivalent within {analysis.MARGIN}",
        "inconclusive": f", nor that both costs are equivalent within {analysis.MARGIN}",
    }.get(said, "" if found.mean > 0 else ": they cost more")
    if "within the margin" in said:
        more += f"; the difference is within {analysis.MARGIN}"
    shown = "shown" if p < analysis.ALPHA and found.mean > 0 else "not shown"
    return f"""**What heads of 4 cost, rotary less rotary on half a head: {interval(found)},
corrected {p_equation(p)}, {found.count} texts. That they cost less where half of each head is
rotated is {shown}{more}.**"""


def by_width(
    table: pd.DataFrame,
    positions: str,
    column: str = TABLES["all"],
    merge: Merge = dict,
) -> dict[int, analysis.ByText]:
    """head_dim -> bits of each text."""
    return {v.head_dim: merge(analysis.scores(table, v, column)) for v in points_of(positions)}


def shifted(
    table: pd.DataFrame,
    column: str = TABLES["all"],
    merge: Merge = dict,
) -> tuple[dict[int, analysis.ByText], dict[int, analysis.ByText]]:
    """Both sides of A2, by width: rotary positions and T5's bias."""
    first, second = (by_width(table, p, column, merge) for p in ("rotary", "t5"))
    return first, second


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
