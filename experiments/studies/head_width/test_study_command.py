"""The command: killed and started again it leaves the rows of a study that was never stopped."""

import dataclasses
import signal
import subprocess
import sys
import time

import pytest
from commands import command
from conftest import ROOT
from study_rows import PUBLISHED, make_row

from experiments.studies.head_width.gpu_study import TextScore
from experiments.studies.head_width.rows import append_row, columns, read_rows

STUDY = "experiments.studies.head_width"
CONFIG = "experiments/studies/head_width/config.py"


def start(folder, *more, preset="tiny"):
    command = [sys.executable, "-m", STUDY, f"--rows={folder / 'runs.csv'}",
               f"--config={CONFIG}:{preset}", f"--data={folder}",
               f"--workdir={folder / 'work'}", *more]  # fmt: skip
    folder.mkdir(exist_ok=True)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def finish(folder, *more, preset="tiny"):
    process = start(folder, *more, preset=preset)
    return process.communicate(timeout=600)[0], process.returncode


def numbers(folder):
    rows = read_rows(folder / "runs.csv")
    return sorted([dataclasses.replace(row, origin=None) for row in rows], key=lambda r: r.spec.id)


def wait_for_rows(folder, count):
    until = time.monotonic() + 300
    while len(read_rows(folder / "runs.csv")) < count:
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_study_goes_on(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    out, code = finish(whole)
    assert code == 0, out
    first = start(killed)
    wait_for_rows(killed, 1)
    first.kill()
    first.wait()
    second = start(killed)
    wait_for_rows(killed, 3)
    second.send_signal(signal.SIGTERM)
    assert "stopped; repeat the command to resume" in second.communicate(timeout=60)[0]
    assert second.returncode == 75
    assert finish(killed)[1] == 0
    assert len(numbers(killed)) == 8
    assert numbers(killed) == numbers(whole)


def test_rows_of_another_commit_are_refused_by_the_command(tmp_path):
    append_row(tmp_path / "runs.csv", make_row(0.01, stage=-1))
    out, code = finish(tmp_path)
    assert code != 0
    assert "is of commit abc, not" in out
    out, code = finish(tmp_path, "--status")
    assert code == 0
    assert "stage -1 (tiny): 1/8 runs" in out


def test_programs_of_the_study_on_a_gpu_are_counted_without_running_one(tmp_path):
    out, code = finish(tmp_path, "--status", preset="gpu")
    assert code == 0
    assert out.splitlines()[-1] == "0/5 tuning programs, 0/34 programs"
    assert list(tmp_path.iterdir()) == []


def refused(folder, *given, preset="tiny", rows="runs.csv"):
    """The line that refuses these flags; nothing is written."""
    there = sorted(folder.iterdir())
    done = command(
        STUDY, f"--config={CONFIG}:{preset}",
        f"--rows={folder / rows}", f"--workdir={folder / 'work'}", *given,
    )  # fmt: skip
    assert done.returncode == 1
    assert sorted(folder.iterdir()) == there
    [line] = done.stderr.splitlines()
    return line


def test_a_wrong_preset_is_one_line(tmp_path):
    assert "preset gpu=x: the fraction of training must be a" in refused(tmp_path, preset="gpu=x")
    assert "unknown preset 'stage=x'; use stage=0 to" in refused(tmp_path, preset="stage=x")


@pytest.mark.parametrize(
    ("preset", "flag"),
    [
        ("gpu", "--pages=x"),
        ("gpu", "--jobs=2"),
        ("gpu", "--accept_commit=abc"),
        ("tiny", "--measure=20"),
        ("tiny", "--tuned=x"),
    ],
)
def test_a_flag_of_the_other_study_is_refused(tmp_path, preset, flag):
    assert f"error: {flag.split('=')[0]} has no effect" in refused(tmp_path, flag, preset=preset)


@pytest.mark.parametrize(
    ("preset", "given", "said"),
    [
        ("tiny", ["--status", "--pages=x"], "--status and --pages exclude one another"),
        ("tiny", ["--pages=x", "--analysis=x"], "--pages and --analysis exclude one another"),
        ("gpu", ["--status", "--measure=2"], "--status and --measure exclude one another"),
        ("tiny", ["--pages=x"], "96 of stage 0"),
        ("tiny", ["--analysis=x"], "96 of stage 0"),
        ("gpu", ["--analysis=x"], "scores of all programs"),
        ("gpu", ["--measure=2", "--data=."], "no file wikitext2/train.txt.gz of the text wiki"),
        ("stage=0", ["--data=."], "no file wikitext2/train.txt.gz of the text wikitext2"),
        ("gpu", ["--status", "--tuned=x"], "--tuned=x has no rows of stage 1"),
        ("tiny", ["--config.gpu_scale=1"], "no config field 'gpu_scale'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(tmp_path, preset, given, said):
    assert said in refused(tmp_path, *given, preset=preset)


def test_a_wrong_field_of_the_config_that_is_left_out():
    given = "--rows=none.csv", "--status"
    done = command(STUDY, *given, "--config.gpu_scale=1")
    assert done.stderr == "error: no config field 'gpu_scale'; known: stages\n"
    other = "--config=experiments/configs/byte_lm.py"
    assert "--config is no config of this study" in command(STUDY, *given, other).stderr
    assert "stage 0 (" in command(STUDY, *given).stdout


def test_a_file_of_the_other_study_is_named(tmp_path):
    append_row(tmp_path / "runs.csv", make_row(0.01, stage=-1))
    said = refused(tmp_path, "--status", preset="gpu")
    assert "runs.csv has other columns than a file of TextScore" in said
    (tmp_path / "gpu.csv").write_text(",".join(columns(TextScore)) + "\n")
    said = refused(tmp_path, "--status", rows="gpu.csv")
    assert "gpu.csv has other columns than a file of Row" in said


def test_pages_in_a_new_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    done = command(STUDY, f"--rows={PUBLISHED / 'runs.csv'}", f"--pages={folder}")
    assert done.returncode == 0, done.stderr
    names = "cost.md", "stage0.md", "stage1.md"
    assert [path.name for path in sorted(folder.iterdir())] == list(names)
    assert all((folder / n).read_text() == (PUBLISHED / n).read_text() for n in names)


def test_a_reader_that_ends_early_leaves_no_traceback(tmp_path):
    words = [sys.executable, "-m", STUDY, "--status", f"--rows={tmp_path / 'no.csv'}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(words, cwd=ROOT, **pipes) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert (errors, process.returncode) == ("", 128 + signal.SIGPIPE)
