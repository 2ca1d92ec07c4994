r"""Does a paper need to choose among its neighbours, or is their mean enough? Attention on a graph.

    python -m experiments.sweep --config=experiments/studies/known_answers/neighbours.py \
        --config.data.path=PATH/cora --workdir=runs/neighbours

Cora (see cora.py). The variants: attention over the edges; the same function with the edges as a
dense mask, which costs as much as attention between all pairs of papers and therefore has one seed
and 40 steps; equal weights for all neighbours (scores of 0); and no neighbours. Velickovic et al.
2018 (arXiv 1710.10903) print 83.0 % for attention over the edges, 81.5 % for a fixed mean of the
neighbours and 55.1 % for the words alone, with three different networks.

Results, in 3.7 minutes on 2 CPU cores: docs/results/known_answers.md.

Presets after the colon: those of cora.py (`citeseer`, `tiny`).
"""

from experiments.configs import cora
from experiments.studies.known_answers.common import described, expect, named

EDGES, MEAN, ALONE = "over the edges", "the mean of all", "no neighbours"
FIRST, DENSE = "over the edges, 40 steps", "a dense mask, 40 steps"
SHORT = {"train.seeds": (0,), "train.steps": 40}
get_config = cora.get_config
variants = named(
    {
        EDGES: {},
        FIRST: SHORT,
        DENSE: {"model.attention.implementation": "dense"} | SHORT,
        MEAN: {"model.heads.scale": 0.0},
        ALONE: {"model.attention.output_scale": 0.0},
    }
)
description = described(
    "Does a paper need to choose among its neighbours, or is their mean enough?",
    "Velickovic et al. 2018 (arXiv 1710.10903), Table 2",
    expect(EDGES, "at least", 1.1,
           "neighbours make {ratio:.2f} times as many papers right as their words alone",
           over=ALONE),
    expect(DENSE, "at least", 0.97,
           "a dense mask gives {ratio:.3f} of what the edges do, which is the same function",
           over=FIRST),
    expect(MEAN, "at least", 0.95, "their plain mean {ratio:.3f} of what attention does",
           over=EDGES),
    expect(MEAN, "at most", 1.0, "and no more ({ratio:.3f})", over=EDGES),
)  # fmt: skip
