"""The page of the study on one GPU: best rates, paired differences and the best width."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats
from study_rows import PUBLISHED, check_page

from experiments.studies.head_width import gpu_page, gpu_study
from experiments.studies.head_width.gpu_study import (
    ProgramOrigin,
    ProgramSeed,
    ProgramSizes,
    TextScore,
)
from experiments.studies.head_width.rates import RateFormula, rate_terms

FORMULA = RateFormula(dict.fromkeys(rate_terms(gpu_study.VARIANTS[0], 20.0), 0.0), 0.0, {})
WHOLE = gpu_study.VARIANTS[:5]
TEXTS = {"web": 0.3, "novels": -0.1, "python": 0.0}


PROGRAMS = gpu_study.programs(FORMULA, 1.0, 0.25)


def made(best_log_rate=0.2, best_log_h=5.3, variants=WHOLE, programs=PROGRAMS):
    """Scores without noise: a parabola in ln r for each variant, and one in log2 h."""
    found = []
    for program in programs:
        variant, rate = program.variant, program.learning_rate
        if variant not in variants:
            continue
        away = 0.02 * (math.log(rate) - best_log_rate) ** 2
        bits = 1.7 + 0.01 * (math.log2(variant.head_dim) - best_log_h) ** 2 + away
        sizes = ProgramSizes(1024, 4_790_000, 11_140_000, program.steps)
        for (text, level), seed in itertools.product(TEXTS.items(), program.seeds):
            run = ProgramSeed(variant.point, variant.plan, rate, seed)
            score = bits + level + 0.01 * seed
            found.append(TextScore(run, text, score, bits, 3.0, 2.5, 2.25, sizes,
                                   ProgramOrigin(1.0, "some GPU", "abc")))  # fmt: skip
    return found


def test_a_variant_is_scored_at_its_best_rate():
    [(_, found)] = gpu_page.complete(made(variants=[WHOLE[1]])).items()
    assert found.interior
    assert found.rate == pytest.approx(math.exp(0.2), rel=1e-6)
    level = 1.7 + 0.01 * (5 - 5.3) ** 2
    expected = [[level + t, level + t + 0.01] for t in TEXTS.values()]
    np.testing.assert_allclose(found.bits, expected, rtol=1e-9)


@pytest.mark.parametrize(("best_log_rate", "away"), [(0.2, 4.0), (0.6, 0.5)])
def test_a_rate_that_is_not_beside_the_best_one_does_not_count(best_log_rate, away):
    scores = made(best_log_rate, variants=[WHOLE[1]])
    wrong = [dataclasses.replace(s, heldout_bits=9.0, validation_bits=9.0)
             if s.run.learning_rate == away else s for s in scores]  # fmt: skip
    [(_, expected)], [(_, found)] = (gpu_page.complete(some).items() for some in (scores, wrong))
    assert found.rate == pytest.approx(expected.rate)
    np.testing.assert_allclose(found.bits, expected.bits, rtol=1e-9)


def test_differences_do_not_depend_on_the_order_of_the_scores():
    """Texts and seeds of one variant the other way round."""
    for scores, bits in (
        (made(), lambda some: {v: one.bits for v, one in gpu_page.complete(some).items()}),
        (with_added_seeds([0.4, 0.6, 0.5, 0.51, 0.5, 0.49]),
         lambda some: gpu_page.added_seeds(some).added),
    ):  # fmt: skip
        is_one = [s.run.point == "1x256" for s in scores]
        turned = iter([s for s, one in zip(scores, is_one, strict=True) if one][::-1])
        other = [next(turned) if one else s for s, one in zip(scores, is_one, strict=True)]
        expected = gpu_page.differences(bits(scores))[WHOLE[4]]
        found = gpu_page.differences(bits(other))[WHOLE[4]]
        assert (found.value, found.error) == pytest.approx((expected.value, expected.error))


def test_a_best_rate_at_an_end_is_taken_as_it_is():
    [(_, found)] = gpu_page.complete(made(best_log_rate=2.0, variants=[WHOLE[1]])).items()
    assert (found.interior, found.rate) == (False, pytest.approx(4.0))
    away = 0.02 * (math.log(4) - 2) ** 2
    assert found.bits[0, 0] == pytest.approx(1.7 + 0.01 * 0.3**2 + away + 0.3)


def test_the_best_width_is_the_minimum_of_the_parabola():
    bits = {v: one.bits for v, one in gpu_page.complete(made()).items()}
    best = gpu_page.best_head_dim(bits)
    np.testing.assert_allclose((best.value, best.low, best.high), 5.3, rtol=1e-6)


def test_the_variance_of_a_difference_is_that_of_texts_and_of_seeds():
    """By hand: means of texts 1, 2 and 3 (variance 1); of seeds 1.5 and 2.5 for one variant and
    equal for the other: variance (0.5 + 0) / 2."""
    zero = np.zeros((3, 2))
    one = np.array([[0.5, 1.5], [1.5, 2.5], [2.5, 3.5]])
    found = gpu_page.differences({gpu_page.TUNED: zero, WHOLE[0]: one, WHOLE[1]: zero + 1})
    d, error = found[WHOLE[0]], math.sqrt(1 / 3 + 0.25 / 2)
    assert (d.value, d.error) == pytest.approx((2.0, error))
    assert d.high == pytest.approx(2 + error * stats.t.ppf(0.975, 2))
    assert found[WHOLE[1]].value == 1


def with_added_seeds(differences_of_seeds):
    """Scores without noise between texts: 1x256 differs from 4x64 by these bits in seeds 0 to 5."""
    found = []
    programs = [p for p in gpu_study.programs(FORMULA, 1.0) if p.learning_rate == 2.0][:5]
    for program in [*programs, *gpu_study.seed_programs(FORMULA, 1.0, 2.0)]:
        variant = program.variant
        for seed, text in itertools.product(program.seeds, TEXTS):
            run = ProgramSeed(variant.point, variant.plan, program.learning_rate, seed)
            bits = 2.0 + (differences_of_seeds[seed] if variant == WHOLE[4] else 0.0)
            bits += 0.001 * TEXTS[text] * WHOLE.index(variant)
            sizes = ProgramSizes(1024, 4_790_000, 11_140_000, program.steps)
            found.append(TextScore(run, text, bits, bits, 3.0, 2.5, 2.25, sizes,
                                   ProgramOrigin(1.0, "some GPU", "abc")))  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("later", "conclusion"),
    [([0.5, 0.51, 0.5, 0.49], "confirmed"), ([-0.5, -0.51, -0.5, -0.49], "refuted"),
     ([9.0, -9.0, 9.0, -8.0], "inconclusive")],
)  # fmt: skip
def test_what_two_seeds_foretell_is_judged_on_the_added_ones(later, conclusion):
    found = gpu_page.added_seeds(with_added_seeds([0.4, 0.6, *later]))
    assert {v.point: said for v, (_, said) in found.conclusions.items()}["1x256"] == conclusion
    level = 2.0 + 0.001 * 0.3 * 4
    np.testing.assert_allclose(found.together[WHOLE[4]][0], np.array([0.4, 0.6, *later]) + level)


def test_p_of_a_conclusion_is_that_of_four_variants():
    """By hand, one variant of four differs: means of seeds 1, 2, 3, 2 (variance 2/3, over 12
    degrees of freedom for all four 2/12), no variance of texts; t = 2 / sqrt(2/12/4)."""
    scores = [dataclasses.replace(s, heldout_bits=round(s.heldout_bits, 2))
              for s in with_added_seeds([1, 1, 1, 2, 3, 2])]  # fmt: skip
    p, conclusion = gpu_page.added_seeds(scores).conclusions[WHOLE[4]]
    assert p == pytest.approx(4 * 2 * stats.t.sf(2 / math.sqrt(2 / 12 / 4), 12))
    assert conclusion == "confirmed"


def test_the_text_that_varies_most_between_seeds_is_named():
    """Only on python seeds differ; without it 1x256 is 0.5 worse in every seed."""
    scores = with_added_seeds([0.5] * 6)
    noisy = [dataclasses.replace(s, heldout_bits=s.heldout_bits + 0.2 * s.run.seed)
             if s.text == "python" else s for s in scores]  # fmt: skip
    found = gpu_page.noisiest_text(gpu_page.added_seeds(noisy))
    assert f"`python` vary by {0.2 * np.std(range(6), ddof=1):.3f}" in found["noisy"]
    assert "by 0.000 to 0.000" in found["noisy"]
    assert "1x256 +0.5002 (worse in 6 of 6)" in found["without"]


def test_variants_beside_the_five_widths_leave_the_intervals_of_these_as_they_are():
    random = np.random.default_rng(0)
    bits = {v: random.normal(size=(8, 2)) for v in gpu_study.VARIANTS}
    found, five = gpu_page.compared(bits), {v: bits[v] for v in WHOLE}
    assert {v: found[v] for v in WHOLE if v != gpu_page.TUNED} == gpu_page.compared(five)


def test_nothing_is_judged_before_every_added_seed_is_there():
    scores = with_added_seeds([0.4, 0.6, 0.5, 0.5, 0.5, 0.5])
    lost = [s for s in scores if (s.run.point, s.run.seed) != ("2x128", 4)]
    assert gpu_page.added_seeds(lost) is None
    assert gpu_page.added_seeds(made()) is None


def test_the_page_needs_every_program(tmp_path):
    """The scores of tuning are not judged."""
    added = made(programs=gpu_study.seed_programs(FORMULA, 1.0, 2.0, 0.25))
    scores = made(variants=gpu_study.VARIANTS) + added
    one = scores[0]
    seed, longer = dataclasses.replace(one.run, seed=8), dataclasses.replace(one.sizes, steps=9999)
    tuning = dataclasses.replace(one, run=seed, sizes=longer)
    gpu_page.write_page([*scores, tuning], tmp_path / "new")
    text = (tmp_path / "new" / "gpu.md").read_text()
    assert "heads of 32 have the lowest loss" in text
    assert "gpu=0.25 " in text
    assert (tmp_path / "new" / "gpu.svg").read_text().startswith("<svg")
    lost = [s for s in scores if (s.run.plan, s.run.learning_rate) != ("albert", 2.0)]
    for some in (lost, made(variants=gpu_study.VARIANTS), []):
        with pytest.raises(ValueError, match="all programs"):
            gpu_page.write_page(some, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_page_is_that_of_the_committed_scores():
    check_page(gpu_page.page(gpu_study.read_scores(PUBLISHED / "gpu_runs.csv")), "gpu.md")
