"""The commands as a user types them: results, resume after SIGKILL, refusals."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from commands import command, user_environment
from conftest import ROOT, deep
from experiments.running import arm, launch, lock

from attnlab.data import Text
from experiments import report
from experiments.configs import byte_lm, token_lm

BYTE_LM = "experiments/configs/byte_lm.py"
SWEEP = "experiments/configs/heads_and_sharing.py"


@pytest.fixture(scope="module")
def text(nine_letters):
    """A text of our own, so that the tests do not read 12 MB each."""
    return f"--config.data.path={nine_letters}"


def run(folder, words, *flags, **options):
    words = f"--config={BYTE_LM}:{words}"
    return command("experiments.run", words, f"--workdir={folder}", *flags, **options)


def losses(result):
    """The printed losses, one per seed."""
    assert result.returncode == 0, result.stderr
    return re.findall(r"seed \d+: held-out ([\d.]+) bits", result.stdout)


def everything(folder):
    """Every file of a folder with its bytes."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_one_run_and_again(tmp_path, text):
    first = run(tmp_path / "run", "wide,albert,tiny", text, "--config.model.num_layers=3")
    assert len(losses(first)) == 2
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["layout"], result["plan"], result["status"]) == ("wide", "albert", "complete")
    assert result["model"]["num_layers"] == 3
    before = everything(tmp_path / "run")
    again = run(tmp_path / "run", "wide,albert,tiny", text, "--config.model.num_layers=3")
    assert again.stdout == first.stdout
    assert everything(tmp_path / "run") == before


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "cross"), [(False, "own"), (True, "own"), (True, "merged")])
def test_an_encoder_and_a_decoder_train(tmp_path, text, shared, cross):
    if shared:  # in this process: faster
        config = byte_lm.get_config("seq2seq,tiny")
        config.data.path, config.model.encoder.shares_decoder = text.partition("=")[2], True
        config.model.encoder.cross = cross
        result = arm.run(config, tmp_path / "run")
    else:
        done = run(tmp_path / "run", "seq2seq,tiny", text)
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"held-out [\d.]+ bits per target token", done.stdout)) == 2
        result = json.loads((tmp_path / "run" / "result.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    first, last = (np.mean(rows[i]["train/loss"]) for i in (0, -2))
    assert last < first - 0.5
    assert result["model"]["encoder"]["shares_decoder"] == shared
    with np.load(tmp_path / "run" / "maps.npz") as maps:  # of the decoder to the source
        assert maps["probs"].shape == (2, 2, 4, 15)
        assert (maps["tokens"].shape, maps["source"].shape) == ((4,), (15,))
        to_source = np.asarray(maps["probs"], np.float32).sum(-1)
        if cross == "own":
            np.testing.assert_allclose(to_source, 1, atol=1e-2)
        else:  # the rest of a row looks at its own text
            assert 0.1 < to_source.mean() < 0.98
            assert to_source.max() < 1.01
    report.write([tmp_path / "run"])
    told = (tmp_path / "run" / "report.md").read_text()
    assert "bits per target token" in told
    assert "bits per byte" not in told
    assert "Rows: the 4 tokens that the decoder reads; columns: the 15 tokens of the sour" in told
    assert "<0>  →  <start><0>" in told


@pytest.mark.slow
def test_a_learnt_tokenizer_is_kept(tmp_path, text):
    """The run goes on with the tokenizer in its folder; with another one it is another run."""
    config, folder = token_lm.get_config("tiny,bpe:300"), tmp_path / "run"
    config.data.path = text.partition("=")[2]
    config.train.seeds, config.train.optimizer = (0,), "muon"
    result = arm.run(config, folder)
    assert result["yardsticks"]["bits_per_byte"].keys() >= {"unigram entropy of the tokens"}
    assert [m["unit"] for m in result["metrics"]] == ["bits per byte"]
    (folder / "result.json").unlink()
    again = arm.run(config, folder)
    assert again["heldout_bits_per_byte"] == result["heldout_bits_per_byte"]
    with np.load(folder / "maps.npz") as maps:
        assert len(str(maps["written_tokens"])) > maps["tokens"].size == 16
    report.write([folder])
    assert "Muon, cosine" in (folder / "report.md").read_text()
    other = Text(path=config.data.path, tokenizer="bpe:290").load(config.train.length)
    (folder / "tokenizer.json").write_bytes(other.files["tokenizer.json"])
    with pytest.raises(ValueError, match=r"source\.sha256: there"):
        arm.run(config, folder)


@pytest.mark.slow
def test_another_backend_trains_and_is_shown(tmp_path, text):
    result = run(tmp_path / "run", "tiny", text, "--config.model.attention.implementation=xla")
    assert len(losses(result)) == 2
    with np.load(tmp_path / "run" / "maps.npz") as maps:
        np.testing.assert_allclose(maps["probs"].sum(-1), 1, atol=1e-2)


@pytest.mark.parametrize("moments", deep([(30,), (5, 15, 30)], (30,)))
def test_killed_and_started_again(tmp_path, text, moments):
    """SIGKILL at some moments, then a damaged checkpoint: the same loss and metrics to the bit.
    Where it dies three times it is compiled as in a run."""
    flags = (text, "--config.train.steps=200", "--config.train.checkpoint_every=20")
    as_in_a_run = len(moments) > 1
    flags += () if as_in_a_run else ("--jax_disable_most_optimizations",)
    whole = run(tmp_path / "whole", "tiny", *flags, optimized=as_in_a_run)
    words = [sys.executable, "-m", "experiments.run", f"--config={BYTE_LM}:tiny", *flags]
    broken = tmp_path / "broken"
    for lines in moments:
        process = subprocess.Popen(
            [*words, f"--workdir={broken}"],
            cwd=ROOT,
            env=user_environment(),
            stderr=subprocess.DEVNULL,
        )
        metrics = broken / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < lines:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    # A kill while a checkpoint is written leaves a folder with a longer name.
    steps = sorted(int(p.name) for p in broken.glob("checkpoints/*") if p.name.isdigit())
    older, newest = (broken / "checkpoints" / str(step) for step in steps[-2:])
    for file in newest.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-20])
    resumed = run(broken, "tiny", *flags, optimized=as_in_a_run)
    assert f"checkpoint {newest.name} is damaged, trying an older one" in resumed.stderr
    assert f"resuming at step {older.name}" in resumed.stderr
    assert losses(resumed) == losses(whole)
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "broken")]
    assert results[0]["heldout_bits_per_byte"] == results[1]["heldout_bits_per_byte"]
    assert (broken / "metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_a_workdir_has_one_owner(tmp_path, text):
    """A second process on a folder is refused at once, with host and process."""
    folder = tmp_path / "run"
    folder.mkdir()
    with lock.own(folder):
        result = run(folder, "tiny", text)
        assert result.returncode == launch.AGAIN
        who = f"process {os.getpid()} on {socket.gethostname()} since "
        assert result.stderr.startswith(f"error: {folder} is in use by {who}")
        assert [p.name for p in folder.iterdir()] == [lock.OWNER]
    assert len(losses(run(folder, "tiny", text))) == 2
    assert not (folder / lock.OWNER).exists()


@pytest.mark.slow
def test_compiled_programs_are_kept_and_give_the_same_bits(tmp_path, text):
    """By a folder of the user's cache that knows CPU, versions and threads."""
    environment = user_environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in [n for n in environment if n.startswith("JAX_")]:
        del environment[name]
    words = [sys.executable, "-m", "experiments.run", f"--config={BYTE_LM}:tiny", text]
    loads, folders = {}, {}
    for name, more in {
        "first": ["--threads=2"],
        "second": ["--threads=2"],
        "other": ["--threads=3"],
        "none": ["--threads=2", "--jax_enable_compilation_cache=false"],
    }.items():
        flags = [f"--workdir={tmp_path}/{name}", "--jax_disable_most_optimizations", *more]
        subprocess.run([*words, *flags], cwd=ROOT, env=environment, check=True)
        folders[name] = sorted((tmp_path / "cache/attnlab").iterdir())
        loads[name] = {p: p.read_bytes() for p in (tmp_path / "cache").rglob("*step*-atime")}
    assert [len(folders[name]) for name in folders] == [1, 1, 2, 2]
    assert loads["first"].keys() == loads["second"].keys() != set()
    assert loads["first"] != loads["second"]  # the second one read what the first one wrote
    assert loads["other"] == loads["none"]
    metrics = {name: (tmp_path / name / "metrics.jsonl").read_text() for name in loads}
    assert metrics["first"] == metrics["second"] == metrics["none"]


@pytest.mark.slow
def test_arms_end_with_their_sweep(tmp_path, text):
    """A sweep that is killed cannot tell its arms; each sees it, saves and lets its folder go."""
    words = [sys.executable, "-m", "experiments.sweep", f"--config={SWEEP}:tiny", text]
    words += [f"--workdir={tmp_path}/sweep", "--jobs=2", "--config.train.steps=100000"]
    arms = [tmp_path / "sweep" / f"standard-{plan}" for plan in ("separate", "albert")]
    with subprocess.Popen(words, cwd=ROOT, env=user_environment()) as process:
        while not all(any(f.glob("checkpoints/*0")) for f in arms):
            assert process.poll() is None
            time.sleep(0.01)
        assert all(lock.holder(f) for f in arms)
        process.kill()
    until = time.monotonic() + 120
    while any(lock.holder(f) for f in arms):
        assert time.monotonic() < until
        time.sleep(0.01)
    for folder in arms:
        assert not (folder / lock.OWNER).exists()  # it left as one leaves
        assert not (folder / "result.json").exists()


@pytest.mark.parametrize("layouts", deep([("wide",), ("standard", "wide", "narrow")], ("wide",)))
def test_sweep_skips_what_is_complete_and_mends_what_is_not(tmp_path, text, layouts):
    config, folder = tmp_path / "part.py", tmp_path / "sweep"
    config.write_text(
        "from experiments.configs import heads_and_sharing as whole\n"
        "get_config, sweep = whole.get_config, whole.sweep\n"
        f"whole.LAYOUTS = {layouts}\n"
    )
    flags = (f"--config={config}:tiny", f"--workdir={folder}", text)
    first = command("experiments.sweep", *flags)
    assert first.returncode == 0, first.stderr
    with (folder / "results.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == len(layouts) * 2 * 2
    assert {(r["layout"], r["plan"], r["seed"]) for r in rows} == {
        (layout, plan, seed)
        for layout in layouts
        for plan in ("separate", "albert")
        for seed in ("0", "1")
    }
    assert all(r["status"] == "complete" for r in rows)
    assert "cannot tell" in (folder / "report.md").read_text()
    shutil.rmtree(folder / "wide-albert")
    kept = everything(folder / "wide-separate")
    again = command("experiments.sweep", *flags, "--jobs=1")  # the numbers do not depend on it
    assert again.returncode == 0, again.stderr
    assert "[wide-albert]" in again.stderr
    assert "[wide-separate]" not in again.stderr
    assert everything(folder / "wide-separate") == kept
    with (folder / "results.csv").open() as f:
        losses = [r["heldout_bits_per_byte"] for r in csv.DictReader(f)]
    assert losses == [r["heldout_bits_per_byte"] for r in rows]
    other = command("experiments.sweep", *flags, "--config.train.steps=21")
    assert other.returncode == 1
    assert "train.steps: there 20, here 21" in other.stderr
    assert everything(folder / "wide-separate") == kept
    run_s = command("experiments.sweep", *flags, f"--workdir={folder}/wide-albert")
    assert run_s.returncode == 1
    assert run_s.stderr == (
        f"error: {folder}/wide-albert holds one run, not a sweep; use another --workdir\n"
    )


def test_sweep_at_equal_parameters_prints_its_commands(tmp_path):
    words = f"--config={SWEEP}:tiny,lr,match=parameters"
    result = command("experiments.sweep", words, f"--workdir={tmp_path}/sweep", "--print_only")
    lines = result.stdout.splitlines()
    assert len(lines) == 3 * 2 * 3
    assert all(line.startswith("python -m experiments.run --config=") for line in lines)
    assert not (tmp_path / "sweep").exists()
    assert "TFLOP/s of an H100" in result.stderr


@pytest.mark.slow
def test_a_diverged_arm_is_said_and_kept(tmp_path, text):
    result = run(tmp_path / "run", "tiny", text, "--config.train.learning_rate=1e38")
    assert result.returncode == 1
    assert "is not finite at step" in result.stderr
    assert "lower train.learning_rate" in result.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "diverged"


@pytest.mark.parametrize("part", ["heldout", "validation"])
def test_rows_that_are_scored_alone_may_be_too_long(tmp_path, monkeypatch, nine_letters, part):
    """Said before anything is written, not at the first evaluation."""
    config, load = byte_lm.get_config("tiny"), Text.load
    config.data.path, config.data.validation = str(nine_letters), 0.1

    def longer(self, length, folder=None):
        source = load(self, length, folder)
        rows = getattr(source, part)
        thrice = lambda count: {name: np.tile(a, (1, 3)) for name, a in rows(count).items()}
        return dataclasses.replace(source, **{part: thrice})

    monkeypatch.setattr(Text, "load", longer)
    with pytest.raises(ValueError, match=r"longer than model\.max_len 16"):
        arm.run(config, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.json"))


SEQ2SEQ = ["--config.task=span_corruption", "--config.model.kind=encoder_decoder"]
SEQ2SEQ += ["--config.model.vocab_size=357"]
BAD_FLAGS = {
    "an unknown field": (
        ["--config.model.widht=3"],
        "Unknown command line flag 'config.model.widht'. Did you mean: config.model.width ?",
    ),
    "a wrong type": (["--config.train.steps=abc"], "flag --config.train.steps=abc: invalid"),
    "no value": (["--config.train.seeds=(0,"], "--config.train.seeds=(0,: not a Python value"),
    "no threads": (["--threads=0"], "--threads=0: 0 is not a positive integer"),
    "an unknown layout": (["--config.model.heads.layout=wid"], "'wid': did you mean 'wide'"),
    "an unknown plan": (["--config.model.sharing=albrt"], "'albrt': did you mean 'albert'"),
    "width and heads": (
        ["--config.model.heads.num_heads=3"],
        "width 16 is not divisible by num_heads 3",
    ),
    "a negative size": (["--config.model.width=-8"], "width must be a whole number of at least 1"),
    "no steps": (["--config.train.steps=0"], "steps must be more than 0"),
    "a missing text": (["--config.data.path=/no/such/text"], "no text at /no/such/text"),
    "a long window": (["--config.train.length=17"], "longer than model.max_len 16"),
    "a long source": (
        [*SEQ2SEQ, "--config.train.length=20"],
        "the data give 'source' of 18 tokens, longer than model.max_len 16",
    ),
    "too many sentinels": (
        [*SEQ2SEQ, "--config.train.length=2000"],
        "needs 101 sentinels, there are 100; use a shorter length",
    ),
    "a bad tokenizer": (["--config.data.tokenizer=bpe:5"], "write bpe:N with N more than the 256"),
    "a small vocabulary": (
        ["--config.data.tokenizer=bpe:300"],
        "needs model.vocab_size of at least 300, not 256",
    ),
    "another source": (
        ["--config.data.source=tex"],
        "unknown source 'tex': did you mean 'text'",
    ),
    "an unknown optimizer": (["--config.train.optimizer=adamm"], "'adamm': did you mean 'adam'"),
    "Adam's decay": (["--config.train.optimizer=adam"], "adam has no weight decay; set"),
    "no logits": (["--config.model.output.kind=none"], "model.output.kind='none' has none"),
    "the wrong task": (["--config.task=masked_lm"], "needs model.kind='encoder', not 'decoder'"),
    "an impossible match": (
        [
            "--config.match.budget=flops",
            "--config.model.heads.layout=wide",
            "--config.model.heads.num_heads=8",
        ],
        "give the reference a larger ffn.width",
    ),
    "a stray word": (["wide"], "unexpected argument 'wide'"),
}  # fmt: skip


BY_DEFAULT = (
    "an unknown field", "no value", "an unknown plan", "a missing text", "a small vocabulary",
    "a stray word",
)  # fmt: skip
"""One of each place that refuses."""


@pytest.mark.parametrize("case", deep(BAD_FLAGS, *BY_DEFAULT))
def test_bad_flags_end_before_anything_is_written(tmp_path, case):
    flags, message = BAD_FLAGS[case]
    result = run(tmp_path / "run", "tiny", *flags)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{BYTE_LM}:wid", "unknown word 'wid': did you mean 'wide'"),
        (f"{SWEEP}:match=time", "unknown word 'match=time'; known: match=parameters"),
        ("no/such/config.py", "no config file 'no/such/config.py'; --config is path.py or path.py"),
    ],
)
def test_bad_config_files(tmp_path, words, message):
    result = command("experiments.run", f"--config={words}", f"--workdir={tmp_path}/run")
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_sweep_refuses_flags_that_it_varies(tmp_path):
    flags = (f"--config={SWEEP}:tiny", f"--workdir={tmp_path}/s", "--config.model.sharing=albert")
    result = command("experiments.sweep", *flags)
    assert result.returncode == 1
    assert "--config.model.sharing is what this sweep varies" in result.stderr


def test_a_batch_that_the_devices_do_not_divide(tmp_path, text):
    flags = (text, "--config.train.batch_size=6", "--jax_num_cpu_devices=4")
    result = run(tmp_path / "run", "tiny", *flags)
    assert result.returncode == 1
    assert "batch_size 6 is not divisible by 4 devices; use a multiple of 4" in result.stderr
    assert not (tmp_path / "run").exists()
