"""Pages of the head-width study from its rows: stage 0, learning rates, cost."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.report.page import render, table
from experiments.studies.head_width import design
from experiments.studies.head_width.rates import Cell, cells_of, choose, fit_rates, minimum
from experiments.studies.head_width.rows import Row
from experiments.studies.head_width.spec import PARAMETRIZATIONS

ESTIMATED_HOURS = {0: 3.9, 1: 2.9, 2: 1.1, 3: 8.4, 4: 9.3, 5: 4.4, 6: 4.5}
"""Core-hours by stage that the design of the study expected."""


def stage0_page(rows: Sequence[Row]) -> str:
    """Stage 0: the choice by the rule of the plan, and every cell."""
    of_stage = [row for row in rows if row.spec.stage == 0]
    cells = cells_of(of_stage)
    header = ("parametrization", "point", "text", "bits at each learning rate", "minimum", "r*",
              "k")  # fmt: skip
    return render(
        Path(__file__).with_name("stage0.md.jinja"),
        done=len(of_stage),
        tolerance=design.TOLERANCE,
        cells=table(header, [_cell_row(cell, cells[cell]) for cell in sorted(cells, key=_order)]),
        baselines=_baselines(of_stage),
        **_choice(of_stage),
    )


def _order(cell: Cell) -> tuple[int, int, str]:
    names = list(PARAMETRIZATIONS)
    return names.index(cell.parametrization), cell.variant.head_dim, cell.text


def _choice(rows: Sequence[Row]) -> dict[str, str]:
    """What the rule chooses, and the candidates."""
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
    return {"chosen": chosen, "candidates": table(header, cells)}


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
    cells, formula = cells_of(of_stage), fit_rates(of_stage)
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
    terms = [(n, f"{c:.3f}") for n, c in formula.coefficients.items()]
    return render(
        Path(__file__).with_name("stage1.md.jinja"),
        done=len(of_stage),
        expected=len(design.stage1(rows)),
        inside=sum(minimum(of_cell).interior for of_cell in cells.values()),
        num_cells=len(cells),
        sd=f"{formula.residual_sd:.3f}",
        factor=f"{math.exp(formula.residual_sd):.2f}",
        terms=table(("term", "coefficient"), terms),
        cells=table(header, sorted(found, key=lambda row: (int(row[0]), row[5]))),
    )


def cost_page(rows: Sequence[Row]) -> str:
    """Seconds and core-hours per stage, beside what was estimated before the first run."""
    header = ("stage", "runs", "of", "seconds a run (wall, median)", "CPU seconds a run (median)",
              "CPU core-hours", "estimated before")  # fmt: skip
    lines = []
    for stage in design.ORDER:
        of_stage = [row.origin for row in rows if row.spec.stage == stage]
        expected = len(design.expected_runs(stage))
        cpu = np.array([origin.cpu_seconds for origin in of_stage])
        hours = float(cpu.sum()) / 3600
        wall = float(np.median([origin.seconds for origin in of_stage]))
        counts = [f"{stage} ({design.TITLES[stage]})", str(len(of_stage)), str(expected)]
        measured = [f"{wall:.0f}", f"{np.median(cpu):.0f}", f"{hours:.2f}"]
        lines.append([*counts, *measured, str(ESTIMATED_HOURS[stage])])
    return render(Path(__file__).with_name("cost.md.jinja"), stages=table(header, lines))


def write_pages(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the pages; creates the folder. Raises ValueError where a run is missing."""
    design.check_complete(rows)
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"stage0.md": stage0_page, "cost.md": cost_page, "stage1.md": rates_page}
    for name, page in pages.items():
        write_atomic(folder / name, f"{page(rows)}\n".encode())
    return [folder / name for name in pages]
