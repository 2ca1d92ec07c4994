"""Twelve tiny arms for a SLURM; there every one lasts seconds, and LONG longer than its time limit.

Where they are run one after the other no time is lost: waiting changes no number.
"""

import importlib
import os
import sys
import time

from experiments.configs import byte_lm

get_config = byte_lm.get_config
LAYOUTS, PLANS, RATES = ("standard", "wide", "narrow"), ("separate", "albert"), (1e-3, 3e-3)
LONG = "standard-separate-lr0.001"
SECONDS = 3.0
LONG_SECONDS = 200.0


def sweep(add, arg=""):
    """Layouts x plans x learning rates."""
    for layout in LAYOUTS:
        for plan in PLANS:
            for rate in RATES:
                arm = {
                    "model.heads.layout": layout,
                    "model.sharing": plan,
                    "train.learning_rate": rate,
                }
                add(**arm)


def wait_in_every_step():
    """Steps take as long as those of a larger model."""
    fit = importlib.import_module("attnlab.training.fit")
    seconds = LONG_SECONDS if sys.argv[-1].endswith(LONG) else SECONDS
    batch = fit.host_batch

    def slow(source, config, *where):
        time.sleep(seconds / config.steps)
        return batch(source, config, *where)

    fit.host_batch = slow


if "SLURM_JOB_ID" in os.environ and "experiments.sweep" not in sys.argv[0]:
    wait_in_every_step()
