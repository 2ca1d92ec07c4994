"""`python -m experiments.sample`: text from a run and from a folder."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from test_view import SEEDS, folder, run

from attnlab.load import Prompt, open_folder, open_run
from attnlab.models import Sampling, generate

__all__ = ["folder", "run"]


def test_a_run_goes_on_with_a_text(run):
    """Greedily as `generate` does, one of its bytes a token, no longer than the model reads."""
    opened = open_run(run[0], SEEDS[1])
    told = opened.texts(Prompt("def né"), 100)
    prompt = jnp.asarray([list("def né".encode())])
    new = generate(opened.params, prompt, opened.config, opened.config.max_len - 7)
    ours = [*"def né".encode(), *np.asarray(new)[0].tolist()]
    assert told == [bytes(ours).decode(errors="replace")]
    assert "".join(opened.pieces(Prompt("def né"), 100)) == told[0]
    drawn = opened.texts(Prompt("a"), 9, 3, Sampling(temperature=2.0))
    assert len(set(drawn)) == 3
    assert drawn == opened.texts(Prompt("a"), 9, 3, Sampling(temperature=2.0))
    assert drawn != opened.texts(Prompt("a"), 9, 3, Sampling(temperature=2.0), draw=1)
    with pytest.raises(ValueError, match="the text fills all 24 tokens of the model"):
        opened.texts(Prompt("a" * 24), 9)


def test_a_folder_writes_words_or_numbers(folder, tmp_path):
    opened = open_folder(folder[0])
    tokens, spans = opened.split("the cat")
    assert (tokens.tolist(), spans.tolist()) == ([1, 2], [[0, 3], [4, 7]])
    said = opened.texts(Prompt("the cat"), 3)[0]
    assert said.split()[:2] == ["the", "cat"]
    whole = opened.texts(Prompt(tokens="1,2"), 5)[0]
    assert "".join(opened.pieces(Prompt(tokens="1,2"), 5)) == whole
    (tmp_path / "bare").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / file).write_bytes((folder[0] / file).read_bytes())
    numbers = open_folder(tmp_path / "bare").texts(Prompt(tokens="1,2"), 3)[0]
    assert numbers.startswith("1,2,")
    assert numbers.count(",") == 4
    row = list(map(int, numbers.split(",")))
    told = json.dumps({"eos_token_id": [row[3], 99]})  # 99 is no token of this model
    (tmp_path / "bare" / "generation_config.json").write_text(told)
    opened = open_folder(tmp_path / "bare")
    cut = ",".join(map(str, row[: row.index(row[3], 2)]))
    assert opened.texts(Prompt(tokens="1,2"), 3) == [cut]
    assert "".join(opened.pieces(Prompt(tokens="1,2"), 3)) == cut


def test_a_text_that_max_len_cuts_is_said(run, capsys):
    opened = open_run(run[0], SEEDS[1])
    opened.texts(Prompt("def"), 100)
    assert "only 21 of --new_tokens=100 fit" in capsys.readouterr().err
    opened.texts(Prompt("def"), 21)
    assert not capsys.readouterr().err


def test_a_stored_tokenizer_is_exported(folder, tmp_path):
    out = tmp_path / "out"
    done = command("experiments.export", f"--path={folder[0]}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert (out / "tokenizer.json").read_bytes() == (folder[0] / "tokenizer.json").read_bytes()


def test_a_run_is_inspected(run):
    done = command("experiments.inspect_model", f"--workdir={run[0]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("decoder of width 12: layout standard, 2 heads, sharing cycle:2")
