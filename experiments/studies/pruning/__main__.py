"""The command of the study: python -m experiments.studies.pruning"""

import json
from pathlib import Path

from absl import flags

from attnlab.atomic import check_new_file, write_atomic
from attnlab.lab.machine import keep_compiled
from experiments import app
from experiments.studies.pruning import study as pruning

__doc__ = pruning.__doc__
flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
flags.DEFINE_integer("seed", None, "Seed of the run; the first if left out.")
flags.DEFINE_list("pressures", "0.1,0.3,1", "Penalties on open gates: what all heads cost.")
flags.register_validator("pressures", bool, "give at least one number")
flags.DEFINE_enum("by", "layer", ["layer", "group"], "What a head has one gate for.")
flags.DEFINE_integer("steps", 400, "Steps of each training.", lower_bound=1)
flags.DEFINE_float(
    "learning_rate", None, "Learning rate of the weights; the run's last one if left out."
)
flags.DEFINE_float("gate_rate", 0.05, "Learning rate of the gates.", lower_bound=0)
flags.DEFINE_integer(
    "rows", 256, "Rows to choose heads by, and as many held-out rows to score.", lower_bound=1
)
flags.DEFINE_string("out", "", "JSON file for all numbers and gates.")


def main() -> None:
    """Prints the table, and writes --out."""
    given = flags.FLAGS
    out = Path(given.out) if given.out else None
    if out:
        check_new_file(out, "out")
    pressures = [float(text) for text in given.pressures]
    if wrong := [one for one in pressures if not one >= 0]:
        raise ValueError(f"--pressures must be 0 or more, not {wrong[0]}")
    keep_compiled()
    study = pruning.begin(Path(given.workdir), given.seed, given.steps, given.learning_rate)
    most = len(study.source.heldout(0)["valid"])
    if given["rows"].present and given.rows > most:
        raise ValueError(f"--rows={given.rows} is more than the {most} held-out rows of the data")
    whole, rows = pruning.at_pressures(
        study, pressures, by=given.by, rate=given.gate_rate, rows=given.rows
    )
    print(pruning.table(study.config, whole, rows, by=given.by))
    if out:
        found = {"by": given.by, "loss": whole, "rows": rows}
        write_atomic(out, (json.dumps(found, indent=1) + "\n").encode())


app.start(main)
