"""The eight texts: parts that share no document, digests as the plan says."""

import re

import numpy as np
import pytest
from conftest import ROOT

from experiments.studies.head_width.run import make_source
from experiments.studies.head_width.texts import TEXTS, load_text

PLAN = (ROOT / "docs/results/head_width/plan.md").read_text()
LINES = ("tatoeba_fr", "tatoeba_en")


@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"python"}))
def test_sizes_and_digests_are_those_of_the_plan(shared_data, name):
    corpus = load_text(name, shared_data)
    row = next(line for line in PLAN.splitlines() if re.match(rf"\| {name}\b", line))
    sizes = [f"{len(part):,}" for part in (corpus.train, corpus.validation, corpus.heldout)]
    assert [cell.strip() for cell in row.split("|")[2:5]] == sizes
    assert f"`{corpus.sha256[:16]}`" in row


@pytest.mark.parametrize("name", sorted(LINES))
def test_no_sentence_is_in_two_parts(shared_data, name):
    corpus = load_text(name, shared_data)
    parts = [set(bytes(part.astype(np.uint8)).splitlines())
             for part in (corpus.train, corpus.validation, corpus.heldout)]  # fmt: skip
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]


def test_the_standard_library_is_split_by_file(tmp_path):
    corpus = load_text("python", tmp_path)
    assert min(map(len, (corpus.train, corpus.validation, corpus.heldout))) > 500_000
    source = make_source(corpus, 128)
    scored = source.heldout(7), source.validation(0)
    assert [len(rows["tokens"]) for rows in scored] == [2048, 1024]
    assert all(rows["valid"].all() for rows in scored)


def test_unknown_text():
    with pytest.raises(ValueError, match="unknown text"):
        load_text("pyton", ROOT)
