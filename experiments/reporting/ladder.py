"""Arms at several sizes: how their loss falls, and what each is worth at both ends."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from attnlab import plotting
from experiments.reporting import scaling
from experiments.reporting.document import Block, Figure, Figures, Heading, Paragraph, Table
from experiments.reporting.figures import styles
from experiments.reporting.results import SEEDS, Panel, Run
from experiments.reporting.scaling import Estimate
from experiments.reporting.statistics import CONFIDENCE
from experiments.reporting.wording import listed, percent


def _tokens(run: Run) -> int:
    """That a seed is trained on."""
    trains = run.record["config"]["train"]
    return run.result["steps"] * trains["batch_size"] * trains["length"]


SIZES: dict[str, Callable[[Run], float]] = {
    "unique parameters": lambda run: run.result["unique_parameters"],
    "training FLOPs": lambda run: 3.0 * run.result["flops_per_token"] * _tokens(run),
    "seconds of training": lambda run: _tokens(run) / run.result["tokens_per_second"],
}
"""What losses are shown against. Of one seed: FLOPs are 3 forward passes a token; seconds leave
compiling and evaluating out."""
FLOPS = "training FLOPs"
BETTER, WORSE = "better", "worse"


@dataclasses.dataclass(frozen=True)
class Ladder:
    """One sweep and budget at all its sizes."""

    panels: list[Panel]
    """Smallest size first."""
    base: str
    """Name of the arm that the others are measured by: the first of the sweep."""
    arms: dict[str, list[Run]]
    """Name -> its run at each size, of the arms that are complete at all; the base first."""

    @property
    def by(self) -> str:
        """What a size multiplies: "width" or "depth"."""
        return self.panels[0].sweep["ladder"]["by"]

    @property
    def sizes(self) -> str:
        """ "×1 to ×4 the width"."""
        return f"×{self.panels[0].size:g} to ×{self.panels[-1].size:g} the {self.by}"

    @functools.cached_property
    def gains(self) -> dict[str, tuple[Estimate, Estimate]]:
        """Name -> what the arm is worth at both ends: how many times its FLOPs the base needs."""
        over, base = SIZES[FLOPS], self.arms[self.base]
        known = [over(run) for run in base], _losses(base)
        worth = lambda run: scaling.gain(*known, over(run), run.heldout, self.confidence)
        return {
            name: (worth(self.arms[name][0]), worth(self.arms[name][-1])) for name in self.others
        }

    @property
    def others(self) -> list[str]:
        """The arms but the base."""
        return [name for name in self.arms if name != self.base]

    @property
    def confidence(self) -> float:
        """Of each gain's interval, so that `CONFIDENCE` is that of all arms together
        (Bonferroni); both ends of one arm have to hold, which needs no correction."""
        return 1 - (1 - CONFIDENCE) / max(len(self.others), 1)

    @property
    def trouble(self) -> str:
        """Why nothing can be said, or ""."""
        if len(self.panels) < 2:
            return "only one of its sizes has results"
        if any(run.sign < 0 for panel in self.panels for run in panel.runs):
            return "a power law is one of losses, and here more is better"
        if self.base not in self.arms:
            return f"its first arm ({self.base}), the base, is not complete at all sizes"
        return "" if self.others else "there is no arm beside the base"

    def phi(self, name: str) -> Estimate | None:
        """Of an arm that shares, with the arm of its layout that does not; None without both."""
        arms = list(self.arms.values())
        uses = lambda runs: {int(r): n for r, n in runs.result.get("uses", {}).items()}
        runs = self.arms[name]
        alone = [
            other
            for other in arms
            if other[0].result["layout"] == runs[0].result["layout"]
            and all(set(uses(run)) == {1} for run in other)
        ]
        if not alone or not any(set(uses(run)) - {1} for run in runs):
            return None
        return scaling.phi([(uses(run), run.heldout) for run in (*alone[0], *runs)])


def read(panels: Sequence[Panel]) -> list[Ladder]:
    """The ladders among the panels of a report."""
    together: dict[tuple, list[Panel]] = {}
    for panel in panels:
        if panel.size is not None:
            together.setdefault((panel.folder, panel.match), []).append(panel)
    return [_ladder(found) for found in together.values()]


def claim(gains: tuple[Estimate, Estimate]) -> str:
    """ "better" or "worse" at equal FLOPs where that holds at both ends, else ""."""
    if all(gain.low > 1 for gain in gains):
        return BETTER
    return WORSE if all(gain.high < 1 for gain in gains) else ""


def answer(ladder: Ladder) -> str:
    """Which claims hold at both ends."""
    begins = f"On the ladder from {ladder.sizes}"
    if ladder.trouble:
        return f"{begins} nothing can be said: {ladder.trouble}."
    told: dict[str, list[str]] = {BETTER: [], WORSE: [], "": []}
    for name in ladder.others:
        gains = ladder.gains[name]
        worth = f" (worth {_short(gains[0])} and {_short(gains[1])} times its FLOPs)"
        word = claim(gains)
        told[word].append(name + (worth if word else ""))
    parts = [
        f"**{word} than {ladder.base} at both ends: {listed(told[word], 'and')}**"
        for word in (BETTER, WORSE)
        if told[word]
    ]
    if told[""]:
        parts.append(f"no claim holds at both ends for {listed(told[''], 'and')}")
    return f"{begins}, at equal FLOPs: {'; '.join(parts)}."


def section(ladder: Ladder, name: str) -> list[Block]:
    """The table and the figure."""
    title = Heading(2, f"The ladder, {ladder.sizes}")
    if ladder.trouble:
        return [title, Paragraph(f"Nothing can be said: {ladder.trouble}.")]
    laws = {
        (over, arm): scaling.law([size(run) for run in runs], _losses(runs))
        for over, size in SIZES.items()
        for arm, runs in ladder.arms.items()
    }
    left = sorted({run.name for panel in ladder.panels for run in panel.runs} - set(ladder.arms))
    blocks: list[Block] = [title, Paragraph(_how(ladder, left))]
    return [*blocks, _table(ladder, laws), Figures([_figure(ladder, laws, name)])]


def _ladder(panels: list[Panel]) -> Ladder:
    first = next(iter(panels[0].sweep["ladder"]["sizes"]))
    runs = [run for panel in panels for run in panel.runs]
    named = {SEEDS.sub("", run.folder.name): run.name for run in runs}
    base = named.get(first, first)
    best = [{run.name: run for run in panel.complete} for panel in panels]
    whole = [name for name in best[-1] if all(name in at for at in best)]
    order = sorted(whole, key=lambda name: (name != base, best[-1][name].rank))
    return Ladder(panels, base, {name: [b[name] for b in best] for name in order})


def _losses(runs: Sequence[Run]) -> np.ndarray:
    """[K, S], of the seeds that all of them have."""
    both = [seed for seed in runs[0].seeds if all(seed in run.seeds for run in runs)]
    return np.array([run.heldout[[run.seeds.index(s) for s in both]] for run in runs])


def _how(ladder: Ladder, left: list[str]) -> str:
    text = (
        f"Every arm at {len(ladder.panels)} sizes, all trained on as many tokens. The gain of an "
        f"arm is how many times its own FLOPs {ladder.base} would need to be as good, by the law "
        "of that arm; above 1 the arm is better at equal FLOPs. A claim stands only where the "
        "interval leaves 1 out at the smallest and at the largest size. Laws: L = E + A x^-alpha, "
        "least squares over all seeds; intervals by profile likelihood, which cover what seeds "
        "do, not that the law may be another one."
    )
    rates = {run.result["learning_rate"] for runs in ladder.arms.values() for run in runs}
    if len(rates) == 1:
        text += (
            " One learning rate for all sizes: what suits one may not suit another, so a slope is "
            "no verdict (`--tune=7` gives each its own)."
        )
    if left:
        text += f" Not complete at all sizes, so left out: {listed(left, 'and')}."
    return text


def _table(ladder: Ladder, laws: dict[tuple[str, str], scaling.Law]) -> Table:
    ends = [f"×{panel.size:g}" for panel in (ladder.panels[0], ladder.panels[-1])]
    rows = []
    for name in ladder.arms:
        gains, phi = ["base", "1", "1"], ladder.phi(name)
        if name != ladder.base:
            found = ladder.gains[name]
            word = claim(found)
            gains = [f"**{word} at both ends**" if word else "none at both ends"]
            gains += [_ranged(gain) for gain in found]
        told = [_law(laws[over, name]) for over in SIZES]
        rows.append([name, *gains, "–" if phi is None else _ranged(phi), *told])
    floor = {law.has_floor for law in laws.values()}
    without = (
        " E is fitted."
        if floor == {True}
        else f" E is zero: fewer than {scaling.LEAST_SIZES} sizes, or too few seeds."
        if floor == {False}
        else " E is fitted where it is written."
    )
    return Table(
        f"Gains over {ladder.base} at both ends with {percent(ladder.confidence, 1)} intervals "
        f"({percent(CONFIDENCE)} for all {len(ladder.others)} arms together). Laws: E + A x^-alpha "
        f"with the {percent(CONFIDENCE)} interval of alpha.{without} phi: what one more use of "
        "shared weights is worth in this layout, 0 nothing, 1 as much as new weights "
        "(arXiv 2604.21106; parameters of the layers).",
        [
            "arm",
            "claim at equal FLOPs",
            *(f"gain at {end}" for end in ends),
            "phi",
            *(f"law over {over}" for over in SIZES),
        ],
        rows,
        [""] * len(rows),
        words=2,
    )


def _law(law: scaling.Law) -> str:
    begins = f"{law.floor:.3g} + " if law.has_floor else ""
    power = f"{law.scale:.3g} x^−{law.exponent.value:.2g}"
    return f"{begins}{power} ({_span(law.exponent)})"


def _short(found: Estimate) -> str:
    known = np.isfinite(found.value) and found.value
    return f"{found.value:.2f}".replace("-", "−") if known else _span(found)


def _ranged(found: Estimate) -> str:
    short, span = _short(found), _span(found)
    return short if short == span else f"{short} ({span})"


def _span(found: Estimate) -> str:
    """An interval that may be open at an end."""
    if np.isnan(found.low):
        return "no interval"
    low, high = (f"{end:.2g}".replace("-", "−") for end in (found.low, found.high))
    if not np.isfinite(found.high):
        return f"{low} or more" if found.low > 0 else "not bounded"
    return f"{low} to {high}" if np.isfinite(found.low) and found.low else f"up to {high}"


def _figure(ladder: Ladder, laws: dict[tuple[str, str], scaling.Law], name: str) -> Figure:
    looks, measured, fitted = styles(ladder.panels[0]), [], []
    for over, size in SIZES.items():
        points, lines = [], []
        for arm, runs in ladder.arms.items():
            at = np.array([size(run) for run in runs])
            points.append(plotting.Curve(arm, looks[arm], at, _losses(runs).T, False))
            along = np.geomspace(at.min(), at.max(), 50)
            line = laws[over, arm].at(along)[None]
            lines.append(plotting.Curve(arm, looks[arm], along, line, False))
        measured.append(points)
        fitted.append(lines)
    unit = ladder.panels[0].unit
    drawn = plotting.scaling_curves(measured, fitted, list(SIZES), f"held-out {unit}")
    return Figure(
        name,
        plotting.to_svg(drawn, name),
        f"Held-out score over size, {ladder.sizes}",
        f"**Held-out {unit} over size, {ladder.sizes}.** Mean over seeds, lowest to highest; the "
        "lines are the laws of the table. Both axes are logarithmic.",
    )
