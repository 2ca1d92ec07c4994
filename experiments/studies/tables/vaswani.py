r"""How many heads, how wide, how many layers: the variations of the first Transformer.

    python -m experiments.sweep --config=experiments/studies/tables/vaswani.py:tiny \
        --workdir=runs/vaswani

Table 3 of Vaswani et al. 2017 (arXiv 1706.03762), every row that the paper gives numbers for: heads
at equal cost (A), the width of the keys (B), sizes (C), dropout and label smoothing (D), learned
positions (E), big.

`tiny`, 2 CPU cores that had much other work: 36 minutes for 20 rows x 3 seeds, 3.42 (C N=2) to 3.82
(big) bits per target token, base 3.53 ± 0.01. In 200 steps small, shallow and unregularised models
learn fastest (Spearman's rank correlation with the paper's perplexity: -0.20), heads and key widths
(A, B) differ by at most 0.02 from the base, and after Holm's correction no row differs
significantly.

Presets after the colon: see `table.py`. Without a preset: the paper's sizes, with
37,000 symbols, steps and tokens per step.
"""

from attnlab.pretrained import published_config
from attnlab.training.config import (
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from experiments.studies.tables import table as published
from experiments.studies.tables.table import Row, Table, TinyScale

WARMUP = 4000
PATHS = {
    "num_heads": "heads.num_heads",
    "head_dim": "heads.head_dim",
    "value_dim": "heads.value_dim",
    "ffn_width": "ffn.width",
    "dropout_rate": "dropout.rate",
    "positions": "positions.kind",
    "halves": "positions.halves",
}
"""Arguments of `_row` -> fields of `config.model`, where they are others."""


def _row(perplexity: float, bleu: float, parameters: int, printed: str = "", **changes) -> Row:
    fields = {f"model.{PATHS.get(name, name)}": value for name, value in changes.items()}
    if "width" in changes:
        fields["train.optimizer.learning_rate"] = _rate(changes["width"])
    return Row(fields, parameters, printed, (perplexity, bleu))


def _rate(width: int) -> float:
    """The largest of width^-0.5 min(step^-0.5, step WARMUP^-1.5) (section 5.3)."""
    return (width * WARMUP) ** -0.5


def _smoothed(row: Row, smoothing: float) -> Row:
    return row._replace(changes={"train.label_smoothing": smoothing})


BASE = 63_045_632
BIG = dict(width=1024, ffn_width=4096, num_heads=16, dropout_rate=0.3)
# Where a row names no head_dim, h * d_k stays the width.
ROWS = {
    "base": _row(4.92, 25.8, BASE, "65M"),
    "A h=1": _row(5.29, 24.9, BASE, num_heads=1),
    "A h=4": _row(5.00, 25.5, BASE, num_heads=4),
    "A h=16": _row(4.91, 25.8, BASE, num_heads=16),
    "A h=32": _row(5.01, 25.4, BASE, num_heads=32),
    "B d_k=16": _row(5.16, 25.1, 55_967_744, "58M", head_dim=16, value_dim=64),
    "B d_k=32": _row(5.01, 25.4, 58_327_040, "60M", head_dim=32, value_dim=64),
    "C N=2": _row(6.11, 23.7, 33_644_544, "36M", num_layers=2),
    "C N=4": _row(5.19, 25.3, 48_345_088, "50M", num_layers=4),
    "C N=8": _row(4.88, 25.5, 77_746_176, "80M", num_layers=8),
    "C d=256": _row(5.75, 24.5, 26_816_512, "28M", width=256),
    "C d=1024": _row(4.66, 26.0, 163_815_424, "168M", width=1024),
    "C d_ff=1024": _row(5.12, 25.4, 50_450_432, "53M", ffn_width=1024),
    "C d_ff=4096": _row(4.75, 26.2, 88_236_032, "90M", ffn_width=4096),
    "D dropout=0.0": _row(5.77, 24.6, BASE, dropout_rate=0.0),
    "D dropout=0.2": _row(4.95, 25.5, BASE, dropout_rate=0.2),
    "D smoothing=0.0": _smoothed(_row(4.67, 25.3, BASE), 0.0),
    "D smoothing=0.2": _smoothed(_row(5.47, 25.7, BASE), 0.2),
    "E learned": _row(4.92, 25.7, BASE + 1024 * 512, positions="learned", halves=False),
    "big": _row(4.33, 26.4, 214_171_648, "213M", **BIG),
}
ROWS["big"].changes["train.steps"] = 300_000

TABLE = Table(
    title="Table 3 of “Attention is all you need”",
    source="Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762, Table 3",
    setting={
        "data": "WMT 2014 English-German, 4.5 million pairs of sentences",
        "task": "translation",
        "model": "encoder and decoder of 6 layers each, width 512, 8 heads, FFN 2,048, about "
        "37,000 word pieces",
        "training": "100,000 steps (big: 300,000) of about 25,000 source and 25,000 target word "
        "pieces, Adam, inverse root of the step; one run a row",
        "score": "newstest2013: perplexity per word piece, and BLEU",
    },
    notes="The exact counts are for 37,000 symbols, attention without biases and sinusoidal "
    "positions. No vocabulary gives both 65M and 213M: the base family needs one of 41,003 to "
    "41,209 symbols, big one of 35,368 to 36,344. Row E: one table of 1,024 positions more. "
    "The perplexities of the rows with other label smoothing are of models trained for another "
    "loss; the held-out loss here is without smoothing for every row. Here big trains as long as "
    "the others when `tiny`.",
    columns=("perplexity", "BLEU"),
    better="lower",
    base="base",
    rows=ROWS,
    model=published_config("transformer_base"),
    train=TrainConfig(
        steps=100_000,
        batch_size=56,
        length=512,
        optimizer=OptimizerConfig(
            name="adam",
            learning_rate=_rate(512),
            beta2=0.98,
            epsilon=1e-9,
            weight_decay=0.0,
            clip_norm=0.0,
        ),
        schedule=ScheduleConfig(name="inverse_sqrt", warmup_steps=WARMUP - 1),
        evaluation=EvaluationConfig(every=5000),
        label_smoothing=0.1,
        log_every=500,
        checkpoint_every=5000,
    ),
    tiny=TinyScale(
        shrink=("width/8", "layers/2"),
        base=published.SHORT | {"model.vocab_size": 357},
        rows={f: published.SHORT[f] for f in ("train.steps", "train.optimizer.learning_rate")},
    ),
)

get_config, variants, describe = published.functions(TABLE)
