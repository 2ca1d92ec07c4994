"""Every notebook equals its .py pair, keeps no output, defines no layer, and runs."""

import ast
import json
import os
import subprocess
import sys

import jupytext
import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


def test_each_script_has_its_notebook():
    scripts = sorted((ROOT / "colab").glob("*.py"))
    assert [p.stem for p in scripts] == [p.stem for p in NOTEBOOKS] != []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_pair_is_equal_and_has_no_outputs(path):
    notebook, script = jupytext.read(path), jupytext.read(path.with_suffix(".py"))
    kinds = [[(c.cell_type, c.source) for c in n.cells] for n in (notebook, script)]
    assert kinds[0] == kinds[1]
    assert "colab-badge.svg" in notebook.cells[0].source
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_defines_no_layers(path):
    tree = ast.parse(path.with_suffix(".py").read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path):
    words = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-c", "/dev/null"]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    options = dict(cwd=path.parent, env=environment, capture_output=True, text=True)
    result = subprocess.run([*words, str(path)], **options)
    assert result.returncode == 0, result.stdout[-3000:]
