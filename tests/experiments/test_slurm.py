"""What SLURM is given, and what a script does in a task; tests/slurm has a SLURM of its own."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import command
from conftest import ROOT

from experiments import sweep
from experiments.configs import byte_lm
from experiments.running import launch, slurm
from experiments.running.slurm import Asked, Queued

# Says what it was asked, and answers what the test has put there.
FAKE = """#!/bin/bash
echo "$(basename "$0") $*" >> "$PLACE/asked"
cat "$PLACE/$(basename "$0").says" 2> /dev/null
[ ! -e "$PLACE/$(basename "$0").fails" ] || { echo "it is down" >&2; exit 1; }
"""
NAMES = ["a", "b-lr0.01", "c", "d", "e"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with the commands of a SLURM of arrays of three, in front of the others."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("sbatch", "squeue", "scontrol"):
        (place / name).write_text(FAKE)
        (place / name).chmod(0o755)
    (place / "scontrol.says").write_text("Licenses = (null)\nMaxArraySize            = 3\n")
    (place / "sbatch.says").write_text("17;main\n")
    monkeypatch.setenv("PLACE", str(place))
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


def lines_of(folder, names=NAMES):
    words = ("python", "-m", "experiments.run")
    return {name: shlex.join([*words, f"--workdir={folder / name}"]) for name in names}


def complete(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "result.json").write_text('{"status": "complete"}')


def asked_of(place, program):
    path = place / "asked"
    rows = path.read_text().splitlines() if path.exists() else []
    return [row.partition(" ")[2] for row in rows if row.startswith(f"{program} ")]


def test_what_is_submitted(tmp_path, cluster):
    """Five arms are two arrays, each with its tasks of what is left and its part of --jobs."""
    folder = tmp_path / "it's 5% done"
    complete(folder, "b-lr0.01")
    with pytest.raises(Queued, match="1 complete, 4 submitted as job 17, 17"):
        slurm.run(lines_of(folder), folder, Asked("--time=4:00:00 -p gpu", 5))
    scripts = [folder / "slurm/from-a.sh", folder / "slurm/from-d.sh"]
    assert asked_of(cluster, "sbatch") == [f"--parsable {script}" for script in scripts]
    texts = [script.read_text() for script in scripts]
    for text, array in zip(texts, ("0,2%3", "0-1%2"), strict=True):
        options = re.findall(r"^#SBATCH (.*)$", text, re.M)
        assert f"--array={array}" in options
        assert options[-1] == "--time=4:00:00 -p gpu"  # the last one wins
        assert "--signal=B:USR1@120" in options
        assert any(o.startswith("--output=") and "5%% done" in o for o in options)
    for name, line in lines_of(folder).items():
        assert sum(f"command=({line}) ;;" in text for text in texts) == 1, name
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)


def test_what_is_in_the_queue_is_not_submitted_again(tmp_path, cluster):
    """Whoever has submitted it, and under whatever limit it was split."""
    folder = tmp_path / "arms"
    here, other = folder / "slurm/from-b-lr0.01.sh", tmp_path / "other/slurm/from-a.sh"
    rows = [f"0 {here}", f"2 {here}", f"0 {other}", f"9 {here}", "N/A /bin/sleep", "N/A (null)"]
    (cluster / "squeue.says").write_text("".join(f"{row}\n" for row in rows))
    assert slurm.in_queue(NAMES, folder) == {"b-lr0.01", "d"}
    complete(folder, "c")
    with pytest.raises(Queued, match="1 complete, 2 in the queue, 2 submitted as job 17, 17"):
        slurm.run(lines_of(folder), folder, Asked())
    assert "--array=0\n" in (folder / "slurm/from-a.sh").read_text()
    assert "--array=1\n" in (folder / "slurm/from-d.sh").read_text()
    assert asked_of(cluster, "squeue")[0] == "--me --array --noheader --format=%K %o"


def test_all_are_in_the_queue_or_complete(tmp_path, cluster):
    folder = tmp_path / "arms"
    complete(folder, "a", "c", "d", "e")
    (cluster / "squeue.says").write_text(f"1 {folder}/slurm/from-a.sh\n")
    with pytest.raises(Queued, match=r"4 complete, 1 in the queue\. Every"):
        slurm.run(lines_of(folder), folder, Asked())
    complete(folder, "b-lr0.01")
    (folder / "e/result.json").write_text('{"status": "diverged"}')
    ends = slurm.run(lines_of(folder), folder, Asked())
    assert ends == dict.fromkeys(NAMES, "complete") | {"e": "diverged"}
    assert not asked_of(cluster, "sbatch")


def test_only_written(tmp_path, monkeypatch, capsys):
    """On a machine without SLURM, as its own limit of 1001 would have it."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Queued, match="5 to be submitted as above"):
        slurm.run(lines_of(tmp_path), tmp_path, Asked(submits=False))
    assert capsys.readouterr().out == f"sbatch {tmp_path}/slurm/from-a.sh\n"
    assert "#SBATCH --array=0-4\n" in (tmp_path / "slurm/from-a.sh").read_text()


def test_before_anything_is_written(tmp_path, cluster, monkeypatch):
    folder = tmp_path / "arms"
    for options, says in {
        "--time=1 --array=3": "--array is what this command makes",
        "-a 3": "-a is what this command makes",
        "--time='1": "No closing quotation",
        "gpu": "is no line of options",
        "--time=1\nrm": "is no line of options",
    }.items():
        with pytest.raises(ValueError, match=says):
            slurm.check(Asked(options))
    slurm.check(Asked("--time=1 --comment='a b'"))
    with pytest.raises(ValueError, match=r"--jobs=1: the arms are 2 arrays, for MaxArraySize = 3"):
        slurm.run(lines_of(folder), folder, Asked(at_once=1))
    (cluster / "squeue.fails").touch()
    with pytest.raises(ValueError, match=r"^squeue --me .* says: it is down$"):
        slurm.run(lines_of(folder), folder, Asked())
    (cluster / "scontrol.says").write_text("MaxArraySize            = 0\n")
    with pytest.raises(ValueError, match="this cluster has no job arrays"):
        slurm.run(lines_of(folder), folder, Asked())
    assert not folder.exists()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"no sbatch on this machine; .* with --print_only"):
        slurm.check(Asked())
    slurm.check(Asked(submits=False))


def test_a_script_that_is_refused(tmp_path, cluster):
    (cluster / "sbatch.fails").touch()
    with pytest.raises(ValueError, match=r"it is down; the script is .*/from-a\.sh"):
        slurm.run(lines_of(tmp_path), tmp_path, Asked())


def test_the_command_line_of_a_changed_config_makes_it():
    """Of a tuned arm, say: its flags are what is not as in the config file."""
    base = byte_lm.get_config("tiny")
    assert launch.changes(base, sweep.with_changes(base, {"train.steps": 20})) == {}
    rate = 0.1 + 0.2
    config = sweep.at_rate(base, rate, seeds=(7,))
    changes = launch.changes(base, config)
    assert changes.keys() == {
        "train.learning_rate", "train.final_learning_rate", "train.seeds",
    }  # fmt: skip
    line = sweep.command("path.py", changes, ROOT / "there", threads=3)
    assert f"--config.train.learning_rate={rate!r} " in line
    assert line.endswith(f"--threads=3 --workdir={ROOT}/there")


ARM = """
trap 'mkdir -p {made}; exit 75' TERM
touch began
for _ in $(seq 600); do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("number", "made", "code", "requeued"),
    [
        (signal.SIGUSR1, "checkpoints/7", 75, True),
        (signal.SIGUSR1, "checkpoints/5", 75, False),  # no step more than it began with
        (signal.SIGTERM, "checkpoints/7", 75, False),  # scancel
        (signal.SIGUSR1, "checkpoints/7 result.json", 0, False),  # it was about to end
        (None, "checkpoints/7", 137, False),
    ],
)
def test_a_task(tmp_path, cluster, number, made, code, requeued):
    """The script itself: USR1 makes the arm save, and the task is queued again; nothing else."""
    folder = tmp_path / "a b"
    (folder / "arm/checkpoints/5").mkdir(parents=True)
    stub = folder / "stub.sh"
    stub.write_text(f"cd '{folder}/arm'; echo $$ > pid; {ARM.format(made=made)}")
    script = folder / "slurm/from-other.sh"
    lines = {"other": "false", "arm": f"bash '{stub}'"}
    script.parent.mkdir()
    script.write_text(slurm.written(lines, {"arm"}, script, Asked(exports={"MORE": "x y"}), None))
    tasks = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"}
    task = subprocess.Popen(
        ["bash", script], env=os.environ | tasks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    until = time.monotonic() + 60
    while not (folder / "arm/began").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    if number:
        task.send_signal(number)
    else:
        os.kill(int((folder / "arm/pid").read_text()), signal.SIGKILL)
    said = task.communicate(timeout=60)[0].decode()
    assert task.returncode == code, said
    assert asked_of(cluster, "scontrol") == (["requeue 17_1"] if requeued else [])
    assert ("ask for more --time" in said) == (made == "checkpoints/5")
    assert f"bash {stub}" in said


@pytest.mark.slow
def test_a_sweep_of_arms_that_others_run(tmp_path, cluster, nine_letters):
    """The whole command, a stub for SLURM; the arms run as its scripts say, one after the other."""
    folder, data = tmp_path / "arms", f"--config.data.path={nine_letters}"
    words = [f"--config={ROOT}/experiments/configs/heads_and_sharing.py:tiny", data]
    words += [f"--workdir={folder}", "--threads=1", "--config.train.seeds=0"]
    local = command("experiments.sweep", *words, "--slurm=--time=1")
    assert local.stderr == "error: --slurm are options of sbatch; add --launcher=slurm\n"
    printed = command("experiments.sweep", *words, "--print_only").stdout.splitlines()
    (cluster / "scontrol.says").write_text("MaxArraySize            = 1001\n")

    def ask(*more):
        said = ["experiments.sweep", *words, "--launcher=slurm", *more]
        return subprocess.run(
            [sys.executable, "-m", *said], cwd=ROOT, capture_output=True, text=True
        )

    done = ask("--slurm=--time=1", "--print_only")
    assert done.returncode == 0, done.stderr
    [script] = (folder / "slurm").glob("*.sh")
    assert done.stdout == f"sbatch {script}\n"
    text = script.read_text()
    assert re.findall(r"command=\((.*)\) ;;", text) == printed
    assert not asked_of(cluster, "sbatch")
    for task in (0, 4):
        tasks = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": str(task)}
        subprocess.run(["bash", script], env=os.environ | tasks, cwd=ROOT, check=True)
    done = ask("--jobs=3")
    assert done.returncode == 0, done.stderr
    assert "6 arms in " in done.stderr
    assert "2 complete, 4 submitted as job 17" in done.stderr
    assert "--array=1-3,5%3\n" in script.read_text()
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_a_tuned_sweep_is_a_round_a_call(tmp_path, cluster, nine_letters):
    """Trials first; where they are there, the arms at the rates that they chose."""
    config = tmp_path / "one.py"
    config.write_text(
        "from experiments.configs import byte_lm\nget_config = byte_lm.get_config\n"
        "def sweep(add, arg=''):\n    add(**{'model.heads.layout': 'wide'})\n"
    )
    folder = tmp_path / "arms"
    words = [f"--config={config}:tiny", f"--config.data.path={nine_letters}", "--threads=1"]
    words += [f"--workdir={folder}", "--config.train.seeds=0", "--config.data.validation=0.1"]
    words += [
        "--tune=3",
        "--launcher=slurm",
        "--config.train.learning_rate=0.048",
    ]  # about the best
    (cluster / "scontrol.says").write_text("MaxArraySize            = 1001\n")
    for round_ in range(8):
        done = subprocess.run(
            [sys.executable, "-m", "experiments.sweep", *words],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        scripts = asked_of(cluster, "sbatch")
        if len(scripts) == round_:
            break
        script = scripts[-1].removeprefix("--parsable ")
        text = Path(script).read_text()
        first, _, last = re.search(r"--array=(\d+)(-(\d+))?", text).group(1, 2, 3)
        for task in range(int(first), int(last or first) + 1):
            tasks = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": str(task)}
            subprocess.run(["bash", script], env=os.environ | tasks, cwd=ROOT, check=True)
    assert round_ >= 2  # trials, perhaps more of them, and the arm
    assert f"{folder}/slurm/from-wide.sh" in scripts[-1]
    assert (folder / "wide/result.json").exists()
    assert "report: " in done.stdout
