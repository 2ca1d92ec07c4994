"""Learning rates: the parabola, what is tried next, and how the sweep and its report use both."""

import dataclasses
import json
import math
import types

import numpy as np
import pytest
from commands import ROOT, command
from written_arms import write_arm, write_sweep, written

from attnlab.data import Text
from experiments import sweep
from experiments.configs import byte_lm
from experiments.reporting import findings, rates, results


def test_the_minimum_by_hand():
    """2 + 3 (ln r - ln 0.02)^2 at five rates: no noise, so the interval is the point."""
    tried = {r: 2 + 3 * math.log(r / 0.02) ** 2 for r in rates.first_rates(0.015, 5)}
    found = rates.minimum(tried)
    assert (found.rate, found.score) == (pytest.approx(0.02), pytest.approx(2))
    assert (found.low, found.high) == (pytest.approx(0.02), pytest.approx(0.02))
    a, b, c = found.coefficients
    assert a + b * math.log(0.1) + c * math.log(0.1) ** 2 == pytest.approx(2 + 3 * math.log(5) ** 2)


def test_what_is_tried_next():
    assert rates.next_rate({1: 3.0, 2: 2.0, 4: 1.0}) == 8
    assert rates.next_rate({1: 1.0, 2: 2.0, 4: 3.0}) == 0.5
    assert rates.next_rate({1: 2.0, 2: 1.0, 4: 3.0}) is None
    assert rates.next_rate({1: 2.0, 2: 1.0, 4: math.inf}) == pytest.approx(math.sqrt(8))
    assert rates.next_rate({1: math.inf, 2: math.inf}) == 0.5
    assert rates.minimum({1: 3.0, 2: 2.0, 4: 1.0}) is None
    flat = rates.Tuned("an arm", {1.0: 1.0, 2.0: 1.0, 4.0: 1.0}, 0.0, 1)
    assert (flat.best, flat.chosen) == (None, 1.0)  # no parabola: the best that was tried
    long = {2.0**k: -k for k in range(rates.MOST)}
    assert rates.Tuned("an arm", long, 0.0, 1).wanted is None


def test_the_interval_holds_the_minimum_as_often_as_it_says():
    rng, held = np.random.default_rng(0), []
    for _ in range(300):
        best = math.log(3e-3) + rng.uniform(-1, 1)
        score = lambda r, best=best: 2 + 0.03 * (math.log(r) - best) ** 2 + 0.002 * rng.normal()
        tried = {r: score(r) for r in rates.first_rates(3e-3, 7)}
        while (rate := rates.next_rate(tried)) is not None:
            tried[rate] = score(rate)
        found = rates.minimum(tried)
        held.append(found.low <= math.exp(best) <= found.high)
    assert 0.93 < np.mean(held) < 0.99


def test_a_validation_part_is_the_end_of_what_is_learnt_from(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(97, 122)) * 40)
    plain, split = (Text(path=str(path), validation=share).load(8) for share in (0.0, 0.2))
    assert plain.validation is None
    assert plain.digest != split.digest
    parts = ("training", "validation", "held-out")
    counts = {name: split.facts[f"{name} tokens"] for name in parts}
    assert counts == {"training": 720, "validation": 180, "held-out": 100}
    whole = bytes(path.read_bytes())
    rows = split.validation(0)
    assert bytes(rows["tokens"][0].tolist()) == whole[720:729]
    np.testing.assert_array_equal(plain.heldout(3)["tokens"], split.heldout(3)["tokens"])
    learnt = Text(path=str(path), validation=0.2, tokenizer="bpe:260").load(2)
    assert learnt.validation(0)["valid"].any()
    with pytest.raises(ValueError, match=r"data.validation 1.0 is a share"):
        Text(validation=1.0)


def write_tuned(folder):
    """A sweep in which one arm tried three rates."""
    write_sweep(folder)
    tried = {0.001: 2.2, 0.002: 2.0, 0.004: 2.3}
    for rate, score in tried.items():
        one = folder / rates.FOLDER / f"wide-separate-lr{rate:g}"
        write_arm(one, "wide", "separate", score, 1000, learning_rate=rate, seeds=[rates.SEED])
        row = {"step": 800, "eval/bits_per_byte": [score]}
        (one / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return tried


def test_rates_of_another_sweep(tmp_path):
    """The rate and the end of its schedule are taken; arms that have none there are named."""
    write_tuned(tmp_path)
    base = byte_lm.get_config("tiny,wide")
    plan = sweep.Sweep({"wide-separate": {"model.heads.layout": "wide"}}, {})
    configs = {"wide-separate": base}
    carried, told = sweep.at_rates_of(plan, configs, tmp_path)
    changes = carried.arms["wide-separate"]
    assert changes.pop("model.heads.layout") == "wide"
    assert changes.pop("train.learning_rate") == rates.read(tmp_path)["wide-separate"].chosen
    ratio = base.train.final_learning_rate / base.train.learning_rate
    assert changes.pop("train.final_learning_rate") == pytest.approx(ratio * 0.00187, rel=0.01)
    assert changes == {}
    assert told["match"] == ""
    panel = results.read([tmp_path])[0]
    later = dataclasses.replace(panel, sweep={"tuned_before": told})
    for run, rate in zip(later.runs, (0.001, 0.002, 0.003), strict=True):
        run.result["learning_rate"] = rate
    said = f"in another sweep: {told['data']}, at equal width"
    assert said in findings.caution(later)
    with pytest.raises(ValueError, match="has no learning rate for narrow-albert"):
        sweep.at_rates_of(plan, configs | {"narrow-albert": base}, tmp_path)
    with pytest.raises(ValueError, match=r"no learning rate was chosen in .*; a sweep with --tune"):
        rates.elsewhere(tmp_path / rates.FOLDER)


def test_rates_of_a_table(tmp_path):
    """Later seeds of an arm have its rate; a table of two rates for one arm is told to choose."""
    table = tmp_path / "results.csv"
    table.write_text(
        "match,learning_rate,arm\nflops,0.004,wide-albert\n"
        "flops,0.004,wide-albert-seeds3-5\nflops,0.009,narrow-albert\n"
    )
    found, told = rates.elsewhere(table)
    assert found == {"wide-albert": 0.004, "narrow-albert": 0.009}
    assert told == {"data": "as in results.csv", "match": "flops"}
    table.write_text(table.read_text() + "parameters,0.005,narrow-albert\n")
    with pytest.raises(ValueError, match=r"rates for narrow-albert: 0\.005, 0\.009; keep the rows"):
        rates.elsewhere(table)
    table.write_text("arm\nwide-albert\n")
    with pytest.raises(ValueError, match="no rows with the columns arm and learning_rate"):
        rates.elsewhere(table)
    with pytest.raises(ValueError, match=r"neither the folder of a sweep nor a results\.csv"):
        rates.elsewhere(tmp_path / "none")


def test_the_published_rates_are_of_all_its_arms():
    """What docs/results says can be repeated: every arm of the study has one rate in its table."""
    found, told = rates.elsewhere(ROOT / "docs/results/heads_and_sharing.csv")
    filename = f"{ROOT}/experiments/configs/heads_and_sharing.py:study,match=flops"
    assert found.keys() == sweep.read(filename, {}).arms.keys()
    assert told["match"] is None


def test_the_report_shows_what_was_tried(tmp_path):
    tried = write_tuned(tmp_path)
    found = rates.read(tmp_path)["wide-separate"]
    assert (found.name, found.tried, found.seconds) == ("wide · separate", tried, 180.0)
    markdown, _ = written(tmp_path)
    assert "Choosing took 180 seconds of training, beside the 180" in markdown
    row = "| wide · separate | 0.00187 | not bounded | parabola | 0.001: 2.200, 0.002: 2.000, "
    assert f"{row}0.004: 2.300 |" in markdown
    assert (tmp_path / "figures/1-width-rates.svg").exists()


def test_data_without_a_validation_part_are_refused(tmp_path):
    config = "--config=experiments/configs/heads_and_sharing.py:tiny"
    for flags, message in (
        (["--tune=7"], "have none: give a text one by --config.data.validation=0.1"),
        (["--tune=2"], "--tune=2: a parabola needs at least 3"),
    ):
        done = command("experiments.sweep", config, f"--workdir={tmp_path}/s", *flags)
        assert done.returncode == 1
        assert message in done.stderr
        assert not (tmp_path / "s").exists()


def test_a_rate_that_was_not_tried_to_the_end_chooses_none(tmp_path, monkeypatch):
    """The best may be there: the arm waits for it. One that diverged is known to be worse."""
    rate = byte_lm.get_config("tiny").train.learning_rate
    scores = {rate / 2: 2.0, rate: 1.9, 2 * rate: None, rate * math.sqrt(2): 2.2}
    configs = {name: byte_lm.get_config("tiny") for name in ("wide", "narrow")}

    def run(trials, place):
        ends = {}
        for name, config in trials.items():
            tried = config.train.learning_rate
            if broken and name == f"narrow-lr{rate:.4g}":
                ends[name] = "killed by SIGKILL (out of memory?)"
                continue
            score = next(v for k, v in scores.items() if k == pytest.approx(tried))
            known = {"seeds": [rates.SEED], "learning_rate": tried, "diverged": score is None}
            if not (place / name).exists():
                write_arm(place / name, name.partition("-")[0], "separate", score or 0, 1, **known)
            ends[name] = "diverged" if score is None else "complete"
        return ends

    monkeypatch.setattr(sweep, "_TUNE", types.SimpleNamespace(value=3))
    broken = True
    chosen, ends = sweep.tune(configs, tmp_path, run)
    assert chosen.keys() == {"wide"}
    assert set(ends.values()) == {"complete", "killed by SIGKILL (out of memory?)"}
    broken = False
    chosen, ends = sweep.tune(configs, tmp_path, run)
    assert chosen.keys() == {"wide", "narrow"}
    assert set(ends.values()) == {"complete"}
    assert chosen["narrow"].train.learning_rate == chosen["wide"].train.learning_rate


@pytest.mark.slow
def test_a_sweep_chooses_its_rates(tmp_path, nine_letters):
    config = tmp_path / "part.py"
    config.write_text(
        "from experiments.configs import byte_lm\n"
        "get_config = byte_lm.get_config\n"
        "def sweep(add, arg=''):\n"
        "    add(**{'model.sharing': 'albert'})\n"
    )
    words = [f"--config={config}:tiny", f"--workdir={tmp_path}/sweep", "--tune=3"]
    words += [f"--config.data.path={nine_letters}", "--config.data.validation=0.1"]
    done = command("experiments.sweep", *words)
    assert done.returncode == 0, done.stderr
    found = rates.read(tmp_path / "sweep")["albert"]
    assert len(found.tried) >= 3
    trained = json.loads((tmp_path / "sweep/albert/config.json").read_text())["config"]["train"]
    assert trained["learning_rate"] == found.chosen
    assert trained["final_learning_rate"] == pytest.approx(found.chosen / 10)
    assert trained["seeds"] == [0, 1]
    assert "### Learning rates" in (tmp_path / "sweep/report.md").read_text()


def test_flags_reach_what_arms_are_computed_from():
    """Scores / H are of the heads that the flags ask for, equal parameters of their width."""
    path = f"{ROOT}/experiments/configs/heads_and_sharing.py:scores"
    arms = sweep.read(path, {"model.heads.num_heads": 8}).arms
    assert arms["standard-albert-scores-H"]["model.heads.scale"] == 1 / (64 // 8)
    arms = sweep.read(f"{ROOT}/experiments/configs/chunks.py", {"model.width": 128}).arms
    assert arms["one-for-all-chunks-small-scores"]["model.heads.scale"] == 128**-0.5


def test_a_question_that_is_put_alone():
    """`confirm` has standard and wide heads, and no pair but these two under each plan."""
    plan = sweep.read(f"{ROOT}/experiments/configs/heads_and_sharing.py:study,confirm", {})
    plans = ("separate", "cycle:2", "albert")
    assert list(plan.pairs) == [(f"wide · {p}", f"standard · {p}") for p in plans]
    assert {one["model.heads.layout"] for one in plan.arms.values()} == {"standard", "wide"}
    assert len(plan.arms) == 2 * len(plans)
