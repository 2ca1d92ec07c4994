"""A logger `stop` that sends the signal of STOP_SIGNAL in the last step of the first run."""

import os
import signal

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
        os.kill(os.getpid(), signal.Signals[os.environ["STOP_SIGNAL"]])

    def finish(self):
        pass


LOGGERS["stop"] = Stop
