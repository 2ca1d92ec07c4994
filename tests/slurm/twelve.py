"""Twelve tiny runs for a SLURM; there each lasts seconds, and LONG longer than its time limit.

Where they are run one after the other no time is lost: waiting changes no number.
"""

import os
import sys
import time

from attnlab import lab
from attnlab.training import step
from experiments.configs import byte_lm

get_config = byte_lm.get_config
LONG = "long"
SECONDS = 0.15
"""Of a step."""
LONG_STEPS = 1300


def variants(base, preset):
    """Layouts x plans, and one of many steps."""
    found = lab.grid(layout=("standard", "wide", "narrow"), sharing=("separate", "albert"))
    return [*found[1:], lab.Variant({"train.steps": LONG_STEPS}, LONG)]


def wait_in_every_step():
    """Steps take as long as those of a larger model."""
    batch = step.host_batch

    def slow(*arguments):
        time.sleep(SECONDS)
        return batch(*arguments)

    step.host_batch = slow


if "SLURM_JOB_ID" in os.environ and "experiments" not in sys.argv[0]:
    wait_in_every_step()
