"""The page of the head-width study at D = 256, from its scores alone (plan.md, amendments 2, 3)."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from pandas import DataFrame

from attnlab.lab.stats import holm
from attnlab.report.page import p_equation, p_value
from experiments.studies.head_width import gpu
from experiments.studies.head_width.figures import SizePanel, around
from experiments.studies.head_width.mixed_model import Array, Estimate, t_estimate
from experiments.studies.head_width.rates import parabola_minimum
from experiments.studies.head_width.spec import Variant
from experiments.studies.head_width.tables import (
    corrected,
    ends,
    judged_table,
    render,
    table,
)

DRAWS = 2000
GRAMS = ("ngram3", "ngram4", "ngram5")
Value = TypeVar("Value")


class Tuned(NamedTuple):
    """A variant at its best learning rate."""

    validation: Mapping[float, float]
    """Learning rate -> bits per byte, mean over the seeds."""
    rate: float
    interior: bool
    """Is the best rate between two others?"""
    bits: Array
    """[texts, seeds]: held-out bits per byte at the best rate."""
    bits_of_rates: Array
    """[rates, texts, seeds]."""
    parameters: int


def judged(scores: DataFrame) -> DataFrame:
    """The scores of `SEEDS` and `ADDED_SEEDS`, without those of tuning."""
    return scores[scores["seed"].isin((*gpu.SEEDS, *gpu.ADDED_SEEDS))]


def of_variant(scores: DataFrame, variant: Variant) -> DataFrame:
    """The scores of one variant."""
    return scores[(scores["point"] == variant.point) & (scores["plan"] == variant.plan)]


def bits_of(scores: DataFrame) -> Array:
    """Held-out bits [texts, seeds] of one variant at one rate, texts in the order of the file."""
    bits = scores.pivot(index="text", columns="seed", values="heldout_bits")
    return bits.loc[list(dict.fromkeys(scores["text"]))].to_numpy()


def tuned(scores: DataFrame) -> Tuned:
    """One variant at its best learning rate.

    The best rate is the minimum of the parabola in ln r through the validation bits of its rates;
    the held-out bits of a text and seed there are those of the parabola through the same three.
    Where the best rate is at an end, it is the best rate itself.
    """
    by_rate = scores.groupby("learning_rate")
    validation = by_rate["validation_bits"].mean().to_dict()
    bits = np.stack([bits_of(one) for _, one in by_rate])
    best = parabola_minimum(validation)
    lowest = int(np.argmin(list(validation.values())))
    at_best = bits[lowest]
    if best.interior:
        three = slice(lowest - 1, lowest + 2)
        x = np.log(list(validation)[three]) - best.log_rate
        at_best = np.polyfit(x, bits[three].reshape(3, -1), 2)[-1].reshape(bits.shape[1:])
    parameters = int(scores["parameters"].iloc[0])
    return Tuned(validation, math.exp(best.log_rate), best.interior, at_best, bits, parameters)


def at_best_rates(scores: DataFrame) -> dict[Variant, Tuned]:
    """Every variant, from `SEEDS`."""
    own = scores[scores["seed"].isin(gpu.SEEDS)]
    return {variant: tuned(of_variant(own, variant)) for variant in gpu.VARIANTS}


def added_seeds(scores: DataFrame) -> dict[Variant, Array]:
    """Bits [texts, seeds] of the variants with N h = D at the rates of `ADDED_SEEDS`, from `SEEDS`
    and these."""
    scores, found = judged(scores), {}
    for variant in filter(gpu.fills_width, gpu.VARIANTS):
        own = of_variant(scores, variant)
        rates = own["learning_rate"][own["seed"].isin(gpu.ADDED_SEEDS)]
        found[variant] = bits_of(own[own["learning_rate"].isin(rates)])
    return found


def only(seeds: Sequence[int], bits: Mapping[Variant, Array]) -> dict[Variant, Array]:
    """The columns of some seeds of `added_seeds`."""
    columns = [(gpu.SEEDS + gpu.ADDED_SEEDS).index(seed) for seed in seeds]
    return {variant: one[:, columns] for variant, one in bits.items()}


def conclusions(bits: Mapping[Variant, Array]) -> dict[Variant, tuple[float, str]]:
    """p of the difference from `TUNED` on `ADDED_SEEDS` alone, corrected by Holm, and what it says
    of the sign in `SEEDS`, which chose the rate: confirmed, refuted or inconclusive."""
    foretold, found = differences(only(gpu.SEEDS, bits)), differences(only(gpu.ADDED_SEEDS, bits))
    p_values = holm([one.p for one in found.values()]).tolist()
    concluded = {}
    for (variant, one), p in zip(found.items(), p_values, strict=True):
        same = one.value * foretold[variant].value > 0
        said = "inconclusive" if p >= 0.05 else "confirmed" if same else "refuted"
        concluded[variant] = (p, said)
    return concluded


def differences(bits: Mapping[Variant, Array]) -> dict[Variant, Estimate]:
    """Bits of each variant less those of `TUNED`, paired by text and seed.

    The variance is the sum of that over texts (of means over seeds) and that over seeds (of means
    over texts, pooled over the variants), each over its number; Student's t with as many degrees of
    freedom as the seeds of all variants leave.

    Args:
      bits: [texts, seeds] of each variant.
    """
    pairs = {v: one - bits[gpu.TUNED] for v, one in bits.items() if v != gpu.TUNED}
    of_seeds = np.array([one.mean(0) for one in pairs.values()])
    freedom = of_seeds.shape[0] * (of_seeds.shape[1] - 1)
    seed_variance = ((of_seeds - of_seeds.mean(1, keepdims=True)) ** 2).sum() / freedom
    found = {}
    for variant, one in pairs.items():
        text_variance = one.mean(1).var(ddof=1)
        error = math.sqrt(text_variance / one.shape[0] + seed_variance / one.shape[1])
        found[variant] = t_estimate(float(one.mean()), error, freedom + 1)
    return found


def compared(bits: Mapping[Variant, Array]) -> dict[Variant, Estimate]:
    """`differences`; those of the five widths have the degrees of freedom planned for them."""
    return differences(bits) | differences(whole_width(bits))


def whole_width(found: Mapping[Variant, Value]) -> dict[Variant, Value]:
    """The variants with N h = D that share nothing."""
    return {v: one for v, one in found.items() if gpu.fills_width(v)}


def best_head_dim(bits: Mapping[Variant, Array]) -> Estimate:
    """log2 h at the minimum of the parabola in log2 h through the mean bits of the variants.

    95 % interval: bootstrap over texts, then over seeds; NaN where a parabola opens downwards.
    """
    x = [math.log2(variant.head_dim) for variant in bits]
    values = np.array(list(bits.values()))  # [variants, texts, seeds]
    random = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        texts, seeds = (random.integers(n, size=n) for n in values.shape[1:])
        draws.append(_vertex(x, values[:, texts][:, :, seeds].mean((1, 2))))
    low, high = map(float, np.quantile(draws, [0.025, 0.975]))
    at = _vertex(x, values.mean((1, 2)))
    return Estimate(at, float(np.std(draws)), low, high, math.nan, values.shape[1])


def _vertex(x: Sequence[float], y: Array) -> float:
    k, slope, _ = np.polyfit(x, y, 2)
    return float(-slope / (2 * k)) if k > 0 else math.nan


def noisiest_text(bits: Mapping[Variant, Array]) -> tuple[int, Array]:
    """Which text's scores vary most between seeds, and the standard deviations of all."""
    sd = np.sqrt(np.mean([one.var(axis=1, ddof=1) for one in bits.values()], axis=0))
    return int(sd.argmax()), sd


# The page -----------------------------------------------------------------------------------------


def page(scores: DataFrame) -> str:
    """The Markdown page. Raises ValueError where a program has no scores."""
    if gpu.left(gpu.published_programs(), scores):
        raise ValueError("the page needs scores of all programs; train them first (see --status)")
    found, seeds, kept = at_best_rates(scores), added_seeds(scores), judged(scores)
    bits = {variant: one.bits for variant, one in found.items()}
    against, texts, first = compared(bits), list(dict.fromkeys(kept["text"])), kept.iloc[0]
    later = differences(only(gpu.ADDED_SEEDS, seeds))
    trained = int(first["steps"]) * gpu.BATCH * gpu.LENGTH
    grams = kept.drop_duplicates("text")[list(GRAMS)].mean()
    parameters = {v.plan: one.parameters / found[gpu.TUNED].parameters for v, one in found.items()}
    return render(
        "gpu",
        wide=gpu.WIDEST,
        against=against,
        later=later,
        p=dict(zip(against, corrected(list(against.values())), strict=True)),
        of_plans={v.plan: against[v] for v in against if v.plan != "separate"},
        parameters=parameters,
        best=_width(best_head_dim(whole_width(bits))),
        of_seeds=_seeds_table(seeds),
        of_texts=_of_texts(seeds, texts),
        degrees=len(texts) - 1,
        best_of_seeds=_width(best_head_dim(seeds)),
        noise=noisiest_text(seeds),
        without=_without_noise(seeds),
        texts=texts,
        gpu=gpu,
        bytes=f"{trained:,}",
        each=f"{trained / first['parameters']:.1f}",
        device=first["device"],
        commits=" and ".join(dict.fromkeys(scores["commit"])),
        baselines=", ".join(f"{n.removeprefix('ngram')}-gram {b:.3f}" for n, b in grams.items()),
        variants=judged_table(
            [(_line(v, found[v], against.get(v)), against.get(v)) for v in found]
        ),
        by_rate=_by_rate(found),
        tuning=_tuning(scores),
        ends=ends,
    )


def _seeds_table(bits: Mapping[Variant, Array]) -> str:
    """The test on seeds of its own, beside those that chose the rate and all."""
    some = {_span(seeds): differences(only(seeds, bits)) for seeds in (gpu.SEEDS, gpu.ADDED_SEEDS)}
    together = differences(bits)
    return table([
        {"point": variant.point, **{span: ends(found[variant]) for span, found in some.items()},
         "p, Holm": p_value(p), "": conclusion, "all seeds": ends(together[variant])}
        for variant, (p, conclusion) in conclusions(bits).items()
    ])  # fmt: skip


def _of_texts(bits: Mapping[Variant, Array], texts: Sequence[str]) -> str:
    """1x256 less 4x64 on single texts by the added seeds, and p with the degrees of freedom of
    texts."""
    later = only(gpu.ADDED_SEEDS, bits)
    strict = {v: t_estimate(one.value, one.error, len(texts)).p
              for v, one in differences(later).items()}  # fmt: skip
    p = dict(zip(strict, holm(list(strict.values())), strict=True))[gpu.WIDEST]
    each = (later[gpu.WIDEST] - later[gpu.TUNED]).mean(1)
    low, high = (f"{each[i]:+.4f} ({texts[i]})" for i in (each.argmin(), each.argmax()))
    return f"{low} to {high}, median {np.median(each):+.4f}; {p_equation(p)}"


def _without_noise(bits: Mapping[Variant, Array]) -> str:
    """All seeds without the text whose scores vary most between seeds."""
    worst, _ = noisiest_text(bits)
    without, said = {v: np.delete(one, worst, axis=0) for v, one in bits.items()}, []
    for variant, one in without.items():
        each = (one - without[gpu.TUNED]).mean(0)
        word = "better" if each.mean() < 0 else "worse"
        same = int((np.sign(each) == np.sign(each.mean())).sum())
        if variant != gpu.TUNED:
            said.append(f"{variant.point} {each.mean():+.4f} ({word} in {same} of {len(each)})")
    return f"{', '.join(said)}; the best width is {_width(best_head_dim(without))}"


def _span(seeds: Sequence[int]) -> str:
    return f"seeds {seeds[0]} to {seeds[-1]}"


def _width(best: Estimate) -> str:
    return f"h = {2**best.value:.0f} ({2**best.low:.0f} to {2**best.high:.0f})"


def _line(variant: Variant, one: Tuned, difference: Estimate | None) -> dict[str, str]:
    return {
        "point": variant.point,
        "plan": variant.plan,
        "parameters": f"{one.parameters:,}",
        "learning rates": ", ".join(f"{rate:.4f}" for rate in one.validation),
        "validation bits at each": ", ".join(f"{bits:.4f}" for bits in one.validation.values()),
        "best rate": f"{one.rate:.4f}" + ("" if one.interior else " (end)"),
        "held-out bits": f"{one.bits.mean():.4f}",
        "less 4x64 (95 %)": ends(difference) if difference else "reference",
    }


def _by_rate(found: Mapping[Variant, Tuned]) -> str:
    """The differences of the five widths, all at the same multiple of their rate."""
    whole = whole_width(found)
    every = [{v: one.bits_of_rates[i] for v, one in whole.items()} for i in range(len(gpu.FACTORS))]
    found_at = [differences(bits) for bits in every]
    said = iter(corrected([one for at in found_at for one in at.values()]))
    lines = []
    for factor, bits, at in zip(gpu.FACTORS, every, found_at, strict=True):
        cells = {v: f"{ends(d)}, p {next(said)['p, Holm']}" for v, d in at.items()}
        lines.append({
            "multiple": f"{factor:g}", **{v.point: cells.get(v, "reference") for v in whole},
            "best width": _width(best_head_dim(bits)),
        })  # fmt: skip
    return table(lines)


def _tuning(scores: DataFrame) -> str:
    found = scores[scores["seed"].isin(gpu.TUNING_SEEDS)].drop_duplicates(gpu.PROGRAM)
    return table([
        {"steps": f"{one.steps:,}", "learning rate": f"{one.learning_rate:.4f}",
         "validation bits": f"{one.validation_bits:.4f}"}
        for one in found.sort_values(["steps", "learning_rate"]).itertuples()
    ])  # fmt: skip


def panel(scores: DataFrame) -> SizePanel:
    """The data of the figure."""
    bits = whole_width({v: one.bits for v, one in at_best_rates(scores).items()})
    against = {variant.head_dim: d for variant, d in differences(bits).items()}
    series = around(float(bits[gpu.TUNED].mean()), gpu.TUNED.head_dim, against)
    first = judged(scores).drop_duplicates("text")
    grams = {name: float(first[name].mean()) for name in GRAMS}
    return SizePanel(gpu.WIDTH, int(first["parameters"].iloc[0]), series, grams)
