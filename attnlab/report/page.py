"""A page as data: sections of paragraphs, tables and figures. Templates write HTML and Markdown."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from attnlab.atomic import write_atomic
from attnlab.extras import extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing
    from pandas import DataFrame

FIGURES, TABLES = "figures", "tables"
"""Folders beside the page."""
WIDE = 480
"""Points of a figure that is not made smaller than it is: it scrolls."""
MINUS = "−"


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A text; `lead` stands before it in bold."""

    text: str
    lead: str = ""
    kind: Literal["", "answer", "note", "warning"] = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Names and what they are."""

    items: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines as they are, with a caption above; `folded`: only after a click."""

    text: str
    caption: str
    folded: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      name: of its CSV file.
      caption: what it shows.
      frame: cells; numbers are formatted, texts are shown as they are.
      digits: column -> decimals; others have 3.
      data: what the CSV file has; None: `frame`.
    """

    name: str
    caption: str
    frame: "DataFrame"
    digits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    data: "DataFrame | None" = None

    @property
    def cells(self) -> "DataFrame":
        """What the page shows."""
        columns = {
            name: [_format(value, self.digits.get(name, 3)) for value in column]
            for name, column in self.frame.items()
        }
        return type(self.frame)(columns)

    @property
    def texts(self) -> list[int]:
        """Columns of words, from 1; they are aligned to the left, numbers to the right."""
        return [i for i, (_, column) in enumerate(self.cells.items(), start=1)
                if i == 1 or any(cell[:1].isalpha() for cell in column)]  # fmt: skip

    def to_html(self) -> str:
        """A <table> element."""
        return str(self.cells.to_html(index=False, border=0, table_id=self.name))

    def to_markdown(self) -> str:
        """Numbers are aligned to the right."""
        cells = self.cells
        rule = ["---" if i in self.texts else "---:" for i in range(1, len(cells.columns) + 1)]
        rows = [[_markdown(cell) for cell in row] for row in cells.itertuples(index=False)]
        return table([_markdown(name) for name in cells.columns], rows, rule)

    def to_csv(self) -> str:
        """As CSV, numbers as they are."""
        return str((self.frame if self.data is None else self.data).to_csv(index=False))


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
      name: of its SVG file.
      svg: an <svg> element.
      width: points.
      alt: what it shows, for those who cannot see it.
      caption: below it.
    """

    name: str
    svg: str
    width: float
    alt: str
    caption: str

    @property
    def is_wide(self) -> bool:
        """Is it too wide for a phone, so that it scrolls?"""
        return self.width > WIDE


@dataclasses.dataclass(frozen=True)
class Figures:
    """Side by side where there is space."""

    figures: Sequence[Figure]


Block: TypeAlias = Paragraph | Facts | Text | Table | Figures
Kind = TypeVar("Kind", bound=Block)


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """Of links."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclasses.dataclass(frozen=True)
class Page:
    """A title, the first screen, and sections."""

    title: str
    head: Sequence[Block]
    sections: Sequence[Section] = ()

    def blocks(self, kind: type[Kind]) -> list[Kind]:
        """All of one kind."""
        every = [*self.head, *(block for section in self.sections for block in section.blocks)]
        return [block for block in every if isinstance(block, kind)]


def draw(drawing: "Drawing", name: str, alt: str, caption: str) -> Figure:
    """A figure of matplotlib as one of a page."""
    from attnlab.report.style import to_svg

    width = float(drawing.get_figwidth()) * 72
    return Figure(name, to_svg(drawing, name), width, alt, caption)


def write_page(page: Page, path: str | Path) -> Path:
    """Writes the page as HTML to `path`, beside it as Markdown, its figures as SVG and its tables
    as CSV. A kill leaves each file old or new. Returns the path."""
    path = Path(path)
    for folder in (FIGURES, TABLES):
        (path.parent / folder).mkdir(parents=True, exist_ok=True)
    for figure in (figure for some in page.blocks(Figures) for figure in some.figures):
        write_atomic(path.parent / FIGURES / f"{figure.name}.svg", figure.svg.encode())
    for one in page.blocks(Table):
        write_atomic(path.parent / TABLES / f"{one.name}.csv", one.to_csv().encode())
    write_atomic(path.with_suffix(".md"), to_markdown(page).encode())
    write_atomic(path, render("report.html.jinja", page=page).encode())
    return path


def to_markdown(page: Page) -> str:
    """The page as Markdown, which links to its figures and tables."""
    return render("report.md.jinja", page=page, FIGURES=FIGURES, TABLES=TABLES)


def number(value: float, digits: int = 3) -> str:
    """With so many decimals and a true minus.

    >>> [number(x, 1) for x in (-1234.5, -0.01, float("-inf"), float("nan"))]
    ['−1,234.5', '0.0', '−∞', '–']
    """
    text = f"{value:z,.{digits}f}"  # z: no minus zero
    return text.replace("-", MINUS).replace("inf", "∞").replace("nan", "–")


def _format(value: object, digits: int) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return number(value, digits)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def render(template: str | Path, **values: object) -> str:
    """A template with these values: an absolute path, or a name in the folder `templates`."""
    with extra("lab"):
        import jinja2
    path = Path(__file__).parent / "templates" / template
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        autoescape=path.name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = _markdown
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    return environment.get_template(path.name).render(**values)


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], rule: Sequence[str] | None = None
) -> str:
    """A Markdown table; `rule` aligns its columns.

    >>> print(table(("head_dim", "bits"), [("16", "1.85")]))
    | head_dim | bits |
    |---|---|
    | 16 | 1.85 |
    """
    middle = "|" + "".join(f"{one}|" for one in rule or ["---"] * len(header))
    lines = ["| " + " | ".join(header) + " |", middle]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def p_value(p: float) -> str:
    """Three decimals; a dash for NaN.

    >>> p_value(0.0312), p_value(0.0002)
    ('0.031', '< 0.001')
    """
    return "–" if p != p else "< 0.001" if p < 0.001 else f"{p:.3f}"


def p_equation(p: float) -> str:
    """As in "p = 0.031" or "p < 0.001"."""
    text = p_value(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _markdown(text: str) -> str:
    """Text for one line of Markdown: what would be markup is escaped."""
    line = re.sub(r"([\\`*_|<>\[\]~])", r"\\\1", " ".join(str(text).split()))
    return re.sub(r"^(\d*)([#+.)-]+)(?=\s)", r"\1\\\2", line)  # a heading, a list
