"""Processes of this machine: what each gets, what a death costs, who waits for whom, how signals
stop a sweep."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, deep
from small_experiment import MODEL, SWEEP, experiment, in_process, train_config, wait_for

from attnlab import lab
from attnlab.lab import machine
from attnlab.lab.executors import accelerators, divide, worker_command
from attnlab.lab.machine import read_threads
from attnlab.lab.workdir import add_specs, hold, holder, last_process, run_folder
from attnlab.lab.worker import STOPPED, main
from attnlab.training import Stopped
from attnlab.training.loggers import LOGGERS

TRAIN = train_config(4, every=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return experiment(tmp_path_factory, dataclasses.replace(MODEL, num_layers=1), TRAIN)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Workers have the devices of a user, not the eight of the tests."""
    for name in [n for n in os.environ if n.startswith(("XLA_", "JAX_NUM"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize(
    ("runs", "jobs", "threads", "cores", "gpus", "expected"),
    [
        (6, None, 2, 2, 0, (1, 2)),
        (6, None, None, 16, 0, (6, 2)),
        (6, 3, None, 16, 0, (3, 2)),
        (6, 5, 8, 2, 0, (5, 8)),
        (6, None, None, 96, 4, (4, None)),
    ],
)
def test_a_machine_is_divided(runs, jobs, threads, cores, gpus, expected):
    """Threads of a run do not depend on how many run at once. More: the docstring of `divide`."""
    assert divide(runs, jobs, threads, cores, gpus) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-1a"}, ["2", "GPU-1a"]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}, []),
    ],
)
def test_gpus_that_are_hidden_do_not_count(variables, expected):
    assert accelerators({"JAX_PLATFORMS": "cuda"} | variables) == expected


@pytest.mark.parametrize(
    ("jobs", "count", "expected"),
    [
        (None, 3, "0 1 2"),
        (3, 3, "0,1 2,3 4,5"),
        (2, 9, "0,1,2,3 4,5,6,7"),
        (9, 9, "0 1 2 3 4 5 6 7 0"),
    ],
)
def test_all_runs_have_as_many_gpus(jobs, count, expected, tmp_path):
    """Also the last runs of a sweep, fewer than GPUs: they resume as they began."""
    says = 'import os\nos.write(1, os.environ["CUDA_VISIBLE_DEVICES"].encode())\nos._exit(0)\n'
    (tmp_path / "sitecustomize.py").write_text(says)
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "JAX_PLATFORMS": "cuda"}
    executor = lab.LocalExecutor(jobs, environment=gpus | {"PYTHONPATH": str(tmp_path)})
    executor.start(tmp_path, count)
    wait_for(lambda: not executor.running())
    logs = [tmp_path / f"logs/worker{i}.log" for i in range(len(expected.split()))]
    assert [log.read_text() for log in logs] == expected.split()


def test_an_empty_number_of_threads_is_none(monkeypatch):
    monkeypatch.setenv("NPROC", "")
    assert machine.threads() == len(machine.cores())


def test_a_worker_gets_all_options_and_the_threads_of_its_workdir(base, tmp_path, monkeypatch):
    """Its run on 16 devices fails where there is one. No other worker tries it, but the next call
    of the sweep."""
    monkeypatch.setenv("NPROC", "1")
    machine.write_threads(tmp_path, 7)
    specs = lab.product(base, seeds=[0])
    add_specs(specs, tmp_path)
    command = worker_command(tmp_path, lab.RunOptions(model_parallel=16, shard_state=True))
    assert "--shard_state" in command
    assert [main(command[3:]), main(command[3:])] == [1, 0]
    assert machine.threads() == 7
    [error] = tmp_path.glob("runs/*/error.txt")
    assert "16" in error.read_text().splitlines()[-1]
    assert len(in_process(specs, tmp_path)) == 1


def test_a_worker_that_is_killed_before_its_first_run_is_an_error_with_the_signal(base, tmp_path):
    """As by SIGILL of jaxlib on a processor without AVX."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 4)\n")
    executor = lab.LocalExecutor(1, environment={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(lab.SweepFailed, match="seed0: killed by SIGILL"):
        lab.sweep(lab.product(base, seeds=[0]), tmp_path / "w", executor=executor, progress=False)


@pytest.mark.slow
def test_numbers_do_not_depend_on_how_many_run_at_once(base, tmp_path):
    specs = lab.product(base, seeds=[0, 1])
    two = lab.sweep(specs, tmp_path / "two", executor=lab.LocalExecutor(2), progress=False)
    one = lab.sweep(specs, tmp_path / "one", executor=lab.LocalExecutor(1), progress=False)
    assert scores(two) == scores(one)
    assert read_threads(tmp_path / "two") == read_threads(tmp_path / "one") is not None


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_run_alone(base, tmp_path):
    """The run has an error.txt that says so; the others are complete; the same call mends it."""
    specs = lab.product(lab.with_values(base, {"train.steps": 3000}), seeds=[0])
    specs += [dataclasses.replace(one, id="short") for one in lab.product(base, seeds=[1])]
    executor = lab.LocalExecutor(1)

    def kill():
        folder = run_folder(tmp_path, specs[0])
        wait_for((folder / "metrics.jsonl").exists)
        os.kill(last_process(folder), signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(lab.SweepFailed, match=r"seed0: killed by SIGKILL \(out of memory\?\)"):
        lab.sweep(specs, tmp_path, executor=executor, progress=False)
    assert [run.spec.id for run in lab.load_results(tmp_path)] == ["short"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_save_and_end_with_their_sweep(base, tmp_path, number):
    specs = lab.product(lab.with_values(base, {"train.steps": 100_000}), seeds=[0])
    add_specs(specs, tmp_path)
    folder = run_folder(tmp_path, specs[0])
    words = [sys.executable, "-c", SWEEP, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE) as process:
        wait_for(lambda: [*folder.glob("checkpoints/*0")] or process.poll() is not None)
        process.send_signal(number)
        error = process.communicate(timeout=120)[1].decode()
    assert number == signal.SIGKILL or "Stopped" in error
    wait_for(lambda: not holder(folder))
    assert not (folder / "lock.json").exists()  # it left as one leaves
    assert not (folder / "result.json").exists()


@pytest.mark.parametrize("waits", deep([False, True], True))
def test_a_run_of_another_process_is_waited_for_or_left(base, tmp_path, waits):
    one, two = lab.product(base, seeds=[0, 1])
    add_specs([one, two], tmp_path)
    folder = run_folder(tmp_path, one)
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as holding:
        holding.enter_context(hold(folder))

        class Frees(lab.InProcess):
            def running(self):
                if waits:  # while the sweep waits
                    threading.Timer(0.5, holding.close).start()
                return False

        results = lab.sweep([one, two], tmp_path, executor=Frees(), progress=False, waits=waits)
    assert [run.spec.seed for run in results] == ([0, 1] if waits else [1])


class Stop:
    """A logger that sends a signal to its process in the last step of the first run."""

    def __init__(self, info):
        self.info = info

    def log_scalars(self, step, values):
        last = self.info.hyperparameters["config"]["train"]["steps"]
        sent = self.info.folder.parent.parent / "sent"
        if step < last or "train/loss" not in values or sent.exists():
            return
        sent.touch()
        os.kill(os.getpid(), signal.Signals[os.environ["STOP_SIGNAL"]])

    def finish(self):
        pass


@pytest.fixture(scope="module")
def expected(base, tmp_path_factory):
    return scores(in_process(lab.product(base, seeds=[0, 1]), tmp_path_factory.mktemp("whole")))


def scores(results):
    return [run.scores.heldout for run in results]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("where", ["sweep", "worker"])
def test_a_signal_ends_it_and_the_repeated_call_has_the_same_numbers(
    base, expected, tmp_path, monkeypatch, name, where
):
    """Of the sweep; also of a worker, whose exit code then is 75."""
    specs = lab.product(base, seeds=[0, 1])
    monkeypatch.setenv("STOP_SIGNAL", name)
    monkeypatch.setitem(LOGGERS, "stop", Stop)
    stops = lab.RunOptions(loggers=("stop",), speaks=False)
    if where == "worker":
        add_specs(specs, tmp_path)
        assert main([str(tmp_path), "--loggers=stop"]) == STOPPED
    else:
        with pytest.raises(Stopped):
            in_process(specs, tmp_path, stops)
    assert (tmp_path / "sent").exists()
    assert not (tmp_path / "runs" / specs[1].id).exists()
    assert scores(in_process(specs, tmp_path, stops)) == expected


HANGS = """
import pathlib, signal, time
place = pathlib.Path(__file__).parent
signal.signal(signal.SIGTERM, lambda *_: (place / "asked").open("a").write("."))
(place / "began").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_third_ctrl_c_ends_workers_that_do_not_stop(base, tmp_path, capfd):
    (tmp_path / "sitecustomize.py").write_text(HANGS)  # run when a worker starts
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    executor = lab.LocalExecutor(1, environment=path)

    def press():
        began, asked = tmp_path / "began", tmp_path / "asked"
        for condition in (began.exists, asked.exists, lambda: len(asked.read_text()) > 1):
            wait_for(condition)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    specs = lab.product(base, seeds=[0, 1])
    with pytest.raises(KeyboardInterrupt):
        lab.sweep(specs, tmp_path / "work", executor=executor, progress=False)
    assert not executor.running()
    assert "1 worker" in capfd.readouterr().err
