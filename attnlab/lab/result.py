"""`RunResult`: what a finished run left, as a versioned record."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from attnlab.atomic import write_atomic
from attnlab.data import Dataset
from attnlab.lab.spec import RunSpec
from attnlab.nested import JSON, naming_file
from attnlab.training.objectives import Objective

VERSION = 4
FILE = "result.json"
Status: TypeAlias = Literal["complete", "diverged"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model.

    Attributes:
      parameters: shared ones counted once.
      applied_parameters: shared ones counted once for each use.
      flops_per_token: of a forward pass at the length of the training.
      ffn_width: units of the FFN.
      cache_bytes_per_token: of the keys and values that decoding keeps, in float32.
      parameters_by_uses: how often a parameter is used -> parameters.
    """

    parameters: int
    applied_parameters: int
    flops_per_token: int
    ffn_width: int
    cache_bytes_per_token: int = 0
    parameters_by_uses: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """A metric of the task.

    Attributes:
      name: as in `Scores.heldout`.
      unit: in words, after a number: "bits per byte".
      better: the direction of better scores.
      digits: decimals in a report.
    """

    name: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    digits: int = 3


def metric_infos(objective: Objective) -> tuple[MetricInfo, ...]:
    """The metrics of an objective, the main one first."""
    return tuple(
        MetricInfo(name=m.name, unit=m.unit, better=m.better, digits=m.digits)
        for m in objective.metrics
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The data of a run.

    Attributes:
      name: for people.
      sha256: of everything that a batch depends on, except seed and step.
      row_tokens: tokens of a row; 0: not known.
      facts: numbers and texts about the data.
    """

    name: str = ""
    sha256: str = ""
    row_tokens: int = 0
    facts: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)


def data_info(dataset: Dataset) -> DataInfo:
    """Of a dataset, what is recorded."""
    return DataInfo(
        name=dataset.name, sha256=dataset.digest, row_tokens=dataset.row_tokens, facts=dataset.facts
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores at the end; empty where the run diverged or the data have no such part.

    Attributes:
      heldout, train, validation: metric -> value.
      baselines: metric -> name of a baseline -> its value on the held-out part, without a model.
    """

    heldout: Mapping[str, float] = dataclasses.field(default_factory=dict)
    train: Mapping[str, float] = dataclasses.field(default_factory=dict)
    validation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    baselines: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """What the model learns to do.

    Attributes:
      description: in words.
      metrics: the main one first.
      curves: the part that the learning curves in metrics.jsonl are of.
    """

    description: str = ""
    metrics: tuple[MetricInfo, ...] = ()
    curves: Literal["held-out", "validation"] = "held-out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a run took.

    Attributes:
      seconds: of training and scoring, over every start of the run.
      tokens_per_second: in training, without compilation and scoring.
    """

    seconds: float = 0.0
    tokens_per_second: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a run was computed with.

    Attributes:
      environment: versions of Python and packages, device, machine, threads.
      start: what it started from and how that was changed, in words; "": new parameters.
      attention: how each attention sublayer is computed and why: `attnlab.explain_model`.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: str = ""
    attention: Mapping[str, JSON] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left.

    Attributes:
      spec: what was run.
      status: "complete", or "diverged": a loss was not finite.
      message: why it diverged.
      scores: at the end.
      sizes: of the model.
      task: what the model learns to do.
      data: what it was trained on.
      timing: how long it took.
      provenance: what it was computed with.
      version: of this record.
      folder: of the run, with its metrics and checkpoints; not in the record.

    >>> from attnlab.lab.experiment import Experiment
    >>> sizes = ModelSizes(parameters=9, applied_parameters=9, flops_per_token=9, ffn_width=4)
    >>> scores = Scores(heldout={"bits_per_byte": 2.5})
    >>> run = RunResult(
    ...     spec=RunSpec("a", Experiment()), status="complete", scores=scores, sizes=sizes
    ... )
    >>> RunResult.from_json(run.to_json()) == run
    True
    """

    spec: RunSpec
    status: Status
    message: str = ""
    scores: Scores
    sizes: ModelSizes
    task: TaskInfo = TaskInfo()
    data: DataInfo = DataInfo()
    timing: Timing = Timing()
    provenance: Provenance = Provenance()
    version: int = VERSION
    folder: Path | None = dataclasses.field(default=None, compare=False)

    def to_json(self) -> str:
        """The record as JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["folder"]
        records = {name: dataclasses.asdict(fields[name]) for name in PARTS}
        spec = {"spec": self.spec.to_dict()}
        return json.dumps(fields | records | spec, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, spec: RunSpec | None = None) -> "RunResult":
        """The record that `to_json` wrote.

        Args:
          text: JSON.
          spec: is not read once more where it is that of the record.

        Raises:
          ValueError: no such record, or one of another version.
        """
        fields: JSON = json.loads(text)
        version = fields.get("version") if isinstance(fields, dict) else None
        if version != VERSION:
            raise ValueError(
                f"no result of a run of version {VERSION}, which this attnlab reads: its version "
                f"is {version!r}; use the commit that wrote it"
            )
        stored = fields["spec"]
        if spec is None or json.loads(json.dumps(spec.to_dict())) != stored:
            spec = RunSpec.from_dict(stored)
        uses = {int(n): size for n, size in fields["sizes"]["parameters_by_uses"].items()}
        metrics = tuple(MetricInfo(**metric) for metric in fields["task"]["metrics"])
        fields["sizes"]["parameters_by_uses"], fields["task"]["metrics"] = uses, metrics
        records = {name: kind(**fields[name]) for name, kind in PARTS.items()}
        return cls(**fields | records | {"spec": spec})

    def write(self, folder: Path) -> None:
        """Writes it to the folder of a run; a kill leaves the old file or the new one."""
        write_atomic(folder / FILE, self.to_json().encode())


PARTS: dict[str, type] = {
    "scores": Scores,
    "sizes": ModelSizes,
    "task": TaskInfo,
    "data": DataInfo,
    "timing": Timing,
    "provenance": Provenance,
}
"""Field of `RunResult` -> its record."""


def read_result(folder: Path, spec: RunSpec | None = None) -> RunResult | None:
    """The result in the folder of a run (as `from_json`), None where there is none yet; with the
    tags of `spec`, which may be new. Raises ValueError, with the path, for a file that is none."""
    if not (path := folder / FILE).exists():
        return None
    with naming_file(path):
        found = RunResult.from_json(path.read_text(encoding="utf-8"), spec)
    if spec and spec.digest == found.spec.digest:
        found = dataclasses.replace(found, spec=dataclasses.replace(found.spec, tags=spec.tags))
    return dataclasses.replace(found, folder=folder)
