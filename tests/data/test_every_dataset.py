"""What every entry of `DATASETS` guarantees, and every objective that it is made for."""

import dataclasses
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_data import DATASETS as SMALL

from attnlab import data
from attnlab.data import DATASETS
from attnlab.data.rows import Splits, dataset_of_splits
from attnlab.training.objectives import OBJECTIVES, Metric, input_shapes
from attnlab.training.step import step_key


@pytest.fixture(params=SMALL)
def case(request, tmp_path):
    """(config, length, objective, dataset)"""
    config, length, objective = SMALL[request.param](tmp_path)
    return config, length, OBJECTIVES[objective], config.load(length)


def test_every_dataset_is_tried():
    """But for those that a config file registers."""
    ours = {name for name, kind in DATASETS.items() if kind.__module__.startswith("attnlab.")}
    assert {name.removesuffix("_packed") for name in SMALL} == ours


def draw(dataset, seed, step, size=4, shard=slice(None)):
    if isinstance(batches := dataset.batches, data.DeviceBatches):
        return batches.generate(batches.arrays, step_key(seed, step), size)
    return batches(seed, step, size, shard)


def same(a, b):
    (ours, names), (theirs, others) = (jax.tree.flatten(tree) for tree in (a, b))
    return names == others and all(map(np.array_equal, ours, theirs))


def test_a_batch_is_a_function_of_seed_and_step(case):
    config, length, _, dataset = case
    again = config.load(length)
    one = draw(dataset, 3, 5)
    assert same(one, draw(again, 3, 5))
    assert again.digest == dataset.digest
    assert not same(one, draw(dataset, 4, 5))
    assert not same(one, draw(dataset, 3, 6))
    if not isinstance(dataset.batches, data.DeviceBatches):
        halves = [draw(dataset, 3, 5, shard=slice(2 * p, 2 * p + 2)) for p in range(2)]
        assert same(jax.tree.map(lambda *a: np.concatenate(a), *halves), one)


OTHER = {
    "text": ("fead9ad9334c", {"tokenizer": "bpe:260", "validation": 0.2}),
    "text_packed": ("1717ca14c96b", {"tokenizer": "bytes", "validation": 0.2, "separator": " "}),
    "tokens": ("8814841b9e06", {"heldout": 0.3, "bytes_per_token": 1.0}),
    "tokens_packed": ("4ef7a6e2a93a", {"end_of_document": 8, "pack": False}),
    "huggingface": ("858fcffd72b5", {"heldout": 0.3, "vocab_size": 400, "bytes_per_token": 1.0}),
    "pairs": (
        "25f306a6668e",
        {"tokenizer": "bpe:275", "parts": "train,test,val", "languages": "de-en"},
    ),
    "labelled": ("3efefd32f174", {"tokenizer": "bpe:260"}),
    "recall": ("0e6f1b9e8254", {"vocab_size": 20, "pairs": 1}),
    "endpoints": ("f6feb63ef55e", {"vertices": 4, "graph": "acyclic"}),
    "farthest": ("5788606db2c2", {"dimensions": 4, "heldout_rows": 30}),
    "rows": ("d80d55b80081", {}),
}
"""Dataset -> sha256 of its batches, scored rows and baselines (of rows that JAX draws: of the
baselines), with the other fields too; another value of each field that a batch or a held-out row
may depend on."""


def content(dataset):
    """Batches and held-out rows; what a token counts for the loss is not of the digest."""
    rows = dataset.heldout(0)
    rows.pop("bytes", None)
    return draw(dataset, 0, 1, 8), rows


@pytest.mark.parametrize("name", SMALL)
def test_rows_stay_what_they_were(name, tmp_path):
    """Stored runs go on with them, and are compared with those of other versions."""
    config, length, _ = SMALL[name](tmp_path)
    digest, other = OTHER[name]
    whole = hashlib.sha256()
    for fields in ({}, other):
        dataset, rows = dataclasses.replace(config, **fields).load(length), []
        if not isinstance(dataset.batches, data.DeviceBatches):
            parts = dataset.heldout, dataset.train, dataset.validation
            rows = [draw(dataset, 3, 5, 8), *(part(n) for part in parts if part for n in (0, 3))]
        for path, a in jax.tree.leaves_with_path(rows):
            whole.update(f"{jax.tree_util.keystr(path)} {a.dtype} {a.shape}".encode() + a.tobytes())
        for metric, known in dataset.baselines().items():
            found = {n: f"{value:.5g}" for n, value in known.items() if n != "gzip -9"}
            whole.update(f"{metric} {found}".encode())
    assert whole.hexdigest()[:12] == digest


@pytest.mark.parametrize("name", SMALL)
def test_the_digest_changes_with_every_field_that_changes_the_rows(name, tmp_path):
    config, length, _ = SMALL[name](tmp_path)
    one = config.load(length)
    for field, value in OTHER[name][1].items():
        other = dataclasses.replace(config, **{field: value}).load(length)
        if not same(content(one), content(other)):
            assert other.digest != one.digest, field


def test_the_digest_is_of_the_rows_of_every_split(tmp_path):
    """Own rows, the validation rows too; rows of the package datasets in either form; token ids."""
    import datasets

    items = lambda n: [{"tokens": np.arange(3) + n}]
    own = Splits("own", items(0), items(1), data.DataSizes(9), items(2))
    others = [own._replace(**{part: items(5)}) for part in ("train", "heldout", "validation")]
    assert len({dataset_of_splits(one, 3).digest for one in [own, *others]}) == 4
    for kind, form in (
        (data.HuggingFace, "rows"),
        (data.HuggingFace, "rows.parquet"),
        (data.TokenFiles, "val.npy"),
    ):
        digests = set()
        for number in (4, 5):
            path = tmp_path / str(number) / form
            path.parent.mkdir(exist_ok=True)
            table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [number, 7]]})
            table.to_parquet(path) if path.suffix else table.save_to_disk(path)
            np.save(path.with_suffix(".npy"), np.array([1, 2, 3, number, 7, 8], np.uint16))
            fields = dict(vocab_size=9, heldout=0.5, bytes_per_token=1.0)
            digests.add(kind(path=str(path), **fields).load(2).digest)
        assert len(digests) == 2


def without(part):
    items = [{"tokens": np.arange(3)}]
    return Splits("mine", items, items, data.DataSizes(9))._replace(**{part: []})


@pytest.mark.parametrize(("part", "word"), [("train", "training"), ("heldout", "held-out")])
def test_own_rows_of_which_a_part_is_empty_are_refused(part, word):
    config = data.Rows(make=f"{__file__}:without", path=part)
    for call in (config.load, config.shapes):
        with pytest.raises(ValueError, match=f"mine: the {word} part has no rows"):
            call(2)


@pytest.mark.parametrize("name", ["tokens", "huggingface", "pairs", "text"])
def test_data_in_the_working_folder_have_its_name(name, tmp_path, monkeypatch):
    config, length, _ = SMALL[name](tmp_path)
    folder = tmp_path / "rows" if name == "huggingface" else tmp_path
    monkeypatch.chdir(folder)
    dataset = dataclasses.replace(config, path=".").load(length)
    assert dataset.name.split()[0] == folder.name


def test_what_is_kept_for_a_sweep_is_the_same_data(case, tmp_path):
    config, length, _, plain = case
    for _ in range(2):  # made, then mapped
        with data.keep_in(tmp_path / "kept"):
            dataset = config.load(length)
        assert dataset.digest == plain.digest
        assert dataset.facts == plain.facts
        assert same(content(dataset), content(plain))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:270"])
def test_what_is_kept_is_read_once_and_a_changed_file_is_seen(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_bytes(b"the rose is a rose\n" * 60)
    config = data.Text(path=str(path), tokenizer=tokenizer)
    times = path.stat()
    with data.keep_in(tmp_path / "kept"):
        one = config.load(8).digest
        path.write_bytes(b"the nose is a nose\n" * 60)
        changed = config.load(8).digest
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as the first text
        assert config.load(8).digest == one
    assert one != changed == config.load(8).digest
    assert not list((tmp_path / "kept").glob(".*"))


def test_sizes_and_shapes_are_known_before_loading(case):
    config, length, objective, dataset = case
    assert config.sizes() == dataset.sizes
    loaded = dataset.shapes()
    assert config.shapes(length) == loaded
    batch = draw(dataset, 0, 1, 2)
    expected = {name: (2, *a.shape[1:]) for name, a in loaded.items()}
    assert {name: a.shape for name, a in batch.items()} == expected
    input_shapes(objective.bind(dataset.sizes), loaded)
    type(config)()  # every field has a default: it is a flag
    assert all(f.type for f in dataclasses.fields(config))


def test_rows_that_are_scored(case):
    """All of them, or some; other rows than are trained on."""
    config, *_, dataset = case
    for part in filter(None, (dataset.heldout, dataset.train, dataset.validation)):
        for count in (0, min(3, len(part(0)["valid"]))):
            rows = part(count)
            assert {len(a) for a in rows.values()} == {count or len(rows["valid"])}
    if isinstance(config, data.Text | data.Endpoints):
        return  # short windows come again; every case is scored, those of training too
    held, trained = (
        {b"".join(rows[name][i].tobytes() for name in sorted(rows) if name != "valid")
         for i in range(len(rows["valid"]))}
        for rows in (dataset.heldout(0), dataset.train(0))
    )  # fmt: skip
    assert not held & trained


def test_baselines_are_of_a_metric_of_the_objective(case):
    _, _, objective, dataset = case
    found = dataset.baselines()
    assert set(found) <= {metric.name for metric in objective.metrics}
    for values in found.values():
        assert all(np.isfinite(v) and v >= 0 for v in values.values())


def test_padding_never_counts(case):
    """A row of zeros that is not valid changes no sum, as an evaluation fills its last batch."""
    *_, objective, dataset = case
    objective = objective.bind(dataset.sizes)
    rows = dataset.heldout(2)
    filled = jax.tree.map(lambda a: np.pad(a, [(0, 3), *[(0, 0)] * (a.ndim - 1)]), rows)
    key = jax.random.key(0)
    one, more = (objective.prepare(jax.tree.map(jnp.asarray, a), key) for a in (rows, filled))
    size = dataset.sizes.num_classes or dataset.sizes.vocab_size + len(objective.special_tokens)
    assert not np.any(more.weights[len(one.weights) :])
    answers = np.random.default_rng(0).normal(size=(*more.weights.shape, size))
    answers = jnp.asarray(answers, jnp.float32)
    sums = lambda metric, e: [*map(jnp.sum, metric.measure(answers[: len(e.targets)], e))]
    for metric in (m for m in objective.metrics if m.measure is not None):
        np.testing.assert_allclose(sums(metric, one), sums(metric, more), rtol=1e-6)
        assert sums(metric, one)[1] > 0
    assert Metric("m", "", "lower").measure is None
