"""The page of suite accelerator: which backend is fastest where, and how ours stands to others."""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas

from attnlab.atomic import write_atomic
from attnlab.nested import JSON
from attnlab.report.page import (
    Block,
    Figure,
    Figures,
    Page,
    Paragraph,
    Section,
    Table,
    Text,
    draw,
    to_markdown,
    write_page,
)
from attnlab.report.style import (
    FOREGROUND,
    SIZE,
    Style,
    add_legend,
    marker_options,
    new_figure,
    style,
)
from experiments.benchmarks import fastest
from experiments.benchmarks.accelerator import (
    DESIGNS,
    FUNCTION_PEERS,
    LAYER_PEERS,
    Design,
    Setting,
    settings,
)
from experiments.benchmarks.fastest import Record
from experiments.benchmarks.measure import Interval
from experiments.benchmarks.peaks import PEAKS, fraction_of_peak

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

NUMBERS = ("ratio", "low", "high", "milliseconds", "best_milliseconds", "compile_seconds",
           "temp_bytes", "peak_bytes", "verdict")  # fmt: skip
SIZES = ("word", "mode", "dtype", "is_causal", "B", "T", "N", "H", "D")
NONE = "–"
NAMES = tuple(dict.fromkeys((*FUNCTION_PEERS, *LAYER_PEERS)))


def write(folder: Path, about: JSON, records: Sequence[Record]) -> Path:
    """accelerator.md and .html, choices.md, cases.csv, figures and tables; returns the page."""
    path = write_page(page(about, records), folder / "accelerator.html")
    rows = Page("Which backend is fastest", choices(about, records))
    write_atomic(folder / "choices.md", to_markdown(rows).encode())
    write_atomic(folder / "cases.csv", to_csv(records).encode())
    return path


def kind(about: JSON) -> str:
    """The kind of device, without how many there are."""
    return str(about["device"]).partition(" x ")[2]


def page(about: JSON, records: Sequence[Record]) -> Page:
    """All of it."""
    design = DESIGNS["tiny" if about["tiny"] else "full"]
    versions = [f"{n} {about[n]}" for n in ("machine", "python", "jax", "flax", "torch", "tokamax")]
    lead = f"{len(records)} of {about['cases']} cases are here."
    head = [
        Paragraph(f"{about['device']}, {', '.join(versions)}, commit {about['commit']}."),
        Paragraph(_answer(design, records), lead, "answer"),
    ]
    if about["tiny"]:
        text = "Sizes for a CPU, programs not optimised: this shows that every case gives a number "
        head.append(Paragraph(text + "or a reason, not what is fast.", kind="warning"))
    elif len(records) < about["cases"]:
        head.append(Paragraph("The same command goes on with the others.", kind="note"))
    sections = [
        *_widest_section(design, records),
        *_attention(design, records),
        Section("Which backend is fastest", choices(about, records)),
        *_training(about, records),
        *_decoding(records),
        *_refusals(records),
        Section("How to read this", [Paragraph(text) for text in READING]),
    ]
    return Page(f"Attention on {kind(about)}", head, sections)


READING = (
    "Each round takes every row once, in a new order; a ratio is taken within rounds and given as "
    "its median with a 95 % bootstrap interval.",
    "Before anything is timed, outputs and gradients are found equal to those of the first row; "
    "one that differs is a refusal.",
    "float32 multiplies as JAX does by default on the device (TF32 on NVIDIA GPUs).",
    "cases.csv has every number, cases.jsonl also the seconds of each round.",
)


def _table(
    name: str,
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> Table:
    return Table(name, caption, pandas.DataFrame(rows, columns=list(header)))


def _widest_section(design: Design, records: Sequence[Record]) -> list[Section]:
    rows = _widest(design, records)
    caption = "Function, bfloat16, causal, with gradient: our fastest and the fastest of others."
    header = ["width of a head", "T", "ours", "others", "time, ours / theirs"]
    table = _table("widest", caption, header, rows)
    return [Section("The widest heads", [table])] if rows else []


def _answer(design: Design, records: Sequence[Record]) -> str:
    """The question of the laboratory, in the middle of the design."""
    told = [
        f"heads {r[0]} wide: {r[2]} takes {r[4]} of the time of {r[3]}"
        for r in _widest(design, records)
        if r[1] == f"{design.lengths[0]:,}"
    ]
    if not told:
        return "The widest heads are not measured in the middle of the design."
    return f"With gradient, causal, in bfloat16, T = {design.lengths[0]:,}: {'; '.join(told)}."


WIDEST = 2
"""So many widths of a design are its wide heads."""


def _widest(design: Design, records: Sequence[Record]) -> list[list[str]]:
    """width, T, our fastest, the fastest of others, the ratio of their times."""
    found = []
    for record in fastest.of(records, **_middle(design)):
        own, others, a = fastest.ours(record), fastest.peers(record), record["about"]
        first, second = fastest.fastest(own), fastest.fastest(others)
        if first and second and a["H"] in sorted(design.widths)[-WIDEST:]:
            r = fastest.ratio(own[first], others[second])
            told = f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})"
            found.append((a["H"], a["T"], first, second, told))
    return [[str(h), f"{t:,}", *rest] for h, t, *rest in sorted(found)]


def _middle(design: Design) -> JSON:
    """The sizes of the middle, width and length left open."""
    firsts = design.words[0], design.modes[0], design.dtypes[0], design.causal[0]
    return dict(zip(("word", "mode", "dtype", "is_causal"), firsts, strict=True))


def _attention(design: Design, records: Sequence[Record]) -> Iterator[Section]:
    """A figure for every length of the middle, and one for each combination beside it."""
    drawn: dict[tuple, list[Setting]] = {}
    for place in settings(design):
        beside = (place.word, place.mode, place.size.is_causal, place.size.dtype)
        in_middle = beside == ("function", design.modes[0], design.causal[0], design.dtypes[0])
        if in_middle or design.lengths[0] == place.size.T:
            drawn.setdefault((*beside, place.size.T), []).append(place)
    # The middle by its lengths, then the others as they come.
    first = next(iter(drawn))[:-1]
    order = sorted(drawn, key=lambda key: (key[:-1] != first, key[-1] * (key[:-1] == first)))
    found = [_figure(key, drawn[key], records) for key in order]
    if figures := [figure for figure in found if figure]:
        yield Section("Ours beside others, by width of the heads", [Figures(figures)])


def _figure(key: tuple, places: Sequence[Setting], records: Sequence[Record]) -> Figure | None:
    """Time of our fastest / time of each peer."""
    word, mode, causal, dtype, length = key
    points: dict[str, list[tuple[int, Interval]]] = {}
    same = {"word": word, "mode": mode, "is_causal": causal, "dtype": dtype, "T": length}
    for record in fastest.of(records, **same):
        own = fastest.ours(record)
        if first := fastest.fastest(own):
            for name, row in fastest.peers(record).items():
                point = record["about"]["H"], fastest.ratio(own[first], row)
                points.setdefault(name, []).append(point)
    if not points or len(places) < 2:
        return None
    figure = ratio_curves({name: sorted(some, key=operator.itemgetter(0))
                           for name, some in sorted(points.items())})  # fmt: skip
    told = f"{word}, {dtype}, {'causal' if causal else 'not causal'}, {mode}, T = {length:,}"
    name = f"{word}-{dtype}-{'causal' if causal else 'all'}-{mode.replace(' ', '-')}-{length}"
    caption = f"{told[0].upper()}{told[1:]}. Below 1 the fastest of ours is faster."
    return draw(figure, name, f"ratios of times: {told}", caption)


def ratio_curves(series: Mapping[str, Sequence[tuple[int, Interval]]]) -> "Drawing":
    """Time of our fastest / time of each peer over the width of a head. Both axes are logarithmic,
    with a line at 1."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, [[axes]] = new_figure(*SIZE)
    axes.axhline(1.0, color=FOREGROUND, linewidth=1.0)
    looks: list[tuple[str, Style]] = []
    for name, points in series.items():
        k = NAMES.index(name)  # a peer has one colour in all figures
        look, middle = style(k, k), np.array([r.median for _, r in points])
        bars = [middle - [r.low for _, r in points], [r.high for _, r in points] - middle]
        axes.errorbar(
            [h for h, _ in points], middle, yerr=bars, color=look.colour, capsize=2.5,
            linestyle=look.dashes, linewidth=1.6, **marker_options(look, 6.0),
        )  # fmt: skip
        looks.append((name, look))
    axes.set_xscale("log")
    axes.set_yscale("log")
    widths = sorted({h for points in series.values() for h, _ in points})
    axes.set_xticks(widths, list(map(str, widths)))
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, 0.8), max(top, 1.25))
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="width of a head", ylabel="time, our fastest / this")
    add_legend(figure, looks)
    return figure


def choices(about: JSON, records: Sequence[Record]) -> list[Block]:
    """Tables of the fastest backend, and the row of `CHOICES` that follows. Nothing is edited."""
    blocks: list[Block] = []
    groups: dict[tuple, list[Record]] = {}
    for record in (r for word in ("function", "layer") for r in fastest.of(records, word=word)):
        a = record["about"]
        groups.setdefault((a["word"], a["dtype"], a["mode"], a["is_causal"]), []).append(record)
    if not groups:
        blocks.append(Paragraph("Nothing is measured yet."))
    for (word, dtype, mode, causal), part in groups.items():
        lengths = sorted({r["about"]["T"] for r in part})
        widths = sorted({r["about"]["H"] for r in part})
        cells = {(r["about"]["H"], r["about"]["T"]): _cell(r) for r in part}
        rows = [[str(h), *(cells.get((h, t), NONE) for t in lengths)] for h in widths]
        mask = "causal" if causal else "not causal"
        caption = f"{word.capitalize()}, {dtype}, {mode}, {mask}: the fastest of ours"
        caption += ", TFLOP/s" if word == "function" else ", its order of contraction"
        caption += "; in brackets what is chosen now, and how many times as long that takes."
        header = ["width of a head", *(f"T = {t:,}" for t in lengths)]
        name = f"fastest-{word}-{dtype}-{mode}-{mask}".replace(" ", "-")
        blocks.append(_table(name, caption, header, rows))
    some = fastest.of(records, word="function")
    best = fastest.best_order(some) if some else None
    if best:
        now = [fastest.ours(r)[fastest.chosen(r)]["milliseconds"] /
               min(row["milliseconds"] for row in fastest.ours(r).values())
               for r in some if fastest.chosen(r) in fastest.ours(r)]  # fmt: skip
        chosen = float(np.exp(np.mean(np.log(now)))) if now else float("nan")
        text = (
            f"Of all orders this one loses least over these {len(some)} cases: it takes "
            f"{best.mean:.3f} times as long as the fastest backend (geometric mean; at worst "
            f"{best.worst:.2f}), what is chosen now {chosen:.3f}. A proposal, from the sizes above "
            "alone; thresholds (beyond) are for a reader of the tables."
        )
        source = f"measured on {kind(about)}, jax {about['jax']}, commit {about['commit']}"
        lines = [f'Choice("{name}", SOURCE),' for name in best.names]
        code = "\n".join([f'SOURCE = "{source}"', "(", *(f"    {x}" for x in lines), ")"])
        blocks += [Paragraph(text), Text(code)]
    return blocks


def _cell(record: Record) -> str:
    own, chosen = fastest.ours(record), fastest.chosen(record)
    first = fastest.fastest(own)
    if first is None:
        return NONE
    told = first
    if record["about"]["word"] == "function":
        told += f" {record['about']['flops'] / own[first]['milliseconds'] * 1e-9:.3g}"
    if first == chosen or chosen not in own:
        return told
    return f"{told} ({chosen} {fastest.ratio(own[chosen], own[first]).median:.2f})"


def _training(about: JSON, records: Sequence[Record]) -> Iterator[Section]:
    for record in fastest.of(records, word="training"):
        a, rows = record["about"], []
        for name, row in fastest.able(record).items():
            seconds = row["milliseconds"] / 1e3
            share = fraction_of_peak(a["flops"], seconds, kind(about), a["dtype"])
            rows.append(
                [
                    name,
                    f"{record['tokens'] / seconds:,.0f}",
                    f"{100 * share:.1f} %" if share is not None else "unknown",
                    _beside_first(record, row),
                    _number(row["compile_seconds"], 1.0),
                    _number(row["temp_bytes"], 2.0**20),
                ]
            )
        title = record["name"][0].upper() + record["name"][1:]
        caption = f"{a['L']} layers of width {a['D']}, {a['T']:,} tokens a text, {a['dtype']}. "
        source = PEAKS[kind(about)].source if kind(about) in PEAKS else "not known here"
        caption += f"FLOPs are 3 forward passes; peak: {source}."
        header = ["row", "tokens/s", "of peak", "time, first / this", "compile s", "XLA temp MiB"]
        name = re.sub(r"\W+", "-", record["name"])
        yield Section(title, [_table(name, caption, header, rows)])


def _decoding(records: Sequence[Record]) -> Iterator[Section]:
    some = fastest.of(records, word="decoding")
    if not some:
        return
    blocks: list[Block] = []
    for record in some:
        a, rows = record["about"], []
        for name, row in fastest.able(record).items():
            held = next((n for n in a["bytes a token"] if name.endswith((f"of {n}", n))), "k and v")
            each = a["bytes a token"][held]
            speed = record["tokens"] / row["milliseconds"] * 1e3
            size = f"{each * a['B'] * a['T'] / 2**20:,.1f}"
            rows.append([name, f"{speed:,.0f}", _beside_first(record, row), f"{each:,}", size])
        caption = f"{a['N']} heads {a['H']} wide, batch {a['B']}, {a['T']:,} tokens held, "
        caption += f"{a['dtype']}. The latent heads are another function."
        header = ["row", "tokens/s", "time, first / this", "cache, bytes a token", "cache MiB"]
        name = re.sub(r"\W+", "-", record["name"])
        blocks.append(_table(name, caption, header, rows))
    yield Section("Decoding of wide heads", blocks)


def _refusals(records: Sequence[Record]) -> Iterator[Section]:
    told: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.get("trouble"):
            told.setdefault(("the whole case", record["trouble"]), []).append(record["name"])
        for row in record["rows"]:
            if not row["seconds"]:
                reason = row["verdict"].removeprefix("refuses: ")
                told.setdefault((row["name"], reason), []).append(record["name"])
    if told:
        rows = [[n, str(len(at)), why, at[0]] for (n, why), at in sorted(told.items())]
        header = ["row", "cases", "reason", "the first of them"]
        table = _table("refusals", "Rows without a time.", header, rows)
        yield Section("What refuses, and why", [table])


def _beside_first(record: Record, row: JSON) -> str:
    """How many times as long the first row takes."""
    first = record["rows"][0]
    if not first["seconds"]:
        return NONE
    r = fastest.ratio(first, row)
    return f"{r.median:.3f} ({r.low:.3f} to {r.high:.3f})"


def _number(value: float | None, unit: float) -> str:
    return NONE if value is None else f"{value / unit:,.4g}"


def to_csv(records: Sequence[Record]) -> str:
    """A line for each row of each case."""
    lines = []
    for record in records:
        case = {"case": record["name"], **record["about"], "tokens": record.get("tokens")}
        lines += [case | row | {"row": row["name"]} for row in record["rows"]]
        lines += [case | {"trouble": record["trouble"]}] if not record["rows"] else []
    columns = ["case", *SIZES, "tokens", "row", *NUMBERS, "trouble"]
    return pandas.DataFrame(lines, columns=columns, dtype=object).to_csv(index=False)
