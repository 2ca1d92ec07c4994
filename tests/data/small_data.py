"""A small example of every entry of `DATASETS`: name -> (folder -> config, length, objective)."""

import gzip
import json
import zipfile

import numpy as np

from attnlab import data
from attnlab.data.rows import Splits

WORDS = {"a": "ein", "the": "der", "red": "rote", "old": "alte", "dog": "Hund", "man": "Mann"}


def write(folder, files):
    """A folder with files: name -> text or bytes."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def lines(count, seed=0):
    """Sentences of an article, one or two adjectives and a noun, all different."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        words = [rng.choice(["a", "the"]), *rng.choice(["red", "old"], rng.integers(1, 4))]
        found[" ".join([*words, rng.choice(["dog", "man"]), str(len(found))])] = None
    return list(found)


def word_tokenizer(path, vocab):
    """A tokenizer.json of words in small letters: it decodes no text as it was."""
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return str(path)


def text(folder):
    path = folder / "text.txt"
    symbols = np.random.default_rng(0).integers(1, 3, 4000).cumsum() % 9 + 97
    path.write_bytes(symbols.astype(np.uint8).tobytes())
    return data.Text(path=str(path)), 8, "causal_lm"


def tokens(folder):
    """Two training shards and one that is held out, as nanoGPT names them."""
    ids = np.random.default_rng(0).integers(0, 300, 900).astype(np.uint16)
    for name, part in {"train_0": ids[:400], "train_1": ids[400:700], "val": ids[700:]}.items():
        part.tofile(folder / f"{name}.bin")
    config = data.TokenFiles(path=str(folder), vocab_size=300, bytes_per_token=2.5)
    return config, 8, "causal_lm"


def text_packed(folder):
    """80 documents of JSON lines, the longest of which are no whole window."""
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines(80)))
    return data.Text(path=str(path), tokenizer="bpe:270", pack=True), 16, "causal_lm"


def tokens_packed(folder):
    """Documents end with token 7."""
    ids = np.random.default_rng(0).integers(0, 30, 900).astype(np.uint16)
    ids.tofile(folder / "ids.bin")
    fields = dict(vocab_size=300, bytes_per_token=2.5, pack=True, end_of_document=7)
    return data.TokenFiles(path=str(folder), **fields), 8, "masked_lm"


def huggingface(folder):
    """60 rows of 5 to 11 token ids."""
    import datasets

    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 300, rng.integers(5, 12)).tolist() for _ in range(60)]
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")
    fields = dict(vocab_size=300, heldout=0.2, bytes_per_token=2.5)
    return data.HuggingFace(path=str(folder / "rows"), **fields), 8, "causal_lm"


def pairs(folder):
    """Word by word; one side is packed. 40 training pairs, 9 and 7 others."""
    texts = lines(56)
    for part, some in {"train": texts[:40], "val": texts[40:49], "test": texts[49:]}.items():
        (folder / f"{part}.en").write_text("\n".join(some) + "\n")
        other = ["".join(WORDS.get(w, w) + " " for w in line.split()).strip() for line in some]
        with gzip.open(folder / f"{part}.de.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(other) + "\n")
    config = data.Pairs(path=str(folder), parts="train,val,test", tokenizer="bpe:280")
    return config, 12, "translation"


def labelled(folder):
    """A zip of two files; texts with "red" are of one class."""
    path = folder / "colours.zip"
    texts = lines(150)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("colours/README.txt", "about\n")
        for name, red in {"yes": True, "no": False}.items():
            some = [line for line in texts if ("red" in line) == red]
            archive.writestr(f"colours/line.{name}", "\n".join(some) + "\n")
    return data.Labelled(path=str(path)), 40, "text_class"


def recall(folder):
    return data.Recall(vocab_size=16, pairs=2, heldout_rows=20), 12, "recall"


def endpoints(folder):
    return data.Endpoints(vertices=3), 4, "endpoint"


def farthest(folder):
    return data.Farthest(dimensions=3, heldout_rows=20), 5, "regression"


def graph(folder):
    """For configs/cora.py: 30 nodes of two classes, edges mostly within one; node 30 of a citation
    has no features."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([0, 1], 15))
    features = (rng.random((30, 6)) < 0.3) | (np.arange(6) % 2 == labels[:, None])
    rows = ["\t".join([f"n{i}", *map(str, f.astype(int)), "ab"[c]])
            for i, (f, c) in enumerate(zip(features, labels, strict=True))]  # fmt: skip
    (folder / "g.content").write_text("\n".join(rows) + "\n")
    ends = [(i, j) for i in range(30) for j in range(i) if labels[i] == labels[j]]
    some = [ends[k] for k in rng.choice(len(ends), 50, replace=False)]
    some += [some[0], some[1][::-1], (4, 4), (3, 30)]
    (folder / "g.cites").write_text("".join(f"n{i}\tn{j}\n" for i, j in some))
    parts = ["train"] * 8 + ["valid"] * 8 + ["test"] * 10 + ["rest"] * 4
    split = "".join(f"{i}\tn{i}\t{part}\n" for i, part in enumerate(parts))
    (folder / "split.tsv").write_text("number\tid\tpart\n" + split)
    return data.Rows(make="experiments.configs.cora:rows", path=str(folder)), 30, "node_class"


class Doubles:
    """Random access: the target is every token of the source twice."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        source = np.random.default_rng(self.first + index).integers(0, 5, 12)
        return {"source": source, "target": np.repeat(source, 2)}


def doubles(path):
    validation = [Doubles(200, 9)[i] for i in range(9)]  # a list is random access too
    return Splits("doubles", Doubles(0, 30), Doubles(100, 12), data.DataSizes(5), validation)


def rows(folder):
    return data.Rows(make=f"{__file__}:doubles"), 24, "transduction"


KINDS = (text, text_packed, tokens, tokens_packed, huggingface, pairs, labelled)
DATASETS = {f.__name__: f for f in (*KINDS, recall, endpoints, farthest, rows)}
