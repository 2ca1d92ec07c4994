"""What a batch is a function of, and what a window holds."""

import gzip
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from small_data import word_tokenizer

from attnlab.data import BYTES, DataSizes, Text, text
from attnlab.data.tokenizer import make_tokenizer


def test_standard_library_splits_by_whole_files():
    corpus = text.load_corpus()
    assert corpus.train.max() < BYTES.vocab_size
    assert 0.05 < len(corpus.heldout) / corpus.num_bytes < 0.2
    heldout = corpus.heldout.astype(np.uint8).tobytes()
    train = corpus.train.astype(np.uint8).tobytes()
    root = Path(sysconfig.get_paths()["stdlib"])
    for name, held in {"argparse.py": False, "functools.py": True}.items():
        source = (root / name).read_bytes()
        assert (source in heldout, source in train) == (held, not held)
    tests = (p for p in root.rglob("*.py") if p.parent.name in text.SKIPPED_FOLDERS)
    assert next(p for p in tests if p.stat().st_size > 1000).read_bytes() not in train + heldout


def test_the_recorded_corpus(shared_data):
    """ANCHORS.md, for the interpreter whose library was measured."""
    corpus = text.load_corpus()
    if corpus.num_bytes != 12_118_641:
        pytest.skip("another interpreter's library")
    assert corpus.sha256.startswith("6542f7510a0b")
    assert len(corpus.heldout) == 1_292_697


def test_a_text_holds_out_its_tail(tmp_path):
    content = bytes(range(1, 101)) * 3
    (tmp_path / "b.txt").write_bytes(content[100:])
    with gzip.open(tmp_path / "a.txt.gz", "wb") as f:
        f.write(content[:100])
    with pytest.raises(ValueError, match="leave out padding and special tokens"):
        make_tokenizer("bytes", []).line([97, -1])
    folder = text.load_corpus(str(tmp_path))
    assert np.concatenate([folder.train, folder.heldout]).astype(np.uint8).tobytes() == content
    assert (len(folder.train), len(folder.heldout)) == (270, 30)


SENTENCES = "Straße um Straße, naïve Œuvre; the rose is a rose is a rose.\n" * 40


@pytest.fixture
def sentences(tmp_path):
    """A text with characters of several bytes, one of which the split at 90 % cuts."""
    path = tmp_path / "text.txt"
    data = SENTENCES.encode()
    while not 0x80 <= data[int(len(data) * 0.9)] < 0xC0:
        data += b"."
    path.write_bytes(data)
    return path


def test_tokens_stand_for_the_bytes_of_the_text(sentences):
    """However it is cut into tokens and windows, every byte but the first token's counts once."""
    source, data = Text(path=str(sentences), tokenizer="bpe:280").load(8), sentences.read_bytes()
    rows = source.heldout(0)
    text = data[int(len(data) * 0.9) + 1 :].decode()  # without the rest of the cut character
    ids = [int(rows["tokens"][0, 0]), *rows["tokens"][:, 1:][rows["valid"]].tolist()]
    assert source.decode(ids) == repr(text)[1:-1]
    first = len(source.decode(ids[:1]))
    assert (rows["bytes"] * rows["valid"]).sum() == len(text.encode()) - first
    assert source.facts["held-out tokens"] == len(ids) < len(text.encode()) / 2


def test_a_kept_tokenizer_is_used_again(sentences, tmp_path):
    data, folder = Text(path=str(sentences), tokenizer="bpe:280"), tmp_path / "run"
    folder.mkdir()
    source = data.load(8, folder)
    [(name, content)] = source.files.items()
    (folder / name).write_bytes(content)
    assert data.load(8, folder).digest == source.digest
    other = Text(path=str(sentences), tokenizer="bpe:260").load(8)
    (folder / name).write_bytes(other.files[name])
    assert data.load(8, folder).digest == other.digest != source.digest
    with pytest.raises(ValueError, match="has 260 tokens, 'bpe:258' at most 258; take the"):
        Text(path=str(sentences), tokenizer="bpe:258").load(8, folder)
    by_path = Text(path=str(sentences), tokenizer=str(folder / name))
    assert by_path.load(8).digest == other.digest
    assert by_path.sizes() == DataSizes(260)
    (folder / name).write_bytes(content)
    assert by_path.load(8).digest == source.digest


def test_a_tokenizer_that_loses_text_says_so(sentences, tmp_path):
    path = word_tokenizer(tmp_path / "words.json", {"?": 0, "rose": 1})
    source = Text(path=str(sentences), tokenizer=path).load(8)
    assert "it loses some of the text" in source.facts["tokenizer"]
    exact = Text(path=str(sentences), tokenizer="bpe:280").load(8)
    assert exact.facts["tokenizer"] == "bpe:280"
