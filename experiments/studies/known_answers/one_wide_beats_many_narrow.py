r"""Can many small heads do what one full-rank head does? Not in finding the farthest point.

    python -m experiments.sweep \
        --config=experiments/studies/known_answers/one_wide_beats_many_narrow.py --workdir=runs/rank

Given points on a sphere, a layer of attention must return for each point the one that is farthest
from it (Amsel, Yehudai and Bruna, ICLR 2025, arXiv 2407.16153). One head of full rank solves this:
its scores are a large negative multiple of x_i . x_j. A head with a quarter of the dimensions reads
the points through a projection of that rank, and no number of such heads makes up for it, unless it
is exponential in the dimensions. No positions, no causal mask; inputs and targets are vectors in
place of tokens. The model is twice as wide as the points, because at their width one seed of three
does not find the full-rank head.

Results, in 5.5 minutes of one CPU core: docs/results/known_answers.md.

Presets after the colon: `paper` (16 points in 64 dimensions, heads of 4, up to 64 times the
parameters: for a GPU), `tiny`.
"""

from attnlab import lab
from experiments import config
from experiments.studies.known_answers.expect import expect

SIZES = {"": (8, 2, 16), "paper": (64, 4, 64), "tiny": (8, 2, 2)}
"""Preset -> dimensions of the points, width of a small head, and how many times the parameters of
one full-rank head the largest number of small heads has."""


def sized(dimensions: int) -> dict[str, int]:
    """What follows the dimensions of the points."""
    names = ("data.dimensions", "model.vocab_size", "model.output.num_classes")
    return dict.fromkeys(names, dimensions) | {"model.width": 2 * dimensions}


TRAINING: dict[str, object] = {
    "train.batch_size": 64,
    "train.steps": 3000,
    "train.optimizer.name": "adam",
    "train.optimizer.learning_rate": 1e-2,
    "train.schedule.final_learning_rate": 1e-4,
    "train.schedule.warmup_steps": 150,
    "train.optimizer.weight_decay": 0.0,
    "train.log_every": 500,
    "train.evaluation.every": 500,
    "train.evaluation.batch_size": 256,
    "train.evaluation.windows": 0,
    "train.checkpoint_every": 3000,
}
VALUES = {
    **TRAINING,
    **sized(8),
    "model.kind": "encoder",
    "model.max_len": 16,
    "model.positions.kind": "none",
    "model.output.kind": "none",
    "model.output.pooler": "each",
    "model.num_layers": 1,
    "model.heads.num_heads": 1,
    "model.ffn.width": 0,
    "model.norm.kind": "rms",
    "model.norm.bias": False,
    "model.heads.biases": "",
    "train.length": 8,
}
PRESETS: dict[str, config.Values] = {
    "paper": sized(64) | {"train.length": 16, "train.steps": 100_000},
    "tiny": {"data.heldout_rows": 32} | config.SHORTEST,
}
description = lab.Description(
    question="Can many small heads do what one full-rank head does?",
    source="Amsel, Yehudai and Bruna, ICLR 2025 (arXiv 2407.16153): a theorem, and its direction",
    expectations=(
        expect("one full-rank head", "at most", 10,
               "one full-rank head leaves {mean:.2f} % of the variance"),
        expect("small heads, equal parameters", "at least", 4,
               "small heads with as many parameters leave {ratio:.0f} times as much",
               over="one full-rank head"),
        expect("many more small heads", "at least", 4,
               "many more small heads leave {ratio:.0f} times as much",
               over="one full-rank head"),
    ),
)  # fmt: skip

get_config = config.other_data("regression", "farthest", VALUES, PRESETS)


def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
    """One full-rank head, small heads with as many and with many more parameters, a control."""
    presets = [name for name in preset.split(",") if name in SIZES]
    dimensions, small, times = SIZES[presets[-1] if presets else ""]
    heads = 2 * dimensions // small
    one: dict[str, object] = {"model.heads.head_dim": small}
    equal = one | {"model.heads.num_heads": heads}
    return [
        lab.Variant({}, "one full-rank head"),
        lab.Variant(equal, "small heads, equal parameters"),
        lab.Variant(one | {"model.heads.num_heads": times * heads}, "many more small heads"),
        lab.Variant(equal | {"model.ffn.width": 16 * dimensions}, "small heads, FFN"),
    ]
