"""A signal in the last step of a run stops the sweep; the repeated call has the same numbers."""

import os
import signal
import threading
import time

import pytest
import small_experiment
import stopping
from conftest import ROOT

from attnlab import lab
from attnlab.lab.spec import write_specs
from attnlab.lab.worker import STOPPED, main
from attnlab.training import Stopped
from attnlab.training.loggers import LOGGERS

QUIET = lab.RunOptions(speaks=False)
del LOGGERS["stop"]  # each test registers it


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    train = small_experiment.train_config(4, every=4)
    base = small_experiment.experiment(tmp_path_factory, small_experiment.MODEL, train)
    return lab.product(base, seeds=[0, 1])


@pytest.fixture(scope="module")
def expected(specs, tmp_path_factory):
    return scores(in_process(specs, tmp_path_factory.mktemp("whole"), QUIET))


def in_process(specs, folder, options):
    return lab.sweep(specs, folder, executor=lab.InProcess(options), progress=False)


def scores(results):
    return [run.scores.heldout for run in results]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("where", ["sweep", "worker"])
def test_a_signal_ends_it_and_the_repeated_call_has_the_same_numbers(
    specs, expected, tmp_path, monkeypatch, name, where
):
    """Also a worker, whose exit code then is 75."""
    monkeypatch.setenv("STOP_SIGNAL", name)
    monkeypatch.setitem(LOGGERS, "stop", stopping.Stop)
    stops = lab.RunOptions(loggers=("stop",), speaks=False)
    if where == "worker":
        (tmp_path / "specs.json").write_text(write_specs(specs))
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
def test_a_third_ctrl_c_ends_workers_that_do_not_stop(specs, tmp_path, capfd):
    (tmp_path / "sitecustomize.py").write_text(HANGS)  # run when a worker starts
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    executor = lab.LocalExecutor(1, environment=path)

    def wait_for(condition):
        while not condition():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    def press():
        asked = tmp_path / "asked"
        wait_for((tmp_path / "began").exists)
        wait_for(asked.exists)
        wait_for(lambda: len(asked.read_text()) > 1)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        lab.sweep(specs, tmp_path / "work", executor=executor, progress=False)
    assert not executor.running()
    assert "1 worker" in capfd.readouterr().err
