"""A logger `stop` that sends the signal of STOP_SIGNAL in the last step of the first run."""

import os
import signal
import time

from attnlab.training.interrupts import stop_signals
from attnlab.training.loggers import LOGGERS


class Stop:
    def __init__(self, info):
        self.info = info

    def log_scalars(self, step, values):
        last = self.info.hyperparameters["config"]["train"]["steps"]
        sent = self.info.folder.parent.parent / "sent"
        if step < last or "train/loss" not in values or sent.exists():
            return
        sent.touch()
        to = os.getppid() if "STOP_PARENT" in os.environ else os.getpid()
        os.kill(to, signal.Signals[os.environ["STOP_SIGNAL"]])
        with stop_signals() as requested:  # it, or the request that the parent makes of it
            while to != os.getpid() and not requested():
                time.sleep(0.05)

    def log_figure(self, step, name, figure):
        pass

    def finish(self):
        pass


LOGGERS["stop"] = Stop
