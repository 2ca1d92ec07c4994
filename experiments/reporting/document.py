"""A report as a list of blocks, and the two ways to write it: Markdown and one HTML file.

Texts may hold **strong** and `code`; everything else in them is shown as it is.
"""

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

from attnlab import plot


class Heading(NamedTuple):
    """Level 1 is the title."""

    level: int
    text: str


class Paragraph(NamedTuple):
    """`role` is "" or "answer", "caution", "warning", "quiet"."""

    text: str
    role: str = ""


class Bullets(NamedTuple):
    """A list of short texts."""

    items: list[str]


class Table(NamedTuple):
    """The first `words` columns are words, the others numbers.

    `roles` has one of "", "best", "quiet", "bad" per row.
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
    """Lines to copy."""

    text: str


Block = Heading | Paragraph | Bullets | Table | Figures | Code


def figures_of(blocks: Sequence[Block]) -> list[Figure]:
    """Every figure, in order."""
    return [f for block in blocks if isinstance(block, Figures) for f in block.figures]


def to_markdown(blocks: Sequence[Block], figures: str) -> str:
    """Figures are links to `figures`/<name>.svg."""
    return "\n\n".join(_markdown(block, figures) for block in blocks) + "\n"


def _markdown(block: Block, figures: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text, role):
            return f"> {_plain(text)}" if role in ("caution", "warning") else _plain(text)
        case Bullets(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Table(caption, header, rows, roles, words):
            marks = ["---"] * words + ["---:"] * (len(header) - words)
            strong = [
                [f"**{row[0]}**", *row[1:]] if role == "best" else row
                for row, role in zip(rows, roles, strict=True)
            ]
            lines = [header, marks, *strong]
            grid = "\n".join(f"| {' | '.join(_cell(c) for c in line)} |" for line in lines)
            return f"{_plain(caption)}\n\n{grid}"
        case Figures(many):
            return "\n\n".join(
                f"![{_plain(f.alt)}]({figures}/{f.name}.svg)\n\n{_plain(f.caption)}"
                + (f"\n\n    {f.source}" if f.source else "")
                for f in many
            )
        case Code(text):
            return f"```sh\n{text}\n```"


def _plain(text: str) -> str:
    """Keeps ** and `, and takes from < what it means to Markdown."""
    return text.replace("<", "&lt;")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def to_html(blocks: Sequence[Block], title: str) -> str:
    """One file that loads nothing."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text, role):
            return f'<p class="{role}">{_inline(text)}</p>' if role else f"<p>{_inline(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in items)}</ul>"
        case Table(caption, header, rows, roles, words):
            head = "".join(
                f'<th scope="col"{_kind(i, words)}>{_inline(name)}</th>'
                for i, name in enumerate(header)
            )
            cells = ("".join(_td(i, cell, words) for i, cell in enumerate(row)) for row in rows)
            lines = "\n".join(
                f'<tr class="{role}">{row}</tr>' for row, role in zip(cells, roles, strict=True)
            )
            return (
                f'<div class="card"><p>{_inline(caption)}</p>'
                '<div class="scroll" tabindex="0"><table>\n'
                f"<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div></div>"
            )
        case Figures(many):
            columns = "figures thirds" if len(many) % 3 == 0 else "figures"
            return f'<div class="{columns}">{"".join(map(_figure, many))}</div>'
        case Code(text):
            return f'<pre class="card">{html.escape(text)}</pre>'


def _td(i: int, cell: str, words: int) -> str:
    tag = 'th scope="row"' if i == 0 else "td"
    return f"<{tag}{_kind(i, words)}>{_inline(cell)}</{tag[:2]}>"


def _kind(i: int, words: int) -> str:
    return "" if i < words else ' class="n"'


def _figure(figure: Figure) -> str:
    source = f"<code>{html.escape(figure.source)}</code>" if figure.source else ""
    return (
        f"<figure>{_themed(figure.svg, figure.alt)}"
        f"<figcaption>{_inline(figure.caption)}{source}</figcaption></figure>"
    )


def _themed(svg: str, alt: str) -> str:
    """Colours become variables, so that the page can change them for the dark; a size to fit."""
    names = {plot.INK: "ink", plot.GRID: "grid", plot.PAPER: "paper"}
    names |= {colour: f"c{i}" for i, colour in enumerate(plot.COLOURS)}
    for colour, name in names.items():
        svg = re.sub(f"(fill|stroke): {colour}", rf"\1: var(--{name})", svg)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    drawing = svg[svg.index(">") + 1 :].replace("xlink:href", "href")
    return (
        f'<svg role="img" aria-label="{html.escape(alt)}" viewBox="0 0 {width} {height}" '
        f'style="max-width:{1.6 * float(width):.0f}px">{drawing}'
    )


def _inline(text: str) -> str:
    text = html.escape(text).replace(" · ", "&nbsp;· ")  # where an arm's name may break
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


_CSS = """
:root { --paper: #ffffff; --page: #f6f6f4; --ink: #222222; --soft: #5c5f62; --grid: #d8d8d8;
  --line: #e3e3e0; --good: #eaf3ee; --care: #fdf3dc; --edge: #c98a00; --bad: #fbe6e1;
  --c0: #0072b2; --c1: #c24e00; --c2: #00805d; --c3: #b0588a; --c4: #9a6a00; --c5: #2683b5; }
@media screen and (prefers-color-scheme: dark) { :root {
  --paper: #1b1d20; --page: #131517; --ink: #e6e6e3;
  --soft: #a3a7ab; --grid: #3d4145; --line: #33373b; --good: #1d2f27; --care: #33290f;
  --edge: #d9a300; --bad: #3a1f1a; --c0: #58b0e8; --c1: #ff8a4c; --c2: #3cc79d; --c3: #e49cc4;
  --c4: #e9b74a; --c5: #8fd0f5; }
  figure svg image { filter: brightness(1.45); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .5rem; padding-top: 1.25rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
p, ul { max-width: 50rem; margin: .6rem 0; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
p.quiet { color: var(--soft); font-size: .92rem; }
.answer { font-size: 1.1rem; margin: 1rem 0; }
.caution, .warning { padding: .65rem .9rem; border-left: 4px solid var(--edge);
  background: var(--care); border-radius: 0 6px 6px 0; }
.warning { border-color: #c2321d; background: var(--bad); }
.card { margin: 1rem 0; background: var(--paper); border: 1px solid var(--line);
  border-radius: 8px; overflow: hidden; }
.card > p { color: var(--soft); font-size: .87rem; line-height: 1.45; margin: 0;
  padding: .75rem .8rem .35rem; max-width: 60rem; }
.scroll, pre { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .87rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .5rem; text-align: left; white-space: nowrap; font-weight: 400; }
thead th { font-weight: 600; vertical-align: bottom; border-bottom: 1px solid var(--grid);
  white-space: normal; min-width: 4.4rem; line-height: 1.3; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.n { text-align: right; }
tr > :first-child { padding-left: .8rem; position: sticky; left: 0; background: var(--paper); }
tr.best > * { font-weight: 650; background: var(--good); }
tr.quiet > * { color: var(--soft); }
tr.bad > * { background: var(--bad); }
.figures { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.figures.thirds { grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
figure { margin: 0; padding: .8rem; background: var(--paper); border: 1px solid var(--line);
  border-radius: 8px; display: flex; flex-direction: column; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; margin: 0 auto; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: .87rem; line-height: 1.45; margin-top: .6rem; }
figcaption code { display: block; margin-top: .4rem; white-space: pre-wrap; }
code, pre { font: .86em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { overflow-wrap: anywhere; }
pre { padding: .7rem .9rem; }
@media (max-width: 480px) { body { font-size: 15px; } main { padding-top: 1.5rem; }
  tr > :first-child { max-width: 9.5rem; white-space: normal; } th, td { padding: .4rem .55rem; } }
@media print { :root { --page: #fff; --paper: #fff; --ink: #000; --soft: #444; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; } h2, h3 { break-after: avoid; }
  table { font-size: 7.5pt; } th, td { padding: .2rem .35rem; } thead th { min-width: 0; }
  .scroll { overflow: visible; } tr { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures.thirds { grid-template-columns: 1fr 1fr 1fr; } .card > p { break-after: avoid; } }
"""
