"""Pages of the head-width study from its rows: stage 0, learning rates, cost."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlab.lab.cells import table
from attnlab.lab.head_width import design
from attnlab.lab.head_width.rates import Cell, cells_of, choose, fit_rates, minimum
from attnlab.lab.head_width.rows import Row
from attnlab.lab.head_width.spec import PARAMETRIZATIONS

ESTIMATED_HOURS = {0: 3.9, 1: 2.9, 2: 1.1, 3: 8.4, 4: 9.3, 5: 4.4, 6: 4.5}
"""Core-hours by stage that the design of the study expected."""


def stage0_page(rows: Sequence[Row]) -> str:
    """Stage 0: the choice by the rule of the plan (when complete), and every cell."""
    of_stage = [row for row in rows if row.spec.stage == 0]
    done = {row.spec.id for row in of_stage}
    left = [spec for spec in design.stage0(rows) if spec.id not in done]
    lines = [
        "# Stage 0: optimizer and parametrization",
        "",
        "Bits per byte on the validation part; D = 64, one seed per text. Written by "
        "`experiments.study --pages` from `runs.csv`.",
        "",
        f"{len(of_stage)} runs are done, {len(left)} are left." if left else _choice(of_stage),
        "",
        "## Every cell",
        "",
        "Minimum: of the parabola in ln r through the best rate and the two beside it. k: bits per "
        "(ln r)^2.",
        "",
    ]
    cells = cells_of(of_stage)
    order = sorted(cells, key=_order)
    header = ("parametrization", "point", "text", "bits at each learning rate", "minimum", "r*",
              "k")  # fmt: skip
    lines += [table(header, [_cell_row(cell, cells[cell]) for cell in order]), ""]
    lines += ["## Baselines", "", "Bits per byte on the held-out windows, beside the best held-out "
              "score of a run of stage 0.", ""]  # fmt: skip
    return "\n".join([*lines, _baselines(of_stage)])


def _order(cell: Cell) -> tuple[int, int, str]:
    names = list(PARAMETRIZATIONS)
    return names.index(cell.parametrization), cell.variant.head_dim, cell.text


def _choice(rows: Sequence[Row]) -> str:
    names = tuple(PARAMETRIZATIONS)
    chosen, found = choose(rows, names, design.TOLERANCE)
    lowest = min(mean for mean, _ in found.values())
    header = ("parametrization", "mean of 6 minima", "range of ln r* over points", "candidate")
    cells = [
        (
            f"{name}: {PARAMETRIZATIONS[name]}",
            f"{mean:.4f}",
            f"{spread:.2f} (a factor of {math.exp(spread):.2f})",
            "chosen" if name == chosen else "yes" if mean <= lowest + design.TOLERANCE else "no",
        )
        for name, (mean, spread) in found.items()
    ]
    intro = (
        f"All {len(rows)} runs are done. **By the rule of the plan `{chosen}` is used from here "
        f"on**: candidates are within {design.TOLERANCE} bits of the lowest mean, and of them "
        "the one with the smallest range of the best learning rate over the points is chosen."
    )
    return f"{intro}\n\n{table(header, cells)}\n"


def _cell_row(cell: Cell, rows: Sequence[Row]) -> list[str]:
    found = minimum(rows)
    scores = [f"{r.spec.learning_rate:g}: {_bits(r.scores.validation_bits)}" for r in rows]
    return [
        cell.parametrization,
        cell.variant.point,
        cell.text,
        " · ".join(scores),
        f"{found.bits:.4f}" + ("" if found.interior else " (at an end)"),
        f"{math.exp(found.log_rate):.4f}",
        f"{found.curvature:.3f}",
    ]


def _bits(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _baselines(rows: Sequence[Row]) -> str:
    header = ("text", "unigram", "3-gram", "4-gram", "5-gram", "gzip -9", "best run")
    texts = dict.fromkeys(row.spec.text for row in rows)
    lines = []
    for text in texts:
        of_text = [row for row in rows if row.spec.text == text]
        b = of_text[0].baselines
        best = min(row.scores.heldout_bits for row in of_text)
        numbers = (b.unigram, b.ngram3, b.ngram4, b.ngram5, b.gzip, best)
        lines.append([text, *(f"{number:.3f}" for number in numbers)])
    return table(header, lines)


def rates_page(rows: Sequence[Row]) -> str:
    """Stage 1: the rate formula with its residuals, and every cell."""
    of_stage = [row for row in rows if row.spec.stage == 1]
    expected = len(design.stage1(rows))
    cells = cells_of(of_stage)
    inside = sum(minimum(of_cell).interior for of_cell in cells.values())
    formula = fit_rates(of_stage)
    sd = formula.residual_sd
    lines = [
        "# Stage 1: learning rates",
        "",
        f"{len(of_stage)} of {expected} runs are done. The best rate lies between two others in "
        f"{inside} of {len(cells)} cells. Least squares of ln r* on the terms below leave a "
        f"standard deviation of {sd:.3f} (a factor of {math.exp(sd):.2f}).",
        "",
    ]
    terms = [(n, f"{c:.3f}") for n, c in formula.coefficients.items()]
    lines += [table(("term", "coefficient"), terms), ""]
    header = ("D", "T", "point", "plan", "bytes per parameter", "text", "minimum", "r*", "k",
              "residual of ln r*")  # fmt: skip
    found = []
    for (cell, of_cell), residual in zip(cells.items(), formula.residuals.values(), strict=True):
        best, v = minimum(of_cell), cell.variant
        end = "" if best.interior else " (at an end)"
        shape = [str(v.width), str(v.length), v.point, v.plan]
        run = [f"{cell.bytes_per_parameter:g}", cell.text]
        rate = f"{math.exp(best.log_rate):.4f}"
        numbers = [f"{best.bits:.4f}{end}", rate, f"{best.curvature:.3f}", f"{residual:+.3f}"]
        found.append([*shape, *run, *numbers])
    found.sort(key=lambda row: (int(row[0]), row[5]))
    return "\n".join([*lines, table(header, found)])


def cost_page(rows: Sequence[Row]) -> str:
    """Seconds and core-hours per stage, beside what was estimated before the first run."""
    header = ("stage", "runs", "of", "seconds a run (wall, median)", "CPU seconds a run (median)",
              "CPU core-hours", "estimated before")  # fmt: skip
    lines = []
    for stage in design.ORDER:
        of_stage = [row.origin for row in rows if row.spec.stage == stage]
        expected = len(design.expected_runs(stage))
        if not of_stage:
            lines.append([str(stage), "0", str(expected), *"---", str(ESTIMATED_HOURS[stage])])
            continue
        cpu = np.array([origin.cpu_seconds for origin in of_stage])
        hours = float(cpu.sum()) / 3600
        wall = float(np.median([origin.seconds for origin in of_stage]))
        counts = [f"{stage} ({design.TITLES[stage]})", str(len(of_stage)), str(expected)]
        measured = [f"{wall:.0f}", f"{np.median(cpu):.0f}", f"{hours:.2f}"]
        lines.append([*counts, *measured, str(ESTIMATED_HOURS[stage])])
    text = (
        "# Cost\n\nWall seconds include waiting for other work on the machine (the study has the "
        "lowest priority); CPU seconds do not.\n"
    )
    return f"{text}\n{table(header, lines)}"


def write_pages(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes every page there are rows for; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"stage0.md": stage0_page, "cost.md": cost_page}
    if any(row.spec.stage == 1 for row in rows):
        pages["stage1.md"] = rates_page
    for name, page in pages.items():
        (folder / name).write_text(page(rows).rstrip() + "\n")
    return [folder / name for name in pages]
