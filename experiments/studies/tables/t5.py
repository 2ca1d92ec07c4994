r"""Does an encoder need its own weights, or can it use the decoder's? And how much depth?

    python -m experiments.sweep --config=experiments/studies/tables/t5.py:tiny --workdir=runs/t5

Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer, arXiv 1910.10683, Table 2, its denoising rows: an encoder and a decoder, the same with
shared weights, and the same with half the layers. Counted exactly, sharing leaves 61.9 % of the
parameters and half depth 55.5 %, since the paper's P leaves cross-attention and embedding out.

Left out: the prefix LM (a decoder that reads its first part in both directions; attnlab has no such
mask), and the rows of encoder-decoders with the LM objective and of decoders with denoising. The
decoder alone with the LM objective is `t5_language_model.py`.

T5 does not divide scores by sqrt(d_k), divides logits by sqrt(d), and chooses its initial weights
accordingly. Here scores are divided and logits are not, which gives the same functions with the
initial weights of attnlab (except for the table of relative positions: 1/sqrt(h), in T5 1/sqrt(d)).

Presets after the colon: `tiny`, `rows=REGEX`. Without a preset: T5 base."""

import dataclasses

from attnlab import lab
from attnlab.pretrained import published_config
from attnlab.training import EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from experiments.studies.tables.table import LAYERS, SHORT, Row, Table

BASE = published_config("t5_base")
TABLE = Table(
    rows={
        "encoder-decoder": Row({}, 222_903_552),
        "shared": Row({"model.encoder.shares_decoder": True}, 137_949_312),
        "6 layers": Row({LAYERS: 6}, 123_790_080),
    },
    model=dataclasses.replace(
        BASE,
        encoder=None,  # as many layers as the decoder has
        heads=dataclasses.replace(BASE.heads, scale=None),
        embedding=dataclasses.replace(BASE.embedding, scale=768**0.5),
        output=dataclasses.replace(BASE.output, scale=1.0),
    ),
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
    widths=8,
    depths=3,
    tiny=SHORT | {"model.vocab_size": 357, "train.steps": 300, "train.evaluation.windows": 1024},
)
description = lab.Description(question="Does an encoder need weights of its own?")
get_config, variants = TABLE.get_config, TABLE.variants
