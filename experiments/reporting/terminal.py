"""What a sweep says on the terminal: what is about to run, and at the end who won."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from attnlab import models
from experiments.benchmarks.peaks import PEAKS
from experiments.reporting import averages, beside, claims, findings, ladder
from experiments.reporting.results import Panel
from experiments.reporting.wording import columns, score
from experiments.running.arm import Arm
from experiments.running.jobs import Room

EXAMPLE, SHARE = "NVIDIA H100 80GB HBM3", 0.3
"""The device of an estimate, and how much of its peak is assumed."""


def header(arms: dict[str, Arm], folder: Path, room: Room) -> str:
    """What every arm is and costs, and how they are run.

    FLOPs of an arm are 3 forward passes a token (one forward, two backward), of all its seeds.
    """
    named = ("arm", "parameters", "seeds", "steps", "tokens", "training FLOPs")
    rows: list[tuple[str, ...]] = [named]
    total = 0.0
    for name, arm in arms.items():
        trains, model = arm.train, arm.model
        tokens, flops = _tokens(arm), training_flops(arm)
        total += flops
        parameters = f"{models.num_parameters(model):,}"
        counts = (str(len(trains.seeds)), f"{trains.steps:,}", f"{tokens:,}", f"{flops:.2e}")
        rows.append((name, parameters, *counts))
    each = f", {room.threads} thread{'s' * (room.threads != 1)} each" if room.threads else ""
    at_once = min(room.jobs, len(arms)) or "as many as there is room for"
    return (
        f"{len(arms)} arms in {folder}, {at_once} at once{each}; "
        f"{total:.2e} FLOPs in all, less what is complete\n{columns(rows)}"
    )


def _tokens(arm: Arm) -> int:
    trains = arm.train
    return trains.steps * trains.batch_size * trains.length * len(trains.seeds)


def training_flops(arm: Arm) -> float:
    """3 forward passes a token (one forward, two backward), of all seeds."""
    return 3.0 * _tokens(arm) * models.flops_per_token(arm.model, arm.train.length)


def estimate(arms: dict[str, Arm], rates: int = 0) -> str:
    """How long an H100 would compute, with one seed at each of so many learning rates an arm."""
    flops = sum(training_flops(a) * (1 + rates / len(a.train.seeds)) for a in arms.values())
    peak = PEAKS[EXAMPLE].flops["bfloat16"]
    minutes = flops / (SHARE * peak) / 60
    return (
        f"{flops:.2e} FLOPs: {minutes:.3g} minutes at {SHARE:.0%} of the {peak / 1e12:.0f} TFLOP/s "
        "of an H100 in bfloat16, without evaluation, starting and compiling"
    )


def ranking(panels: Sequence[Panel]) -> str:
    """Every panel's arms, best first, and its answer in words; last the answers of ladders."""
    texts = [f"{columns(_ranked(panel))}\n\n{_answer(panel)}" for panel in panels]
    texts += [_plain(ladder.answer(one)) for one in ladder.read(panels)]
    return "\n\n".join(texts)


def _ranked(panel: Panel) -> list[tuple[str, ...]]:
    named = ("arm", f"held-out {panel.unit}", "parameters", "seeds", "seconds")
    rows: list[tuple[str, ...]] = [named]
    for run in panel.arms:
        held, seconds = "diverged", "–"
        if run.complete:
            held, seconds = score(run), f"{run.result['wall_seconds']:,.0f}"
        parameters = f"{run.result['unique_parameters']:,}"
        rows.append((run.name, held, parameters, str(len(run.seeds)), seconds))
    return rows


def _answer(panel: Panel) -> str:
    """As the report has it, without the marks of Markdown."""
    answer = claims.answer if panel.claim else beside.answer if panel.paper else findings.answer
    return "\n".join(map(_plain, filter(None, (answer(panel), averages.answer([panel])))))


def _plain(text: str) -> str:
    return textwrap.fill(text.replace("**", ""), 100)
