"""One run: python -m experiments.run --config=experiments/configs/byte_lm.py:wide --workdir=DIR.

Every field of the config is a flag (--config.model.num_layers=8). The same command again goes on
where a killed run stopped. On many hosts start it on each with --distributed.
"""

import sys
from pathlib import Path

import jax
from absl import flags

from experiments.running import arm, launch

_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other hosts of a pod or cluster.")


def main() -> None:
    """Runs one arm and prints its held-out loss."""
    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    _, config, _ = launch.config()
    result = arm.run(config, Path(flags.FLAGS.workdir))
    if result["status"] != arm.COMPLETE:
        sys.exit(f"error: {result['message']}")
    for metric in result["metrics"]:
        values = result[f"heldout_{metric['name']}"]
        for seed, value in zip(result["seeds"], values, strict=True):
            print(f"seed {seed}: held-out {value:.{metric['digits'] + 1}f} {metric['unit']}")


if __name__ == "__main__":
    launch.define_config()
    launch.start(main)
