"""The commands that train, as a user types them: results, resume after SIGKILL, refusals, help."""

import csv
import json
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from commands import command, user_environment
from config_files import everything, succeed
from conftest import ROOT

from attnlab import lab
from attnlab.lab.machine import read_threads
from attnlab.lab.workdir import hold, specs_in
from attnlab.lab.worker import STOPPED
from experiments.config import parse_variants

BYTE_LM = "experiments/configs/byte_lm.py"
SWEEP = "experiments/configs/heads_and_sharing.py"


@pytest.fixture(scope="module")
def text(nine_letters):
    """A text of our own, so that the tests do not read 12 MB each."""
    return f"--config.data.path={nine_letters}"


def run(folder, preset, *flags):
    return command("experiments.run", f"--config={BYTE_LM}:{preset}", f"--workdir={folder}", *flags)


def sweep(folder, *flags):
    return command("experiments.sweep", f"--config={BYTE_LM}:tiny", f"--workdir={folder}", *flags)


def test_one_run_and_again(tmp_path, text):
    flags = ("--config.model.num_layers=3", text, "--loggers=tensorboard")
    first = run(tmp_path / "run", "layout=wide,sharing=albert,tiny", *flags)
    assert first.returncode == 0, first.stderr
    assert re.findall(r"seed (\d): held-out [\d.]+ bits", first.stdout) == ["0", "1"]
    assert "decoder of 3 layers, width 16, wide heads, plan albert, " in first.stderr
    results = lab.load_results(tmp_path / "run")
    assert [run.spec.seed for run in results] == [0, 1]
    assert results[0].spec.config.model.sharing == "albert"
    assert list((tmp_path / "run/runs/seed0/tensorboard").rglob("events.*"))
    before = everything(tmp_path / "run")
    again = run(tmp_path / "run", "layout=wide,sharing=albert,tiny", *flags)
    assert again.stdout == first.stdout
    assert everything(tmp_path / "run") == before


def test_the_scores_of_all_seeds_are_printed_then_which_diverged(tmp_path, text):
    """One diverged, and a score of the other is not finite."""
    assert run(tmp_path, "tiny", text).returncode == 0
    for seed, changes in ((0, {"status": "diverged", "message": "bad at step 3"}), (1, {})):
        path = tmp_path / f"runs/seed{seed}/result.json"
        result = json.loads(path.read_text()) | changes
        del result["scores"]["heldout"]["bits_per_byte"]
        path.write_text(json.dumps(result))
    done = run(tmp_path, "tiny", text)
    assert done.returncode == 1
    assert "seed 1: held-out nan bits per byte" in done.stdout
    assert "error: bad at step 3" in done.stderr


def test_a_run_that_another_process_has_is_left(tmp_path, text):
    folder = tmp_path / "run/runs/seed0"
    folder.mkdir(parents=True)
    with hold(folder):
        result = run(tmp_path / "run", "tiny", text)
        assert result.returncode == STOPPED
        assert result.stderr.splitlines()[-1].startswith(f"error: {folder} is in use by process ")


def test_a_sweep_from_the_command_line(tmp_path, text):
    """2 layouts, one of an imported file, and 1 plan of the main experiment; then a result is gone
    and comes again, alike: the other run stays, and every metric is there once."""
    folder, registers = tmp_path / "sweep", tmp_path / "registers.py"
    registers.write_text(
        "from attnlab import heads\n\n@heads.register_layout('mine')\n"
        "class Mine(heads.Standard):\n    pass\n"
    )
    flags = [f"--config={SWEEP}:tiny", f"--workdir={folder}", text, "--seeds=0"]
    flags += ["--vary=model.heads.layout=standard,mine", "--vary=model.sharing=separate"]
    flags += [f"--import={registers}"]
    first = succeed("experiments.sweep", *flags)
    assert "2 runs of 2 variants" in first.stderr
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["layout"], row["seed"]) for row in rows} == {("standard", "0"), ("mine", "0")}
    assert "svg" in (folder / "report.html").read_text()
    result = folder / "runs/mine-separate-seed0/result.json"
    before, kept = json.loads(result.read_text())["scores"]["heldout"], everything(folder / "runs")
    result.unlink()
    again = succeed("experiments.sweep", *flags, "--jobs=1")
    assert "[mine-separate-seed0] complete; 1 of 1 runs finished" in again.stderr
    assert json.loads(result.read_text())["scores"]["heldout"] == before
    changed = {name for name, text in everything(folder / "runs").items() if kept[name] != text}
    assert changed == {result.relative_to(folder / "runs")}


@pytest.mark.slow
def test_a_tuned_sweep_with_added_seeds(tmp_path, text):
    """Rates are chosen with a seed that is never judged, then seeds are added."""
    folder = tmp_path / "sweep"
    flags = [text, "--seeds=0,1,2", "--vary=model.heads.layout=standard,narrow"]
    flags += ["--config.data.validation=0.1", "--config.train.optimizer.learning_rate=0.02"]
    done = sweep(folder, *flags, "--tune=3", "--max_seeds=4")
    assert done.returncode == 0, done.stderr
    tuned, judged = lab.load_results(folder / "tuning"), lab.load_results(folder)
    assert {run.spec.seed for run in tuned} == {1000}
    assert 1000 not in {run.spec.seed for run in judged}
    assert len({run.spec.seed for run in judged}) >= 3
    rates = lab.best_rates(tuned)
    for result in judged:
        rate = rates[tuple(result.spec.tags.items())]
        assert result.spec.config.train.optimizer.learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--launcher=slurm", "--print_only"), 0, "submit them with: sbatch"),
        (("--jobs=1",), 1, "3 runs without a result"),
    ],
)
def test_a_sweep_that_is_not_tuned_yet_ends_with_its_own_message(tmp_path, flags, code, message):
    """There is nothing to report: runs are in the queue, or all of them failed on a short text."""
    (tmp_path / "short.txt").write_text("hi")
    words = [f"--config.data.path={tmp_path}/short.txt", "--config.data.validation=0.1"]
    words += ["--tune=3", "--seeds=0", "--vary=model.heads.num_heads=1"]
    done = sweep(tmp_path / "x", *words, *flags)
    assert done.returncode == code
    assert message in done.stderr
    assert "holds no sweep" not in done.stderr


def test_workers_to_start_elsewhere(tmp_path, text):
    """The specs travel as JSON, with learning rates of a table; the printed command has loggers,
    threads and flags of JAX."""
    folder, rates = tmp_path / "sweep", tmp_path / "rates.csv"
    rates.write_text("num_heads,learning_rate\n1,0.001\n2,0.002\n")
    flags = [text, "--seeds=3", "--vary=model.heads.num_heads=1,2", f"--tune_from={rates}"]
    flags += ["--config.match.budget=parameters", "--loggers=tensorboard", "--threads=1"]
    done = sweep(folder, *flags, "--jax_default_matmul_precision=float32", "--print_only")
    assert done.stdout == (
        f"env JAX_DEFAULT_MATMUL_PRECISION=float32 python -m attnlab.lab {folder} "
        "--loggers=tensorboard\n"
    ), done.stderr
    assert "2 runs of 2 variants" in done.stderr
    configs = [spec.config for spec in specs_in(folder).values()]
    found = {one.model.heads.num_heads: one.train.optimizer.learning_rate for one in configs}
    assert found == {1: 0.001, 2: 0.002}
    assert {one.matched for one in configs} == {"parameters"}
    assert read_threads(folder) == 1


def test_a_sweep_that_was_not_tuned_is_not_tuned_later(tmp_path, text):
    """It says so before the first run of the tuning."""
    words = [text, "--config.data.validation=0.1", "--vary=model.heads.num_heads=1,2"]
    assert sweep(tmp_path, *words, "--print_only").returncode == 0
    before = (tmp_path / "specs.json").read_bytes()
    assert "--tune" in sweep(tmp_path, *words, "--tune=3").stderr
    assert (tmp_path / "specs.json").read_bytes() == before
    assert not (tmp_path / "tuning").exists()


def test_a_swept_string_is_no_path(nine_letters):
    """A text as a value: the folder of each run lies in the workdir, and has a name of its own."""
    found = [one.id for one in parse_variants([f"data.path={nine_letters},", "train.steps=3,4"])]
    assert not any("/" in name for name in found)
    assert len(set(found)) == 4


def test_debug_prints_a_traceback_and_a_log_has_it(tmp_path, text):
    """Of a folder that holds something else, to which nothing is added."""
    folder = tmp_path / "runs/seed0"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("mine")
    plain = run(tmp_path, "tiny", text)
    assert plain.stderr.startswith(f"error: {folder} is not empty")
    assert "(it holds thesis.tex)" in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in (tmp_path / "error.log").read_text()
    assert "Traceback" in run(tmp_path, "tiny", text, "--debug").stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_help_lists_fields_and_exits_with_0():
    done = command("experiments.run", f"--config={BYTE_LM}:tiny", "--help")
    assert done.returncode == 0
    steps, seeds = "\n--config.train.steps=20\n", "\n--config.train.seeds=(0, 1)\n"
    for part in ("How well does one head layout", "`masked`", steps, seeds, "\n--workdir: "):
        assert part in done.stdout


def heldout(folder):
    return [run.scores.heldout["bits_per_byte"] for run in lab.load_results(folder)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "cut"), [(2, []), (4, ["--model_parallel=4", "--shard_state"])]
)
def test_two_hosts_are_one_host(tmp_path, text, devices, cut):
    """Two processes of two devices each, as on two hosts, give the losses of one process; so do two
    of four that cut each model in four and share the state out, and one process can go on."""
    folder = tmp_path / "two"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "experiments.run", f"--config={BYTE_LM}:tiny", text, *cut]
    words += [f"--workdir={folder}", "--distributed", "--num_processes=2"]
    words += [f"--coordinator_address=localhost:{port}", f"--jax_num_cpu_devices={devices}"]
    given = {"cwd": ROOT, "env": user_environment() | {"PYTHONPATH": str(ROOT)}}
    hosts = [subprocess.Popen([*words, f"--process_id={i}"], **given) for i in range(2)]
    assert [host.wait(timeout=600) for host in hosts] == [0, 0]
    got = heldout(folder)
    for path in folder.glob("runs/*/result.json"):
        path.unlink()  # as if the hosts had been killed behind the last step
    for other in (tmp_path / "one", folder):
        assert run(other, "tiny", text).returncode == 0
        np.testing.assert_allclose(heldout(other), got, rtol=1e-5)
