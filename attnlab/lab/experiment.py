"""`Experiment`: a model, its training, its data and its task, as one value with a JSON form."""

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from attnlab.data import DATASETS, Batch, DataConfig, Text
from attnlab.data.dataset import BatchShapes
from attnlab.fields import check_field
from attnlab.load import IMPORTS, TEXTS, check_start, named_init, stored_data
from attnlab.models import ModelConfig, flags
from attnlab.names import import_those, lookup, module_reference, name_in, reference
from attnlab.nested import JSON
from attnlab.sharing import Params
from attnlab.training.callbacks import CALLBACKS, Callback
from attnlab.training.config import TrainConfig
from attnlab.training.objectives import (
    OBJECTIVES,
    Objective,
    check_kind,
    check_output,
    input_shapes,
)
from attnlab.training.objectives.objective import Inputs
from attnlab.training.optimizers import OPTIMIZERS, frozen_mask
from attnlab.training.step import InitParams


@runtime_checkable
class Init(Protocol):
    """Makes the new parameters of a model."""

    def __call__(self, key: jax.Array, model: ModelConfig, inputs: Inputs, /) -> Params: ...


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
      task: a name of `attnlab.training.OBJECTIVES`, or an `Objective` of your own.
      start: a published folder or the folder of a run, whose parameters it starts from; "{seed}" in
        it stands for the seed; "": new parameters.
      init: makes the new parameters: a function (key, model, inputs) -> parameters, of the config
        of the model and the inputs of its call; "": the model's own.
      callbacks: called while it trains: names of `attnlab.training.CALLBACKS`, or functions that
        `attnlab.training.callback` gave a period.
      matched: the budget that was made equal to a reference's, or "".
      checks_data: whether `check_data` runs when it is made; not a field.

    Objects of your own (also layouts and optimizers) need no registration. They are recorded by
    reference ("package.module:name" or "/path/file.py:name"), and other processes import that.

    Raises:
      ValueError: the model does not fit the task, the data or the start, saying what to change.

    >>> experiment = Experiment(model=ModelConfig(num_layers=2))
    >>> Experiment.from_json(experiment.to_json()) == experiment
    True
    """

    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = Text()
    task: str | Objective = "causal_lm"
    start: str = ""
    init: str | Init = ""
    callbacks: tuple[str | Callback, ...] = ()
    matched: Literal["", "parameters", "flops", "cache"] = ""
    checks_data: dataclasses.InitVar[bool] = True

    def __post_init__(self, checks_data: bool) -> None:
        check_field("model", self.model, ModelConfig)
        check_field("train", self.train, TrainConfig)
        check_field("data", self.data, DataConfig)
        check_field("start", self.start, str)
        check_field("callbacks", self.callbacks, tuple[object, ...])
        self._use_names()
        check_kind(str(self.task), self.objective, self.model)
        if self.init and self.start:
            raise ValueError(
                f"init makes new parameters; leave out either it or start={self.start!r}"
            )
        if checks_data:
            self.check_data()

    def _use_names(self) -> None:
        """Replaces objects by their names."""
        keep = functools.partial(object.__setattr__, self)
        if not isinstance(self.task, str):
            keep("task", name_in(OBJECTIVES, self.task, what="task"))
        if not isinstance(self.init, str):
            keep("init", reference(self.init, "init"))
        name_of = functools.partial(name_in, CALLBACKS, what="callback")
        names = [one if isinstance(one, str) else name_of(one) for one in self.callbacks]
        for name in names:
            lookup(CALLBACKS, name, what="callback")
        keep("callbacks", tuple(names))

    @property
    def objective(self) -> Objective:
        """The training objective."""
        return lookup(OBJECTIVES, str(self.task), what="task")

    @property
    def calls(self) -> list[Callback]:
        """The callbacks."""
        return [lookup(CALLBACKS, str(name), what="callback") for name in self.callbacks]

    @property
    def init_params(self) -> InitParams | None:
        """(key, inputs) -> new parameters; None: those of the model."""
        return named_init(str(self.init), self.model)

    def check_data(self) -> None:
        """Raises ValueError where the model does not fit the data; reads their sizes."""
        sizes, shapes = self.data.sizes(), self.data.shapes(self.train.length)
        check_output(str(self.task), self.objective, self.model, sizes)
        bound = self.objective.bind(sizes)
        check_lengths(bound, shapes, self.model)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), input_shapes(bound, shapes))
        if frozen := self.train.optimizer.frozen:
            make = lambda: self.model.build().init(jax.random.key(0), **zeros)["params"]
            frozen_mask(frozen, jax.eval_shape(make))
        if make_params := self.init_params:
            jax.eval_shape(make_params, jax.random.key(0), zeros)

    def check_start(self) -> None:
        """Raises ValueError where the parameters of `start` are of another model, or missing."""
        if self.start:
            check_start(self.model, self.start)

    def to_dict(self) -> JSON:
        """Nested dicts of JSON values; `from_dict` reads them as the same experiment.

        Raises:
          ValueError: an object that cannot be imported again.
        """
        source = name_in(DATASETS, type(self.data), what="dataset")
        found: JSON = {
            "task": self.task,
            "model": json.loads(flags.to_json(self.model)),
            "train": self.train.to_dict(),
            "data": {"source": source, **dataclasses.asdict(self.data)},  # type: ignore[call-overload]
            **{name: getattr(self, name) for name in ("start", "init", "callbacks", "matched")},
        }
        return found | ({IMPORTS: imports} if (imports := self._imports()) else {})

    def _imports(self) -> list[str]:
        """The modules outside of attnlab that define its parts, and may register them."""
        optimizer = lookup(OPTIMIZERS, self.train.optimizer.name, what="optimizer")
        own = type(self.data), self.objective.prepare, optimizer
        parts = [*own, *self.calls, *_classes(self.model)]
        names = {getattr(part, "__module__", "") for part in parts}
        modules = [sys.modules.get(name) for name in names if name.split(".")[0] != "attnlab"]
        return sorted(filter(None, (module_reference(one) for one in modules if one)))

    def to_json(self) -> str:
        """`to_dict` as text, keys sorted."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Experiment":
        """The experiment that `to_dict` described, not checked against its data.

        Raises:
          ValueError: an unknown data source or task, a field that is not known, or one that is
            missing.
        """
        import_those(fields.get(IMPORTS, ()))
        parts = ("model", "train", "data", IMPORTS)
        more: JSON = {name: value for name, value in fields.items() if name not in parts}
        try:
            return cls(
                model=flags.from_json(json.dumps(fields["model"])),
                train=TrainConfig.from_dict(fields["train"]),
                data=stored_data(fields["data"]),
                checks_data=False,
                **more,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an experiment of this version of attnlab: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """The experiment that `to_json` wrote. Raises ValueError."""
        return cls.from_dict(json.loads(text))


def check_lengths(objective: Objective, rows: Batch | BatchShapes, model: ModelConfig) -> None:
    """Raises ValueError where rows are longer than the model reads."""
    inputs = input_shapes(objective, rows)
    for name in (name for name in TEXTS if name in inputs):
        if (length := inputs[name].shape[1]) > model.max_len:
            raise ValueError(
                f"the data give {name!r} of {length} tokens, longer than model.max_len "
                f"{model.max_len}; raise it, or lower train.length where that cuts the rows"
            )


def _classes(value: object) -> Iterator[type]:
    """The classes of a record and of the records in it."""
    if dataclasses.is_dataclass(value):
        yield type(value)
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, tuple | list):
        for one in value:
            yield from _classes(one)
