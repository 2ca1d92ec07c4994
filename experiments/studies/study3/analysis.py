"""The tests of the plan (docs/results/study3/plan.md), on numbers: differences by text, and steps.

`scores` and `events` read them from rows. Every interval is of 95 % and over texts, by
Student's t, unless its function says otherwise.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

from attnlab.lab.stats import Difference, holm, paired_difference
from experiments.studies.study3.rows import NEW, OLD, read_rows
from experiments.studies.study3.spec import Variant

MARGIN = 0.007
"""Equivalence margin in bits per byte: what 1.05 times the compute is worth."""
ALPHA = 0.05
DRAWS = 100_000

Array: TypeAlias = NDArray[np.float64]
ByText: TypeAlias = Mapping[str, float]
"""Text -> bits per byte, the mean over its seeds."""


def p_equivalence(found: Difference) -> float:
    """The larger of the two one-sided p-values of +-MARGIN."""
    return found.p_outside / 2


def conclusion(found: Difference, p: float | None = None, p_equal: float | None = None) -> str:
    """What the plan calls it: equivalent where the 90 % interval is within MARGIN, inconclusive
    where it is neither that nor different from 0; by corrected p-values (of the difference, of the
    equivalence) where they are given."""
    equivalent = (p_equivalence(found) if p_equal is None else p_equal) < ALPHA
    different = (found.p if p is None else p) < ALPHA
    if different:
        return "different, within the margin" if equivalent else "different"
    return "equivalent" if equivalent else "inconclusive"


def over_texts(differences: ArrayLike) -> Difference:
    """The mean of one difference a text, at least two of them."""
    return paired_difference(differences, MARGIN)


def contrast(*terms: tuple[int, ByText]) -> Array:
    """Sum of sign x bits, for each text that all terms have.

    >>> contrast((1, {"a": 2.0, "b": 1.5}), (-1, {"a": 1.5, "c": 0.0}))
    array([0.5])
    """
    texts = [text for text in terms[0][1] if all(text in bits for _, bits in terms)]
    return np.array([sum(sign * bits[text] for sign, bits in terms) for text in texts])


def corrected(tests: Mapping[str, float]) -> dict[str, float]:
    """Name of a test -> its p-value after Holm's correction."""
    return dict(zip(tests, holm(list(tests.values())).tolist(), strict=True))


def best_width(means: Mapping[int, float]) -> float:
    """log2 of the best head_dim: the minimum of the least-squares parabola in log2 h, within the
    widths; without a minimum the end with the lower mean.

    >>> best_width({h: (np.log2(h) - 3) ** 2 for h in (4, 8, 16, 32, 64)})
    3.0
    """
    widths = sorted(means)
    u = np.log2(widths)
    curved, slope, _ = np.polyfit(u, [means[h] for h in widths], 2)
    if curved <= 0:
        return float(u[0] if means[widths[0]] <= means[widths[-1]] else u[-1])
    return round(float(np.clip(-slope / (2 * curved), u[0], u[-1])), 9)


def jackknife(texts: Sequence[str], statistic: Callable[[Sequence[str]], float]) -> Difference:
    """A statistic of texts with the standard error of the jackknife over them."""
    left_out = np.array([statistic([t for t in texts if t != one]) for one in texts])
    apart = (len(texts) - 1) * (left_out.mean() - left_out)  # their t has the jackknife's error
    return paired_difference(statistic(texts) + apart, MARGIN)


ByWidth: TypeAlias = Mapping[int, ByText]
"""head_dim -> bits of each text."""


def shift_of(first: ByWidth, second: ByWidth, texts: Sequence[str]) -> float:
    """u* of the second positions less u* of the first, each of means over texts."""
    u = [
        best_width({h: float(np.mean([bits[t] for t in texts])) for h, bits in one.items()})
        for one in (first, second)
    ]
    return u[1] - u[0]


def common_texts(first: ByWidth, second: ByWidth) -> list[str]:
    """The texts that all widths of both have."""
    every = [*first.values(), *second.values()]
    return [text for text in every[0] if all(text in bits for bits in every)]


def width_shift(first: ByWidth, second: ByWidth) -> Difference:
    """A2: `shift_of`, with the error of the jackknife over texts."""
    return jackknife(common_texts(first, second), lambda texts: shift_of(first, second, texts))


def width_shift_bootstrap(
    first: ByWidth, second: ByWidth, draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """The 95 % percentile interval of A2 over texts. It decides nothing: 8 texts are too few."""
    texts, rng = common_texts(first, second), np.random.default_rng(seed)
    drawn = [
        shift_of(first, second, [texts[i] for i in rng.integers(len(texts), size=len(texts))])
        for _ in range(draws)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Events:
    """When runs copied first. One entry a run in each array.

    Attributes:
      step: of the event, or the last step.
      copied: False where the run never copied (censored).
      slow: is it of the group that is expected to be later?
      stratum: of the log-rank statistic: the text.
      block: within which `slow` may be permuted: text and seed.
    """

    step: Array
    copied: NDArray[np.bool_]
    slow: NDArray[np.bool_]
    stratum: NDArray[np.int64]
    block: NDArray[np.int64]


def log_rank_scores(events: Events) -> Array:
    """Observed less expected events of each run: its sum over a group is the numerator of the
    stratified log-rank statistic, and its sum over a stratum 0.

    A run that ends at t expects the sum over event times s <= t in its stratum of d_s / n_s (events
    at s, runs at risk at s).
    """
    scores = events.copied.astype(float)
    for stratum in np.unique(events.stratum):
        inside = events.stratum == stratum
        steps, copied = events.step[inside], events.copied[inside]
        expected = np.zeros(len(steps))
        for s in np.unique(steps[copied]):
            hazard = np.sum(copied & (steps == s)) / np.sum(steps >= s)
            expected += hazard * (steps >= s)
        scores[inside] -= expected
    return scores


def log_rank(events: Events, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """D1: (observed less expected events of the slow group, two-sided p-value).

    The p-value is of permutations of `slow` within blocks; both are less the mean over these, which
    is 0 where all blocks have as many runs. Negative: the slow group is later.
    """
    scores, rng = log_rank_scores(events), np.random.default_rng(seed)
    observed, drawn = float(scores[events.slow].sum()), np.zeros(draws)
    for block in np.unique(events.block):
        inside = events.block == block
        orders = rng.permuted(np.tile(events.slow[inside], (draws, 1)), axis=1)
        mean = events.slow[inside].mean() * scores[inside].sum()
        drawn += orders @ scores[inside] - mean
        observed -= float(mean)
    extreme = np.sum(np.abs(drawn) >= abs(observed) - 1e-9)
    return observed, float((extreme + 1) / (draws + 1))


def hazard_ratio(events: Events) -> float:
    """Of the slow group over the other: Cox regression stratified by text, Efron's ties.

    Infinite or 0 where one group alone has events; it describes and decides nothing.
    """

    def negative(log_ratio: float) -> float:
        total = 0.0
        weight = np.where(events.slow, math.exp(log_ratio), 1.0)
        for stratum in np.unique(events.stratum):
            inside = events.stratum == stratum
            steps, copied, w = events.step[inside], events.copied[inside], weight[inside]
            for s in np.unique(steps[copied]):
                now, risk = copied & (steps == s), w[steps >= s].sum()
                shares = np.arange(now.sum()) / now.sum()
                total += np.log(w[now]).sum() - np.log(risk - shares * w[now].sum()).sum()
        return -total

    found = optimize.minimize_scalar(negative, bounds=(-8, 8), method="bounded")
    return math.exp(found.x) if abs(found.x) < 7.9 else (math.inf if found.x > 0 else 0.0)


def hazard_interval(events: Events, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of `hazard_ratio`, blocks drawn with replacement by stratum."""
    rng, ratios = np.random.default_rng(seed), []
    blocks = {
        stratum: [np.flatnonzero(events.block == b) for b in np.unique(events.block[at])]
        for stratum in np.unique(events.stratum)
        for at in [events.stratum == stratum]
    }
    for _ in range(draws):
        chosen = np.concatenate(
            [one[i] for one in blocks.values() for i in rng.integers(len(one), size=len(one))]
        )
        ratios.append(hazard_ratio(Events(*(getattr(events, f.name)[chosen]
                                            for f in dataclasses.fields(Events)))))  # fmt: skip
    # Without interpolation, which between two infinite ratios is NaN.
    low, high = np.percentile(ratios, [2.5, 97.5], method="nearest")
    return float(low), float(high)


def read_table(folder: Path) -> pd.DataFrame:
    """The rows of both files of a folder."""
    found = [rows for name in (OLD, NEW) if len(rows := read_rows(folder / name))]
    return pd.concat(found, ignore_index=True) if found else read_rows(folder / OLD)


def rows_of(table: pd.DataFrame, variant: Variant, role: str = "judged") -> pd.DataFrame:
    """The judged rows of a variant, or those of tuning."""
    inside = table["role"] == role
    for field in dataclasses.fields(Variant):
        inside &= table[field.name] == getattr(variant, field.name)
    return table[inside]


def scores(table: pd.DataFrame, variant: Variant, column: str = "heldout_bits") -> ByText:
    """Text -> mean over seeds of a column. A text on which a run diverged is left out."""
    rows = rows_of(table, variant)
    gone = set(rows.loc[rows["status"] != "complete", "text"])
    found = rows[~rows["text"].isin(gone)].groupby("text", sort=False)[column].mean()
    return {str(text): float(bits) for text, bits in found.items()}


def without_pair(bits: ByText) -> ByText:
    """The two Tatoeba texts as one unit, their mean.

    >>> without_pair({"web": 2.0, "tatoeba_fr": 1.0, "tatoeba_en": 2.0})
    {'web': 2.0, 'tatoeba': 1.5}
    """
    pair = [bits[text] for text in ("tatoeba_fr", "tatoeba_en") if text in bits]
    others = {text: value for text, value in bits.items() if not text.startswith("tatoeba")}
    return others | ({"tatoeba": float(np.mean(pair))} if pair else {})


def copy_part(table: pd.DataFrame, wide: Variant, best: Variant, text: str) -> tuple[float, float]:
    """D2 is the second over the first: (difference of all bits of two variants on a text, share of
    copy bytes x difference of their bits)."""
    columns = "heldout_bits", "heldout_copy_bits", "heldout_copy_bytes", "heldout_bytes"
    there = table[(table["text"] == text) & (table["status"] == "complete")]
    a, b = (rows_of(there, v)[[*columns]].mean() for v in (wide, best))
    share = a["heldout_copy_bytes"] / a["heldout_bytes"]
    copied = share * (a["heldout_copy_bits"] - b["heldout_copy_bits"])
    return float(a["heldout_bits"] - b["heldout_bits"]), float(copied)


def events(table: pd.DataFrame, variants: Sequence[Variant], slow: Sequence[Variant]) -> Events:
    """The first copies of the complete runs of part D."""
    parts = [(v in slow, rows_of(table, v)) for v in variants]
    rows = pd.concat([one.assign(slow=late) for late, one in parts])
    rows = rows[rows["status"] == "complete"]
    copied = (rows["copy_step"] >= 0).to_numpy()
    return Events(
        step=rows["copy_step"].where(copied, rows["steps"]).to_numpy(float),
        copied=copied,
        slow=rows["slow"].to_numpy(bool),
        stratum=pd.factorize(rows["text"])[0],
        block=pd.factorize(rows["text"] + "-" + rows["seed"].astype(str))[0],
    )
