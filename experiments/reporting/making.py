"""How a report's numbers were made: all that they depend on, and how to have them again."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.reporting.document import Block, Bullets, Code, Heading, Paragraph
from experiments.reporting.results import Panel, Run
from experiments.reporting.wording import counted, optimizer, percent
from experiments.running import machine, workdir


def _facts(run: Run) -> list[tuple[str, str]]:
    """(name, what it is) of all that the numbers of a run depend on."""
    source, config, env = (run.record[k] for k in ("source", "config", "environment"))
    trains, model = config["train"], config["model"]
    seen = trains["steps"] * trains["batch_size"] * trains["length"]
    there = source["facts"].get("training tokens")
    part = f", {percent(seen / there, 1)} of the training part" if there else ""
    many = [f"{env[name]} {name}" for name in ("cores", "threads") if name in env]
    started = run.result.get("start")
    return [
        (
            "Data",
            f"{', '.join([source['name'], *counted(source['facts'])])}; the last score uses "
            f"{_scored(trains)}; sha256 `{source['sha256']}`",
        ),
        (
            "Training",
            f"{trains['steps']:,} steps of {trains['batch_size']} rows of "
            f"{trains['length']} tokens: {seen:,} tokens a seed{part}; {optimizer(trains)}, "
            f"warm-up {trains['warmup_steps']} steps",
        ),
        *([("Start", started)] if started else []),
        ("Seeds", ", ".join(map(str, run.seeds))),
        ("Learning rates", f"{trains['learning_rate']:g}"),
        ("Model", f"{_sizes(model)}, task {config['task']}"),
        *_attention(run),
        ("Device", ", ".join([env["device"], env["machine"], *many])),
        ("Versions", ", ".join(f"{k} {env[k]}" for k in ("python", *machine.PACKAGES))),
        ("Commit", f"`{env['commit']}`"),
    ]


def _sizes(model: dict[str, Any]) -> str:
    """Kind, layers, width, heads and dtype of a model."""
    encoder = more = ""
    if model["kind"] == "encoder_decoder":
        encoder = f"{model['encoder']['num_layers'] or model['num_layers']} and "
        more = f"{heads} and " if (heads := model["encoder"]["num_heads"]) else ""
    return (
        f"{model['kind']}, {encoder}{model['num_layers']} layers, width {model['width']}, "
        f"{more}{model['heads']['num_heads']} heads, {model['compute']['dtype']}"
    )


def _attention(run: Run) -> list[tuple[str, str]]:
    """How attention was computed, and why not otherwise."""
    found = []
    for name, told in run.result["attention"].items():
        where = "" if name == "self" else f" ({name})"
        chosen, others = _backends(told["implementation"])
        order, layout = told["chosen"]["order"], run.result["layout"]
        text = f"{layout} heads in the order {order}{where}, backend {chosen}"
        found += [("Attention", text), *(("Other backends", other) for other in others)]
    return found


def making(panels: Sequence[Panel]) -> list[Block]:
    """All that a number depends on, and how to have it again."""
    facts: dict[str, dict[str, None]] = {}
    for run in (run for panel in panels for run in panel.runs):
        for name, text in _facts(run):
            facts.setdefault(name, {})[text] = None
    folders = list(dict.fromkeys(panel.folder for panel in panels))
    again = [
        shlex.join(["python", "-m", "experiments.sweep", f"--config={config}", f"--workdir={f}"])
        for f in folders
        if (config := _config(f))
    ]
    again.append(
        shlex.join(["python", "-m", "experiments.report", *(f"--workdir={f}" for f in folders)])
        + " --out=FOLDER" * (len(folders) > 1)
    )
    return [
        Heading(2, "How it was made"),
        Bullets([f"**{name}:** {'; '.join(texts)}" for name, texts in facts.items()]),
        Paragraph(
            "To have the numbers again, start the sweep anew at that commit, with the config file "
            "and the flags it was started with; every value that an arm used stands in its "
            "`config.json`. The last line renews this report alone. One row per arm and seed: "
            "`results.csv`."
        ),
        Code("\n".join(again)),
    ]


def _backends(told: dict[str, str]) -> tuple[str, list[str]]:
    """The one that ran, and why each of those that could not did not."""
    chosen = next(name for name, why in told.items() if why.startswith("chosen"))
    others = [(n, why) for n, why in told.items() if n != chosen and why != "could run"]
    return chosen, [f"{name}: {why}" for name, why in others]


def _scored(trains: dict) -> str:
    if not trains["eval_windows"]:
        return "all that is held out"
    return f"{trains['eval_windows']:,} evenly spaced held-out rows, the same for all arms"


def _config(folder: Path) -> str:
    """The config file of the sweep in `folder`; "" where arms were started one by one."""
    path = folder / workdir.CONFIG
    if not path.exists():
        return ""
    return workdir.read_json(path)["environment"].get("config") or ""
