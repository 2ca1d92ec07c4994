"""Layouts and extras, also of one file outside the package, train by flag and decode."""

import json
import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import outside_layouts
import pytest
from commands import command
from conftest import deep

import attnlab
from attnlab.models import generate
from experiments.run import run_config

FILE = f"""
import sys
sys.path.insert(0, {str(outside_layouts.__file__.rpartition("/")[0])!r})
import outside_layouts
from experiments.configs import byte_lm
get_config = byte_lm.get_config
"""
CASES = {
    "outside": {"model.heads.layout": "gated_differential"},
    "differential": {"model.heads.layout": "differential"},
    "learnt_soft_cap": {"model.heads.extras.learnt_soft_cap.on": True},
    "mixture_of_heads": {
        "model.heads.num_heads": 4,
        "model.heads.extras.mixture_of_heads.on": True,
        "model.heads.extras.mixture_of_heads.top": 2,
    },
    "all of them": {
        "model.heads.layout": "differential",
        "model.heads.num_heads": 4,
        "model.heads.extras.learnt_soft_cap.on": True,
        "model.heads.extras.mixture_of_heads.on": True,
    },
}
SHORT = {"train.steps": 6, "train.log_every": 1, "train.checkpoint_every": 6, "train.seeds": (0,)}


def check_decoding(folder):
    """Greedy decoding with a cache takes the token with the largest logit of the whole text."""
    model, params = attnlab.load_run(folder)
    prompt = jnp.asarray([list(b"abca"), list(b"cabb")])
    new = generate(params, prompt, model.config, 8)
    text = jnp.concatenate([prompt, new], axis=1)
    logits = model.apply({"params": params}, text).logits
    np.testing.assert_array_equal(jnp.argmax(logits[:, 3:-1], axis=-1), new)


@pytest.mark.parametrize("case", deep(CASES, "all of them"))
def test_it_trains_from_a_config_file_and_decodes(case, tmp_path, nine_letters):
    file = tmp_path / "outside.py"
    file.write_text(FILE)
    config = runpy.run_path(str(file))["get_config"]("tiny")
    config.update_from_flattened_dict(CASES[case] | SHORT | {"data.path": str(nine_letters)})
    (result,) = run_config(config, tmp_path / "run")
    assert result.status == "complete"
    rows = [json.loads(line) for line in (tmp_path / "run/runs/seed0/metrics.jsonl").open()]
    losses = [row["train/loss"][0] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    balance = [row["train/head_balance"][0] for row in rows if "train/head_balance" in row]
    assert len(balance) == (6 if "mixture_of_heads" in json.dumps(CASES[case]) else 0)
    check_decoding(tmp_path / "run")


@pytest.mark.slow
def test_one_file_trains_by_flag_and_decodes(tmp_path, nine_letters):
    """From a file anywhere, in a process that has not imported it; and `sample` reads the run."""
    file = tmp_path / "mine.py"
    file.write_text(Path(outside_layouts.__file__).read_text())
    chosen = {
        "model.heads.layout": "gated_differential", "model.heads.extras.head_scale.on": True
    }  # fmt: skip
    flags = [f"--config.{n}={v}" for n, v in (chosen | SHORT).items()]
    flags += [f"--config={file}:tiny", f"--config.data.path={nine_letters}"]
    done = command("experiments.run", *flags, f"--workdir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert "seed 0: held-out" in done.stdout
    assert "train/scale_loss" in (tmp_path / "run/runs/seed0/metrics.jsonl").read_text()
    check_decoding(tmp_path / "run")
    sample = [f"--workdir={tmp_path}/run", "--text=abc", "--new_tokens=4", "--temperature=0"]
    sampled = command("experiments.sample", *sample)
    assert sampled.stdout.startswith("abc"), sampled.stderr
