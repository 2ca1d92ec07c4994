"""Equal seconds of a step: measured once, before the first run, then a number like any other."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import command
from conftest import ROOT
from made_results import made

from attnlab import lab
from attnlab.lab.report import Description, Panel, write_report
from attnlab.lab.seconds import FILE, Ratio, equal_seconds, solve
from attnlab.lab.spec import specs_of
from experiments.configs import heads_and_sharing
from experiments.setup import setup_of

MATCH = lab.Match("parameters")


@pytest.fixture(scope="module")
def specs():
    """Standard and wide heads, two seeds each."""
    preset = "tiny,match=seconds"
    setup = setup_of(heads_and_sharing.get_config(preset), heads_and_sharing, preset)
    assert setup.match is None
    assert setup.equal_seconds == (("seconds", "standard", "separate"))
    chosen = [v for v in setup.variants if v.all_tags["sharing"] == "separate"][:2]
    return specs_of(setup.base, chosen, [0, 1])


def line(start, slope, noise=0.0, seed=0):
    """Seconds over the reference's, of a variant whose FFN costs `slope` a unit."""
    draw = np.random.default_rng(seed)
    return lambda width: Ratio(
        width, start + slope * width + noise * draw.standard_normal(), 0.0, 0.0, 1.0, 9
    )


@pytest.mark.parametrize("first", [100, 300, 4000])
def test_the_width_of_equal_seconds_is_found(first):
    tried = solve("wide", line(0.4, 0.002), first)
    assert tried[-1].ffn_width == 300
    assert len(tried) <= 3


def test_it_is_found_within_the_noise_of_the_measurement():
    """95 of 100 draws within 5 %, where each ratio has an error of 1 %."""
    ends = []
    for seed in range(100):
        tried = solve("wide", line(0.4, 0.002, 0.01, seed), 700)
        ends.append(min(tried, key=lambda one: abs(one.ratio - 1)).ffn_width)
    true = 0.4 + 0.002 * np.array(ends)
    assert (np.abs(true - 1) < 0.05).sum() >= 95


def test_a_variant_that_is_slower_without_an_ffn_is_an_error():
    with pytest.raises(ValueError, match=r"wide.*at ffn_width 1 .* 1\.20 times.*larger ffn_width"):
        solve("wide", line(1.2, 0.001), 500)


def test_seconds_that_no_width_changes_are_an_error():
    with pytest.raises(ValueError, match=r"no ffn_width took.*busy"):
        solve("wide", lambda width: Ratio(width, 0.5, 0.0, 0.0, 1.0, 9), 500)


def write_measured(folder, specs, **widths):
    """calibration.json as a measurement leaves it."""
    asked = {
        spec.title: {"config": spec.config.to_dict(), "layout": "standard", "sharing": "separate"}
        for spec in specs
    }
    found = {
        title: Ratio(widths[title.partition(",")[0]], 1.0123, 0.99, 1.03, 5.0, 9)._asdict()
        for title in asked
    }
    folder.mkdir(exist_ok=True)
    about = {"device": "1 x cpu", "machine": "a machine"}
    (folder / FILE).write_text(
        json.dumps({"variants": asked, "environment": about, "found": found})
    )


def test_what_was_measured_is_read(tmp_path, specs):
    """The FFN has the measured width, and no other field changes but those that say so."""
    folder = tmp_path / "sweep"
    with pytest.raises(ValueError, match=r"calibration\.json, .* is missing.*--calibrate_only"):
        equal_seconds(specs, MATCH, folder, measures=False)
    assert not folder.exists()
    write_measured(folder, specs, standard=32, wide=20)
    found = equal_seconds(specs, MATCH, folder, measures=False)
    assert found == equal_seconds(specs, MATCH, folder, threads=2)  # it measures nothing
    assert [spec.config.model.ffn.width for spec in found] == [32, 32, 20, 20]
    for spec, before in zip(found, specs, strict=True):
        values = {"model.ffn.width": spec.config.model.ffn.width, "matched": "seconds",
                  "seconds_ratio": 1.012}  # fmt: skip
        assert spec.config == lab.with_values(before.config, values)
        assert (spec.id, spec.seed, spec.tags) == (before.id, before.seed, before.tags)


def test_what_was_measured_of_others_is_not_taken(tmp_path, specs):
    write_measured(tmp_path, specs, standard=32, wide=20)
    other = lab.with_values(specs[-1].config, {"model.heads.num_heads": 1})
    changed = [*specs[:2], *(lab.RunSpec(s.id, other, s.seed, s.tags) for s in specs[2:])]
    with pytest.raises(ValueError, match="other variants or configs; use another --workdir"):
        equal_seconds(changed, MATCH, tmp_path)


def test_one_run_cannot_have_equal_seconds(tmp_path):
    config = "--config=experiments/configs/heads_and_sharing.py:tiny,match=seconds"
    done = command("experiments.run", config, f"--workdir={tmp_path}/run")
    assert done.returncode == 1
    assert "match.budget=seconds is measured by experiments.sweep" in done.stderr


def test_the_report_says_what_was_equal(tmp_path):
    runs = [
        made({"layout": layout}, seed, score,
             values={"matched": "seconds", "seconds_ratio": ratio, "model.heads.layout": layout})
        for layout, score, ratio in (("standard", 2.9, 1.0), ("wide", 2.8, 0.987))
        for seed in (0, 1)
    ]  # fmt: skip
    about = Description(matched="seconds", baseline={"layout": "standard"})
    write_report([Panel(lab.Results(runs), about)], tmp_path / "report.html")
    text = " ".join((tmp_path / "report.md").read_text().split())
    assert (
        "Equal for all variants: seconds. Other budgets differ. Measured seconds of a step over "
        "those of the reference: standard 1.000, wide 0.987." in text
    )


@pytest.mark.slow
def test_steps_are_timed_in_a_process_of_their_own(specs):
    config = specs[0].config.to_dict()
    asked = {specs[0].title: {"config": config, "layout": "standard", "sharing": "separate"}}
    done = subprocess.run(
        [sys.executable, "-m", "attnlab.lab.seconds", "--threads=1"],
        input=json.dumps(asked).encode(), stdout=subprocess.PIPE, check=False, cwd=Path(ROOT),
    )  # fmt: skip
    assert done.returncode == 0
    printed = json.loads(done.stdout)
    assert printed["found"].keys() == asked.keys()
    for found in printed["found"].values():
        assert min(one["milliseconds"] for one in found["tried"]) > 0
    assert printed["environment"]["threads"] == "1"
