"""Pages and other texts from templates, and tables in Markdown."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from attnlab.extras import extra


def render(template: str | Path, package: str = "attnlab.lab", **values: object) -> str:
    """A template with these values: a file, or a name in the folder `templates` of a package."""
    with extra("lab"):
        import jinja2
    path = Path(template)
    is_file = isinstance(template, Path)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent) if is_file else jinja2.PackageLoader(package),
        autoescape=path.name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = _markdown
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    return environment.get_template(path.name).render(**values)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(("head_dim", "bits"), [("16", "1.85")]))
    | head_dim | bits |
    |---|---|
    | 16 | 1.85 |
    """
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
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
    line = " ".join(str(text).split())
    return re.sub(r"([\\`*_|<>\[\]~])", r"\\\1", re.sub(r"^([#+-]|\d+[.)])(?=\s)", r"\\\1", line))
