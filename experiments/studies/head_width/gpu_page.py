"""The page of the head-width study at D = 256, from its scores alone (plan.md, amendments 2, 3)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.lab.stats import holm
from attnlab.report.page import p_equation, p_value, render, table
from attnlab.report.style import themed_svg
from experiments.studies.head_width.figures import SizePanel, around, loss_figure
from experiments.studies.head_width.gpu_study import (
    ADDED_SEEDS,
    BATCH,
    FACTORS,
    LENGTH,
    NUM_LAYERS,
    SEEDS,
    TRAINING_BYTES,
    TUNED,
    TUNING_SEEDS,
    VARIANTS,
    WIDTH,
    TextScore,
    factors,
    fills_width,
)
from experiments.studies.head_width.hypotheses import ends
from experiments.studies.head_width.mixed_model import Array, Estimate, t_estimate
from experiments.studies.head_width.page import corrected, reading, with_corrected
from experiments.studies.head_width.rates import parabola_minimum
from experiments.studies.head_width.spec import Variant

DRAWS = 2000
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A variant at its best learning rate."""

    rates: tuple[float, ...]
    validation: tuple[float, ...]
    """Bits per byte at each rate, mean over the seeds."""
    rate: float
    interior: bool
    """Is the best rate between two others?"""
    bits: Array
    """[texts, seeds]: held-out bits per byte at the best rate."""
    bits_of_rates: Array
    """[rates, texts, seeds]."""


def judged(scores: Sequence[TextScore]) -> list[TextScore]:
    """The scores of the longest training that choose learning rates: `SEEDS` alone."""
    kept = [one for one in scores if one.run.seed in SEEDS]
    longest = max((one.sizes.steps for one in kept), default=0)
    return [one for one in kept if one.sizes.steps == longest]


def of_variant(scores: Sequence[TextScore], variant: Variant) -> list[TextScore]:
    """The scores of one variant."""
    return [s for s in scores if (s.run.point, s.run.plan) == (variant.point, variant.plan)]


def texts_of(scores: Sequence[TextScore]) -> list[str]:
    """The texts, in the order of their first scores: that of every array here."""
    return list(dict.fromkeys(one.text for one in scores))


def tuned(scores: Sequence[TextScore], texts: Sequence[str]) -> Tuned:
    """One variant at its best learning rate.

    The best rate is the minimum of the parabola in ln r through the validation bits of its rates;
    the held-out bits of a text and seed there are those of the parabola through the same three.
    Where the best rate is at an end, it is the best rate itself.
    """
    rates = tuple(sorted({one.run.learning_rate for one in scores}))
    seeds = sorted({one.run.seed for one in scores})
    bits = np.full((len(rates), len(texts), len(seeds)), np.nan)
    validation = np.full((len(rates), len(seeds)), np.nan)
    for one in scores:
        rate, seed = rates.index(one.run.learning_rate), seeds.index(one.run.seed)
        bits[rate, texts.index(one.text), seed] = one.heldout_bits
        validation[rate, seed] = one.validation_bits
    means = tuple(map(float, validation.mean(1)))
    best = parabola_minimum(dict(zip(rates, means, strict=True)))
    lowest = int(np.argmin(means))
    if best.interior:
        three = slice(lowest - 1, lowest + 2)
        x = np.log(rates[three]) - best.log_rate
        at_best = np.polyfit(x, bits[three].reshape(3, -1), 2)[-1].reshape(bits.shape[1:])
    else:
        at_best = bits[lowest]
    return Tuned(rates, means, math.exp(best.log_rate), best.interior, at_best, bits)


@dataclasses.dataclass(frozen=True)
class AddedSeeds:
    """The variants with N h = D at one multiple of their learning rates: bits [texts, seeds]."""

    together: dict[Variant, Array]
    """From `SEEDS`, then `ADDED_SEEDS`."""
    texts: list[str]

    @property
    def first(self) -> dict[Variant, Array]:
        """From `SEEDS`, which chose the multiple."""
        return {v: bits[:, : len(SEEDS)] for v, bits in self.together.items()}

    @property
    def added(self) -> dict[Variant, Array]:
        """From `ADDED_SEEDS`."""
        return {v: bits[:, len(SEEDS) :] for v, bits in self.together.items()}

    @property
    def conclusions(self) -> dict[Variant, tuple[float, str]]:
        """p of the difference from `TUNED` on the added seeds alone, corrected by Holm, and
        what it says of the sign of the first seeds: confirmed, refuted or inconclusive."""
        foretold, found = differences(self.first), differences(self.added)
        corrected = holm([one.p for one in found.values()])
        conclusions = {}
        for (variant, one), p in zip(found.items(), corrected.tolist(), strict=True):
            same = one.value * foretold[variant].value > 0
            said = "inconclusive" if p >= 0.05 else "confirmed" if same else "refuted"
            conclusions[variant] = (p, said)
        return conclusions


def added_seeds(scores: Sequence[TextScore]) -> AddedSeeds | None:
    """The scores at the learning rates of `ADDED_SEEDS`; None where a variant lacks a seed."""
    longest = max((one.sizes.steps for one in judged(scores)), default=0)
    own = [one for one in scores if one.sizes.steps == longest]
    texts = texts_of(own)
    together = {}
    for variant in filter(fills_width, VARIANTS):
        some = of_variant(own, variant)
        rates = {s.run.learning_rate for s in some if s.run.seed in ADDED_SEEDS}
        bits = {(s.text, s.run.seed): s.heldout_bits for s in some if s.run.learning_rate in rates}
        seeds = (*SEEDS, *ADDED_SEEDS)
        if not bits or any((text, seed) not in bits for text in texts for seed in seeds):
            return None
        together[variant] = np.array([[bits[text, seed] for seed in seeds] for text in texts])
    return AddedSeeds(together, texts)


def complete(scores: Sequence[TextScore]) -> dict[Variant, Tuned]:
    """The variants that have all their rates."""
    found = {}
    for variant in VARIANTS:
        own = of_variant(scores, variant)
        if len({one.run.learning_rate for one in own}) >= len(factors(variant)):
            found[variant] = tuned(own, texts_of(scores))
    return found


def differences(bits: Mapping[Variant, Array]) -> dict[Variant, Estimate]:
    """Bits of each variant less those of `TUNED`, paired by text and seed.

    The variance is the sum of that over texts (of means over seeds) and that over seeds (of means
    over texts, pooled over the variants), each over its number; Student's t with as many degrees of
    freedom as the seeds of all variants leave.

    Args:
      bits: [texts, seeds] of each variant.
    """
    pairs = {v: one - bits[TUNED] for v, one in bits.items() if v != TUNED}
    of_seeds = np.array([one.mean(0) for one in pairs.values()])
    freedom = of_seeds.shape[0] * (of_seeds.shape[1] - 1)
    seed_variance = ((of_seeds - of_seeds.mean(1, keepdims=True)) ** 2).sum() / freedom
    found = {}
    for variant, one in pairs.items():
        text_variance = one.mean(1).var(ddof=1)
        error = math.sqrt(text_variance / one.shape[0] + seed_variance / one.shape[1])
        found[variant] = t_estimate(float(one.mean()), error, freedom + 1)
    return found


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


HEADER = ("point", "plan", "parameters", "learning rates", "validation bits at each",
          "best rate", "held-out bits", "less 4x64 (95 %)", "p, Holm", "")  # fmt: skip


def page(scores: Sequence[TextScore]) -> str:
    """The Markdown page. Raises ValueError where a program has no scores."""
    kept = judged(scores)
    found, seeds = complete(kept), added_seeds(scores)
    if seeds is None or len(found) < len(VARIANTS):
        raise ValueError("the page needs scores of all programs; train them first (see --status)")
    bits = {variant: one.bits for variant, one in found.items()}
    against = compared(bits)
    first = kept[0]
    trained = first.sizes.steps * BATCH * LENGTH
    text = render(
        Path(__file__).with_name("gpu.md.jinja"),
        **_headline(bits, against),
        **_of_seeds(seeds),
        shared=_shared(found, against, kept),
        layers=NUM_LAYERS,
        length=LENGTH,
        bytes=f"{trained:,}",
        each=f"{trained / first.sizes.parameters:.1f}",
        seeds=len({one.run.seed for one in kept}),
        device=first.origin.device,
        commits=" and ".join(dict.fromkeys(one.origin.commit for one in scores)),
        scale=f"{trained / TRAINING_BYTES:.3g}",
        baselines=_grams(kept),
        variants=table(
            HEADER,
            with_corrected(
                [_line(v, found[v], against, kept) for v in found], [against.get(v) for v in found]
            ),
        ),
        by_rate=_by_rate(found),
        tuning=table(("steps", "learning rate", "validation bits"), _tuning(scores)),
    )
    return f"{text}\n"


def compared(bits: Mapping[Variant, Array]) -> dict[Variant, Estimate]:
    """`differences`; those of the five widths have the degrees of freedom planned for them."""
    return differences(bits) | differences(whole_width(bits))


def whole_width(found: Mapping[Variant, Value]) -> dict[Variant, Value]:
    """The variants with N h = D that share nothing."""
    return {v: one for v, one in found.items() if fills_width(v)}


def _headline(bits: Mapping[Variant, Array], against: Mapping[Variant, Estimate]) -> dict[str, str]:
    """The values of the first paragraph."""
    whole = whole_width(bits)
    lowest = min(whole, key=lambda v: float(whole[v].mean()))
    said = {v: d for v, d in against.items() if v in whole}
    p = dict(zip(against, (cells[0] for cells in corrected(list(against.values()))), strict=True))
    clear = [f"{v.point} is {reading(d)}, by {ends(d)} bits per byte (before a correction for "
             f"{len(against)} comparisons; p = {p[v]} after it)" for v, d in said.items()
             if reading(d) != "inconclusive"]  # fmt: skip
    open_ones = [v.point for v, d in said.items() if reading(d) == "inconclusive"]
    return {
        "lowest": f"{lowest.head_dim}",
        "num_widths": f"{len(whole)}",
        "differences": "; ".join(clear) or "no width is clearly better or worse",
        "inconclusive": ", ".join(open_ones) if clear else "",
        "best": _width(best_head_dim(whole)),
    }


def _of_seeds(seeds: AddedSeeds) -> dict[str, str]:
    """The values of the test on seeds of its own."""
    first, added, together = map(differences, (seeds.first, seeds.added, seeds.together))
    texts = len(seeds.texts)
    strict = holm([t_estimate(one.value, one.error, texts).p for one in added.values()])
    p_strict = dict(zip(added, strict.tolist(), strict=True))
    lines, confirmed, of_texts = [], [], []
    for variant, (p, conclusion) in seeds.conclusions.items():
        found = ends(added[variant])
        lines.append([variant.point, ends(first[variant]), found, p_value(p), conclusion,
                      ends(together[variant])])  # fmt: skip
        if conclusion == "confirmed":
            than = f"{_heads(variant)} is {reading(added[variant])} than {_heads(TUNED)}"
            confirmed.append(f"{than}, by {found} bits per byte")
            of_texts.append(f"{variant.point} {_range_of_texts(seeds, variant)}; "
                            f"{p_equation(p_strict[variant])}")  # fmt: skip
    header = ("point", f"seeds {_span(SEEDS)}", f"seeds {_span(ADDED_SEEDS)}", "p, Holm", "",
              "all seeds")  # fmt: skip
    return {
        "confirmed": "; ".join(confirmed),
        "of_seeds": table(header, lines),
        "of_texts": ". ".join(of_texts),
        "strict": f"{texts - 1}",
        "best_of_seeds": _width(best_head_dim(seeds.together)),
        **noisiest_text(seeds),
    }


def noisiest_text(seeds: AddedSeeds) -> dict[str, str]:
    """The text whose scores vary most between seeds, and all seeds without it."""
    variance = np.mean([bits.var(axis=1, ddof=1) for bits in seeds.together.values()], axis=0)
    sd, worst = np.sqrt(variance), int(variance.argmax())
    rest = np.delete(np.arange(len(sd)), worst)
    without = {v: bits[rest] for v, bits in seeds.together.items()}
    said = []
    for variant, bits in without.items():
        each = (bits - without[TUNED]).mean(0)
        word = "better" if each.mean() < 0 else "worse"
        same = int((np.sign(each) == np.sign(each.mean())).sum())
        if variant != TUNED:
            said.append(f"{variant.point} {each.mean():+.4f} ({word} in {same} of {len(each)})")
    noisy = (
        f"scores of `{seeds.texts[worst]}` vary by {sd[worst]:.3f} between seeds (standard "
        f"deviation), those of the other texts by {sd[rest].min():.3f} to {sd[rest].max():.3f}"
    )
    best = _width(best_head_dim(without))
    return {"noisy": noisy, "without": f"{', '.join(said)}; the best width is {best}"}


def _heads(variant: Variant) -> str:
    return f"{variant.num_heads} head{'s' * (variant.num_heads > 1)} of {variant.head_dim}"


def _range_of_texts(seeds: AddedSeeds, variant: Variant) -> str:
    """The lowest, median and highest difference from `TUNED` over texts, by the added seeds."""
    each = (seeds.added[variant] - seeds.added[TUNED]).mean(1)
    low, high = (f"{each[i]:+.4f} ({seeds.texts[i]})" for i in (each.argmin(), each.argmax()))
    return f"{low} to {high}, median {np.median(each):+.4f}"


def _span(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}"


def _parameters(kept: Sequence[TextScore], variant: Variant) -> int:
    return of_variant(kept, variant)[0].sizes.parameters


def _shared(
    found: Mapping[Variant, Tuned], against: Mapping[Variant, Estimate], kept: Sequence[TextScore]
) -> str:
    """What each sharing plan costs."""
    own = _parameters(kept, TUNED)
    return "; ".join(
        f"`{v.plan}` is {reading(against[v])}, by {ends(against[v])}, "
        f"with {100 * _parameters(kept, v) / own:.0f} % of the parameters"
        for v in found
        if v.plan != "separate"
    )


def _width(best: Estimate) -> str:
    return f"h = {2**best.value:.0f} ({2**best.low:.0f} to {2**best.high:.0f})"


def _by_rate(found: Mapping[Variant, Tuned]) -> str:
    whole = whole_width(found)
    lines, every = (
        [],
        [
            {v: one.bits_of_rates[number] for v, one in whole.items()}
            for number in range(len(FACTORS))
        ],
    )
    found_at = [differences(bits) for bits in every]
    said = iter(corrected([d for at in found_at for d in at.values()]))
    for factor, bits, at in zip(FACTORS, every, found_at, strict=True):
        cells = {v: f"{ends(d)}, p {next(said)[0]}" for v, d in at.items()}
        lines.append([f"{factor:g}", *(cells.get(v, "reference") for v in whole),
                      _width(best_head_dim(bits))])  # fmt: skip
    return table(("multiple", *(v.point for v in whole), "best width"), lines)


def _line(
    variant: Variant, one: Tuned, against: Mapping[Variant, Estimate], kept: Sequence[TextScore]
) -> list[str]:
    difference = against.get(variant)
    return [
        variant.point, variant.plan, f"{_parameters(kept, variant):,}",
        ", ".join(f"{rate:.4f}" for rate in one.rates),
        ", ".join(f"{b:.4f}" for b in one.validation),
        f"{one.rate:.4f}" + ("" if one.interior else " (end)"), f"{one.bits.mean():.4f}",
        ends(difference) if difference else "reference",
    ]  # fmt: skip


def _baselines(kept: Sequence[TextScore]) -> dict[str, float]:
    by_text = {one.text: one for one in kept}.values()
    return {name: float(np.mean([getattr(one, name) for one in by_text]))
            for name in ("ngram3", "ngram4", "ngram5")}  # fmt: skip


def _grams(kept: Sequence[TextScore]) -> str:
    return ", ".join(f"{n.removeprefix('ngram')}-gram {b:.3f}" for n, b in _baselines(kept).items())


def _tuning(scores: Sequence[TextScore]) -> list[list[str]]:
    found = {
        (one.sizes.steps, one.run.learning_rate): one.validation_bits
        for one in scores
        if one.run.seed in TUNING_SEEDS
    }
    return [[f"{s:,}", f"{rate:.4f}", f"{bits:.4f}"] for (s, rate), bits in sorted(found.items())]


def _panel(scores: Sequence[TextScore]) -> SizePanel:
    kept = judged(scores)
    bits = whole_width({v: one.bits for v, one in complete(kept).items()})
    against = {variant.head_dim: d for variant, d in differences(bits).items()}
    series = around(float(bits[TUNED].mean()), TUNED.head_dim, against)
    return SizePanel(WIDTH, kept[0].sizes.parameters, series, _baselines(kept))


def write_page(scores: Sequence[TextScore], folder: Path) -> list[Path]:
    """Writes gpu.md and gpu.svg. Creates the folder."""
    text = page(scores)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "gpu.md", text.encode())
    drawn = themed_svg(loss_figure([_panel(scores)]), "gpu")
    write_atomic(folder / "gpu.svg", drawn.encode())
    return [folder / "gpu.md", folder / "gpu.svg"]
