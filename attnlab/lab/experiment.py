"""`Experiment`: a model, its training, its data and its task, as one value with a JSON form."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from attnlab.data import DATASETS, Batch, DataConfig, DataSizes, Text
from attnlab.data.dataset import BatchShapes
from attnlab.models import ModelConfig, config_dict
from attnlab.names import lookup
from attnlab.training.config import TrainConfig
from attnlab.training.objectives import OBJECTIVES, Objective, input_shapes

INPUT_TEXTS = ("source", "tokens")
"""Inputs of a model that have a length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a run trains. Checked when it is made: the model fits the task and the data.

    Attributes:
      model: the config of the model.
      train: the config of the training. Its `seeds` are not used: the seed of a run is that of its
        `RunSpec`.
      data: an entry of `attnlab.data.DATASETS` with its fields.
      task: a name of `attnlab.training.OBJECTIVES`.

    Raises:
      ValueError: the model does not fit the task or the data, saying what to change.

    >>> experiment = Experiment(model=ModelConfig(num_layers=2))
    >>> Experiment.from_json(experiment.to_json()) == experiment
    True
    """

    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = Text()
    task: str = "causal_lm"

    def __post_init__(self) -> None:
        objective = lookup(OBJECTIVES, self.task, what="task")
        if self.model.kind not in objective.model_kinds:
            kinds = " or ".join(map(repr, objective.model_kinds))
            raise ValueError(
                f"task {self.task!r} needs model.kind={kinds}, not {self.model.kind!r}"
            )
        sizes = self.data.sizes()
        check_output(self.task, objective, self.model, sizes)
        check_lengths(objective.bind(sizes), self.data.shapes(self.train.length), self.model)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of JSON values; `from_dict` reads them as the same experiment."""
        kinds = {kind: name for name, kind in DATASETS.items()}
        data = {"source": kinds[type(self.data)], **dataclasses.asdict(self.data)}  # type: ignore[call-overload]
        return {
            "task": self.task,
            "model": json.loads(config_dict.to_json(self.model)),
            "train": dataclasses.asdict(self.train),
            "data": data,
        }

    def to_json(self) -> str:
        """`to_dict` as text, keys sorted."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Experiment":
        """The experiment that `to_dict` described.

        Raises:
          ValueError: an unknown data source or task, or a field that is not known.
        """
        data = dict(fields["data"])
        kind = lookup(DATASETS, data.pop("source"), what="data source")
        train = _tuples(fields["train"])
        try:
            return cls(
                model=config_dict.from_json(json.dumps(fields["model"])),
                train=TrainConfig(**train),
                data=kind(**_tuples(data)),
                task=fields["task"],
            )
        except TypeError as error:
            raise ValueError(f"not an experiment of this version of attnlab: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """The experiment that `to_json` wrote. Raises ValueError."""
        return cls.from_dict(json.loads(text))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists for tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def check_output(task: str, objective: Objective, model: ModelConfig, sizes: DataSizes) -> None:
    """Raises ValueError where a task needs a larger vocabulary or another output."""
    most = sizes.vocab_size + len(objective.special_tokens)
    if model.vocab_size < most:
        raise ValueError(
            f"task {task!r} needs model.vocab_size of at least {most}, not {model.vocab_size}"
        )
    if objective.output == "logits" and model.output.kind == "none":
        raise ValueError(
            f"task {task!r} reads logits, model.output.kind='none' has none; give the model an "
            "LM head, or start from a folder with one"
        )
    if objective.output == "classes" and model.output.num_classes != sizes.num_classes:
        raise ValueError(
            f"task {task!r} needs model.output.num_classes={sizes.num_classes} (and a "
            f"model.output.pooler), not {model.output.num_classes}"
        )


def check_lengths(objective: Objective, rows: Batch | BatchShapes, model: ModelConfig) -> None:
    """Raises ValueError where rows are longer than the model reads."""
    inputs = input_shapes(objective, rows)
    for name in (name for name in INPUT_TEXTS if name in inputs):
        if (length := inputs[name].shape[1]) > model.max_len:
            raise ValueError(
                f"the data give {name!r} of {length} tokens, longer than model.max_len "
                f"{model.max_len}; raise it, or lower train.length where that cuts the rows"
            )
