r"""Which part of a layer can all layers share, and how many groups of layers need their own?

    python -m experiments.sweep --config=experiments/studies/tables/albert.py:tiny \
        --workdir=runs/albert

Lan et al. 2019, ALBERT, arXiv 1909.11942, Table 4: four ways to share over 12 layers, at two widths
of the embedding. And the table that the paper describes in one sentence but does not print: 1, 2,
3, 4, 6 or 12 groups of layers at the narrow embedding, of which 1 (all-shared) and 12 (not-shared)
are rows of Table 4. The counts have the pooler, and neither the masked-LM head nor the classifier,
as the paper counts all rows but those without sharing, whose counts lack the pooler too. As in
Google's code the embedding has a projection only where E differs from the width.

`tiny` has pre-norm, 4 heads and E = 48 and 24: with post-norm, or with E = 8, the model predicts no
better than byte frequencies after a few hundred steps.

Presets after the colon: `tiny`, `rows=REGEX`. Without a preset: ALBERT-base with the paper's sizes,
steps, batch and optimizer (LAMB)."""

import dataclasses

from attnlab import lab
from attnlab.pretrained import published_config
from attnlab.training import EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from experiments.studies.tables.table import EMBEDDING_WIDTH, HEADS, PLAN, SHORT, Row, Table

NARROW = {EMBEDDING_WIDTH: 128}
BASE = published_config("albert_base", max_len=512)
TABLE = Table(
    rows={
        "E=128 not-shared": Row(NARROW | {PLAN: "separate"}, 89_650_176),
        "E=128 all-shared": Row(NARROW | {PLAN: "albert"}, 11_683_584),
        "E=128 shared-attention": Row(NARROW | {PLAN: "attention_only"}, 63_647_232),
        "E=128 shared-FFN": Row(NARROW | {PLAN: "ffn_only"}, 37_686_528),
        "E=768 all-shared": Row({PLAN: "albert"}, 31_114_752),
        "E=768 shared-attention": Row({PLAN: "attention_only"}, 83_078_400),
        "E=768 shared-FFN": Row({PLAN: "ffn_only"}, 57_117_696),
        "E=768 not-shared": Row({PLAN: "separate"}, 109_081_344),
        "groups G=2": Row(NARROW | {PLAN: "groups:2"}, 18_771_456),
        "groups G=3": Row(NARROW | {PLAN: "groups:3"}, 25_859_328),
        "groups G=4": Row(NARROW | {PLAN: "groups:4"}, 32_947_200),
        "groups G=6": Row(NARROW | {PLAN: "groups:6"}, 47_122_944),
    },
    model=dataclasses.replace(
        BASE,
        embedding=dataclasses.replace(BASE.embedding, width=None),
        output=dataclasses.replace(BASE.output, num_classes=0),
    ),
    train=TrainConfig(
        steps=125_000,
        batch_size=4096,
        accumulate=64,
        length=512,
        optimizer=OptimizerConfig(
            name="lamb", learning_rate=1.76e-3, beta2=0.999, epsilon=1e-6, weight_decay=0.01
        ),
        schedule=ScheduleConfig(name="linear", final_learning_rate=0.0, warmup_steps=3125),
        evaluation=EvaluationConfig(every=5000),
        log_every=500,
        checkpoint_every=5000,
    ),
    widths=16,
    depths=1,
    tiny=SHORT
    | {
        "model.vocab_size": 257,
        HEADS: 4,
        "model.norm.position": "pre",
        "model.max_len": 32,
        "train.length": 32,
        "train.steps": 600,
        "train.evaluation.windows": 1024,
    },
    tiny_rows={EMBEDDING_WIDTH: 24},
)
description = lab.Description(question="Which part of a layer can all layers share?")
get_config, variants = TABLE.get_config, TABLE.variants
