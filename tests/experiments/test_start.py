"""A run that starts from the weights of another, seed by seed, under the same plan or another."""

import json
import re
import shlex

import jax
import numpy as np
import pytest
from commands import command
from conftest import ROOT, deep
from experiments.running.workdir import WorkdirError

import attnlab
from attnlab.training.checkpoint import Checkpoints, describe_model
from attnlab.transforms import change_plan, output_difference
from experiments import report
from experiments.configs import byte_lm
from experiments.running import arm, initial

TOKENS = np.random.default_rng(0).integers(97, 106, (2, 9), np.int32)
STEPS = 3


def config_of(text, plan, seeds=(3, 1), **model):
    config = byte_lm.get_config("tiny")
    config.data.path = str(text)
    config.model.update(sharing=plan, num_layers=3, **model)
    config.train.update(
        steps=STEPS, seeds=seeds, eval_windows=8, checkpoint_every=10, learning_rate=1e-2
    )
    return config


@pytest.fixture(scope="module")
def tied(tmp_path_factory, nine_letters):
    """What a run leaves whose layers share all, with large random weights, and a text."""
    folder = tmp_path_factory.mktemp("tied") / "run"
    model = arm.resolve(config_of(nine_letters, "albert")).model.build()
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    rng = np.random.default_rng(1)
    draw = lambda a: rng.normal(size=(2, *a.shape)).astype(np.float32)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        notes = {"model": describe_model(model)}
        checkpoints.save(STEPS, {"params": jax.tree.map(draw, shapes)}, notes)
    record = {"config": {"train": {"seeds": [3, 1]}}, "source": {"sha256": "ab12"}}
    (folder / "config.json").write_text(json.dumps(record))
    return folder, nine_letters


def started(tied, plan, seeds=(1, 3), **model):
    """What a run under `plan` starts with: (its config, weights of each seed, words)."""
    folder, text = tied
    config = config_of(text, plan, seeds, **model)
    config.start = str(folder)
    model = arm.resolve(config).model
    return model, *initial.begin(initial.start(str(folder), seeds), model, TOKENS)


@pytest.mark.parametrize(
    "plan", deep(["separate", "cycle:2", "attention=0,0,0 kv=0,1,2 ffn=0,1,1"], "separate")
)
def test_untying_and_tying_equal_layers_change_no_bit(tied, plan):
    model, each, told = started(tied, plan)
    assert f"after {STEPS} steps; plan albert -> {plan}: outputs differ by 0 of the" in told
    for seed, params in zip((1, 3), each, strict=True):  # in the order that is asked for
        old, weights = attnlab.load_run(tied[0], seed)
        assert output_difference((old.config, weights), (model, params), TOKENS) == 0
        back = change_plan(model, params, "albert")[1]  # layers that are equal become one again
        assert jax.tree.all(jax.tree.map(np.array_equal, back, weights))


def test_under_the_same_plan_nothing_is_changed(tied):
    _, each, told = started(tied, "albert", dropout={"rate": 0.1})
    assert told.endswith("its plan, albert, is kept")
    assert jax.tree.all(jax.tree.map(np.array_equal, each[1], attnlab.load_run(tied[0], 3)[1]))


def test_it_is_refused_before_any_work(tied, tmp_path):
    text = tied[1]
    for change, reason in (
        (dict(seeds=(3, 4)), r"seed n starts from seed n of .*no seed 4, only 3, 1: choose"),
        (dict(ffn={"width": 40}), r"another model than model\.ffn\.width=40 \(there 32\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            started(tied, "separate", **change)
    config = config_of(text, "separate")
    config.start = str(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        arm.resolve(config)


@pytest.mark.slow
def test_layers_part_after_some_steps(nine_letters, tmp_path, capsys):
    """The whole way: each seed from its own weights, and only ever from these."""
    folder, text = tmp_path / "tied", nine_letters
    arm.run(config_of(text, "albert"), folder)
    config = config_of(text, "separate", seeds=(1,), dropout={"rate": 0.0})
    config.start, config.watch_heads = str(folder), True
    config.train.update(learning_rate=1e-3)
    result = arm.run(config, tmp_path / "run")
    told = f"each seed of {folder} after {STEPS} steps; plan albert -> separate: outputs differ by"
    assert f"starting from {told} 0 of the largest" in capsys.readouterr().err
    assert result["start"].startswith(told)
    record = json.loads((tmp_path / "run" / "config.json").read_text())["start"]
    assert record["steps"] == STEPS
    old, new = (attnlab.load_run(f, 1)[1]["layers"] for f in (folder, tmp_path / "run"))
    moved = np.asarray(new["ffn"]["up"] - old["ffn"]["up"])  # [3, D, F] - [1, D, F]
    assert 0 < np.abs(moved).max() < STEPS * 2e-3  # steps of Adam behind the old run's weights
    assert np.abs(moved - moved[:1]).max() > 1e-4  # and each layer's own
    report.write([tmp_path / "run"], tmp_path / "page")
    assert f"**Start:** {told}" in (tmp_path / "page" / "report.md").read_text()

    # Layers that have parted are averaged, and the log says what that does.
    config = config_of(text, "albert", seeds=(1,))
    config.start = str(tmp_path / "run")
    arm.run(config, tmp_path / "again")
    said = capsys.readouterr().err
    assert 0 < float(re.search(r"separate -> albert: outputs differ by (\S+) of", said)[1]) < 0.5

    # Other weights in the place where it began: it does not go on with these.
    config.start = str(tmp_path / "again")
    arm.run(config, tmp_path / "last")
    (tmp_path / "again").rename(tmp_path / "before")
    config.start = str(folder)
    arm.run(config, tmp_path / "again")
    config.start = str(tmp_path / "again")
    with pytest.raises(WorkdirError, match=r"start\.digest: there"):
        arm.run(config, tmp_path / "last")


@pytest.mark.slow
def test_the_recipe(tmp_path, nine_letters):
    """docs/howto/checkpoints.md as it stands, with tiny models."""
    page = (ROOT / "docs" / "howto" / "checkpoints.md").read_text().partition("## Tie layers")[2]
    block = re.search("```bash\n(.*?)```", page, re.DOTALL)[1].replace("\\\n", " ")
    for line in block.splitlines():
        line = line.replace("runs/", f"{tmp_path}/").replace("byte_lm.py:", "byte_lm.py:tiny,")
        _, _, module, *flags = shlex.split(line.replace("steps=200", "steps=20"))
        if module == "experiments.run":
            flags += [f"--config.data.path={nine_letters}"]
        done = command(module, *flags)
        assert done.returncode == 0, done.stderr
    told = (tmp_path / "both" / "report.md").read_text()
    assert "after 20 steps; plan albert -> separate: outputs differ by 0 of the largest" in told
    assert "after 20 steps; its plan, albert, is kept" in told
