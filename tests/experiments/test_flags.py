"""Every command asks before it acts: --help and a wrong flag end it with nothing done."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, command, user_environment
from conftest import deep

from attnlab.lab.workdir import specs_in
from attnlab.models import Relative
from experiments import reference


def test_commands_in_help_keep_their_lines():
    """A backslash at the end of a line of a docstring that is not raw joins it to the next."""
    paths = sorted((ROOT / "experiments").rglob("*.py"))
    described = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}
    assert not [path for path in paths if re.search(r"\S {4,}--", described[path])]


def written():
    """When each page was."""
    return {path: path.stat().st_mtime_ns for path in ROOT.rglob("*.md")}


@pytest.mark.parametrize("name", deep(reference.commands(), "experiments.sweep"))
def test_nothing_is_done_before_the_flags_are_read(name):
    before = written()
    told, wrong = command(name, "--help"), command(name, "--nonsense")
    assert written() == before
    first = importlib.import_module(name).__doc__.partition("\n")[0]
    said = " ".join(told.stdout.split())
    assert " ".join(first.split()) in said
    assert "Traceback" not in told.stderr + wrong.stderr
    assert told.returncode == 0
    assert wrong.returncode != 0
    assert "nonsense" in wrong.stderr


BYTE_LM, SWEEP = (f"--config=experiments/configs/{n}.py" for n in ("byte_lm", "heads_and_sharing"))
GIVEN = {
    "sweep": [f"{SWEEP}:tiny", "--workdir=X"],
    "run": [f"{BYTE_LM}:tiny", "--workdir=X"],
    "view": ["--out=X"],
    "export": ["--out=tests"],
}
"""Command -> flags of every call in `REFUSED`."""
REFUSED = [
    ("sweep", "--config.model.sharing=albert", "--vary=model.sharing=albert"),
    ("sweep", f"{BYTE_LM}:tiny", "--vary"),
    ("sweep", "--slurm=--time=1", "--launcher=slurm"),
    ("sweep", "--tune=2", "--tune=2"),
    ("sweep", "--tune=3 --tune_from=x", "--tune_from"),
    ("sweep", "--max_seeds=2", "--max_seeds=2"),
    ("sweep", "--margin=nan", "--margin=nan"),
    ("sweep", "--seeds=0-2", "--seeds"),
    ("sweep", "--loggers=tensorbord", "'tensorboard'"),
    ("sweep", "--profile=abc", "abc"),
    ("sweep", "--print_only --max_seeds=9", "--print_only"),
    ("sweep", "--print_only --tune_from=nowhere.csv", "nowhere.csv"),
    ("sweep", "--vary=train.steps=1 --vary=train.steps=2", "--vary=train.steps"),
    ("sweep", "--vary=train.steps", "--vary=train.steps"),
    ("sweep", "--config.train.stepz=3", "'train.steps'"),
    ("sweep", "--config.train.steps=abc", "--config.train.steps=abc"),
    ("sweep", "--config.model.width=None", "config.model.width"),
    ("sweep", "--config.model.num_heads=8", "'model.heads.num_heads'"),
    ("sweep", "--config.model.heads.latent_dim=8", "'model.heads.latent_dim'"),
    ("sweep", "--config.model.positions.kind=rope", "rotary"),
    ("sweep", "--config.model.heads=wide", "--config.model.heads=wide"),
    ("sweep", "--num_layers=8", "'config.model.num_layers'"),
    ("sweep", "more", "'more'"),
    ("run", "--distributed", "--coordinator_address=HOST:PORT"),
    ("run", "--coordinator_address=here --num_processes=2 --process_id=0", "here"),
    ("run", "--workdir=README.md", "README.md"),
    ("run", "--workdir=README.md/below", "README.md/below"),
    ("run", "--workdir=", "--workdir="),
    ("view", "", "--workdir"),
    ("view", "--workdir=a --path=b --untrained", "two models"),
    ("view", "--path=a --seed=1", "--seed"),
    ("view", "--path=a --out=tests --overwrite", "--out"),
    ("view", "--path=a --out=README.md", "--overwrite"),
    ("view", "--workdir=nothing-here", "nothing-here"),
    ("sample", "", "--workdir"),
    ("sample", "--workdir=x", "--text"),
    ("sample", "--path=x --seed=4", "--seed"),
    ("sample", "--workdir=x --tokens=3;4", "--tokens"),
    ("sample", "--workdir=x --text=a --tokens=3", "--tokens"),
    ("sample", "--workdir=x --text=a --temperature=0 --top_k=3 --count=2", "--top_k, --count"),
    ("export", "--path=x", "--out"),
    ("inspect_model", "", "--config"),
]


@pytest.mark.parametrize(("name", "words", "named"), REFUSED)
def test_what_cannot_be_done_is_one_line_before_anything_is_written(tmp_path, name, words, named):
    flags = [word.replace("=X", f"={tmp_path}/x") for word in GIVEN.get(name, [])]
    done = command(f"experiments.{name}", *flags, *words.split())
    assert done.returncode == 1
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.rglob("*"))


def test_none_the_home_folder_and_repeated_fields(tmp_path, nine_letters):
    """One command: fields that may be None, ~ in paths and in no text, of a repeated field the last
    value, and fields that only the chosen layout and positions have."""
    (tmp_path / "text.txt").write_bytes(Path(nine_letters).read_bytes())
    words = [
        f"{BYTE_LM}:tiny", "--workdir=~/x", "--config.data.path=~/text.txt", "--print_only",
        "--config.model.attention.window=8", "--config.model.attention.window=None",
        "--config.model.norm.bias=None", "--config.model.output.soft_cap=3.5",
        "--config.model.attention.implementation=None",
        "--config.model.attention.layer_scales=None", "--config.model.encoder=None",
        "--config.train.optimizer.base_fan_in=None", "--config.train.seeds=1,2",
        "--config.train.seeds=3,4", "--vary=model.embedding.width=None,16",
        "--config.model.heads.latent_dim=6", "--config.model.positions.kind=relative",
        "--config.model.positions.buckets=8", "--config.model.heads.layout=latent",
        "--noconfig.model.ffn.bias", "--config.model.heads.extras.sink.on",
        "--config.data.pack", "--config.data.separator=~",
    ]  # fmt: skip
    environment = user_environment() | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "experiments.sweep", *words]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    specs = list(specs_in(tmp_path / "x").values())
    assert sorted({spec.seed for spec in specs}) == [3, 4]
    assert [s.config.model.embedding.width for s in specs] == [None, None, 16, 16]
    model, data = specs[0].config.model, specs[0].config.data
    attention = model.attention
    assert [attention.window, attention.implementation, attention.layer_scales] == [None] * 3
    assert [model.norm.bias, model.output.soft_cap] == [None, 3.5]
    assert (model.ffn.bias, len(model.heads.extras)) == (False, 1)
    assert (data.path, data.separator) == (str(tmp_path / "text.txt"), "~")
    assert (model.heads.name, model.heads.latent_dim) == ("latent", 6)
    assert model.positions == Relative(buckets=8)
