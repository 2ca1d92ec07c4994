"""Pages and other texts from templates, and tables in Markdown."""

import re
from collections.abc import Iterable, Sequence

from attnlab.extras import extra


def render(template: str, package: str = "attnlab.lab", **values: object) -> str:
    """A template of the folder `templates` of a package, with these values."""
    with extra("lab"):
        import jinja2
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=template.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = _markdown
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    return environment.get_template(template).render(**values)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(("head_dim", "bits"), [("16", "1.85")]))
    | head_dim | bits |
    |---|---|
    | 16 | 1.85 |
    """
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _markdown(text: str) -> str:
    """Text for one line of Markdown: what would be markup is escaped."""
    line = " ".join(str(text).split())
    return re.sub(r"([\\`*_|<>\[\]~])", r"\\\1", re.sub(r"^([#+-]|\d+[.)])(?=\s)", r"\\\1", line))
