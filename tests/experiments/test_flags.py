"""Every command asks before it acts: --help and a wrong flag end it with nothing done."""

import ast
import importlib.util

import pytest
from commands import ROOT, command
from conftest import deep

COMMANDS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
}
# It reads its one argument with argparse: it shall not need what our flags import.
IN_TORCH = "experiments.benchmarks.peers.torch_nanogpt"


def written():
    """When each page was."""
    return {path: path.stat().st_mtime_ns for path in ROOT.rglob("*.md")}


@pytest.mark.parametrize("name", deep(COMMANDS, "experiments.sweep"))
def test_nothing_is_done_before_the_flags_are_read(name):
    if name == IN_TORCH and not importlib.util.find_spec("torch"):
        pytest.skip("no torch")
    before = written()
    told, wrong = command(name, "--help"), command(name, "--nonsense")
    assert written() == before
    first = ast.get_docstring(ast.parse(COMMANDS[name].read_text())).partition("\n")[0]
    said = " ".join(told.stdout.split())
    assert " ".join(first.split()) in said
    assert "Traceback" not in told.stderr + wrong.stderr
    if name != IN_TORCH:
        assert wrong.returncode == 1
        assert wrong.stderr.endswith("error: Unknown command line flag 'nonsense'\n")


def test_the_fields_of_a_config_are_flags():
    config = "--config=experiments/configs/byte_lm.py:tiny"
    told = command("experiments.run", config, "--help").stdout
    assert "byte_lm.py: How well does one head layout under one sharing plan predict" in told
    assert "Words behind the colon, with commas between them:\n  a layout: " in told
    assert "\n  masked: task=masked_lm, model.kind=encoder, model.vocab_size=257\n" in told
    assert "  --config.train.steps: 20 in this config.\n    (an integer)\n" in told
    assert "  --[no]config.model.ffn.bias: True in this config.\n" in told
    assert "  --config.train.seeds: (0, 1) in this config.\n    (a Python value)\n" in told
    assert "  --config.model.heads.qk_norm.kind: None in this config.\n" in told
    assert "  --workdir: " in told
    assert "--config.train" not in command("experiments.run", "--help").stdout


@pytest.mark.parametrize("seeds", ["--config.train.seeds=(3,)", "--config.train.seeds=3"])
def test_every_kind_of_field(seeds):
    """Read by a command that does no more than print them: what a sweep would run."""
    fields = ["--config.model.width=32", "--config.train.learning_rate=1", "--config.start=there"]
    fields += ["--noconfig.model.ffn.bias", "--config.model.heads.qk_norm.kind=rms", seeds]
    config = "--config=experiments/configs/heads_and_sharing.py:tiny"
    told = command("experiments.sweep", *fields, config, "--workdir=runs/x", "--print_only")
    line = told.stdout.splitlines()[0]
    assert told.stderr.startswith("not estimated: ")  # there is no folder `there`
    for word in ("width=32", "learning_rate=1.0", "start=there", "ffn.bias=False", "kind=rms"):
        assert f"{word} " in line
    assert "'--config.train.seeds=(3,)'" in line
    assert line.endswith("--config.model.sharing=separate --workdir=runs/x/standard-separate")
