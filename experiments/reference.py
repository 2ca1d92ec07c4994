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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from attnlab import heads
from attnlab.data import DATASETS
from attnlab.lab import Experiment, Match
from attnlab.models import EncoderConfig, ModelConfig, specs
from attnlab.models import config as model_config
from attnlab.report.page import table
from attnlab.training.config import PARTS, TrainConfig
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


def escape(text: str) -> str:
    """Text whose bars and whatever would begin a tag are escaped."""
    # Within `code` a backslash would be shown.
    whole = text.replace("|", r"\|")
    return re.sub("`[^`]*`|<", lambda m: r"\<" if m[0] == "<" else m[0], whole)


def line(text: str) -> str:
    """The same in one line, for a cell of a table."""
    return escape(" ".join(text.split()))


# ---------------------------------------------------------------- commands

KINDS = {
    "string": "text", "int": "integer", "float": "number", "bool": "on or off",
    "comma separated list of strings": "list, by commas", "multi string": "text, repeatable",
}  # fmt: skip


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
    rows = [(f"`--{f.name}`", _kind(f), _default(f), _help(f)) for f in flags_of(module)]
    lines += [table(("flag", "value", "default", ""), rows)] if rows else []
    return "\n\n".join(lines)


def _help(flag: flags.Flag) -> str:
    """Without what absl adds for choices and for flags that may be repeated."""
    return line(re.sub(r"^<.*?>: |;\s+repeat this option .*", "", flag.help or "", flags=re.DOTALL))


def _kind(flag: flags.Flag) -> str:
    if flag.name == "config":
        return "config file"
    if choices := getattr(flag.parser, "enum_values", None):
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    return KINDS[flag.flag_type()]


def _default(flag: flags.Flag) -> str:
    if any("must have a value" in validator.message for validator in flag.validators):
        return "required"
    return "" if flag.default in (None, "", []) else f"`{flag.default!r}`"


# ---------------------------------------------------------------- config fields

MODEL = {
    "attention": "Attention", "ffn": "FFN", "ffn.experts": "Experts", "norm": "Norm",
    "dropout": "Dropout", "embedding": "Embedding", "embedding.images": "Images",
    "output": "OutputHead", "init": "Init", "compute": "Compute",
}  # fmt: skip
"""Field of the model -> its record."""


def config_parts() -> dict[str, str]:
    """Every field of an experiment: its task, model, training and dataset."""
    layouts = _ours(heads.LAYOUTS)
    common = [field.name for field in dataclasses.fields(layouts["standard"])]
    records = [c for c in vars(specs).values() if inspect.isclass(c)]
    positions = [c for c in records if issubclass(c, specs.Positions) and c is not specs.Positions]
    other = {field.name for field in dataclasses.fields(Experiment)}
    other -= {"task", "start", "init", "callbacks"}
    tasks = ", ".join(f"`{name}`" for name in OBJECTIVES)
    parts: dict[str, list[str]] = {
        "experiment": [
            _fields("", Experiment, "", *other),
            f"Tasks: {tasks}.",
            _section("match.", Match),
        ],
        "model": [
            _fields("model.", ModelConfig),
            *(_section(f"model.{path}.", vars(specs)[name]) for path, name in MODEL.items()),
            _section("model.encoder.", EncoderConfig),
        ],
        "positions": [_fields("model.positions.", p, p.__name__) for p in positions],
        "layer types": [_fields(None, model_config.LayerOverrides)],
        "layouts": [
            _fields("model.heads.", c, f"`{n}`", "width", "extras", *common * (n != "standard"))
            for n, c in layouts.items()
        ],
        "qk_norm": [_fields("model.heads.qk_norm.", heads.HeadNorm)],
        "extras": [
            _fields(f"model.heads.extras.{n}.", c, f"`{n}`") for n, c in _ours(heads.EXTRAS).items()
        ],
        "training": [
            _fields("train.", TrainConfig, "", *PARTS),
            _prose(TrainConfig),
            *(_section(f"train.{name}.", part) for name, part in PARTS.items()),
        ],
        "datasets": [
            text
            for n, c in _ours(DATASETS).items()
            for text in (_fields("data.", c, f"`{n}`"), _prose(c))
        ],
    }
    return {name: "\n\n".join(filter(None, some)) for name, some in parts.items()}


def _ours(registry: Mapping[str, type]) -> dict[str, type]:
    """The entries of the package itself, whatever else was registered."""
    return {n: entry for n, entry in registry.items() if entry.__module__.startswith("attnlab.")}


def _section(prefix: str, made: type) -> str:
    return f"### {made.__name__}\n\n" + _fields(prefix, made)


def _fields(prefix: str | None, made: Any, title: str = "", *without: str) -> str:
    """The summary of a record and a table of its fields, with what its docstring says of each.

    Args:
      prefix: path of the record in a config; None if it is in none.
      title: stands before the summary.
      without: fields that are not shown.
    """
    said = attributes(made)
    at = "" if prefix is None else f"config.{prefix}"
    rows = [
        [f"`{at}{name}`", _type(one.annotation), _value(made, one), said.get(name, "")]
        for name, one in inspect.signature(made).parameters.items()
        if name not in without and "InitVar" not in str(one.annotation)
    ]
    count = 4 if any(row[-1] for row in rows) else 3
    shown = table(("field", "type", "default", "")[:count], [row[:count] for row in rows])
    summary = line((inspect.getdoc(made) or "").split("\n\n")[0])
    if summary.startswith(f"{made.__name__}("):  # made by dataclass
        summary = ""
    head = f"**{title}.** {summary}" if title else summary
    return "\n\n".join(filter(None, [head.strip(), shown if rows else ""]))


def attributes(made: Any) -> dict[str, str]:
    """Field -> what the part "Attributes:" of the docstrings of a class and its bases says."""
    found: dict[str, str] = {}
    for base in reversed(made.__mro__):
        part = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        items = re.split(r"^  (?=\S)", part.partition("\n\n")[0], flags=re.MULTILINE)
        for names, _, text in (item.partition(":") for item in items):
            found |= {name.strip(): line(text) for name in names.split(",") if name.strip()}
    return found


def _type(annotation: Any) -> str:
    named = vars(specs) | vars(model_config)
    if isinstance(annotation, str) and not inspect.isclass(named.get(annotation, str)):
        annotation = named[annotation]
    text = inspect.formatannotation(annotation).strip("'")
    text = re.sub(r"(?:typing|attnlab|collections)[\w.]*\.(\w+)", r"\1", text)
    if choices := re.fullmatch(r"Literal\[(.*)\]", text):
        return "one of " + re.sub("""['"]""", "`", choices[1])
    return f"`{text}`".replace("|", "or")


def _value(made: Any, parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "required"
    value = parameter.default
    if "factory" in repr(value):
        makes = {field.name: field.default_factory for field in dataclasses.fields(made)}
        value = makes[parameter.name]()  # type: ignore[operator]
    return f"`{value!r}`".replace("|", "or")


def _prose(made: Any) -> str:
    """The paragraphs of a docstring behind the first, without attributes and examples."""
    paragraphs = (inspect.getdoc(made) or "").split("\n\n")[1:]
    kept = [p for p in paragraphs if not p.startswith(("Attributes:", "Raises:", ">>>", "    "))]
    return "\n\n".join(map(escape, kept))


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
    parts = [f"## {name}", line(first)]
    named = [p for p in rest if p.strip().startswith("Presets after the colon")]
    parts += [re.sub(",$", ".", line(p)) for p in named]
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
