r"""Which attention matrices must be trained? Associative recall with some of them frozen.

    python -m experiments.sweep --config=experiments/studies/known_answers/which_matrices_learn.py \
        --workdir=runs/frozen

With frozen queries and keys a model still retrieves; with attention that does not depend on the
text it cannot (arXiv 2506.01115, "MixiT": input-independent mixing fails at retrieval). Variants:
all matrices are trained; W_Q and W_K keep their initial values; W_V and W_O do; and two in which
attention is a function of the distance alone, the same for every text: a random one that is never
trained, and a learnt one (T5's relative positions, with all scores q k^T 0). Embedding, FFN and
(except with the random function) relative positions are always trained. The paper gives the
expected order, not a level.

Results, in 7 minutes (`text`: 6) on 2 CPU cores: docs/results/known_answers.md.

Presets after the colon: `paper` (8,192 tokens, 8 pairs), `tiny`; and `text`, which does the same
for the next byte of a text (then also the presets of byte_lm.py),

    python -m experiments.sweep \
        --config=experiments/studies/known_answers/which_matrices_learn.py:text \
        --workdir=runs/frozen_text
"""

from ml_collections import ConfigDict

from attnlab import lab
from experiments import config
from experiments.configs import byte_lm, recall
from experiments.studies.known_answers.common import described, expect, named

TEXT_KEYS = byte_lm.KEYS | {"text": False}
KEYS = TEXT_KEYS | config.keys(recall.PRESETS)
VALUES: config.Values = {
    **recall.VALUES,
    "data.vocab_size": 32,
    "model.vocab_size": 32,
    "train.steps": 800,
    "train.checkpoint_every": 800,
}
ALL, QK, VO, FIXED = "all learn", "Q and K frozen", "V and O frozen", "fixed random pattern"
LEARNT = "learnt pattern, one for all texts"
FROZEN = "train.optimizer.frozen"
variants = named(
    {
        ALL: {},
        QK: {FROZEN: r"attention\.[qk](_bias)?$"},
        VO: {FROZEN: r"attention\.[vo](_bias)?$"},
        FIXED: {"model.heads.scale": 0.0, FROZEN: "relative_bias"},
        LEARNT: {"model.heads.scale": 0.0},
    }
)
SOURCE = "arXiv 2506.01115: the order of the variants, no values"
RECALL = described(
    "Which matrices of attention must learn to find again what was said?",
    SOURCE,
    expect(ALL, "at least", 90, "where all matrices learn {min:.1f} % are right"),
    expect(QK, "at least", 2,
           "with W_Q and W_K as they were drawn {ratio:.1f} times as many as with a fixed random "
           "pattern", over=FIXED),
    expect(VO, "at least", 2, "with W_V and W_O as they were drawn {ratio:.1f} times", over=FIXED),
    expect(FIXED, "at most", 50, "with that pattern {max:.1f} % at most"),
)  # fmt: skip
BITS = described(
    "Which matrices of attention must learn to predict the next byte?",
    SOURCE,
    expect(QK, "at least", 1.0,
           "with W_Q and W_K as they were drawn a byte takes {ratio:.3f} times the bits of where "
           "all learn", over=ALL),
    expect(QK, "at most", 1.0, "and {ratio:.3f} times those with a fixed random pattern",
           over=FIXED),
    expect(VO, "at least", 1.0,
           "with W_V and W_O as they were drawn {ratio:.3f} times those of where all learn",
           over=ALL),
)  # fmt: skip


def get_config(arg: str = "") -> ConfigDict:
    """What all variants have in common."""
    if not config.parse(arg, KEYS).text:
        return config.other_data("recall", "recall", VALUES, recall.PRESETS)(arg)
    found = byte_lm.with_presets(config.parse(arg, TEXT_KEYS))
    config.set_values(found, {"model.positions.kind": "relative"})
    return found


def describe(preset: str) -> lab.Description:
    """What is known beforehand."""
    return BITS if config.parse(preset, KEYS).text else RECALL
