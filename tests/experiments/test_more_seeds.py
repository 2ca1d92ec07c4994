"""Seeds are added to what is undecided, until it is decided or hopeless."""

import json
import shutil

import numpy as np
import pytest
from commands import command
from written_arms import undrawn, write_arm, written

from experiments import sweep
from experiments.configs import byte_lm
from experiments.reporting import pairs, results

__all__ = ["undrawn"]

SAME = "wide · albert", "narrow · albert"
APART = "wide · albert", "standard · albert"


def write(folder, asked, seeds=6, limit=40, smallest=0.0):
    """Three arms: the first two are equal on average, 0.02 apart; the third is 0.5 worse."""
    shutil.rmtree(folder)
    folder.mkdir()
    for layout, worse, noise in (("wide", 0, 0.01), ("narrow", 0, -0.01), ("standard", 0.5, 0)):
        losses = (2.8 + worse + noise * (-1.0) ** np.arange(seeds)).tolist()
        options = {"seeds": list(range(seeds)), "heldout_bits_per_byte": losses}
        write_arm(folder / layout, layout, "albert", 0, 1000, wobble=0, **options)
    question = {"pairs": asked, "limit": limit, "smallest": smallest}
    (folder / results.QUESTION).write_text(json.dumps({"question": question}))


def asked_for(folder):
    [panel] = results.read([folder])
    return {path.name: seeds for path, seeds in pairs.more_seeds(panel).items()}


@pytest.fixture(autouse=True)
def many_seeds(monkeypatch):
    """`write_arm` has noise for three."""
    monkeypatch.setattr("written_arms.NOISE", (0.0,) * 50)


def test_an_open_pair_gets_as_many_seeds_as_its_arms_began_with(tmp_path):
    write(tmp_path, [SAME, APART])
    assert asked_for(tmp_path) == dict.fromkeys(("wide", "narrow"), (6, 7, 8, 9, 10, 11))
    write(tmp_path, [APART])
    assert asked_for(tmp_path) == {}  # decided
    write(tmp_path, [SAME], limit=6)
    assert asked_for(tmp_path) == {}  # at the limit
    write(tmp_path, [SAME], limit=8, smallest=1.0, seeds=4)
    assert asked_for(tmp_path) == dict.fromkeys(("wide", "narrow"), (4, 5, 6, 7))
    write(tmp_path, [SAME], limit=5, smallest=1.0, seeds=4)
    assert asked_for(tmp_path) == dict.fromkeys(("wide", "narrow"), (4,))
    write(tmp_path, [SAME], seeds=2)
    assert asked_for(tmp_path) == {"wide": (2, 3), "narrow": (2, 3)}  # no spread is known yet


def test_without_a_limit_none_is_added(tmp_path):
    for seeds in (1, 2, 3, 6):
        write(tmp_path, [SAME, APART], seeds=seeds, limit=0)
        assert asked_for(tmp_path) == {}


def test_what_more_seeds_cannot_decide_is_left(tmp_path):
    """No difference: seeds cannot show that, unless one is named that is of no interest.

    The spread is 0.02, so an interval of 40 seeds is 0.0105 to each side, one of 30 0.0122.
    """
    for smallest, verdict, seeds in (
        (0.0, "cannot tell", {}),
        (0.009, "cannot tell", {}),
        (0.0115, "cannot tell", dict.fromkeys(("wide", "narrow"), tuple(range(30, 40)))),
        (0.013, "equal within 0.013", {}),
    ):
        write(tmp_path, [SAME], seeds=30, smallest=smallest)
        [pair] = pairs.compare(results.read([tmp_path])[0])
        assert pair.verdict == verdict
        assert asked_for(tmp_path) == seeds


@pytest.mark.usefixtures("undrawn")
def test_later_seeds_join_their_arm(tmp_path):
    write(tmp_path, [SAME, APART])
    later = {"seeds": [6, 7], "heldout_bits_per_byte": [2.7, 2.9], "wall_seconds": 40.0}
    write_arm(tmp_path / "wide-seeds6-7", "wide", "albert", 0, 1000, **later)
    [panel] = results.read([tmp_path])
    [wide] = [run for run in panel.runs if run.result["layout"] == "wide"]
    assert wide.seeds == list(range(8))
    assert wide.heldout[6:].tolist() == [2.7, 2.9]
    assert wide.result["wall_seconds"] == 100.0
    steps, values = wide.curve()
    assert values.shape == (8, len(steps))
    assert len(steps)
    markdown, _ = written(tmp_path)
    assert "Of the 2 comparisons that the question names" in markdown
    assert "Seeds were added until the pairs were decided" in markdown
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert len([row for row in rows if row.startswith("wide,")]) == 8
    write(tmp_path, [APART], seeds=3)
    assert " | not bounded | " in written(tmp_path)[0]


@pytest.mark.slow
def test_a_sweep_adds_seeds_and_goes_on(tmp_path, nine_letters):
    """Two arms, one of which cannot learn: decided after few seeds; the same command adds none."""
    config = tmp_path / "part.py"
    config.write_text(
        "from experiments.configs import byte_lm\n"
        "get_config = byte_lm.get_config\n"
        "def sweep(add, arg=''):\n"
        "    add('learns', **{'train.learning_rate': 1e-2})\n"
        "    add('does not', **{'train.learning_rate': 1e-9})\n"
        "def pairs(arg=''):\n"
        "    return [('learns', 'does not')]\n"
    )
    words = [f"--config={config}:tiny", f"--workdir={tmp_path}/sweep", "--max_seeds=12"]
    done = command("experiments.sweep", *words, f"--config.data.path={nine_letters}")
    assert done.returncode == 0, done.stderr
    folders = sorted(p.name for p in (tmp_path / "sweep").glob("*seeds*"))
    assert folders[:2] == ["does-not-lr1e-09-seeds2-3", "does-not-lr1e-09-seeds4-5"]
    report = (tmp_path / "sweep/report.md").read_text()
    assert "| learns | does not | **learns is better** |" in report
    again = command("experiments.sweep", *words, f"--config.data.path={nine_letters}")
    assert again.returncode == 0, again.stderr
    assert folders == sorted(p.name for p in (tmp_path / "sweep").glob("*seeds*"))


def test_no_round_without_a_result(tmp_path):
    assert sweep.later_seeds(tmp_path, {"gone": None}, {}) == {}


def test_no_round_of_an_arm_that_is_not_run_this_time(tmp_path):
    write(tmp_path, [SAME])
    config = byte_lm.get_config("tiny")
    assert sweep.later_seeds(tmp_path, {"wide": config}, {}).keys() == {"wide-seeds6-11"}


def test_seeds_that_one_arm_has_alone_turn_no_verdict(tmp_path):
    """On the six seeds of both wide heads are better for sure; with six of their own, worse."""
    write_arm(tmp_path / "standard", "standard", "albert", 2.82, 1000, seeds=list(range(6)))
    write_arm(tmp_path / "wide", "wide", "albert", 2.80, 1000, seeds=list(range(6)))
    [[pair]] = [pairs.compare(panel) for panel in results.read([tmp_path])]
    assert (pair.a.result["layout"], pair.sure, pair.grows) == ("wide", True, False)
    more = {"heldout_bits_per_byte": [2.90] * 6, "seeds": list(range(6, 12))}
    write_arm(tmp_path / "wide-seeds6-11", "wide", "albert", 0, 1000, **more)
    [[pair]] = [pairs.compare(panel) for panel in results.read([tmp_path])]
    assert pair.difference.pairs == 6
    assert (pair.a.result["layout"], pair.sure) == ("standard", False)
    assert pair.verdict == "cannot tell (on the seeds of both the other is better)"
    assert pair.grows  # seeds were added, whatever limit the last command gave


@pytest.mark.usefixtures("undrawn")
def test_a_plan_written_by_hand_and_two_groups_that_diverged_are_reported(tmp_path):
    write_arm(tmp_path / "hand", "wide", "0,1,1,0", 2.8, 1000)
    write_arm(tmp_path / "wide", "wide", "albert", 2.9, 1000)
    for seeds in ([3, 4], [5, 6]):
        folder = tmp_path / f"wide-seeds{seeds[0]}-{seeds[1]}"
        write_arm(
            folder, "wide", "albert", 0, 1000, seeds=seeds, status="diverged", message="at step 3"
        )
        result = json.loads((folder / "result.json").read_text())
        result.pop("wall_seconds", None)
        (folder / "result.json").write_text(json.dumps(result))
    assert "wide · 0,1,1,0" in written(tmp_path)[0]
