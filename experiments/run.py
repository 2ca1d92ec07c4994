"""One run: python -m experiments.run --config=experiments/configs/byte_lm.py:wide --workdir=DIR.

Every field of the config is a flag (--config.model.num_layers=8). The same command again goes on
where a killed run stopped, with the numbers that it would have had. On many hosts start it on each
with --distributed.
"""

import sys
from pathlib import Path

import jax
from absl import flags

from experiments.running import arm, launch, machine, workdir

_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other hosts of a pod or cluster.")
_MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel",
    1,
    "Devices that compute one model together, each its own heads and hidden units.",
    lower_bound=1,
)
_CUT_STATE = flags.DEFINE_bool(
    "cut_state", False, "Share weights and optimizer out between devices that read other rows."
)
_LOGGERS = flags.DEFINE_list("loggers", [], "Beside metrics.jsonl: tensorboard, wandb, or both.")
_PROFILE = flags.DEFINE_string("profile", "", "Steps FIRST:LAST to trace into WORKDIR/profile.")


def main() -> None:
    """Runs one arm and prints its held-out loss."""
    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    _, config, _ = launch.config()
    folder = Path(flags.FLAGS.workdir)
    machine.compute_with(flags.FLAGS.threads or workdir.began_with(folder).get("threads"))
    machine.keep_compiled()
    result = arm.run(
        config,
        folder,
        model_parallel=_MODEL_PARALLEL.value,
        cut_state=_CUT_STATE.value,
        loggers=_LOGGERS.value,
        profile=_PROFILE.value,
    )
    if result["status"] != arm.COMPLETE:
        sys.exit(f"error: {result['message']}")
    for metric in result["metrics"]:
        values = result[f"heldout_{metric['name']}"]
        for seed, value in zip(result["seeds"], values, strict=True):
            print(f"seed {seed}: held-out {value:.{metric['digits'] + 1}f} {metric['unit']}")
    for name in ("report", "view", "sample"):
        print(f"python -m experiments.{name} --workdir={folder}", file=sys.stderr)


if __name__ == "__main__":
    launch.define_run()
    launch.start(main)
