"""Docstrings, which are read in an editor, as reStructuredText for the reference.

A docstring is paragraphs, `code`, indented equations, `Args:` with one name a line, and examples
behind >>>. Stars, bars and underscores are mathematics there, not markup.
"""

import inspect
import re
from typing import Any

OWN = re.compile(r"(`+)(.+?)\1|([*|\\]|_(?=\W|$))", re.DOTALL)
ARGUMENT = re.compile(r"^(\*{0,2}[\w, *]+)(?: \([^)]*\))?: ")


def as_rst(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """The hook of sphinx.ext.autodoc: changes the lines of one docstring in place."""
    text = "\n".join(lines).strip("\n")
    inherited = text.startswith("Alias for field number") or text == inspect.getdoc(type(of))
    if inherited and what != "class":
        text = ""
    blocks = re.split(r"\n\s*\n", text) if text else []
    lines[:] = [*"\n\n".join(map(_block, blocks)).splitlines(), ""]


def _block(text: str) -> str:
    """A paragraph, a list of arguments, an example, or what is indented and stands as it is."""
    first, *rest = text.splitlines()
    if first.lstrip().startswith(">>>"):
        return text
    if first.startswith("    "):
        return "::\n\n" + text
    if len(re.findall(r"^ *\S+ {2,}\S", text, re.MULTILINE)) > 1:  # columns
        return "::\n\n" + "\n".join("    " + line for line in [first, *rest])
    if first.startswith("* "):
        return _items([first, *rest])
    if re.fullmatch(r"\w+:", first) and rest and all(line.startswith("  ") for line in rest):
        return f"**{first[:-1]}**\n\n" + _items(rest)
    # An example right behind its sentence.
    at = next((i for i, line in enumerate(rest, 1) if line.lstrip().startswith(">>>")), None)
    if at is not None:
        return _block("\n".join([first, *rest[: at - 1]])) + "\n\n" + "\n".join(rest[at - 1 :])
    return _prose(text)


def _items(lines: list[str]) -> str:
    """One item for each line of the smallest indent; what is further in continues it."""
    depth = min(len(line) - len(line.lstrip()) for line in lines)
    items: list[str] = []
    for line in lines:
        if line[depth] != " ":
            items.append(line.strip().removeprefix("* "))
        else:
            items[-1] += " " + line.strip()
    return "\n".join("- " + _argument(item) for item in items)


def _argument(item: str) -> str:
    found = ARGUMENT.match(item)
    if not found:
        return _prose(item)
    names = ", ".join(f"``{one.strip()}``" for one in found[1].split(","))
    return f"{names}: {_prose(item[found.end() :])}"


def _prose(text: str) -> str:
    """`code` as ``code``, and every other sign as itself."""

    def sign(found: re.Match) -> str:
        return f"``{found[2]}``\\ " if found[2] else "\\" + found[3]

    return OWN.sub(sign, text)
