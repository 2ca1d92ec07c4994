"""The stages, their budgets, counts and seeds as in the plan, and the rules for learning rates."""

import dataclasses
import math
import re

import numpy as np
import pandas
import pytest
from pandas import DataFrame

from attnlab.models import flops_per_token, num_parameters
from experiments.studies.head_width import design
from experiments.studies.head_width.rates import choose, fit_rates, minima, next_rate
from experiments.studies.head_width.rows import COLUMNS, append_csv, read_rows, runs_of
from experiments.studies.head_width.simulated import (
    PLAN,
    PUBLISHED,
    bits_of,
    complete,
    rows_of,
    study_rows,
)
from experiments.studies.head_width.spec import (
    StudyRun,
    Variant,
    model_config,
    run_spec,
    train_config,
)

EMPTY = DataFrame(columns=COLUMNS)
GRID = (0.0025, 0.005, 0.01, 0.02)


def test_models_have_the_sizes_of_the_plan_and_equal_flops():
    table = re.findall(r"^\| (32|64|96) \| ([^|]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$",
                       PLAN, re.MULTILINE)  # fmt: skip
    found = {}
    for d, points, *numbers in table:
        columns = [[int(n.replace(",", "")) for n in cell.split(", ")] for cell in numbers]
        for i, name in enumerate(re.findall(r"\d+x\d+(?: narrow)?", points)):
            values = tuple(column[min(i, len(column) - 1)] for column in columns)
            found[int(d), name.replace(" ", "-")] = values
    variants = [Variant(n, h, width=d) for d, points in design.POINTS.items() for n, h in points]
    variants += [Variant(n, h, "narrow") for n, h in design.NARROW]
    assert len(found) == len(variants)
    for v in variants:
        model = model_config(v)
        got = model.ffn.width, num_parameters(model), flops_per_token(model, 128)
        assert found[v.width, v.point] == got
        assert got[2] == flops_per_token(
            model_config(Variant(v.width // 16, 16, width=v.width)), 128
        )


def test_counts_and_seeds_of_the_plan():
    counts = {s: design.count_runs(s) for s in (*design.ORDER, 7)}
    assert counts == {0: 96, 1: 205, 2: 176, 3: 208, 4: 56, 5: 64, 6: 28, 7: 32}
    judged = {run.seed for stage in range(2, 8) for run in design.planned(stage)}
    tuning = {design.tuning_seed(s, text, d)
              for s in (0, 1) for text in design.ALL_TEXTS for d in (32, 64)}  # fmt: skip
    assert len(tuning) == 32
    assert not judged & tuning
    third, seventh = (
        {(r.variant, r.text, r.seed) for r in design.planned(stage)} for stage in (3, 7)
    )
    assert not third & seventh
    of_text = {(text, seed) for _, text, seed in third}
    assert len(of_text) == len({seed for _, seed in of_text}) == 16


def test_the_published_rows_are_those_of_the_design():
    """The same runs, learning rates and seeds follow from the rows of stages 0 and 1."""
    rows = read_rows(PUBLISHED / "runs.csv")
    design.check_complete(rows)
    wanted = [run for stage in design.ORDER for run in design.stage_runs(stage, rows)]
    assert set(wanted) == set(runs_of(rows))


def test_the_training_of_a_run():
    run = design.stage0(EMPTY)[0]
    config, spec = train_config(run), run_spec(run, "data")
    assert (config.steps, config.batch_size, config.schedule.warmup_steps) == (1920, 16, 96)
    assert config.schedule.final_learning_rate == run.learning_rate / 10
    assert (spec.id, spec.seed) == (run.id, run.seed)
    assert {**spec.tags, "seed": spec.seed} == run.fields


def test_stages_follow_from_rows():
    with pytest.raises(design.NotReady):
        design.stage_runs(1, EMPTY)
    rows = complete(0, EMPTY)
    assert design.chosen_parametrization(rows) == "fan_in"
    with pytest.raises(design.NotReady):
        design.stage_runs(3, rows)
    rows = complete(1, rows)
    first = rows[rows["stage"] == 1]
    assert set(first["parametrization"]) == {"fan_in"}
    sides = {}
    for run in design.stage_runs(3, rows):
        assert round(run.learning_rate, 5) in (0.0064, 0.01)
        sides.setdefault(run.variant, []).append(run.learning_rate < 0.008)
    assert all(sum(low) == len(low) / 2 for low in sides.values())


def test_nothing_is_judged_before_the_stages_are_complete():
    rows = study_rows((2, 3, 5, 6))
    last = rows[rows["stage"] == 3].index[-1]
    with pytest.raises(ValueError, match="1 of stage 3, 56 of stage 4"):
        design.check_complete(rows.drop(index=last))


def test_a_cell_gets_two_more_rates_at_most():
    """Where lower is always better."""
    low = lambda run: run.parametrization == "one_rate" and run.text == "python"
    rows = complete(0, EMPTY, lambda run: run.learning_rate if low(run) else bits_of(run))
    rates = sorted(run.learning_rate for run in runs_of(rows)
                   if low(run) and run.variant == Variant(4, 16))  # fmt: skip
    assert rates == [0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02]


def parabola(best, level=2.0, k=0.05, grid=GRID, variant=Variant(4, 16), name="one_rate",  # noqa: B008
             text="python"):  # fmt: skip
    runs = [StudyRun(0, variant, name, text, 1, rate) for rate in grid]
    return rows_of(runs, [level + k * math.log(rate / best) ** 2 for rate in grid])


def test_the_minimum_of_a_parabola_is_found():
    [found] = minima(parabola(0.007)[::-1]).itertuples()
    np.testing.assert_allclose(
        [math.exp(found.log_rate), found.bits, found.curvature], [0.007, 2, 0.05], rtol=1e-9
    )
    assert found.interior


def test_a_grid_that_does_not_bracket_gets_one_more_rate():
    bits = lambda best: minima(parabola(best))["tried"][0]
    assert math.isnan(next_rate(bits(0.007), 2))
    assert next_rate(bits(0.001), 2) == 0.00125
    assert next_rate(bits(0.1), 2) == 0.04
    [low] = minima(parabola(0.001)).itertuples()
    assert (low.log_rate, low.interior) == (math.log(0.0025), False)


def test_diverged_runs_are_worst():
    rows = parabola(0.1)
    rows["validation_bits"] = [*rows["validation_bits"][:3], math.inf]
    [found] = minima(rows).itertuples()
    assert (found.interior, found.bits) == (True, rows["validation_bits"][2])
    assert math.isnan(next_rate(found.tried, 2))


def test_the_choice_of_stage_0():
    """The smallest range of rates among those within the tolerance of the lowest score; held-out
    scores choose nothing."""
    best = {"one_rate": (2.000, 0.010, 0.005), "fan_in": (2.009, 0.010, 0.008),
            "qk_norm": (2.012, 0.010, 0.010)}  # fmt: skip
    rows = pandas.concat([
        parabola(rate, level, variant=variant, name=name, text=text)
        for name, (level, *rates) in best.items()
        for text in ("python", "wikitext2")
        for variant, rate in zip((Variant(4, 16), Variant(1, 64)), rates, strict=True)
    ]).assign(heldout_bits=9.0)  # fmt: skip
    chosen, found = choose(rows, list(best), 0.010)
    assert chosen == "fan_in"
    assert found["one_rate"] == pytest.approx((2.0, math.log(2)))
    assert choose(rows, list(best), 0.020)[0] == "qk_norm"
    assert choose(rows, list(best), 0.001)[0] == "one_rate"


def test_the_rate_formula_is_found_again():
    """Of cells that follow it exactly; terms that no cell has are 0."""
    every = []
    for width, points in ((32, ((8, 4), (2, 16), (4, 4))), (64, ((8, 8), (1, 64), (3, 32)))):
        for n, h in points:
            best = 0.02 * h**-0.3 * n**-0.2 * (width / 64) ** -0.5
            grid = best * np.array([0.5, 1, 2])
            every.append(parabola(best, grid=grid, variant=Variant(n, h, width=width)))
    formula = fit_rates(pandas.concat(every))
    assert formula.residual_sd < 1e-9
    assert formula.coefficients["ln_head_dim"] == pytest.approx(-0.3)
    assert formula.coefficients["albert"] == pytest.approx(0, abs=1e-9)
    [rate] = formula.rates(DataFrame([StudyRun(0, Variant(4, 16), "", "", 0, 0.0).fields]))
    assert rate == pytest.approx(0.02 * 16**-0.3 * 4**-0.2, rel=0.005)


def test_rows_come_back_the_same_and_once(tmp_path):
    path = tmp_path / "results/runs.csv"
    run = design.tiny_runs()[0]
    runs = [dataclasses.replace(run, learning_rate=rate) for rate in (0.1 + 0.2, 1e-3)]
    rows = rows_of(runs, [1.7, math.inf])
    append_csv(path, rows[:1])
    append_csv(path, rows[1:])
    assert read_rows(path).equals(rows)
    assert runs_of(read_rows(path)) == runs
    append_csv(path, rows[:1])
    with pytest.raises(ValueError, match="twice"):
        read_rows(path)
    path.write_text(path.read_text().replace("ngram3", "trigram"))
    with pytest.raises(ValueError, match="other columns"):
        read_rows(path)


def test_a_published_file_is_read_and_written_byte_by_byte():
    path = PUBLISHED / "runs.csv"
    assert read_rows(path).to_csv(index=False) == path.read_text()
