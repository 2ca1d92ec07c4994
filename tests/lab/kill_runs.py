"""SIGKILL at random moments: every run ends with the numbers of a run that was never stopped.

    python tests/lab/kill_runs.py KILLS [SEED]

Half of the kills hit a process that trains runs by `run_one`, half a worker of a sweep or the sweep
itself. A killed process is started again, with probability 2/3 to be killed once more. When all
runs have ended, their scores and the lines of their metrics.jsonl must be those of the same runs
without a kill. Prints a line for each kill and exits with 1 at the first difference.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_experiment import MODEL, train_config

from attnlab import lab
from attnlab.data import Text
from attnlab.lab.workdir import holder, last_process


def specs(text: Path) -> list[lab.RunSpec]:
    """Two seeds of a tiny model that logs, evaluates and saves often."""
    train = train_config(400, every=20, windows=32, curve_windows=16, checkpoint_every=20)
    base = lab.Experiment(model=MODEL, train=train, data=Text(path=str(text)))
    return lab.product(base, seeds=[0, 1])


def work(mode: str, folder: Path, text: Path) -> None:
    """What a process does that is killed."""
    if mode == "sweep":
        lab.sweep(specs(text), folder, executor=lab.LocalExecutor(1, threads=1), progress=False)
        return
    for spec in specs(text):
        lab.run_one(spec, folder, options=lab.RunOptions(speaks=False))


def start(mode: str, folder: Path, text: Path) -> subprocess.Popen:
    """A process that works."""
    words = [sys.executable, __file__, "--work", mode, str(folder), str(text)]
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, env=os.environ | {"NPROC": "1"}, **output)


def outcome(folder: Path) -> dict[str, object]:
    """Scores and metrics of every run. Raises where a metric is there twice."""
    found: dict[str, object] = {}
    for run in sorted((folder / "runs").iterdir()):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        keys = [(row["step"], name) for row in rows for name in row if name != "step"]
        assert len(keys) == len(set(keys)), f"{run} has a metric twice"
        scores = json.loads((run / "result.json").read_text())["scores"]
        found[run.name] = scores, sorted(json.dumps(row, sort_keys=True) for row in rows)
    return found


def victims(process: subprocess.Popen, folder: Path) -> list[int]:
    """The process, and the worker that holds a run."""
    runs = folder / "runs"
    held = [last_process(run) for run in runs.iterdir() if holder(run)] if runs.exists() else []
    return [process.pid, *(pid for pid in held if pid not in (None, process.pid))]


def one_story(
    mode: str, folder: Path, text: Path, seconds: float, rng: random.Random, most: int
) -> int:
    """Works until all runs have ended. Returns how many kills there were."""
    kills = 0
    while True:
        process = start(mode, folder, text)
        if kills < most and (not kills or rng.random() < 2 / 3):
            try:
                process.wait(rng.uniform(0.2, 1.0) * seconds)
            except subprocess.TimeoutExpired:
                victim = rng.choice(victims(process, folder))
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(victim, signal.SIGKILL)
                    kills += 1
                    what = "sweep" if victim == process.pid and mode == "sweep" else "worker"
                    print(f"killed the {what} of {folder.name}", flush=True)
        process.wait()
        time.sleep(0.5)  # a worker whose sweep was killed saves and ends
        if process.returncode == 0:
            return kills


def main(count: int, seed: int) -> int:
    """Kills; the exit code."""
    rng, kills, stories = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        place, text = Path(name), Path(name) / "text"
        text.write_bytes(bytes(random.Random(1).choices(b"abcdefghi", k=8000)))
        work_of = {}
        for mode in ("run", "sweep"):
            began = time.monotonic()
            assert start(mode, place / f"whole {mode}", text).wait() == 0
            work_of[mode] = time.monotonic() - began
        expected = outcome(place / "whole run")
        assert outcome(place / "whole sweep") == expected
        while kills < count:
            mode = ("run", "sweep")[stories % 2]
            folder = place / f"{mode} {stories}"
            kills += one_story(mode, folder, text, work_of[mode], rng, count - kills)
            stories += 1
            if outcome(folder) != expected:
                print(f"{folder.name} ended with other numbers")
                return 1
        print(f"{kills} kills, {stories} folders: all ended with the numbers of the whole runs")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
