"""Runs notebooks of colab/ from their scripts, all or those that are named.

    python -m experiments.notebooks quickstart

The first image of the cell with the tag `answer` is copied into the picture near the top, so that
the answer is seen before anything is run. It stands in the text of the cell: Colab does not show
attachments.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "colab"
PICTURE = "data:image/png;base64,"


def answer(notebook: Any) -> str:
    """The image that the cell with the tag `answer` shows, in base64."""
    [cell] = [c for c in notebook.cells if "answer" in c.metadata.get("tags", ())]
    image = next(
        out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})
    )
    return str(image).replace("\n", "")


def run(name: str) -> None:
    """Executes a script and writes the notebook beside it."""
    import jupytext
    import nbclient
    import nbformat

    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata.pop("jupytext")
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=1200, resources={"metadata": {"path": folder}}
        )
        client.execute()
    picture = PICTURE + answer(notebook)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell.source = cell.source.replace(PICTURE, picture)
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


def main(names: Sequence[str]) -> None:
    """Runs the notebooks of these names, or all."""
    for name in names or sorted(path.stem for path in FOLDER.glob("*.py")):
        run(name)
        print(FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
