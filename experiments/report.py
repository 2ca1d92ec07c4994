r"""The report of sweeps: python -m experiments.report WORKDIR... [--out=FOLDER] [--heads]

Writes report.html (one file that loads nothing else), report.md, results.csv, figures/*.svg and
tables/*.csv into --out, by default into the folder of the sweep. Several sweeps of the same
variants on different texts are compared together, with texts as a source of variation; other sweeps
get separate sections. --heads adds attention maps. In Python: `attnlab.lab.report`.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from attnlab import lab
from experiments import app


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("out", None, "Folder of the report; needed for several workdirs.")
    flags.DEFINE_bool(
        "heads", False, "Attention maps, statistics of heads and a text, from the checkpoints."
    )


def write(workdirs: Sequence[Path], out: Path | None = None, *, heads: bool = False) -> Path:
    """Writes the report; returns the path of report.html.

    Raises:
      ValueError: no workdir, no results, or several workdirs without `out`.
    """
    if not workdirs:
        raise ValueError("give the workdir of a sweep: python -m experiments.report WORKDIR...")
    if out is None and len(workdirs) > 1:
        raise ValueError("several workdirs need a folder for their report; give --out=FOLDER")
    return lab.report(workdirs, (out or workdirs[0]) / "report.html", heads=heads)


def main(workdirs: Sequence[str]) -> None:
    """The command."""
    given = flags.FLAGS
    out = Path(given.out) if given.out else None
    path = write([Path(one) for one in workdirs], out, heads=given.heads)
    print(f"report: {path}")


if __name__ == "__main__":
    define_flags()
    app.start(main, takes_words=True)
