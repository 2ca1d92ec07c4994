"""The report of results: one HTML page that loads nothing, Markdown, figures and tables as files.

    from attnlab import lab

    about = lab.Description(question="Are wide heads better?", baseline={"layout": "standard"})
    lab.report(results, "runs/layouts/report.html", about)

On the command line: `python -m experiments.report WORKDIR...`. `Description` holds what a report
needs beside the results, a `Panel` both. A page is data (`page.Page`: sections of text, tables and
figures); templates write it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnlab.atomic import write_atomic
from attnlab.lab.description import Description
from attnlab.lab.results import Results
from attnlab.lab.spec import RunSpec
from attnlab.load import SPECS
from attnlab.report import figures, tables
from attnlab.report.page import (
    FIGURES,
    TABLES,
    Block,
    Figure,
    Figures,
    Page,
    Paragraph,
    Section,
    write_page,
)
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
"""Behind the name of a page: the seeds of each variant on each text when it was first reported.
Others were added later."""


def report(
    results: Results | str | Path | Sequence[Results | str | Path],
    path: str | Path,
    description: Description | None = None,
    *,
    heads: bool = False,
) -> Path:
    """Writes the report of results: an HTML page that loads nothing, and beside it a Markdown page,
    `results.csv`, each figure as SVG in `figures` and each table as CSV in `tables`.

    Seeds that are new since the page was first written count as added after looking at scores. A
    page replaces an earlier one; figures and tables that only the earlier one had stay there.

    Args:
      results: of one sweep, or its workdir; or several. Those with the same variants and configs on
        other data are compared together, with texts as a source of variation; others get sections
        of their own.
      path: of the HTML page.
      description: question, baseline, pairs to compare, margin, expected results; None: that in the
        workdir, if there is one. Without a baseline the others are compared with the first variant.
      heads: also attention maps, statistics of heads and a text that the model writes, of the best
        8 variants, from the checkpoints: a minute or so of computing.

    Returns:
      The path.

    Raises:
      ValueError: there are no results, or none of one of several sweeps; a workdir is given twice,
        the baseline names no variant, or several, the path is that of the Markdown page, or its
        folder has files of these names that no report wrote.
    """
    several = [results] if isinstance(results, Results | str | Path) else list(results)
    panels = read_panels(several, description)
    if not panels or not all(len(panel.results) for panel in panels):
        raise ValueError("no results to report, or of one of several sweeps; run it first")
    if description is not None and description.baseline:
        for panel in panels:
            panel.results.variant(description.baseline)  # raises
    path = Path(path)
    _check_folder(path)
    seeds = path.with_name(f"{path.stem}{SEEDS}")
    planned = json.loads(seeds.read_text(encoding="utf-8")) if seeds.exists() else {}
    panels = [_with_added_seeds(panel, planned) for panel in panels]
    page = make_page(panels, heads=heads)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(seeds, json.dumps(planned).encode())  # first: what it is beside is ours
    write_page(page, path)
    every = sum((panel.results for panel in panels), Results([]))
    write_atomic(path.parent / "results.csv", every.to_pandas().to_csv(index=False).encode())
    return path


def _check_folder(path: Path) -> None:
    """Raises ValueError where a page would replace its Markdown, or what no report wrote."""
    if path.suffix == ".md":
        raise ValueError(
            f"{path.name} is where the Markdown page would be; give the HTML page another suffix, "
            "such as .html"
        )
    names = path.name, path.with_suffix(".md").name, "results.csv", FIGURES, TABLES
    there = [name for name in names if (path.parent / name).exists()]
    if there and not (path.parent / SPECS).exists() and not [*path.parent.glob(f"*{SEEDS}")]:
        raise ValueError(
            f"{path.parent} has {there[0]}, which no report wrote; give the report a new folder"
        )


def _with_added_seeds(panel: Panel, planned: dict[str, list[int]]) -> Panel:
    """The panel with the seeds that its texts had when they were first reported; `planned`: a
    variant on a text -> those seeds, which is completed."""
    finished, fixed, added = {run.spec.seed for run in panel.results}, set[int](), set[int]()
    texts: dict[str, list[RunSpec]] = {}
    for spec in [*(run.spec for run in panel.results), *panel.unfinished]:
        texts.setdefault(repr(spec.config.data), []).append(spec)
    for specs in texts.values():
        there, variants = {s.seed for s in specs}, {replace(s, seed=0).digest for s in specs}
        known = [planned[variant] for variant in variants if variant in planned]
        first = set().union(*known) if known else there
        planned |= {variant: sorted(first) for variant in variants if variant not in planned}
        fixed, added = fixed | first, added | (there & finished) - first
    about = panel.about
    if not about.seeds_added:
        added -= set(about.planned_seeds)
    if not added:
        return panel
    first = set(about.planned_seeds) or fixed
    seeds = tuple(sorted(first - added))
    return replace(panel, about=replace(about, seeds_added=True, planned_seeds=seeds))


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
