"""Every notebook equals its .py pair, shows what it printed, and runs."""

import base64
import io
import json
import os
import re
import subprocess
import sys

import jupytext
import matplotlib.image
import nbformat
import numpy as np
import pytest
from conftest import ROOT

from experiments.notebooks import PICTURE, answer

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
QUESTIONS = [path for path in NOTEBOOKS if path.stem != "quickstart"]
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def test_each_script_has_its_notebook_and_quickstart_leads_to_it():
    scripts = sorted((ROOT / "colab").glob("*.py"))
    assert [p.stem for p in scripts] == [p.stem for p in NOTEBOOKS] != []
    start = (ROOT / "colab" / "quickstart.py").read_text()
    assert [p.name for p in QUESTIONS if f"main/colab/{p.name}" not in start] == []


@every
def test_pair_is_equal(path):
    notebook, script = jupytext.read(path), jupytext.read(path.with_suffix(".py"))
    shown = [(c.cell_type, re.sub(f"(?<={PICTURE})[^)]*", "", c.source)) for c in notebook.cells]
    assert shown == [(c.cell_type, c.source) for c in script.cells]
    badge = f"colab.research.google.com/github/attnlab/attnlab/blob/main/colab/{path.name}"
    assert badge in notebook.cells[0].source
    source = (
        '%pip install -q "attnlab[lab,pretrained] @ git+https://github.com/attnlab/attnlab@main"'
    )
    assert path.with_suffix(".py").read_text().count(source) == 1


@every
def test_it_shows_one_clean_run(path):
    """From top to bottom, nothing on standard error, no path of a machine, a figure, small."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [out for c in cells for out in c["outputs"]]
    assert {out["output_type"] for out in outputs} <= {"stream", "display_data", "execute_result"}
    assert [out["text"] for out in outputs if out.get("name") == "stderr"] == []
    assert [out for out in outputs if re.search(r"/(tmp|home|root|usr)/", json.dumps(out))] == []
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert path.stat().st_size < 400_000


@every
def test_the_picture_at_the_top_is_the_one_that_a_cell_makes(path):
    """Below the sentences, and equal to what the cell with the tag `answer` shows."""
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[1].source.endswith(f"]({PICTURE}{answer(notebook)})")


def solutions(path):
    """The code blocks that the last cell hides."""
    hidden = jupytext.read(path.with_suffix(".py")).cells[-1].source.partition("<details>")[2]
    return re.findall("```python\n(.*?)```", hidden, re.DOTALL)


@pytest.mark.slow
@every
def test_it_runs(path, tmp_path):
    """With its solutions as more cells; the picture at the top is that of a new run."""
    notebook = jupytext.read(path.with_suffix(".py"))
    assert all("assert " in code for code in solutions(path))
    notebook.cells.extend(nbformat.v4.new_code_cell(code) for code in solutions(path))
    jupytext.write(notebook, tmp_path / path.name)
    words = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "--nbmake-timeout=600"]
    roots = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": roots}
    options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True)
    result = subprocess.run([*words, "-c", "/dev/null", path.name], **options)
    assert result.returncode == 0, result.stdout[-3000:]
    runs = (tmp_path / path.name, path)
    new, saved = (pixels(answer(nbformat.read(run, as_version=4))) for run in runs)
    assert np.abs(new - saved).mean() < 0.02


def pixels(image):
    """[height, width, 4] of an image in base64, from 0 to 1."""
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(image)), format="png")
