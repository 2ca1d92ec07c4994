r"""Can one wide head do what two small heads do? Not on a graph with a cycle, however wide it is.

    python -m experiments.sweep --config=experiments/studies/known_answers/two_heads_beat_one.py \
        --workdir=runs/two

The Endpoint Selection Problem (Tesfaye et al., ICLR 2026, openreview RRmPbbZsvl): from an arc (u,
v), a selector and a query token a model must return u or v. The model is one causal layer of
attention alone, with learnt positions, residual connection, layer norm and tied embeddings. With
one head it is right in at most 75 % of the cases on the complete digraph, for every width and
precision (the proof is in `attnlab/data/synthetic.py`); with two heads it is right in all. All
cases are trained on and scored, since the question is what a model can represent.

The norms have no bias: the proof scales the output of attention, and a bias after the last norm
would not be scaled with it.

Results, in 2.5 minutes on 2 CPU cores: docs/results/known_answers.md.

Presets after the colon: `tiny`.
"""

from experiments import config
from experiments.studies.known_answers.common import TRAINING, described, expect, named

WIDTH = 32
VALUES: config.Values = {
    **TRAINING,
    "data.vertices": 16,
    "model.vocab_size": 19,
    "model.max_len": 4,
    "model.width": WIDTH,
    "model.num_layers": 1,
    "model.heads.num_heads": 1,
    "model.ffn.width": 0,
    "model.norm.bias": False,
    "train.length": 4,
    "train.batch_size": 128,
    "train.seeds": (0, 1, 2, 3, 4),
    "train.optimizer.learning_rate": 3e-3,
    "train.schedule.final_learning_rate": 3e-4,
    "train.schedule.warmup_steps": 100,
    "train.log_every": 250,
    "train.evaluation.every": 250,
    "train.evaluation.batch_size": 480,
    "train.evaluation.curve_windows": 480,
}
TINY: config.Values = {
    "data.vertices": 4,
    "model.vocab_size": 7,
    "model.width": 16,
    **config.SHORTEST,
    "train.evaluation.curve_windows": 24,
}
PRESETS = {"tiny": TINY}
get_config = config.other_data("endpoint", "endpoints", VALUES, PRESETS)
variants = named(
    {
        "one head": {},
        "one head 8 times as wide": {"model.heads.head_dim": 8 * WIDTH},
        "two small heads": {"model.heads.num_heads": 2, "model.heads.head_dim": WIDTH // 4},
        "one head, no cycle": {"data.graph": "acyclic"},
        "one head, FFN": {"model.ffn.width": 4 * WIDTH},
    }
)
description = described(
    "Can one wide head do what two small heads do?",
    "Tesfaye et al., ICLR 2026 (openreview RRmPbbZsvl): a theorem, and its controls",
    expect("one head", "at most", 75, "one head is right in {max:.1f} % of the cases at most"),
    expect("one head 8 times as wide", "at most", 75,
           "one head 8 times as wide as the model in {max:.1f} %"),
    expect("two small heads", "at least", 100, "two small heads in {min:.1f} % at least"),
    expect("one head, no cycle", "at least", 99,
           "on a graph without a cycle one head is right in {min:.1f} %"),
    expect("one head, FFN", "at least", 100, "one head with an FFN in {min:.1f} %"),
)  # fmt: skip
