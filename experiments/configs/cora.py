r"""Do the papers that a paper cites show its subject? Attention over the edges of a graph.

    python -m experiments.run --config=experiments/configs/cora.py \
        --config.data.path=PATH/cora --workdir=runs/cora

Cora with the split of Yang et al. 2016 (arXiv 1603.08861): 2,708 papers, 1,433 words, 7 classes, of
which 20 papers each are known. Every paper attends to itself and to those it shares a citation
with. The test nodes are scored once, curves are of the validation nodes.

Measured, three seeds, 50 seconds on 2 CPU cores: 77.5 % of the test nodes (75.0 to 78.9); label
propagation 73.1 %, the commonest class 31.9 %. Velickovic et al. 2018 print 83.0 with another
network; `python -m experiments.studies.cora` trains that one and has 83.2 % (docs/results/cora.md).

Presets after the colon: `layout=`, `sharing=`, `citeseer` (the path must fit), `tiny` (for tests: a
graph of 30 nodes and two classes).
"""

from attnlab import lab
from experiments import config

VALUES = {
    "model.kind": "encoder",
    "model.vocab_size": 1433,
    "model.max_len": 2708,
    "model.positions.kind": "none",
    "model.output.kind": "none",
    "model.output.pooler": "each",
    "model.output.num_classes": 7,
    "model.num_layers": 2,
    "model.heads.num_heads": 8,
    "model.ffn.width": 64,
    "model.dropout.rate": 0.6,
    "model.dropout.attention": 0.6,
    "model.dropout.ffn": 0.6,
    "train.length": 2708,
    "train.batch_size": 1,
    "train.evaluation.batch_size": 1,
    "train.steps": 150,
    "train.optimizer.learning_rate": 5e-3,
    "train.schedule.final_learning_rate": 5e-4,
    "train.schedule.warmup_steps": 10,
    "train.optimizer.weight_decay": 0.5,
    "train.log_every": 25,
    "train.evaluation.every": 25,
    "train.evaluation.windows": 0,
}
PRESETS: dict[str, config.Values] = {
    "citeseer": {
        "model.vocab_size": 3703,
        "model.max_len": 3312,
        "model.output.num_classes": 6,
        "train.length": 3312,
    },
    "tiny": {
        "model.vocab_size": 6,
        "model.max_len": 30,
        "model.output.num_classes": 2,
        "model.width": 16,
        "model.heads.num_heads": 2,
        "model.ffn.width": 32,
        **config.SHORTEST,
        "train.batch_size": 1,
        "train.evaluation.batch_size": 1,
        "train.length": 30,
    },
}

get_config = config.other_data("node_class", "graph", VALUES, PRESETS)

variants = lab.grid(layout=("standard", "wide", "narrow"))
"""What a head reads of a paper: all, all with a wider head, or a slice."""
