r"""The report of one sweep or of several: python -m experiments.report --workdir=runs/first \
    --workdir=runs/equal --out=runs/both

Writes report.md, report.html (one file that loads nothing), results.csv and the figures of
report.md into --out, which for one sweep is its own folder. Each folder is a panel.
`experiments.sweep` calls it at its end.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from attnlab.sharing.named_plans import PLANS
from experiments.reporting import (
    averages,
    beside,
    claims,
    figures,
    heads,
    joint,
    ladder,
    pairs,
    rates,
)
from experiments.reporting.document import (
    Block,
    Figures,
    Heading,
    Paragraph,
    Table,
    drawings,
    to_markdown,
)
from experiments.reporting.findings import answer, caution, heading
from experiments.reporting.making import making
from experiments.reporting.page import to_html
from experiments.reporting.results import LAYOUT_ORDER, Panel, Run, names, read, to_csv, warnings
from experiments.reporting.wording import (
    direction,
    listed,
    percent,
    score,
)
from experiments.running import launch, workdir

FIGURES = "figures"
BUDGETS = ("unique_parameters", "applied_parameters", "flops_per_token")
EQUAL = {
    "parameters": ("feed-forward width", "unique parameters"),
    "flops": ("feed-forward width", "FLOPs per token"),
    "cache": ("number of heads", "cache bytes per token"),
}
"""Budget -> what was solved for, and what is equal: a key of result.json with spaces."""
SHARED = {
    "separate": "each layer its own weights",
    "albert": "all layers one set of weights",
}


def main() -> None:
    """Writes the report of --workdir."""
    folders = [Path(name) for name in flags.FLAGS.workdir]
    out = flags.FLAGS.out and Path(flags.FLAGS.out)
    print(f"report: {write(folders, out) / 'report.html'}")


def write(folders: list[Path], out: Path | None = None) -> Path:
    """Writes report.md, report.html, results.csv and figures/ into `out`, and returns it; of one
    folder into that one, where `out` is left out.

    Raises WorkdirError, before anything is written, where a folder holds no result and where `out`
    is the folder of a sweep or a run that the report is not of.
    """
    if out is None and len(folders) > 1:
        raise ValueError("a report of several folders is none of theirs; say where: --out=FOLDER")
    out, panels = out or folders[0], read(folders)
    taken = out in folders or (out / workdir.CONFIG).exists()
    if taken and folders != [out]:
        raise workdir.WorkdirError(
            f"{out} has a report of its own, of what was run there; use another --out"
        )
    blocks = document(panels)
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    drawn = drawings(blocks, FIGURES)
    for link, svg in drawn.items():
        _put(out / link, svg)
    text = to_markdown(blocks, FIGURES)
    _put(out / "results.csv", to_csv(panels))
    _put(out / "report.md", text)
    _put(out / "report.html", to_html(text, drawn, _title(panels)))
    return out


def _put(path: Path, text: str) -> None:
    """Whole or not at all: a full disk leaves the earlier report."""
    new = path.with_name(path.name + ".tmp")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def document(panels: Sequence[Panel]) -> list[Block]:
    """The whole report."""
    blocks: list[Block] = [
        Heading(1, _title(panels)),
        Paragraph(_subject(panels)),
    ]
    blocks += [Paragraph(line, "warning") for line in warnings(panels)]
    whole = {_over_texts(some): some for some in averages.together(panels)}
    blocks += [
        Paragraph(f"{title}. {told}")
        for title, some in whole.items()
        if (told := averages.answer(some))
    ]
    climbed = ladder.read(panels)
    blocks += [Paragraph(ladder.answer(one)) for one in climbed]
    several = len({(p.match, p.size) for p in panels}) < len(panels)
    for number, panel in enumerate(panels):
        if panel.claim:
            blocks += claims.section(panel, _named(panel, number))
            continue
        title = _called(panel, several)
        blocks.append(Paragraph(beside.answer(panel) if panel.paper else answer(panel, title)))
        blocks += [Paragraph(told)] if (told := averages.answer([panel])) else []
    blocks += [Paragraph(line, "caution") for line in dict.fromkeys(map(caution, panels))]
    blocks += joint.section(panels)
    for title, some in whole.items():
        blocks += averages.section(some, Heading(2, title))
    for number, one in enumerate(climbed):
        blocks += ladder.section(one, f"{number + 1}-ladder")
    for number, panel in enumerate(panels):
        blocks += _panel(panel, number, several)
    return blocks + heads.section(panels) + making(panels)


def _over_texts(panels: Sequence[Panel]) -> str:
    return f"{heading(panels[0])}, {len(panels)} texts together"


def _title(panels: Sequence[Panel]) -> str:
    if asked := claims.question(panels):
        return asked
    papers = list(dict.fromkeys(p.paper["title"] for p in panels if p.paper))
    if papers:
        return f"{listed(papers, 'and')}, on other data and at another scale"
    layouts, plans = names(panels, "layout", LAYOUT_ORDER), names(panels, "plan", PLANS)
    asks = list(dict.fromkeys(r.result["asks"] for p in panels for r in p.runs))
    what = asks[0] if len(asks) == 1 else "what they are asked"
    if len(layouts) > 1:
        return f"Which heads predict {what} best: {listed(layouts, 'or')}?"
    if len(plans) > 1:
        return f"Which plan of sharing predicts {what} best: {listed(plans, 'or')}?"
    return f"How well do {layouts[0]} heads with the {plans[0]} plan predict {what}?"


def _subject(panels: Sequence[Panel]) -> str:
    data = dict.fromkeys(r.record["source"]["name"] for p in panels for r in p.runs)
    found = names(panels, "plan", PLANS)
    plans = [f"{p} ({SHARED[p]})" if p in SHARED else p for p in found]
    better = list(dict.fromkeys(map(direction, panels)))
    units = listed(list(dict.fromkeys(p.unit for p in panels)), "or")
    return (
        f"Data: {listed(list(data), 'and')}. Plans: {listed(plans, 'and')}. Every score is in "
        f"{units}, held out; {listed(better, 'or')}.{_UNITS.get(units, '')}"
    )


_UNITS = {
    "bits per target token": " Target tokens: those that were cut out, the sentinels before them."
}


def _panel(panel: Panel, number: int, with_folder: bool) -> list[Block]:
    blocks = beside.section(panel)
    blocks += [Heading(2, _called(panel, with_folder)), Paragraph(_budget(panel)), _scores(panel)]
    blocks += [
        Paragraph(
            f"**{run.name}** at learning rate {run.result['learning_rate']:g} diverged: "
            f"{run.result['message']}.",
            "warning",
        )
        for run in panel.runs
        if not run.complete
    ]
    if any(len(runs) > 1 for runs in panel.groups):
        blocks += [_all_rates(panel)]
    drawn = figures.of_panel(panel, _named(panel, number))
    blocks += [Figures(drawn)] if drawn else []
    blocks += pairs.section(panel) + averages.section([panel])
    return blocks + rates.section(panel, _named(panel, number))


def _called(panel: Panel, with_folder: bool) -> str:
    return heading(panel) + (f" ({panel.folder.name})" if with_folder else "")


def _named(panel: Panel, number: int) -> str:
    """What the names of its figures begin with."""
    return f"{number + 1}-{panel.match or 'width'}"


def _budget(panel: Panel) -> str:
    """What is equal here, and what is not."""
    runs = [run.result for run in panel.runs]
    if len(runs) == 1:
        [run] = runs
        return (
            f"One run, of {run['unique_parameters']:,} unique parameters and "
            f"{run['flops_per_token']:,} FLOPs per token."
        )
    if panel.match == "seconds":
        text = (
            "The feed-forward width of every arm is solved for equal seconds of a training step, "
            f"measured before the first arm ({_left_of_seconds(panel)}); other budgets differ"
        )
        budgets = ["unique parameters", "FLOPs per token"]
    elif panel.match:
        solved, name = EQUAL[panel.match]
        text = f"The {solved} of every arm is solved for equal {name}"
        budgets = [name]
    elif panel.paper:
        text = "The arms are the rows of the table; their budgets differ"
        budgets = ["unique parameters", "FLOPs per token"]
    elif panel.claim:
        text = "The arms are those that the question names; their budgets differ"
        budgets = ["unique parameters", "FLOPs per token"]
    else:
        text = "Every arm has the same width, depth and feed-forward width; their budgets differ"
        budgets = ["unique parameters", "FLOPs per token"]
    spans = []
    for name in budgets:
        values = [run[name.replace(" ", "_").lower()] for run in runs]
        apart = max(values) / min(values) - 1
        far = f"{percent(apart, 2)} apart" if apart < 0.1 else f"a factor of {1 + apart:.1f}"
        spans.append(f"{name} from {min(values):,} to {max(values):,}, {far}")
    return f"{text}: {'; '.join(spans)}."


def _left_of_seconds(panel: Panel) -> str:
    """How near to equal every arm came, where it was measured, and how noisy that was."""
    ratios = {run.name: run.result["seconds_of_reference"] for run in panel.runs}
    least, most = min(ratios.values()), max(ratios.values())
    each = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    text = f"{least:.3f} to {most:.3f} of the reference's: {each}"
    path = panel.folder / workdir.CALIBRATION
    if not path.exists():  # arms that were started one by one, from printed commands
        return text
    told = workdir.read_json(path)
    rounds = told["found"].values()
    noise = max(max(f["high"] - f["ratio"], f["ratio"] - f["low"]) for f in rounds)
    where = ", ".join(told["environment"][name] for name in ("device", "machine"))
    return f"{text}; on {where}; at least half of the rounds within {noise:.3f} of it"


def _scores(panel: Panel) -> Table:
    first = panel.runs[0]
    more = [("train", 0), *(("heldout", i) for i in range(1, len(first.metrics)))]
    rows, roles = [], []
    for i, run in enumerate(panel.arms):
        r = run.result
        scores, costs = ["diverged", *["–"] * len(more)], ["–", "–"]
        if run.complete:
            scores = [score(run), *(_mean(run, *which) for which in more)]
            costs = [f"{r['tokens_per_second']:,.0f}", f"{r['wall_seconds']:,.1f}"]
        budgets = [f"{r[name]:,}" for name in BUDGETS]
        shape = [f"{r['model']['ffn']['width']:,}"]
        shape += [f"{r['learning_rate']:.3g}"] if len(panel.rates) > 1 else []
        rows.append([run.name, *scores, *budgets, *costs, *shape, str(len(run.seeds))])
        roles.append("bad" if not run.complete else "best" if i == 0 else "")
    one = first.result
    yardsticks = first.yardsticks if panel.unit == first.unit else {}
    yardsticks = yardsticks if all(r.yardsticks == yardsticks for r in panel.runs) else {}
    for name, value in yardsticks.items():
        rows.append([name, first.shown(value), *["–"] * (len(rows[0]) - 2)])
        roles.append("quiet")
    header = [
        "arm",
        f"held-out {panel.unit}",
        f"train {panel.unit}",
        *(f"held-out {metric['unit']}" for metric in first.metrics[1:]),
        "unique parameters",
        "applied parameters",
        "FLOPs per token",
        "tokens/s",
        "wall seconds",
        "FFN width",
        *(["learning rate"] if len(panel.rates) > 1 else []),
        "seeds",
    ]
    two = one["model"]["kind"] == "encoder_decoder"
    each = "source and target token, each text as long as the row" if two else "token"
    caption = (
        "Best first. Held-out score: mean ± standard deviation over seeds. FLOPs: forward, per "
        f"{each}. Wall seconds: of all seeds of the arm together, compilation included."
    )
    if yardsticks:
        caption += f" Yardsticks, which need no model: {listed(list(yardsticks), 'and')}."
    return Table(caption, header, rows, roles, words=1)


def _all_rates(panel: Panel) -> Table:
    rows = []
    for chosen in panel.arms:
        cells = dict.fromkeys(panel.rates, "–")
        for run in panel.runs:
            if run.name == chosen.name:
                text = score(run) if run.complete else "diverged"
                cells[run.result["learning_rate"]] = f"**{text}**" if run is chosen else text
        rows.append([chosen.name, *cells.values()])
    header = ["arm", *(f"learning rate {rate:g}" for rate in panel.rates)]
    caption = f"Held-out {panel.unit} at every learning rate; the chosen one is strong."
    return Table(caption, header, rows, [""] * len(rows), words=1)


def _mean(run: Run, part: str, metric: int) -> str:
    """The mean over seeds of a metric; "–" where it was not measured."""
    values = run.values(part, metric)
    return run.shown(float(values.mean()), metric) if len(values) else "–"


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "workdir", None, "A folder of a sweep; give it again for more panels."
    )
    flags.DEFINE_string("out", None, "Where to; left out: the folder of the one sweep.")
    flags.mark_flag_as_required("workdir")
    launch.start(main)
