"""Every arm at several sizes: how a sweep makes them and what its report says of them."""

import dataclasses
import json
import re

import pytest
from commands import command
from conftest import ROOT
from written_arms import undrawn, write_arm, written

from attnlab.models import num_parameters, with_layout
from experiments import sweep
from experiments.configs import heads_and_sharing
from experiments.reporting import ladder, rates, results
from experiments.running import arm
from experiments.running.ladder import scaled, sizes
from experiments.running.workdir import CONFIG

__all__ = ["undrawn"]

CONFIGS = f"{ROOT}/experiments/configs"


def climbed(words, asked=(1.0, 1.5, 2.0), by="width", only=""):
    """The plan, and its arms resolved: those whose names hold `only`."""
    plan = sweep.read(f"{CONFIGS}/heads_and_sharing.py:{words}", {})
    base = heads_and_sharing.get_config(words)
    plan = sweep.climb(plan, base, asked, by)
    some = {name: changes for name, changes in plan.arms.items() if only in name}
    return plan, {n: arm.resolve(sweep.with_changes(base, c)) for n, c in some.items()}


def test_every_arm_at_every_size():
    plan, arms = climbed("tiny")
    assert list(plan.ladder["sizes"].values()) == [1.0] * 6 + [1.5] * 6 + [2.0] * 6
    assert {name.rpartition("-")[2] for name in arms} == {"x1", "x1.5", "x2"}
    for name, size in plan.ladder["sizes"].items():
        model = arms[name].model
        assert (model.width, model.ffn.width) == (16 * size, 32 * size)
        assert model.heads.num_heads == 2
        share = 1 if model.heads.name == "wide" else 2
        assert model.layout.size("head_dim") == model.width // share
    _, deep = climbed("tiny", by="depth")
    assert [deep[f"wide-albert-x{x}"].model.num_layers for x in ("1", "1.5", "2")] == [2, 3, 4]
    assert deep["wide-albert-x2"].model.width == 16


def test_budgets_are_matched_at_each_size():
    """`match` has the standard arm of that size for a reference, not that of the first."""
    _, arms = climbed("match=parameters", (1.0, 2.0), only="wide-separate")
    for size, ffn in ((1, 512), (2, 1024)):
        wide = arms[f"wide-separate-x{size}"].model
        standard = with_layout(wide, "standard", "separate")
        standard = dataclasses.replace(standard, ffn=dataclasses.replace(wide.ffn, width=ffn))
        assert num_parameters(wide) == pytest.approx(num_parameters(standard), rel=0.01)
        assert 0 < wide.ffn.width < ffn


def test_what_is_no_ladder_is_refused():
    for words, message in (
        (["1"], "at least 2 sizes"),
        (["2.5"], "at least 2 sizes"),
        (["2", "1"], "above zero and grow"),
        (["0", "1"], "above zero and grow"),
        (["many"], "give a number of sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            sizes(words)
    with pytest.raises(ValueError, match=r"model.width=16 times 1.3 is no whole number"):
        climbed("tiny", (1.0, 1.3))
    config = heads_and_sharing.get_config("tiny")
    config.model.layer_types = ((1, {"heads": {"layout": "wide", "head_dim": 4}}), (1, {}))
    with pytest.raises(ValueError, match=r"have heads\.head_dim of their own, which would stay"):
        scaled(config.model, "width", 2.0)
    assert scaled(config.model, "depth", 2.0) == {"model.num_layers": 4}
    config.model.layer_types, config.model.heads.scale = (), 0.25
    with pytest.raises(ValueError, match=r"heads.scale=0.25 would stay as it is while heads"):
        scaled(config.model, "width", 2.0)
    for file, what in (("albert_table4", "published table"), ("same_start", "known answer")):
        plan = sweep.read(f"{CONFIGS}/{file}.py:tiny", {})
        with pytest.raises(ValueError, match=f"which are those of a {what} here"):
            sweep.climb(plan, None, (1.0, 2.0), "width")


def write_ladder(folder, arms, sizes=(1, 2, 4)):
    """`arms`: (layout, plan) -> FLOPs of the base that one of its FLOPs is worth, at each size;
    the base has 1000 parameters times the square of the size."""
    rungs = {}
    for i, size in enumerate(sizes):
        for (layout, plan), worth in arms.items():
            count = 1000 * size**2
            name = f"{layout}-{plan}-x{size}"
            rungs[name] = size
            if worth[i] is None:
                continue
            options = {"uses": {"1": count} if plan == "separate" else {"4": count // 4}}
            loss = 1.5 + 40 * (worth[i] * count) ** -0.4
            write_arm(folder / name, layout, plan, loss, count, **options)
    told = {"by": "width", "sizes": rungs}
    record = {"arms": {name: {} for name in rungs}, "environment": {}, "ladder": told}
    (folder / CONFIG).write_text(json.dumps(record))
    return folder


@pytest.fixture
def quiet(monkeypatch):
    """Seeds that differ by less than the arms do."""
    monkeypatch.setattr("written_arms.NOISE", (0.0, 0.003, -0.002))


FIVE = {
    ("standard", "separate"): (1, 1, 1),
    ("wide", "separate"): (2, 2, 2),
    ("narrow", "separate"): (0.5, 1, 2),
    ("standard", "albert"): (4**-0.5, 4**-0.5, 4**-0.5),
    ("latent", "albert"): (1, 1, 1),
}


@pytest.mark.usefixtures("undrawn", "quiet")
def test_a_claim_stands_where_it_holds_at_both_ends(tmp_path):
    text, _ = written(write_ladder(tmp_path, FIVE))
    found = re.search(r"On the ladder from ×1 to ×4 the width, at equal FLOPs: (.*)\.", text)[1]
    better, worse, open_ = found.split("; ")
    assert "**better than standard · separate at both ends: wide · separate (worth" in better
    values = [float(v) for v in re.search(r"worth (\S+) and (\S+) times", better).groups()]
    assert values == pytest.approx([2, 2], rel=0.1)
    assert "**worse than standard · separate at both ends: standard · albert (worth" in worse
    assert open_ == "no claim holds at both ends for narrow · separate and latent · albert"
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if "x^−" in line}
    narrow = rows["| narrow · separate"]
    assert narrow[1] == "none at both ends"
    assert [float(cell.split()[0]) for cell in narrow[2:4]] == pytest.approx([0.5, 2], rel=0.1)
    law = re.match(r"(\S+) \+ (\S+) x\^−(\S+) \((\S+) to (\S+)\)", rows["| standard · separate"][5])
    floor, _, alpha, low, high = map(float, law.groups())
    assert (floor, alpha) == pytest.approx((1.5, 0.4), rel=0.15)
    assert low < 0.4 < high
    phi = rows["| standard · albert"][4]
    assert float(phi.split()[0]) == pytest.approx(0.5, abs=0.05)
    assert rows["| wide · separate"][4] == "–"  # shares nothing
    assert rows["| latent · albert"][4] == "–"  # beside no latent heads that do not
    assert next(iter(rows)) == "| standard · separate"  # the base
    assert [h for h in text.splitlines() if h.startswith("## At")] == [
        f"## At equal width, size ×{size}" for size in (1, 2, 4)
    ]
    assert (tmp_path / "figures/1-ladder.svg").exists()


@pytest.mark.usefixtures("undrawn", "quiet")
def test_what_is_not_there_is_said(tmp_path):
    gone = FIVE | {("wide", "separate"): (2, None, 2)}
    text, _ = written(write_ladder(tmp_path / "arm", gone))
    assert "Not complete at all sizes, so left out: wide · separate." in text
    gone = FIVE | {("standard", "separate"): (1, 1, None)}
    [found] = ladder.read(results.read([write_ladder(tmp_path / "base", gone)]))
    assert ladder.answer(found).endswith(
        "nothing can be said: its first arm (standard · separate), the base, is not complete at "
        "all sizes."
    )
    one = {arm: (worth[0], None, None) for arm, worth in FIVE.items()}
    [found] = ladder.read(results.read([write_ladder(tmp_path / "size", one)]))
    assert "only one of its sizes has results" in ladder.answer(found)


@pytest.mark.slow
def test_a_sweep_climbs_and_tunes_every_rung(tmp_path, nine_letters):
    config = tmp_path / "part.py"
    config.write_text(
        "from experiments.configs import byte_lm\n"
        "get_config = byte_lm.get_config\n"
        "def sweep(add, arg=''):\n"
        "    for plan in ('separate', 'albert'):\n"
        "        add(**{'model.sharing': plan})\n"
    )
    words = [f"--config={config}:tiny", f"--workdir={tmp_path}/sweep", "--ladder=2", "--tune=3"]
    words += ["--config.train.learning_rate=0.03"]  # near the best: few rates are added
    words += [f"--config.data.path={nine_letters}", "--config.data.validation=0.1"]
    done = command("experiments.sweep", *words)
    assert done.returncode == 0, done.stderr
    folder, found = tmp_path / "sweep", rates.read(tmp_path / "sweep")
    names = [f"{plan}-x{size}" for plan in ("separate", "albert") for size in (1, 2)]
    assert sorted(found) == sorted(names)
    for name in names:
        config = json.loads((folder / name / CONFIG).read_text())["config"]
        assert config["train"]["learning_rate"] == found[name].chosen
        assert config["model"]["width"] == 16 * int(name[-1])
    assert json.loads((folder / "albert-x2/result.json").read_text())["uses"].keys() == {"2"}
    text = (folder / "report.md").read_text()
    assert "## The ladder, ×1 to ×2 the width" in text
    assert "E is zero: fewer than 3 sizes" in text
    assert "On the ladder from ×1 to ×2 the width, at equal FLOPs: " in done.stdout
    assert (folder / "figures/2-width-rates.svg").exists()
