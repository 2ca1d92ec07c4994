r"""At an equal number of parameters, in which order should more layers share weights?

    python -m experiments.sweep --config=experiments/studies/tables/takase.py:tiny \
        --workdir=runs/takase

Takase and Kiyono 2021 (arXiv 2104.06022): M sets of weights for N layers, assigned in sequence
(AABBCC), in a cycle (ABCABC) or in a cycle whose last round runs backwards (ABCCBA), beside the
vanilla Transformer and a universal one (M = 1) that is as large because it is wider.

`tiny` (M = 2; N = 2, 4, 6), 2 CPU cores that had other work too: 9.4 minutes (7.7 of CPU time) for
9 rows x 3 seeds. Bits per target token, each ± 0.01 to 0.02: vanilla 3.44, N=12 (here 4) 3.48, N=18
(here 6) 3.50 to 3.51, big 3.43, universal 3.35 (not matched in size at this scale: its one wide set
is as large as four of the others). In 200 steps more width helps and more depth does not yet; the
three orders do not differ significantly.

Presets after the colon: see `table.py`. Without a preset: the paper's sizes, with
32,768 symbols.
"""

from attnlab.pretrained import published_config
from experiments.studies.tables import table as published
from experiments.studies.tables import vaswani as vaswani_table3
from experiments.studies.tables.table import Row, Table, TinyScale

BIG = {"model.width": 1024, "model.ffn.width": 4096, "model.heads.num_heads": 16}
SIX = 60_878_848


def _row(plan: str, layers: int, bleu: float, parameters: int = SIX, printed: str = "61M") -> Row:
    return Row({"model.sharing": plan, "model.num_layers": layers}, parameters, printed, (bleu,))


def _big(row: Row, dropout: float) -> Row:
    return row._replace(changes=row.changes | BIG | {"model.dropout.rate": dropout})


ROWS = {
    "vanilla M=6 N=6": _row("separate", 6, 26.57),
    "vanilla big M=6 N=6": _big(_row("separate", 6, 26.81, 209_838_080, "210M"), 0.3),
    "universal M=1 N=6": _big(_row("albert", 6, 26.90, 62_935_040, "63M"), 0.1),
    "sequence M=6 N=12": _row("groups:6", 12, 27.13),
    "cycle M=6 N=12": _row("cycle:6", 12, 27.04),
    "cycle_rev M=6 N=12": _row("cycle_rev:6", 12, 27.08),
    "sequence M=6 N=18": _row("groups:6", 18, 27.02),
    "cycle M=6 N=18": _row("cycle:6", 18, 27.25),
    "cycle_rev M=6 N=18": _row("cycle_rev:6", 18, 27.31),
}

TABLE = Table(
    title="M sets of weights for N layers, by Takase and Kiyono",
    source="Takase and Kiyono 2021, Lessons on Parameter Sharing across Layers in Transformers, "
    "arXiv 2104.06022, WMT English-German",
    setting={
        "data": "WMT English-German",
        "task": "translation",
        "model": "encoder and decoder of N layers each from M sets each, width 512, 8 heads, FFN "
        "2,048 (big and universal: 1,024, 16, 4,096)",
        "training": "the setting of Vaswani et al. 2017, Admin initialisation for deep models",
        "score": "BLEU, mean over newstest2010 to newstest2016",
    },
    notes="M and N of a name are at the paper's size. The exact counts are for 32,768 symbols and "
    "give the paper's 61M, 210M and 63M. Equal parameters are not equal FLOPs: N = 12 and 18 cost "
    "two and three times those of N = 6 (the paper measures 0.63 and 0.47 of the speed). The "
    "paper's deep models start from Admin initialisation, here all rows from plain weights; at the "
    "scale `tiny` they have pre-norm, since stacks of six layers with post-norm train badly.",
    columns=("BLEU",),
    better="higher",
    base="vanilla M=6 N=6",
    rows=ROWS,
    model=published_config("transformer_base", vocab_size=32_768),
    train=vaswani_table3.TABLE.train,
    tiny=TinyScale(
        shrink=("width/8", "layers/3"),
        base=published.SHORT | {"model.vocab_size": 357, "model.norm.position": "pre"},
    ),
)

get_config, variants, describe = published.functions(TABLE)
