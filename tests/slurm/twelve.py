"""Twelve tiny runs for a SLURM; there each lasts seconds, and LONG longer than its time limit.

Where they are run one after the other no time is lost: waiting changes no number.
"""

import os
import time
from pathlib import Path

from attnlab import lab
from attnlab.training import callback
from experiments.configs import byte_lm

LONG = "long"
SECONDS = 0.15
"""Of a step."""
LONG_STEPS = 1300


@callback(every=1)
def wait(info):
    """Steps take as long as those of a larger model."""
    if "SLURM_JOB_ID" in os.environ:
        time.sleep(SECONDS)


def get_config(arg):
    """A byte model whose steps wait."""
    config = byte_lm.get_config(arg)
    config.callbacks = (f"{Path(__file__).resolve()}:wait",)
    return config


def variants(base, preset):
    """Layouts x plans, and one of many steps."""
    found = lab.grid(layout=("standard", "wide", "narrow"), sharing=("separate", "albert"))
    return [*found[1:], lab.Variant({"train.steps": LONG_STEPS}, LONG)]
