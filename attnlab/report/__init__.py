"""The report of results: one HTML page that loads nothing, Markdown, figures and tables as files.

    from attnlab import lab

    about = lab.Description(question="Are wide heads better?", baseline={"layout": "standard"})
    lab.report(results, "runs/layouts/report.html", about)

On the command line: `python -m experiments.report WORKDIR...`. `Description` holds what a report
needs beside the results, a `Panel` both. A page is data (`page.Page`: sections of text, tables and
figures); templates write it.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from attnlab.atomic import write_atomic
from attnlab.lab.description import Description
from attnlab.lab.results import Results
from attnlab.report import figures, tables
from attnlab.report.page import Block, Figure, Figures, Page, Paragraph, Section, write_page
from attnlab.report.panel import Panel, read_panels
from attnlab.report.words import (
    answers,
    expectations,
    limits,
    making_section,
    question,
    subject,
    warnings,
)

__all__ = ["Panel", "make_page", "read_panels", "report"]

SEEDS = "_seeds.json"
"""Behind the name of a page: the seeds when it was first written. Others were added later."""


def report(
    results: Results | str | Path | Sequence[Results | str | Path],
    path: str | Path,
    description: Description | None = None,
    *,
    heads: bool = False,
) -> Path:
    """Writes the report of results: an HTML page that loads nothing, and beside it a Markdown page,
    `results.csv`, each figure as SVG in `figures` and each table as CSV in `tables`.

    Seeds that are new since the page was first written count as added after looking at scores.

    Args:
      results: of one sweep, or its workdir; or several. Those with the same variants and configs on
        other data are compared together, with texts as a source of variation; others get sections
        of their own.
      path: of the HTML page.
      description: question, baseline, pairs to compare, margin, expected results; None: that in the
        workdir, if there is one. Without a baseline the others are compared with the first variant.
      heads: also attention maps, statistics of heads and a text that each model writes, from the
        checkpoints: a minute or so of computing.

    Returns:
      The path.

    Raises:
      ValueError: there are no results, a workdir is given twice, the baseline names no variant, or
        several, or the path is that of the Markdown page.
    """
    several = [results] if isinstance(results, Results | str | Path) else list(results)
    panels = read_panels(several, description)
    if not any(len(panel.results) for panel in panels):
        raise ValueError("no results to report; run the sweep first")
    if description is not None and description.baseline:
        for panel in panels:
            panel.results.variant(description.baseline)  # raises
    seeds = Path(path).with_name(f"{Path(path).stem}{SEEDS}")
    planned = json.loads(seeds.read_text(encoding="utf-8")) if seeds.exists() else {}
    panels = [_with_added_seeds(panel, planned) for panel in panels]
    path = write_page(make_page(panels, heads=heads), path)
    write_atomic(seeds, json.dumps(planned).encode())
    every = sum((panel.results for panel in panels), Results([]))
    write_atomic(path.parent / "results.csv", every.to_pandas().to_csv(index=False).encode())
    return path


def _with_added_seeds(panel: Panel, planned: dict[str, list[int]]) -> Panel:
    """The panel with the seeds that it had when the report was first written; `planned`: title of a
    panel -> those seeds, which is completed."""
    seeds = {run.spec.seed for run in panel.results}
    first = planned.setdefault(panel.title, sorted(seeds | {s.seed for s in panel.unfinished}))
    if panel.about.planned_seeds or seeds <= set(first):
        return panel
    about = dataclasses.replace(panel.about, seeds_added=True, planned_seeds=tuple(first))
    return dataclasses.replace(panel, about=about)


def make_page(panels: Sequence[Panel], *, heads: bool = False) -> Page:
    """The report as data: question, warnings, conclusions, figures of differences; tables of
    comparisons, scores and budgets; learning curves and rates; limits; how it was made."""
    head: list[Block] = [Paragraph(subject(panels))]
    differences: list[Figure] = []
    sections: list[Section] = []
    for i, panel in enumerate(panels, start=1):
        end = f"-{i}" if len(panels) > 1 else ""
        head += [*warnings(panel), *(expectations(panel) or answers(panel))]
        differences += figures.differences_figure(panel, f"differences{end}")
        sections += _sections(panel, end, heads)
    if differences:
        head.append(Figures(differences))
    lines = dict.fromkeys(line for panel in panels for line in limits(panel))
    sections.append(Section("Limits", [Paragraph(line) for line in lines]))
    sections.append(making_section(panels))
    return Page(question(panels), head, sections)


def _sections(panel: Panel, end: str, heads: bool) -> list[Section]:
    """Of one panel; `end` ends the names of its files."""
    over = figures.over_tag_figures(panel, f"over{end}")
    curves = figures.curves_figures(panel, f"curves{end}")
    blocks: dict[str, list[Block]] = {
        "Comparisons": [*tables.comparison_table(panel, f"comparisons{end}")],
        "Scores": [tables.scores_table(panel, f"scores{end}"), *([Figures(over)] if over else [])],
        "Budgets": [tables.budget_table(panel, f"budgets{end}")],
        "Learning curves": [Figures(curves)] if curves else [],
        "Learning rates": [*tables.rates_table(panel, f"rates{end}")],
    }
    sections = [Section(panel.named(title), some) for title, some in blocks.items() if some]
    if heads:
        from attnlab.report.heads import heads_sections

        sections += heads_sections(panel, end)
    return sections
