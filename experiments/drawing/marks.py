"""What drawings are made of: pieces of SVG that are legible on white, on black and on a phone.

Letters and lines have the ink of the page (`currentColor`). Alone, as GitHub shows it, a drawing
takes the reader's light or dark; inside a page that leaves its `<style>` out, the page's.
"""

from collections.abc import Iterable
from html import escape

# Okabe and Ito 2008, light enough for dark letters on them and dark enough for a black page.
COLOURS = ("#56b4e9", "#e69f00", "#3cb894", "#cc79a7", "#f0c000", "#7f9cf5")
SHARED = "#9aa0a6"
FAINT = 'fill="none" stroke="currentColor" stroke-opacity=".45"'
STYLE = (
    "<style>.drawing{color:#24292f}"
    "@media(prefers-color-scheme:dark){.drawing{color:#d8dee4}}</style>"
)


def drawing(width: float, height: float, title: str, marks: Iterable[str]) -> str:
    """A whole file."""
    return (
        f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">\n'
        f"<title>{escape(title)}</title>{STYLE}\n" + "\n".join(marks) + "\n</svg>\n"
    )


def label(x: float, y: float, text: str, *, at: str = "start", more: str = "") -> str:
    """Letters that begin, are centred ("middle") or end at x, with their foot at y."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{at}"{more}>{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """A rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {style}/>'
