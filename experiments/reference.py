"""Reference pages that are made from the code: python -m experiments.reference

Writes docs/reference/commands.md (every command and its flags, read from the source), config.md
(every field of a config, from the dataclasses) and presets.md (what may stand behind the colon of a
config file). A test fails while a page is not what this makes.
"""

import ast
import collections
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from attnlab import heads
from attnlab.data import DATASETS
from attnlab.heads import HeadNorm
from attnlab.lab import Experiment, HeadInit, Match
from attnlab.models import EncoderConfig, ModelConfig, specs
from attnlab.models import config as model_config
from attnlab.models.budget import Budget
from attnlab.report.page import render
from attnlab.training.config import PARTS, TrainConfig
from attnlab.training.objectives import OBJECTIVES
from experiments import app

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
APP = "experiments.app"
HELPERS = ("define_config", "define_run")
"""Functions of `app` that define flags."""


class Flag(NamedTuple):
    """A flag of a command."""

    name: str
    kind: str
    default: str
    text: str
    required: bool


class Command(NamedTuple):
    """A module that is started with `python -m`."""

    module: str
    note: str
    """Its docstring."""
    flags: tuple[Flag, ...]


# ---------------------------------------------------------------- commands


@functools.cache
def tree(module: str) -> ast.Module:
    """The parsed source of a module of `experiments`."""
    return ast.parse((ROOT / Path(*module.split(".")).with_suffix(".py")).read_text())


@functools.cache
def commands() -> dict[str, Command]:
    """Every module of `experiments` that is a command, by name."""
    found = {}
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        if '__name__ == "__main__"' not in path.read_text():
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        note = ast.get_docstring(tree(module)) or ""
        found[module] = Command(module, note, tuple(flags_of(module)))
    return found


def flags_of(module: str) -> list[Flag]:
    """The flags that a command defines itself or by `app.define_...`, and those that `app` has."""
    found = _defined(tree(module), module)
    if "from experiments import app" in ast.unparse(tree(module)):
        assigned = [node for node in tree(APP).body if isinstance(node, ast.Assign)]
        found += [flag for node in assigned for flag in _defined(node, APP)]
    return found


def _defined(source: ast.AST, module: str) -> list[Flag]:
    """The flags of the calls in a part of a module."""
    found = []
    for call in (node for node in ast.walk(source) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        if name.startswith("DEFINE_") and not any(k.arg == "flag_values" for k in call.keywords):
            found.append(_flag(call, name.removeprefix("DEFINE_"), module))
        elif name in HELPERS:
            [helper] = [n for n in tree(APP).body if getattr(n, "name", "") == name]
            optional = any(k.arg == "required" for k in call.keywords)  # it is False then
            flags = _defined(helper, APP)
            found += [flag._replace(required=flag.required and not optional) for flag in flags]
    return found


def _flag(call: ast.Call, kind: str, module: str) -> Flag:
    """One DEFINE_ call."""
    keywords = {k.arg: k.value for k in call.keywords}
    name = ast.literal_eval(call.args[0])
    arguments = list(call.args[1:])
    default = arguments.pop(0) if arguments else None
    choices = arguments.pop(0) if kind == "enum" and arguments else None
    text = arguments.pop(0) if arguments else keywords.get("help_string")
    said = text.value if isinstance(text, ast.Constant) else ast.unparse(text) if text else ""
    if choices is not None:
        kind = "one of " + ", ".join(f"`{choice}`" for choice in _choices(choices, module))
    kinds = {
        "string": "text", "integer": "integer", "float": "number", "bool": "on or off",
        "list": "list, by commas", "multi_string": "text, repeatable",
        "config_file": "config file",
    }  # fmt: skip
    # `app.define_config(required=False)` says otherwise.
    required = kind == "config_file" and default is None
    if "required" in keywords:
        required = ast.unparse(keywords["required"]) != "False"
    shown = "" if default is None else ast.unparse(default)
    return Flag(str(name), kinds.get(kind, kind), shown, str(said), required)


def _choices(choices: ast.expr, module: str) -> list[str]:
    """The values of an enum; names in it are those of the module."""
    try:
        return list(ast.literal_eval(choices))
    except ValueError:
        names = vars(importlib.import_module(module))
        return list(eval(compile(ast.Expression(choices), module, "eval"), dict(names)))


NOT_SHOWN = ("None", "''", '""', "[]", "required", "")


def commands_page() -> str:
    """Every command with its flags."""
    return _page("commands.md.jinja", commands="\n\n".join(map(_command, commands().values())))


def _page(template: str, **values: str) -> str:
    return render(template, "experiments", **values) + "\n"


def _command(command: Command) -> str:
    first, _, rest = command.note.partition("\n\n")
    summary = re.sub(r"[:,]? *python -m \S+.*", "", " ".join(first.split())).rstrip(": ")
    lines = [f"## {command.module}", _escape(summary) + "." * (summary[-1:] not in ".?!")]
    whole = rest.replace("\\\n", "")  # commands of several lines
    usage = [line.strip() for line in whole.splitlines() if line.startswith("    python -m ")]
    if usage:
        lines.append("    " + " ".join(usage[0].split()))
    if command.flags:
        rows = [
            f"| `--{flag.name}` | {flag.kind.replace('|', ' or ')} | {_default(flag)} | "
            f"{_escape(' '.join(flag.text.split()))} |"
            for flag in command.flags
        ]
        table = "\n".join(["| flag | value | default | |", "|---|---|---|---|", *rows])
        lines.append(table)
    return "\n\n".join(lines)


def _default(flag: Flag) -> str:
    if flag.required:
        return "required"
    return "" if flag.default in NOT_SHOWN else f"`{flag.default}`"


def _escape(text: str) -> str:
    """Bars, and what would begin a tag; within `code` a backslash would be seen."""
    whole = text.replace("|", r"\|")
    return re.sub("`[^`]*`|<", lambda m: r"\<" if m[0] == "<" else m[0], whole)


# ---------------------------------------------------------------- config fields


def config_page() -> str:
    """Every field of an experiment: its task, model, training and dataset."""
    model = [_fields("config.model.", ModelConfig)]
    for name in ("Attention", "FFN", "Experts", "Norm", "Dropout", "Embedding", "Images",
                 "OutputHead", "Init", "Compute"):  # fmt: skip
        model.append(_section(f"config.model.{PREFIX.get(name, name.lower())}.", vars(specs)[name]))
    layouts, extras = _ours(heads.LAYOUTS), _ours(heads.EXTRAS)
    common = {f.name for f in dataclasses.fields(layouts["standard"])}
    training = [_fields("config.train.", TrainConfig, without=set(PARTS)), _prose(TrainConfig)]
    training += [_section(f"config.train.{name}.", part) for name, part in PARTS.items()]
    datasets = []
    for name, dataset in _ours(DATASETS).items():
        datasets += [_fields("config.data.", dataset, title=f"`{name}`"), _prose(dataset)]
    parts = {
        "experiment": _experiment(),
        "model": [*model, _section("config.model.encoder.", EncoderConfig)],
        "positions": [_fields("config.model.positions.", p, bold=True) for p in _positions()],
        "layer_types": [_fields("", model_config.LayerOverrides)],
        "layouts": [
            _fields(
                "config.model.heads.",
                layout,
                title=f"`{name}`",
                without=common if name != "standard" else set(),
            )
            for name, layout in layouts.items()
        ],
        "qk_norm": [_fields("config.model.heads.qk_norm.", HeadNorm)],
        "extras": [
            _fields(f"config.model.heads.extras.{name}.", extra, title=f"`{name}`")
            for name, extra in extras.items()
        ],
        "training": training,
        "datasets": datasets,
    }
    joined = {name: "\n\n".join(filter(None, some)) for name, some in parts.items()}
    return _page("config.md.jinja", **joined)


def _experiment() -> list[str]:
    """What an experiment has besides its model, training and dataset."""
    shown = {"task", "start", "measure_heads"}
    others = {field.name for field in dataclasses.fields(Experiment)} - shown
    tasks = ", ".join(f"`{name}`" for name in OBJECTIVES)
    return [
        "## Experiment",
        _fields("config.", Experiment, without=others),
        f"Tasks: {tasks}.",
        _section("config.head_init.", HeadInit),
        _match(),
    ]


def _match() -> str:
    """The fields of `match`, whose budget in a config may be left out."""
    budgets = ", ".join(f"`{budget}`" for budget in get_args(Budget))
    types = {"budget": f"one of {budgets}"}
    defaults = {"budget": "", **Match._field_defaults}
    rows = [
        f"| `config.match.{name}` | {types.get(name, '`str`')} | `{defaults[name]!r}` | {said} |"
        for name, said in attributes(Match).items()
    ]
    summary = inspect.cleandoc(Match.__doc__ or "").partition("\n\n")[0]
    header = ["| field | type | default | |", "|---|---|---|---|"]
    return "\n".join(["### Match", "", summary, "", *header, *rows])


def _ours(registry: Mapping[str, type]) -> dict[str, type]:
    """The entries of the package itself, whatever else was registered."""
    return {n: entry for n, entry in registry.items() if entry.__module__.startswith("attnlab.")}


PREFIX = {"Experts": "ffn.experts", "Images": "embedding.images", "OutputHead": "output"}
"""Class -> its place in the model, where it is not the name."""


def _positions() -> list[type]:
    classes = [c for c in vars(specs).values() if inspect.isclass(c)]
    return [c for c in classes if issubclass(c, specs.Positions) and c is not specs.Positions]


def _section(prefix: str, made: type) -> str:
    return f"### {made.__name__}\n\n" + _fields(prefix, made)


def _fields(
    prefix: str,
    made: Any,
    title: str = "",
    bold: bool = False,
    without: set[str] = frozenset(),  # type: ignore[assignment]
) -> str:
    """A table of the fields of a dataclass, with what its docstring says of each."""
    said = collections.defaultdict(str, attributes(made))
    shown = [
        (f"`{prefix}{field.name}`", _type(field), _value(field), said[field.name])
        for field in dataclasses.fields(made)
        if field.name not in without and field.name not in ("width", "extras") * bool(title)
    ]
    count = 4 if any(row[-1] for row in shown) else 3
    rows = [f"| {' | '.join(row[:count])} |" for row in shown]
    summary = _escape(" ".join(inspect.getdoc(made).split("\n\n")[0].split()))  # type: ignore[union-attr]
    head = f"**{title or made.__name__}.** " if title or bold else ""
    if summary.startswith(made.__name__ + "("):
        summary = ""
    header = ["| field | type | default |" + " |" * (count - 3), "|---" * count + "|"]
    table = [*header, *rows] if rows else []
    return (head + summary + "\n\n" * bool(head or summary) + "\n".join(table)).strip()


def attributes(made: Any) -> dict[str, str]:
    """Field -> what the part "Attributes:" of the docstrings of a class and its bases says."""
    found: dict[str, str] = {}
    for base in reversed(made.__mro__):
        text = base.__doc__ or ""
        block = re.search(r"\n *Attributes:\n(.*?)(?:\n\s*\n|\Z)", text, re.DOTALL)
        if not block:
            continue
        lines = textwrap.dedent(block[1]).splitlines()
        item = ""
        for line in [*lines, "end: "]:
            if re.match(r"[\w, ]+: ?", line) and not line.startswith(" "):
                names, _, said = item.partition(":")
                words = _escape(" ".join(said.split()))
                found |= {name.strip(): words for name in names.split(",") if name.strip()}
                item = line
            else:
                item += " " + line.strip()
    return found


def _type(field: dataclasses.Field[Any]) -> str:
    text = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    alias = vars(specs).get(text) or vars(model_config).get(text)
    if alias is not None and not inspect.isclass(alias):
        text = inspect.formatannotation(alias)
    text = re.sub(r"(?:typing|attnlab|collections)[\w.]*\.(\w+)", r"\1", text)
    choices = re.fullmatch(r"Literal\[(.*)\]", text)
    if choices:
        return "one of " + choices[1].replace("'", "`").replace('"', "`")
    return f"`{text}`".replace("|", "or")


def _value(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    return f"`{value!r}`".replace("|", "or")


def _prose(made: Any) -> str:
    """The paragraphs of a docstring behind the first, without attributes and examples."""
    paragraphs = (inspect.getdoc(made) or "").split("\n\n")[1:]
    kept = [p for p in paragraphs if not p.startswith(("Attributes:", "Raises:", ">>>", "    "))]
    return _escape("\n\n".join(kept))


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


def presets_page() -> str:
    """Every config file: its question, its command, its presets."""
    parts = []
    for name in config_files():
        module = config_module(name)
        first, *rest = (module.__doc__ or "").split("\n\n")
        parts.append(f"## {name}\n\n{_escape(' '.join(first.split()))}")
        named = [p for p in rest if p.strip().startswith("Presets after the colon")]
        parts += [re.sub(",$", ".", _escape(" ".join(p.split()))) for p in named]
        known = getattr(module, "PRESETS", {})
        rows = [f"| `{name}` | {_sets(values)} |" for name, values in known.items()]
        if rows:
            parts.append("\n".join(["| preset | sets |", "|---|---|", *rows]))
    return _page("presets.md.jinja", files="\n\n".join(parts))


def _sets(values: Any) -> str:
    shown = ", ".join(f"`{path}={value}`" for path, value in (values or {}).items())
    return (shown if len(shown) < 300 else shown[:300].rpartition(", ")[0] + ", ...").replace(
        "|", r"\|"
    )


def pages() -> dict[str, str]:
    """File name -> text."""
    return {
        "commands.md": commands_page(),
        "config.md": config_page(),
        "presets.md": presets_page(),
    }


def main() -> None:
    """Writes the pages."""
    for name, text in pages().items():
        (PAGES / name).write_text(text)
        print(f"wrote {PAGES / name}")


if __name__ == "__main__":
    app.start(main)
