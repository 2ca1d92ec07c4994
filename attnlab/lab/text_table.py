"""Text of tables and sentences: aligned columns for a terminal, counted nouns."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells: the first column to the left, numbers to the right where there are several.

    >>> print(columns([("run", "seeds", "steps"), ("wide", "3", "800")]))
    run   seeds  steps
    wide      3    800
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(rest, widths[1:], strict=True):
            cells.append(cell.rjust(width) if len(rest) > 1 else cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def counted(count: int, noun: str) -> str:
    """A number with its noun, which has a plural in s.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
