"""What editors, file managers and version control leave in files and folders of texts."""

import codecs
import gzip
import zipfile

import numpy as np
import pytest

from attnlab import data
from attnlab.data.prepare import PreparePlan, prepare
from attnlab.data.text_rows import find_pairs, read_labelled
from attnlab.data.tokenizer import load_tokenizer, make_tokenizer
from attnlab.interpret import read_trees, treebank_parts

LINES = [f"der Ball {i} rollt" for i in range(60)]
TEXT = "\n".join(LINES).encode()
TREE = b"1\tSee\t_\t_\t_\t_\t0\troot\t_\t_\n\n"


def write(folder, files):
    """`files`: name -> bytes."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def text(folder, files):
    return data.Text(path=str(write(folder, files))).load(8).digest


def parallel(folder, files):
    return find_pairs(write(folder, files), ("en", "de"), ("a", "a", "a"))


def classes(folder, files):
    return read_labelled(write(folder, files))


def classes_of_a_zip(folder, files):
    with zipfile.ZipFile(folder / "texts.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return read_labelled(folder / "texts.zip")


def classes_of_lines(folder, files):
    (name,) = files
    return read_labelled(write(folder, files) / name)


def prepared(folder, files):
    return prepare([write(folder / "texts", files)], folder / "tokens", PreparePlan())


def trees(folder, files):
    found = treebank_parts(write(folder, files))
    return {part: read_trees(path)[0].text for part, path in found.items()}


READERS = {
    "text": (text, {"a.txt": TEXT, "sub/b.txt": TEXT}),
    "pairs": (parallel, {"a.en": TEXT, "a.de": TEXT.upper()}),
    "folder of classes": (
        classes, {f"{c}/{i}.txt": f"{c} {i}".encode() for c in ("neg", "pos") for i in range(60)}
    ),
    "file of a class": (classes, {"rt.neg": TEXT, "rt.pos": TEXT.upper()}),
    "zip of classes": (classes_of_a_zip, {"rt.neg": TEXT, "rt.pos": TEXT.upper()}),
    "lines of classes": (
        classes_of_lines,
        {"all.tsv": "\n".join(f"{i % 2}\t{line}" for i, line in enumerate(LINES)).encode()},
    ),
    "prepare": (prepared, {"a.txt": TEXT, "sub/b.txt": TEXT}),
    "prepare JSON lines": (prepared, {"a.jsonl": b'{"text": "der Ball"}\n{"text": "rollt"}\n'}),
    "treebank": (trees, {"en-ud-dev.conllu": TREE, "en-ud-test.conllu": TREE}),
}  # fmt: skip


def folders(tmp_path):
    """Two empty folders of one name, which is in some values."""
    made = [tmp_path / "1" / "data", tmp_path / "2" / "data"]
    for folder in made:
        folder.mkdir(parents=True)
    return made


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_is_no_text(tmp_path, name, packed):
    read, files = READERS[name]
    if packed and name not in ("text", "pairs", "prepare", "prepare JSON lines", "treebank"):
        pytest.skip("not read compressed")
    found = []
    for folder, mark in zip(folders(tmp_path), (b"", codecs.BOM_UTF8), strict=True):
        marked = {file + packed: mark + content for file, content in files.items()}
        if packed:
            marked = {file: gzip.compress(content) for file, content in marked.items()}
        found.append(read(folder, marked))
    assert found[0] == found[1]


def test_a_byte_order_mark_before_a_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    content = make_tokenizer("bpe:270", LINES).content
    write(tmp_path, {"tokenizer.json": codecs.BOM_UTF8 + content})
    read = load_tokenizer(tmp_path / "tokenizer.json")
    assert read.content == content


@pytest.mark.parametrize("name", [name for name in READERS if name != "lines of classes"])
def test_hidden_files_and_folders_are_no_data(tmp_path, name):
    """.ipynb_checkpoints is no third class, and what macOS writes beside a file is no text."""
    read, files = READERS[name]
    file, content = next(iter(files.items()))
    *parents, last = file.split("/")
    hidden = {
        "/".join([*parents, f"._{last}"]): b"\0\xff" + content,
        f".ipynb_checkpoints/{last}": content,
        f"__MACOSX/.{last}": content,
        ".git/objects/ab/cd": b"\0\xff",
        ".DS_Store": b"\0\xff",
        f"{file.rpartition('/')[0] or 'sub'}/.DS_Store": b"\0\xff",
    }
    one, two = folders(tmp_path)
    assert read(one, files) == read(two, files | hidden)


def test_hidden_files_of_tokens(tmp_path):
    write(tmp_path, {"._a.bin": b"\0", "a.bin": np.arange(99, dtype="<u2").tobytes()})
    ids = data.TokenFiles(path=str(tmp_path), vocab_size=99, bytes_per_token=1.0)
    assert len(ids.load(8).train(0)["tokens"]) == 11  # of 89 tokens, a tenth is held out
