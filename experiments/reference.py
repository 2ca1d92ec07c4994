"""Writes what is made from the code on the pages of docs/reference: python -m experiments.reference

commands.md (every command and its flags), config.md (every field of a config), presets.md (what may
stand behind the colon of a config file) and layouts.md (`experiments.atlas`). The made parts of a
page stand between the marks <!-- made: NAME --> and <!-- end -->; the rest is written by hand. A
test fails while a page is not what this makes.
"""

import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from attnlab import heads
from attnlab.data import DATASETS
from attnlab.lab import Experiment
from attnlab.models import ModelConfig
from attnlab.models.config import LayerOverrides
from attnlab.models.flags import field_types
from attnlab.models.specs import POSITIONS, Positions
from attnlab.report.page import table
from attnlab.training.config import TrainConfig
from attnlab.training.objectives import OBJECTIVES
from experiments import app, atlas

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """File name -> text."""
    made = {
        "commands.md": {"commands": "\n\n".join(map(command, commands()))},
        "config.md": config_parts(),
        "presets.md": {"presets": "\n\n".join(map(presets, config_files()))},
        "layouts.md": atlas.parts(),
    }
    return {name: filled((PAGES / name).read_text(), parts) for name, parts in made.items()}


def filled(text: str, parts: Mapping[str, str]) -> str:
    """A page with these parts between its marks. Raises ValueError for a part without marks.

    >>> filled("<!-- made: n -->\\n1\\n<!-- end -->", {"n": "2"})
    '<!-- made: n -->\\n\\n2\\n\\n<!-- end -->'
    """
    for name, part in parts.items():
        begin, end = f"<!-- made: {name} -->\n", "\n<!-- end -->"
        before, mark, rest = text.partition(begin)
        if not mark or end not in rest:
            raise ValueError(f"the page has no marks {begin.strip()} and {end.strip()}")
        text = f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


def line(text: str) -> str:
    """Text in one line, for a cell of a table: bars and whatever would begin a tag are escaped."""
    # Within `code` a backslash would be shown.
    whole = " ".join(text.split()).replace("|", r"\|")
    return re.sub("`[^`]*`|<", lambda m: r"\<" if m[0] == "<" else m[0], whole)


# ---------------------------------------------------------------- commands


def commands() -> list[str]:
    """Every module of `experiments` that is a command."""
    paths = sorted((ROOT / "experiments").rglob("*.py"))
    paths = [path for path in paths if not path.name.startswith("test_")]
    found = [path for path in paths if '__name__ == "__main__"' in path.read_text()]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found]


def flags_of(module: types.ModuleType) -> list[flags.Flag]:
    """The flags of a command, by its `define_flags`."""
    before = set(flags.FLAGS)
    getattr(module, "define_flags", lambda: None)()
    found = [flags.FLAGS[name] for name in flags.FLAGS if name not in before]
    for flag in found:
        delattr(flags.FLAGS, flag.name)
    return found


def command(name: str) -> str:
    """A command: what it does, an example, its flags."""
    module = importlib.import_module(name)
    first, _, rest = (module.__doc__ or "").partition("\n\n")
    summary = line(re.sub(r"[:,]?\s*python -m \S+.*", "", first, flags=re.DOTALL)).rstrip(": ")
    lines = [f"## {name}", summary + "." * (summary[-1:] not in ".?!")]
    usage = re.search(r"^    (python -m .*)", rest.replace("\\\n", ""), re.MULTILINE)
    lines += [f"    {line(usage[1])}"] if usage else []
    rows = [(f"`--{flag.name}`", _default(flag), _help(flag)) for flag in flags_of(module)]
    lines += [table(("flag", "default", ""), rows)] if rows else []
    return "\n\n".join(lines)


def _help(flag: flags.Flag) -> str:
    """Choices as `a`, `b`; without what absl adds for flags that may be repeated."""
    text = re.sub(r";\s+repeat this option .*", " May be repeated.", flag.help, flags=re.DOTALL)
    choices = lambda m: ", ".join(f"`{choice}`" for choice in m[1].split("|")) + ": "
    return line(re.sub(r"^<(.*?)>: ", choices, text))


def _default(flag: flags.Flag) -> str:
    if any("must have a value" in validator.message for validator in flag.validators):
        return "required"
    return "" if flag.default in (None, "", []) else f"`{flag.default!r}`"


# ---------------------------------------------------------------- config fields


def config_parts() -> dict[str, str]:
    """Every field of an experiment: its task, model, training and dataset."""
    layouts = _ours(heads.LAYOUTS)
    common = tuple(field_types(layouts["standard"]))
    parts = {
        "experiment": [
            _fields("", Experiment, "model", "train", "data", "matched"),
            f"Tasks: {', '.join(f'`{name}`' for name in OBJECTIVES if ':' not in name)}.",
        ],
        "model": _tree("model.", ModelConfig),
        "positions": [_fields("model.positions.", c, title=f"`{n}`") for n, c in POSITIONS.items()],
        "layer types": [_fields(None, LayerOverrides)],
        "layouts": [
            _fields("model.heads.", c, "extras", *common * (n != "standard"), title=f"`{n}`")
            for n, c in layouts.items()
        ],
        "qk_norm": [_fields("model.heads.qk_norm.", heads.HeadNorm)],
        "extras": [
            _fields(f"model.heads.extras.{n}.", c, title=f"`{n}`")
            for n, c in _ours(heads.EXTRAS).items()
        ],
        "training": _tree("train.", TrainConfig),
        "datasets": [_fields("data.", c, title=f"`{n}`") for n, c in _ours(DATASETS).items()],
    }
    return {name: "\n\n".join(some) for name, some in parts.items()}


def _ours(registry: Mapping[str, type]) -> dict[str, type]:
    """The entries of the package itself, whatever else was registered."""
    return {n: entry for n, entry in registry.items() if entry.__module__.startswith("attnlab.")}


def _tree(prefix: str, made: type) -> list[str]:
    """The fields of a dataclass, then a section for each dataclass in it. Heads and positions, of
    which a config chooses one by name, have sections of their own."""
    found = [_fields(prefix, made)]
    for name, kind in field_types(made).items():
        if dataclasses.is_dataclass(kind) and kind not in (heads.Layout, Positions):
            found += [f"### {kind.__name__}", *_tree(f"{prefix}{name}.", kind)]
    return found


def _fields(prefix: str | None, made: Any, *without: str, title: str = "") -> str:
    """The docstring of a dataclass and a table of its fields, with what the docstring says of each.

    Args:
      prefix: path of the dataclass in a config; None if it is in none.
      made: the dataclass.
      without: fields that are not shown.
      title: stands before the docstring.
    """
    said, hints = attributes(made), typing.get_type_hints(made)
    at = "" if prefix is None else f"config.{prefix}"
    skipped = {"width", *without} if issubclass(made, heads.Layout) else {*without}
    rows = [
        (f"`{at}{one.name}`", _type(hints[one.name]), _value(one), said.get(one.name, ""))
        for one in dataclasses.fields(made)
        if one.name not in skipped
    ]
    summary, *paragraphs = (inspect.getdoc(made) or "").split("\n\n")
    kept = [p for p in paragraphs if not p.startswith(("Attributes:", "Raises:", ">>>"))]
    parts = [f"**{title}.** {line(summary)}" if title else line(summary)]
    parts += [table(("field", "type", "default", ""), rows)] if rows else []
    parts += [p if p.startswith("    ") else line(p) for p in kept]
    return "\n\n".join(parts)


def attributes(made: Any) -> dict[str, str]:
    """Field -> what the part "Attributes:" of the docstrings of a class and its bases says."""
    found: dict[str, str] = {}
    for base in reversed(made.__mro__):
        part = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        items = re.split(r"^  (?=\S)", part.partition("\n\n")[0], flags=re.MULTILINE)
        for names, _, text in (item.partition(":") for item in items):
            found |= {name.strip(): line(text) for name in names.split(",") if name.strip()}
    return found


def _type(hint: Any) -> str:
    """As in "`int or None`", or the choices: "one of `a`, `b`"."""
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    name = re.sub(r"(\w+\.)+(?=\w)", "", inspect.formatannotation(hint))
    return f"`{name}`".replace("|", "or")


def _value(field: dataclasses.Field[Any]) -> str:
    made = field.default_factory
    value = field.default if made is dataclasses.MISSING else made()
    return "required" if value is dataclasses.MISSING else f"`{value!r}`".replace("|", "or")


# ---------------------------------------------------------------- presets


def config_files() -> list[str]:
    """Every config file, as `configs/byte_lm.py`: those of `configs`, then those of the studies."""
    folder = ROOT / "experiments"
    found = sorted(folder.glob("configs/*.py")) + sorted(folder.glob("studies/*/*.py"))
    defines = re.compile(r"^(def )?get_config\b", re.MULTILINE)
    return [p.relative_to(folder).as_posix() for p in found if defines.search(p.read_text())]


def config_module(name: str) -> types.ModuleType:
    """The module of a config file."""
    return importlib.import_module(f"experiments.{name[:-3].replace('/', '.')}")


def presets(name: str) -> str:
    """A config file: its question and its presets."""
    module = config_module(name)
    first, *rest = (module.__doc__ or "").split("\n\n")
    named = [p for p in rest if p.strip().startswith("Presets after the colon")]
    parts = [f"## {name}", line(first), *(re.sub(",$", ".", line(p)) for p in named)]
    known = getattr(module, "PRESETS", {})
    rows = [(f"`{preset}`", _sets(values or {})) for preset, values in known.items()]
    return "\n\n".join([*parts, table(("preset", "sets"), rows)] if rows else parts)


def _sets(values: Mapping[str, object]) -> str:
    shown = ", ".join(f"`{path}={value}`" for path, value in values.items()).replace("|", r"\|")
    return shown if len(shown) < 300 else shown[:300].rpartition(", ")[0] + ", ..."


def write(files: Iterable[tuple[str, str]]) -> None:
    """Writes the pages."""
    for name, text in files:
        (PAGES / name).write_text(text)
        print(f"wrote {PAGES / name}")


if __name__ == "__main__":
    app.start(lambda: write(pages().items()))
