"""Byte n-gram baselines, counted on the bytes that a run was trained on.

An n-gram with k bytes of context is interpolated Witten-Bell (Witten and Bell 1991; Chen and
Goodman 1998, section 2.4), down to the uniform distribution over 256 bytes:

    p_k(b | c) = (count(c b) + types(c) p_{k-1}(b | c')) / (count(c) + types(c))

where c is the last k bytes, c' the last k - 1, count(c) the number of targets that were seen behind
c and types(c) the number of different ones. A context that was not seen has p_k = p_{k-1}. Order n
means k = n - 1 bytes of context, as in "a 5-gram has 4 bytes of context".
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnlab.data.batching import TokenArray, sample
from attnlab.data.text import Corpus, gzip_bits
from experiments.studies.head_width.texts import make_dataset

Bytes = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.float64]

CONTEXTS = (2, 3, 4)
"""Bytes of context of orders 3, 4 and 5."""
NAMES = [f"ngram{k + 1}" for k in CONTEXTS]
BYTE = np.uint64(8)
"""Bits."""


@functools.cache
def baselines(corpus: Corpus, length: int, size: int, steps: int, seed: int) -> dict[str, float]:
    """The baselines of a run: bits per byte of its held-out windows under n-grams counted on all
    its batches (drawn again from seed and steps), and under gzip -9.

    Args:
      corpus: of the run.
      length: targets of a window.
      size: windows of a batch.
      steps: of the training.
      seed: of the run.
    """
    draw = functools.partial(sample, TokenArray(corpus.train), length, size, seed=seed)
    train = np.concatenate([draw(step=step) for step in range(1, steps + 1)])
    rows = make_dataset(corpus, length).heldout(0)
    tokens = rows["tokens"].astype(np.uint8)
    bits = target_bits(train.astype(np.uint8), tokens, (0, *CONTEXTS))
    means = (float(each[rows["valid"]].mean()) for each in bits.values())
    grams = dict(zip(("unigram", *NAMES), means, strict=True))
    return grams | {"gzip": gzip_bits(tokens[:, 1:])}


def _contexts(windows: Bytes, size: int) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """The `size` bytes before every target as one number, and whether the window holds so many."""
    count, length = windows.shape[0], windows.shape[1] - 1
    keys = np.zeros((count, length), np.uint64)
    for back in range(size):
        keys[:, back:] |= windows[:, : length - back].astype(np.uint64) << np.uint64(8 * back)
    return keys, np.broadcast_to(np.arange(length) + 1 >= size, (count, length))


def _refine(lower: Numbers, train: Keys, context: Keys, target: Keys) -> Numbers:
    """p_k of the scored targets from p_{k-1}; `train` are (context, target) keys."""
    pairs, counts = np.unique(train, return_counts=True)
    known, starts, types = np.unique(pairs >> BYTE, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, starts)

    def lookup(keys: Keys, values: npt.NDArray[np.int64], queries: Keys) -> Numbers:
        place = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
        return np.where(keys[place] == queries, values[place], 0).astype(np.float64)

    seen = lookup(pairs, counts, (context << BYTE) | target)
    total, kinds = (lookup(known, values, context) for values in (totals, types))
    return np.where(total > 0, (seen + kinds * lower) / np.maximum(total + kinds, 1), lower)


def target_bits(
    train: Bytes, scored: Bytes, contexts: Sequence[int] = CONTEXTS
) -> dict[int, Numbers]:
    """Bits of every target under interpolated Witten-Bell n-grams, by bytes of context.

    Args:
      train: [windows, T + 1] bytes, every batch of a run one below the other. A window that was
        drawn twice counts twice. Each window has T targets, as for the run.
      scored: [windows, T' + 1] bytes. A target sees the bytes of its own window only, as the model
        does: the first one has one byte of context.
      contexts: numbers of bytes of context, at most 7.

    Returns:
      Bytes of context -> -log2 p of the targets [windows, T'].

    >>> text = np.frombuffer(b"abababab", np.uint8)[None]
    >>> {k: round(float(b.mean()), 3) for k, b in target_bits(text, text, (0, 1)).items()}
    {0: 1.345, 1: 0.21}
    """
    if max(contexts) > 7:
        raise ValueError(f"contexts {tuple(contexts)} have more than 7 bytes; use 7 or fewer")
    target, learnt = scored[:, 1:].astype(np.uint64), train[:, 1:].astype(np.uint64)
    p = np.full(target.shape, 1 / 256)
    bits: dict[int, Numbers] = {}
    for size in range(max(contexts) + 1):
        keys, inside = _contexts(train, size)
        queries, fits = _contexts(scored, size)
        if inside.any():
            pairs = (keys << BYTE | learnt)[inside]
            p[fits] = _refine(p[fits], pairs, queries[fits], target[fits])
        if size in contexts:
            bits[size] = -np.log2(p)
    return bits
