r"""How many values can a layout of heads remember? Associative recall, drawn on the device.

    python -m experiments.sweep --config=experiments/configs/recall.py --workdir=runs/recall

Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): keys with their values, then
the keys again; for each the model must return its value. A guess among the P values of the text is
right in a share 1 / P.

Measured with 4 pairs, 90 seconds on 2 CPU cores: two seeds of three are always right, the third in
36 % of the cases; recall is learnt suddenly or not at all.

Presets after the colon: `layout=`, `sharing=`, `paper` (8,192 tokens, as in the paper's
experiments: a small vocabulary hides differences, and costs less), `tiny`.

One run:

    python -m experiments.run --config=experiments/configs/recall.py:layout=wide \
        --config.data.pairs=8 --workdir=runs/eight
"""

from attnlab import lab
from experiments import config

LAYOUTS = ("standard", "narrow")
PAIRS = (2, 4, 8)

VALUES = {
    "data.vocab_size": 64,
    "data.pairs": 4,
    "model.vocab_size": 64,
    "model.positions.kind": "relative",  # a head finds the token before it in a few hundred steps
    "model.width": 64,
    "model.ffn.width": 128,
    "model.num_layers": 2,
    "model.heads.num_heads": 2,
    "train.length": 32,
    "train.batch_size": 64,
    "train.steps": 1500,
    "train.optimizer.weight_decay": 0.0,
    "train.evaluation.every": 100,
    "train.evaluation.windows": 0,
}
PRESETS: dict[str, config.Values] = {
    "paper": {
        "data.vocab_size": 8192,
        "data.pairs": 8,
        "model.vocab_size": 8192,
        "model.width": 128,
        "model.ffn.width": 512,
        "train.length": 64,
    },
    "tiny": {
        "data.vocab_size": 32,
        "data.pairs": 2,
        "data.heldout_rows": 64,
        "model.vocab_size": 32,
        "model.max_len": 16,
        **config.TINY,
        "train.length": 16,
    },
}

get_config = config.other_data("recall", "recall", VALUES, PRESETS)


def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
    """Each layout with each number of pairs."""
    tiny = config.parse(preset, config.keys(PRESETS)).tiny
    pairs = (2, 4) if tiny else PAIRS
    return lab.grid(layout=LAYOUTS, data__pairs=pairs)
