"""From data to weights: sources and tasks, optimizers, the steps of S seeds, exact resume."""

from attnlab.training import shard, sources, tasks
from attnlab.training.checkpoint import Checkpoints, WrongCheckpoint, describe_model
from attnlab.training.config import TrainConfig
from attnlab.training.fit import NonFiniteLoss, Result, Stopped, fit
from attnlab.training.metrics import Recorder
from attnlab.training.optimizers import OPTIMIZERS, Optimizer, frozen, make_optimizer
from attnlab.training.schedules import SCHEDULES
from attnlab.training.step import TrainState, init_state, over_seeds, train_step
from attnlab.training.trial import Trial, trial

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Checkpoints",
    "NonFiniteLoss",
    "Optimizer",
    "Recorder",
    "Result",
    "Stopped",
    "TrainConfig",
    "TrainState",
    "Trial",
    "WrongCheckpoint",
    "describe_model",
    "fit",
    "frozen",
    "init_state",
    "make_optimizer",
    "over_seeds",
    "shard",
    "sources",
    "tasks",
    "train_step",
    "trial",
]
