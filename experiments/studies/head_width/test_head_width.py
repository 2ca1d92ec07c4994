"""The head-width study's stages: budgets, counts, seeds, rates; the table of its plan."""

import itertools
import math
import re

import pytest
from conftest import ROOT
from study_rows import of_spec

from attnlab.models import flops_per_token, num_parameters
from experiments.studies.head_width import config, design
from experiments.studies.head_width.spec import Variant, model_config, num_steps, train_config

PLAN = (ROOT / "docs/results/head_width/plan.md").read_text()
VARIANTS = [Variant(n, h, width=d) for d, points in design.POINTS.items() for n, h in points]
VARIANTS += [Variant(n, h, "narrow") for n, h in design.NARROW]


def test_flops_are_equal_and_as_the_plan_says():
    table = re.findall(r"^\| (32|64|96) \| ([^|]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$",
                       PLAN, re.MULTILINE)  # fmt: skip
    found = {}
    for d, points, *numbers in table:
        names = re.findall(r"\d+x\d+(?: narrow)?", points)
        columns = [[int(n.replace(",", "")) for n in cell.split(", ")] for cell in numbers]
        for i, name in enumerate(names):
            values = tuple(column[min(i, len(column) - 1)] for column in columns)
            found[int(d), name.replace(" ", "-")] = values
    assert len(found) == len(VARIANTS)
    for v in VARIANTS:
        model = model_config(v)
        got = model.ffn.width, num_parameters(model), flops_per_token(model, 128)
        assert found[v.width, v.point] == got
        assert got[2] == flops_per_token(
            model_config(Variant(v.width // 16, 16, width=v.width)), 128
        )


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 16), (2, 64), (4, 64)])
def test_twice_the_attention_width_is_over_the_budget(heads, head_dim):
    with pytest.raises(ValueError, match="costs more flops"):
        model_config(Variant(heads, head_dim))


def test_counts_of_the_plan():
    counts = {s: len(design.expected_runs(s)) for s in (*design.ORDER, 7)}
    assert counts == {0: 96, 1: 205, 2: 176, 3: 208, 4: 56, 5: 64, 6: 28, 7: 32}


def test_stage_7_is_more_seeds_of_stage_3():
    third = {(r.variant, r.text, design.judged_seed(r)) for r in design.planned(3)}
    seventh = {(r.variant, r.text, design.judged_seed(r)) for r in design.planned(7)}
    assert not third & seventh
    assert {v for v, _, _ in seventh} == {Variant(4, 16), Variant(2, 32)}


def test_seeds_of_tuning_and_judging_differ():
    judged = {design.judged_seed(r) for s in range(2, 8) for r in design.planned(s)}
    tuning = {
        design.tuning_seed(s, text, d)
        for s, text, d in itertools.product((0, 1), design.ALL_TEXTS, (32, 64))
    }
    assert len(tuning) == 32
    assert not judged & tuning
    of_text = {(r.text, design.judged_seed(r)) for r in design.planned(3)}
    assert len(of_text) == len({seed for _, seed in of_text}) == 16


def test_training_of_a_run():
    spec = design.stage0([])[0]
    config = train_config(spec)
    assert (num_steps(spec), config.batch_size, config.schedule.warmup_steps) == (1920, 16, 96)
    assert config.schedule.final_learning_rate == spec.learning_rate / 10
    lengths = {r.variant.length for r in design.planned(6)}
    assert lengths == {64, 128, 256}


def bits_of(spec):
    """Best at 0.008 / sqrt(h / 16); fan_in is best by 0.02 and does not depend on h."""
    best = (
        0.008 if spec.parametrization == "fan_in" else 0.008 * (16 / spec.variant.head_dim) ** 0.5
    )
    level = 1.98 if spec.parametrization == "fan_in" else 2.0
    return level + 0.05 * math.log(spec.learning_rate / best) ** 2


def run_all(stage, rows):
    """What the command does: runs until the stage asks for no more."""
    while True:
        done = {row.spec.id for row in rows}
        left = [s for s in design.stage_runs(stage, rows) if s.id not in done]
        if not left:
            return rows
        rows = rows + [of_spec(spec, bits_of(spec)) for spec in left]


def test_stages_follow_from_rows():
    with pytest.raises(design.NotReady):
        design.stage_runs(1, [])
    rows = run_all(0, [])
    assert design.chosen_parametrization(rows) == "fan_in"
    with pytest.raises(design.NotReady):
        design.stage_runs(3, rows)
    rows = run_all(1, rows)
    first = [row.spec for row in rows if row.spec.stage == 1]
    assert {spec.parametrization for spec in first} == {"fan_in"}
    specs = design.stage_runs(3, rows)
    assert {round(spec.learning_rate, 5) for spec in specs} == {0.0064, 0.01}
    sides = {}
    for spec in specs:
        sides.setdefault(spec.variant, []).append(spec.learning_rate < 0.008)
    assert all(sum(low) == len(low) / 2 for low in sides.values())


def test_a_cell_gets_two_more_rates_at_most():
    rows = run_all(0, [])
    low = lambda spec: spec.parametrization == "one_rate" and spec.text == "python"
    always = [of_spec(r.spec, r.spec.learning_rate if low(r.spec) else r.scores.validation_bits)
              for r in rows if r.spec in design.stage0([])]  # fmt: skip
    while True:
        done = {row.spec.id for row in always}
        left = [s for s in design.stage0(always) if s.id not in done]
        if not left:
            break
        always += [of_spec(s, s.learning_rate if low(s) else bits_of(s)) for s in left]
    rates = sorted(
        r.spec.learning_rate for r in always if low(r.spec) and r.spec.variant == Variant(4, 16)
    )
    assert rates == [0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02]


def test_presets():
    assert config.get_config("stage=3").stages == (3,)
    assert config.get_config().stages == design.ORDER
    assert config.get_config("tiny").stages == (-1,)
    for arg in ("stage=9", "stages"):
        with pytest.raises(ValueError, match=r"unknown (stage|preset)"):
            config.get_config(arg)
