"""How the numbers of a report were made: all that they depend on."""

import json
import shlex
from collections.abc import Iterator, Sequence

from attnlab.lab.result import RunResult
from attnlab.lab.text_table import counted
from attnlab.report.page import Facts, Paragraph, Section
from attnlab.report.panel import Panel
from attnlab.training.provenance import PROVENANCE


def making_section(panels: Sequence[Panel]) -> Section:
    """Data, training, model, seeds, versions, command, seconds; each value once."""
    facts: dict[str, dict[str, None]] = {}
    for panel in panels:
        for run in panel.results:
            for name, text in (*_facts(run), *_provenance(panel, run)):
                facts.setdefault(name, {})[text] = None
    runs = [run for panel in panels for run in panel.results]
    seconds = sum(run.timing.seconds for run in runs)
    shown = [(name, "; ".join(list(texts)[:12])) for name, texts in facts.items()]
    shown.append(("Time", f"{seconds:,.0f} seconds of {counted(len(runs), 'run')} together"))
    text = (
        "Every value that a run used is in its spec.json. results.csv has one row per run; each "
        "table is a CSV file in tables/, each figure an SVG file in figures/."
    )
    return Section("How it was made", [Facts(shown), Paragraph(text)])


def _facts(run: RunResult) -> Iterator[tuple[str, str]]:
    config = run.spec.config
    train, model = config.train, config.model
    source = config.to_dict()["data"]
    given = [f"{n} {v}" for n, v in source.items() if v not in ("", None, (), [])]
    facts = [f"{v:,} {n}" if isinstance(v, int) else f"{n}: {v}" for n, v in run.data.facts.items()]
    digest = [f"sha256 {run.data.sha256}"] if run.data.sha256 else []
    yield "Data", ", ".join([run.data.name, *given, *facts, *digest]).lstrip(", ")
    yield "Task", run.task.description or config.task
    if run.provenance.start:
        yield "Start", run.provenance.start
    tokens = train.steps * train.batch_size * train.length
    yield (
        "Training",
        f"{train.steps:,} steps of {train.batch_size:,} rows of {train.length:,} tokens: "
        f"{tokens:,} tokens a run; {train.optimizer.name}, "
        f"{train.schedule.name.replace('_', ' ')} schedule, "
        f"{train.schedule.warmup(train.steps):,} steps of warm-up",
    )
    scored = train.evaluation.windows
    yield "Scored", f"{scored:,} held-out rows" if scored else "all held-out rows"
    yield "Learning rates", f"{train.optimizer.learning_rate:.3g}"
    yield "Seeds", str(run.spec.seed)
    yield (
        "Model",
        f"{model.kind}, {model.num_layers} layers, width {model.width:,}, {model.heads.num_heads} "
        f"heads, vocabulary {model.vocab_size:,}",
    )
    yield (
        "Versions",
        ", ".join(f"{name} {value}" for name, value in run.provenance.environment.items()),
    )


def _provenance(panel: Panel, run: RunResult) -> Iterator[tuple[str, str]]:
    folder = panel.results.folder_of(run)
    if folder is None or not (folder / PROVENANCE).exists():
        return
    about = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    yield "Command", panel.about.command or shlex.join(about["argv"])
    if git := about.get("git"):
        changed = " with changes (changes.diff of each run)" if git["changed"] else ""
        yield "Commit", f"{git['commit'][:12]}{changed}"
