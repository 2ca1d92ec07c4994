"""How few heads are enough? Hard-concrete gates (Voita et al. 2019) for the heads of a run.

    python -m experiments.prune --workdir=runs/one --pressures=0.1,0.3,1 --out=pruned.json

Runs one training for each value of --pressures: the penalty if all heads are open, in the unit of
the loss. Gates and weights continue from the run's newest checkpoint with its task, data and
optimizer, at the learning rate that it ended with. --frozen trains the gates alone, --untrained
starts from initial weights. With --by=layer a head has one gate per layer, with --by=group one gate
for all layers that share its parameters. For comparison the same number of heads is chosen in other
ways: by the gradients of the gates (Michel et al. 2019), by ablation of each head alone, and at
random; both before and after the same training without these heads. Heads are chosen on rows of the
training part and scored on held-out rows.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from attnlab.atomic import check_new_file, write_atomic
from attnlab.data import Dataset
from attnlab.lab.machine import keep_compiled
from experiments import app
from experiments.studies.pruning import study as pruning


def read_pressures(texts: Sequence[str]) -> list[float]:
    """The numbers of --pressures. Raises ValueError where they are none."""
    given = f"--pressures={','.join(texts)}"
    try:
        pressures = [float(p) for p in texts]
    except ValueError:
        raise ValueError(f"{given} must be numbers") from None
    if not pressures or not all(0 <= p < math.inf for p in pressures):
        raise ValueError(f"{given} must be one or more finite numbers of at least 0")
    return pressures


def check_rates() -> None:
    """Raises ValueError for a --learning_rate or --gate_rate that has no effect."""
    rate, gate_rate = flags.FLAGS.learning_rate, flags.FLAGS.gate_rate
    if not 0 < gate_rate < math.inf:
        raise ValueError(f"--gate_rate={gate_rate:g} must be above 0 and finite")
    if rate is not None and flags.FLAGS.frozen:
        raise ValueError("--frozen trains no weights; leave out --learning_rate, or --frozen")
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"--learning_rate={rate:g} must be above 0; --frozen keeps the weights")


def check_rows(source: Dataset) -> None:
    """Raises ValueError where --rows asks for more than the data has."""
    rows, most = flags.FLAGS.rows, len(source.heldout(0)["valid"])
    if flags.FLAGS["rows"].present and rows > most:
        raise ValueError(f"--rows={rows} is more than the {most} held-out rows of the data")


def main() -> None:
    """Prints the table, and writes --out."""
    given = flags.FLAGS
    out = Path(given.out) if given.out else None
    if out:
        check_new_file(out, "out")
    pressures = read_pressures(given.pressures)
    check_rates()
    keep_compiled()
    study = pruning.begin(
        Path(given.workdir),
        given.seed,
        given.steps,
        frozen=given.frozen,
        untrained=given.untrained,
        learning_rate=given.learning_rate,
    )
    check_rows(study.source)
    whole, rows = pruning.at_pressures(
        study, pressures, by=given.by, rate=given.gate_rate, rows=given.rows
    )
    print(pruning.table(study.config, whole, rows, by=given.by))
    if out:
        told = {"by": given.by, "loss": whole, "rows": [row._asdict() for row in rows]}
        write_atomic(out, (json.dumps(told, indent=1) + "\n").encode())


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
    flags.DEFINE_integer("seed", None, "Seed of the run; the first if left out.")
    flags.DEFINE_list(
        "pressures", ["0.1", "0.3", "1"], "Penalties on open gates: what all heads together cost."
    )
    flags.DEFINE_enum(
        "by",
        "layer",
        ["layer", "group"],
        "One gate per head and layer, or per head of a parameter group.",
    )
    flags.DEFINE_integer("steps", 400, "Steps of each training.", lower_bound=1)
    flags.DEFINE_bool("frozen", False, "Train the gates and keep the weights.")
    flags.DEFINE_bool("untrained", False, "Start from initial weights.")
    flags.DEFINE_float(
        "learning_rate", None, "Learning rate of the weights; the run's last one if left out."
    )
    flags.DEFINE_float("gate_rate", 0.05, "Learning rate of the gates.")
    flags.DEFINE_integer(
        "rows", 256, "Rows to choose heads by, and as many held-out rows to score.", lower_bound=1
    )
    flags.DEFINE_string("out", "", "JSON file for all numbers and gates.")
    app.start(main)
