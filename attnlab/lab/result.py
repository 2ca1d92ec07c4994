"""`RunResult`: what a finished run left, as a versioned record."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from attnlab.atomic import write_atomic
from attnlab.lab.spec import RunSpec

VERSION = 1
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
    """

    parameters: int
    applied_parameters: int
    flops_per_token: int
    ffn_width: int


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
      environment: versions of Python, JAX and attnlab, and the device.
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
    version: int = VERSION

    def to_json(self) -> str:
        """The record as JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"spec": self.spec.to_dict(), "sizes": dataclasses.asdict(self.sizes)}
        return json.dumps(fields, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "RunResult":
        """The record that `to_json` wrote.

        Raises:
          ValueError: no such record, or one of another version.
        """
        fields: dict[str, Any] = json.loads(text)
        if fields.get("version") != VERSION:
            raise ValueError(
                f"the result has version {fields.get('version')!r}; this attnlab reads {VERSION}: "
                "install the release that wrote it"
            )
        fields["spec"] = RunSpec.from_dict(fields["spec"])
        fields["sizes"] = ModelSizes(**fields["sizes"])
        return cls(**fields)

    def write(self, folder: Path) -> None:
        """Writes it to the folder of a run; a kill leaves the old file or the new one."""
        write_atomic(folder / FILE, self.to_json().encode())


def read_result(folder: Path) -> RunResult | None:
    """The result in the folder of a run, None where there is none yet. Raises ValueError."""
    path = folder / FILE
    return RunResult.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
