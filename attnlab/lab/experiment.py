"""`Experiment`: a model, its training, its data and its task, as one value with a JSON form."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from attnlab.data import DATASETS, Batch, DataConfig, Text
from attnlab.data.dataset import BatchShapes
from attnlab.fields import check_field
from attnlab.lab.start import HeadInit, init_function
from attnlab.load import check_start, stored_data
from attnlab.models import ModelConfig, config_dict
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.sharing import Params
from attnlab.training.config import TrainConfig
from attnlab.training.objectives import (
    OBJECTIVES,
    Objective,
    check_kind,
    check_output,
    input_shapes,
)
from attnlab.training.optimizers import frozen_mask

INPUT_TEXTS = ("source", "tokens")
"""Inputs of a model that have a length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a run trains. Checked when it is made: the model fits the task and the data.

    An experiment that is read back (`from_dict`) was checked when it was made, and is not checked
    against its data again: results can be read where the data are not.

    Attributes:
      model: the config of the model.
      train: the config of the training. Its `seeds` are not used: the seed of a run is that of its
        `RunSpec`.
      data: an entry of `attnlab.data.DATASETS` with its fields.
      task: a name of `attnlab.training.OBJECTIVES`.
      start: a published folder or the folder of a run, whose parameters it starts from; "{seed}" in
        it stands for the seed; "": new parameters.
      head_init: how the heads of new parameters start.
      measure_heads: record at every evaluation how far apart the heads are and how far the
        parameters moved.
      matched: the budget that was made equal to a reference's, or "".
      checks_data: whether `check_data` runs when it is made; not a field.

    Raises:
      ValueError: the model does not fit the task, the data or the start, saying what to change.

    >>> experiment = Experiment(model=ModelConfig(num_layers=2))
    >>> Experiment.from_json(experiment.to_json()) == experiment
    True
    """

    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = Text()
    task: str = "causal_lm"
    start: str = ""
    head_init: HeadInit = HeadInit()
    measure_heads: bool = False
    matched: Literal["", "parameters", "flops", "cache"] = ""
    checks_data: dataclasses.InitVar[bool] = True

    def __post_init__(self, checks_data: bool) -> None:
        check_field("model", self.model, ModelConfig)
        check_field("train", self.train, TrainConfig)
        objective = lookup(OBJECTIVES, self.task, what="task")
        check_kind(self.task, objective, self.model)
        if checks_data:
            self.check_data()
        if self.head_init != HeadInit():
            if self.start:
                raise ValueError(
                    f"head_init is for new parameters; leave out either it or start={self.start!r}"
                )
            init_function(self.model, self.head_init)

    def check_data(self) -> None:
        """Raises ValueError where the model does not fit the data; reads their sizes."""
        objective, sizes = OBJECTIVES[self.task], self.data.sizes()
        check_output(self.task, objective, self.model, sizes)
        bound, shapes = objective.bind(sizes), self.data.shapes(self.train.length)
        check_lengths(bound, shapes, self.model)
        if frozen := self.train.optimizer.frozen:
            frozen_mask(frozen, self._param_shapes(input_shapes(bound, shapes)))

    def check_start(self) -> None:
        """Raises ValueError where the parameters of `start` are of another model, or missing."""
        if self.start:
            check_start(self.model, self.start)

    def _param_shapes(self, inputs: Mapping[str, object]) -> Params:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), inputs)
        make = lambda: self.model.build().init(jax.random.key(0), **zeros)["params"]
        shapes: Params = jax.eval_shape(make)
        return shapes

    def to_dict(self) -> JSON:
        """Nested dicts of JSON values; `from_dict` reads them as the same experiment."""
        kinds = {kind: name for name, kind in DATASETS.items()}
        if (kind := type(self.data)) not in kinds:
            raise ValueError(
                f"data of the type {kind.__name__} has no name; register it, as by "
                f"attnlab.data.DATASETS[{kind.__name__.lower()!r}] = {kind.__name__}"
            )
        data = {"source": kinds[type(self.data)], **dataclasses.asdict(self.data)}  # type: ignore[call-overload]
        return {
            "task": self.task,
            "model": json.loads(config_dict.to_json(self.model)),
            "train": self.train.to_dict(),
            "data": data,
            "start": self.start,
            "head_init": dataclasses.asdict(self.head_init),
            "measure_heads": self.measure_heads,
            "matched": self.matched,
        }

    def to_json(self) -> str:
        """`to_dict` as text, keys sorted."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Experiment":
        """The experiment that `to_dict` described, not checked against its data.

        Raises:
          ValueError: an unknown data source or task, or a field that is not known.
        """
        names = ("start", "measure_heads", "matched")
        more: JSON = {name: fields[name] for name in names if name in fields}
        try:
            return cls(
                model=config_dict.from_json(json.dumps(fields["model"])),
                train=TrainConfig.from_dict(fields["train"]),
                data=stored_data(fields["data"]),
                task=fields["task"],
                head_init=HeadInit(**fields.get("head_init", {})),
                checks_data=False,
                **more,
            )
        except TypeError as error:
            raise ValueError(f"not an experiment of this version of attnlab: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """The experiment that `to_json` wrote. Raises ValueError."""
        return cls.from_dict(json.loads(text))


def check_lengths(objective: Objective, rows: Batch | BatchShapes, model: ModelConfig) -> None:
    """Raises ValueError where rows are longer than the model reads."""
    inputs = input_shapes(objective, rows)
    for name in (name for name in INPUT_TEXTS if name in inputs):
        if (length := inputs[name].shape[1]) > model.max_len:
            raise ValueError(
                f"the data give {name!r} of {length} tokens, longer than model.max_len "
                f"{model.max_len}; raise it, or lower train.length where that cuts the rows"
            )
