"""SIGKILL at random moments: every run ends with the numbers of a run that was never stopped.

    python tests/lab/kill_runs.py KILLS [SEED]

Half of the kills hit a process that trains runs on its own, half a worker of a sweep or the sweep
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

from small_experiment import MODEL, SWEEP, train_config

from attnlab import lab
from attnlab.data import Text
from attnlab.lab.machine import write_threads
from attnlab.lab.workdir import add_specs, holder, last_process

COMMANDS = {"worker": ["-m", "attnlab.lab"], "sweep": ["-c", SWEEP]}
"""Options of Python before the folder."""


def planned(folder: Path, text: Path) -> Path:
    """The folder with two seeds of a tiny model that logs, evaluates and saves often."""
    train = train_config(400, every=20, windows=32, curve_windows=16, checkpoint_every=20)
    base = lab.Experiment(model=MODEL, train=train, data=Text(path=str(text)))
    add_specs(lab.product(base, seeds=[0, 1]), folder)
    write_threads(folder, 1)
    return folder


def start(mode: str, folder: Path) -> subprocess.Popen:
    """A process that works."""
    words = [sys.executable, *COMMANDS[mode], str(folder)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


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


def one_story(mode: str, folder: Path, seconds: float, rng: random.Random, most: int) -> int:
    """Works until all runs have ended. Returns how many kills there were."""
    kills = 0
    while True:
        process = start(mode, folder)
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
        for mode in COMMANDS:
            folder, began = planned(place / f"whole {mode}", text), time.monotonic()
            assert start(mode, folder).wait() == 0
            work_of[mode] = time.monotonic() - began
        expected = outcome(place / "whole worker")
        assert outcome(place / "whole sweep") == expected
        while kills < count:
            mode = [*COMMANDS][stories % 2]
            folder = planned(place / f"{mode} {stories}", text)
            kills += one_story(mode, folder, work_of[mode], rng, count - kills)
            stories += 1
            if outcome(folder) != expected:
                print(f"{folder.name} ended with other numbers")
                return 1
        print(f"{kills} kills, {stories} folders: all ended with the numbers of the whole runs")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
