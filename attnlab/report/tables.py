"""The tables of a report."""

from collections.abc import Sequence

import numpy as np

from attnlab.extras import extra
from attnlab.lab.policies import tried_rates
from attnlab.lab.results import label_of
from attnlab.lab.stats import LEVEL, Comparison, Variant, best_rate
from attnlab.lab.text_table import counted
from attnlab.report.answers import METHODS, interval
from attnlab.report.figures import rates_figure, training_flops
from attnlab.report.page import Block, Figures, Table, number, p_value
from attnlab.report.panel import Panel, mean_of, spread_of
from attnlab.report.style import Style, style

with extra("lab"):
    import pandas

INTERVAL = f"{100 * LEVEL:.0f} % interval"
Row = dict[str, object]


def scores_table(panel: Panel, name: str) -> Table:
    """Held-out scores of each variant, best mean first, and the baselines without a model."""
    unit, first = panel.metric.unit, panel.results[0]
    others = [m for m in first.scores.heldout if m != panel.metric.name]
    rows: list[Row] = []
    roles = []
    diverged = any(run.status == "diverged" for run in panel.results)
    every = [*panel.scores, *(v for v in panel.variants if v not in panel.scores)]
    for variant in every:
        scores = panel.scores.get(variant, {})
        of = [run for run in panel.variants[variant] if run.status == "diverged"]
        rows.append({
            "variant": panel.labels[variant],
            f"held-out {unit}": mean_of(scores) if scores else "diverged",
            "standard deviation": spread_of(scores),
            "runs": len(scores),
            **({"diverged": len(of)} if diverged else {}),
            f"train {unit}": panel.mean(variant, "train", panel.metric.name),
            **{f"held-out {_unit(panel, m)}": panel.mean(variant, "heldout", m) for m in others},
        })  # fmt: skip
        roles.append("" if scores else "bad")
    for baseline, value in first.scores.baselines.get(panel.metric.name, {}).items():
        rows.append({"variant": f"{baseline} (no model)", f"held-out {unit}": value})
        roles.append("baseline")
    word = "lowest" if panel.sign > 0 else "highest"
    caption = (
        f"Held-out score, {word} mean first. "
        f"{'Lower' if panel.sign > 0 else 'Higher'} is better. Standard deviation over runs."
    )
    digits = {f"{part} {unit}": panel.metric.digits for part in ("held-out", "train")}
    return Table(name, caption, _frame(rows), digits, roles)


def _unit(panel: Panel, metric: str) -> str:
    known = panel.results.metrics
    return known[metric].unit if metric in known else metric


def comparison_table(panel: Panel, name: str) -> Table:
    """Each comparison with its interval and corrected p-values."""
    rows = [_comparison(c, panel, panel.labels) for c in panel.comparisons]
    data = [_raw(c, panel.labels) for c in panel.comparisons]
    baselines = {panel.labels[c.baseline] for c in panel.comparisons}
    base = "baseline"
    if len(baselines) == 1:
        base = baselines.pop()
        rows = [{n: v for n, v in row.items() if n != "baseline"} for row in rows]
    caption = (
        f"Variant less {base} in {panel.metric.unit}, paired by seed. Holm's correction counts "
        f"{counted(len(rows), 'comparison')}."
    )
    if panel.about.margin:
        caption += f" Equivalent: within {panel.about.margin:g}, corrected the same way."
    digits = {"difference": panel.metric.digits}
    return Table(name, caption, _frame(rows), digits, data=pandas.DataFrame(data))


def effects_table(panel: Panel, name: str) -> Table:
    """Values of a tag averaged over the others."""
    rows, data = [], []
    for effect in panel.effects:
        c = effect.comparison
        labels = {v: str(v[0][1]) for v in (c.variant, c.baseline)}
        single = [number(x, panel.metric.digits) for x in (min(effect.single), max(effect.single))]
        over = " and ".join(effect.over)
        more = {"averaged over": over, "single differences": " to ".join(single)}
        rows.append({**_comparison(c, panel, labels), **more})
        data.append({"tag": effect.tag, **_raw(c, labels), "averaged_over": over})
    caption = (
        f"Variant less baseline in {panel.metric.unit}, each a mean over all variants with this "
        "value, seed by seed, so a seed is one observation. Single differences: the lowest and "
        "the highest of the combinations; far apart, the mean hides that it depends."
    )
    digits = {"difference": panel.metric.digits}
    return Table(name, caption, _frame(rows), digits, data=pandas.DataFrame(data))


def _comparison(c: Comparison, panel: Panel, labels: dict[Variant, str]) -> Row:
    d, digits = c.difference, panel.metric.digits
    conclusion = f"{c.conclusion} ({c.reason})" if c.reason else c.conclusion
    row: Row = {
        "variant": labels[c.variant],
        "baseline": labels[c.baseline],
        "difference": d.mean,
        INTERVAL: interval(d, digits),
        "p, Holm": p_value(c.p_holm),
        "conclusion": conclusion,
        "runs": d.count,
    }
    if panel.about.margin:
        row["p outside margin, Holm"] = p_value(c.p_equivalent)
    if c.texts < 2 and (panel.about.seeds_added or d.count > 4):
        row["interval at any time"] = interval(c.anytime, digits)
    return {**row, "test": METHODS[d.method]}


def _raw(c: Comparison, labels: dict[Variant, str]) -> Row:
    d = c.difference
    of_one_text = {
        "low_paired": c.paired.low, "high_paired": c.paired.high,
        "low_anytime": c.anytime.low, "high_anytime": c.anytime.high,
    }  # fmt: skip
    return {
        "variant": labels[c.variant], "baseline": labels[c.baseline], "difference": d.mean,
        "low": d.low, "high": d.high, "p": d.p, "p_holm": c.p_holm,
        "p_outside_margin_holm": c.p_equivalent, "method": d.method, "df": d.df, "runs": d.count,
        "texts": c.texts, "conclusion": c.conclusion, **(of_one_text if c.texts < 2 else {}),
    }  # fmt: skip


def budget_table(panel: Panel, name: str) -> Table:
    """What each variant costs."""
    rows = []
    for variant, runs in panel.variants.items():
        sizes, train = runs[0].sizes, runs[0].spec.config.train
        rows.append({
            "variant": panel.labels[variant],
            "parameters": sizes.parameters,
            "applied parameters": sizes.applied_parameters,
            "FLOPs per token": sizes.flops_per_token,
            "training FLOPs": f"{training_flops(runs[0]):.3g}",
            "seconds": float(np.mean([run.timing.seconds for run in runs])),
            "tokens/s": round(float(np.mean([run.timing.tokens_per_second for run in runs]))),
            "FFN width": sizes.ffn_width,
            "learning rate": f"{train.optimizer.learning_rate:.3g}",
        })  # fmt: skip
    caption = (
        "Budgets of a run. Applied parameters count a shared parameter once for each use. FLOPs "
        "per token: forward. Training FLOPs: 3 forward passes a token. Seconds with compilation "
        "and scoring, of the machine that ran it."
    )
    return Table(name, caption, _frame(rows), {"seconds": 1})


def rates_blocks(panel: Panel, name: str) -> list[Block]:
    """Learning rates that were tried, on the validation part."""
    tried = _tried(panel)
    if not tried:
        return []
    rows: list[Row] = []
    for label, (_, scores) in tried.items():
        best, sign = best_rate(scores), panel.sign
        bounded = best and best.low > 0 and best.high < np.inf
        low_to_high = f"{best.low:.2g} to {best.high:.2g}" if best and bounded else "not bounded"
        found = sorted(scores.items())
        rows.append({
            "variant": label,
            "best rate": f"{best.rate if best else min(scores, key=scores.__getitem__):.3g}",
            INTERVAL: low_to_high,
            "chosen by": "parabola" if best else "best that was tried, at an end",
            "rate: score": ", ".join(f"{r:.2g}: {number(sign * s)}" for r, s in found),
        })  # fmt: skip
    caption = (
        "Learning rate of each variant by its validation score. The parabola is in the logarithm "
        "of the rate, through the best and up to 2 on each side; its interval is Fieller's."
    )
    figure = rates_figure(tried, panel.metric.unit, panel.sign, name)
    return [Table(name, caption, _frame(rows)), Figures([figure])]


def _tried(panel: Panel) -> dict[str, tuple[Style, dict[float, float]]]:
    """Label -> (style, rate -> mean validation score, lower is better), of variants with three
    rates or more."""
    every = panel.results if panel.tuning is None else panel.tuning + panel.results
    judged = every.filter(lambda run: bool(run.scores.validation) or run.status == "diverged")
    return {
        label_of(tags): (style(i, i // 6), rates)
        for i, (tags, rates) in enumerate(tried_rates(judged, panel.metric.name).items())
        if len(rates) > 2
    }


def _frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """Cells stay Python numbers; what is missing is None."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return pandas.DataFrame(cells, columns=columns, dtype=object)
