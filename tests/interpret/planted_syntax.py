"""A language whose grammar a head can be made to read: a word of a's depends on the word of A's."""

import jax
import numpy as np

from attnlab import heads
from attnlab.interpret.treebank import parse_trees
from attnlab.models import FFN, ModelConfig, param_shapes

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
