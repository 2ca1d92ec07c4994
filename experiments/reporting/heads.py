"""What heads look at: maps of one held-out row with its words, statistics of several, and what
language models write."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnlab import plotting
from attnlab.sharing.named_plans import PLANS
from experiments.reporting.document import Block, Code, Figure, Figures, Heading, Paragraph
from experiments.reporting.figures import drawn, style_of
from experiments.reporting.results import LAYOUT_ORDER, Panel, Run, names
from experiments.running.maps import FILE, WORDS

MOST_LAYERS, MOST_HEADS = 4, 8
"""Of a map: more would be too small to see on a phone."""
MOST_WITH_WORDS = 3, 4
"""The same where tokens stand at the sides."""
LONGEST = 9
"""Letters of such a token."""
TITLES = {
    "entropy": "entropy, nats",
    "distance": "distance, tokens",
    "previous_token": "% on the previous token",
    "first_token": "% on the first token",
    "duplicate_token": "% on the same token",
    "induction": "% behind the same token",
}
"""Of `attnlab.interpret.statistics.STATISTICS`, those that are drawn."""


def section(panels: Sequence[Panel]) -> list[Block]:
    """Maps and statistics of one arm for every layout and plan, and texts; of runs that left
    none, nothing."""
    chosen = _one_of_each(panels)
    seen = {run.name: (run, _load(run)) for run in chosen if (run.folder / FILE).exists()}
    blocks: list[Block] = []
    if seen:
        maps = [_map(run, left) for run, left in seen.values()]
        text = _MAPS + _SETS * any(_shares(left) for _, left in seen.values())
        blocks += [Heading(2, "Attention maps"), Paragraph(text), Figures(maps)]
    told = [_statistics(run, left) for run, left in seen.values() if "names" in left]
    if told:
        blocks += [Heading(2, "What heads look at"), Paragraph(_STATISTICS), Figures(told)]
    return blocks + _samples(chosen)


_MAPS = (
    "What each head attends to on one held-out row. Row: the position that looks; column: the "
    "position that is looked at. One seed, one row: an example, not a statistic."
)
_SETS = (
    " Layers of one set have the same weights: what differs between their maps comes from what "
    "they read."
)
_STATISTICS = (
    "Means over held-out rows, one cell a layer and head, of one seed. Above each table: the mean "
    "over its heads, and that of the same model before training. A head means something by how "
    "far it is from that. Entropy: of a head's probabilities; 0 is one token alone. %: of a head's "
    "attention; behind the same token: on what followed an earlier token like this one (induction)."
)
_SAMPLES = (
    "What each model makes of the beginning of a held-out row, drawn at temperature {:g} with the "
    "same key; one seed, one draw: an example, not a score."
)


def _one_of_each(panels: Sequence[Panel]) -> list[Run]:
    """The best arm of the first panel that has one, for every layout and plan."""
    found: dict[tuple[str, str], Run] = {}
    for run in (run for panel in panels for run in panel.complete):
        found.setdefault((run.result["layout"], run.result["plan"]), run)
    layouts, plans = names(panels, "layout", LAYOUT_ORDER), names(panels, "plan", PLANS)
    both = [(layout, plan) for layout in layouts for plan in plans]
    return [found[each] for each in both if each in found]


def _load(run: Run) -> dict[str, np.ndarray]:
    with np.load(run.folder / FILE) as left:
        return dict(left)


def _map(run: Run, left: Mapping[str, np.ndarray]) -> Figure:
    texts = [name for name in ("source", "tokens") if name in left]
    probs, step, seed = left["probs"], int(left["step"]), int(left["seed"])
    reached = run.shown(run.heldout[run.seeds.index(seed)])
    data, count = run.record["source"]["name"], len(left["tokens"])
    told = f"The {count} tokens, held out of {data}:"
    if "source" in left:
        told = (
            f"Rows: the {count} tokens that the decoder reads; columns: the {len(left['source'])} "
            f"tokens of the source that it looks at. Held out of {data}; the source, then what "
            "the decoder reads:"
        )
    sides: dict[str, Any] = {}
    most = MOST_LAYERS, MOST_HEADS
    if "pieces_tokens" in left:
        sides = {"tokens": _pieces(left["pieces_tokens"])}
        if "source" in left:
            sides["keys"] = _pieces(left["pieces_source"])
        probs = probs[:, :, :WORDS, :WORDS]
        most = MOST_WITH_WORDS
        if max(len(left[name]) for name in texts) > WORDS:
            told = f"The first {WORDS} tokens at each side. {told}"
    layers, heads = (_some(n, m) for n, m in zip(probs.shape[:2], most, strict=True))
    shown = (
        ""
        if probs.shape[:2] == (len(layers), len(heads))
        else (
            f" {len(layers)} of {probs.shape[0]} layers and {len(heads)} of {probs.shape[1]} heads."
        )
    )
    figure = plotting.attention_map(
        probs[np.ix_(layers, heads)],
        _layers(layers, left),
        [f"head {i}" for i in heads],
        style_of(run).colour,
        **sides,
        outer_labels=True,
    )
    return drawn(
        f"map-{_file(run)}",
        figure,
        f"Attention map of {run.name}",
        f"**{run.name}** after {step:,} steps, seed {seed}, {reached} {run.unit} held "
        f"out.{shown} {told}",
        source="  →  ".join(str(left[f"written_{name}"]) for name in texts),
    )


def _pieces(tokens: np.ndarray) -> list[str]:
    """Short, with spaces that can be seen."""
    told = [str(t).replace(" ", "·") for t in tokens[:WORDS]]
    return [t if len(t) <= LONGEST else f"{t[: LONGEST - 1]}…" for t in told]


def _shares(left: Mapping[str, np.ndarray]) -> bool:
    """Do two layers have one set of weights, as far as the run told?"""
    return "sets" in left and len(np.unique(left["sets"])) < len(left["sets"])


def _layers(layers: Sequence[int], left: Mapping[str, np.ndarray]) -> list[str]:
    """What the rows of a map are called: with their set of weights where some share it."""
    of = (lambda i: f", group {left['sets'][i]}") if _shares(left) else (lambda i: "")
    return [f"layer {i}{of(i)}" for i in layers]


def _statistics(run: Run, left: Mapping[str, np.ndarray]) -> Figure:
    """Small tables, as dark as their numbers: a statistic each, layers x heads."""
    tables, known = [], left["names"].tolist()
    for name in (name for name in TITLES if name in known):
        at, share = known.index(name), TITLES[name].startswith("%")
        values, before = (left[of][at] * (100 if share else 1) for of in ("statistics", "fresh"))
        if np.isnan(values).all():
            continue
        digits = 1 if name == "entropy" or np.nanmax(values) < 9.5 else 0
        told = [f"{np.nanmean(a):.{digits}f}" for a in (values, before)]
        title = f"{TITLES[name]}\nmean {told[0]}, untrained {told[1]}"
        most = 100.0 if share else float(np.nanmax(values))
        tables.append(plotting.HeadTable(title, values, most, digits))
    layers, heads = left["probs"].shape[:2]
    names = _layers(range(layers), left)
    figure = plotting.head_tables(tables, names, style_of(run).colour)
    name = f"heads-{_file(run)}"
    return drawn(
        name,
        figure,
        f"Statistics of the heads of {run.name}",
        f"**{run.name}**, seed {int(left['seed'])}: {layers} layers (rows) x {heads} heads "
        f"(columns), means over {int(left['rows'])} held-out rows.",
    )


def _samples(runs: Sequence[Run]) -> list[Block]:
    told = [(run, run.result["sample"]) for run in runs if "sample" in run.result]
    if not told:
        return []
    prompts = list(dict.fromkeys(one["prompt"] for _, one in told))
    blocks: list[Block] = [
        Heading(2, "What they write"),
        Paragraph(_SAMPLES.format(told[0][1]["temperature"])),
    ]
    for run, one in told:
        if one["prompt"] in prompts:
            prompts.remove(one["prompt"])
            blocks += [Paragraph("**The beginning**:"), Code(_lines(one["prompt"]), "text")]
        reached = run.shown(run.heldout[run.seeds.index(one["seed"])])
        blocks += [
            Paragraph(f"**{run.name}**, seed {one['seed']}, {reached} {run.unit}:"),
            Code(_lines(one["written"]), "text"),
        ]
    return blocks


def _lines(text: str) -> str:
    """A text that was written on one line, on its own."""
    meant = {"n": "\n", "t": "\t", "'": "'", "\\": "\\"}
    return re.sub(r"\\(.)", lambda found: meant.get(found[1], found[0]), text)


def _some(count: int, most: int) -> list[int]:
    """At most `most` of range(count), evenly spaced, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def _file(run: Run) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{run.result['layout']}-{run.result['plan']}")
