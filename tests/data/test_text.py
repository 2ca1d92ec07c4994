"""What a batch is a function of, and what a window holds."""

import gzip
import itertools
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from small_data import word_tokenizer

from attnlab.data import BYTES, DataSizes, Text, text
from attnlab.data.batching import TokenArray, sample, windows
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
    for path in itertools.islice((p for p in tests if p.stat().st_size > 1000), 3):
        assert path.read_bytes() not in train + heldout
    assert 4 < text.unigram_bits(corpus.heldout) < 5.5
    assert 1 < text.gzip_bits(corpus.heldout) < 2.5


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
    plain = make_tokenizer("bytes", [])
    assert plain.line(np.frombuffer(b"rose", np.uint8).astype(np.int32)) == "rose"
    with pytest.raises(ValueError, match="-1 is no byte; leave out padding and special tokens"):
        plain.line([97, -1])
    folder = text.load_corpus(str(tmp_path))
    assert np.concatenate([folder.train, folder.heldout]).astype(np.uint8).tobytes() == content
    assert (len(folder.train), len(folder.heldout)) == (270, 30)
    file = tmp_path / "b.txt"
    assert text.load_corpus(str(file)).num_bytes == 200


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
    learnt = Text(path=str(sentences), tokenizer="bpe:280")
    source, data = learnt.load(8), sentences.read_bytes()
    assert learnt.sizes() == source.sizes == DataSizes(280)
    heldout = source.heldout(0)
    tokens, valid = heldout["tokens"], heldout["valid"]
    text = data[int(len(data) * 0.9) + 1 :].decode()  # without the rest of the cut character
    ids = [int(tokens[0, 0]), *tokens[:, 1:][valid].tolist()]
    assert source.decode(ids) == repr(text)[1:-1]
    first = len(source.decode(ids[:1]))
    assert (heldout["bytes"] * valid).sum() == len(text.encode()) - first
    targets = zip(tokens[:, 1:][valid], heldout["bytes"][valid], strict=True)
    written = [(source.decode([int(token)]), size) for token, size in targets]
    plain_ones = [(one, size) for one, size in written if one.isascii() and "\\" not in one]
    assert len({one for one, _ in plain_ones}) > 3
    assert all(size == len(one) for one, size in plain_ones)
    p = np.unique(ids, return_counts=True)[1] / len(ids)
    bits = -np.sum(p * np.log2(p)) * len(ids) / len(text.encode())
    known = source.baselines()["bits_per_byte"]
    assert known["unigram entropy of the tokens"] == pytest.approx(bits)
    assert source.facts["held-out tokens"] == len(ids) < len(text.encode()) / 2
    some = {name: a.shape for name, a in source.heldout(3).items()}
    assert some == {"tokens": (3, 9), "valid": (3, 8), "bytes": (3, 8)}


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


def test_a_tokenizer_that_loses_text_says_so(sentences, tmp_path):
    path = word_tokenizer(tmp_path / "words.json", {"?": 0, "rose": 1})
    source = Text(path=str(sentences), tokenizer=path).load(8)
    assert "it loses some of the text" in source.facts["tokenizer"]
    exact = Text(path=str(sentences), tokenizer="bpe:280").load(8)
    assert exact.facts["tokenizer"] == "bpe:280"


def test_windows_of_a_text():
    """Every position can be drawn; scored ones are evenly spaced, or hold each target once."""
    few = TokenArray(np.arange(12))
    drawn = [sample(few, 8, 50, seed=0, step=step)[:, 0] for step in range(9)]
    assert set(np.concatenate(drawn)) == {0, 1, 2, 3}
    tokens, counts = windows(TokenArray(np.arange(101)), 10, 4)
    np.testing.assert_array_equal(tokens[:, 0], [0, 30, 60, 90])
    np.testing.assert_array_equal(tokens[-1], np.arange(90, 101))
    assert counts.all()
    for size in (31, 37, 40, 41):
        tokens, counts = windows(TokenArray(np.arange(size)), 10, 0)
        np.testing.assert_array_equal(tokens[:, 1:][counts], np.arange(1, size))
