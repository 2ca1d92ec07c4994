"""Every text comes back as it was, and its tokens stand for its bytes."""

import codecs
import json

import numpy as np
import pytest
from small_data import word_tokenizer

from attnlab.data.tokenizer import FILE, load_tokenizer, make_tokenizer, num_tokens, token_sizes

TEXTS = ["a rose is a rose", "Straße, über naïve Œuvre", "日本語 🙂 \t two  spaces ", "", "\n\n"]


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_texts_come_back_and_sizes_sum_to_the_bytes(name):
    tokenizer = make_tokenizer(name, TEXTS[:2])
    for text, (tokens, sizes) in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokenizer.decode(tokens) == text
        assert sizes.sum() == len(text.encode())
        assert (sizes >= 0).all()
        assert len(tokens) == len(sizes)
        assert not len(tokens) or tokens.max() < tokenizer.size == num_tokens(name)
        read = tokenizer.read(text, special_tokens=False)
        assert np.array_equal(read.tokens, tokens)
        assert [text[start:end] for start, end in read.spans] == list(read.names)
        covered = {at for start, end in read.spans for at in range(start, end)}
        assert covered == set(range(len(text)))
    assert make_tokenizer(name, TEXTS[:2]).digest == tokenizer.digest


def test_a_file_is_read(tmp_path):
    """One that was kept in the run's folder, or anybody's: here one that knows words alone."""
    learnt = make_tokenizer("bpe:270", ["low low low"])
    assert make_tokenizer("bpe:270", ["new new new"]).digest != learnt.digest
    (tmp_path / FILE).write_bytes(codecs.BOM_UTF8 + learnt.content)
    kept = make_tokenizer("bpe:270", ["other texts"], tmp_path)
    assert kept.digest == learnt.digest
    path = word_tokenizer(tmp_path / "words.json", {"?": 0, "the": 1, "sea": 2})
    assert num_tokens(path) == 3
    tokens, sizes = make_tokenizer(path, []).encode(["The  wine-dark Sea "])[0]
    assert tokens.tolist() == [1, 0, 0, 0, 2]
    assert sizes.tolist() == [3, 6, 1, 4, 5]  # what lies before a word is its own
    assert np.sum(sizes) == 19


@pytest.mark.parametrize("change", [{"end_of_word_suffix": "</w>"}, {"type": "Unigram"}])
def test_bytes_of_tokens_that_do_not_follow_from_their_names(change, tmp_path):
    content = json.loads(make_tokenizer("bpe:270", ["low low low"]).content)
    path = tmp_path / FILE
    path.write_text(json.dumps(content))
    assert token_sizes(load_tokenizer(path)) is not None
    content["model"] |= change
    if "type" in change:
        content["model"] = change | {"unk_id": 0, "vocab": [["?", 0.0], ["low", -1.0]]}
    path.write_text(json.dumps(content))
    assert token_sizes(load_tokenizer(path)) is None
