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
from experiments.studies.known_answers import common
from experiments.studies.known_answers.common import described, expect, named

SIZES = {"": (8, 2, 16), "paper": (64, 4, 64), "tiny": (8, 2, 2)}
"""Preset -> dimensions of the points, width of a small head, and how many times the parameters of
one full-rank head the largest number of small heads has."""


def sized(dimensions: int) -> dict[str, int]:
    """What follows the dimensions of the points."""
    names = ("data.dimensions", "model.vocab_size", "model.output.num_classes")
    return dict.fromkeys(names, dimensions) | {"model.width": 2 * dimensions}


VALUES: config.Values = {
    **common.TRAINING,
    **common.OF_VECTORS,
    **sized(8),
    "model.max_len": 16,
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
get_config = config.other_data("regression", "farthest", VALUES, PRESETS)
FULL = "one full-rank head"
description = described(
    "Can many small heads do what one full-rank head does?",
    "Amsel, Yehudai and Bruna, ICLR 2025 (arXiv 2407.16153): a theorem, and its direction",
    expect(FULL, "at most", 10, "one full-rank head leaves {mean:.2f} % of the variance"),
    expect("small heads, equal parameters", "at least", 4,
           "small heads with as many parameters leave {ratio:.0f} times as much", over=FULL),
    expect("many more small heads", "at least", 4,
           "many more small heads leave {ratio:.0f} times as much", over=FULL),
)  # fmt: skip


def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
    """One full-rank head, small heads with as many and with many more parameters, a control."""
    presets = [name for name in preset.split(",") if name in SIZES]
    dimensions, small, times = SIZES[presets[-1] if presets else ""]
    heads = 2 * dimensions // small
    equal = {"model.heads.head_dim": small, "model.heads.num_heads": heads}
    return named({
        FULL: {},
        "small heads, equal parameters": equal,
        "many more small heads": equal | {"model.heads.num_heads": times * heads},
        "small heads, FFN": equal | {"model.ffn.width": 16 * dimensions},
    })  # fmt: skip
