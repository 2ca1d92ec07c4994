"""Token files are the text in memory, wherever they are cut; `prepare` loses nothing."""

import gzip
import hashlib
import json
import sys

import numpy as np
import pytest
from commands import command
from small_data import word_tokenizer, write
from test_every_dataset import same

from attnlab.data import HuggingFace, PreparePlan, Text, TokenFiles, prepare
from attnlab.data.prepare import read_pieces
from attnlab.data.token_files import Index
from attnlab.data.tokenizer import load_tokenizer, make_tokenizer, token_sizes

BYTES = np.random.default_rng(0).integers(1, 256, 5000).astype(np.uint8)
LENGTH = 16


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "npy"])
def test_a_file_gives_the_batches_of_the_text_in_memory(tmp_path, dtype):
    """The same windows of the same (seed, step), and the same held-out part."""
    (tmp_path / "text").write_bytes(BYTES.tobytes())
    np.save(tmp_path / "ids.npy", BYTES.astype(np.uint32))
    fields = dict(path=str(tmp_path / "ids.npy"), vocab_size=256, bytes_per_token=1.0)
    if dtype != "npy":
        BYTES.astype(dtype).tofile(tmp_path / "ids.bin")
        fields |= {"path": str(tmp_path / "ids.bin"), "dtype": dtype}
    config = TokenFiles(**fields)
    text, files = Text(path=str(tmp_path / "text")).load(LENGTH), config.load(LENGTH)
    shard = slice(2, 6)
    for seed, step in ((0, 1), (3, 70)):
        assert same(text.batches(seed, step, 8, shard), files.batches(seed, step, 8, shard))
    for part in ("heldout", "train"):
        for count in (0, 7):
            ours, theirs = getattr(files, part)(count), getattr(text, part)(count)
            assert same({n: ours[n] for n in theirs}, theirs)
    entropy = files.baselines()["bits_per_byte"]["unigram entropy of the tokens"]
    assert entropy == pytest.approx(text.baselines()["bits_per_byte"]["unigram entropy"])


TEXTS = {f"{i}.txt": f"Œuvre {i}: " + "the rose is a rose, naïve.\n" * (i + 1) for i in range(20)}


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts", {f"more/{name}": text for name, text in TEXTS.items()})


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_prepared_texts_are_whole(texts, tmp_path, tokenizer):
    """Every document is in one part, its tokens give it back, and stand for its bytes."""
    out, plan = tmp_path / "out", PreparePlan(tokenizer, heldout=0.3, shard_tokens=100)
    index = prepare([texts], out, plan)
    assert index == Index.read(out)
    assert index.vocab_size == (257 if tokenizer == "bytes" else 301)
    made, parts = make_tokenizer(tokenizer, [], out), []
    for shards, count in zip((index.train, index.heldout), index.documents, strict=True):
        assert all(shard.tokens == 100 for shard in shards[:-1])
        content = b"".join((out / shard.file).read_bytes() for shard in shards)
        first = (out / shards[0].file).read_bytes()
        assert shards[0].sha256 == hashlib.sha256(first).hexdigest()
        ids = np.frombuffer(content, "<u2")
        documents = np.split(ids, np.flatnonzero(ids == index.end_of_document) + 1)
        assert len(documents) == count + 1
        assert len(documents[-1]) == 0
        parts.append({made.decode(document[:-1]) for document in documents[:-1]})
    assert parts[0] | parts[1] == set(TEXTS.values())
    assert not parts[0] & parts[1]
    dataset = TokenFiles(path=str(out)).load(8)
    rows = dataset.heldout(0)
    size = sum(len(text.encode()) for text in parts[1])
    first = token_sizes(made)[rows["tokens"][0, 0]]
    assert (rows["bytes"] * rows["valid"]).sum() == size - first
    assert "naïve" in dataset.decode(rows["tokens"].ravel().tolist())


@pytest.mark.parametrize(("last", "dtype"), [(65_534, "uint16"), (65_535, "uint32")])
def test_tokens_that_give_no_text_back_stand_for_the_mean(texts, tmp_path, last, dtype):
    """And the token that ends a document is after the last one: 65,536 tokens are 16 bits."""
    path = word_tokenizer(tmp_path / "words.json", {"?": 0, "rose": last})
    index = prepare([texts], tmp_path / "out", PreparePlan(path, heldout=0.3))
    assert (index.vocab_size, index.dtype) == (last + 2, dtype)
    total = sum(shard.tokens for shard in (*index.train, *index.heldout))
    assert index.text_bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert index.token_bytes == index.text_bytes / total


def test_prepared_again_the_split_and_digest_are_the_same(texts, tmp_path):
    plan = PreparePlan(heldout=0.3)
    one = prepare([texts], tmp_path / "one", plan)
    (texts / "more" / "zz.txt").write_text("a new document\n")
    two = prepare([texts], tmp_path / "two", plan)
    assert sum(two.documents) == sum(one.documents) + 1
    held = [TokenFiles(path=str(tmp_path / n)).load(8).heldout(0)["tokens"] for n in ("one", "two")]
    shorter = min(len(a) for a in held)
    np.testing.assert_array_equal(held[0][: shorter - 1], held[1][: shorter - 1])
    with pytest.raises(ValueError, match="prepared already"):
        prepare([texts], tmp_path / "two", plan)


def test_a_folder_with_other_files_is_left_as_it_is(texts, tmp_path):
    """What a killed call leaves is overwritten: shards, and a tokenizer beside them."""
    plan, out = PreparePlan("bpe:300"), tmp_path / "out"
    for names in (["notes.txt", "train_00000.bin"], ["tokenizer.json"]):
        mine = dict.fromkeys(names, "mine")
        folder = write(tmp_path / str(len(names)), mine)
        with pytest.raises(ValueError, match=names[0]):
            prepare([texts], folder, plan)
        assert {path.name: path.read_text() for path in folder.iterdir()} == mine
    first = prepare([texts], out, plan)
    (out / "index.json").unlink()
    (out / ".index.json.3f.partial").touch()
    assert prepare([texts], out, plan) == first


def test_long_documents_are_read_in_pieces(tmp_path):
    text = "é" * 50 + "\n" + "word " * 300_000 + "\n" + "last line\n" * 20_000
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    pieces = list(read_pieces(tmp_path / "a.txt.gz", tmp_path))
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_tokenizer_is_learnt_from_so_many_bytes_of_text(tmp_path, monkeypatch):
    """Of text and not of packed files: about 8 of 40 documents, each of a word of its own."""
    monkeypatch.setattr(sys.modules[prepare.__module__], "LEARN_BYTES", 8000)
    words = [f"word{chr(97 + i // 7)}{chr(110 + i % 7)}" for i in range(40)]
    files = {f"{w}.txt.gz": gzip.compress(f"{w} ".encode() * 142) for w in words}  # 1000 bytes
    write(tmp_path / "texts", files)
    prepare([tmp_path / "texts"], tmp_path / "out", PreparePlan("bpe:1000", heldout=0.0))
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    learnt = [word for word in words if len(tokenizer.ids([f" {word}"])[0]) == 1]
    assert 2 < len(learnt) < 20
    monkeypatch.setattr(sys.modules[prepare.__module__], "LEARN_BYTES", 1)  # of one, where none is
    prepare([tmp_path / "texts"], tmp_path / "few", PreparePlan("bpe:300", heldout=0.0))
    tokenizer = load_tokenizer(tmp_path / "few" / "tokenizer.json")
    assert [word for word in words if len(tokenizer.ids([f" {word}"])[0]) == 1] == words[:1]


def test_tables_and_json_lines(tmp_path):
    """The same 400 documents, of which 256 are tokenized together, from a folder of datasets,
    Parquet and JSON lines."""
    import datasets

    texts = list(TEXTS.values()) * 20
    rows = [{"text": text} for text in texts]
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "arrow")
    table.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) + "\n" for row in rows))
    for name in ("arrow", "rows.parquet", "rows.jsonl"):
        index = prepare([tmp_path / name], tmp_path / f"out {name}", PreparePlan(heldout=0.0))
        assert index.documents == (400, 0)
        ids = np.fromfile(tmp_path / f"out {name}" / "train_00000.bin", "<u2")
        expected = b"".join(text.encode() + b"\0" for text in texts)
        assert np.where(ids == 256, 0, ids).astype(np.uint8).tobytes() == expected
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"holds splits \['train'\]"):
        prepare([tmp_path / "splits"], tmp_path / "out splits")


def test_rows_of_a_table_are_examples(tmp_path):
    """Split by name; a long row is cut, a short one is padded; Parquet holds the same."""
    import datasets

    rows = {"input_ids": [[1, 2, 3], [4, 5, 6, 7, 8, 9]]}
    splits = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    fields = dict(vocab_size=10, bytes_per_token=2.0)
    dataset = HuggingFace(path=str(tmp_path / "both"), **fields).load(4)
    rows = dataset.heldout(0)
    assert rows["tokens"].tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    assert rows["valid"].tolist() == [[True, True, False, False], [True] * 4]
    (tmp_path / "both" / "train" / "cache-1f.arrow").write_bytes(b"of a filter")
    assert HuggingFace(path=str(tmp_path / "both"), **fields).load(4).digest == dataset.digest
    splits["train"].to_parquet(tmp_path / "rows.parquet")
    parquet = HuggingFace(path=str(tmp_path / "rows.parquet"), heldout=0.5, **fields).load(4)
    assert parquet.heldout(0)["tokens"].tolist() == [[4, 5, 6, 7, 8]]
    small = HuggingFace(path=str(tmp_path / "both"), vocab_size=5, bytes_per_token=1.0).load(4)
    with pytest.raises(ValueError, match=r"has the token 5, data\.vocab_size is 5"):
        small.heldout(0)


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Windows of 600 MB are read all over by a process that grows by less than 100 MB."""
    path = tmp_path / "ids.bin"
    with path.open("wb") as file:
        file.truncate(600 << 20)
    script = tmp_path / "script.py"
    script.write_text(f"""
import resource, numpy as np
from attnlab.data.token_files import TokenFile, TokenStream
from pathlib import Path
from attnlab.data import DATASETS
stream = TokenStream([TokenFile(Path({str(path)!r}), "uint16", 0, 300 << 20)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in range(300):
    stream.read(np.arange(step, (300 << 20) - 2000, 1 << 20), 1025)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""")
    done = command(script)
    assert int(done.stdout) / 1024 < 100
