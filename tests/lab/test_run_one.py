"""`run_one`: what a run leaves, what it refuses, and what an error after the training costs."""

import dataclasses
import errno
import json
import math
import os
import shutil

import jax
import numpy as np
import pytest
from small_experiment import MODEL, experiment, in_process, train_config

import attnlab
from attnlab import lab, load
from attnlab.data import DataSizes, Rows, TokenFiles
from attnlab.data.rows import Splits
from attnlab.lab.workdir import add_specs

TRAIN = train_config(6, every=3)
QUIET = lab.RunOptions(speaks=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return experiment(tmp_path_factory, MODEL, TRAIN)


def run(base, folder, seed=0, options=QUIET, **values):
    values = {name.replace("__", "."): value for name, value in values.items()}
    spec = lab.RunSpec("run", lab.with_values(base, values), seed)
    return lab.run_one(spec, folder, options=options)


@pytest.fixture(scope="module")
def first(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    return run(base, folder, 3), folder


def test_what_a_run_leaves(first):
    result, folder = first
    assert result.task.metrics[0].name in result.scores.heldout
    assert result.provenance.environment["jax"] == jax.__version__
    assert (folder / "runs/run/provenance.json").exists()


def test_a_model_is_loaded_from_a_run_or_from_a_sweep_of_one(first, base, tmp_path):
    model, params = attnlab.load_run(first[1] / "runs/run")
    assert model.config == MODEL
    specs = lab.product(base, seeds=[3, 5])
    in_process(specs, tmp_path)
    again = attnlab.load_run(tmp_path, 3)[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    assert load.seeds_of(tmp_path) == [3, 5]
    with pytest.raises(ValueError, match="has no seed 4, only 3, 5"):
        attnlab.load_run(tmp_path, 4)
    add_specs(specs, tmp_path / "planned")
    with pytest.raises(ValueError, match="seed3 has not begun"):
        attnlab.load_run(tmp_path / "planned")
    add_specs(lab.product(base, layout=["standard", "wide"], seeds=[0]), tmp_path / "two")
    with pytest.raises(ValueError, match="several models; give the folder of one run"):
        attnlab.load_run(tmp_path / "two")


def test_baselines_of_a_workdir_are_in_the_unit_of_each_run(base, tmp_path):
    (np.arange(4000) % 251).astype(np.uint16).tofile(tmp_path / "ids.bin")
    found = []
    for name, size in (("one", 1.0), ("four", 4.0)):
        data = TokenFiles(path=str(tmp_path / "ids.bin"), vocab_size=256, bytes_per_token=size)
        spec = lab.RunSpec(name, lab.with_values(base, {"data": data, "train.steps": 2}))
        found.append(lab.run_one(spec, tmp_path / "w", options=QUIET).scores.baselines)
    one, four = (scores["bits_per_byte"]["unigram entropy of the tokens"] for scores in found)
    assert one == pytest.approx(4 * four)


@pytest.mark.slow
def test_runs_of_a_workdir_share_a_tokenizer(base, tmp_path):
    """It is learnt once: another run takes what lies in `shared`."""
    values = {"data.tokenizer": "bpe:270", "model.vocab_size": 270, "train.steps": 2}
    one, two = lab.product(lab.with_values(base, values), seeds=[0, 1])
    lab.run_one(one, tmp_path, options=QUIET)
    [shared] = tmp_path.glob("shared/*/tokenizer.json")
    written = shared.stat().st_mtime_ns
    lab.run_one(two, tmp_path, options=QUIET)
    assert shared.stat().st_mtime_ns == written
    for run in ("seed0", "seed1"):
        assert (tmp_path / "runs" / run / "tokenizer.json").read_bytes() == shared.read_bytes()
    assert len(list(tmp_path.glob("shared/*/baselines-*.json"))) == 1


def test_a_run_starts_from_another_under_another_plan(first, base, tmp_path):
    folder = str(first[1] / "runs/run")
    result = run(base, tmp_path, 3, start=folder, train__steps=2, model__sharing="albert")
    began = result.provenance.start
    assert f"seed 3 of {folder} after 6 steps; plan separate -> albert: outputs" in began
    with pytest.raises(ValueError, match="no seed 4, only 3"):
        run(base, tmp_path / "b", 4, start=folder)
    wider = lab.with_values(base, {"start": folder, "model.ffn.width": 40})
    with pytest.raises(ValueError, match=r"model\.ffn\.width=40 \(there 12\)"):
        wider.check_start()
    (tmp_path / "[a]" / "3").mkdir(parents=True)
    (tmp_path / "[a]" / "3" / "3").symlink_to(folder)
    with pytest.raises(ValueError, match="there 12"):
        dataclasses.replace(wider, start=f"{tmp_path}/[a]/{{seed}}/{{seed}}").check_start()
    moved = dataclasses.replace(base, start=f"{tmp_path}/missing{{seed}}")
    with pytest.raises(ValueError, match=r"no folder .* of any seed"):
        moved.check_start()


@pytest.mark.slow
def test_other_parameters_in_the_place_where_it_began_are_refused(base, tmp_path):
    run(base, tmp_path / "a", train__steps=2)
    start = str(tmp_path / "a/runs/run")
    run(base, tmp_path / "b", start=start, train__steps=4)
    (tmp_path / "b/runs/run/result.json").unlink()
    shutil.rmtree(tmp_path / "a")
    run(base, tmp_path / "a", train__steps=2, train__optimizer__learning_rate=1e-2)
    with pytest.raises(ValueError, match=r"start\.digest: there"):
        run(base, tmp_path / "b", start=start, train__steps=4)
    with pytest.raises(ValueError, match="other parameters now"):
        load.open_run(tmp_path / "b/runs/run").initial({"tokens": np.zeros((1, 4), np.int32)})


def test_other_data_and_fields_in_the_same_folder_are_refused(base, tmp_path, capsys):
    """Another environment is reported."""
    text, folder = tmp_path / "text", tmp_path / "w/runs/run"
    text.write_bytes(b"a rose is a rose. " * 200)
    run(base, tmp_path / "w", data__path=str(text))
    (folder / "result.json").unlink()
    with pytest.raises(ValueError, match=r"config\.model\.norm\.eps: there 1e-05") as error:
        run(base, tmp_path / "w", data__path=str(text), model__norm__eps=0.5)
    assert len(str(error.value).splitlines()) <= 5
    record = json.loads((folder / "spec.json").read_text())
    record["environment"]["threads"] = "77"
    (folder / "spec.json").write_text(json.dumps(record))
    run(base, tmp_path / "w", options=lab.RunOptions(), data__path=str(text))
    assert "threads changed from 77 to" in capsys.readouterr().err
    (folder / "result.json").unlink()
    text.write_bytes(b"a rose was a rose. " * 200)
    with pytest.raises(ValueError, match=r"source\.sha256: there"):
        run(base, tmp_path / "w", data__path=str(text))


def test_a_loss_that_is_not_finite_is_a_result(base, tmp_path):
    result = run(base, tmp_path, train__optimizer__learning_rate=1e38)
    assert result.status == "diverged"
    assert "lower train.optimizer.learning_rate" in result.message
    assert run(base, tmp_path, train__optimizer__learning_rate=1e38) == result


def splits(path):
    """Rows of a baseline that is no number, as of a token that training never had."""
    rows = [{"tokens": np.arange(17) % 9} for _ in range(24)]
    baselines = {"bits_per_byte": {"unigram": math.inf, "uniform": 8.0}}
    return Splits("mine", rows[:16], rows[16:], DataSizes(256), baselines=lambda: baselines)


def test_baselines_that_are_not_finite_are_left_out(base, tmp_path):
    config = dataclasses.replace(base, data=Rows(make=f"{__file__}:splits"))
    result = lab.run_one(lab.RunSpec("run", config), tmp_path, options=QUIET)
    assert result.scores.baselines == {"bits_per_byte": {"uniform": 8.0}}


def test_a_full_disk_is_reported_before_the_start(base, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="3 MiB left, this run needs"):
        run(base, tmp_path)
    assert not (tmp_path / "runs/run/spec.json").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_a_disk_that_is_full_in_a_run_is_named_and_the_run_goes_on(
    first, base, tmp_path, monkeypatch, name
):
    fsync, folder = os.fsync, tmp_path / "runs/run"

    def full(file):
        found = [*folder.glob(name), *folder.glob(f".{name}.*")]
        if any(os.path.samestat(os.fstat(file), path.stat()) for path in found):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="free some space") as error:
        run(base, tmp_path, 3)
    monkeypatch.setattr(os, "fsync", fsync)
    assert str(folder / name) in str(error.value)
    assert run(base, tmp_path, 3).scores.heldout == first[0].scores.heldout
