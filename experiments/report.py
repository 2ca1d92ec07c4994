r"""The report of one or several sweeps: python -m experiments.report WORKDIR... [--out=FOLDER]

Writes report.html (one file that loads nothing else), report.md, results.csv, figures/*.svg and
tables/*.csv into --out, by default into the folder of the sweep. Several sweeps of the same
variants on different texts are compared together, with texts as a source of variation; other sweeps
get separate sections. In Python: `attnlab.lab.report`.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from attnlab import lab
from experiments import app


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("out", None, "Folder of the report; needed for several workdirs.")


def write(workdirs: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report; returns the path of report.html.

    Raises:
      ValueError: no workdir, no results, or several workdirs without `out`.
    """
    if not workdirs:
        raise ValueError("give the workdir of a sweep: python -m experiments.report WORKDIR...")
    if out is None and len(workdirs) > 1:
        raise ValueError("several workdirs need a folder for their report; give --out=FOLDER")
    return lab.report(workdirs, (out or workdirs[0]) / "report.html")


def main(workdirs: Sequence[str]) -> None:
    """The command."""
    out = flags.FLAGS.out
    path = write([Path(one) for one in workdirs], Path(out) if out else None)
    print(f"report: {path}")


if __name__ == "__main__":
    define_flags()
    app.start(main, takes_words=True)
