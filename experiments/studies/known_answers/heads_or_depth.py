r"""How many heads does a sum of four maxima need, and can depth replace them? Four; partly.

    python -m experiments.sweep --config=experiments/studies/known_answers/heads_or_depth.py \
        --workdir=runs/heads

D-retrieval (Yu et al., ICLR 2026, arXiv 2510.06662): y = sum_{i <= 4} max_t a_i . x_t over T
tokens, at a separate query token. A head finds one maximum; with fewer heads than D = 4 the FFN
must make up for the others, at a cost that grows with T. So the error falls sharply at 4 heads, and
two layers of h heads are worth 2 h heads in one layer. The width of the model is the same for every
number of heads; each head is 8 wide.

Results beside the paper's, in 7 minutes on 2 CPU cores: docs/results/known_answers.md.

Presets after the colon: `paper` (T = 128), `tiny`.
"""

from attnlab.data import DATASETS
from attnlab.lab.text_table import counted
from experiments import config
from experiments.studies.known_answers import common
from experiments.studies.known_answers.common import described, expect, named
from experiments.studies.known_answers.maxima import Maxima

VALUES: config.Values = {
    **common.TRAINING,
    **common.OF_VECTORS,
    "data.dimensions": 4,
    "data.directions": 4,
    "model.vocab_size": 6,
    "model.max_len": 17,
    "model.width": 32,
    "model.heads.head_dim": 8,
    "model.ffn.width": 128,
    "model.output.num_classes": 1,
    "train.length": 17,
    "train.seeds": (0, 1),
}
PRESETS: dict[str, config.Values] = {
    "paper": {"model.max_len": 129, "train.length": 129, "train.steps": 20_000},
    "tiny": {"data.heldout_rows": 32, "model.width": 16} | config.SHORTEST,
}
DATASETS["maxima"] = Maxima
get_config = config.other_data("regression", "maxima", VALUES, PRESETS)
variants = named({
    f"{words}, {counted(heads, 'head')}": {
        "model.num_layers": layers, "model.heads.num_heads": heads}
    for words, layers, most in (("one layer", 1, 5), ("two layers", 2, 2))
    for heads in range(1, most + 1)
})  # fmt: skip
description = described(
    "How many heads does a sum of four maxima need, and can depth stand in for them?",
    "Yu et al., ICLR 2026 (arXiv 2510.06662): bounds, and its figure 1",
    expect("one layer, 4 heads", "at most", 0.2,
           "4 heads leave {ratio:.3f} of the error of 3", over="one layer, 3 heads"),
    expect("one layer, 5 heads", "at least", 0.1,
           "a fifth brings it to {ratio:.2f} of that of 4", over="one layer, 4 heads"),
    expect("two layers, 2 heads", "at most", 0.2,
           "2 heads in each of two layers leave {ratio:.3f} of the error of 2 in one",
           over="one layer, 2 heads"),
    expect("two layers, 2 heads", "at most", 1.0,
           "which is {ratio:.2f} of that of 3 in one", over="one layer, 3 heads"),
)  # fmt: skip
