"""Objectives on two sequences: predict the second, given the first."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.data.dataset import BYTES, Dataset, DataSizes, DeviceBatch
from attnlab.extras import extra
from attnlab.models import ModelConfig
from attnlab.models.generate import generate
from attnlab.sharing import Params
from attnlab.training.objectives import objective
from attnlab.training.objectives.objective import Example, Inputs, Metric, Model, Objective, Sums

SPECIAL_TOKENS = ("<start>", "<end>")
GENERATED_ROWS = 128
"""Rows that are generated at a time."""


def sequence_to_sequence(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """Every token of `target` [B, T] and the end after it, given `source` [B, S].

    Both hold -1 after their ends. The decoder reads the start token V and the target; its targets
    are the target and the end token V + 1, which therefore need T + 1 positions. `bytes`
    [B, T + 1], if the batch has it, says how many bytes each of these stands for.

    >>> import jax
    >>> batch = {"source": jnp.array([[7, -1]]), "target": jnp.array([[5, 6, -1]])}
    >>> example = sequence_to_sequence(batch, jax.random.key(0))
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
    inputs: Inputs = {
        "source": jnp.maximum(source, 0),
        "source_padding_mask": source >= 0,
        "tokens": jnp.maximum(before, 0),
    }
    weights = weights.astype(jnp.float32)
    return Example(inputs, jnp.maximum(targets, 0), weights, batch.get("bytes"))


def _exact(logits: Array, example: Example) -> Sums:
    """Rows of which every target has the largest logit: greedy decoding writes them exactly."""
    counts = example.weights > 0
    wrong = (jnp.argmax(logits, axis=-1) != example.targets) & counts
    rows = jnp.any(counts, axis=1)
    return (rows & ~jnp.any(wrong, axis=1)).astype(jnp.float32), rows.astype(jnp.float32)


def exact_match(of: str) -> Metric:
    """Share of the rows that greedy decoding writes without a mistake, in percent."""
    return Metric("exact_match", f"% of {of} exact", "higher", _exact, 0.01, digits=2)


def translate(model: Model, params: Params, dataset: Dataset) -> dict[str, float]:
    """chrF (Popovic 2015) and BLEU, by sacrebleu with its defaults, of the greedy translations of
    all held-out rows. A row ends with the end token, or at twice the length of the longest
    reference; other special tokens are left out."""
    with extra("data"):
        import sacrebleu
    config: ModelConfig = model.config  # type: ignore[attr-defined]
    rows, start = dataset.heldout(0), dataset.sizes.vocab_size
    end = start + 1
    count = min(2 * rows["target"].shape[1], config.max_len - 1)
    generated: list[list[int]] = []
    for part in np.array_split(rows["source"], -(-len(rows["source"]) // GENERATED_ROWS)):
        # All parts have one size, so that one program generates them: the last row is repeated.
        source = np.pad(part, [(0, GENERATED_ROWS - len(part)), (0, 0)], mode="edge")
        tokens = generate(
            params,
            jnp.full((GENERATED_ROWS, 1), start, jnp.int32),
            config,
            count,
            end=end,
            source=jnp.asarray(np.maximum(source, 0)),
            source_padding_mask=jnp.asarray(source >= 0),
        )
        generated += np.asarray(tokens)[: len(part)].tolist()
    texts = [row[: row.index(end)] if end in row else row for row in generated]
    ours = [dataset.decode([token for token in text if token < start]) for text in texts]
    references = [dataset.decode(row[row >= 0].tolist()) for row in rows["target"]]
    return {
        "chrf": sacrebleu.corpus_chrf(ours, [references]).score,
        "bleu": sacrebleu.corpus_bleu(ours, [references]).score,
    }


SEQUENCES = {
    "translation": Objective(
        sequence_to_sequence,
        description="the translation of a line",
        model_kinds=("encoder_decoder",),
        metrics=(
            objective.bits("target byte"),
            Metric("chrf", "chrF", "higher", digits=1),
            Metric("bleu", "BLEU", "higher", digits=1),
        ),
        required_arrays=("source", "target", "bytes"),
        special_tokens=SPECIAL_TOKENS,
        final_metrics=translate,
    ),
    "transduction": Objective(
        sequence_to_sequence,
        description="the second of two sequences",
        model_kinds=("encoder_decoder",),
        metrics=(exact_match("sequences"), objective.bits("target token")),
        required_arrays=("source", "target"),
        special_tokens=SPECIAL_TOKENS,
    ),
}
