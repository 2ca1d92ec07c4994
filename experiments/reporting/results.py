"""What the folders of finished arms hold, put together for comparing."""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.heads import LAYOUTS
from attnlab.runs import LAST_OF_FLAT_CONFIGS
from attnlab.training.metrics import read_metrics
from experiments.running import arm, workdir

COLUMNS = (
    "layout",
    "plan",
    "seed",
    "unique_parameters",
    "applied_parameters",
    "flops_per_token",
)
"""Of results.csv; after them come the scores, SPEEDS, status and MORE_COLUMNS."""
QUESTION = "question.json"
"""Beside the config of a sweep: what it is to decide, which may change while its arms stay."""
SEEDS = re.compile(r"-seeds\d+-\d+$")
"""Ends the folder of an arm's later seeds."""
SPEEDS = ("tokens_per_second", "wall_seconds")
MORE_COLUMNS = ("match", "learning_rate", "ffn_width", "steps", "arm", "data_sha256")


@dataclasses.dataclass(frozen=True)
class Run:
    """One arm with all its seeds: its result.json, its config.json and where they lie."""

    folder: Path
    result: dict[str, Any]
    record: dict[str, Any]
    title: str = ""
    size: float | None = None
    """Its rung of a ladder: how many times as wide or deep as the config has it."""
    more: tuple["Run", ...] = ()
    """Runs of the same arm with other seeds, whose numbers are in `result` too."""

    @property
    def name(self) -> str:
        """The title, else layout and plan: what arms are compared by, whatever learning rate."""
        return self.title or f"{self.result['layout']} · {self.result['plan']}"

    @property
    def complete(self) -> bool:
        """Did every seed reach its last step?"""
        return self.result["status"] == arm.COMPLETE

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order of every list of per-seed numbers."""
        return self.result["seeds"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Name, unit, direction and digits of each, the main one first."""
        return self.result["metrics"]

    @property
    def unit(self) -> str:
        """What the main metric is counted in: "bits per byte"."""
        return self.metrics[0]["unit"]

    @property
    def sign(self) -> int:
        """Times a score: less is better."""
        return -1 if self.metrics[0]["better"] == "higher" else 1

    def values(self, part: str, metric: int = 0) -> np.ndarray:
        """[S], of the "heldout" or "train" part; empty where that was not measured."""
        return np.array(self.result.get(f"{part}_{self.metrics[metric]['name']}", []))

    @property
    def yardsticks(self) -> dict[str, float]:
        """Name -> value of the main metric on the held-out part without a model."""
        return self.result["yardsticks"].get(self.metrics[0]["name"], {})

    @property
    def heldout(self) -> np.ndarray:
        """[S], the main metric."""
        return self.values("heldout")

    @property
    def score(self) -> float:
        """Mean of the main metric; NaN where the arm diverged."""
        return float(self.heldout.mean()) if self.complete else math.nan

    @property
    def rank(self) -> float:
        """The less, the better: by direction, and infinite where the arm diverged."""
        return self.sign * self.score if self.complete else math.inf

    @property
    def spread(self) -> float:
        """Standard deviation of the main metric over seeds; NaN with one seed."""
        return float(self.heldout.std(ddof=1)) if len(self.seeds) > 1 else math.nan

    def joined(self, other: "Run") -> "Run":
        """With the seeds of another run of the same arm; rates of both together. Raises
        WorkdirError where a seed would count twice."""
        if twice := {*self.seeds} & {*other.seeds}:
            here = next(run for run in (*self.more, self) if twice & {*run.seeds})
            raise workdir.WorkdirError(
                f"{here.folder} and {other.folder} are the same arm with the same seed "
                f"{min(twice)}, which would count twice; move one of them elsewhere"
            )
        mine, theirs = self.result, other.result
        scores = ("heldout_", "train_", "validation_")
        per_seed = [n for n in mine if n == "seeds" or n.startswith(scores)]
        seconds = sum(one.get("wall_seconds", 0.0) for one in (mine, theirs))  # diverged: none
        result = mine | {n: [*mine[n], *theirs[n]] for n in per_seed} | {"wall_seconds": seconds}
        return dataclasses.replace(self, result=result, more=(*self.more, other))

    def shown(self, value: float, metric: int = 0) -> str:
        """A value of a metric with its decimals."""
        return f"{value:.{self.metrics[metric]['digits']}f}"

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps [P] and the main metric [S, P], as far as they are numbers."""
        name = f"eval/{self.metrics[0]['name']}"
        found: dict[int, list[float]] = {}
        for folder in (self.folder, *(run.folder for run in self.more)):
            for row in read_metrics(folder / "metrics.jsonl"):
                found.setdefault(row["step"], []).extend(row.get(name, ()))
        whole = [n for n, row in found.items() if len(row) == len(self.seeds)]
        steps = [step for step in sorted(whole) if np.all(np.isfinite(found[step]))]
        values = np.array([found[step] for step in steps]).reshape(len(steps), len(self.seeds))
        return np.array(steps, int), values.T


@dataclasses.dataclass(frozen=True)
class Panel:
    """Arms that are compared with each other: one folder, one budget, one size of a ladder."""

    folder: Path
    match: str
    runs: list[Run]
    sweep: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What config.json of the sweep says: its arms, titles of them, the paper they are from."""
    size: float | None = None

    @property
    def paper(self) -> dict[str, Any]:
        """The published table that the arms are rows of, or nothing."""
        return self.sweep.get("paper", {})

    @property
    def question(self) -> dict[str, Any]:
        """What is to be decided: "pairs" of names, "smallest" difference of interest, "limit" of
        seeds where they are added until that is done; or nothing."""
        return self.sweep.get("question", {})

    @property
    def claim(self) -> dict[str, Any]:
        """What was known beforehand of the arms, or nothing."""
        return self.sweep.get("claim", {})

    @property
    def base(self) -> Run | None:
        """The arm of the paper that the others are compared with, if it is complete."""
        return next((run for run in self.complete if run.name == self.paper.get("base")), None)

    @property
    def arms(self) -> list[Run]:
        """The best learning rate of every layout and plan, best first, diverged arms last."""
        return sorted(
            (min(runs, key=lambda r: r.rank) for runs in self.groups),
            key=lambda r: r.rank,
        )

    @property
    def groups(self) -> list[list[Run]]:
        """Runs that differ in learning rate alone, rates ascending."""
        groups: dict[str, list[Run]] = {}
        for run in sorted(self.runs, key=lambda r: r.result["learning_rate"]):
            groups.setdefault(run.name, []).append(run)
        return list(groups.values())

    @property
    def complete(self) -> list[Run]:
        """`arms` without those that diverged."""
        return [run for run in self.arms if run.complete]

    @property
    def rates(self) -> list[float]:
        """Every learning rate that was tried."""
        return sorted({run.result["learning_rate"] for run in self.runs})

    @property
    def unit(self) -> str:
        """What the scores are counted in."""
        return " or ".join(dict.fromkeys(run.unit for run in self.runs))

    @property
    def swept(self) -> bool:
        """Had every layout and plan the same several learning rates to choose from?"""
        tried = [[run.result["learning_rate"] for run in runs] for runs in self.groups]
        return len(self.rates) > 1 and all(rates == self.rates for rates in tried)


def read(folders: Sequence[Path]) -> list[Panel]:
    """One panel per folder, match and size. Raises WorkdirError where a folder holds no result."""
    panels = []
    for folder in folders:
        done = sorted([*folder.glob(workdir.RESULT), *folder.glob(f"*/{workdir.RESULT}")])
        if not done:
            raise workdir.WorkdirError(
                f"{folder} holds no {workdir.RESULT}, nor does a folder in it; "
                "give the --workdir of a sweep or run that has finished an arm"
            )
        sweep = sweep_of(folder)
        titles, sizes = sweep.get("titles", {}), sweep.get("ladder", {}).get("sizes", {})
        runs = []
        for p in done:
            asked = SEEDS.sub("", p.parent.name)
            told = (workdir.read_json(p), workdir.read_json(p.parent / workdir.CONFIG))
            _check_nested(p.parent, told[1])
            runs.append(Run(p.parent, *told, titles.get(asked, ""), sizes.get(asked)))
        together: dict[tuple[str, float | None], list[Run]] = {}
        for run in _seeds_together(runs):
            together.setdefault((run.result["match"], run.size), []).append(run)
        for match, size in sorted(together, key=lambda at: (at[0], at[1] or 0.0)):
            panels.append(Panel(folder, match, together[match, size], sweep, size))
    return panels


def _check_nested(folder: Path, record: dict[str, Any]) -> None:
    """Raises WorkdirError for a run whose model config is flat."""
    if "heads" not in record["config"]["model"]:
        raise workdir.WorkdirError(
            f"{folder} is a run of attnlab before the nested model config (November 2026), which "
            f"this version cannot report; use commit {LAST_OF_FLAT_CONFIGS}"
        )


def _seeds_together(runs: list[Run]) -> list[Run]:
    """Runs that differ in their seeds alone are one."""
    together: dict[str, Run] = {}
    for run in sorted(runs, key=lambda r: min(r.seeds)):
        trains = run.record["config"]["train"] | {"seeds": None}
        alike = repr([run.name, run.size, run.complete, run.record["config"] | {"train": trains}])
        together[alike] = together[alike].joined(run) if alike in together else run
    return list(together.values())


LAYOUT_ORDER = tuple(
    dict.fromkeys(
        [
            "standard", "wide", "narrow", "narrow_tied", "alt", "collaborative", "bilinear",
            "absorbed", "two_stage", "low_rank_query", "tensor_product", "grouped_tied", "latent",
            "latent_absorbed", *LAYOUTS,
        ]
    )
)  # fmt: skip
"""Layouts in the order of tables and colours."""


def layout_number(name: str) -> int:
    """The place of a layout in `LAYOUT_ORDER`; behind all others for one that is not known here."""
    return LAYOUT_ORDER.index(name) if name in LAYOUT_ORDER else len(LAYOUT_ORDER)


def names(panels: Sequence[Panel], field: str, table: Iterable[str]) -> list[str]:
    """Layouts or plans that occur, in the order of their table; "cycle:3" stands with "cycle", a
    plan that was written by hand at the end."""
    found = sorted({run.result[field] for panel in panels for run in panel.runs})
    known = [name for row in table for name in found if name.partition(":")[0] == row]
    return known + [name for name in found if name not in known]


def unfinished(folder: Path) -> list[str]:
    """Names of the arms that the sweep in `folder` began with and that have no result yet."""
    started = sweep_of(folder).get("arms", ())
    return [name for name in started if not (folder / name / workdir.RESULT).exists()]


def sweep_of(folder: Path) -> dict[str, Any]:
    """The record of the sweep in `folder` and its question; empty where arms were started one by
    one."""
    found: dict[str, Any] = {}
    for name in (workdir.CONFIG, QUESTION):
        if (folder / name).exists():
            found |= workdir.read_json(folder / name)
    return found


def warnings(panels: Sequence[Panel]) -> list[str]:
    """What stands in the way of comparing: other texts, machines or settings."""
    runs = [run for panel in panels for run in panel.runs]
    lines = []
    if any(_other_data([panel]) for panel in panels):
        lines.append(
            "**The arms were not trained on the same data** (the hashes differ, see below): "
            "their scores cannot be compared, whatever the tables say."
        )
    elif _other_data(panels):
        lines.append("Not all folders are of the same data: compare scores of one text alone.")
    if len(tasks := sorted({run.record["config"]["task"] for run in runs})) > 1:
        lines.append(
            f"**The arms answer different questions** ({', '.join(tasks)}): their scores cannot be "
            "compared, whatever the tables say."
        )
    for name, values in _differing([run.record["environment"] for run in runs]):
        lines.append(f"The arms ran in different environments: {name} is {' or '.join(values)}.")
    for panel in panels:
        configs = [run.record["config"] for run in panel.runs]
        asked = panel.sweep.get("arms", {}).values()
        for section, free in _FREE.items():
            varied = {name for name, _ in _differing([_flat(c.get(section, {})) for c in asked])}
            for name, values in _differing([_flat(c[section]) for c in configs]):
                if name not in free | varied:
                    lines.append(
                        f"{panel.folder.name}: the arms differ in {section}.{name} "
                        f"({' or '.join(values)}), which is no question of this report."
                    )
    several = len({panel.folder for panel in panels}) > 1
    for panel in panels:
        where = f"{panel.folder.name}: " if several else ""
        lines += [where + line for line in _learnt_nothing(panel)]
    for folder in dict.fromkeys(panel.folder for panel in panels):
        if names := unfinished(folder):
            lines.append(f"{folder.name}: not finished, so not shown: {', '.join(names)}.")
    return lines


def _learnt_nothing(panel: Panel) -> list[str]:
    """A line on those that the weakest yardstick, which needs no model, does better than."""
    worse: dict[str, list[str]] = {}
    for run in panel.complete:
        known = sorted((run.sign * value, name) for name, value in run.yardsticks.items())
        if known and run.rank > known[-1][0]:
            told = f"{known[-1][1]}, {run.shown(run.sign * known[-1][0])} {run.unit}"
            worse.setdefault(told, []).append(run.name)
    return [
        f"**Worse than what needs no model** ({yardstick}): {', '.join(names)}. Look at learning "
        "rates and the number of steps before you compare."
        for yardstick, names in worse.items()
    ]


def _other_data(panels: Sequence[Panel]) -> bool:
    """Do data differ otherwise than by the fields of `config.data` that a sweep varies?"""
    seen: dict[tuple, set[str]] = {}
    for panel in panels:
        asked = [c.get("data", {}) for c in panel.sweep.get("arms", {}).values()]
        varied = [name for name, _ in _differing(asked)]
        for run in panel.runs:
            at = tuple(str(run.record["config"]["data"].get(name)) for name in varied)
            seen.setdefault(at, set()).add(run.record["source"]["sha256"])
    return any(len(found) > 1 for found in seen.values())


_FREE = {"model": {"heads.layout", "sharing"}, "train": {"learning_rate", "final_learning_rate"}}


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Path -> value of nested fields."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        inner = isinstance(value, dict)
        found |= _flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found


def _differing(tables: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(name, its values as text) for every name that has more than one value."""
    names = dict.fromkeys(name for table in tables for name in table)
    values = {n: dict.fromkeys(str(t[n]) if n in t else "missing" for t in tables) for n in names}
    return [(name, list(found)) for name, found in values.items() if len(found) > 1]


def to_csv(panels: Sequence[Panel]) -> str:
    """One row per arm and seed; the numbers of a diverged arm are empty.

    An arm trains its seeds in one program, so a seed's wall time is its share of the arm's.
    """
    runs = [run for panel in panels for run in panel.runs]
    names = dict.fromkeys(metric["name"] for run in runs for metric in run.metrics)
    scores = [f"{part}_{name}" for part in ("heldout", "train") for name in names]
    columns = (*COLUMNS, *scores, *SPEEDS, "status", *MORE_COLUMNS)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for run in runs:
        r = run.result
        for i, seed in enumerate(run.seeds):
            values = r | {
                "seed": seed,
                "ffn_width": r["model"]["ffn"]["width"],
                "arm": run.folder.name,
                "data_sha256": run.record["source"]["sha256"],
            }
            values |= dict.fromkeys((*scores, *SPEEDS), "")
            values |= _of_seed(run, i) if run.complete else {}
            writer.writerow(values[column] for column in columns)
    return file.getvalue()


def _of_seed(run: Run, i: int) -> dict[str, float]:
    r = run.result
    names = [f"{part}_{m['name']}" for part in ("heldout", "train") for m in run.metrics]
    rate, wall = r["tokens_per_second"], r["wall_seconds"] / len(run.seeds)
    found = {name: r[name][i] for name in names if name in r}
    return found | {"tokens_per_second": rate, "wall_seconds": wall}
