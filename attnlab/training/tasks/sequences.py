"""Questions about two sequences: write the second, given the first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.extras import extra
from attnlab.models.generate import generate
from attnlab.training.sources.source import BYTES, Batch, Sizes, Source
from attnlab.training.tasks.task import Example, Metric, Task, bits

SYMBOLS = ("<start>", "<end>")


def write_target(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """Every token of `target` [B, T], and the end behind it, given `source` [B, S].

    Both hold -1 behind their ends. The decoder reads the start token V and the target; its targets
    are the target and the end token V + 1, which therefore needs T + 1 places. `bytes` [B, T + 1],
    where there are, is what each of these stands for.

    >>> batch = {"source": jnp.array([[7, -1]]), "target": jnp.array([[5, 6, -1]])}
    >>> example = write_target(batch, jax.random.key(0))
    >>> example.inputs["tokens"].tolist(), example.targets.tolist(), example.weights.tolist()
    ([[256, 5, 6, 0]], [[5, 6, 257, 0]], [[1.0, 1.0, 1.0, 0.0]])
    """
    start, end = sizes.vocab_size, sizes.vocab_size + 1
    source, target = batch["source"], batch["target"]
    column = jnp.full((len(target), 1), -1, target.dtype)
    target = jnp.concatenate([target, column], axis=1)
    before = jnp.concatenate([jnp.full_like(column, start), target[:, :-1]], axis=1)
    targets = jnp.where((target < 0) & (before >= 0), end, target)
    weights = (targets >= 0) & batch.get("valid", jnp.ones(len(target), bool))[:, None]
    inputs = {
        "source": jnp.maximum(source, 0),
        "source_padding_mask": source >= 0,
        "tokens": jnp.maximum(before, 0),
    }
    weights = weights.astype(jnp.float32)
    return Example(inputs, jnp.maximum(targets, 0), weights, batch.get("bytes"))


def _whole(outputs: Array, example: Example) -> tuple[Array, Array]:
    """Rows of which every target has the largest output: greedy decoding writes them exactly."""
    counts = example.weights > 0
    wrong = (jnp.argmax(outputs, axis=-1) != example.targets) & counts
    rows = jnp.any(counts, axis=1)
    return (rows & ~jnp.any(wrong, axis=1)).astype(jnp.float32), rows.astype(jnp.float32)


def exact(of: str) -> Metric:
    """Share of the rows that greedy decoding writes without a mistake, in percent."""
    return Metric("exact_match", f"% of {of} exact", "higher", _whole, 0.01, digits=2)


def translate(model: Any, params: Any, source: Source) -> dict[str, float]:
    """chrF (Popovic 2015) and BLEU, by sacrebleu with its defaults, of what greedy decoding writes
    for all rows that are held out. A row ends with the end token, or is cut where the longest
    reference ends twice over."""
    with extra("data"):
        import sacrebleu
    rows, end = source.heldout(0), source.sizes.vocab_size + 1
    room = model.config.max_len - 1
    count = min(2 * rows["target"].shape[1], room)
    written = []
    for some in np.array_split(rows["source"], -(-len(rows["source"]) // ROWS_AT_ONCE)):
        # All pieces have one size, so that one program writes them: the last row once more.
        filled = np.pad(some, [(0, ROWS_AT_ONCE - len(some)), (0, 0)], mode="edge")
        start = jnp.full((ROWS_AT_ONCE, 1), source.sizes.vocab_size, jnp.int32)
        read = jnp.asarray(np.maximum(filled, 0)), jnp.asarray(filled >= 0)
        tokens = generate(
            params, start, model.config, count, end=end, source=read[0], source_padding_mask=read[1]
        )
        written += np.asarray(tokens)[: len(some)].tolist()
    ours = [source.write(row[: row.index(end)] if end in row else row) for row in written]
    theirs = [source.write(row[row >= 0]) for row in rows["target"]]
    return {
        "chrf": sacrebleu.corpus_chrf(ours, [theirs]).score,
        "bleu": sacrebleu.corpus_bleu(ours, [theirs]).score,
    }


ROWS_AT_ONCE = 128
"""Of a text that is written."""

ROWS = {
    "translation": Task(
        write_target,
        asks="the translation of a line",
        kinds=("encoder_decoder",),
        metrics=(
            bits("target byte"),
            Metric("chrf", "chrF", "higher", digits=1),
            Metric("bleu", "BLEU", "higher", digits=1),
        ),
        needs=("source", "target", "bytes"),
        symbols=SYMBOLS,
        closing=translate,
    ),
    "transduction": Task(
        write_target,
        asks="the second of two sequences",
        kinds=("encoder_decoder",),
        metrics=(exact("sequences"), bits("target token")),
        needs=("source", "target"),
        symbols=SYMBOLS,
    ),
}
