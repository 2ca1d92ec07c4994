"""Reads the workdirs of sweeps as panels of one report."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from attnlab.lab.description import Description, read_description
from attnlab.lab.policies import FINAL_RATE, FIRST_RATE, TUNING
from attnlab.lab.results import Results, config_fields
from attnlab.lab.spec import read_specs
from attnlab.lab.sweep import load_results
from attnlab.load import SPECS
from attnlab.report.panel import Panel


def read_panels(
    given: Sequence[Results | str | Path], description: Description | None = None
) -> list[Panel]:
    """One panel for each workdir, or results. Those with the same variants and configs but for the
    data (and the learning rates) are one panel: their texts are a source of variation.

    Raises:
      ValueError: a workdir holds no sweep, none of its runs has a result, or it is given twice.
    """
    panels: list[Panel] = []
    folders = [Path(one) for one in given if not isinstance(one, Results)]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"{', '.join(map(str, folders))}: the same workdir twice; leave one out")
    names = [folder.name for folder in folders]
    for number, one in enumerate(given, start=1):
        if isinstance(one, Results):
            title = f"results {number}"
            panel = Panel(one, description or Description(), title=title)
        else:
            folder = Path(one)
            unique = folder.name if names.count(folder.name) == 1 else str(folder)
            panel = _read(folder, unique, description)
        # The same variants with the same configs, on other data.
        same = (
            i
            for i, other in enumerate(panels)
            if _configs(other.results) == _configs(panel.results) and _data(other) != _data(panel)
        )
        if (i := next(same, None)) is not None:
            other = panels[i]
            panels[i] = dataclasses.replace(
                other,
                results=other.results + panel.results,
                title=f"{other.title} and {panel.title}",
                unfinished=[*other.unfinished, *panel.unfinished],
                tuning=other.tuning and panel.tuning and other.tuning + panel.tuning,
            )
        else:
            panels.append(panel)
    if len(panels) == 1:
        return [dataclasses.replace(panels[0], title="")]
    return panels


def _read(workdir: Path, title: str, description: Description | None) -> Panel:
    results = load_results(workdir)
    if not len(results):
        raise ValueError(f"no run in {workdir} has a result yet; let the sweep finish one")
    done = {run.spec.id for run in results}
    specs = read_specs((workdir / SPECS).read_text(encoding="utf-8"))
    tuning = workdir / TUNING
    return Panel(
        results,
        description or read_description(workdir),
        title=title,
        unfinished=[spec.id for spec in specs if spec.id not in done],
        tuning=load_results(tuning) if (tuning / SPECS).exists() else None,
    )


def _configs(results: Results) -> set[str]:
    found = set()
    for variant, runs in results.by_variant().items():
        # Learning rates are tuned on each text.
        rates = (FIRST_RATE, FINAL_RATE)
        fields = {n: v for n, v in config_fields(runs[0]).items() if n not in rates}
        found.add(repr((variant, sorted(fields.items(), key=repr))))
    return found


def _data(panel: Panel) -> set[str]:
    return {repr(run.spec.config.data) + run.data.sha256 for run in panel.results}
