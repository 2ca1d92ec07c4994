"""Files and folders of texts: what other programs leave in them, and what cannot be used."""

import codecs
import gzip
import io
import os
import shutil
import sys

import numpy as np
import pytest
from small_data import write

from attnlab import data
from attnlab.data.prepare import PreparePlan, prepare
from attnlab.data.text_rows import find_pairs, read_labelled
from attnlab.interpret import read_trees, treebank_parts
from experiments.configs import scan

TEXT = b"the ball\n" * 60
LINES = [f"der Ball {i} rollt" for i in range(60)]
SEVERAL = "\n".join(LINES).encode()
TREE = b"1\tSee\t_\t_\t_\t_\t0\troot\t_\t_\n\n"
IDS = np.arange(5000, dtype="<u2") % 256
KNOWN = {"vocab_size": 256, "bytes_per_token": 1.0}


def text(folder, **fields):
    return data.Text(path=str(folder), **fields).load(8).digest


def tokens(folder, **fields):
    return data.TokenFiles(path=str(folder), **fields).load(8)


def pairs(folder, parts=("a", "a", "a")):
    return find_pairs(folder, ("en", "de"), parts)


def prepared(folder, **fields):
    return prepare([folder], folder.parent / "out", PreparePlan(**fields))


def classes(folder):
    """Of a folder, and of the zip of it."""
    packed = shutil.make_archive(folder.parent / "texts", "zip", folder)
    return [read_labelled(path) for path in (folder, packed)]


def trees(folder):
    return {part: read_trees(path)[0].text for part, path in treebank_parts(folder).items()}


def saved(array):
    np.save(buffer := io.BytesIO(), array)
    return buffer.getvalue()


READERS = {
    "text": (text, {"a.txt": SEVERAL, "sub/b.txt": SEVERAL}),
    "tokens": (lambda folder: tokens(folder, **KNOWN).digest, {"a.bin": IDS.tobytes()}),
    "pairs": (pairs, {"a.en": SEVERAL, "a.de": SEVERAL.upper()}),
    "folder of classes": (
        classes,
        {f"{c}/{i}.txt": f"{c} {i}".encode() for c in ("neg", "pos") for i in range(60)},
    ),
    "file of a class": (classes, {"rt.neg": SEVERAL, "rt.pos": SEVERAL.upper()}),
    "prepare": (prepared, {"a.txt": SEVERAL, "sub/b.txt": SEVERAL}),
    "prepare JSON lines": (prepared, {"a.jsonl": b'{"text": "der Ball"}\n{"text": "rollt"}\n'}),
    "treebank": (trees, {"en-ud-dev.conllu": TREE, "en-ud-test.conllu": TREE}),
}  # fmt: skip


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_and_hidden_files_are_no_data(tmp_path, name, packed):
    """.ipynb_checkpoints is no third class, and what macOS writes beside a file is no text."""
    read, files = READERS[name]
    if packed and read in (classes, READERS["tokens"][0]):
        pytest.skip("not read compressed")
    marked = files if name == "tokens" else {n: codecs.BOM_UTF8 + a for n, a in files.items()}
    file, content = next(iter(files.items()))
    *parents, last = file.split("/")
    hidden = {
        "/".join([*parents, f"._{last}"]): b"\0\xff" + content,
        f".ipynb_checkpoints/{last}": content,
        f"__MACOSX/.{last}": content,
        ".git/objects/ab/cd": b"\0\xff",
        ".DS_Store": b"\0\xff",
    }
    found = []
    for number, some in enumerate((files, marked)):
        some = {n + packed: gzip.compress(a) if packed else a for n, a in some.items()}
        folder = tmp_path / str(number) / "data"  # some values have its name
        found.append(read(write(folder, some | (hidden if number else {}))))
    assert found[0] == found[1]


CASES = [
    (text, {}, {"a.txt": b""}, "holds no text"),
    (text, {}, {"a.txt": b"x" * 40}, "4 tokens"),
    (text, {"validation": 0.001}, {"a.txt": b"x" * 4000}, "validation part has 4 tokens"),
    (text, {"validation": 1e-17, "pack": True}, {"a.txt": TEXT}, "no document of the validation"),
    (text, {}, {"a.gz": gzip.compress(b"x" * 10_000)[:-9]}, "a.gz"),
    (text, {"tokenizer": "bpe:300"}, {"a.txt": b"one\ntwo\n\xff\n" * 100}, "a.txt:3: byte 0xff"),
    (text, {"tokenizer": "bpe:200"}, {"a.txt": TEXT}, "bpe:200"),
    (text, {"tokenizer": "byte"}, {"a.txt": TEXT}, "byte"),
    (text, {"separator": "<end>"}, {"a.txt": TEXT}, r"data\.pack=True"),
    (text, {"tokenizer": __file__}, {"a.txt": TEXT}, "test_files.py"),
    (tokens, KNOWN | {"dtype": "uint32"}, {"a.bin": IDS[:4999].tobytes()}, "4"),
    (tokens, KNOWN | {"vocab_size": 200}, {"a.bin": IDS.tobytes()}, "token 255.*vocab_size is 200"),
    (tokens, {"vocab_size": 256}, {"a.bin": IDS.tobytes()}, "bytes_per_token"),
    (tokens, {"bytes_per_token": 1.0}, {"a.bin": IDS.tobytes()}, "vocab_size"),
    (tokens, KNOWN | {"pack": True}, {"a.bin": IDS.tobytes()}, r"data\.end_of_document"),
    (tokens, KNOWN | {"pack": True, "end_of_document": 256}, {"a.bin": IDS.tobytes()}, "not 256"),
    (tokens, KNOWN | {"heldout": 0.001}, {"a.bin": IDS.tobytes()}, "held-out part has 5 tokens"),
    (tokens, KNOWN, {"a.npy": saved(IDS.astype(">u2"))}, "a.npy is >u2"),
    (tokens, KNOWN, {"a.npy": b"text"}, "a.npy"),
    (tokens, KNOWN, {"a.txt": b"text"}, ".bin or .npy"),
    (tokens, {}, {"index.json": b"{}"}, "index.json"),
    (pairs, {}, {"a.en": "one\ntwo\n", "a.de": "eins\n"}, "a.en has 2 lines, .*a.de 1"),
    (pairs, {}, {"a.en": "one\n  \n", "a.de": "eins\nzwei\n"}, "a.en:2: the line is empty"),
    (pairs, {}, {"a.en": "one\ntwo\n", "a.de": b"ein\nzw\xe9\n"}, "a.de:2: byte 0xe9 at column 3"),
    (pairs, {}, {"a.en": "one\n"}, "a.de"),
    (pairs, {"parts": ("a",)}, {"a.en": "one\n", "a.de": "eins\n"}, "the part"),
    (read_labelled, {}, {"data.tsv": "a\tone\nb two\n"}, "data.tsv:2: no class"),
    (read_labelled, {}, {"data.tsv": "a\tone\nb\t \n"}, "data.tsv:2: the text is empty"),
    (read_labelled, {}, {"data.tsv": "a\tone\na\ttwo\n"}, "two classes"),
    (read_labelled, {}, {"data.tsv": "a\tone\nb\ttwo\n"}, "the split"),
    (read_labelled, {}, {"data.zip": b"PK"}, "data.zip"),
    (read_labelled, {}, {"x.a": "one\n", "x.b": "two\n\n"}, "x.b:2: the text is empty"),
    (read_labelled, {}, {"x.a": "one\n", "y.b": "two\n"}, "x.a, y.b"),
    (read_labelled, {}, {"a/1": "one", "b/2": b"a\n\xc3\n"}, "b/2:2: byte 0xc3"),
    (prepared, {"end_of_document": "<eos>"}, {"a.txt": TEXT}, "<eos>"),
    (prepared, {"tokenizer": "bpe:300", "end_of_document": "<eos>"}, {"a.txt": TEXT}, "<eos>"),
    (prepared, {}, {"a.gz": gzip.compress(b"a" * 99)[:-9]}, "a.gz"),
    (prepared, {}, {"a.txt": b"\xff\xfe"}, "a.txt is not UTF-8"),
    (prepared, {}, {"a.jsonl": b'{"text": "\\ud800"}'}, "a.jsonl:1: "),
    (prepared, {}, {"a.jsonl": b'{"text": "a"}\n\n[]\n'}, "a.jsonl:3: no JSON object"),
    (prepared, {}, {"a.jsonl": b'{"text": "a"}\n' + b"[" * 100_000}, "a.jsonl:2: no JSON object"),
    (prepared, {"column": "body"}, {"a.jsonl": b'{"text": "a"}'}, "a.jsonl:1: .*'body'"),
    (prepared, {}, {"a.jsonl": b'{"text": 5}'}, "a.jsonl: 'text' is int"),
    (prepared, {}, {"a.parquet": b"text"}, "cannot read .*a.parquet: "),
    (trees, {}, {"a-ud-dev.conllu": TREE, "b-ud-dev.conllu": TREE}, "two files of the part 'dev'"),
    (trees, {}, {"a-ud-dev.conllu": b"#\n# caf\xe9\n"}, "dev.conllu:2: byte 0xe9 is not UTF-8"),
    (trees, {}, {"a-ud-dev.conllu.gz": gzip.compress(TREE)[:-9]}, "cannot read .*dev.conllu.gz: "),
    (trees, {}, {"a-ud-dev.conllu": b"\n# nothing\n"}, "holds no sentence"),
    (scan.datasets, {}, {f"tasks_{part}_simple.txt.gz": gzip.compress(b"IN: a OUT: b\nIN: a b\n")
                         for part in ("train", "test")}, "simple.txt.gz:2"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "fields", "files", "message"), CASES)
def test_files_that_cannot_be_used_are_named(tmp_path, read, fields, files, message):
    folder, name = write(tmp_path / "data", files), next(iter(files))
    path = folder / name if name.startswith("data.") else folder
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(path, **fields)


BINARY = [b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"%PDF-", b"a\0"]
"""How zip, gzip, bzip2, xz, Zstandard, PDF, and numbers or UTF-16 begin."""


@pytest.mark.parametrize("begin", BINARY)
@pytest.mark.parametrize("read", [text, pairs, prepared])
def test_packed_and_binary_files_are_refused(tmp_path, read, begin):
    """Beside texts, before they are trained on byte by byte."""
    folder = write(tmp_path / "data", {"a.en": TEXT, "a.de": begin + TEXT})
    with pytest.raises(ValueError, match=r"a\.de.*not text"):
        read(folder)


def test_a_zero_byte_far_inside_a_text_is_text(tmp_path):
    text(write(tmp_path, {"a.txt": TEXT * 20 + b"\0"}))


def test_a_broken_link_is_named(tmp_path):
    folder = write(tmp_path / "data", {"a.txt": TEXT})
    (folder / "b.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"b\.txt is a broken link; delete it"):
        prepared(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have Unicode names alone")
def test_a_name_that_is_not_unicode_is_a_name(tmp_path):
    folder = write(tmp_path / "data", {os.fsdecode(b"caf\xe9.txt"): TEXT})
    assert prepared(folder).documents == (1, 0)


@pytest.mark.parametrize(
    ("config", "length", "message"),
    [
        (data.Text(path="nowhere"), 8, "nowhere"),
        (data.Pairs(), 8, "data.path"),
        (data.Labelled(), 8, "data.path"),
        (data.TokenFiles(vocab_size=9), 8, "data.path"),
        (data.HuggingFace(vocab_size=9), 8, "data.path"),
        (data.Rows(make="no.module:f"), 8, "no.module"),
        (data.Rows(make="math:nothing"), 8, "math"),
        (data.Endpoints(), 5, "not 5"),
        (data.Farthest(), 2, "not 2"),
        (data.Recall(pairs=2), 9, "not 9"),
        (data.Recall(pairs=2), 6, "not 6"),
    ],
)
def test_data_and_lengths_that_there_are_not(config, length, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        config.load(length)
