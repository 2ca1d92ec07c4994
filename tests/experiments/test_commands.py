"""Every command that a config's docstring or a page shows can be pasted."""

import importlib
import importlib.util
import re
import shlex

import pytest
from conftest import ROOT

CONFIGS = sorted(p.stem for p in (ROOT / "experiments/configs").glob("[a-z]*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {f"{name}.py": f"experiments.configs.{name}" for name in CONFIGS}
TEXTS |= {str(path.relative_to(ROOT)): path for path in PAGES}
DEFINED = set(
    re.findall(
        r'DEFINE_\w+\(\s*"(\w+)"',
        "".join(p.read_text() for p in (ROOT / "experiments").rglob("*.py")),
    )
)


def commands(text):
    """As a shell reads them: a line that ends in one backslash goes on in the next."""
    starts = [m.start() for m in re.finditer(r"(?<![`\w])python -m experiments\.", text)]
    for start in starts:
        lines = []
        for line in text[start:].splitlines():
            lines.append(line)
            if (len(line) - len(line.rstrip("\\"))) % 2 == 0:
                break
        yield shlex.split("\n".join(lines).replace("\\\n", " "), comments=True)


def text_of(where):
    return (
        where.read_text() if hasattr(where, "read_text") else importlib.import_module(where).__doc__
    )


@pytest.mark.parametrize("name", TEXTS)
def test_commands_can_be_pasted(name):
    found = list(commands(text_of(TEXTS[name])))
    assert found or not name.endswith(".py"), "a config is a lab note: it shows its command"
    for python, dash_m, module, *flags in found:
        assert (python, dash_m) == ("python", "-m")
        assert importlib.util.find_spec(module), module
        given = [re.fullmatch(r"--([\w.]+)(?:=(.*))?", word) for word in flags]
        assert all(given), flags
        values = {m[1]: m[2] for m in given}
        file, _, words = values.pop("config", "").partition(":")
        fields = {}
        if file:
            assert (ROOT / file).is_file(), file
            if "pretrained" in file:  # after the colon stands a folder of the reader's own
                file, words = "experiments/configs/byte_lm.py", ""
            config = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            fields = flat(config.get_config(words).to_dict(), "config")
        for flag in values:
            assert flag in fields or flag in DEFINED, f"{module} knows no flag --{flag}"


def flat(tree, path):
    if not isinstance(tree, dict):
        return {path}
    return {path}.union(*(flat(value, f"{path}.{name}") for name, value in tree.items()))
