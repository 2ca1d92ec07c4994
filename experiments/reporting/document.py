"""A report as a list of blocks, and the Markdown that it is written in.

Texts may hold **strong** and `code`; everything else in them is shown as it is. `page.py` makes
the HTML of this Markdown.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Heading(NamedTuple):
    """Level 1 is the title."""

    level: int
    text: str


class Paragraph(NamedTuple):
    """`role` is "" or a key of `BOXES`."""

    text: str
    role: str = ""


class Bullets(NamedTuple):
    """A list of short texts."""

    items: list[str]


class Table(NamedTuple):
    """The first `words` columns are words, the others numbers.

    `roles` has "" or a key of `MARKS` per row.
    """

    caption: str
    header: list[str]
    rows: list[list[str]]
    roles: list[str]
    words: int


class Figure(NamedTuple):
    """An <svg> element with what it shows (alt), its caption and a text that it was made from."""

    name: str
    svg: str
    alt: str
    caption: str
    source: str = ""


class Figures(NamedTuple):
    """Side by side where there is room."""

    figures: list[Figure]


class Code(NamedTuple):
    """Lines to copy, or with the language "text" to read."""

    text: str
    language: str = "sh"


Block = Heading | Paragraph | Bullets | Table | Figures | Code
BOXES = {"caution": "[!NOTE]", "warning": "[!WARNING]"}
MARKS = {"best": "**", "quiet": "*", "bad": "~~"}
"""Role of a row -> what stands around its first cell."""


def drawings(blocks: Sequence[Block], folder: str) -> dict[str, str]:
    """Where the Markdown looks for each figure -> its <svg>."""
    figures = [f for block in blocks if isinstance(block, Figures) for f in block.figures]
    return {_link(f, folder): f.svg for f in figures}


def to_markdown(blocks: Sequence[Block], folder: str) -> str:
    """Figures are links to `folder`/<name>.svg."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text, role):
            return f"> {BOXES[role]}\n> {_plain(text)}" if role else _plain(text)
        case Bullets(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Table(caption, header, rows, roles, words):
            marks = ["---"] * words + ["---:"] * (len(header) - words)
            around = [MARKS.get(role, "") for role in roles]
            lines = [[_cell(c) for c in line] for line in (header, *rows)]
            for mark, line in zip(around, lines[1:], strict=True):
                line[0] = f"{mark}{line[0]}{mark}"
            grid = "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], marks, *lines[1:]))
            return f"{_plain(caption)}\n\n{grid}"
        case Figures(many):
            return "\n\n".join(
                f"![{_plain(f.alt)}]({_link(f, folder)})\n\n{_plain(f.caption)}"
                + (f"\n\n    {f.source}" if f.source else "")
                for f in many
            )
        case Code(text, language):
            longest = max(map(len, re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}{language}\n{text}\n{fence}"


def _link(figure: Figure, folder: str) -> str:
    return f"{folder}/{figure.name}.svg"


def _plain(text: str) -> str:
    """One line that keeps ** and `, and takes from everything else what it means to Markdown."""
    kept = re.split(r"(`[^`]*`|\*\*)", " ".join(text.split()))
    kept[::2] = [
        re.sub(
            r"(\*(?=\S)|(?<=\S)\*|(?<!\w)_|_(?!\w)|[\\~`]|\](?=\()|&(?=#?\w+;))", r"\\\1", part
        ).replace("<", "&lt;")
        for part in kept[::2]
    ]
    text = re.sub(r"^(\d+)([.)])(?=\s)", r"\1\\\2", "".join(kept))
    return re.sub(r"^([#>+]|[-=]+)(?=\s|$)", r"\\\1", text)


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
