"""The study on one GPU: equal FLOPs, tuned rates, and what was scored is not run again."""

import dataclasses
import math

import pytest

from attnlab.models import flops_per_token, num_parameters
from experiments.studies.head_width import gpu_study
from experiments.studies.head_width.gpu_study import (
    ProgramOrigin,
    ProgramSeed,
    ProgramSizes,
    TextScore,
    append_scores,
    left,
    model_config,
    read_scores,
)
from experiments.studies.head_width.rates import RateFormula, rate_terms

FORMULA = RateFormula(dict.fromkeys(rate_terms(gpu_study.VARIANTS[0], 20.0), 0.0), 0.0, {})


def test_every_variant_has_the_same_flops():
    """2 FLOPs for each weight a token meets and each product with T keys: 6 x 28 D^2 + head."""
    width, length = gpu_study.WIDTH, gpu_study.LENGTH
    expected = 6 * (8 + 4 + 16) * width**2 + 2 * 256 * width
    found = {flops_per_token(model_config(v), length) for v in gpu_study.VARIANTS}
    assert (width, length, found) == (256, 256, {expected})


def test_layers_that_share_all_have_a_sixth_of_their_parameters():
    counts = {v.plan: num_parameters(model_config(v)) for v in gpu_study.VARIANTS[2:]}
    embedding, final_norm = 256 * 256, 2 * 256
    layers = {plan: count - embedding - final_norm for plan, count in counts.items()}
    own = num_parameters(model_config(gpu_study.VARIANTS[2])) - embedding - final_norm
    assert own == 6 * layers["albert"] == 3 * layers["cycle:2"]


def test_rates_surround_the_tuned_one():
    """All coefficients 0: the rate of the formula is exp(0) = 1. Half of it where N h = D alone."""
    programs = gpu_study.programs(FORMULA, multiple=3.0)
    assert len(programs) == 5 * 4 + 3 * 3
    whole, others = ([p.learning_rate for p in programs if p.variant in some]
                     for some in (gpu_study.VARIANTS[:5], gpu_study.VARIANTS[5:]))  # fmt: skip
    assert (whole, others) == (5 * [1.5, 3.0, 6.0, 12.0], 3 * [3.0, 6.0, 12.0])
    assert {p.steps for p in programs} == {round(94e6 / 8192)}


def test_rates_follow_the_bytes_that_are_trained():
    """ln r = -ln(bytes per parameter / 20), so a quarter of the bytes has four times the rate."""
    formula = dataclasses.replace(FORMULA, coefficients=FORMULA.coefficients | {"ln_bytes": -1.0})
    whole, quarter = (gpu_study.programs(formula, 1.0, scale) for scale in (1.0, 0.25))
    for one, other in zip(whole, quarter, strict=True):
        assert other.learning_rate == pytest.approx(4 * one.learning_rate, rel=0.02)


def scores_of(program, bits):
    """The same validation bits on two texts."""
    variant, sizes = program.variant, ProgramSizes(1024, 4_790_000, 11_140_000, program.steps)
    return [
        TextScore(
            ProgramSeed(variant.point, variant.plan, program.learning_rate, seed),
            text, 1.5, bits, 3.0, 2.5, 2.25, sizes, ProgramOrigin(1.0, "cpu", "abc"),
        )
        for text in ("web", "novels")
        for seed in program.seeds
    ]  # fmt: skip


def test_the_multiple_is_the_minimum_of_the_tuning_programs():
    """Bits (log2 r - 2.3)^2 at rates 1, 2, 4, 8 and 16: the minimum is at 2^2.3."""
    wanted = gpu_study.tuning_programs(FORMULA, 0.5)
    assert [p.learning_rate for p in wanted] == [1, 2, 4, 8, 16]
    assert {p.steps for p in wanted} == {round(94e6 / 8192 / 16)}
    scores = []
    for program in wanted:
        assert gpu_study.tuned_multiple(FORMULA, scores, 0.5) is None
        scores += scores_of(program, 2 + (math.log2(program.learning_rate) - 2.3) ** 2)
    assert gpu_study.tuned_multiple(FORMULA, scores, 0.5) == pytest.approx(2**2.3, rel=1e-6)


def test_the_best_factor_is_that_of_the_widths_that_fill_d_together():
    """One variant is best at 1/2 and four are at 2; 6x64 and the sharing plans do not count."""
    wanted = gpu_study.programs(FORMULA, 3.0)
    scores = []
    for program in wanted:
        assert gpu_study.best_factor(FORMULA, 3.0, scores) is None
        best = 1.5 if program.variant == gpu_study.VARIANTS[0] else 6.0
        level = 2.0 if gpu_study.fills_width(program.variant) else -100 * program.learning_rate
        scores += scores_of(program, level + math.log(program.learning_rate / best) ** 2)
        if len(scores) == 4 * 20:
            break
    assert gpu_study.best_factor(FORMULA, 3.0, scores) == 2.0


def test_added_seeds_are_programs_of_their_own():
    added = gpu_study.seed_programs(FORMULA, 3.0, 2.0)
    assert [(p.variant, p.learning_rate) for p in added] == [
        (variant, 6.0) for variant in gpu_study.VARIANTS[:5]
    ]
    assert {p.seeds for p in added} == {(2, 3, 4, 5)}
    first = [p for p in gpu_study.programs(FORMULA, 3.0) if p.learning_rate == 6.0][:5]
    assert not {p.id for p in added} & {p.id for p in first}
    assert left(added, [s for p in first for s in scores_of(p, 2.0)]) == added
    assert left(added, scores_of(added[0], 2.0)) == added[1:]


@pytest.fixture
def score():
    program = gpu_study.programs(FORMULA, 1.0)[3]
    variant = program.variant
    return TextScore(
        ProgramSeed(variant.point, variant.plan, program.learning_rate, 2),
        "web",
        1.25,
        1.5,
        3.0,
        2.5,
        2.25,
        ProgramSizes(1024, 4_790_000, 11_140_000, program.steps),
        ProgramOrigin(12.5, "cpu", "abc"),
    )


def test_scores_are_read_as_they_were_written(tmp_path, score):
    path = tmp_path / "new" / "scores.csv"
    assert read_scores(path) == []
    other = dataclasses.replace(score, run=dataclasses.replace(score.run, seed=3))
    append_scores(path, [score])
    append_scores(path, [other])
    assert read_scores(path) == [score, other]
    assert path.read_text().splitlines()[0] == (
        "point,plan,learning_rate,seed,text,heldout_bits,validation_bits,ngram3,ngram4,ngram5,"
        "ffn_width,parameters,flops_per_token,steps,seconds,device,commit"
    )


def test_a_program_with_scores_of_every_seed_is_not_run_again():
    programs = gpu_study.programs(FORMULA, 1.0)
    scores = scores_of(programs[3], 1.5)
    assert left(programs, scores) == [*programs[:3], *programs[4:]]
    assert left(programs, scores[::2]) == programs
    short = gpu_study.programs(FORMULA, 1.0, 0.001)
    assert left(short, scores) == short
