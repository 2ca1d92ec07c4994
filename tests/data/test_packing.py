"""Packed windows hold every document once, and no target is of another document than its token."""

import gzip
import json

import numpy as np
import pytest
from small_data import write

from attnlab.data import Text
from attnlab.data.packing import packed_rows

LENGTH = 12


def targets(rows):
    """(token, next token) of every target, in the order of the rows."""
    tokens, segments = rows["tokens"], rows["segments"]
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return list(zip(tokens[:, :-1][counts].tolist(), tokens[:, 1:][counts].tolist(), strict=True))


def texts(rows):
    """The documents of rows, or their pieces."""
    return [
        row[numbers == number].tolist()
        for row, numbers in zip(rows["tokens"], rows["segments"], strict=True)
        for number in range(1, numbers.max() + 1)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_token_but_the_first_of_a_document_is_a_target_once(seed):
    """Of documents of 0 to 40 tokens: 13 are a window."""
    sizes = np.random.default_rng(seed).integers(0, 40, 30)
    ends = np.cumsum(sizes)
    count, select = packed_rows({"tokens": np.arange(ends[-1])}, ends, LENGTH)
    rows = select(np.random.default_rng(seed).permutation(count))
    firsts = {0, *ends.tolist()}
    assert sorted(targets(rows)) == [(i - 1, i) for i in range(ends[-1]) if i not in firsts]
    numbers = rows["segments"]
    ordered = np.diff(numbers, axis=1)
    assert set(numbers[:, 0]) == {1}
    assert np.all((ordered == 0) | (ordered == 1) | (numbers[:, 1:] == 0))


def test_small_documents_leave_hardly_any_padding():
    sizes = np.random.default_rng(0).integers(5, 200, 2000)
    count, select = packed_rows({"tokens": np.zeros(sizes.sum(), int)}, np.cumsum(sizes), 1023)
    assert np.mean(select(np.arange(count))["segments"] == 0) < 0.005


DOCUMENTS = ["to be", "or", "not to be; that is the question", "Straße", "x", "whether"] * 10


LINES = "\n".join(json.dumps({"text": text}) for text in DOCUMENTS)
FORMS = {
    "folder": {f"{number:03d}.txt": text for number, text in enumerate(DOCUMENTS)},
    "lines": {"all.jsonl.gz": gzip.compress(LINES.encode())},
    "separator": {"all.txt": "<end>".join(DOCUMENTS)},
}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:270"])
def test_every_form_of_documents_gives_the_same_windows(tmp_path, tokenizer):
    """Whole documents but where one is longer than a window or the held-out part begins."""
    found, fields = [], dict(tokenizer=tokenizer, validation=0.1, pack=True)
    for form, files in FORMS.items():
        fields["separator"] = "<end>" if form == "separator" else ""
        found.append(Text(path=str(write(tmp_path / form, files)), **fields).load(LENGTH))
    for dataset in found:
        for part in ("train", "validation", "heldout"):
            rows, first = getattr(dataset, part)(0), getattr(found[0], part)(0)
            np.testing.assert_array_equal(rows["tokens"], first["tokens"])
            np.testing.assert_array_equal(rows["segments"], first["segments"])
    assert found[0].digest == found[1].digest == found[2].digest
    read = [found[0].decode(text) for text in texts(found[0].train(0))]
    assert {"to be", "whether"} <= set(read)
    assert max(map(len, texts(found[0].train(0)))) == LENGTH + 1
    held = [found[0].decode(text) for text in texts(found[0].heldout(0))]
    assert held.count("whether") == DOCUMENTS[54:].count("whether")
