"""The page of the head-width study at D = 256, from its scores alone (plan.md, amendments 2, 3).

The bits of a variant are a table [texts, seeds].
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from pandas import DataFrame, Series

from attnlab.lab.stats import holm
from attnlab.report.page import p_equation, p_value
from experiments.studies.head_width import gpu
from experiments.studies.head_width.figures import SizePanel
from experiments.studies.head_width.mixed_model import Estimate, t_estimate
from experiments.studies.head_width.ngrams import NAMES
from experiments.studies.head_width.rates import Minimum, parabola_minimum
from experiments.studies.head_width.spec import Variant
from experiments.studies.head_width.tables import corrected, ends, judged_table, render, table

DRAWS = 2000
Bits: TypeAlias = Mapping[Variant, DataFrame]
Value = TypeVar("Value")


class Tuned(NamedTuple):
    """A variant at its best learning rate."""

    validation: Mapping[float, float]
    """Learning rate -> bits per byte, mean over the seeds."""
    best: Minimum
    bits: DataFrame
    """[texts, seeds]: held-out bits per byte at the best rate."""
    of_rates: Sequence[DataFrame]
    """The same at each rate."""
    parameters: int

    @property
    def rate(self) -> float:
        """The best one."""
        return math.exp(self.best.log_rate)


def judged(scores: DataFrame) -> DataFrame:
    """The scores of `SEEDS` and `ADDED_SEEDS`, without those of tuning."""
    return scores[scores["seed"].isin((*gpu.SEEDS, *gpu.ADDED_SEEDS))]


def of_variant(scores: DataFrame, variant: Variant) -> DataFrame:
    """The scores of one variant."""
    return scores[(scores["point"] == variant.point) & (scores["plan"] == variant.plan)]


def bits_of(scores: DataFrame) -> DataFrame:
    """Held-out bits [texts, seeds] of one variant at one rate, texts in the order of the file."""
    bits = scores.pivot(index="text", columns="seed", values="heldout_bits")
    return bits.loc[scores["text"].unique()]


def tuned(scores: DataFrame) -> Tuned:
    """One variant at its best learning rate.

    The best rate is the minimum of the parabola in ln r through the validation bits of its rates;
    the held-out bits of a text and seed there are those of the parabola through the same three.
    Where the best rate is at an end, it is the best rate itself.
    """
    by_rate = scores.groupby("learning_rate")
    validation = by_rate["validation_bits"].mean()
    of_rates = [bits_of(one) for _, one in by_rate]
    best, lowest = parabola_minimum(validation.to_dict()), int(validation.argmin())
    bits = of_rates[lowest]
    if best.interior:
        three = slice(lowest - 1, lowest + 2)
        x = np.log(validation.index[three]) - best.log_rate
        y = np.stack([one.to_numpy().ravel() for one in of_rates[three]])
        at_best = np.polyfit(x, y, 2)[-1].reshape(bits.shape)
        bits = DataFrame(at_best, bits.index, bits.columns)
    parameters = int(scores["parameters"].iloc[0])
    return Tuned(validation.to_dict(), best, bits, of_rates, parameters)


def at_best_rates(scores: DataFrame) -> dict[Variant, Tuned]:
    """Every variant, from `SEEDS`."""
    own = scores[scores["seed"].isin(gpu.SEEDS)]
    return {variant: tuned(of_variant(own, variant)) for variant in gpu.VARIANTS}


def added_seeds(scores: DataFrame) -> dict[Variant, DataFrame]:
    """Bits of the variants with N h = D at the rates of `ADDED_SEEDS`, from `SEEDS` and these."""
    scores, found = judged(scores), {}
    for variant in filter(gpu.fills_width, gpu.VARIANTS):
        own = of_variant(scores, variant)
        rates = own["learning_rate"][own["seed"].isin(gpu.ADDED_SEEDS)]
        found[variant] = bits_of(own[own["learning_rate"].isin(rates)])
    return found


def only(seeds: Sequence[int], bits: Bits) -> dict[Variant, DataFrame]:
    """The columns of some seeds."""
    return {variant: one[list(seeds)] for variant, one in bits.items()}


def conclusions(bits: Bits) -> dict[Variant, tuple[float, str]]:
    """p of the difference from `TUNED` on `ADDED_SEEDS` alone, corrected by Holm, and the
    conclusion for the sign in `SEEDS`, which chose the rate: confirmed, refuted or inconclusive."""
    first, found = differences(only(gpu.SEEDS, bits)), differences(only(gpu.ADDED_SEEDS, bits))
    concluded = {}
    for variant, p in zip(found, holm([one.p for one in found.values()]).tolist(), strict=True):
        same = found[variant].value * first[variant].value > 0
        word = "inconclusive" if p >= 0.05 else "confirmed" if same else "refuted"
        concluded[variant] = (p, word)
    return concluded


def differences(bits: Bits) -> dict[Variant, Estimate]:
    """Bits of each variant less those of `TUNED`, paired by text and seed.

    The variance is the sum of that over texts (of means over seeds) and that over seeds (of means
    over texts, pooled over the variants), each over its number; Student's t with as many degrees of
    freedom as the seeds of all variants leave.
    """
    pairs = {v: (one - bits[gpu.TUNED]).to_numpy() for v, one in bits.items() if v != gpu.TUNED}
    of_seeds = np.array([one.mean(0) for one in pairs.values()])
    freedom = of_seeds.shape[0] * (of_seeds.shape[1] - 1)
    seed_variance = ((of_seeds - of_seeds.mean(1, keepdims=True)) ** 2).sum() / freedom
    found = {}
    for variant, one in pairs.items():
        text_variance = one.mean(1).var(ddof=1)
        error = math.sqrt(text_variance / one.shape[0] + seed_variance / one.shape[1])
        found[variant] = t_estimate(float(one.mean()), error, freedom + 1)
    return found


def whole_width(found: Mapping[Variant, Value]) -> dict[Variant, Value]:
    """The variants with N h = D that share nothing."""
    return {v: one for v, one in found.items() if gpu.fills_width(v)}


def best_head_dim(bits: Bits) -> Estimate:
    """log2 h at the minimum of the parabola in log2 h through the mean bits of the variants.

    95 % interval: bootstrap over texts, then over seeds; NaN where a parabola opens downwards.
    """
    x = [math.log2(variant.head_dim) for variant in bits]
    values = np.array([one.to_numpy() for one in bits.values()])  # [variants, texts, seeds]
    random = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        texts, seeds = (random.integers(n, size=n) for n in values.shape[1:])
        draws.append(_vertex(x, values[:, texts][:, :, seeds].mean((1, 2))))
    low, high = map(float, np.quantile(draws, [0.025, 0.975]))
    at = _vertex(x, values.mean((1, 2)))
    return Estimate(at, float(np.std(draws)), low, high, math.nan, values.shape[1])


def _vertex(x: Sequence[float], y: np.ndarray) -> float:
    k, slope, _ = np.polyfit(x, y, 2)
    return float(-slope / (2 * k)) if k > 0 else math.nan


def seed_deviations(bits: Bits) -> Series:
    """Of each text: the standard deviation of its scores between seeds, the noisiest text last."""
    variances = [one.var(axis=1) for one in bits.values()]
    return np.sqrt(sum(variances) / len(variances)).sort_values()


# The page -----------------------------------------------------------------------------------------


def page(scores: DataFrame) -> str:
    """The Markdown page. Raises ValueError where a program has no scores."""
    if gpu.missing(scores):
        raise ValueError("the page needs scores of all programs; train them first (--gpu)")
    found, seeds, kept = at_best_rates(scores), added_seeds(scores), judged(scores)
    bits, first = {variant: one.bits for variant, one in found.items()}, kept.iloc[0]
    # Those of the five widths have the degrees of freedom planned for them.
    against = differences(bits) | differences(whole_width(bits))
    tuning = scores[scores["seed"].isin(gpu.TUNING_SEEDS)].drop_duplicates(gpu.PROGRAM)
    return render(
        "gpu",
        page=sys.modules[__name__],
        gpu=gpu,
        found=found,
        seeds=seeds,
        against=against,
        later=differences(only(gpu.ADDED_SEEDS, seeds)),
        p=dict(zip(against, corrected(list(against.values())), strict=True)),
        bits=whole_width(bits),
        trained=int(first["steps"]) * gpu.BATCH * gpu.LENGTH,
        first=first,
        commits=scores["commit"].unique(),
        grams=kept.drop_duplicates("text")[NAMES].mean(),
        of_rates={v: one.of_rates for v, one in whole_width(found).items()},
        tuning=tuning.sort_values(["steps", "learning_rate"]),
    )


def seeds_table(bits: Bits) -> str:
    """The test on seeds of its own, beside those that chose the rate and all."""
    some = {f"seeds {seeds[0]} to {seeds[-1]}": differences(only(seeds, bits))
            for seeds in (gpu.SEEDS, gpu.ADDED_SEEDS)}  # fmt: skip
    together = differences(bits)
    return table([
        {"point": variant.point, **{span: found[variant] for span, found in some.items()},
         "p, Holm": p_value(p), "": conclusion, "all seeds": together[variant]}
        for variant, (p, conclusion) in conclusions(bits).items()
    ])  # fmt: skip


def of_texts(bits: Bits) -> str:
    """1x256 less 4x64 on single texts by the added seeds, and p with the degrees of freedom of
    texts."""
    later = only(gpu.ADDED_SEEDS, bits)
    each = (later[gpu.WIDEST] - later[gpu.TUNED]).mean(axis=1)
    strict = {v: t_estimate(one.value, one.error, len(each)).p
              for v, one in differences(later).items()}  # fmt: skip
    p = dict(zip(strict, holm(list(strict.values())), strict=True))[gpu.WIDEST]
    low, high = (f"{each[text]:+.4f} ({text})" for text in (each.idxmin(), each.idxmax()))
    return f"{low} to {high}, median {each.median():+.4f}; {p_equation(p)}"


def without_noise(bits: Bits) -> str:
    """All seeds without the text whose scores vary most between seeds, and the best width."""
    worst = seed_deviations(bits).index[-1]
    without = {variant: one.drop(index=worst) for variant, one in bits.items()}
    found = differences(without)
    rows = [
        {"point": v.point, "less 4x64 (95 %)": one, "p, Holm": p["p, Holm"], "": _signs(without, v)}
        for (v, one), p in zip(found.items(), corrected(list(found.values())), strict=True)
    ]
    return f"{table(rows)}\n\nThe best width is {best_width(without)}."


def _signs(bits: Bits, variant: Variant) -> str:
    """In how many seeds the difference from `TUNED` has the sign of its mean."""
    each = (bits[variant] - bits[gpu.TUNED]).mean()
    word = "better" if each.mean() < 0 else "worse"
    return f"{word} in {(np.sign(each) == np.sign(each.mean())).sum()} of {len(each)} seeds"


def best_width(bits: Bits) -> str:
    """`best_head_dim` with its interval, as text."""
    best = best_head_dim(bits)
    return f"h = {2**best.value:.0f} ({2**best.low:.0f} to {2**best.high:.0f})"


def variants_table(found: Mapping[Variant, Tuned], against: Mapping[Variant, Estimate]) -> str:
    """Every variant at its best learning rate."""
    heading = "less 4x64 (95 %)"
    return judged_table([
        {"point": v.point, "plan": v.plan, "parameters": f"{one.parameters:,}",
         "learning rates": ", ".join(f"{rate:.4f}" for rate in one.validation),
         "validation bits at each": ", ".join(f"{b:.4f}" for b in one.validation.values()),
         "best rate": f"{one.rate:.4f}" + ("" if one.best.interior else " (end)"),
         "held-out bits": f"{one.bits.to_numpy().mean():.4f}",
         heading: against.get(v, "reference")}
        for v, one in found.items()
    ], heading)  # fmt: skip


def by_rate(of_rates: Mapping[Variant, Sequence[DataFrame]]) -> str:
    """The differences of the five widths, all at the same multiple of their rate."""
    every = [{v: bits[i] for v, bits in of_rates.items()} for i in range(len(gpu.FACTORS))]
    found = [differences(bits) for bits in every]
    said = iter(corrected([one for at in found for one in at.values()]))
    return table([
        {"multiple": f"{factor:g}",
         **{v.point: f"{ends(at[v])}, p {next(said)['p, Holm']}" if v in at else "reference"
            for v in bits},
         "best width": best_width(bits)}
        for factor, bits, at in zip(gpu.FACTORS, every, found, strict=True)
    ])  # fmt: skip


def panel(scores: DataFrame) -> SizePanel:
    """The data of the figure."""
    bits = whole_width({v: one.bits for v, one in at_best_rates(scores).items()})
    against = {variant.head_dim: d for variant, d in differences(bits).items()}
    first, tuned = judged(scores).drop_duplicates("text"), gpu.TUNED
    level, grams = float(bits[tuned].to_numpy().mean()), first[NAMES].mean().to_dict()
    parameters = int(first["parameters"].iloc[0])
    return SizePanel(gpu.WIDTH, parameters, tuned.head_dim, level, against, grams)
