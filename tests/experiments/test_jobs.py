"""Many arms side by side: who gets what, who waits for whom, and what is told of how they end."""

import io
import json
import os
import re
import signal
import sys
import threading
import time

import pytest
from conftest import ROOT
from ml_collections import ConfigDict
from rich.console import Console

from attnlab.training import Stopped
from experiments.running import display, jobs, lock, machine
from experiments.running.jobs import LEFT, Room, divide

# Stands for an arm: takes the same request, and ends as its config says.
STUB = """
import json, os, pathlib, pickle, signal, sys, time

asked = pickle.load(sys.stdin.buffer)
folder, act = asked["folder"], asked["config"]["act"]
folder.mkdir(parents=True, exist_ok=True)
told = {n: asked[n] for n in ("cores", "threads")} | {"began": time.time()}
told |= {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
told |= {"memory": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")}
print(f"[{asked['name']}] step 1", file=sys.stderr, flush=True)
if act == "wait":
    signal.signal(signal.SIGTERM, lambda *_: ((folder / "saved").touch(), sys.exit(75)))
    (folder / "waits").touch()
    time.sleep(600)
(folder / "began").touch()
while act == "meet" and len(list(folder.parent.glob("*/began"))) < 2:
    time.sleep(0.01)
for i in range(15):
    print("line", i, flush=True)
if act == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "crash":
    sys.exit(3)
(folder / "told").write_text(json.dumps(told | {"ended": time.time()}))
(folder / "result.json").write_text(json.dumps({"status": act}))
"""


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    monkeypatch.setattr(jobs, "ARM", [sys.executable, "-c", STUB])
    monkeypatch.setattr(jobs, "jax_flags", dict)
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    monkeypatch.chdir(ROOT)


def run(folder, acts, room=None, **options):
    configs = {name: ConfigDict({"act": act, "train": {"steps": 4}}) for name, act in acts.items()}
    return jobs.run(configs, folder, room or Room(2, 1, [0, 1], []), **options)


def told(folder, name):
    return json.loads((folder / name / "told").read_text())


@pytest.mark.parametrize(
    ("found", "asked", "expected"),
    [
        # (backend, devices, cores), (arms, jobs, threads) -> (jobs, threads)
        (("cpu", 1, 2), (6, None, None), (2, 1)),
        (("cpu", 1, 2), (6, 1, None), (1, 1)),
        (("cpu", 1, 2), (6, None, 2), (1, 2)),
        (("cpu", 1, 2), (1, None, None), (1, 2)),
        (("cpu", 4, 16), (6, None, None), (6, 2)),
        (("cpu", 1, 16), (6, 3, None), (3, 2)),
        (("cpu", 1, 16), (40, None, None), (16, 1)),
        (("cpu", 1, 16), (6, None, 5), (3, 5)),
        (("cpu", 1, 2), (6, 5, 8), (5, 8)),
        (("gpu", 8, 96), (6, None, None), (6, None)),
        (("gpu", 4, 96), (6, None, None), (4, None)),
        (("gpu", 4, 96), (6, 8, None), (8, None)),
        (("tpu", 4, 96), (6, None, None), (1, None)),
    ],
)
def test_a_machine_is_divided(monkeypatch, found, asked, expected):
    monkeypatch.setattr(jobs, "_devices", lambda: found[:2])
    monkeypatch.setattr(machine, "cores", lambda: list(range(found[2])))
    assert divide(*asked)[:2] == expected


def test_a_tpu_has_one_process(monkeypatch):
    monkeypatch.setattr(jobs, "_devices", lambda: ("tpu", 4))
    with pytest.raises(ValueError, match="a TPU belongs to one process: --jobs=1, not 2"):
        divide(6, 2)


def test_what_jax_finds_is_what_an_arm_finds():
    assert jobs._devices() == ("cpu", 1)


def test_arms_run_side_by_side_with_a_share_each(tmp_path):
    room = Room(2, 3, [4, 5, 6, 7, 8], [])
    acts = dict.fromkeys("abcde", "meet")  # each waits for a second one
    assert run(tmp_path, acts, room) == acts
    rows = [told(tmp_path, name) for name in "abcde"]
    assert {row["threads"] for row in rows} == {3}
    assert {tuple(row["cores"]) for row in rows} == {(4, 5), (6, 7, 8)}
    at_once = [sum(r["began"] <= t["began"] < r["ended"] for r in rows) for t in rows]
    assert max(at_once) <= 2


def test_every_arm_has_its_gpus(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    run(tmp_path / "one", {"a": "complete", "b": "complete"}, Room(2, None, [0], ["3", "5"]))
    rows = [told(tmp_path / "one", name) for name in "ab"]
    assert {(r["gpu"], r["memory"], r["cores"]) for r in rows} == {("3", None, None),
                                                                  ("5", None, None)}  # fmt: skip
    run(tmp_path / "two", {"a": "complete"}, Room(1, None, [0], ["3", "5"]))
    assert told(tmp_path / "two", "a")["gpu"] == "3,5"
    run(tmp_path / "three", dict.fromkeys("abc", "complete"), Room(3, None, [0], ["3", "5"]))
    assert {told(tmp_path / "three", n)["memory"] for n in "abc"} == {"0.375"}


def test_one_that_fails_is_told_and_the_others_go_on(tmp_path, capfd):
    acts = {"a": "killed", "b": "complete", "c": "crash", "d": "diverged", "e": "complete"}
    assert run(tmp_path, acts) == acts | {
        "a": "killed by SIGKILL (out of memory?)",
        "c": "ended with exit code 3",
    }
    said = capfd.readouterr().err
    for name, end in (("a", "killed by SIGKILL (out of memory?)"), ("c", "ended with exit code 3")):
        last = "".join(f"[{name}] line {i}\n" for i in range(5, 15))
        assert f"[{name}] its last lines:\n{last}" in said
        number = f"arm {'abcde'.index(name) + 1}/5"
        assert said.count(f"[{name}] {number} begins\n") == 1
        assert f"[{name}] {number}: {end}; " in said
    assert said.count("its last lines") == 2
    assert "; 5 of 5 have ended in 0." in said
    assert said.count("[a] step 1\n") == 1


def wait_for(*paths):
    until = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on(tmp_path, number):
    def ask():
        wait_for(tmp_path / "b/waits", tmp_path / "c/waits")
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=ask).start()
    with pytest.raises(Stopped, match="stopped; 1 of 4 arms are complete, the others go on"):
        run(tmp_path, {"a": "complete", "b": "wait", "c": "wait", "d": "complete"})
    assert (tmp_path / "b/saved").exists()
    assert (tmp_path / "c/saved").exists()
    assert not (tmp_path / "d").exists()
    assert signal.getsignal(number) == before


def test_an_arm_of_another_process_is_waited_for_at_last(tmp_path, capfd):
    (tmp_path / "a").mkdir()
    free = threading.Event()

    def hold():
        with lock.own(tmp_path / "a"):
            free.set()
            wait_for(tmp_path / "c/result.json")

    threading.Thread(target=hold).start()
    free.wait()
    acts = dict.fromkeys("abc", "complete")
    assert run(tmp_path, acts, Room(1, 1, [0], [])) == acts
    assert told(tmp_path, "a")["began"] > told(tmp_path, "c")["ended"]
    told_of = f"[a] in use by process {os.getpid()} on "
    said = capfd.readouterr().err
    assert said.count(told_of) == 1
    assert re.search(r"\[a\] in use by .*: put off\n", said)


def test_or_left_to_it(tmp_path, capfd):
    (tmp_path / "a").mkdir()
    with lock.own(tmp_path / "a"):
        ends = run(tmp_path, dict.fromkeys("ab", "complete"), waits=False)
    assert ends == {"a": LEFT, "b": "complete"}
    assert "left to it\n" in capfd.readouterr().err
    assert not (tmp_path / "a/result.json").exists()


def test_an_arm_ends_with_the_sweep():
    """Whose end closes its standard input, however it comes."""
    code = (
        "import signal, sys, threading, time; from experiments.running import jobs;"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75));"
        "threading.Thread(target=jobs._follow, daemon=True).start(); time.sleep(60)"
    )
    process = jobs.subprocess.Popen([sys.executable, "-c", code], stdin=jobs.subprocess.PIPE)
    process.stdin.close()
    assert process.wait(timeout=60) == 75


def test_bars_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "EVERY", 0)
    screen = Console(file=io.StringIO(), force_terminal=True, width=70)
    configs = {name: ConfigDict({"train": {"steps": 40}}) for name in ("wide", "narrow")}
    for name in configs:
        (tmp_path / name).mkdir()
    (tmp_path / "wide/metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"st')
    with display.Display(configs, tmp_path, screen) as bars:
        bars.show(["wide", "narrow"], 0)
        bars.say("wide", "[bold]step 20[/bold]")
        bars.show(["wide"], 1)
        bars._bars.refresh()
        shown = screen.file.getvalue()
    assert "[wide] [bold]step 20[/bold]\n" in shown
    assert re.search(r"wide.*20/40", shown)
    assert re.search(r"narrow.* 0/40", shown)
    assert re.search(r"arms.*1/2", shown)
    assert "narrow" not in shown.splitlines()[-1]


def test_the_last_step_of_a_file_that_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert display.last_step(path) == 0
    path.write_text('{"step": 1')
    assert display.last_step(path) == 0
    rows = [json.dumps({"step": i, "loss": "x" * 1000}) for i in range(200)]
    path.write_text("\n".join(rows) + '\n{"step": 2000, "lo')
    assert display.last_step(path) == 199


@pytest.mark.slow
@pytest.mark.skipif(len(machine.cores()) < 2, reason="one core")
def test_bits_depend_on_threads_not_on_cores():
    """What the whole design rests on: a long sum, by as many threads on one core and on two."""
    code = (
        "import os, sys; cores = [int(n) for n in sys.argv[1].split(',')];"
        "os.sched_setaffinity(0, cores); os.environ['NPROC'] = sys.argv[2];"
        "import jax, jax.numpy as jnp; from experiments.running import machine;"
        "x = jax.random.normal(jax.random.key(0), (3000, 700));"
        "print(float.hex(float(jax.jit(lambda x: jnp.sum(jnp.sin(x)))(x))), machine.threads())"
    )
    one, two = machine.cores()[:2]
    asked = [(f"{one}", "2"), (f"{one},{two}", "2"), (f"{one},{two}", "1")]
    got = [
        jobs.subprocess.check_output([sys.executable, "-c", code, *words], text=True).split()
        for words in asked
    ]
    assert got[0] == got[1]
    assert [threads for _, threads in got] == ["2", "2", "1"]
