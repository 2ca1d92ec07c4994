"""Layouts and extras, also of one file outside the package, train by flag and decode."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import outside_layouts
import pytest
from commands import command
from conftest import deep

import attnlab
from attnlab.models import generate
from experiments.configs import byte_lm
from experiments.run import run_config

EXTRAS = ("learnt_soft_cap", "mixture_of_heads")
CASES = {"gated_differential": ("head_scale",), "differential": EXTRAS, "standard": EXTRAS}
"""Layout -> its extras."""
SHORT = {"train.steps": 6, "train.log_every": 1, "train.checkpoint_every": 6, "train.seeds": (0,)}


def flags(layout, text):
    extras = {f"model.heads.extras.{name}.on": True for name in CASES[layout]}
    heads = {"model.heads.layout": layout, "model.heads.num_heads": 4}
    return heads | extras | SHORT | {"data.path": str(text)}


def check_decoding(folder):
    """Greedy decoding with a cache takes the token with the largest logit of the whole text."""
    model, params = attnlab.load_run(folder)
    prompt = jnp.asarray([list(b"abca"), list(b"cabb")])
    new = generate(params, prompt, model.config, 8)
    text = jnp.concatenate([prompt, new], axis=1)
    logits = model.apply({"params": params}, text).logits
    np.testing.assert_array_equal(jnp.argmax(logits[:, 3:-1], axis=-1), new)


@pytest.mark.parametrize("layout", deep(CASES, "differential"))
def test_it_trains_by_flag_and_decodes(layout, tmp_path, nine_letters):
    config = byte_lm.get_config("tiny")
    config.update_from_flattened_dict(flags(layout, nine_letters))
    (result,) = run_config(config, tmp_path / "run")
    assert result.status == "complete"
    rows = [json.loads(line) for line in (tmp_path / "run/runs/seed0/metrics.jsonl").open()]
    losses = [row["train/loss"][0] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    balance = [row["train/head_balance"][0] for row in rows if "train/head_balance" in row]
    assert len(balance) == (6 if "mixture_of_heads" in CASES[layout] else 0)
    check_decoding(tmp_path / "run")


@pytest.mark.slow
def test_one_file_trains_by_flag_and_decodes(tmp_path, nine_letters):
    """From a file anywhere, in a process that has not imported it; and `sample` reads the run."""
    file = tmp_path / "mine.py"
    file.write_text(Path(outside_layouts.__file__).read_text())
    words = [f"--config.{n}={v}" for n, v in flags("gated_differential", nine_letters).items()]
    done = command("experiments.run", f"--config={file}:tiny", *words, f"--workdir={tmp_path}/run")
    assert "seed 0: held-out" in done.stdout, done.stderr
    assert "train/scale_loss" in (tmp_path / "run/runs/seed0/metrics.jsonl").read_text()
    check_decoding(tmp_path / "run")
    sample = [f"--workdir={tmp_path}/run", "--text=abc", "--new_tokens=4", "--temperature=0"]
    sampled = command("experiments.sample", *sample)
    assert sampled.stdout.startswith("abc"), sampled.stderr
