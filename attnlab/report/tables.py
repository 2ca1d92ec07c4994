"""The tables of a report."""

from collections.abc import Mapping, Sequence

import numpy as np

from attnlab.extras import extra
from attnlab.lab.policies import tried_rates
from attnlab.lab.result import RunResult
from attnlab.lab.results import Results, data_of, label_of, mean_seconds, spread
from attnlab.lab.stats import LEVEL, best_rate
from attnlab.report.page import Table, number, p_value
from attnlab.report.panel import Panel, mean_of

with extra("lab"):
    import pandas

PASSES = 3
"""A training step in forward passes: one forward, and a backward pass of two."""
METHODS = {
    "paired t": "Student's paired t over seeds",
    "t over texts": "Student's t of the means of texts",
    "anytime": "a test that holds however often one looks",
}
INTERVAL = f"{100 * LEVEL:.0f} % interval"
Row = dict[str, object]


def comparison_table(panel: Panel, name: str = "comparisons") -> list[Table]:
    """Each comparison with its interval and corrected p-values; none without comparisons."""
    digits, margin, found = panel.metric.digits, panel.about.margin, panel.comparisons
    averaged = bool((found["over"] != "").any())
    rows: list[Row] = [
        {
            "variant": f"{c['variant']} (mean)" if c["over"] else c["variant"],
            "baseline": c["baseline"],
            "difference": float(c["difference"]),
            INTERVAL: _range(c["low"], c["high"], digits),
            "p": p_value(c["p_holm"]).replace(" ", "\u00a0"),
            **({"p outside margin": p_value(c["p_equivalent"])} if margin else {}),
            "conclusion": c["conclusion"],
            **({"single differences": _range(c["least"], c["most"], digits)} if averaged else {}),
            "pairs": c["pairs"],
        }
        for c in found.to_dict("records")
    ]
    methods = [METHODS[m] for m in dict.fromkeys(found["method"]) if m in METHODS]
    caption = (
        f"Variant minus baseline in {panel.metric.unit}, paired by seed. Test: "
        f"{' and '.join(methods) or 'none of one seed'}. p: two-sided, after Holm's correction."
    )
    if margin:
        caption += f" Equivalent: within {margin:g}, corrected the same way."
    if averaged:
        caption += (
            " (mean): averaged over the other choices, seed by seed; single differences are the "
            "lowest and the highest of those that are averaged."
        )
    return [Table(name, caption, _frame(rows), {"difference": digits}, data=found)] if rows else []


def _range(low: float, high: float, digits: int) -> str | None:
    return None if low != low else f"{number(low, digits)}\u00a0to\u00a0{number(high, digits)}"


def scores_table(panel: Panel, name: str = "scores") -> Table:
    """Held-out scores of each variant, best mean first, and the baselines without a model."""
    unit, metric, known = panel.metric.unit, panel.metric.name, panel.results.metrics
    names = dict.fromkeys(name for run in panel.results for name in run.scores.heldout)
    others: dict[str, str] = {}
    for other in (name for name in names if name != metric):
        text = known[other].unit if other in known else other
        taken = text in (unit, *others.values())  # a column of its own in any case
        others[other] = f"{text} ({other})" if taken else text
    rows: list[Row] = []
    for variant in dict.fromkeys([*panel.scores, *panel.results.variants]):
        scores, runs = panel.scores.get(variant, {}), panel.results.variants[variant]
        rows.append({
            "variant": panel.results.labels[variant],
            f"held-out {unit}": mean_of(scores),
            "standard deviation": spread(scores),
            "runs": len(scores),
            "diverged": sum(run.status == "diverged" for run in runs),
            f"train {unit}": _mean(runs, "train", metric),
            **{f"held-out {text}": _mean(runs, "heldout", m) for m, text in others.items()},
        })  # fmt: skip
    baselines = panel.baselines(panel.results)
    rows += [{"variant": f"{b} (no model)", f"held-out {unit}": x} for b, x in baselines.items()]
    caption = (
        f"Held-out score, best mean first ({panel.metric.better} is better). Standard deviation "
        f"over seeds{', within texts' * (len(panel.results.texts) > 1)}."
    )
    digits = {f"held-out {text}": known[m].digits for m, text in others.items() if m in known}
    digits |= {f"{part} {unit}": panel.metric.digits for part in ("held-out", "train")}
    return Table(name, caption, _frame(rows), digits)


def _mean(runs: Sequence[RunResult], part: str, metric: str) -> float | None:
    """Over the runs that have it."""
    values = [of[metric] for run in runs if metric in (of := getattr(run.scores, part))]
    return float(np.mean(values)) if values else None


def budget_table(panel: Panel, name: str = "budgets") -> Table:
    """What each variant costs."""
    rows: list[Row] = []
    for variant, runs in panel.results.variants.items():
        sizes, train = runs[0].sizes, runs[0].spec.config.train
        tokens = train.batch_size * train.length
        row_tokens = runs[0].data.row_tokens or train.length
        speeds = [run.timing.tokens_per_second for run in runs if run.timing.tokens_per_second]
        step = f"{train.batch_size * row_tokens / np.mean(speeds):.3g}" if speeds else None
        flops = PASSES * sizes.flops_per_token * tokens * train.steps
        rates = dict.fromkeys(run.spec.config.train.optimizer.learning_rate for run in runs)
        rows.append({
            "variant": panel.results.labels[variant],
            "parameters": sizes.parameters,
            "applied parameters": sizes.applied_parameters,
            "FLOPs per token": sizes.flops_per_token,
            "training FLOPs": f"{flops:.3g}",
            "seconds per step": step,
            "seconds": mean_seconds(runs),
            "FFN width": sizes.ffn_width,
            "learning rate": ", ".join(f"{rate:.3g}" for rate in rates),
        })  # fmt: skip
    caption = (
        "Budgets of a run. Applied parameters count a shared parameter once for each use. FLOPs "
        f"per token: forward. Training FLOPs: {PASSES} forward passes a token. Seconds per step: "
        "measured, without compilation and scoring; seconds: with both, of the machine that ran it."
    )
    if any(run.spec.config.model.encoder for run in panel.results):
        caption += " FLOPs are of sources and targets that are both as long as train.length."
    return Table(name, caption, _frame(rows), {"seconds": 1})


def rates_table(panel: Panel, name: str = "rates") -> list[Table]:
    """Learning rates that were tried, on the validation part; none where fewer than three were, or
    no run of a text has a validation score."""
    every = panel.results if panel.tuning is None else panel.tuning
    judged = every.filter(lambda run: bool(run.scores.validation) or run.status == "diverged")
    texts = {data_of(run): run.data.name for run in judged if run.scores.validation}
    rows = [
        _tried(f"{label_of(tags)}{f', {name or text}' * (len(texts) > 1)}", tried, panel.sign)
        for text, name in texts.items()
        for tags, tried in tried_rates(
            Results(run for run in judged if data_of(run) == text), panel.metric.name
        ).items()
        if len(tried) > 2
    ]
    caption = (
        "Learning rate of each variant by its validation score. The parabola is in the logarithm "
        "of the rate, through the best and up to 2 on each side; its interval is Fieller's."
    )
    return [Table(name, caption, _frame(rows))] if rows else []


def _tried(label: str, tried: Mapping[float, float], sign: int) -> Row:
    best = best_rate(tried)
    bounded = best and best.low > 0 and best.high < np.inf
    chosen_by = "parabola" if best and best.fitted else "best that was tried"
    return {
        "variant": label,
        "best rate": f"{best.rate:.3g}" if best else None,
        INTERVAL: f"{best.low:.2g} to {best.high:.2g}" if best and bounded else "not bounded",
        "chosen by": chosen_by if best else "none: all diverged",
        "rate: score": ", ".join(f"{r:.2g}: {number(sign * s)}" for r, s in sorted(tried.items())),
    }


def _frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """Cells stay Python numbers; what is missing is None."""
    found = pandas.DataFrame(rows, dtype=object)
    return found.where(found.notna(), None)
