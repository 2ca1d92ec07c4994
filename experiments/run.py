"""One run: python -m experiments.run --config=experiments/configs/byte_lm.py:wide --workdir=DIR.

Every field of the config is a flag (--config.model.num_layers=8). The same command again goes on
where a killed run stopped. On many hosts start it on each with --distributed.
"""

import sys
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import config_flags

from attnlab.train import Stopped
from experiments import arm

_CONFIG = config_flags.DEFINE_config_file("config", None, "A config file, with :words")
flags.DEFINE_string("workdir", None, "The folder of this run.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other hosts of a pod or cluster.")


def main(argv: list[str]) -> None:
    """Runs one arm and prints its held-out loss."""
    if len(argv) > 1:
        sys.exit(f"unexpected argument {argv[1]!r}; flags start with --")
    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    try:
        result = arm.run(_CONFIG.value, Path(flags.FLAGS.workdir))
    except (ValueError, OSError, Stopped) as error:
        sys.exit(f"error: {error}")
    if result["status"] != arm.COMPLETE:
        sys.exit(f"error: {result['message']}")
    for seed, bits in zip(result["seeds"], result["heldout_bits_per_byte"], strict=True):
        print(f"seed {seed}: held-out {bits:.4f} bits per byte")


if __name__ == "__main__":
    flags.FLAGS.set_default("verbosity", -1)
    flags.mark_flags_as_required(["config", "workdir"])
    jax.config.config_with_absl()
    app.run(main)
