r"""Which part of a layer can all layers share, and how many groups of layers need their own?

    python -m experiments.sweep --config=experiments/studies/tables/albert.py:tiny \
        --workdir=runs/albert

Table 4 of ALBERT (Lan et al. 2019, arXiv 1909.11942): four ways to share over 12 layers, at two
widths of the embedding. And the table that the paper describes in one sentence but does not print:
1, 2, 3, 4, 6 or 12 groups of layers at the narrow embedding, of which 1 and 12 are rows of Table 4
(the paper says that more groups are better).

`tiny`, 2 CPU cores that had other work too: 37 minutes (14.5 of CPU time) for 12 rows x 3 seeds.
The wide embedding ends at 4.41 to 4.46 bits per masked byte, the narrow one at 4.50 to 4.72 with a
spread of 0.1 to 0.2 over seeds: some seeds have not left the frequencies of the bytes (4.76) yet.
On average more groups are better (1: 4.72, 2: 4.67, 3: 4.64, 4: 4.64, 6: 4.50, 12: 4.56), but no
row differs significantly from “not-shared”; to resolve that, raise --config.train.steps.

Presets after the colon: see `table.py`. Without a preset: ALBERT-base with the
paper's sizes, steps, batch and optimizer (LAMB)."""

import dataclasses

from attnlab.pretrained import published_config
from attnlab.training.config import (
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from experiments.studies.tables import table as published
from experiments.studies.tables.table import Row, Table, TinyScale


def _row(embedding: int, plan: str, parameters: int, printed: str = "", *scores: float) -> Row:
    narrow = {} if embedding == 768 else {"model.embedding.width": embedding}
    return Row(narrow | {"model.sharing": plan}, parameters, printed, scores)


# Scores: Avg, SQuAD 1.1 F1 and EM, SQuAD 2.0 F1 and EM, MNLI, SST-2, RACE.
ROWS = {
    "E=768 all-shared": _row(
        768, "albert", 31_114_752, "31M", 79.8, 88.6, 81.5, 79.2, 76.6, 82.0, 90.6, 63.3
    ),
    "E=768 shared-attention": _row(
        768, "attention_only", 83_078_400, "83M",
        81.6, 89.9, 82.7, 80.0, 77.2, 84.0, 91.4, 67.7,
    ),
    "E=768 shared-FFN": _row(
        768, "ffn_only", 57_117_696, "57M", 79.5, 89.2, 82.1, 78.2, 75.4, 81.5, 90.8, 62.6
    ),
    "E=768 not-shared": _row(
        768, "separate", 109_081_344, "108M",
        82.3, 90.4, 83.2, 80.4, 77.6, 84.5, 92.8, 68.2,
    ),
    "E=128 all-shared": _row(
        128, "albert", 11_683_584, "12M", 80.1, 89.3, 82.3, 80.0, 77.1, 82.0, 90.3, 64.0
    ),
    "E=128 shared-attention": _row(
        128, "attention_only", 63_647_232, "64M", 81.7, 89.9, 82.8, 80.7, 77.9, 83.4, 91.9, 67.6
    ),
    "E=128 shared-FFN": _row(
        128, "ffn_only", 37_686_528, "38M", 80.2, 88.9, 81.6, 78.6, 75.6, 82.3, 91.7, 64.4
    ),
    "E=128 not-shared": _row(
        128, "separate", 89_650_176, "89M", 81.6, 89.9, 82.8, 80.3, 77.3, 83.2, 91.5, 67.9
    ),
    # The group table: 1 group is all-shared, 12 groups are not-shared.
    "groups G=2": _row(128, "groups:2", 18_771_456),
    "groups G=3": _row(128, "groups:3", 25_859_328),
    "groups G=4": _row(128, "groups:4", 32_947_200),
    "groups G=6": _row(128, "groups:6", 47_122_944),
}  # fmt: skip
COLUMNS = (
    "Avg",
    "SQuAD1.1 F1",
    "SQuAD1.1 EM",
    "SQuAD2.0 F1",
    "SQuAD2.0 EM",
    "MNLI",
    "SST-2",
    "RACE",
)

BASE = published_config("albert_base", max_len=512)
MODEL = dataclasses.replace(
    BASE,
    embedding=dataclasses.replace(BASE.embedding, width=None),
    output=dataclasses.replace(BASE.output, num_classes=0),
)

TABLE = Table(
    title="ALBERT's Table 4 and its groups of layers",
    source="Lan et al. 2019, ALBERT, arXiv 1909.11942 (ICLR 2020), Table 4",
    setting={
        "data": "English Wikipedia and BookCorpus",
        "task": "masked words (runs of up to 3) and order of sentences, then fine-tuning",
        "model": "encoder, 12 layers of width 768, 12 heads, FFN 3,072, 30,000 word pieces",
        "training": "125,000 steps of 4,096 texts of 512 word pieces, LAMB; one run per row",
        "score": "development sets of SQuAD, MNLI, SST-2 and RACE; Avg is their average",
    },
    # Where both widths are equal the base has no projection, as in Google's code.
    notes="The paper counts neither the masked-LM head nor the classifier head, so the exact "
    "counts leave them out. With the pooler, six of the paper's eight counts agree after "
    "rounding; the two “not-shared” counts agree only without the pooler (108,490,752 and "
    "89,059,584). As in Google's code, the embedding has a projection only where E differs from "
    "the width. The paper has no table of groups; 1 group is its “all-shared”, 12 groups are its "
    "“not-shared”. At the scale `tiny` the model has pre-norm, 4 heads and E = 48 and 24. With "
    "post-norm, or with E = 8, it predicts no better than byte frequencies after a few hundred "
    "steps.",
    columns=COLUMNS,
    better="higher",
    base="E=128 not-shared",
    rows=ROWS,
    model=MODEL,
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
    tiny=TinyScale(
        shrink=("width/16",),
        base=published.SHORT
        | {
            "model.vocab_size": 257,
            "model.heads.num_heads": 4,
            "model.norm.position": "pre",
            "model.max_len": 32,
            "train.length": 32,
            "train.steps": 600,
            "train.evaluation.windows": 1024,
        },
        rows={"model.embedding.width": 24},
    ),
    uncounted={
        "model.output.kind": "none",
        "model.output.bias": False,
        "model.output.transform": None,
    },
)

get_config, variants, describe = published.functions(TABLE)
