"""Reports of what went wrong: arms that diverged, that are missing, that cannot be compared."""

import json
import re
import subprocess
import sys

import pytest
from written_arms import undrawn, write_arm, write_sweep, written

from experiments import report
from experiments.reporting import findings, results
from experiments.running.workdir import WorkdirError

__all__ = ["undrawn"]


def test_a_diverged_arm_is_shown_as_such(tmp_path):
    write_sweep(tmp_path)
    write_arm(tmp_path / "lost", "narrow", "separate", 3.0, 90_000, diverged=True)
    for text in written(tmp_path):
        assert "the loss of seed 1 is not finite at step 50" in text
    markdown = (tmp_path / "report.md").read_text()
    assert "| ~~narrow · separate~~ | diverged | – | 90,000 |" in markdown
    assert "Diverged: narrow · separate." in markdown


def test_later_seeds_that_diverged_are_said_too(tmp_path):
    write_sweep(tmp_path)
    folder = tmp_path / "narrow-albert-seeds3-4"
    write_arm(folder, "narrow", "albert", 3.0, 60_000, seeds=[3, 4], diverged=True)
    [panel] = results.read([tmp_path])
    assert findings.answer(panel).endswith(" Diverged: narrow · albert with seeds 3 and 4.")


def test_a_seed_counts_once(tmp_path):
    """A copy of an arm among the arms is refused, and its other seeds are not."""
    write_sweep(tmp_path)
    write_arm(tmp_path / "more", "narrow", "albert", 3.1, 60_000, seeds=[3, 4])
    [panel] = results.read([tmp_path])
    assert {len(run.seeds) for run in panel.runs} == {3, 5}
    write_arm(tmp_path / "other", "narrow", "albert", 3.1, 60_000, seeds=[4, 5])
    message = r"more and .*other are the same arm with the same seed 4, .*; move one of them"
    with pytest.raises(WorkdirError, match=message):
        results.read([tmp_path])


def test_all_arms_diverged(tmp_path):
    markdown, _ = written(write_sweep(tmp_path, diverged=True, curves=False))
    assert "there is nothing to compare: every arm diverged" in markdown


def test_one_seed_gives_no_interval(tmp_path):
    markdown, _ = written(write_sweep(tmp_path, seeds=[4]))
    assert "One seed gives no interval" in markdown
    assert "| cannot tell (one seed) |" in markdown
    assert "±" not in markdown.split("## At equal width")[0]


def test_without_metrics_and_maps(tmp_path):
    markdown, _ = written(write_sweep(tmp_path, curves=False, maps=False))
    assert "Learning curves" not in markdown
    assert "Attention maps" not in markdown
    assert markdown.count("![") == 3


def test_one_run_alone(tmp_path):
    write_arm(tmp_path / "run", "wide", "albert", 2.9, 1000)
    markdown, _ = written(tmp_path / "run")
    assert "there is no other arm to compare it with" in markdown
    assert "One run, of 1,000 unique parameters" in markdown
    assert "Mind: one run, at one learning rate (0.003)" in markdown
    assert "differ" not in markdown.partition("## How it was made")[0]


@pytest.mark.usefixtures("undrawn")
def test_several_folders_are_several_panels(tmp_path):
    first = write_sweep(tmp_path / "first")
    second = write_sweep(tmp_path / "equal", match="parameters")
    markdown, _ = written(first, second)
    titles = re.findall(r"^## (.*)", markdown, flags=re.MULTILINE)
    assert titles[:2] == ["At equal width", "At equal parameters"]
    assert f"--workdir={second} --out=FOLDER" in markdown
    assert not (second / "report.md").exists()
    assert len((tmp_path / "together" / "results.csv").read_text().splitlines()) == 1 + 18


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("source", "sha256"), "cd34", "were not trained on the same data"),
        (("environment", "cores"), 8, "environments: cores is 8 or 2"),
        (("config", "train", "steps"), 900, "differ in train.steps (900 or 800)"),
    ],
)
def test_warns_of_what_cannot_be_compared(tmp_path, path, value, message):
    write_sweep(tmp_path)
    assert results.warnings(results.read([tmp_path])) == []
    file = tmp_path / "narrow-albert" / "config.json"
    record = part = json.loads(file.read_text())
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    file.write_text(json.dumps(record))
    for text in written(tmp_path):
        assert message in text


@pytest.mark.usefixtures("undrawn")
def test_unfinished_arms_are_named(tmp_path):
    write_sweep(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"arms": {"wide-separate": {}, "wide-albert": {}}, "environment": {}})
    )
    markdown, _ = written(tmp_path)
    assert "not finished, so not shown: wide-albert." in markdown


def test_no_result_leaves_all_as_it_was(tmp_path):
    write_sweep(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkdirError, match="empty holds no result"):
        report.write([tmp_path / "first", tmp_path / "empty"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_no_report_is_written_over_another_one(tmp_path):
    """One folder's lies in it; that of several where it is told to, and in none of them."""
    one, two = (write_sweep(tmp_path / name) for name in ("one", "two"))
    before = written(one)[0]
    with pytest.raises(ValueError, match="none of theirs; say where: --out=FOLDER"):
        report.write([one, two])
    for out in (one, two):
        with pytest.raises(WorkdirError, match="has a report of its own, of what was run there"):
            report.write([one, two], out)
    report.write([one, two], tmp_path / "both")
    report.write([one], tmp_path / "elsewhere")
    assert (one / "report.md").read_text() == before
    assert (tmp_path / "elsewhere" / "report.md").read_text() == before
    assert not (two / "report.md").exists()


@pytest.mark.usefixtures("undrawn")
def test_an_arm_that_learnt_nothing_is_warned_of(tmp_path):
    """Of the yardsticks (unigram 4.77, gzip 1.89) it is worse than the weakest; others are not."""
    write_sweep(tmp_path)
    write_arm(tmp_path / "lost", "wide", "albert", 5.0, 90_000)
    markdown, _ = written(tmp_path)
    line = "Worse than what needs no model** (unigram entropy, 4.765 bits per byte): "
    assert f"{line}wide · albert. Look at learning rates" in markdown


def test_command_line(tmp_path):
    """It fails in one line, and what it imports to say so is light."""
    code = (
        "import runpy, sys, atexit;"
        "atexit.register(lambda: print([m in sys.modules for m in ('matplotlib', 'scipy.stats')]));"
        "runpy.run_module('experiments.report', run_name='__main__', alter_sys=True)"
    )
    flag = f"--workdir={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code, flag], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} holds no result.json")
    assert done.stdout == "[False, False]\n"
