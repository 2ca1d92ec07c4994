"""Does a head read the grammar of a sentence? Each against what needs no grammar.

Clark et al. 2019 (What does BERT look at?, arXiv 1906.04341), section 4.2. A predictor says for
every word w which other word it depends on. A head is two of them: the word that w looks at most
("to head": w looks at its head), and the word that looks most at w ("from head"). An offset is one:
the word so many places on. Beside theirs stands another that needs no grammar: the longest word,
which a head that looks at all tokens alike looks at most, since it has most of them.
Letters as everywhere: L layers, N heads, T tokens; W words.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnlab.inspect.treebank import Tree
from attnlab.model.config import ModelConfig
from attnlab.model.kinds import heads_in_a_layer

OFFSETS = (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)
DIRECTIONS = ("to head", "from head")
ALL = "all"
"""The label of every word that depends on one."""


def token_shares(
    tokens: Int[np.ndarray, "T 2"], words: Int[np.ndarray, "W 2"]
) -> Float[np.ndarray, "T W"]:
    """How much of a token lies in which word, both from where to where in the text.

    A row sums to 1, or is 0 where a token lies in no word: a blank, a special token. One that
    reaches over two words belongs to each by its letters there.

    >>> tokens, words = [[0, 3], [3, 9], [0, 0]], [[0, 2], [2, 5], [6, 9]]
    >>> token_shares(np.array(tokens), np.array(words)).round(2)
    array([[0.67, 0.33, 0.  ],
           [0.  , 0.4 , 0.6 ],
           [0.  , 0.  , 0.  ]])
    """
    starts = np.maximum(tokens[:, None, 0], words[None, :, 0])
    ends = np.minimum(tokens[:, None, 1], words[None, :, 1])
    overlap = np.maximum(ends - starts, 0)
    return overlap / np.maximum(overlap.sum(1, keepdims=True), 1)


def word_maps(
    probs: Float[Array, "L B N T T"], shares: Float[Array, "B T W"]
) -> Float[Array, "L B N W W"]:
    """Who looks at whom, word by word: to a word the sum over its tokens, from a word their mean.

    >>> probs = jnp.array([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    >>> shares = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # the second word is two tokens
    >>> word_maps(probs[None, None, None], shares[None])[0, 0, 0].tolist()
    [[0.5, 0.5], [0.25, 0.75]]
    """
    to = jnp.einsum("lbnts,bsw->lbntw", probs.astype(jnp.float32), shares)
    size = jnp.sum(shares, axis=1, keepdims=True)
    return jnp.einsum("lbntw,btv->lbnvw", to, shares / jnp.where(size > 0, size, 1))


def best_words(maps: Float[Array, "L B N W W"]) -> Int[Array, "L B N 2 W"]:
    """For every word the other one that it looks at most, and the one that looks at it most; -1
    where no other gets any: in a decoder no word sees those behind it."""
    count = maps.shape[-1]
    others = jnp.where(jnp.eye(count, dtype=bool), -jnp.inf, maps)
    both = jnp.stack([others, jnp.swapaxes(others, -1, -2)], axis=3)
    return jnp.where(jnp.max(both, axis=-1) > 0, jnp.argmax(both, axis=-1), -1)


def head_picks(
    config: ModelConfig, params: Any, texts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> list[Int[np.ndarray, "L N 2 W"]]:
    """`best_words` of every head for each of the texts, which are (tokens [T], shares [T, W]).

    Of an encoder-decoder those of the encoder. Texts of about the same length run together, filled
    up: as many programs are compiled as there are powers of two among their lengths.
    """
    heads_in_a_layer(config)
    rounded = lambda size: 1 << max(size - 1, 15).bit_length()
    groups: dict[int, list[int]] = {}
    for i, (_, shares) in enumerate(texts):
        most = max(config.max_len, len(shares))  # a model has no positions for more filling
        groups.setdefault(min(rounded(len(shares)), most), []).append(i)
    found: list[Any] = [None] * len(texts)
    for length, rows in groups.items():
        words = rounded(max(texts[i][1].shape[1] for i in rows))
        count = max(TOGETHER // length, 1)
        for some in (rows[i : i + count] for i in range(0, len(rows), count)):
            tokens = np.zeros((count, length), np.int32)
            real = np.zeros((count, length), bool)
            shares = np.zeros((count, length, words), np.float32)
            for row, i in enumerate(some):
                size, own = texts[i][1].shape
                tokens[row, :size], real[row, :size] = texts[i][0], True
                shares[row, :size, :own] = texts[i][1]
            picks = np.asarray(_picks(config, params, tokens, real, shares))
            for row, i in enumerate(some):
                found[i] = picks[:, row, ..., : texts[i][1].shape[1]]
    return found


TOGETHER = 2048
"""Tokens of a call of `head_picks`, with what fills them up."""


@functools.partial(jax.jit, static_argnums=0)
def _picks(config: ModelConfig, params: Any, tokens: Array, real: Array, shares: Array) -> Array:
    texts: dict[str, Any] = {"tokens": tokens}
    name = "probs"
    if config.kind == "encoder_decoder":
        texts, name = {"source": tokens, "tokens": tokens[:, :1]}, "encoder.probs"
    shown = config.build().apply({"params": params}, **texts, padding_mask=real, show=(name,))[-1]
    return best_words(word_maps(shown[name], shares))


class Tally(NamedTuple):
    """Sentence by sentence [S], how often each predictor is right about words of each label [K]."""

    labels: tuple[str, ...]
    cases: np.ndarray
    """[S, K]: words of this label"""
    offsets: np.ndarray
    """[S, O, K]: those whose head stands at this one of `OFFSETS`"""
    longest: np.ndarray
    """[S, K]: those whose head is the longest other word, the first of such"""
    heads: np.ndarray
    """[S, L, N, 2, K]: those whose head this attention head finds, `DIRECTIONS`"""


def tally(trees: Sequence[Tree], picks: Sequence[np.ndarray], labels: Sequence[str]) -> Tally:
    """What is right in the `picks` of `head_picks`. A word counts under `ALL`, under its relation
    and, where it has one, under its relation with the subtype; the root under none.

    >>> heads, how = np.array([1, -1, 0]), ("x", "root", "y:z")
    >>> tree = Tree("aa b ccc", ("aa", "b", "ccc"), np.array([[0, 2], [3, 4], [5, 8]]), heads, how)
    >>> all_look_at_b = np.ones((1, 1, 2, 3), int)
    >>> found = tally([tree], [all_look_at_b], [ALL, "x", "y", "y:z"])
    >>> found.cases.tolist(), found.heads[0, 0, 0, 0].tolist()
    ([[2, 1, 1, 1]], [1, 1, 0, 0])
    >>> {o: right.tolist() for o, right in zip(OFFSETS, found.offsets[0]) if any(right)}
    {-2: [1, 0, 1, 1], 1: [1, 1, 0, 0]}
    >>> found.longest.tolist()  # "aa" for "ccc"
    [[1, 0, 1, 1]]
    """
    column = {label: i for i, label in enumerate(labels)}
    rows: list[tuple[np.ndarray, ...]] = []
    for tree, picked in zip(trees, picks, strict=True):
        kinds = np.zeros((len(tree.heads), len(labels)))
        for word, names in enumerate(_names(tree)):
            kinds[word, [column[name] for name in names if name in column]] = 1
        places = np.arange(len(tree.heads)) + np.array(OFFSETS)[:, None]
        longest = _longest(tree)
        right = (picks == tree.heads for picks in (places, longest, picked))
        rows.append((kinds.sum(0), *(found @ kinds for found in right)))
    return Tally(tuple(labels), *(np.stack(a).astype(np.int16) for a in zip(*rows, strict=True)))


def _longest(tree: Tree) -> np.ndarray:
    """For every word the longest of the others; in a text of one word itself."""
    size = tree.spans[:, 1] - tree.spans[:, 0]
    return np.where(np.eye(len(size), dtype=bool), -1, size).argmax(1)


def common_labels(*parts: Sequence[Tree], least: int = 100) -> list[str]:
    """The labels of `tally` that at least so many words have in each part, the commonest first.

    >>> heads, how = np.array([1, -1, 1]), ("x", "root", "y:z")
    >>> tree = Tree("a b c", ("a", "b", "c"), np.zeros((3, 2), int), heads, how)
    >>> common_labels([tree, tree], [tree], least=1)
    ['all', 'x', 'y', 'y:z']
    """
    counts = [
        collections.Counter(n for tree in trees for names in _names(tree) for n in names)
        for trees in parts
    ]
    return [name for name, _ in sum(counts, collections.Counter()).most_common()
            if min(count[name] for count in counts) >= least]  # fmt: skip


def _names(tree: Tree) -> list[tuple[str, ...]]:
    """What each word counts under."""
    return [
        () if head < 0 else tuple(dict.fromkeys((ALL, label.partition(":")[0], label)))
        for head, label in zip(tree.heads, tree.labels, strict=True)
    ]


class Role(NamedTuple):
    """The best attention head for a label, against an offset and the longest word.

    Shares are of the words whose head is found.
    """

    label: str
    cases: int
    offset: int
    """The best one"""
    by_offset: float
    by_longest: float
    layer: int
    head: int
    direction: str
    by_head: float
    gain: float
    """How much more the head finds than the offset or, where it was better, the longest word"""
    low: float
    """Where the gain lies"""
    high: float

    @property
    def beats(self) -> bool:
        """Is the head better, and not by chance?"""
        return self.low > 0


def judge(
    choosing: Tally, judging: Tally, *, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> list[Role]:
    """What was best in the sentences of `choosing`, in those of `judging`.

    The best of hundreds of heads is the best by luck, too: so it is chosen in some sentences and
    judged in others. The intervals come from drawing sentences with replacement, studentised, and
    hold for all labels at once with `confidence`: half widths are the quantile of the largest
    |d* - d| / s over the labels, times s, where d* are the differences of the draws and s their
    standard deviation.
    """
    if choosing.labels != judging.labels or not judging.cases.sum(0).all():
        raise ValueError(
            "both tallies need the same labels, each with a case in the sentences that are judged: "
            "take those of common_labels"
        )
    every = np.arange(len(judging.labels))

    def best(predictors: Callable[[Tally], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """[K] the predictor that is best in `choosing`, [S, K] how often it is right here."""
        chosen = predictors(choosing).sum(0, dtype=int).argmax(0)
        return chosen, predictors(judging)[:, chosen, every].astype(float)

    offset, by_offset = best(lambda one: one.offsets)
    fixed = lambda one: np.concatenate([one.offsets, one.longest[:, None]], axis=1)
    place, by_head = best(lambda one: one.heads.reshape(len(one.heads), -1, len(every)))
    total, gain = judging.cases.sum(0), by_head - best(fixed)[1]
    count = len(gain)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), draws)
    weights = weights.astype(float)
    drawn = weights @ gain / np.maximum(weights @ judging.cases, 1)
    mean, spread = gain.sum(0) / total, drawn.std(0)
    apart = np.abs(drawn - mean) / np.where(spread > 0, spread, np.inf)
    half = np.quantile(apart.max(1), confidence) * spread
    layers, heads, ways = np.unravel_index(place, judging.heads.shape[1:4])
    return [
        Role(
            label=judging.labels[k],
            cases=int(total[k]),
            offset=OFFSETS[offset[k]],
            by_offset=float(by_offset[:, k].sum() / total[k]),
            by_longest=float(judging.longest[:, k].sum() / total[k]),
            layer=int(layers[k]),
            head=int(heads[k]),
            direction=DIRECTIONS[ways[k]],
            by_head=float(by_head[:, k].sum() / total[k]),
            gain=float(mean[k]),
            low=float(mean[k] - half[k]),
            high=float(mean[k] + half[k]),
        )
        for k in every
    ]
