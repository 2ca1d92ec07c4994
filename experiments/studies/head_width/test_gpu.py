"""The study at D = 256: equal FLOPs, tuned rates, paired differences and the best width."""

import itertools
import math

import numpy as np
import pytest
from pandas import DataFrame
from scipy import stats

from attnlab.models import flops_per_token
from experiments.studies.head_width import gpu, gpu_page
from experiments.studies.head_width.rows import PUBLISHED
from experiments.studies.head_width.spec import Variant

WHOLE, TUNED, STEPS = gpu.VARIANTS[:5], gpu.TUNED, 2869
TEXTS = {"web": 0.3, "novels": -0.1, "python": 0.0}
SCORES = gpu.read_scores(PUBLISHED)
PROGRAMS = [gpu.Program(v, rate, STEPS, gpu.SEEDS) for rate in gpu.FACTORS for v in WHOLE]
ADDED = [gpu.Program(v, 2.0, STEPS, gpu.ADDED_SEEDS) for v in WHOLE]


def scores_of(some, heldout, validation=None):
    """Rows of programs: bits are functions of (program, text, seed)."""
    validation = validation or heldout
    lines = [
        (p.variant.point, p.variant.plan, p.learning_rate, seed, text, heldout(p, text, seed),
         validation(p, text, seed), 3.0, 2.5, 2.25, 1024, 4_790_000, 11_140_000, p.steps, 1.0,
         "some GPU", "abc")
        for p in some
        for seed, text in itertools.product(p.seeds, TEXTS)
    ]  # fmt: skip
    return DataFrame(lines, columns=gpu.COLUMNS)


def made(best_log_rate=0.2, best_log_h=5.3):
    """Scores without noise: a parabola in ln r for each variant, and one in log2 h."""

    def bits(program, text="python", seed=0):
        away = 0.02 * (math.log(program.learning_rate) - best_log_rate) ** 2
        level = 1.7 + 0.01 * (math.log2(program.variant.head_dim) - best_log_h) ** 2
        return level + away + TEXTS[text] + 0.01 * seed

    return scores_of(PROGRAMS, bits, lambda program, text, seed: bits(program))


def at_best_rate(scores, variant=WHOLE[1]):
    return gpu_page.tuned(gpu_page.of_variant(scores, variant))


# The programs -------------------------------------------------------------------------------------


def test_every_variant_has_the_same_flops():
    """2 FLOPs for each weight a token meets and each product with T keys: 6 x 28 D^2 + head."""
    expected = 6 * (8 + 4 + 16) * 256**2 + 2 * 256 * 256
    assert {flops_per_token(gpu.model_config(v), 256) for v in gpu.VARIANTS} == {expected}


def test_the_published_programs():
    """29 of two seeds, those of the five widths at one rate of four more; a seed that is lacking is
    trained again."""
    programs = gpu.missing(SCORES[:0])
    judged = [p for p in programs if p.seeds != gpu.TUNING_SEEDS]
    assert len(judged) == 5 * 4 + 3 * 3
    assert {p.steps for p in judged} == {STEPS}
    six = [p for p in judged if p.seeds == (*gpu.SEEDS, *gpu.ADDED_SEEDS)]
    assert [p.variant for p in six] == list(WHOLE)
    assert {p.seeds for p in judged if p not in six} == {gpu.SEEDS}
    assert {p.variant for p in programs if p not in judged} == {TUNED}
    assert gpu.missing(SCORES) == []
    [lost] = gpu.missing(SCORES[~((SCORES["plan"] == "albert") & (SCORES["seed"] == 1)
                                  & (SCORES["learning_rate"] > 0.009))])  # fmt: skip
    assert (lost.variant.plan, lost.seeds) == ("albert", (1,))
    assert {p.steps for p in gpu.missing(SCORES[:0], 0.01)} <= {*range(2, 30)}


def test_the_published_file_is_read_and_written_byte_by_byte():
    assert SCORES.to_csv(index=False) == (PUBLISHED / "gpu_runs.csv").read_text()


@pytest.mark.slow
def test_seeds_are_trained_in_one_program_and_become_rows(shared_data):
    """A tiny model: both seeds have scores of their own on every text; infinite ones at a rate at
    which it diverges."""
    program = gpu.Program(Variant(1, 16, width=16, length=gpu.LENGTH), 0.01, 2, (0, 1))
    scores = gpu.train(program, shared_data, "abc", 1e-6)
    assert [len(set(scores[name])) for name in ("seed", "text")] == [2, 8]
    assert scores["heldout_bits"].between(5, 9).all()
    assert scores["heldout_bits"].nunique() == 16
    assert scores["ngram3"].nunique() == 8
    diverged = gpu.train(program._replace(learning_rate=1e38), shared_data, "abc", 1e-6)
    assert set(diverged["heldout_bits"]) == set(diverged["validation_bits"]) == {math.inf}


# The page -----------------------------------------------------------------------------------------


def test_a_variant_is_scored_at_its_best_rate():
    found = at_best_rate(made())
    assert found.best.interior
    assert found.rate == pytest.approx(math.exp(0.2), rel=1e-6)
    level = 1.7 + 0.01 * (5 - 5.3) ** 2
    expected = [[level + t, level + t + 0.01] for t in TEXTS.values()]
    np.testing.assert_allclose(found.bits, expected, rtol=1e-9)


def test_a_best_rate_at_an_end_is_taken_as_it_is():
    found = at_best_rate(made(best_log_rate=2.0))
    assert (found.best.interior, found.rate) == (False, pytest.approx(4.0))
    away = 0.02 * (math.log(4) - 2) ** 2
    assert found.bits.iloc[0, 0] == pytest.approx(1.7 + 0.01 * 0.3**2 + away + 0.3)


def test_the_best_width_is_the_minimum_of_the_parabola():
    best = gpu_page.best_head_dim({v: at_best_rate(made(), v).bits for v in WHOLE})
    np.testing.assert_allclose((best.value, best.low, best.high), 5.3, rtol=1e-6)


def test_the_variance_of_a_difference_is_that_of_texts_and_of_seeds():
    """By hand: means of texts 1, 2 and 3 (variance 1); of seeds 1.5 and 2.5 for one variant and
    equal for the other: variance (0.5 + 0) / 2."""
    zero = DataFrame(np.zeros((3, 2)))
    one = DataFrame([[0.5, 1.5], [1.5, 2.5], [2.5, 3.5]])
    found = gpu_page.differences({TUNED: zero, WHOLE[0]: one, WHOLE[1]: zero + 1})
    d, error = found[WHOLE[0]], math.sqrt(1 / 3 + 0.25 / 2)
    assert (d.value, d.error) == pytest.approx((2.0, error))
    assert d.high == pytest.approx(2 + error * stats.t.ppf(0.975, 2))
    assert found[WHOLE[1]].value == 1


def with_added_seeds(differences_of_seeds):
    """Scores without noise between texts: 1x256 differs from 4x64 by these bits in seeds 0 to 5."""
    first = [p for p in PROGRAMS if p.learning_rate == 2.0]
    of_seed = lambda p, seed: differences_of_seeds[seed] if p.variant == WHOLE[4] else 0.0
    return scores_of([*first, *ADDED], lambda p, text, seed: 2.0 + of_seed(p, seed))


@pytest.mark.parametrize(
    ("later", "conclusion"),
    [([1, 2, 3, 2], "confirmed"), ([-1, -2, -3, -2], "refuted"), ([9, -9, 9, -8], "inconclusive")],
)
def test_what_two_seeds_foretell_is_judged_on_the_added_ones(later, conclusion):
    """By hand, one variant of four differs: variance of the means of its four seeds (2/3 of the
    first), over 12 degrees of freedom for all four, no variance of texts."""
    found = gpu_page.added_seeds(with_added_seeds([0.4, 0.6, *later]))
    np.testing.assert_allclose(found[WHOLE[4]].iloc[0], np.array([0.4, 0.6, *later]) + 2)
    p, said = gpu_page.conclusions(found)[WHOLE[4]]
    error = math.sqrt(3 * np.var(later, ddof=1) / 12 / 4)
    assert p == pytest.approx(min(1, 4 * 2 * stats.t.sf(abs(np.mean(later)) / error, 12)))
    assert said == conclusion


def test_nothing_is_judged_before_every_program_has_scores():
    lost = SCORES[(SCORES["plan"] != "albert") | (SCORES["learning_rate"] < 0.009)]
    without_seed = SCORES[(SCORES["point"] != "2x128") | (SCORES["seed"] != 4)]
    for some in (lost, without_seed, SCORES[:0]):
        with pytest.raises(ValueError, match="all programs"):
            gpu_page.page(some)
