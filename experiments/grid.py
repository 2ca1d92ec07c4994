r"""Runs every combination of values of some fields of a config, with several seeds.

    python -m experiments.grid --config=experiments/configs/byte_lm.py --workdir=runs/layouts \
        --vary=model.heads.layout=standard,wide --vary=model.sharing=separate,albert --seeds=0,1,2

--match=parameters (or flops) solves the FFN width of each combination for the budget of the config.
Prints the table and the differences from the first combination, and writes results.csv and
report.html. Stopped or killed, the same command goes on. In Python: `attnlab.lab`.
"""

import ast
from pathlib import Path
from typing import Any, cast

from absl import flags

from attnlab import lab
from attnlab.models.budget import Budget
from experiments.running import arm, launch

VARY = flags.DEFINE_multi_string("vary", [], "FIELD=VALUE,VALUE,...; repeatable")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "seeds of each combination")
MATCH = flags.DEFINE_enum("match", None, ["parameters", "flops"], "the budget that is equal")
JOBS = flags.DEFINE_integer("jobs", None, "processes; one for each GPU or core", lower_bound=1)
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the sweep", required=True)


def parse_variants(lines: list[str]) -> dict[str, list[Any]]:
    """ "train.steps=10,20" -> {"train.steps": [10, 20]}; what is no Python literal is a string."""
    found: dict[str, list[Any]] = {}
    for line in lines:
        path, equals, values = line.partition("=")
        if not (path and equals and values):
            raise ValueError(f"--vary={line}: write FIELD=VALUE,VALUE,...")
        found[path] = [_literal(value) for value in values.split(",")]
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main() -> None:
    """Runs the grid."""
    made = arm.resolve(launch.config()[1])
    base = lab.Experiment(model=made.model, train=made.train, data=made.data, task=made.task)
    variants = parse_variants(VARY.value)
    seeds = [int(seed) for seed in SEEDS.value]
    match = cast("Budget | None", MATCH.value)
    specs = lab.product(base, seeds=seeds, match=match, **variants)
    folder = Path(WORKDIR.value)
    results = lab.sweep(specs, folder, executor=lab.LocalExecutor(JOBS.value))
    results.to_pandas().to_csv(folder / "results.csv", index=False)
    print(results.table().to_string(index=False))
    print(results.compare(specs[0].tags).to_string(index=False))
    print(f"report: {results.report(folder / 'report.html')}")


if __name__ == "__main__":
    launch.define_config()
    launch.start(main)
