"""What is asked of a model: a window of bytes -> what it reads, targets, which targets count."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Example(NamedTuple):
    """A batch as the model sees it."""

    inputs: dict[str, Array]
    """The token arguments of the model's call, each [B, its own length]."""
    targets: Int[Array, "B R"]
    weights: Float[Array, "B R"]
    """1 where a target counts, else 0."""


class Task(NamedTuple):
    """A question. `prepare(tokens [B, T + 1], key, valid)` makes the batch.

    `valid` [B, T] is True where a byte, the first of the window apart, is text and not filling
    (None: everywhere); a byte that is filling is no target that counts.
    """

    prepare: Callable[..., Example]
    kind: str
    """The kind of model that can answer it."""
    symbols: tuple[str, ...] = ()
    """How the tokens beyond the 256 bytes are written: token 256 + i is symbols[i]."""
    unit: str = "byte"
    """What a loss is the mean over."""

    @property
    def extra_tokens(self) -> int:
        """Tokens beyond the 256 bytes."""
        return len(self.symbols)


MASK_TOKEN = 256  # of masked_lm
MASK_RATE = 0.15

FIRST_SENTINEL = 256  # of span_corruption: sentinel k is 256 + k
NUM_SENTINELS = 100
START_TOKEN = FIRST_SENTINEL + NUM_SENTINELS  # what the decoder reads first
NOISE_DENSITY = 0.15
MEAN_SPAN = 3


def causal_lm(
    tokens: Int[Array, "B T1"], key: Array, valid: Bool[Array, "B T"] | None = None
) -> Example:
    """Predict every next byte.

    >>> causal_lm(jnp.array([[5, 6, 7]]), jax.random.key(0)).inputs["tokens"].tolist()
    [[5, 6]]
    """
    text, valid = _text(tokens, valid)
    return Example({"tokens": tokens[:, :-1]}, text, valid.astype(jnp.float32))


def masked_lm(
    tokens: Int[Array, "B T1"], key: Array, valid: Bool[Array, "B T"] | None = None
) -> Example:
    """Predict 15 % of the bytes: 80 % of them masked, 10 % random, 10 % left as they are.

    Devlin et al. 2018, section 3.1, arXiv 1810.04805. The first byte of the window is not used,
    so that all tasks are about the same text.

    >>> example = masked_lm(jnp.zeros((4, 201), int), jax.random.key(0))
    >>> 0.1 < example.weights.mean() < 0.2
    Array(True, dtype=bool)
    """
    targets, valid = _text(tokens, valid)
    chosen, fate, other = jax.random.split(key, 3)
    chosen = jax.random.bernoulli(chosen, MASK_RATE, targets.shape)
    fate = jax.random.uniform(fate, targets.shape)
    other = jax.random.randint(other, targets.shape, 0, MASK_TOKEN, targets.dtype)
    shown = jnp.where(fate < 0.8, MASK_TOKEN, jnp.where(fate < 0.9, other, targets))
    inputs = jnp.where(chosen, shown, targets)
    return Example({"tokens": inputs}, targets, (chosen & valid).astype(jnp.float32))


def span_counts(length: int) -> tuple[int, int]:
    """(bytes that are hidden, spans they lie in) of a text of `length` bytes.

    hidden = round(0.15 length) and spans = round(hidden / 3), both at least 1; halves round to
    even. Raises ValueError where no byte would be left or the sentinels do not suffice (one for
    each span and one for the end).

    >>> span_counts(64)
    (10, 3)
    """
    if length < 2:
        raise ValueError(f"span_corruption needs windows of 2 bytes at least, not {length}")
    hidden = max(round(length * NOISE_DENSITY), 1)
    spans = max(round(hidden / MEAN_SPAN), 1)
    if spans + 1 > NUM_SENTINELS:
        raise ValueError(
            f"span_corruption of windows of {length} bytes needs {spans + 1} sentinels, there are "
            f"{NUM_SENTINELS}; use a shorter length (1,990 is the longest)"
        )
    return hidden, spans


def span_corruption(
    tokens: Int[Array, "B T1"], key: Array, valid: Bool[Array, "B T"] | None = None
) -> Example:
    """Write the spans that were cut out of a text (T5; Raffel et al. 2020, section 3.1.4,
    arXiv 1910.10683): 15 % of the bytes in spans of 3 on average.

    The source is the text with span k replaced by sentinel k; the targets are sentinel 0, the
    bytes of span 0, sentinel 1, ..., and a last sentinel; the decoder reads the start token and
    the targets but the last. Sentinel k is 256 + k, the start token 356.

    How many bytes and spans are cut (`span_counts`), and with them all lengths, depend on T alone:
    the source has T - hidden + spans tokens, the target hidden + spans + 1. As in T5's code, the
    lengths of the spans and of the pieces between them are drawn each from all ways to write their
    sum as that many numbers of at least 1, all equally likely; a text begins with a kept piece and
    ends with a span. A target counts where the byte that it stands for is valid: a sentinel stands
    for the first byte of what it replaces, the last sentinel for the last byte of the text.

    >>> text = jnp.arange(ord("a"), ord("a") + 9)[None]
    >>> example = span_corruption(text, jax.random.key(0))
    >>> example.inputs["source"].tolist()
    [[98, 99, 100, 101, 102, 103, 104, 256]]
    >>> example.targets.tolist(), example.inputs["tokens"].tolist()
    ([[256, 105, 257]], [[356, 256, 105]])
    """
    text, valid = _text(tokens, valid)
    batch, length = text.shape
    count, spans = span_counts(length)
    hidden = _random_spans(key, batch, length, count, spans)
    source, _ = _replace_runs(text, valid, hidden, length - count + spans)
    targets, counts = _replace_runs(text, valid, ~hidden, count + spans)
    column = lambda token: jnp.full((batch, 1), token, text.dtype)
    targets = jnp.concatenate([targets, column(FIRST_SENTINEL + spans)], axis=1)
    counts = jnp.concatenate([counts, valid[:, -1:]], axis=1)
    shifted = jnp.concatenate([column(START_TOKEN), targets[:, :-1]], axis=1)
    return Example({"source": source, "tokens": shifted}, targets, counts.astype(jnp.float32))


def cross_entropy(
    logits: Float[Array, "B T vocab"], targets: Int[Array, "B T"], smoothing: float = 0.0
) -> Float[Array, "B T"]:
    """-sum_v q_v log softmax(logits)_v in nats, with q_v = (1 - e) [v = target] + e / vocab.

    e is `smoothing`; with 0 it is -log softmax(logits)[target]. Label smoothing is of Szegedy et
    al. 2016, section 7, arXiv 1512.00567, used by Vaswani et al. 2017, section 5.4, with e = 0.1;
    the uniform part covers the whole vocabulary, the target included.

    >>> cross_entropy(jnp.zeros((1, 1, 4)), jnp.array([[2]])) == jnp.log(4)
    Array([[ True]], dtype=bool)
    """
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if smoothing:
        picked = (1 - smoothing) * picked + smoothing * jnp.mean(logits, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def input_lengths(task: Task, length: int) -> dict[str, int]:
    """Argument of the model's call -> its tokens, for windows of `length` bytes.

    Raises ValueError where the task cannot be made of such windows. Nothing is computed.

    >>> input_lengths(TASKS["span_corruption"], 64)
    {'source': 57, 'tokens': 14}
    """
    window = jax.ShapeDtypeStruct((1, length + 1), jnp.int32)
    example = jax.eval_shape(lambda t: task.prepare(t, jax.random.key(0)), window)
    return {name: a.shape[1] for name, a in example.inputs.items()}


def _text(tokens: Array, valid: Array | None) -> tuple[Array, Array]:
    """The window without its first byte, and which of it is text."""
    text = tokens[:, 1:]
    return text, jnp.ones(text.shape, bool) if valid is None else valid


def _random_spans(key: Array, batch: int, length: int, hidden: int, spans: int) -> Array:
    """[B, T], True in the spans: pieces that are kept and spans take turns."""
    keys = jax.random.split(key)
    pieces = [
        _random_pieces(k, batch, total, spans)
        for k, total in zip(keys, (length - hidden, hidden), strict=True)
    ]
    ends = jnp.cumsum(jnp.stack(pieces, axis=-1).reshape(batch, -1), axis=1)
    passed = jnp.arange(length)[:, None] >= ends[:, None, :]
    return jnp.sum(passed, axis=-1) % 2 == 1


def _random_pieces(key: Array, batch: int, total: int, count: int) -> Array:
    """[B, count] numbers of at least 1 that sum to `total`: cuts at random between the items."""
    draws = jax.random.uniform(key, (batch, total - 1))
    cuts = 1 + jnp.sort(jax.lax.top_k(draws, count - 1)[1], axis=1)
    ends = jnp.concatenate([jnp.zeros_like(cuts, shape=(batch, 1)), cuts], axis=1)
    return jnp.diff(ends, axis=1, append=total)


def _replace_runs(text: Array, valid: Array, out: Array, size: int) -> tuple[Array, Array]:
    """Text and validity [B, size] with run k of `out` replaced by sentinel k."""
    begins = out & ~jnp.pad(out, [(0, 0), (1, 0)])[:, :-1]
    sentinels = FIRST_SENTINEL - 1 + jnp.cumsum(begins, axis=1, dtype=text.dtype)
    shown, kept = jnp.where(begins, sentinels, text), begins | ~out
    order = jnp.argsort(~kept, axis=1, stable=True)[:, :size]
    return jnp.take_along_axis(shown, order, axis=1), jnp.take_along_axis(valid, order, axis=1)


TASKS = {
    "causal_lm": Task(causal_lm, kind="decoder"),
    "masked_lm": Task(masked_lm, kind="encoder", symbols=("[mask]",)),
    "span_corruption": Task(
        span_corruption,
        kind="encoder_decoder",
        symbols=(*(f"<{k}>" for k in range(NUM_SENTINELS)), "<start>"),
        unit="target token",
    ),
}
"""Name -> Task."""
