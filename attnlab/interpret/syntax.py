"""Syntactic dependencies in attention heads, compared with baselines that need no syntax.

Clark et al. 2019 (What does BERT look at?, arXiv 1906.04341), section 4.2. A predictor names for
every word w the word that it depends on. An attention head is two predictors: the word that w
attends to most ("to head": the dependent attends to its syntactic head), and the word that attends
to w most ("from head"). Baselines: a fixed offset, and the longest word of the sentence, which gets
most of a uniform attention because it has most tokens.
Axes: L layers, N attention heads, T tokens, W words.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnlab.interpret.statistics import ProbsName, stacked_probs
from attnlab.interpret.treebank import Tree
from attnlab.models.config import ModelConfig, heads_per_layer
from attnlab.models.forward import ModelInputs, run_model
from attnlab.sharing import Params

OFFSETS = (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)
DIRECTIONS = ("to head", "from head")
ALL = "all"
"""The label of every word that has a syntactic head."""
TextAndWords: TypeAlias = tuple[Int[np.ndarray, " T"], Float[np.ndarray, "T W"]]
"""Tokens of a text, and `token_word_overlap`."""


def token_word_overlap(
    tokens: Int[np.ndarray, "T 2"], words: Int[np.ndarray, "W 2"]
) -> Float[np.ndarray, "T W"]:
    """The share of each token's characters that lie in each word.

    Characters in no word, such as a space, do not count: a row sums to 1, or is 0 for a token in no
    word, such as a special token.

    Args:
      tokens: (start, end) of each token in the text, such as `ModelText.spans`.
      words: (start, end) of each word, such as `Tree.spans`.

    >>> tokens, words = [[0, 3], [3, 9], [0, 0]], [[0, 2], [2, 5], [6, 9]]
    >>> token_word_overlap(np.array(tokens), np.array(words)).round(2)
    array([[0.67, 0.33, 0.  ],
           [0.  , 0.4 , 0.6 ],
           [0.  , 0.  , 0.  ]])
    """
    starts = np.maximum(tokens[:, None, 0], words[None, :, 0])
    ends = np.minimum(tokens[:, None, 1], words[None, :, 1])
    overlap = np.maximum(ends - starts, 0)
    return np.asarray(overlap / np.maximum(overlap.sum(1, keepdims=True), 1))


def word_attention(
    probs: Float[Array, "L B N T T"], shares: Float[Array, "B T W"]
) -> Float[Array, "L B N W W"]:
    """Attention between words: to a word the sum over its tokens, from a word their mean (Clark et
    al. 2019, arXiv 1906.04341, section 4.1).

    Args:
      probs: captured "probs".
      shares: of each text, `token_word_overlap`; a token that lies in two words is divided.

    >>> probs = jnp.array([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    >>> shares = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # the second word is two tokens
    >>> word_attention(probs[None, None, None], shares[None])[0, 0, 0].tolist()
    [[0.5, 0.5], [0.25, 0.75]]
    """
    used = jnp.any(shares > 0, axis=2)
    both = (used[:, :, None] & used[:, None])[:, None]  # of other tokens they may be NaN
    to = jnp.einsum("lbnts,bsw->lbntw", jnp.where(both, probs, 0).astype(jnp.float32), shares)
    size = jnp.sum(shares, axis=1, keepdims=True)
    return jnp.einsum("lbntw,btv->lbnvw", to, shares / jnp.where(size > 0, size, 1))


def predicted_words(probs: Float[Array, "L B N W W"]) -> Int[Array, "L B N 2 W"]:
    """For every word the other word that it attends to most, and the one that attends to it most;
    -1 where there is no attention, as in a decoder to later words.

    >>> probs = jnp.array([[0.1, 0.9, 0.0], [0.2, 0.1, 0.7], [0.6, 0.3, 0.1]])
    >>> predicted_words(probs[None, None, None])[0, 0, 0].tolist()
    [[1, 2, 0], [2, 0, 1]]
    """
    count = probs.shape[-1]
    others = jnp.where(jnp.eye(count, dtype=bool), -jnp.inf, probs)
    both = jnp.stack([others, jnp.swapaxes(others, -1, -2)], axis=3)
    return jnp.where(jnp.max(both, axis=-1) > 0, jnp.argmax(both, axis=-1), -1)


def head_predictions(
    config: ModelConfig, params: Params, texts: Sequence[TextAndWords]
) -> list[Int[np.ndarray, "L N 2 W"]]:
    """`predicted_words` of every head for each text; in an encoder-decoder of the encoder.

    Texts are padded to powers of two and run in batches, so that few programs are compiled.

    Args:
      config: of the model.
      params: its parameters.
      texts: of each the tokens [T], with special tokens, and `token_word_overlap` [T, W].

    Raises:
      ValueError: a text that is too long for the model, or layers with different numbers of heads
        or of softmax distributions.

    >>> import jax
    >>> from attnlab.models import ModelConfig
    >>> config = ModelConfig(num_layers=2, max_len=8)
    >>> tokens, shares = np.array([5, 6, 7]), np.array([[1, 0], [1, 0], [0, 1.0]])  # two words
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens[None])["params"]
    >>> head_predictions(config, params, [(tokens, shares)])[0].shape
    (2, 4, 2, 2)
    """
    heads_per_layer(config)
    if too_long := [len(tokens) for tokens, _ in texts if len(tokens) > config.longest_text]:
        raise ValueError(
            f"{too_long[0]} tokens; a text for this model has at most {config.longest_text}: leave "
            "it out"
        )
    groups: dict[int, list[int]] = {}
    for i, (_, shares) in enumerate(texts):
        # The model has no positions for more padding.
        groups.setdefault(min(_rounded(len(shares)), config.max_len), []).append(i)
    found: dict[int, np.ndarray] = {}
    for length, rows in groups.items():
        words = _rounded(max(texts[i][1].shape[1] for i in rows))
        count = max(BATCH_TOKENS // length, 1)
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
    return [found[i] for i in range(len(texts))]


BATCH_TOKENS = 2048
"""Tokens of a batch of `head_predictions`, with padding."""


def _rounded(size: int) -> int:
    """The next power of two, at least 16."""
    return 1 << max(size - 1, 15).bit_length()


@functools.partial(jax.jit, static_argnums=0)
def _picks(
    config: ModelConfig, params: Params, tokens: Array, is_token: Array, shares: Array
) -> Array:
    name: ProbsName = "probs"
    inputs = ModelInputs(padding_mask=is_token, capture=(name,))
    if config.encoder is not None:
        name = "encoder.probs"
        inputs = ModelInputs(source=tokens, source_padding_mask=is_token, capture=(name,))
        tokens = tokens[:, :1]
    probs = stacked_probs(run_model(params, tokens, config, inputs).captured, name)
    return predicted_words(word_attention(probs, shares))


class CorrectCounts(NamedTuple):
    """How often each predictor is right about words of each label [K], per sentence [S]."""

    labels: tuple[str, ...]
    """The K labels."""
    cases: np.ndarray
    """[S, K]: words with this label."""
    offsets: np.ndarray
    """[S, O, K]: right by this one of `OFFSETS`."""
    longest: np.ndarray
    """[S, K]: right by the longest other word."""
    heads: np.ndarray
    """[S, L, N, 2, K]: right by this attention head, in each of `DIRECTIONS`."""


def count_correct(
    trees: Sequence[Tree], predictions: Sequence[np.ndarray], labels: Sequence[str]
) -> CorrectCounts:
    """Counts of correct `head_predictions` and baselines.

    A word counts under `ALL`, its relation, and its relation with subtype; the root under none.

    Args:
      trees: sentences.
      predictions: of each sentence, as `head_predictions` returns them.
      labels: to count, such as `frequent_labels`.

    Raises:
      ValueError: no sentence, or not as many predictions.

    >>> heads, how = np.array([1, -1, 0]), ("x", "root", "y:z")
    >>> tree = Tree("aa b ccc", ("aa", "b", "ccc"), np.array([[0, 2], [3, 4], [5, 8]]), heads, how)
    >>> all_to_b = np.ones((1, 1, 2, 3), int)
    >>> found = count_correct([tree], [all_to_b], [ALL, "x", "y", "y:z"])
    >>> found.cases.tolist(), found.heads[0, 0, 0, 0].tolist()
    ([[2, 1, 1, 1]], [1, 1, 0, 0])
    >>> {o: right.tolist() for o, right in zip(OFFSETS, found.offsets[0]) if any(right)}
    {-2: [1, 0, 1, 1], 1: [1, 1, 0, 0]}
    >>> found.longest.tolist()  # "aa" for "ccc"
    [[1, 0, 1, 1]]
    """
    if not trees or len(predictions) != len(trees):
        raise ValueError(
            f"{len(trees)} sentences and {len(predictions)} predictions: give one for each, of at "
            "least one sentence"
        )
    column = {label: i for i, label in enumerate(labels)}
    rows: list[tuple[np.ndarray, ...]] = []
    for tree, predicted in zip(trees, predictions, strict=True):
        kinds = np.zeros((len(tree.heads), len(labels)))
        for word, names in enumerate(_names(tree)):
            kinds[word, [column[name] for name in names if name in column]] = 1
        places = np.arange(len(tree.heads)) + np.array(OFFSETS)[:, None]
        longest = _longest(tree)
        right = (words == tree.heads for words in (places, longest, predicted))
        rows.append((kinds.sum(0), *(found @ kinds for found in right)))
    return CorrectCounts(
        tuple(labels), *(np.stack(a).astype(np.int16) for a in zip(*rows, strict=True))
    )


def _longest(tree: Tree) -> np.ndarray:
    """For every word the longest of the others; in a text of one word itself."""
    size = tree.spans[:, 1] - tree.spans[:, 0]
    return np.asarray(np.where(np.eye(len(size), dtype=bool), -1, size).argmax(1))


def frequent_labels(*parts: Sequence[Tree], least: int = 100) -> list[str]:
    """Labels of at least so many words in each part, the most frequent first.

    Args:
      *parts: the sentences of each part, such as selection and test.
      least: words with the label in every part.

    >>> heads, how = np.array([1, -1, 1]), ("x", "root", "y:z")
    >>> tree = Tree("a b c", ("a", "b", "c"), np.zeros((3, 2), int), heads, how)
    >>> frequent_labels([tree, tree], [tree], least=1)
    ['all', 'x', 'y', 'y:z']
    """
    counts = [
        collections.Counter(n for tree in trees for names in _names(tree) for n in names)
        for trees in parts
    ]
    return [name for name, _ in sum(counts, collections.Counter()).most_common()
            if min(count[name] for count in counts) >= least]  # fmt: skip


def _names(tree: Tree) -> list[tuple[str, ...]]:
    """The labels under which each word is counted."""
    return [
        () if head < 0 else tuple(dict.fromkeys((ALL, label.partition(":")[0], label)))
        for head, label in zip(tree.heads, tree.labels, strict=True)
    ]


class SyntaxScore(NamedTuple):
    """The best attention head for a label and the baselines, as shares of correct words."""

    label: str
    """`ALL`, a relation, or a relation with subtype."""
    cases: int
    """Words with this label in the test sentences."""
    offset: int
    """The best one of `OFFSETS`, on the selection sentences."""
    by_offset: float
    """Share of the words of the test sentences that it gets right."""
    by_longest: float
    """The same of the longest other word."""
    layer: int
    """Of the best attention head, on the selection sentences."""
    head: int
    """Its number in the layer; where a head has several softmax distributions (layout
    `differential`), that of the distribution: [key head, first or second, query head]."""
    direction: str
    """The better one of `DIRECTIONS`."""
    by_head: float
    """Share of the words of the test sentences that it gets right."""
    gain: float
    """`by_head` minus the better baseline, chosen on the selection sentences."""
    low: float
    """Lower end of the confidence interval of `gain`."""
    high: float
    """Its upper end."""

    @property
    def is_significant(self) -> bool:
        """Is the gain above 0 with the confidence of the interval?"""
        return self.low > 0


def evaluate_heads(
    selection: CorrectCounts,
    test: CorrectCounts,
    *,
    confidence: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> list[SyntaxScore]:
    """The best head of the selection sentences, evaluated on the test sentences.

    Selecting among hundreds of heads and evaluating on the same sentences would be biased upwards.
    The intervals come from a studentised bootstrap over sentences and hold for all labels
    simultaneously: half widths are the quantile of the largest |d* - d| / s over labels, times s,
    with d* the bootstrap differences and s their standard deviation.

    Args:
      selection, test: of `count_correct`.
      confidence: of all intervals together.
      draws, seed: of the bootstrap.

    Raises:
      ValueError: other labels or none, labels without a word in the test sentences, or one test
        sentence.

    >>> cases, offsets = np.full((2, 1), 3), np.ones((2, len(OFFSETS), 1))
    >>> heads = 2 * np.ones((2, 1, 4, 2, 1))  # each of 4 heads right about 2 of 3 words
    >>> counts = CorrectCounts(("nsubj",), cases, offsets, np.ones((2, 1)), heads)
    >>> [(score.label, score.cases) for score in evaluate_heads(counts, counts)]
    [('nsubj', 6)]
    """
    if not test.labels or selection.labels != test.labels or not test.cases.sum(0).all():
        raise ValueError(
            "selection and test need the same labels, each with a word in the test sentences: use "
            "those of frequent_labels"
        )
    if len(test.cases) < 2:
        raise ValueError("an interval needs two test sentences or more, there is 1")
    every = np.arange(len(test.labels))

    def best(predictors: Callable[[CorrectCounts], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """[K] the best predictor of `selection`, [S, K] how often it is right in `test`."""
        chosen = predictors(selection).sum(0, dtype=int).argmax(0)
        return chosen, predictors(test)[:, chosen, every].astype(float)

    offset, by_offset = best(lambda one: one.offsets)
    place, by_head = best(lambda one: one.heads.reshape(len(one.heads), -1, len(every)))
    baseline = best(lambda one: np.concatenate([one.offsets, one.longest[:, None]], axis=1))[1]
    total, gain = test.cases.sum(0), by_head - baseline
    count = len(gain)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), draws)
    weights = weights.astype(float)
    drawn = weights @ gain / np.maximum(weights @ test.cases, 1)
    mean, spread = gain.sum(0) / total, drawn.std(0)
    apart = np.abs(drawn - mean) / np.where(spread > 0, spread, np.inf)
    half = np.quantile(apart.max(1), confidence) * spread
    layers, heads, ways = np.unravel_index(place, test.heads.shape[1:4])
    return [
        SyntaxScore(
            label=test.labels[k],
            cases=int(total[k]),
            offset=OFFSETS[offset[k]],
            by_offset=float(by_offset[:, k].sum() / total[k]),
            by_longest=float(test.longest[:, k].sum() / total[k]),
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
