"""match=seconds: measured once, before the first arm, and then a number like any other."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from written_arms import undrawn, write_arm, written

from experiments.configs import heads_and_sharing
from experiments.running import arm, clock, workdir

__all__ = ["undrawn"]


@pytest.fixture
def configs():
    base = heads_and_sharing.get_config("tiny,match=seconds")
    made = {}
    for layout in ("standard", "wide"):
        made[layout] = base.copy_and_resolve_references()
        made[layout].model.heads.layout = layout
    return made


def line(start, slope, noise=0.0, seed=0):
    """Seconds over the reference's, of an arm whose FFN costs `slope` a unit."""
    draw = np.random.default_rng(seed)
    return lambda width: clock.Ratio(
        width, start + slope * width + noise * draw.standard_normal(), 0.0, 0.0, 1.0, 9
    )


@pytest.mark.parametrize("first", [100, 300, 4000])
def test_the_width_of_equal_seconds_is_found(first):
    tried = clock.solve("arm", line(0.4, 0.002), first)
    assert tried[-1].ffn_width == 300
    assert len(tried) <= 3


def test_it_is_found_within_the_noise_of_the_measurement():
    """95 of 100 draws within 5 %, where each ratio has an error of 1 %."""
    ends = []
    for seed in range(100):
        tried = clock.solve("arm", line(0.4, 0.002, 0.01, seed), 700)
        ends.append(min(tried, key=lambda one: abs(one.ratio - 1)).ffn_width)
    true = 0.4 + 0.002 * np.array(ends)
    assert (np.abs(true - 1) < 0.05).sum() >= 95


def test_an_arm_that_is_slower_without_a_feed_forward_part_is_told():
    with pytest.raises(ValueError, match=r"wide.*at ffn_width 1 .* 1\.20 times.*larger ffn_width"):
        clock.solve("wide", line(1.2, 0.001), 500)


def test_seconds_that_no_width_changes_are_refused():
    with pytest.raises(ValueError, match=r"no ffn_width took.*busy"):
        clock.solve("arm", lambda width: clock.Ratio(width, 0.5, 0.0, 0.0, 1.0, 9), 500)


def test_it_is_measured_once_and_then_read(tmp_path, monkeypatch, configs):
    asked = []

    def measure(what):
        asked.append(what)
        one = {"ffn_width": 77, "ratio": 1.0123}
        return {"environment": {}, "found": dict.fromkeys(what["arms"], one)}

    monkeypatch.setattr(clock, "_elsewhere", measure)
    with pytest.raises(ValueError, match=r"calibration\.json is missing.*--calibrate_only"):
        clock.changes(configs, tmp_path / "sweep", 1, measures=False)
    assert not (tmp_path / "sweep").exists()
    first = clock.changes(configs, tmp_path / "sweep", 1, measures=True)
    again = clock.changes(configs, tmp_path / "sweep", 2, measures=False)
    assert first == again
    assert first["wide"] == {"model.ffn.width": 77, "match.budget": "seconds:1.012"}
    assert [what["threads"] for what in asked] == [1]
    with workdir.own(tmp_path / "sweep"):  # a folder that holds this alone is still a sweep's
        workdir.claim(tmp_path / "sweep", {"arms": {}, "environment": {}})
    configs["wide"].model.heads.num_heads = 1
    with pytest.raises(
        ValueError, match=r"other arms:\n  wide\.model\.heads\.num_heads: there 2, here 1"
    ):
        clock.changes(configs, tmp_path / "sweep", 1, measures=True)


def test_who_waited_for_another_measurement_reads_it(tmp_path, monkeypatch, configs):
    """Another sweep on the folder measures between our look at it and our lock."""
    one = {"ffn_width": 77, "ratio": 1.0}
    arms = {name: config.to_dict() for name, config in configs.items()}
    theirs = {"arms": arms, "environment": {}, "found": dict.fromkeys(arms, one)}
    own = workdir.own

    def after_another(folder, **options):
        workdir.write_json(folder / workdir.CALIBRATION, theirs)
        return own(folder, **options)

    (tmp_path / "sweep").mkdir()
    monkeypatch.setattr(workdir, "own", after_another)
    monkeypatch.setattr(clock, "_elsewhere", lambda asked: pytest.fail("measured again"))
    found = clock.changes(configs, tmp_path / "sweep", 1, measures=True)
    assert found["wide"]["model.ffn.width"] == 77


def test_all_arms_of_a_sweep_ask_for_seconds_or_none(tmp_path, configs):
    configs["wide"].match.budget = "flops"
    with pytest.raises(ValueError, match="wide: match=seconds is for all arms"):
        clock.changes(configs, tmp_path / "sweep", 1, measures=True)
    assert not (tmp_path / "sweep").exists()


def test_an_arm_has_the_width_that_it_is_told(configs):
    config = configs["wide"]
    with pytest.raises(ValueError, match=r"run the arm by a sweep"):
        arm.resolve(config)
    config.model.ffn.width, config.match.budget = 77, "seconds:1.012"
    made = arm.resolve(config)
    assert (made.model.ffn.width, made.match, made.ratio) == (77, "seconds", 1.012)


@pytest.mark.usefixtures("undrawn")
def test_the_report_says_what_was_equal(tmp_path):
    for layout, ratio in (("standard", 1.0), ("wide", 0.987)):
        changes = dict(match="seconds", seconds_of_reference=ratio)
        write_arm(tmp_path / layout, layout, "separate", 2.9, 200_000, **changes)
    text = " ".join(written(tmp_path)[0].split())
    assert "At equal seconds a step, **" in text
    left = "(0.987 to 1.000 of the reference's: standard · separate 1.000, wide · separate 0.987"
    assert f"{left}); other budgets differ" in text
    found = {
        "standard": clock.Ratio(32, 1.0, 0.99, 1.01, 5.0, 9)._asdict(),
        "wide": clock.Ratio(20, 0.987, 0.95, 0.99, 5.0, 9)._asdict(),
    }
    told = {"environment": {"device": "1 x cpu", "machine": "a machine"}, "found": found}
    workdir.write_json(tmp_path / workdir.CALIBRATION, told)
    text = " ".join(written(tmp_path)[0].split())
    noise = "on 1 x cpu, a machine; at least half of the rounds within 0.037 of it"
    assert f"{left}; {noise}); other budgets differ" in text


@pytest.mark.slow
def test_steps_are_timed_in_a_process_of_their_own(configs):
    asked = {"arms": {name: c.to_dict() for name, c in configs.items()}, "threads": 1}
    done = subprocess.run(
        clock.CLOCK, input=pickle.dumps(asked), stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["found"].keys() == configs.keys()
    for found in told["found"].values():
        assert min(one["milliseconds"] for one in found["tried"]) > 0
    assert told["environment"]["threads"] == 1
    assert clock.CLOCK[0] == sys.executable
