"""What the pages of all parts are made of: comparisons of variants, their tables, the means."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from attnlab.lab.stats import Difference
from attnlab.report.page import p_value
from experiments.studies.study3 import analysis, parts
from experiments.studies.study3.analysis import ByText
from experiments.studies.study3.cost import measured_seconds
from experiments.studies.study3.parts import POINTS
from experiments.studies.study3.spec import Variant

Term = tuple[int, Variant]
Merge = Callable[[ByText], ByText]
CONDITIONS = (
    "4 layers, D = 64, 0.22 million parameters, 20 training bytes for each of the 12 L D² of the "
    "layers, equal FLOPs, "
)
TABLES = {"all": "heldout_bits", "other": "heldout_other_bits"}
"""Bytes that are scored -> column."""
COPY_TEXTS = ("python", "wikitext2", "web")
"""Texts whose copy bytes are reported: the others have fewer than 1 % (plan)."""


class Comparison(NamedTuple):
    """A registered test: what it is called, what is compared, what came out."""

    name: str
    what: str
    found: Difference
    other: Difference | None = None
    """On bytes that are no copy bytes."""
    units: Difference | None = None
    """With the two Tatoeba texts as one."""


def compare(table: pd.DataFrame, name: str, what: str, *terms: Term) -> Comparison:
    """The sum of sign x bits of variants, paired by text."""

    def estimate(column: str, merge: Merge) -> Difference:
        bits = [(sign, merge(analysis.scores(table, v, column))) for sign, v in terms]
        return analysis.over_texts(analysis.contrast(*bits))

    return Comparison(
        name,
        what,
        estimate(TABLES["all"], dict),
        estimate(TABLES["other"], dict),
        estimate(TABLES["all"], analysis.without_pair),
    )


def missing(groups: Sequence[parts.Group], table: pd.DataFrame) -> int:
    """Judged runs of groups that have no row yet."""
    cells = [cell for group in groups for cell in group.cells]
    wanted = sum(len(cell.texts) * len(cell.replicates) for cell in cells)
    seeds = [analysis.rows_of(table, cell.variant)["replicate"] for cell in cells]
    there = sum(one.isin(cell.replicates).sum() for one, cell in zip(seeds, cells, strict=True))
    return int(wanted - there)


def interval(found: Difference | None, digits: int = 3) -> str:
    """Mean and 95 % interval.

    >>> interval(Difference(0.0203, 0.0101, 0.0304))
    '+0.020 (+0.010 to +0.030)'
    """
    if found is None:
        return ""
    mean, low, high = (f"{value:+.{digits}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} ({low} to {high})"


def conclude(test: Comparison, corrected: Mapping[str, float], equal: str = "") -> str:
    """`analysis.conclusion` by the corrected p-value of a test, if it has one; that of the test
    `equal` is of the equivalence."""
    p = corrected.get(test.name)
    if test.name == equal:
        return analysis.conclusion(test.found, p_equal=p)
    return analysis.conclusion(test.found, p)


def registered_table(
    tests: Sequence[Comparison], corrected: Mapping[str, float], equal: str = ""
) -> str:
    """The registered comparisons, and below them the same numbers on other bytes and on 7 units;
    `corrected` has Holm's p-values of those that have some, which decide; that of the test `equal`
    is of the equivalence."""
    rows = [
        {
            "": test.name,
            "difference": test.what,
            "mean (95 % interval)": interval(test.found),
            "p": p_value(test.found.p),
            "Holm": p_value(corrected[test.name]) if test.name in corrected else "",
            "conclusion": conclude(test, corrected, equal),
        }
        for test in tests
    ]
    again = [
        {
            "difference": test.what,
            "other bytes": interval(test.other),
            "7 units": interval(test.units),
        }
        for test in tests
        if test.other
    ]
    table = pd.DataFrame(rows)
    table = table if corrected else table.drop(columns="Holm")
    return f"""{table.to_markdown(index=False, disable_numparse=True)}

The same without the bytes whose context stands earlier in the window (other bytes), and with the
two Tatoeba texts averaged (7 units):

{pd.DataFrame(again).to_markdown(index=False, disable_numparse=True)}"""


def means_table(table: pd.DataFrame, variants: Sequence[Variant]) -> str:
    """Held-out bits of each variant over texts, its rate, its FLOPs and measured seconds; settings
    that all variants have are left out."""
    rows = []
    for variant in variants:
        found = analysis.rows_of(table, variant)
        bits = analysis.scores(table, variant)
        rows.append(
            {
                "heads": f"{variant.num_heads}x{variant.head_dim}",
                "positions": variant.positions,
                "optimizer": variant.optimizer,
                "start": variant.start,
                "scale": variant.scale,
                "texts": len(bits),
                "bits": f"{np.mean(list(bits.values())):.4f}",
                "rate": f"{found['learning_rate'].iloc[0]:.4g}{grid_end(table, variant)}",
                "FLOPs a byte": f"{found['flops_per_token'].iloc[0]:,}",
                "ms a step": step_time(variant, found),
            }
        )
    means = pd.DataFrame(rows)
    settings = ("positions", "optimizer", "start", "scale", "texts")
    same = [name for name in settings if means[name].nunique() == 1]
    return str(means.drop(columns=same).to_markdown(index=False, disable_numparse=True))


def grid_end(table: pd.DataFrame, variant: Variant) -> str:
    """What the plan says of a rate whose grid is lowest at an end; else nothing."""
    tuned = analysis.rows_of(table, variant, "tuning")
    bits = tuned.groupby("learning_rate")["validation_bits"].mean()
    at_end = len(bits) > 0 and bits.idxmin() in (bits.index[0], bits.index[-1])
    return ", end of its grid" if at_end else ""


def step_time(variant: Variant, rows: pd.DataFrame) -> str:
    """`step_milliseconds`; none of runs that share a first half, whose seconds leave it out."""
    return f"{step_milliseconds(rows):.0f}" if variant.start == "scratch" else ""


def step_milliseconds(rows: pd.DataFrame) -> float:
    """Median seconds of a run over its steps, on one core; with compiling and scoring."""
    return float(1000 * (measured_seconds(rows) / rows["steps"]).median())


def by_text(table: pd.DataFrame, columns: Mapping[str, Sequence[Term]]) -> str:
    """Sums of sign x bits of variants on each text, a column each; and below them on the copy bytes
    of the texts that have enough."""
    found = {
        kind: pd.DataFrame(
            {
                name: sum(sign * pd.Series(analysis.scores(table, v, column)) for sign, v in terms)
                for name, terms in columns.items()
            }
        )
        for kind, column in (("all", TABLES["all"]), ("copy", "heldout_copy_bits"))
    }
    whole, copied = found["all"].reindex(parts.ALL_TEXTS), found["copy"].reindex(COPY_TEXTS)
    copied.index = pd.Index([f"{text}, copy bytes" for text in COPY_TEXTS])
    return str(pd.concat([whole, copied]).round(3).to_markdown(floatfmt="+.3f"))


def points_of(*positions: str, length: int = 128) -> list[Variant]:
    return [Variant(n, h, length=length, positions=p)
            for p in positions for n, h in sorted(POINTS[64], reverse=True)]  # fmt: skip


def cost_of_four(positions: str, sign: int = 1) -> tuple[Term, Term]:
    return (sign, Variant(16, 4, positions=positions)), (-sign, Variant(4, 16, positions=positions))


def first_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """What all but A3 read (amendment 2): differences are paired by text and seed."""
    return table[table["replicate"] == 0]
