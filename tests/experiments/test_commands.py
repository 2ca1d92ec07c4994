"""Every command that a config's docstring or a page shows can be pasted."""

import functools
import importlib
import importlib.util
import re
import shlex

import pytest
from conftest import ROOT

from attnlab.nested import flatten
from experiments import reference

DOCS = [p for p in sorted((ROOT / "docs").rglob("*.md")) if not {"_build", "colab"} & set(p.parts)]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
TEXTS = {name: reference.config_module(name).__doc__ for name in reference.config_files()}
READMES = sorted((ROOT / "experiments/studies").glob("*/README.md"))
TEXTS |= {str(path.relative_to(ROOT)): path.read_text() for path in [*PAGES, *READMES]}
OF_JAX = {"jax_enable_compilation_cache", "jax_compilation_cache_dir", "help"}


def commands(text):
    """As a shell reads them: a line that ends in one backslash goes on in the next."""
    starts = [m.start() for m in re.finditer(r"(?<![`\w])python -m experiments\.", text)]
    for start in starts:
        lines = []
        for line in text[start:].splitlines():
            lines.append(line)
            if (len(line) - len(line.rstrip("\\"))) % 2 == 0:
                break
        words = shlex.split("\n".join(lines).replace("\\\n", " "), comments=True)
        yield words[: next((i for i, word in enumerate(words) if word[:1] in "&>|"), None)]


@functools.cache
def flags_of(module):
    """Names of the flags of a command; of a study, whose command is its folder, those in it."""
    if module in reference.commands():
        own = reference.flags_of(importlib.import_module(module))
        return {"debug", "import", *(flag.name for flag in own)}
    folder = ROOT / module.replace(".", "/")
    files = [*folder.glob("*.py"), folder.parent / "rows.py"]
    return {*re.findall(r'DEFINE_\w+\(\s*"(\w+)"', "".join(p.read_text() for p in files))}


STUDIES = sorted(path.parent for path in (ROOT / "experiments/studies").glob("*/__main__.py"))


@pytest.mark.parametrize("name", TEXTS)
def test_commands_can_be_pasted(name):
    found = list(commands(TEXTS[name]))
    assert found or not name.endswith(".py"), "a config is a lab note: it shows its command"
    for python, dash_m, module, *flags in found:
        assert (python, dash_m) == ("python", "-m")
        assert importlib.util.find_spec(module), module
        if module in ("experiments.report", "experiments.notebooks"):  # names without a flag
            flags = [word for word in flags if word.startswith("--")]
        given = [re.fullmatch(r"--([\w.]+)(?:=(.*))?", word) for word in flags]
        assert all(given), flags
        values = {m[1]: m[2] for m in given}
        file, _, words = values.pop("config", "").partition(":")
        fields = []
        if file:
            assert file == "my_config.py" or (ROOT / file).is_file(), file
            # Behind these is something of the reader's.
            if "pretrained" in file or file == "my_config.py":
                file, words = "experiments/configs/byte_lm.py", ""
            config = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            fields = [f"config.{field}" for field in flatten(config.get_config(words).to_dict())]
        own = [*flags_of(module), *OF_JAX, *fields]
        for flag in values:
            assert {flag, flag.removeprefix("no")} & {*own}, f"{module}: --{flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_prose_exist(page):
    """`--flag` in a sentence is a flag of some command; flags of other programs are listed."""
    of_others = {"update", "to", "inplace", "cpus-per-task", "partition", "time", "signal"}
    studies = [f"experiments.studies.{folder.name}" for folder in STUDIES]
    known = set().union(*map(flags_of, [*reference.commands(), *studies]))
    named = re.findall(r"`--([\w-]+)(?![\w.-])", page.read_text())
    assert [n for n in named if n.removeprefix("no") not in known | OF_JAX | of_others] == []
