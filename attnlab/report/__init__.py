"""The report of results: one HTML page that loads nothing, Markdown, figures and tables as files.

    from attnlab import lab

    about = lab.Description(question="Are wide heads better?", baseline={"layout": "standard"})
    lab.report(results, "runs/layouts/report.html", about)

On the command line: `python -m experiments.report WORKDIR...`. `Description` holds what a report
needs beside the results, a `Panel` both. A page is data
(`page.Page`: sections of text, tables and figures); templates write it.
"""

from collections.abc import Sequence
from pathlib import Path

from attnlab.atomic import write_atomic
from attnlab.lab.description import Description, Expectation, read_description
from attnlab.lab.results import Results
from attnlab.lab.text_table import counted
from attnlab.report import figures, tables
from attnlab.report.answers import answers, limits, question, warnings
from attnlab.report.expectations import expectations
from attnlab.report.heads import heads_sections
from attnlab.report.making import making_section
from attnlab.report.page import Block, Figures, Page, Paragraph, Section, write_page
from attnlab.report.panel import Panel
from attnlab.report.workdirs import read_panels

__all__ = [
    "Description", "Expectation", "Panel", "make_page", "read_description", "read_panels",
    "report",
]  # fmt: skip


def report(
    results: "Results | str | Path | Sequence[Results | str | Path]",
    path: str | Path,
    description: Description | None = None,
) -> Path:
    """Writes the report of results: an HTML page that loads nothing, and beside it a Markdown page,
    `results.csv`, each figure as SVG in `figures` and each table as CSV in `tables`.

    Args:
      results: of one sweep, or its workdir; or several. Those with the same variants and configs on
        other data are compared together, with texts as a source of variation; others get sections
        of their own.
      path: of the HTML page.
      description: question, baseline, pairs to compare, margin, expected results; None: that in the
        workdir, if there is one. Without a baseline the others are compared with the first variant.

    Returns:
      The path.

    Raises:
      ValueError: there are no results, a workdir is given twice, the baseline names no variant, or
        several, or the path is that of the Markdown page.
    """
    several = [results] if isinstance(results, Results | str | Path) else list(results)
    if description is not None and description.baseline:
        for one in several:
            if isinstance(one, Results):
                one.variant(description.baseline)  # raises
    panels = read_panels(several, description)
    if not any(len(panel.results) for panel in panels):
        raise ValueError("no results to report; run the sweep first")
    path = write_page(make_page(panels), path)
    every = panels[0].results
    for panel in panels[1:]:
        every = every + panel.results
    csv: str = every.to_pandas().to_csv(index=False)
    write_atomic(path.parent / "results.csv", csv.encode())
    return path


def make_page(panels: Sequence[Panel]) -> Page:
    """The report as data."""
    head: list[Block] = [Paragraph(_subject(panels))]
    head += [line for panel in panels for line in warnings(panel)]
    said = [expectations(panel) or answers(panel) for panel in panels]
    alike = figures.by_unit(panels)
    main = [
        figure
        for i, some in enumerate(alike)
        for figure in figures.effects_figure(some, f"differences{_end(i, alike)}")
    ] or figures.scores_figure(panels[0], "scores")
    head += [*(some[0] for some in said if some), *([Figures(main)] if main else [])]
    head += [paragraph for some in said for paragraph in some[1:]]
    sections = [_scores_section(panel, _end(i, panels)) for i, panel in enumerate(panels)]
    for i, panel in enumerate(panels):
        sections += _differences_section(panel, _end(i, panels))
    sections.append(_budgets_section(panels))
    for i, panel in enumerate(panels):
        sections += _training_sections(panel, _end(i, panels))
    for i, panel in enumerate(panels):
        sections += heads_sections(panel, _end(i, panels))
    lines = dict.fromkeys(line for panel in panels for line in limits(panel))
    sections.append(Section("Limits", [Paragraph(line) for line in lines]))
    sections.append(making_section(panels))
    return Page(question(panels), head, sections)


def _end(number: int, panels: Sequence[object]) -> str:
    """Ends the names of files of one of several panels, or groups of them."""
    return f"-{number + 1}" if len(panels) > 1 else ""


def _subject(panels: Sequence[Panel]) -> str:
    runs = [run for panel in panels for run in panel.results]
    names = dict.fromkeys(run.data.name or type(run.spec.config.data).__name__ for run in runs)
    seeds = len({run.spec.seed for run in runs})
    variants = max(len(panel.variants) for panel in panels)
    better = {panel.metric.unit: "lower" if panel.sign > 0 else "higher" for panel in panels}
    if len(set(better.values())) == 1:
        scores = f"{' or '.join(better)} on held-out data; {better.popitem()[1]} is better"
    else:
        each = [f"{unit} ({word} is better)" for unit, word in better.items()]
        scores = f"{' or '.join(each)} on held-out data"
    return (
        f"{counted(variants, 'variant')}, {counted(seeds, 'seed')}, {counted(len(runs), 'run')}, "
        f"trained on {' and '.join(names)}. Scores are {scores}."
    )


def _scores_section(panel: Panel, end: str) -> Section:
    drawn = figures.scores_figure(panel, f"scores{end}")
    drawn += figures.over_tag_figures(panel, f"over{end}")
    blocks: list[Block] = [tables.scores_table(panel, f"scores{end}")]
    return Section(panel.named("Scores"), [*blocks, *([Figures(drawn)] if drawn else [])])


def _differences_section(panel: Panel, end: str) -> list[Section]:
    blocks: list[Block] = []
    if panel.effects:
        blocks.append(tables.effects_table(panel, f"effects{end}"))
    if panel.comparisons:
        blocks.append(tables.comparison_table(panel, f"differences{end}"))
    return [Section(panel.named("Differences"), blocks)] if blocks else []


def _budgets_section(panels: Sequence[Panel]) -> Section:
    blocks: list[Block] = []
    for i, panel in enumerate(panels):
        if panel.title:
            blocks.append(Paragraph("", panel.title))
        blocks.append(tables.budget_table(panel, f"budgets{_end(i, panels)}"))
    alike = figures.by_unit(panels)
    drawn = [
        figure
        for i, some in enumerate(alike)
        for figure in figures.budget_figures(some, _end(i, alike))
    ]
    return Section("Budgets", [*blocks, *([Figures(drawn)] if drawn else [])])


def _training_sections(panel: Panel, end: str) -> list[Section]:
    """Learning curves and learning rates."""
    sections = []
    if drawn := figures.curves_figures(panel, f"curves{end}"):
        sections.append(Section(panel.named("Learning curves"), [Figures(drawn)]))
    if tried := tables.rates_blocks(panel, f"rates{end}"):
        sections.append(Section(panel.named("Learning rates"), tried))
    return sections
