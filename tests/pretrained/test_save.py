"""`save` writes all of a folder or nothing, and only weights that are those of the model."""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import resource
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from goldens import SMALL, said, saved
from random_models import random_params

from attnlab import pretrained
from attnlab.models import Norm
from attnlab.nested import flatten
from attnlab.pretrained.tensors import read_file

OTHER = dataclasses.replace(SMALL, norm=Norm(eps=0.05))
WRITES = {os: ("mkdir", "rename", "replace", "link", "symlink", "open", "fsync"), ctypes: ("CDLL",)}


def content(folder):
    """Every file, link and folder below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else ():
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else "folder"
    return found


def filled(folder):
    """A saved model, with files that are not attnlab's."""
    pretrained.save(folder, SMALL.build(), random_params(SMALL))
    folder.chmod(0o750)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("mine")
    (folder / "link").symlink_to("tokenizer.json")
    return content(folder)


def failing(monkeypatch, at, error, folder):
    """Have the `at`-th call to the operating system raise; returns (name, content of the folder) of
    every call, before it is made: what there is if the process is killed there."""
    calls = []

    def raising(name, call):
        def wrapped(*args, **options):
            calls.append((name, content(folder)))
            if len(calls) == at:
                raise error(28, "No space left on device")
            return call(*args, **options)

        return wrapped

    for module, names in WRITES.items():
        for name in names:
            monkeypatch.setattr(module, name, raising(name, getattr(module, name)))
    return calls


@pytest.fixture(params=["exchange", "one by one"])
def system(request, monkeypatch):
    """A system that can exchange two folders, and one that cannot."""
    if request.param == "one by one":
        monkeypatch.setattr(sys, "platform", "other")
    return request.param


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_at_any_step_leaves_the_old_folder_or_none(error, exists, system, tmp_path):
    """And a kill, where two folders can be exchanged."""
    model, old, params = tmp_path / "model", random_params(SMALL), random_params(OTHER, seed=2)
    before = filled(model) if exists else {}
    for step in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(error):
            calls = failing(patch, step, error, model)
            pretrained.save(model, OTHER.build(), params)
        after = content(model)
        if after != before:
            # Nothing failed, or what stands behind the exchange: the flush of the parent.
            flushes = [name for name, _ in calls].count("fsync")
            assert len(calls) < step or flushes >= 3 + exists, (step, calls)
            assert pretrained.load_config(model).norm.eps == 0.05
            changed = {name for name in {*after, *before} if after[name] != before.get(name)}
            assert changed == {"config.json", "model.safetensors"}
            assert not exists or model.stat().st_mode & 0o777 == 0o750
        # What is left where removing it is what failed.
        assert all(name.startswith(".model.") for name in {*os.listdir(tmp_path)} - {"model"})
        if len(calls) < step:
            break
        if exists:
            pretrained.save(model, SMALL.build(), old)
        else:
            shutil.rmtree(model, ignore_errors=True)
        assert content(model) == before
    assert 6 < step < 100
    if system == "exchange" or not exists:
        assert all(seen in (before, after) for _, seen in calls)


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_full_disk_leaves_the_old_folder(size, tmp_path):
    """No file may become larger than `size` bytes: config.json or the weights cannot be written."""
    before, params = filled(tmp_path / "model"), random_params(OTHER, seed=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors|config\.json|File too large"):
            pretrained.save(tmp_path / "model", OTHER.build(), params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(tmp_path / "model") == before
    assert os.listdir(tmp_path) == ["model"]


def test_the_working_directory_and_a_link_are_saved_into(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path / "model")
    pretrained.save(".", SMALL.build(), random_params(SMALL))
    assert sorted(os.listdir(".")) == ["config.json", "model.safetensors"]
    monkeypatch.chdir(tmp_path)
    pretrained.save("link", OTHER.build(), random_params(OTHER))
    assert (tmp_path / "link").is_symlink()
    assert pretrained.load_config(tmp_path / "model").norm.eps == 0.05
    monkeypatch.setenv("HOME", str(tmp_path))
    pretrained.save("~/home", SMALL.build(), random_params(SMALL))
    assert sorted(os.listdir("home")) == ["config.json", "model.safetensors"]
    assert pretrained.load_config("~/home").width == SMALL.width


def changed(params, path, leaf):
    """The params with another leaf; without what is there where it is None."""
    kept = {n: a for n, a in flatten(params).items() if not f"{n}.".startswith(f"{path}.")}
    return unflatten_dict(kept if leaf is None else kept | {path: leaf}, sep=".")


WRONG = [
    ("layers.ffn.extra", np.zeros(3, np.float32), "'layers/ffn/extra'"),
    ("layers.ffn.up", None, "'layers/ffn/up' is missing"),
    ("layers", None, "'layers/.*' is missing"),
    ("embedding", np.zeros((12, 12), np.float32), r"shape \(12, 12\), .* \(11, 12\)"),
    ("embedding", np.zeros((11, 12), complex), "embedding is complex128, .* float"),
    ("embedding", [["a"] * 12] * 11, "embedding"),
    ("embedding", np.full((11, 12), np.nan, np.float32), "embedding has nan at 0, 0"),
]


@pytest.mark.parametrize(("path", "leaf", "message"), WRONG)
def test_params_of_another_model_are_refused(path, leaf, message, tmp_path):
    """Before anything is written."""
    before = filled(tmp_path / "model")
    wrong = changed(random_params(OTHER), path, leaf)
    for folder in ("model", "absent"):
        with pytest.raises(ValueError, match=message):
            pretrained.save(tmp_path / folder, OTHER.build(), wrong)
    for params in ({}, None, [1], {"params": {}}):
        with pytest.raises((TypeError, ValueError), match="params"):
            pretrained.save(tmp_path / "absent", OTHER.build(), params)
    with pytest.raises(ValueError, match="is a file; pass a folder"):
        pretrained.save(tmp_path / "model" / "tokenizer.json", OTHER.build(), random_params(OTHER))
    assert content(tmp_path / "model") == before
    assert os.listdir(tmp_path) == ["model"]


def test_each_tensor_keeps_its_dtype(tmp_path):
    """config.json names one that holds all, in which transformers loads them."""
    params = random_params(SMALL)
    for sublayer, name in (("ffn", "up"), ("ffn", "down"), ("attention", "v")):
        weights = params["layers"][sublayer]
        weights[name] = weights[name].astype(jnp.bfloat16)
    half = jax.tree.map(lambda a: a.astype(jnp.float16), params)
    for given, dtype in ((params, "float32"), (half, "float16")):
        found = saved(tmp_path / "model", SMALL.build(), given)
        assert (found["model_type"], found["dtype"]) == ("gpt2", dtype)
        again = pretrained.load(tmp_path / "model")[1]
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), given, again)
        stored = read_file(tmp_path / "model" / "model.safetensors")
        dtypes = {name.removeprefix("transformer."): str(a.dtype) for name, a in stored.items()}
        # q and k are float32; v lies in the same tensor.
        wide = ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_fc.weight"]
        expected = [dtype] * 3 if given is half else ["float32", "float32", "bfloat16"]
        assert [dtypes[name] for name in wide] == expected


def test_weights_in_several_files(tmp_path):
    """Sharded in and out, bit-equal; a later save leaves no file that would be read instead."""
    params = random_params(SMALL)
    for most, several in ((2000, True), (10**9, False), (1, True)):  # 1: each tensor alone
        pretrained.save(tmp_path, SMALL.build(), params, max_shard_bytes=most)
        again = pretrained.load(tmp_path)[1]
        assert jax.tree.all(jax.tree.map(np.array_equal, params, again)), most
        files = {path.name: read_file(path) for path in tmp_path.glob("*.safetensors")}
        tensors = [name for held in files.values() for name in held]
        assert len(tensors) == len(set(tensors))
        assert (tmp_path / "model.safetensors.index.json").exists() == several
        if not several:
            assert [*files] == ["model.safetensors"]
            continue
        assert len(files) > 1
        assert "model.safetensors" not in files
        index = said(tmp_path, "model.safetensors.index.json")
        assert set(index["weight_map"]) == set(tensors)
        sizes = {name: sum(a.nbytes for a in held.values()) for name, held in files.items()}
        assert index["metadata"]["total_size"] == sum(sizes.values())
        assert all(size <= most or len(files[name]) == 1 for name, size in sizes.items())
