"""Training: objectives, optimizers, the steps of several seeds, evaluation, exact resume."""

from attnlab.training import objectives, sharding
from attnlab.training.callbacks import CALLBACKS, Callback, Profile, StepInfo, callback, measured
from attnlab.training.checkpoint import Checkpoints, WrongCheckpoint, describe_model
from attnlab.training.config import EvaluationConfig, TrainConfig, make_optimizer
from attnlab.training.fit import FitOptions, FitResult, InMemoryFit, fit, fit_in_memory
from attnlab.training.interrupts import NonFiniteLoss, Stopped
from attnlab.training.loggers import LOGGERS, Logger, Recorder
from attnlab.training.objectives import OBJECTIVES, Objective
from attnlab.training.optimizers import OPTIMIZERS, Optimizer, OptimizerConfig, frozen_mask
from attnlab.training.schedules import SCHEDULES, ScheduleConfig
from attnlab.training.sharding import StateSharding
from attnlab.training.step import Evaluator, TrainState, init_state, map_over_seeds, train_step

__all__ = [
    "CALLBACKS", "LOGGERS", "OBJECTIVES", "OPTIMIZERS", "SCHEDULES", "Callback", "Checkpoints",
    "EvaluationConfig", "Evaluator", "FitOptions", "FitResult", "InMemoryFit", "Logger",
    "NonFiniteLoss", "Objective", "Optimizer", "OptimizerConfig", "Profile", "Recorder",
    "ScheduleConfig", "StateSharding", "StepInfo", "Stopped", "TrainConfig", "TrainState",
    "WrongCheckpoint", "callback", "describe_model", "fit", "fit_in_memory", "frozen_mask",
    "init_state", "make_optimizer", "map_over_seeds", "measured", "objectives", "sharding",
    "train_step",
]  # fmt: skip
