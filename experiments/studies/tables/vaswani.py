r"""How many heads, how wide, how many layers: the variations of the first Transformer.

    python -m experiments.sweep --config=experiments/studies/tables/vaswani.py:tiny \
        --workdir=runs/vaswani

Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762, Table 3, every row that the paper
gives numbers for: heads at equal cost (A), the width of the keys (B), sizes (C), dropout and label
smoothing (D), learned positions (E), big. The counts are for 37,000 symbols, attention without
biases and sinusoidal positions; E has one table of 1,024 positions more.

Presets after the colon: `tiny`, `rows=REGEX`. Without a preset: the paper's sizes, steps and tokens
per step.
"""

from attnlab import lab
from attnlab.pretrained import published_config
from attnlab.training import EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from experiments.studies.tables.table import (
    FFN_WIDTH,
    HEAD_DIM,
    HEADS,
    LAYERS,
    RATE,
    SCALE,
    SHORT,
    VALUE_DIM,
    WIDTH,
    Row,
    Table,
    Values,
)

WARMUP = 4000


def rate(width: int) -> float:
    """The largest of width^-0.5 min(step^-0.5, step WARMUP^-1.5) (section 5.3)."""
    return (width * WARMUP) ** -0.5


def wide(width: int) -> Values:
    """What follows the width; where a row names no head_dim, h * d_k stays the width."""
    return {WIDTH: width, SCALE: width**0.5, RATE: rate(width)}


BASE = 63_045_632
DROPOUT, SMOOTHING = "model.dropout.rate", "train.label_smoothing"
BIG = {FFN_WIDTH: 4096, HEADS: 16, DROPOUT: 0.3, "train.steps": 300_000}
LEARNED = {"model.positions.kind": "learned"}
TABLE = Table(
    rows={
        "base": Row({}, BASE),
        "A h=1": Row({HEADS: 1}, BASE),
        "A h=4": Row({HEADS: 4}, BASE),
        "A h=16": Row({HEADS: 16}, BASE),
        "A h=32": Row({HEADS: 32}, BASE),
        "B d_k=16": Row({HEAD_DIM: 16, VALUE_DIM: 64}, 55_967_744),
        "B d_k=32": Row({HEAD_DIM: 32, VALUE_DIM: 64}, 58_327_040),
        "C N=2": Row({LAYERS: 2}, 33_644_544),
        "C N=4": Row({LAYERS: 4}, 48_345_088),
        "C N=8": Row({LAYERS: 8}, 77_746_176),
        "C d=256": Row(wide(256), 26_816_512),
        "C d=1024": Row(wide(1024), 163_815_424),
        "C d_ff=1024": Row({FFN_WIDTH: 1024}, 50_450_432),
        "C d_ff=4096": Row({FFN_WIDTH: 4096}, 88_236_032),
        "D dropout=0.0": Row({DROPOUT: 0.0}, BASE),
        "D dropout=0.2": Row({DROPOUT: 0.2}, BASE),
        "D smoothing=0.0": Row({SMOOTHING: 0.0}, BASE),
        "D smoothing=0.2": Row({SMOOTHING: 0.2}, BASE),
        "E learned": Row(LEARNED, BASE + 1024 * 512),
        "big": Row(wide(1024) | BIG, 214_171_648),
    },
    model=published_config("transformer_base"),
    train=TrainConfig(
        steps=100_000,
        batch_size=56,
        length=512,
        optimizer=OptimizerConfig(
            name="adam", learning_rate=rate(512), beta2=0.98, epsilon=1e-9, weight_decay=0.0,
            clip_norm=0.0,
        ),
        schedule=ScheduleConfig(name="inverse_sqrt", warmup_steps=WARMUP - 1),
        evaluation=EvaluationConfig(every=5000),
        label_smoothing=0.1,
        log_every=500,
        checkpoint_every=5000,
    ),
    widths=8,
    depths=2,
    tiny=SHORT | {"model.vocab_size": 357},
    tiny_rows={field: SHORT[field] for field in ("train.steps", RATE)},
)  # fmt: skip
description = lab.Description(question="How many heads, how wide, how many layers?")
get_config, variants = TABLE.get_config, TABLE.variants
