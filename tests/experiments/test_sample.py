"""`python -m experiments.sample`: text from a run and from a folder."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from test_view import SEEDS, folder, run

from attnlab.load import open_folder, open_run
from attnlab.models import Sampling, generate, num_parameters

__all__ = ["folder", "run"]


def text_of(opened, *given, **options):
    return "".join(opened.write(*given, **options))


def test_a_run_goes_on_with_a_text(run, capsys):
    """Greedily as `generate` does, one of its bytes a token, no longer than the model reads."""
    opened = open_run(run[0], SEEDS[1])
    told = text_of(opened, "def né", 100)
    assert "only 17 of 100 new tokens fit" in capsys.readouterr().err
    prompt = jnp.asarray([list("def né".encode())])
    new = generate(opened.params, prompt, opened.config, opened.config.max_len - 7)
    ours = [*"def né".encode(), *np.asarray(new)[0].tolist()]
    assert told == bytes(ours).decode(errors="replace")
    assert not capsys.readouterr().err
    hot = Sampling(temperature=2.0)
    drawn = [text_of(opened, "a", 9, hot, draw=draw) for draw in (0, 1, 2, 0)]
    assert len(set(drawn)) == 3
    assert drawn[0] == drawn[3]
    with pytest.raises(ValueError, match="the text fills all 24 tokens of the model"):
        text_of(opened, "a" * 24, 9)


def test_a_folder_writes_words_or_numbers(folder, tmp_path):
    opened = open_folder(folder[0])
    tokens, spans = opened.split("the cat")
    assert (tokens.tolist(), spans.tolist()) == ([1, 2], [[0, 3], [4, 7]])
    assert text_of(opened, "the cat", 3).split()[:2] == ["the", "cat"]
    assert text_of(opened, [1, 2], 5) == text_of(opened, "the cat", 5)
    bare = shutil.copytree(folder[0], tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    row = list(map(int, text_of(open_folder(bare), [1, 2], 3).split(",")))
    assert (row[:2], len(row)) == ([1, 2], 5)
    told = json.dumps({"eos_token_id": [row[3], 99]})  # 99 is no token of this model
    (bare / "generation_config.json").write_text(told)
    cut = ",".join(map(str, row[: row.index(row[3], 2)]))
    assert text_of(open_folder(bare), [1, 2], 3) == cut


def test_a_stored_tokenizer_is_exported(folder, tmp_path):
    out = tmp_path / "out"
    done = command("experiments.export", f"--path={folder[0]}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert (out / "tokenizer.json").read_bytes() == (folder[0] / "tokenizer.json").read_bytes()


def test_a_run_a_folder_and_a_config_are_inspected(run, folder):
    file = "--config=experiments/configs/byte_lm.py:tiny,sharing=sandwich"
    for words, title, model in (
        ([f"--workdir={run[0]}"], "12: layout standard, 2 heads, sharing cycle:2", run[1]),
        ([f"--path={folder[0]}"], "12: layout standard, 3 heads", folder[1]),
        ([file, "--config.model.num_layers=3"], "16: layout standard, 2 heads", None),
    ):
        done = command("experiments.inspect_model", *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"decoder of width {title}")
        if model:
            assert f"{num_parameters(model):,}" in done.stdout
            assert f"texts of {model.max_len} tokens" in done.stdout
    assert "  attention  0 1 2" in done.stdout
