"""The study on one GPU: equal FLOPs, tuned rates, and what was scored is not run again."""

import dataclasses
import math

import pytest

from attnlab.lab.head_width import gpu_study
from attnlab.lab.head_width.gpu_study import (
    ProgramOrigin,
    ProgramSeed,
    ProgramSizes,
    TextScore,
    append_scores,
    left,
    model_config,
    read_scores,
)
from attnlab.lab.head_width.rates import RateFormula, rate_terms
from attnlab.models import flops_per_token, num_parameters

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
    """All coefficients 0: the rate of the formula is exp(0) = 1."""
    programs = gpu_study.programs(FORMULA, multiple=3.0)
    assert len(programs) == 24
    assert {p.learning_rate for p in programs} == {1.5, 3.0, 6.0}
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
            ProgramSeed(variant.point, variant.plan, program.learning_rate, program.seeds[0]),
            text, 1.5, bits, 3.0, 2.5, 2.25, sizes, ProgramOrigin(1.0, "cpu", "abc"),
        )
        for text in ("web", "novels")
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


def test_a_program_with_scores_is_not_run_again(score):
    programs = gpu_study.programs(FORMULA, 1.0)
    assert left(programs, [score]) == [*programs[:3], *programs[4:]]
    assert left(gpu_study.programs(FORMULA, 1.0, 0.001), [score]) != []
