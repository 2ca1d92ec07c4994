"""From data to weights: sources and tasks, optimizers, the steps of S seeds, exact resume."""

from attnlab.training import shard, sources, tasks
from attnlab.training.checkpoint import Checkpoints, WrongCheckpoint, describe_model
from attnlab.training.config import TrainConfig
from attnlab.training.fit import NonFiniteLoss, Result, Stopped, fit
from attnlab.training.metrics import Recorder
from attnlab.training.optimizers import adamw, learning_rate
from attnlab.training.step import TrainState, init_state, over_seeds, train_step

__all__ = [
    "Checkpoints",
    "NonFiniteLoss",
    "Recorder",
    "Result",
    "Stopped",
    "TrainConfig",
    "TrainState",
    "WrongCheckpoint",
    "adamw",
    "describe_model",
    "fit",
    "init_state",
    "learning_rate",
    "over_seeds",
    "shard",
    "sources",
    "tasks",
    "train_step",
]
