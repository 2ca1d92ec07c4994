"""Rules of the plan on rows whose minima are known."""

import math

import numpy as np
import pytest
from study_rows import make_row

from experiments.studies.head_width.rates import cells_of, choose, fit_rates, minimum, next_rate
from experiments.studies.head_width.spec import Variant

GRID = (0.0025, 0.005, 0.01, 0.02)


def parabola(best, level=2.0, k=0.05, grid=GRID, **spec):
    return [make_row(r, level + k * math.log(r / best) ** 2, **spec) for r in grid]


def test_the_minimum_of_a_parabola_is_found():
    found = minimum(parabola(0.007)[::-1])
    np.testing.assert_allclose(
        [math.exp(found.log_rate), found.bits, found.curvature], [0.007, 2, 0.05], rtol=1e-9
    )
    assert found.interior


def test_a_grid_that_does_not_bracket_gets_one_more_rate():
    assert next_rate(parabola(0.007), 2) is None
    assert next_rate(parabola(0.001), 2) == 0.00125
    assert next_rate(parabola(0.1), 2) == 0.04
    low = minimum(parabola(0.001))
    assert (low.log_rate, low.interior) == (math.log(0.0025), False)


def test_diverged_runs_are_worst():
    rows = [*parabola(0.1)[:3], make_row(0.02, float("inf"))]
    found = minimum(rows)
    assert found.interior
    assert found.bits == rows[2].scores.validation_bits
    assert next_rate(rows, 2) is None


def of_parametrization(name, level, rates):
    variants = [Variant(4, 16), Variant(1, 64)]
    return [
        row
        for text in ("python", "wikitext2")
        for variant, rate in zip(variants, rates, strict=True)
        for row in parabola(rate, level, variant=variant, name=name, text=text)
    ]


def test_the_choice_of_stage_0():
    """The smallest range of rates among those within the tolerance of the lowest score."""
    rows = [
        *of_parametrization("one_rate", 2.000, (0.010, 0.005)),
        *of_parametrization("fan_in", 2.009, (0.010, 0.008)),
        *of_parametrization("qk_norm", 2.012, (0.010, 0.010)),
    ]
    names = ("one_rate", "fan_in", "qk_norm")
    chosen, found = choose(rows, names, 0.010)
    assert chosen == "fan_in"
    assert found["one_rate"] == pytest.approx((2.0, math.log(2)))
    assert choose(rows, names, 0.020)[0] == "qk_norm"
    assert choose(rows, names, 0.001)[0] == "one_rate"


def test_held_out_scores_choose_nothing():
    import dataclasses

    rows = of_parametrization("one_rate", 2.0, (0.01, 0.005))
    lie = [
        dataclasses.replace(r, scores=dataclasses.replace(r.scores, heldout_bits=9.0)) for r in rows
    ]
    assert choose(rows, ["one_rate"], 0.01) == choose(lie, ["one_rate"], 0.01)


def test_the_rate_formula_is_found_again():
    """Of cells that follow it exactly; terms that no cell has are 0."""
    rows = []
    for width, points in ((32, ((8, 4), (2, 16), (4, 4))), (64, ((8, 8), (1, 64), (3, 32)))):
        for n, h in points:
            best = 0.02 * h**-0.3 * n**-0.2 * (width / 64) ** -0.5
            rows += parabola(
                best, grid=best * np.array([0.5, 1, 2]), variant=Variant(n, h, width=width)
            )
    formula = fit_rates(rows)
    assert len(cells_of(rows)) == 6
    assert formula.residual_sd < 1e-9
    assert formula.coefficients["ln_head_dim"] == pytest.approx(-0.3)
    assert formula.coefficients["albert"] == pytest.approx(0, abs=1e-9)
    expected = 0.02 * 16**-0.3 * 4**-0.2
    assert formula.rate(Variant(4, 16), 20) == pytest.approx(expected, rel=0.005)
