"""What a batch is a function of, and what a window holds."""

import gzip
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from attnlab.training.sources import BYTES, Text, text


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
    content = bytes(range(100)) * 3
    (tmp_path / "b.txt").write_bytes(content[100:])
    with gzip.open(tmp_path / "a.txt.gz", "wb") as f:
        f.write(content[:100])
    folder = text.load_corpus(str(tmp_path))
    assert np.concatenate([folder.train, folder.heldout]).astype(np.uint8).tobytes() == content
    assert (len(folder.train), len(folder.heldout)) == (270, 30)
    file = tmp_path / "b.txt"
    assert text.load_corpus(str(file)).num_bytes == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no text at"),
        (b"", "holds no text"),
        (b"x" * 40, "held-out text has 4 bytes, too short for one window of 8"),
    ],
)
def test_unusable_texts(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Text(path=str(path)).load(8)


def test_a_broken_gzip_is_named(tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"x" * 10_000)[:-9])
    with pytest.raises(ValueError, match=r"cannot read .*text\.gz"):
        Text(path=str(tmp_path)).load(8)


def test_a_batch_is_a_function_of_seed_and_step():
    whole = np.arange(10_000)
    batch = text.sample(whole, 16, 8, seed=3, step=5)
    assert batch.shape == (8, 17)
    np.testing.assert_array_equal(batch - batch[:, :1], np.tile(np.arange(17), (8, 1)))
    np.testing.assert_array_equal(batch, text.sample(whole, 16, 8, seed=3, step=5))
    for other in ({"seed": 4, "step": 5}, {"seed": 3, "step": 6}):
        assert (text.sample(whole, 16, 8, **other) != batch).any()
    parts = [
        text.sample(whole, 16, 8, seed=3, step=5, part=slice(2 * p, 2 * p + 2)) for p in range(4)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), batch)


def test_every_position_can_be_drawn():
    starts = np.concatenate(
        [text.sample(np.arange(12), 8, 50, seed=0, step=s)[:, 0] for s in range(9)]
    )
    assert set(starts) == {0, 1, 2, 3}


def test_windows_are_evenly_spaced():
    tokens, counts = text.windows(np.arange(101), 10, 4)
    np.testing.assert_array_equal(tokens[:, 0], [0, 30, 60, 90])
    np.testing.assert_array_equal(tokens[-1], np.arange(90, 101))
    assert counts.all()


@pytest.mark.parametrize("size", [31, 37, 40, 41])
def test_the_whole_text_counts_every_target_once(size):
    tokens, counts = text.windows(np.arange(size), 10, 0)
    np.testing.assert_array_equal(tokens[:, 1:][counts], np.arange(1, size))
