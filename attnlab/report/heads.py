"""What heads attend to, and what language models write: one run of each variant."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from attnlab.lab.attention_maps import FILE
from attnlab.lab.result import RunResult
from attnlab.lab.stats import Variant
from attnlab.report.maps import HeadTable, attention_map, head_tables
from attnlab.report.page import Block, Figure, Figures, Paragraph, Section, Text, draw
from attnlab.report.panel import Panel

MOST_LAYERS, MOST_HEADS = 4, 8
"""Of a map; more would be too small to see on a phone."""
MOST_WITH_WORDS = 3, 3
"""The same where tokens stand at the sides."""
MOST_VARIANTS = 8
WORDS = 14
"""Tokens of the row that are drawn, of those that a run keeps."""
LONGEST = 9
"""Letters of such a token."""
TITLES = {
    "entropy": "entropy, nats",
    "distance": "distance, tokens",
    "previous_token": "% on previous token",
    "first_token": "% on first token",
    "duplicate_token": "% on same token",
    "induction": "% behind same token",
}
"""Of `attnlab.interpret.statistics.STATISTICS`, those that are drawn."""
Arrays = Mapping[str, np.ndarray]


def heads_sections(panel: Panel, end: str) -> list[Section]:
    """Maps, statistics and samples of one run of each variant; `end` ends the names of figures."""
    chosen = [_first(panel, variant) for variant in list(panel.scores)[:MOST_VARIANTS]]
    found = [(label, run, left) for label, run in chosen if (left := _load(panel, run))]
    sections = []
    if found:
        maps = [_map(label, run, left, f"{i}{end}") for i, (label, run, left) in enumerate(found)]
        text = (
            "What each head attends to on one held-out row. Row: the query position; column: the "
            "key position. Layers and heads count from 0. One seed, one row: an example."
        )
        if any(_shares(left) for *_, left in found):
            text += " Layers of one group have the same parameters."
        sections.append(Section(panel.named("Attention maps"), [Paragraph(text), Figures(maps)]))
    tables = [
        _statistics(label, run, left, f"{i}{end}")
        for i, (label, run, left) in enumerate(found)
        if len(left.get("names", ()))
    ]
    if tables:
        text = (
            "Means over held-out rows, one cell per layer and head, of one seed. Above each table: "
            "the mean over its heads, and that of the same model before training. Entropy: of the "
            "probabilities of a head; 0 is one token alone. Behind same token: on what "
            "followed an earlier token like this one (induction)."
        )
        title = panel.named("Head statistics")
        sections.append(Section(title, [Paragraph(text), Figures(tables)]))
    return sections + _samples(panel, chosen)


def _first(panel: Panel, variant: Variant) -> tuple[str, RunResult]:
    """The label and the first complete run of a variant."""
    runs = [run for run in panel.variants[variant] if run.scores.heldout]
    return panel.labels[variant], runs[0]


def _load(panel: Panel, run: RunResult) -> dict[str, np.ndarray]:
    folder = panel.results.folder_of(run)
    if folder is None or not (folder / FILE).exists():
        return {}
    with np.load(folder / FILE) as left:
        return dict(left)


def _map(label: str, run: RunResult, left: Arrays, end: str) -> Figure:
    probs, text = left["probs"], ""
    most, tokens, keys = (MOST_LAYERS, MOST_HEADS), None, None
    if "pieces_tokens" in left:
        tokens = _pieces(left["pieces_tokens"])
        keys = _pieces(left["pieces_source"]) if "source" in left else None
        probs, most = probs[:, :, :WORDS, :WORDS], MOST_WITH_WORDS
        text = " The first tokens at each side."
    layers, heads = (evenly_spaced(n, m) for n, m in zip(probs.shape[:2], most, strict=True))
    if probs.shape[:2] != (len(layers), len(heads)):
        text += (
            f" {len(layers)} of {probs.shape[0]} layers and {len(heads)} of {probs.shape[1]} heads."
        )
    figure = attention_map(
        probs[np.ix_(layers, heads)],
        _layers(layers, left),
        [f"head {i}" for i in heads],
        tokens=tokens,
        keys=keys,
        outer_labels=True,
    )
    written = "; ".join(
        str(left[f"written_{name}"])[:300] for name in ("source", "tokens") if name in left
    )
    caption = f"{label}, seed {run.spec.seed}.{text} The row: {written}"
    return draw(figure, f"map-{end}", f"Attention maps of {label}", caption)


def _pieces(tokens: np.ndarray) -> list[str]:
    """Short, with spaces that can be seen."""
    pieces = [str(t).replace(" ", "·") for t in tokens[:WORDS]]
    return [t if len(t) <= LONGEST else f"{t[: LONGEST - 1]}…" for t in pieces]


def _shares(left: Arrays) -> bool:
    """Do two layers have one parameter group?"""
    return "sets" in left and len(np.unique(left["sets"])) < len(left["sets"])


def _layers(layers: Sequence[int], left: Arrays) -> list[str]:
    """Names of layers, with their parameter group where some share it."""
    groups = left["sets"] if _shares(left) else None
    return [f"layer {i}" + (f", group {groups[i]}" if groups is not None else "") for i in layers]


def _statistics(label: str, run: RunResult, left: Arrays, end: str) -> Figure:
    """Small tables, as dark as their numbers: one for each statistic, layers x heads."""
    tables, known = [], left["names"].tolist()
    for name in (name for name in TITLES if name in known):
        at, share = known.index(name), TITLES[name].startswith("%")
        values, before = (
            left[of][at] * (100 if share else 1) for of in ("statistics", "untrained")
        )
        if np.isnan(values).all():
            continue
        digits = 1 if name == "entropy" or np.nanmax(values) < 9.5 else 0
        means = [f"{np.nanmean(a):.{digits}f}" for a in (values, before)]
        title = f"{TITLES[name]}\nmean {means[0]}, untrained {means[1]}"
        most = 100.0 if share else float(np.nanmax(values))
        tables.append(HeadTable(title, values, most, digits))
    layers, heads = left["probs"].shape[:2]
    figure = head_tables(tables, _layers(range(layers), left))
    caption = (
        f"{label}, seed {run.spec.seed}: {layers} layers (rows, from 0) and {heads} heads "
        f"(columns, from 0), means over {int(left['rows'])} held-out rows."
    )
    return draw(figure, f"heads-{end}", f"Statistics of the heads of {label}", caption)


def _samples(panel: Panel, chosen: Sequence[tuple[str, RunResult]]) -> list[Section]:
    blocks: list[Block] = []
    prompts: list[str] = []
    for label, run in chosen:
        if (sample := getattr(run, "sample", None)) is None:
            continue
        if not blocks:
            text = (
                "What each model writes behind the beginning of a held-out row, drawn at "
                f"temperature {sample.temperature:g}: one seed, one draw, an example."
            )
            blocks.append(Paragraph(text))
        if sample.prompt not in prompts:
            prompts.append(sample.prompt)
            blocks.append(Text(_lines(sample.prompt), "The beginning."))
        blocks.append(Text(_lines(sample.written), f"{label}, seed {sample.seed}."))
    return [Section(panel.named("Samples"), blocks)] if blocks else []


def _lines(text: str) -> str:
    """A text that was written on one line, with its own line ends."""
    meant = {"n": "\n", "t": "\t", "'": "'", "\\": "\\"}
    return re.sub(r"\\(.)", lambda found: meant.get(found[1], found[0]), text)


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of range(count), evenly spaced, the first and the last among them.

    >>> evenly_spaced(12, 4), evenly_spaced(3, 4)
    ([0, 4, 7, 11], [0, 1, 2])
    """
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})
