"""A published table beside ours: the numbers of both, what differs, whether the order agrees."""

import math
from collections.abc import Sequence
from typing import Any

from experiments.reporting.document import Block, Bullets, Heading, Paragraph, Table
from experiments.reporting.pairs import compare
from experiments.reporting.results import Panel, Run
from experiments.reporting.statistics import rank_correlation
from experiments.reporting.wording import counted, direction, listed, optimizer, score, signed


def answer(panel: Panel) -> str:
    """The best row, which rows differ from the base, and whether the order is the paper's."""
    arms, base = panel.complete, panel.base
    gone = [run.name for run in panel.arms if not run.complete]
    ending = f" Diverged: {listed(gone, 'and')}." if gone else ""
    if not arms:
        return "There is nothing to compare: every row diverged."
    best = arms[0]
    text = (
        f"Rows with a result: {len(arms)} of {len(panel.paper['rows'])}. **{best.name} predicts "
        f"best: {score(best)} {panel.unit}**"
    )
    text += f", {base.name} has {score(base)}." if base and best is not base else "."
    return f"{text}{_verdicts(panel, base)} {_order(panel)}{ending}"


def _verdicts(panel: Panel, base: Run | None) -> str:
    """Which rows differ from the base by more than what seeds do."""
    if base is None:
        return f" The row to compare with, {panel.paper['base']}, has no result."
    pairs = compare(panel)
    if not pairs:
        return ""
    if all(math.isnan(pair.difference.p) for pair in pairs):
        return " One seed gives no interval: which rows differ from the base, we cannot tell."
    better = [pair.a.name for pair in pairs if pair.b is base and pair.sure]
    worse = [pair.b.name for pair in pairs if pair.a is base and pair.sure]
    unsure = len(pairs) - len(better) - len(worse)
    found = [f"better: {', '.join(better)}"] if better else []
    found += [f"worse: {', '.join(worse)}"] if worse else []
    found += [f"cannot tell: {unsure} of {len(pairs)}"] if unsure else []
    return f" Against the base, after Holm's correction, {'; '.join(found)}."


def _order(panel: Panel) -> str:
    """Spearman's rank correlation with the paper's main column, and what it is worth."""
    paper, ours = panel.paper, {run.name: run.rank for run in panel.complete}
    both = [
        (ours[name], row["scores"][0])
        for name, row in paper["rows"].items()
        if name in ours and row["scores"]
    ]
    if len(both) < 3:
        return f"Rows that both have: {len(both)}, too few to compare an order."
    sign = -1 if paper["better"] == "higher" else 1
    found = rank_correlation(*zip(*((rank, sign * theirs) for rank, theirs in both), strict=True))
    text = (
        f"Is the order the paper's? Over the {len(both)} rows that both have, Spearman's rank "
        f"correlation with its {paper['columns'][0]} is {signed(found, 2)} (1: the same order; 0: "
        "unrelated; −1: the reverse)"
    )
    if len(both) < 6:
        times = math.factorial(len(both))
        text += f"; by chance alone the same order comes up once in {times} times"
    return f"{text}. Other data, task and scale: this is no replication."


def section(panel: Panel) -> list[Block]:
    """What differs, and the numbers of both, row by row in the paper's order."""
    if not panel.paper:
        return []
    return [
        Heading(2, "Beside the paper"),
        Paragraph(f"{panel.paper['source']}. Its rows and ours are the same changes of a model; "
                  "what differs:"),
        _settings(panel),
        _numbers(panel),
        Paragraph(panel.paper["notes"]),
    ]  # fmt: skip


def _settings(panel: Panel) -> Bullets:
    """What the paper did and what was done here; model and training of the base row."""
    run = panel.base or panel.arms[0]
    config, source = run.record["config"], run.record["source"]
    model, trains = config["model"], config["train"]
    stacks = {"encoder_decoder": "encoder and decoder", "encoder": "encoder", "decoder": "decoder"}
    each = " each" if model["kind"] == "encoder_decoder" else ""
    here = {
        "data": ", ".join([source["name"], *counted(source["facts"])]),
        "task": run.result["asks"],
        "model": f"{stacks[model['kind']]} of {model['num_layers']} layers{each}, width "
        f"{model['width']:,}, {model['heads']['num_heads']} heads, FFN {model['ffn']['width']:,}, "
        f"{model['vocab_size']:,} symbols (row {run.name})",
        "training": f"{trains['steps']:,} steps of {trains['batch_size']:,} rows of "
        f"{trains['length']:,} tokens, {optimizer(trains)}; seeds a row: {len(run.seeds)}",
        "score": f"held-out {panel.unit}",
    }
    there = panel.paper["setting"]
    return Bullets([f"**{name}:** {there[name]}. **Here:** {here[name]}." for name in here])


def _numbers(panel: Panel) -> Table:
    paper, arms = panel.paper, {run.name: run for run in panel.arms}
    digits = [_digits(row["scores"][i : i + 1] for row in paper["rows"].values())
              for i in range(len(paper["columns"]))]  # fmt: skip
    rows, roles = [], []
    for name, row in paper["rows"].items():
        run = arms.get(name)
        loss = "not run" if run is None else score(run) if run.complete else "diverged"
        here = f"{run.result['unique_parameters']:,}" if run else "–"
        scores = row["scores"] or [None] * len(digits)
        told = ["–" if s is None else f"{s:.{d}f}" for s, d in zip(scores, digits, strict=True)]
        rows.append([name, loss, here, f"{row['parameters']:,}", row["printed"] or "–", *told])
        failed = run is not None and not run.complete
        roles.append("bad" if failed else "best" if name == paper["base"] else "")
    header = [
        "row",
        f"ours: held-out {panel.unit}",
        "parameters here",
        "at the paper's size",
        "as printed",
        *(f"paper: {column}" for column in paper["columns"]),
    ]
    caption = (
        "In the paper's order; the row that the others are compared with is marked. Ours: mean ± "
        f"standard deviation over seeds, {direction(panel)}; the paper's {paper['columns'][0]}: "
        f"{paper['better']} is better. Parameters at the paper's size are counted exactly, from "
        "the same config without its scale; the paper prints them rounded or not at all (–)."
    )
    return Table(caption, header, rows, roles, words=1)


def _digits(columns: Any) -> int:
    """Decimals that every number of a column needs."""
    values: Sequence[float] = [v for column in columns for v in column if v is not None]
    return max((len(str(v).partition(".")[2]) for v in values), default=0)
