r"""Does an encoder need its own weights, or can it use the decoder's? And how much depth?

    python -m experiments.sweep --config=experiments/studies/tables/t5.py:tiny --workdir=runs/t5

Table 2 of T5 (Raffel et al. 2020, arXiv 1910.10683), its denoising rows: an encoder and a decoder,
the same with shared weights, and the same with half the layers. `language_model` instead runs the
row of the decoder alone that predicts the next byte (the paper's objective "LM"): another task, so
another sweep; its loss cannot be compared with the others'.

`tiny`, 2 CPU cores with much other work: 24 minutes for 3 rows x 3 seeds. 3.29 (separate), 3.31
(shared) and 3.29 (half depth) bits per target token, each ± 0.01: in 300 steps 41 % of the
parameters (shared) or half of them (half depth) are saved without a significant loss.
The language model: 3.20 ± 0.01 bits per byte, in 2.3 minutes of CPU time.

Left out: the prefix LM (a decoder that reads its first part in both directions; attnlab has no such
mask), and the rows of encoder-decoders with the LM objective and of decoders with denoising.

T5 does not divide scores by sqrt(d_k), divides logits by sqrt(d), and chooses its initial weights
accordingly. Here scores are divided and logits are not, which gives the same functions with the
initial weights of attnlab (except for the table of relative positions: 1/sqrt(h), in T5 1/sqrt(d)).

Presets after the colon: `language_model`, and those of `table.py`. Without a
preset: T5 base."""

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

COLUMNS = ("GLUE", "CNNDM", "SQuAD", "SGLUE", "EnDe", "EnFr", "EnRo")
ROWS = {
    "encoder-decoder": Row(
        {}, 222_903_552, "2P", (83.28, 19.24, 80.88, 71.36, 26.98, 39.82, 27.65)
    ),
    "shared": Row(
        {"model.encoder.shares_decoder": True},
        137_949_312,
        "P",
        (82.81, 18.78, 80.63, 70.73, 26.72, 39.03, 27.46),
    ),
    "6 layers": Row(
        {"model.num_layers": 6},
        123_790_080,
        "P",
        (80.88, 18.97, 77.59, 68.42, 26.38, 38.40, 26.95),
    ),
}
LANGUAGE_MODEL = {
    "language model": Row({}, 109_628_544, "P", (73.78, 17.54, 53.81, 56.51, 25.23, 34.31, 25.38)),
}
BASE = published_config("t5_base")
MODEL = dataclasses.replace(
    BASE,
    encoder=None,  # as many layers as the decoder has
    heads=dataclasses.replace(BASE.heads, scale=None),
    embedding=dataclasses.replace(BASE.embedding, scale=768**0.5),
    output=dataclasses.replace(BASE.output, scale=1.0),
)

TABLE = Table(
    title="T5's Table 2: what an encoder-decoder may share",
    source="Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified "
    "Text-to-Text Transformer, arXiv 1910.10683, Table 2",
    setting={
        "data": "C4, then each task's own data",
        "task": "write the spans that were cut out (15 %, 3 word pieces on average), then "
        "fine-tuning",
        "model": "encoder and decoder of 12 layers each, width 768, 12 heads, FFN 3,072, 32,128 "
        "word pieces",
        "training": "524,288 steps of 128 texts of 512 word pieces, AdaFactor; then 262,144 steps "
        "a task",
        "score": "average over the tasks of GLUE, and six more tasks",
    },
    notes="The paper calls P what 12 layers hold and leaves the decoder's cross-attention and the "
    "embedding out; counted exactly, sharing leaves 61.9 % of the parameters and half depth "
    "55.5 %, neither 50 %. Half depth also halves the FLOPs, sharing leaves them as they are. "
    "attnlab has no mask for the paper's prefix LM and no task that gives a decoder alone the "
    "denoising objective or an encoder-decoder the LM objective: those rows are not here.",
    columns=COLUMNS,
    better="higher",
    base="encoder-decoder",
    rows=ROWS,
    model=MODEL,
    train=TrainConfig(
        steps=524_288,
        batch_size=128,
        length=512,
        optimizer=OptimizerConfig(
            name="adafactor", learning_rate=0.01, weight_decay=0.0, clip_norm=0.0
        ),
        # 1 / sqrt(max(step, 10,000))
        schedule=ScheduleConfig(name="flat_inverse_sqrt", warmup_steps=9_999),
        evaluation=EvaluationConfig(every=5000),
        log_every=500,
        checkpoint_every=5000,
    ),
    tiny=TinyScale(
        shrink=("width/8", "layers/3"),
        base=published.SHORT
        | {"model.vocab_size": 357, "train.steps": 300, "train.evaluation.windows": 1024},
    ),
)
ALONE = TABLE._replace(
    rows=LANGUAGE_MODEL,
    base="language model",
    model=dataclasses.replace(MODEL, kind="decoder", encoder=None),
    setting=TABLE.setting
    | {
        "task": "predict the next word piece, then fine-tuning",
        "model": "decoder of 12 layers, width 768, 12 heads, FFN 3,072, 32,128 word pieces",
    },
)

get_config, variants, describe = published.functions(TABLE, language_model=ALONE)
