"""Every command asks before it acts: --help and a wrong flag end it with nothing done."""

import ast
import importlib.util
import re

import pytest
from commands import ROOT, command
from conftest import deep

COMMANDS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
}
# It reads its one argument with argparse: it shall not need what our flags import.
IN_TORCH = "experiments.benchmarks.peers.torch_nanogpt"


def test_commands_in_help_keep_their_lines():
    """A backslash at the end of a line of a docstring that is not raw joins it to the next."""
    paths = sorted((ROOT / "experiments").rglob("*.py"))
    described = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}
    assert not [path for path in paths if re.search(r"\S {4,}--", described[path])]


def written():
    """When each page was."""
    return {path: path.stat().st_mtime_ns for path in ROOT.rglob("*.md")}


@pytest.mark.parametrize("name", deep(COMMANDS, "experiments.sweep"))
def test_nothing_is_done_before_the_flags_are_read(name):
    if name == IN_TORCH and not importlib.util.find_spec("torch"):
        pytest.skip("no torch")
    before = written()
    told, wrong = command(name, "--help"), command(name, "--nonsense")
    assert written() == before
    first = ast.get_docstring(ast.parse(COMMANDS[name].read_text())).partition("\n")[0]
    said = " ".join(told.stdout.split())
    assert " ".join(first.split()) in said
    assert "Traceback" not in told.stderr + wrong.stderr
    assert told.returncode == 0
    if name != IN_TORCH:
        assert wrong.returncode != 0
        assert "nonsense" in wrong.stderr
