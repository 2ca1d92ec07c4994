"""The results pages of the parts, from rows alone: a sentence, its table of tests, the means."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnlab.atomic import write_atomic
from attnlab.lab.stats import Difference, holm
from attnlab.report.page import p_equation, p_value
from attnlab.report.style import themed_svg
from experiments.studies.study3 import analysis, figures, parts, worth
from experiments.studies.study3.comparisons import (
    CONDITIONS,
    Comparison,
    by_text,
    compare,
    cost_of_four,
    first_seeds,
    interval,
    means_table,
    missing,
    points_of,
    registered_table,
    step_milliseconds,
)
from experiments.studies.study3.parts import (
    CONVERTED,
    CONVERTED_OLD,
    NARROW,
    PARTS,
    POINTS,
    RESET,
    WIDE,
    WIDE_INVERSE,
    WIDE_RESET,
)
from experiments.studies.study3.positions import (
    complete_groups,
    complete_positions,
    first_test,
    part_a,
)
from experiments.studies.study3.spec import KINDS, Variant, cache_numbers

PER_HEAD, JOINT = ([cell.variant for cell in group.cells] for group in (PARTS["B"][0], parts.JOINT))
MUON_TERMS = {
    f"{a.num_heads}x{a.head_dim}": ((1, a), (-1, b)) for a, b in zip(PER_HEAD, JOINT, strict=True)
}
"""Of part B: what is compared."""


def muon_tests(table: pd.DataFrame) -> tuple[list[Comparison], dict[str, float]]:
    """Per head less joint of each width, and the corrected p-values of the two of B1."""
    names = {"16x4": "B1, 16x4", "8x8": "B1, 8x8"}
    tests = [
        compare(table, names.get(heads, ""), f"{heads}, per head less joint", *terms)
        for heads, terms in MUON_TERMS.items()
    ]
    return tests, analysis.corrected({test.name: test.found.p for test in tests[:2]})


def part_b(table: pd.DataFrame) -> str:
    """Muon for each head by itself."""
    table = first_seeds(table)
    tests, corrected = muon_tests(table)
    narrow, middle, wide = PER_HEAD
    cost = (1, narrow), (-1, wide)
    costs = [
        compare(table, "", "16x4 less 4x16, both per head", *cost),
        compare(table, "", "8x8 less 4x16, both per head", (1, middle), (-1, wide)),
        compare(table, "", "16x4 less 4x16: per head less joint",
                *cost, *cost_of_four("rotary", -1)),
    ]  # fmt: skip
    a, b, c = (
        interval(test.found)[:-1]
        + f", {analysis.conclusion(test.found, corrected.get(test.name))})"
        for test in tests
    )
    better = any(t.found.mean < 0 and corrected[t.name] < analysis.ALPHA for t in tests[:2])
    return f"""# Muon for each head by itself

**Muon that makes q, k and v of each head orthogonal by themselves, less Muon that joins the heads,
bits per byte: {a} with 16 heads of 4, {b} with 8 heads of 8. That it is better for small heads is
{"shown" if better else "not shown"}.** With 4 heads of 16: {c}, exploratory.
{CONDITIONS}rotary positions, {tests[0].found.count} texts, one seed each, every cell at a learning
rate tuned by itself.

{registered_table([*tests, *costs], corrected)}

B1 are the primary tests of part B, two-sided, with Holm's correction over both; a negative
difference was expected. Equivalence within {analysis.MARGIN} bits is by the 90 % interval of each
and not corrected. The others are exploratory, their p-values not corrected ([plan](plan.md)).

Per head less joint, bits per byte of each text:

{by_text(table, MUON_TERMS)}

Mean held-out bits per byte of each variant:

{means_table(table, [*JOINT, *PER_HEAD])}
"""


def _side(found: Difference) -> str:
    if found.p < analysis.ALPHA:
        return "below" if found.mean < 0 else "above"
    return analysis.conclusion(found)


READINGS = {
    ("below", "equivalent"): "Wide heads can express what narrow ones learn, and do not learn it "
    "from scratch; their width is of no further use.",
    ("below", "below"): "Width helps, after a narrow start.",
    ("equivalent", "above"): "Training wide heads undoes what was learnt.",
}
"""(C1, C2) -> what the plan registered."""
NOT_REGISTERED = {
    ("equivalent", "equivalent"): "The plan has no reading of this pair. Exploratory: with a reset "
    "wide heads learn from scratch what a narrow start gives them.",
}


def reading(first: Difference, second: Difference) -> str:
    """The registered reading of C1 (converted less 4x64 with a reset) and C2 (less 4x16 with one).

    C2 counts as equivalent wherever its 90 % interval is within the margin.
    """
    if _side(first) == "above":
        return "4x64 from scratch is better: no trouble of training."
    equal = analysis.p_equivalence(second) < analysis.ALPHA
    key = _side(first), "equivalent" if equal else _side(second)
    if "inconclusive" in key:
        return "Inconclusive."
    return (READINGS | NOT_REGISTERED).get(key, "The plan has no reading of this.")


WIDE_TERMS = (
    ("C1", "converted less 4x64, reset", CONVERTED, WIDE_RESET),
    ("C2", "converted less 4x16, reset", CONVERTED, RESET),
    ("width", "4x64 less 4x16, both reset", WIDE_RESET, RESET),
    ("width", "4x64 less 4x16, no reset", WIDE, NARROW),
    ("no reset", "converted less 4x64, not reset", CONVERTED, WIDE),
    ("reset", "4x16, reset less not", RESET, NARROW),
    ("reset", "4x64, reset less not", WIDE_RESET, WIDE),
)
SCALE_TERMS = (
    ("scale", "4x64, 4/h less 1/sqrt(h)", WIDE_INVERSE, WIDE),
    ("old scale", "converted, old scale less new", CONVERTED_OLD, CONVERTED),
)
"""Of part C: the name of a comparison, what is compared, both variants."""


def wide_tests(
    table: pd.DataFrame, terms: Sequence[tuple[str, str, Variant, Variant]]
) -> list[Comparison]:
    """The comparisons of part C that are named."""
    return [compare(table, name, what, (1, a), (-1, b)) for name, what, a, b in terms]


def part_c(table: pd.DataFrame, left: int = 0) -> str:
    """Whether wide heads cannot or do not learn; without the scales of scores while `left` judged
    runs are missing, as amendment 4 says."""
    table, terms = first_seeds(table), list(WIDE_TERMS)
    variants, not_run = [NARROW, RESET, WIDE, WIDE_RESET, CONVERTED], ""
    if left:
        not_run = f" Other scales of scores are not run: {left} judged runs are missing."
    else:
        terms, variants = [*terms, *SCALE_TERMS], [*variants, WIDE_INVERSE, CONVERTED_OLD]
    tests = wide_tests(table, terms)
    first, second = tests[0].found, tests[1].found

    def ratio(column: str, wide: Variant) -> float:
        both = (analysis.rows_of(table, v)[column].iloc[0] for v in (wide, RESET))
        return float(next(both) / next(both))

    return f"""# Wide heads: cannot or do not learn?

**4 heads of 16, converted half way to 4 heads of 64, less 4 heads of 64 from scratch:
{interval(first)} bits per byte; less 4 heads of 16: {interval(second)}. {reading(first, second)}**
4 layers, D = 64, T5's bias, Muon, the optimizer reset half way in all three, {first.count} texts,
one seed each; equal steps and FFN. Beside 4 heads of 16 both others have
{ratio("parameters", WIDE):.1f} times the parameters in the end; the training of the converted heads
has {ratio("training_flops", CONVERTED):.1f} times the FLOPs, that of heads of 64 from scratch
{ratio("training_flops", WIDE_RESET):.1f} times.

{registered_table(tests, {})}

C1 is the primary and C2 registered; the others are exploratory ([plan](plan.md)), their p-values
not corrected.{not_run} A pair of C1 and C2 without a reading in the plan was called inconclusive by
the code before the first look; the exploratory reading was written after it.

Bits per byte of each text:

{by_text(table, {what: ((1, a), (-1, b)) for _, what, a, b in terms[:2]})}

Mean held-out bits per byte of each variant:

{means_table(table, variants)}
"""


FEWEST_EVENTS = 30
"""Runs that copied below which D1 is not tested."""


def copy_events(table: pd.DataFrame) -> analysis.Events:
    """The runs of D1; heads of 4, 8 and 64 are expected to be later."""
    variants = points_of("rotary", length=256)
    return analysis.events(table, variants, [v for v in variants if v.head_dim not in (16, 32)])


def part_d(table: pd.DataFrame) -> str:
    """What decides when copying is learnt."""
    variants, found = points_of("rotary", length=256), copy_events(table)
    rows = []
    for variant in variants:
        one = analysis.events(table, [variant], [])
        rows.append(
            {
                "heads": f"{variant.num_heads}x{variant.head_dim}",
                "runs": len(one.step),
                "copied": int(one.copied.sum()),
                "median first step": _median(one),
            }
        )
    count, title = int(found.copied.sum()), "# When is copying learnt?\n\n"
    whole, copied = analysis.copy_part(
        table, Variant(1, 64, length=256), Variant(4, 16, length=256), "python"
    )
    share = f" ({copied / whole:.0%})" if whole > 0 else ""
    about = f"""{CONDITIONS}T = 256,
rotary positions, Muon, 2 texts with 8 seeds; {count} of {len(found.step)} runs copied.

![Share of runs that have not copied over training steps, a line for each head_dim](copying.svg)

{pd.DataFrame(rows).to_markdown(index=False)}

Copied: the second half of 64 repeated random bytes costs less than 2 bits a byte, evaluated every
96 of the 1,920 steps; runs that never copied are censored at the end ([plan](plan.md)). On `python`
one head of 64 less 4x16 is {whole:+.3f} bits per byte, of which {copied:+.3f}{share} on copy bytes
(exploratory at this width).
"""
    if count < FEWEST_EVENTS:
        return f"""{title}**D1 is not tested: {count} of {len(found.step)} runs copied, the plan
asks for {FEWEST_EVENTS}.** The part is repeated at 80 bytes a parameter, by an amendment.
{about}"""
    statistic, p = analysis.log_rank(found)
    low, high = analysis.hazard_interval(found)
    said = "copy later" if statistic < 0 else "copy earlier"
    said = said if p < analysis.ALPHA else "are not shown to copy later or earlier"
    return f"""{title}**One head of 64 and heads of 8 or 4 {said} than heads of 16
and 32: hazard ratio {analysis.hazard_ratio(found):.2f} ({low:.2f} to {high:.2f}), {p_equation(p)}
(D1: log-rank, stratified by text, permuted within text and seed, two-sided).** {about}"""


def cache_name(variant: Variant) -> str:
    """The kind of a model of part E for people."""
    own = {"standard": "MHA, 8 heads of 8", "fewer": "fewer heads of 8"}
    name = own.get(variant.kind, KINDS[variant.kind])
    return f"{name}, per-head Muon" if variant.optimizer == "muon_per_head" else name


def cache_table(table: pd.DataFrame, variants: Sequence[Variant]) -> str:
    """Models of part E: what they keep, their bits, FLOPs and seconds."""
    rows = []
    for variant in variants:
        found, bits = analysis.rows_of(table, variant), analysis.scores(table, variant)
        rows.append(
            {
                "heads": cache_name(variant),
                "numbers kept": cache_numbers(variant),
                "texts": len(bits),
                "bits": f"{np.mean(list(bits.values())):.4f}",
                "rate": f"{found['learning_rate'].iloc[0]:.4g}",
                "parameters": f"{found['parameters'].iloc[0]:,}",
                "FLOPs a byte": f"{found['flops_per_token'].iloc[0]:,}",
                "steps": f"{found['steps'].iloc[0]:,}",
                "ms a step": f"{step_milliseconds(found):.0f}",
            }
        )
    return str(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))


def better_mla(table: pd.DataFrame) -> Variant:
    """MLA at 1/4 with joint or per-head Muon: the lower mean of validation bits."""
    both = [one for one in parts.at_cache(4) if one.kind == "mla"]
    bits = [np.mean([*analysis.scores(table, v, "validation_bits").values()]) for v in both]
    return both[int(np.argmin(bits))]


def part_e(table: pd.DataFrame) -> str:
    """What is worth keeping in a cache."""
    at = {v.kind: v for v in parts.at_cache(4) if v.optimizer == "muon"}
    at["mla"] = better_mla(table)
    names = {"E1": "mla", "E2": "tied", "E3": "cla", "E4": "gqa_double"}

    def less_gqa(name: str, kind: str, change: Callable[[Variant], Variant]) -> Comparison:
        what = f"{cache_name(at[kind])} less grouped-query"
        return compare(table, name, what, (1, change(at[kind])), (-1, change(at["gqa"])))

    tests = [less_gqa(name, kind, lambda v: v) for name, kind in names.items()]
    same = [less_gqa("equal FLOPs", kind, parts.equal_flops) for kind in names.values()]
    cost = compare(table, "1/4", "grouped-query less MHA", (1, at["gqa"]), (-1, parts.MHA))
    said = "; ".join(f"{one.what.removesuffix(' less grouped-query')} {interval(one.found)}"
                     for one in tests)  # fmt: skip
    others = [v for cache in (2, 8) for v in parts.at_cache(cache)]
    corrected = analysis.corrected({one.name: one.found.p for one in tests})
    return f"""# What is worth keeping in a cache

**At a quarter of the cache of multi-head attention and equal parameters, less grouped-query heads
(bits per byte): {said}.** Grouped-query heads less multi-head attention:
{interval(cost.found)}. 4 layers, D = 64, T = 256, 216,448 parameters, 20 training bytes for
each of the 12 L D² of the layers, Muon, {tests[0].found.count} texts, one seed each. MLA has the
optimizer with the lower validation bits.

![Mean held-out bits per byte over the bytes of the cache, a line for each kind of heads](cache.svg)

GQA: grouped-query, MQA: multi-query, GTA: grouped-tied, MLA: multi-head latent, TPA: tensor
product.

{registered_table([*tests, cost, *same], corrected)}

E1 is the primary; Holm over E1 to E4. The rows of equal FLOPs are exploratory: the same models,
with as many steps as give the FLOPs of a training of multi-head attention.

## Equal parameters, a quarter of the cache

{cache_table(table, [parts.MHA, *parts.at_cache(4)])}

## Equal FLOPs, a quarter of the cache

{cache_table(table, [parts.MHA, *map(parts.equal_flops, parts.at_cache(4))])}

## A half and an eighth

{cache_table(table, others)}

Seconds are of one core and include compiling and scoring. MLA and grouped-tied heads have parts
without positions, so the others rotate half of each head. Tied heads keep values, from which keys
are rotated when they are read; attnlab's cache keeps both.
"""


def part_f(table: pd.DataFrame) -> str:
    """What a shared attention and a shared FFN are worth in layers."""
    texts, losses = worth.losses_of(table)
    found = worth.estimate(worth.design_of(worth.planned()), losses, draws=300)
    names = {
        "phi_a": "attention", "phi_f": "FFN", "phi_b": "attention and FFN",
        "F1": "phi_a - phi_f", "F2": "phi_b - phi_a phi_f",
    }  # fmt: skip
    rows = [
        {
            "": name,
            "what": what,
            "estimate (95 % interval)": interval(found.found[name]),
            "p": p_value(found.found[name].p) if name in ("F1", "F2") else "",
            "bootstrap": "{:+.3f} to {:+.3f}".format(*found.bootstrap[name]),
            **{
                f"r = {r}": f"{r ** found.found[name].mean:.2f} layers" if "phi" in name else ""
                for r in (2, 4, 8)
            },
        }
        for name, what in names.items()
    ]
    first = found.found["F1"]
    say = {
        True: "A shared attention keeps more of the worth of layers than a shared FFN.",
        False: "That they differ is not shown.",
    }[first.p < analysis.ALPHA and first.mean > 0]
    if first.p < analysis.ALPHA and first.mean < 0:
        say = "A shared FFN keeps more of the worth of layers than a shared attention."
    worths = {n: 4 ** found.found[n].mean for n in ("phi_a", "phi_f")}
    law = found.law
    return f"""# What a shared attention and a shared FFN are worth in layers

**An attention that 4 layers share is worth {worths["phi_a"]:.2f} layers of its own, an FFN
{worths["phi_f"]:.2f}: phi_a - phi_f = {interval(first)}, {p_equation(first.p)}. {say}** 8 layers,
D = 64, 96 and 128, heads of 16, rotary positions, Muon, outputs of sublayers scaled by 1 / layers,
{len(texts)} texts, one seed each.

![Layers that a shared sublayer is worth over the layers that share it](worth.svg)

{pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)}

L = E + A (N_once + r^phi_a N_attn + r^phi_f N_ffn)^-alpha + B S^-beta, fitted to the means over
texts, with an exponent phi_b where both are shared; alpha = {law.alpha:.2f}, beta = {law.beta:.2f}.
Intervals are of the jackknife over texts; a bootstrap over {len(texts)} texts is too narrow. F1 is
the primary.
"""


def _median(found: analysis.Events) -> str:
    """The Kaplan-Meier median, which is that of the steps while censoring is at the end alone."""
    steps = np.sort(np.where(found.copied, found.step, math.inf))
    median = steps[(len(steps) - 1) // 2] if len(steps) else math.inf
    return f"{median:.0f}" if math.isfinite(median) else "not reached"


PAGES: dict[str, tuple[str, Callable[[pd.DataFrame], str], tuple[parts.Group, ...]]] = {
    "A": ("positions.md", part_a, PARTS["A"]),
    "B": ("per_head_muon.md", part_b, (parts.JOINT, *PARTS["B"])),
    "C": ("wide_heads.md", part_c, (*PARTS["A"][:1], *PARTS["C"])),
    "D": ("copying.md", part_d, PARTS["D"]),
    "E": ("cache.md", part_e, PARTS["E"]),
    "F": ("shared_layers.md", part_f, PARTS["F"]),
}
"""Part -> its page, what writes it, and the groups whose rows it reads."""
FIRST_LOOKS: dict[str, tuple[Callable[[pd.DataFrame, int], str], int]] = {
    "A": (part_a, 1),  # amendments 2 and 7
    "C": (part_c, 3),  # amendment 4
}
"""Part -> the page that is written when so many groups of `PAGES` are complete; it takes the number
of judged runs that are missing."""
FIGURES: dict[str, tuple[str, Callable[[pd.DataFrame], Figure]]] = {
    "A": (
        "positions.svg",
        lambda table: figures.positions_figure(
            first_seeds(table), {64: POINTS[64]}, complete_positions(complete_groups(table))
        ),
    ),
    "D": (
        "copying.svg",
        lambda table: figures.copying_figure(table, points_of("rotary", length=256)),
    ),
    "E": ("cache.svg", figures.cache_figure),
    "F": ("worth.svg", figures.worth_figure),
}
"""Part -> the figure of its page, and what draws it."""


def _d1(table: pd.DataFrame) -> float:
    found = copy_events(table)
    return analysis.log_rank(found)[1] if found.copied.sum() >= FEWEST_EVENTS else math.nan


def _e1(table: pd.DataFrame) -> float:
    terms = (1, better_mla(table)), (-1, parts.cache_variant("gqa", 4))
    return compare(table, "", "", *terms).found.p


PRIMARY: dict[str, Callable[[pd.DataFrame], float]] = {
    "A1": lambda table: first_test(table).difference.found.p,
    "B1": lambda table: min(muon_tests(table)[1].values()),  # after their own correction
    "C1": lambda table: wide_tests(table, WIDE_TERMS[:1])[0].found.p,
    "D1": _d1,
    "E1": _e1,
    "F1": lambda table: (
        worth.estimate(worth.design_of(worth.planned()), worth.losses_of(table)[1]).found["F1"].p
    ),
}
"""Primary test -> its p-value from rows; NaN where the plan does not test it."""


def primaries(table: pd.DataFrame) -> str:
    """Holm's correction over the primary tests of all parts; those not tested count as 1."""
    p = []
    for name, test in PRIMARY.items():
        rows = table if name == "D1" else first_seeds(table)
        p.append(test(rows) if is_read(name[0], table) else math.nan)
    said = [
        f"{name} {'not tested' if math.isnan(one) else p_value(one)}"
        for name, one in zip(PRIMARY, holm(p, len(p)).tolist(), strict=True)
    ]
    return f"""
Holm's correction over the primary tests of all parts, of which those that are not tested count as
1: {", ".join(said)}.
"""


def is_read(part: str, table: pd.DataFrame) -> bool:
    """Are all rows there that the first look at a part needs?"""
    groups = PAGES[part][2]
    return not missing(groups[: FIRST_LOOKS[part][1]] if part in FIRST_LOOKS else groups, table)


def make_page(part: str, table: pd.DataFrame) -> str:
    """The page of a part. Before all rows are there it has their number, and no test but those
    that an amendment reads first."""
    _, write, groups = PAGES[part]
    left = missing(groups, table)
    if not left:
        return write(table)
    if is_read(part, table):
        return FIRST_LOOKS[part][0](table, left)
    return (
        f"# Part {part} of study 3\n\n**Incomplete: {left} judged runs are missing.** Nothing is "
        "tested before all are there, as the [plan](plan.md) says.\n"
    )


def write_pages(names: Sequence[str], folder: Path) -> list[Path]:
    """Writes the pages of parts, and the figures that these show, from the rows in a folder.

    Parts without a page are left out.
    """
    table, found = analysis.read_table(folder), []
    ending = primaries(table)
    for part in names:
        if part not in PAGES:
            continue
        text = make_page(part, table) + (ending if is_read(part, table) else "")
        found.append(folder / PAGES[part][0])
        write_atomic(found[-1], text.encode())
        name, draw = FIGURES.get(part, ("", None))
        if draw and f"]({name})" in text:
            found.append(folder / name)
            write_atomic(found[-1], themed_svg(draw(table), name).encode())
    return found
