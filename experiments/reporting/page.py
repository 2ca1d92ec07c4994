"""The page of a report: its Markdown as one HTML file that loads nothing.

The looks follow from what stands in the text:

    all before the first ##      the head: what the report is about, then the answers
    > [!NOTE], > [!WARNING]      boxes
    a paragraph before a table   its caption
    **first cell** of a row      the best, or the one to compare with; *a yardstick*; ~~no result~~
    an image                     a figure with its caption, and lines that it was made from
"""

import html
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attnlab import plotting
from attnlab.extras import extra

WIDE = 480
"""Points of a figure that takes all columns."""
ROWS = {"strong_open": "best", "em_open": "quiet", "s_open": "bad"}


def to_html(markdown: str, figures: Mapping[str, str], title: str) -> str:
    """`figures`: where the Markdown looks for each -> its <svg>."""
    with extra("plot"):
        from markdown_it import MarkdownIt

    md = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    md.add_render_rule("text", _text)
    blocks = _blocks(md.parse(markdown))
    body = "\n".join(_page(blocks, figures, lambda some: md.renderer.render(some, md.options, {})))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n<header>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _blocks(tokens: list[Any]) -> deque[list[Any]]:
    """The tokens of each heading, paragraph, table, ... on their own."""
    blocks: deque[list[Any]] = deque([[]])
    for token in tokens:
        blocks[-1].append(token)
        if token.level == 0 and token.nesting <= 0:
            blocks.append([])
    blocks.pop()
    return blocks


def _page(blocks: deque, figures: Mapping[str, str], show: Callable) -> Iterator[str]:
    """The blocks in the boxes of this page; `show` is Markdown's own way to write tokens."""
    in_head = True
    while blocks:
        block = blocks.popleft()
        kind = block[0].type
        if in_head and kind == "heading_open" and block[0].tag != "h1":
            in_head = False
            yield "</header>"
        if kind == "paragraph_open" and blocks and blocks[0][0].type == "table_open":
            table = f'<div class="scroll" tabindex="0">{show(_marked(blocks.popleft()))}</div>'
            yield f'<div class="card">{show(block)}{table}</div>'
        elif _is_image(block):
            drawn = [_figure(block, blocks, figures, show)]
            while blocks and _is_image(blocks[0]):
                drawn.append(_figure(blocks.popleft(), blocks, figures, show))
            columns = "figures thirds" if len(drawn) % 3 == 0 else "figures"
            yield f'<div class="{columns}">{"".join(drawn)}</div>'
        elif _is_read(blocks):
            texts = [_read(block, blocks.popleft(), show)]
            while len(blocks) > 1 and _is_read(deque([blocks[1]])):
                texts.append(_read(blocks.popleft(), blocks.popleft(), show))
            yield f'<div class="figures">{"".join(texts)}</div>'
        elif kind == "fence":
            yield f'<pre class="card">{html.escape(block[0].content.rstrip())}</pre>'
        else:
            yield show(_boxed(block))
    if in_head:
        yield "</header>"


def _is_image(block: list[Any]) -> bool:
    inside = block[1].children if block[0].type == "paragraph_open" else []
    return [token.type for token in inside] == ["image"]


def _figure(block: list[Any], later: deque, figures: Mapping[str, str], show: Callable) -> str:
    """An image, and from `later` its caption and the lines it was made from."""
    image, caption = block[1].children[0], later.popleft()
    source = ""
    if later and later[0][0].type == "code_block":
        source = f"<code>{html.escape(later.popleft()[0].content.rstrip())}</code>"
    drawing = _themed(figures[image.attrs["src"]], image.content)
    words = f"<figcaption>{show([caption[1]])}{source}</figcaption>"
    if "min-width" in drawing[: drawing.index(">")]:
        return (
            f'<figure class="wide"><div class="scroll" tabindex="0">{drawing}</div>{words}</figure>'
        )
    return f"<figure>{drawing}{words}</figure>"


def _is_read(later: deque) -> bool:
    """Does a text follow that is to be read, not copied?"""
    return bool(later) and later[0][0].type == "fence" and later[0][0].info == "text"


def _read(caption: list[Any], text: list[Any], show: Callable) -> str:
    written = html.escape(text[0].content.rstrip())
    return f"<figure><figcaption>{show([caption[1]])}</figcaption><pre>{written}</pre></figure>"


def _boxed(block: list[Any]) -> list[Any]:
    """A quotation that begins with [!NOTE] or [!WARNING] is a box of that name."""
    if block[0].type == "blockquote_open":
        inside = block[2].children
        if found := re.fullmatch(r"\[!(NOTE|WARNING)\]", inside[0].content):
            block[0].attrSet("class", found[1].lower())
            del inside[:2]
    return block


def _marked(table: list[Any]) -> list[Any]:
    """Rows get the class that their first cell shows, numbers theirs, and heads their scope."""
    for i, token in enumerate(table):
        if token.type == "tr_open" and table[i + 1].type == "td_open":
            first = next((t.type for t in table[i + 2].children if t.content or t.nesting), "")
            token.attrSet("class", ROWS.get(first, ""))
            close = next(t for t in table[i:] if t.type == "td_close")
            table[i + 1].tag = close.tag = "th"
            table[i + 1].attrSet("scope", "row")
        elif token.type == "th_open":
            token.attrSet("scope", "col")
        if token.attrs.pop("style", ""):
            token.attrSet("class", "n")
    return table


def _themed(svg: str, alt: str) -> str:
    """Colours become variables, so that the page can change them for the dark; a size to fit."""
    names = {plotting.FOREGROUND: "ink", plotting.GRID: "grid", plotting.BACKGROUND: "paper"}
    names |= {colour: f"c{i}" for i, colour in enumerate(plotting.COLOURS)}
    for colour, name in names.items():
        svg = re.sub(f"(fill|stroke): {colour}", rf"\1: var(--{name})", svg)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    drawing = svg[svg.index(">") + 1 :].replace("xlink:href", "href")
    # Small print stays large enough to read; a narrow screen moves along it.
    least = f";min-width:{1.2 * float(width):.0f}px" if float(width) > WIDE else ""
    return (
        f'<svg role="img" aria-label="{html.escape(alt)}" viewBox="0 0 {width} {height}" '
        f'style="max-width:{1.6 * float(width):.0f}px{least}">{drawing}'
    )


def _text(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """The name of an arm may break before a dot, not after it."""
    return html.escape(tokens[index].content).replace(" · ", "&nbsp;· ")


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
header > p { font-size: 1.1rem; margin: 1rem 0; }
header > h1 + p { color: var(--soft); font-size: .92rem; margin: .6rem 0; }
.note, .warning { padding: .65rem .9rem; border-left: 4px solid var(--edge); max-width: 50rem;
  margin: .6rem 0; background: var(--care); border-radius: 0 6px 6px 0; }
.note p, .warning p { margin: 0; }
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
tr.best > :first-child strong { font-weight: inherit; } tr.quiet em { font-style: normal; }
tr.bad s { text-decoration: none; }
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
figure pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .5rem 0 0; }
figure.wide { grid-column: 1 / -1; }
@media (max-width: 480px) { body { font-size: 15px; } main { padding-top: 1.5rem; }
  tr > :first-child { max-width: 9.5rem; white-space: normal; } th, td { padding: .4rem .55rem; } }
@media print { :root { --page: #fff; --paper: #fff; --ink: #000; --soft: #444; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; } h2, h3 { break-after: avoid; }
  table { font-size: 7.5pt; } th, td { padding: .2rem .35rem; } thead th { min-width: 0; }
  .scroll { overflow: visible; } tr { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures.thirds { grid-template-columns: 1fr 1fr 1fr; } .card > p { break-after: avoid; } }
"""
