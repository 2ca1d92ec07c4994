"""The published runs, their budgets and seeds, and the rules for learning rates."""

import dataclasses
import math

import numpy as np
import pandas
import pytest

from attnlab.models import flops_per_token, num_parameters
from experiments.studies.head_width import analysis, design
from experiments.studies.head_width.rates import choose, fit_rates, minima
from experiments.studies.head_width.rows import (
    PUBLISHED,
    append_csv,
    check_complete,
    read_rows,
    runs_of,
)
from experiments.studies.head_width.spec import (
    PARAMETRIZATIONS,
    StudyRun,
    Variant,
    model_config,
    run_spec,
    train_config,
)
from experiments.studies.head_width.test_simulations import ROWS, rows_of

RUN = StudyRun(
    4, 16, stage=0, parametrization="one_rate", text="python", seed=7, learning_rate=0.005
)
GRID = (0.0025, 0.005, 0.01, 0.02)


def test_models_have_the_sizes_of_their_rows_and_equal_flops():
    rows = ROWS.drop_duplicates(["num_heads", "head_dim", "layout", "width", "length", "plan",
                                 "budget", "parametrization"])  # fmt: skip
    for row, run in zip(rows.itertuples(), runs_of(rows), strict=True):
        model = model_config(run, run.parametrization)
        got = model.ffn.width, num_parameters(model), flops_per_token(model, run.length)
        assert (row.ffn_width, row.parameters, row.flops_per_token) == got
        if run.budget == "flops" and run.parametrization != "qk_norm":
            reference = Variant(run.width // 16, 16, width=run.width, length=run.length)
            assert got[2] == flops_per_token(model_config(reference), run.length)


def test_seeds_are_the_same_for_every_variant_and_not_those_of_tuning():
    counts = ROWS.groupby("stage").size().to_dict()
    assert counts == {0: 97, 1: 247, 2: 176, 3: 208, 4: 56, 5: 64, 6: 28}
    assert all(counts[stage] >= one.planned for stage, one in design.STAGES.items())
    judged, tuning = ROWS[ROWS["stage"] >= 2], ROWS[ROWS["stage"] < 2]
    assert not set(judged["seed"]) & set(tuning["seed"])
    assert set(judged.groupby("seed")[["width", "text"]].nunique().to_numpy().ravel()) == {1}
    third = ROWS[ROWS["stage"] == 3].groupby(["num_heads", "head_dim", "layout", "text"])["seed"]
    assert set(third.nunique()) == {2}


def test_runs_are_judged_beside_the_rates_of_the_formula():
    """By the parametrization that stage 0 chooses, at 0.8 or 1.25 times the rate, half of each."""
    rows = ROWS[ROWS["stage"] >= 1]
    [name] = set(rows["parametrization"])
    stage0 = ROWS[ROWS["stage"] == 0]
    assert choose(stage0, list(PARAMETRIZATIONS), design.TOLERANCE)[0] == name
    frame = analysis.columns(rows[rows["stage"] >= 2], fit_rates(rows[rows["stage"] == 1]))
    sides = frame["tuning"].abs() - math.log(1.25)
    assert sides.abs().max() < analysis.ROUNDING
    assert (frame["tuning"][frame["stage"] == 3] < 0).mean() == 0.5


def test_the_training_of_a_run():
    config, spec = train_config(RUN), run_spec(RUN, "data")
    assert (config.steps, config.batch_size, config.schedule.warmup_steps) == (1920, 16, 96)
    assert config.schedule.final_learning_rate == RUN.learning_rate / 10
    assert (spec.id, spec.seed) == (RUN.id, RUN.seed)
    assert {**spec.tags, "seed": spec.seed} == dataclasses.asdict(RUN)


def test_nothing_is_judged_before_the_stages_are_complete():
    last = ROWS[ROWS["stage"] == 3].index[-1]
    check_complete(ROWS)
    with pytest.raises(ValueError, match="57 are missing"):
        check_complete(ROWS[ROWS["stage"] != 4].drop(index=last))


def parabola(best, level=2.0, **changes):
    runs = [dataclasses.replace(RUN, learning_rate=rate, **changes) for rate in GRID]
    return rows_of(runs, [level + 0.05 * math.log(rate / best) ** 2 for rate in GRID])


def test_the_minimum_of_a_parabola_is_found():
    [found] = minima(parabola(0.007)[::-1]).itertuples()
    np.testing.assert_allclose(
        [math.exp(found.log_rate), found.bits, found.curvature], [0.007, 2, 0.05], rtol=1e-9
    )
    assert found.interior
    [low] = minima(parabola(0.001)).itertuples()
    assert (low.log_rate, low.interior) == (math.log(0.0025), False)


def test_diverged_runs_are_worst():
    rows = parabola(0.1)
    rows["validation_bits"] = [*rows["validation_bits"][:3], math.inf]
    [found] = minima(rows).itertuples()
    assert (found.interior, found.bits) == (True, rows["validation_bits"][2])


def test_the_choice_of_stage_0():
    """The smallest range of rates among those within the tolerance of the lowest score; held-out
    scores choose nothing."""
    best = {"one_rate": (2.000, 0.010, 0.005), "fan_in": (2.009, 0.010, 0.008),
            "qk_norm": (2.012, 0.010, 0.010)}  # fmt: skip
    rows = pandas.concat([
        parabola(rate, level, head_dim=h, parametrization=name)
        for name, (level, *rates) in best.items()
        for h, rate in zip((16, 64), rates, strict=True)
    ]).assign(heldout_bits=9.0)  # fmt: skip
    chosen, found = choose(rows, list(best), 0.010)
    assert chosen == "fan_in"
    assert found["one_rate"] == pytest.approx((2.0, math.log(2)))
    assert choose(rows, list(best), 0.020)[0] == "qk_norm"
    assert choose(rows, list(best), 0.001)[0] == "one_rate"


def test_rows_come_back_the_same_and_once(tmp_path):
    path = tmp_path / "results/runs.csv"
    runs = [dataclasses.replace(RUN, learning_rate=rate) for rate in (0.1 + 0.2, 1e-3)]
    rows = rows_of(runs, [1.7, math.inf])
    append_csv(path, rows[:1])
    append_csv(path, rows[1:])
    assert read_rows(path).equals(rows)
    assert runs_of(read_rows(path)) == runs
    append_csv(path, rows[:1].assign(heldout_bits=9.0))
    with pytest.raises(ValueError, match=r"line 4 .* second time"):
        read_rows(path)
    path.write_text(path.read_text().replace("ngram3", "trigram"))
    with pytest.raises(ValueError, match="other columns"):
        read_rows(path)


def test_a_published_file_is_read_and_written_byte_by_byte():
    assert ROWS.to_csv(index=False) == (PUBLISHED / "runs.csv").read_text()
