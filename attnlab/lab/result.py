"""`RunResult`: what a finished run left, as a versioned record."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from attnlab.atomic import write_atomic
from attnlab.lab.samples import Sample
from attnlab.lab.spec import RunSpec

VERSION = 2
READS = (1, 2)
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
      name: as in `RunResult.heldout`.
      unit: in words, after a number: "bits per byte".
      better: the direction of better scores.
      digits: decimals in a report.
    """

    name: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    digits: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The data of a run.

    Attributes:
      name: for people.
      sha256: of everything that a batch depends on, except seed and step.
      facts: numbers and texts about the data.
    """

    name: str = ""
    sha256: str = ""
    facts: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left.

    Attributes:
      spec: what was run.
      status: "complete", or "diverged": a loss was not finite.
      heldout, train, validation: metric -> value at the end; empty where it diverged or the data
        have no such part.
      baselines: metric -> name of a baseline -> its value on the held-out part, without a model.
      sizes: of the model.
      seconds: of training and scoring, over every start of the run.
      tokens_per_second: in training, without compilation and scoring.
      environment: versions of Python and packages, device, machine, threads.
      message: why it diverged.
      task: what the model learns to do, in words.
      metrics: of the task, the main one first.
      weights: what `measure_heads` found at the end.
      data: what it was trained on.
      curves: the part that the learning curves in metrics.jsonl are of.
      start: what it started from and how that was changed, in words; "": new parameters.
      attention: attention sublayer -> how it is computed and why, as JSON.
      sample: a text that it wrote, where it writes.
      version: of this record.
    """

    spec: RunSpec
    status: Status
    heldout: Mapping[str, float]
    train: Mapping[str, float]
    validation: Mapping[str, float]
    baselines: Mapping[str, Mapping[str, float]]
    sizes: ModelSizes
    seconds: float
    tokens_per_second: float
    environment: Mapping[str, str]
    message: str = ""
    task: str = ""
    metrics: tuple[MetricInfo, ...] = ()
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    data: DataInfo = DataInfo()
    curves: Literal["held-out", "validation"] = "held-out"
    start: str = ""
    attention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sample: Sample | None = None
    version: int = VERSION

    def to_json(self) -> str:
        """The record as JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {
            "spec": self.spec.to_dict(),
            "sizes": dataclasses.asdict(self.sizes),
            "metrics": [dataclasses.asdict(metric) for metric in self.metrics],
            "data": dataclasses.asdict(self.data),
            "sample": self.sample and dataclasses.asdict(self.sample),
        }
        return json.dumps(fields, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "RunResult":
        """The record that `to_json` wrote.

        Raises:
          ValueError: no such record, or one of another version.
        """
        fields: dict[str, Any] = json.loads(text)
        if fields.get("version") not in READS:
            raise ValueError(
                f"the result has version {fields.get('version')!r}; this attnlab reads "
                f"{' and '.join(map(str, READS))}: install the release that wrote it"
            )
        fields["spec"] = RunSpec.from_dict(fields["spec"])
        sizes = fields["sizes"]
        uses = {int(n): size for n, size in sizes.get("parameters_by_uses", {}).items()}
        fields["sizes"] = ModelSizes(**sizes | {"parameters_by_uses": uses})
        fields["metrics"] = tuple(MetricInfo(**metric) for metric in fields.get("metrics", ()))
        fields["data"] = DataInfo(**fields.get("data", {}))
        if fields.get("sample"):
            fields["sample"] = Sample(**fields["sample"])
        return cls(**fields | {"version": VERSION})

    def write(self, folder: Path) -> None:
        """Writes it to the folder of a run; a kill leaves the old file or the new one."""
        write_atomic(folder / FILE, self.to_json().encode())


def read_result(folder: Path) -> RunResult | None:
    """The result in the folder of a run, None where there is none yet. Raises ValueError."""
    path = folder / FILE
    return RunResult.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
