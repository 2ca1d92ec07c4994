"""The table of a treebank says what the heads do, in a language whose grammar a head can be made to
read: a word of a's depends on the word of A's."""

import csv
import dataclasses
import gzip

import jax
import numpy as np
import pytest
from commands import command
from test_view import write_seeds

from attnlab import heads
from attnlab.interpret import SyntaxScore, parse_trees
from attnlab.models import FFN, ModelConfig, param_shapes
from experiments.config import experiment_of, set_model
from experiments.configs import byte_lm
from experiments.studies.syntax import study as syntax

PAIRS, ROOTS = "abcdef", "mnopqrstuvwxyz"
LETTERS = PAIRS + PAIRS.upper() + ROOTS + " "
MODEL = ModelConfig(
    kind="encoder", vocab_size=257, max_len=64, width=len(LETTERS), num_layers=2,
    heads=heads.Standard(num_heads=3, head_dim=len(PAIRS), biases=("q", "k", "v", "o")),
    ffn=FFN(width=4),
)  # fmt: skip
LAYER, HEAD = 1, 2  # where the planted head is
WRITES = ("down", "down_bias")


def conllu(seed, count):
    """Sentences as "bb BBB m a cccc C AA": "a" stands before its "A" in half of the cases, the rest
    in any order; A's depend on the root, which is behind one of them."""
    rng = np.random.default_rng(seed)
    sentences = []
    for _ in range(count):
        order = []
        for letter in rng.permutation(list(PAIRS))[:3]:
            order += [[letter, letter.upper()]] if rng.random() < 0.5 else [letter, letter.upper()]
        order = [order[i] for i in rng.permutation(len(order))]
        order = [letter for unit in order for letter in unit]
        root = 1 + rng.choice([i for i, letter in enumerate(order) if letter.isupper()])
        order.insert(root, str(rng.choice(list(ROOTS))))
        depends_on = [
            0 if i == root else 1 + (root if a.isupper() else order.index(a.upper()))
            for i, a in enumerate(order)
        ]
        labels = ["find" if a in PAIRS else "hang" if a.isupper() else "root" for a in order]
        words = [str(letter) * rng.integers(1, 5) for letter in order]
        rows = zip(words, depends_on, labels, strict=True)
        lines = [
            f"{i}\t{word}\t_\t_\t_\t_\t{head}\t{label}\t_\t_"
            for i, (word, head, label) in enumerate(rows, 1)
        ]
        sentences.append("\n".join(lines) + "\n\n")
    return "".join(sentences)


def trees(seed, count):
    return list(parse_trees(conllu(seed, count).splitlines()))


def planted(seed=0):
    """Weights in which the query of a letter is the key of its capital, in one head; the embedding
    tells letters apart and nothing before that head writes."""
    rng = np.random.default_rng(seed)
    shapes = param_shapes(MODEL)
    w = jax.tree.map(lambda a: rng.normal(0, 0.5, a.shape).astype(np.float32), shapes)
    attention = w["layers"]["attention"]
    w["positions"][:] = 0
    w["embedding"][:] = 0
    w["embedding"][np.frombuffer(LETTERS.encode(), np.uint8)] = np.eye(len(LETTERS))
    for part in (attention["o"], attention["o_bias"], *map(w["layers"]["ffn"].get, WRITES)):
        part[0] = 0
    attention["norm"]["scale"][LAYER], attention["norm"]["bias"][LAYER] = 1, 0
    for name, first in (("q", 0), ("k", len(PAIRS))):
        attention[name][LAYER, :, HEAD] = 0
        attention[name][LAYER, first : first + len(PAIRS), HEAD] = 2 * np.eye(len(PAIRS))
        attention[f"{name}_bias"][LAYER, HEAD] = 0
    return w


SEEDS = (4, 9)


@pytest.fixture
def treebank(tmp_path):
    folder = tmp_path / "xx_planted"
    folder.mkdir()
    for seed, part in enumerate(("train", "dev")):
        (folder / f"xx-ud-{part}.conllu").write_text(conllu(seed, 120))
    last = gzip.compress(conllu(2, 120).encode())
    (folder / "xx-ud-test.conllu.gz").write_bytes(last)
    return folder


def test_parts_of_a_folder_and_of_a_file(treebank):
    texts = lambda trees: [tree.text for tree in trees]
    choosing, judging = syntax.read_parts(treebank)
    assert texts(choosing) == texts(trees(1, 120))
    assert texts(judging) == texts(trees(2, 120))
    halves = syntax.read_parts(treebank / "xx-ud-dev.conllu")
    assert texts(one for pair in zip(*halves, strict=True) for one in pair) == texts(choosing)
    (treebank / "xx-ud-test.conllu.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"-test\.conllu"):
        syntax.read_parts(treebank)


def test_the_text_to_train_on(treebank, tmp_path):
    out = tmp_path / "raw.txt"
    syntax.write_raw(treebank, out)
    assert out.read_text().splitlines() == [t.text for t in trees(0, 120)]


def test_numbers_of_the_table():
    det = SyntaxScore("det", 1200, 1, 0.5, 0.07, 1, 0, "to head", 0.625, 0.125, 0.05, 0.2)
    obj = SyntaxScore("obj", 300, -2, 0.3, 0.4, 0, 3, "from head", 0.3, -0.1, -0.15, -0.05)
    initial = [one._replace(by_head=0.1, gain=-0.4, low=-0.5, high=-0.3) for one in (det, obj)]
    found = {"seed 0": [det, obj], "seed 0, untrained": initial}
    lines = syntax.table(syntax.Study(found, (70, 80), 6)).splitlines()
    assert lines[3].split() == [
        "det", "1,200", "+1", "50.0", "7.0", "1.0", "to", "head", "62.5*", "+12.5", "(+5.0", "to",
        "+20.0)", "10.0",
    ]  # fmt: skip
    assert lines[4].split()[2:5] == ["-2", "30.0", "40.0"]
    assert ["(det)" in line for line in lines[-2:]] == [True, False]


def test_only_what_can_be_read_whole_is_read():
    lines = conllu(0, 3).splitlines()
    trees = list(parse_trees(lines))
    sizes = [len(tree.text) for tree in trees]
    split = lambda text: (np.arange(len(text)), np.array([(i, i + 1) for i in range(len(text))]))
    opened = type("Opened", (), {"config": MODEL, "split": staticmethod(split)})
    assert len(syntax.readable(opened, trees)) == 3
    opened.config = dataclasses.replace(MODEL, max_len=max(sizes) - 1)
    assert [tree.text for tree, _ in syntax.readable(opened, trees)] == [
        tree.text for tree, size in zip(trees, sizes, strict=True) if size < max(sizes)
    ]
    opened.config = MODEL
    opened.split = staticmethod(lambda text: (np.arange(1), np.array([[0, 2]])))  # the rest is lost
    assert syntax.readable(opened, trees) == []


@pytest.fixture
def run(tmp_path):
    """A run of two seeds, in the second of which a head was planted."""
    folder, config = tmp_path / "run", byte_lm.get_config("masked,tiny")
    folder.mkdir()
    set_model(config, MODEL)
    config.task, config.train.seeds = "masked_lm", SEEDS
    init = jax.jit(MODEL.build().init)(jax.random.key(5), np.zeros((1, 4), np.int32))
    params = jax.tree.map(lambda *a: np.stack(a), init["params"], planted())
    write_seeds(folder, experiment_of(config), SEEDS, params)
    return folder


@pytest.mark.slow
def test_a_planted_head_in_a_run(run, treebank, tmp_path):
    out = tmp_path / "roles.csv"
    flags = [f"--workdir={run}", f"--treebank={treebank}", "--untrained", f"--out={out}"]
    done = command("experiments.studies.syntax", *flags)
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = {(row["model"], row["label"]): row for row in csv.DictReader(file)}
    models = ["seed 4", "seed 9", "seed 4, untrained", "seed 9, untrained"]
    assert list(rows) == [(name, label) for name in models for label in ("all", "find", "hang")]
    one = rows["seed 9", "find"]
    place = [str(LAYER), str(HEAD), "to head", "1.0"]
    assert [one[name] for name in ("layer", "head", "direction", "by_head")] == place
    for name in models:
        won = [label for (n, label), row in rows.items() if n == name and float(row["low"]) > 0]
        assert ("find" in won) == (name == "seed 9")
    for more in (flags[3:], ["--sentences=5"], ["--sentences=1", "--least=1"]):
        done = command("experiments.studies.syntax", *flags[:2], *more)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
