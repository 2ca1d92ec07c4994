r"""At an equal number of parameters, in which order should more layers share weights?

    python -m experiments.sweep --config=experiments/studies/tables/takase.py:tiny \
        --workdir=runs/takase

Takase and Kiyono 2021, Lessons on Parameter Sharing across Layers in Transformers, arXiv
2104.06022, WMT English-German: M groups of parameters for N layers, assigned in sequence (AABBCC),
in a cycle (ABCABC) or in a cycle whose last round runs backwards (ABCCBA), beside the vanilla
Transformer and a universal one (M = 1) that is as large because it is wider. M and N of a name are
at the paper's size, and the counts are for 32,768 symbols. Equal parameters are not equal FLOPs.
The paper's deep models start from Admin initialisation; here `tiny` has pre-norm instead.

Presets after the colon: `tiny`, `rows=REGEX`. Without a preset: the paper's sizes.
"""

from attnlab import lab
from attnlab.pretrained import published_config
from experiments.studies.tables import vaswani
from experiments.studies.tables.table import (
    FFN_WIDTH,
    HEADS,
    LAYERS,
    PLAN,
    SCALE,
    SHORT,
    WIDTH,
    Row,
    Table,
)

SIX = 60_878_848
BIG = {WIDTH: 1024, SCALE: 32.0, FFN_WIDTH: 4096, HEADS: 16}
DROPOUT = "model.dropout.rate"
TABLE = Table(
    rows={
        "vanilla M=6 N=6": Row({PLAN: "separate", LAYERS: 6}, SIX),
        "vanilla big M=6 N=6": Row({PLAN: "separate", LAYERS: 6, DROPOUT: 0.3} | BIG, 209_838_080),
        "universal M=1 N=6": Row({PLAN: "albert", LAYERS: 6, DROPOUT: 0.1} | BIG, 62_935_040),
        "sequence M=6 N=12": Row({PLAN: "groups:6", LAYERS: 12}, SIX),
        "cycle M=6 N=12": Row({PLAN: "cycle:6", LAYERS: 12}, SIX),
        "cycle_rev M=6 N=12": Row({PLAN: "cycle_rev:6", LAYERS: 12}, SIX),
        "sequence M=6 N=18": Row({PLAN: "groups:6", LAYERS: 18}, SIX),
        "cycle M=6 N=18": Row({PLAN: "cycle:6", LAYERS: 18}, SIX),
        "cycle_rev M=6 N=18": Row({PLAN: "cycle_rev:6", LAYERS: 18}, SIX),
    },
    model=published_config("transformer_base", vocab_size=32_768),
    train=vaswani.TABLE.train,
    widths=8,
    depths=3,
    tiny=SHORT | {"model.vocab_size": 357, "model.norm.position": "pre"},
)
description = lab.Description(question="In which order should more layers share weights?")
get_config, variants = TABLE.get_config, TABLE.variants
