"""The eight texts, and n-gram baselines against counts by hand and an independent computation."""

import collections
import re
from pathlib import Path

import numpy as np
import pytest

from attnlab.data.batching import TokenArray, sample, windows
from attnlab.data.text import load_corpus
from experiments.studies.head_width.ngrams import target_bits
from experiments.studies.head_width.rows import PUBLISHED
from experiments.studies.head_width.texts import TEXTS, StudyText, load_text


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"python"}))
def test_sizes_and_digests_are_those_of_the_plan(shared_data, name):
    corpus = load_text(name, shared_data)
    row = next(
        line
        for line in (PUBLISHED / "plan.md").read_text().splitlines()
        if re.match(rf"\| {name}\b", line)
    )
    parts = corpus.train, corpus.validation, corpus.heldout
    assert [cell.strip() for cell in row.split("|")[2:5]] == [f"{len(part):,}" for part in parts]
    assert f"`{corpus.sha256[:16]}`" in row
    if name.startswith("tatoeba"):  # no sentence is in two parts
        train, validation, heldout = (set(bytes(p.astype(np.uint8)).splitlines()) for p in parts)
        assert not train & validation | train & heldout | validation & heldout


def test_the_standard_library_is_split_by_file():
    corpus = load_text("python", Path())
    assert min(map(len, (corpus.train, corpus.validation, corpus.heldout))) > 500_000
    dataset = StudyText().load(128)
    scored = dataset.heldout(7), dataset.validation(0)
    assert [len(rows["tokens"]) for rows in scored] == [2048, 1024]
    assert all(rows["valid"].all() for rows in scored)


def by_hand(train, scored, size):
    """-log2 p of every target, with dictionaries of bytes."""
    counts = collections.defaultdict(collections.Counter)
    for row in train.tolist():
        for at in range(1, len(row)):
            for k in range(min(size, at) + 1):
                counts[bytes(row[at - k : at])][row[at]] += 1

    def p(context, target):
        lower = p(context[1:], target) if context else 1 / 256
        seen = counts.get(context)
        if not seen:
            return lower
        total, types = sum(seen.values()), len(seen)
        return (seen[target] + types * lower) / (total + types)

    return np.array([
        [-np.log2(p(bytes(row[max(0, at - size) : at]), row[at])) for at in range(1, len(row))]
        for row in scored.tolist()
    ])  # fmt: skip


def letters(seed, shape):
    return np.random.default_rng(seed).choice(list(b"aab c\0\xff"), shape).astype(np.uint8)


def test_as_counted_by_hand():
    """Also where a context begins with zero bytes, and so is as a number the shorter one."""
    zeros = np.array([[0, 0, 5, 1], [5, 2, 5, 2]], np.uint8)
    many = letters(0, (30, 9)), letters(1, (20, 12)), (0, 1, 2, 3, 4, 7)
    for train, scored, sizes in (many, (zeros, zeros, (2,))):
        found = target_bits(train, scored, sizes)
        for size in sizes:
            np.testing.assert_allclose(found[size], by_hand(train, scored, size), rtol=1e-12)
    with pytest.raises(ValueError, match="more than 7 bytes"):
        target_bits(zeros, zeros, (8,))


# Bytes of context -> bits per byte: an independent recomputation on the first study's batches.
WIKITEXT = {3: 2.486, 4: 2.291}
SHAKESPEARE = {3: 2.967, 4: 2.957}


@pytest.mark.parametrize(
    ("file", "expected"),
    [("wikitext2/train.txt.gz", WIKITEXT), ("tinyshakespeare/input.txt.gz", SHAKESPEARE)],
)
def test_the_first_study_s_batches(shared_data, file, expected):
    """800 batches of 16 windows of 64, seed 0, scored on 2048 held-out windows."""
    corpus = load_corpus(str(shared_data / file)).with_validation(0.1)
    batches = [
        sample(TokenArray(corpus.train), 64, 16, seed=0, step=step) for step in range(1, 801)
    ]
    tokens, valid = windows(TokenArray(corpus.heldout), 64, 2048)
    train = np.concatenate(batches).astype(np.uint8)
    bits = target_bits(train, tokens.astype(np.uint8), (3, 4))
    found = {size: float(each[valid].mean()) for size, each in bits.items()}
    assert found == pytest.approx(expected, abs=0.0006)
