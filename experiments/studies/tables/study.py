r"""Does the order of a published table appear at a small scale?

    python -m experiments.sweep --config=experiments/studies/tables/study.py:table=vaswani,tiny \
        --workdir=runs/vaswani

Each row of a table changes some fields of the paper's base, at the paper's size, steps and
optimizer. `tiny` divides widths and depths for a CPU and trains shortly, on other data.

- `vaswani`: Vaswani et al. 2017 (arXiv 1706.03762), Table 3, every row that has numbers: heads at
  equal cost (A), width of the keys (B), sizes (C), dropout and label smoothing (D), learned
  positions (E), big.
- `albert`: Lan et al. 2019 (arXiv 1909.11942), Table 4, four ways to share over 12 layers at two
  widths of the embedding; and 2, 3, 4 or 6 groups of layers, which the paper describes in a
  sentence. As in Google's code the embedding has a projection only where E differs from the width.
  `tiny` has pre-norm, 4 heads and E = 48 and 24: with post-norm, or with E = 8, the model predicts
  no better than byte frequencies after a few hundred steps.
- `t5`: Raffel et al. 2020 (arXiv 1910.10683), Table 2, denoising: an encoder and a decoder, the
  same with shared weights, and with half the layers. T5 does not divide scores by sqrt(d_k), and
  divides logits by sqrt(d). Here scores are divided and logits are not, which gives the same
  functions with the initial weights of attnlab (except for the table of relative positions:
  1/sqrt(h), in T5 1/sqrt(d)). Left out: the prefix LM, since attnlab has no such mask.
- `t5_language_model`: the decoder alone on the next token, whose loss cannot be compared with `t5`.
- `takase`: Takase and Kiyono 2021 (arXiv 2104.06022): M groups of parameters for N layers, in
  sequence (AABBCC), in a cycle (ABCABC) or in a cycle whose last round runs backwards (ABCCBA),
  beside the vanilla Transformer and a wider universal one (M = 1). M and N of a name are at the
  paper's size. Equal parameters are not equal FLOPs. The paper's deep models start from Admin
  initialisation; here `tiny` has pre-norm instead.

Presets after the colon: `table=TABLE` (`vaswani` if left out), `tiny`, `rows=A+big` (the rows whose
name contains A or big).
"""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.models import ModelConfig
from attnlab.nested import flatten
from attnlab.pretrained import published_config
from experiments import config

WIDTH, FFN_WIDTH, EMBEDDING_WIDTH = "model.width", "model.ffn.width", "model.embedding.width"
HEADS, HEAD_DIM, VALUE_DIM = (
    f"model.heads.{name}" for name in ("num_heads", "head_dim", "value_dim")
)
LAYERS, PLAN, SCALE = "model.num_layers", "model.sharing", "model.embedding.scale"
DROPOUT, SMOOTHING = "model.dropout.rate", "train.label_smoothing"
RATE, STEPS = "train.optimizer.learning_rate", "train.steps"
WIDTHS = (WIDTH, HEAD_DIM, VALUE_DIM, FFN_WIDTH, EMBEDDING_WIDTH)
DEPTHS = (LAYERS, "model.encoder.num_layers")
Values: TypeAlias = dict[str, Any]
"""Config field -> value."""
LARGE: Values = {
    "train.length": 512,
    "train.optimizer.weight_decay": 0.0,
    "train.optimizer.clip_norm": 0.0,
    "train.log_every": 500,
    "train.evaluation.every": 5000,
    "train.checkpoint_every": 5000,
}
"""A training at a paper's size."""
SHORT: Values = {
    "model.max_len": 64,
    STEPS: 200,
    "train.schedule.warmup_steps": 50,
    "train.evaluation.windows": 512,
    "train.checkpoint_every": 200,
}
"""What a short training for a CPU changes in the defaults."""


class Table(NamedTuple):
    """A published table."""

    question: str
    rows: dict[str, Values]
    """Name -> what it changes in the base; the others are compared with the first."""
    model: ModelConfig
    """Of the base."""
    train: Values
    """Of the base, beside `LARGE`."""
    widths: int
    """What `tiny` divides widths by."""
    depths: int
    """What `tiny` divides numbers of layers, and of groups in a plan, by."""
    tiny: Values
    """Of the base of `tiny`, beside `SHORT`."""
    tiny_rows: Values = {}  # noqa: RUF012
    """Of the rows of `tiny` that change the field."""

    def divided(self, values: Values) -> Values:
        """The sizes among these values as `tiny` has them."""
        by = dict.fromkeys(WIDTHS, self.widths) | dict.fromkeys(DEPTHS, self.depths)
        found: Values = {f: values[f] // n for f, n in by.items() if values.get(f) is not None}
        plan, _, groups = values.get(PLAN, "").partition(":")
        if groups:
            found[PLAN] = f"{plan}:{int(groups) // self.depths}"
        if values.get(SCALE, 1) != 1:  # the square root of the width
            found[SCALE] = found[WIDTH] ** 0.5
        return found


def wide(width: int) -> Values:
    """What follows the width of Vaswani et al.; where a row names no head_dim, h d_k stays the
    width. The rate is the largest of width^-0.5 min(step^-0.5, step 4000^-1.5) (section 5.3)."""
    return {WIDTH: width, SCALE: width**0.5, RATE: (width * 4000) ** -0.5}


NOAM: Values = {
    STEPS: 100_000,
    "train.batch_size": 56,
    SMOOTHING: 0.1,
    "train.optimizer.name": "adam",
    RATE: wide(512)[RATE],
    "train.optimizer.beta2": 0.98,
    "train.optimizer.epsilon": 1e-9,
    "train.schedule.name": "inverse_sqrt",
    "train.schedule.warmup_steps": 3999,
}
"""The training of Vaswani et al."""
BIG: Values = {FFN_WIDTH: 4096, HEADS: 16}
WIDER = {WIDTH: 1024, SCALE: 32.0} | BIG
SHARED = {
    "not-shared": "separate",
    "all-shared": "albert",
    "shared-attention": "attention_only",
    "shared-FFN": "ffn_only",
}
ORDERS = {"sequence": "groups", "cycle": "cycle", "cycle_rev": "cycle_rev"}
ALBERT, T5 = published_config("albert_base", max_len=512), published_config("t5_base")
TABLES = {
    "vaswani": Table(
        "How many heads, how wide, how many layers?",
        {"base": {}}
        | {f"A h={n}": {HEADS: n} for n in (1, 4, 16, 32)}
        | {f"B d_k={n}": {HEAD_DIM: n, VALUE_DIM: 64} for n in (16, 32)}
        | {f"C N={n}": {LAYERS: n} for n in (2, 4, 8)}
        | {f"C d={n}": wide(n) for n in (256, 1024)}
        | {f"C d_ff={n}": {FFN_WIDTH: n} for n in (1024, 4096)}
        | {f"D dropout={share}": {DROPOUT: share} for share in (0.0, 0.2)}
        | {f"D smoothing={share}": {SMOOTHING: share} for share in (0.0, 0.2)}
        | {"E learned": {"model.positions.kind": "learned"}}
        | {"big": wide(1024) | BIG | {DROPOUT: 0.3, STEPS: 300_000}},
        published_config("transformer_base"),
        NOAM,
        widths=8,
        depths=2,
        tiny={"model.vocab_size": 357, SMOOTHING: 0.1},
        tiny_rows={STEPS: 200, RATE: 3e-3},
    ),
    "albert": Table(
        "Which part of a layer can all layers share?",
        {f"E=128 {name}": {EMBEDDING_WIDTH: 128, PLAN: plan} for name, plan in SHARED.items()}
        | {f"E=768 {name}": {PLAN: plan} for name, plan in SHARED.items()}
        | {f"groups G={n}": {EMBEDDING_WIDTH: 128, PLAN: f"groups:{n}"} for n in (2, 3, 4, 6)},
        dataclasses.replace(
            ALBERT,
            sharing="separate",  # every row has a plan of its own
            embedding=dataclasses.replace(ALBERT.embedding, width=None),
            output=dataclasses.replace(ALBERT.output, num_classes=0),
        ),
        {
            STEPS: 125_000,
            "train.batch_size": 4096, "train.accumulate": 64, "train.optimizer.name": "lamb",
            RATE: 1.76e-3,
            "train.optimizer.beta2": 0.999, "train.optimizer.epsilon": 1e-6,
            "train.optimizer.weight_decay": 0.01, "train.optimizer.clip_norm": 1.0,
            "train.schedule.name": "linear", "train.schedule.final_learning_rate": 0.0,
            "train.schedule.warmup_steps": 3125,
        },
        widths=16,
        depths=1,
        tiny={"model.vocab_size": 257, HEADS: 4, "model.norm.position": "pre", "model.max_len": 32}
        | {"train.length": 32, STEPS: 600, "train.evaluation.windows": 1024},
        tiny_rows={EMBEDDING_WIDTH: 24},
    ),
    "t5": Table(
        "Does an encoder need weights of its own?",
        {"encoder-decoder": {}, "shared": {"model.encoder.shares_decoder": True},
         "6 layers": {LAYERS: 6}},
        dataclasses.replace(
            T5,
            encoder=None,  # as many layers as the decoder has
            heads=dataclasses.replace(T5.heads, scale=None),
            embedding=dataclasses.replace(T5.embedding, scale=768**0.5),
            output=dataclasses.replace(T5.output, scale=1.0),
        ),
        {
            STEPS: 524_288,
            "train.batch_size": 128,
            "train.optimizer.name": "adafactor",
            RATE: 0.01,
            "train.schedule.name": "flat_inverse_sqrt",  # 1 / sqrt(max(step, 10,000))
            "train.schedule.warmup_steps": 9999,
        },
        widths=8,
        depths=3,
        tiny={"model.vocab_size": 357, STEPS: 300, "train.evaluation.windows": 1024},
    ),
    "takase": Table(
        "In which order should more layers share weights?",
        {"vanilla M=6 N=6": {PLAN: "separate", LAYERS: 6},
         "vanilla big M=6 N=6": {PLAN: "separate", LAYERS: 6, DROPOUT: 0.3} | WIDER,
         "universal M=1 N=6": {PLAN: "albert", LAYERS: 6, DROPOUT: 0.1} | WIDER}
        | {f"{name} M=6 N={n}": {PLAN: f"{plan}:6", LAYERS: n}
           for n in (12, 18) for name, plan in ORDERS.items()},
        published_config("transformer_base", vocab_size=32_768),
        NOAM,
        widths=8,
        depths=3,
        tiny={"model.vocab_size": 357, "model.norm.position": "pre", SMOOTHING: 0.1},
    ),
}  # fmt: skip
TABLES["t5_language_model"] = TABLES["t5"]._replace(
    question="How well does the decoder alone predict the next byte?",
    rows={"language model": {}},
    model=dataclasses.replace(TABLES["t5"].model, kind="decoder", encoder=None),
)
KEYS = {"table": tuple(TABLES), "tiny": False, "rows": ""}


def get_config(arg: str = "") -> ConfigDict:
    """What all rows have in common."""
    preset, found = config.parse(arg, KEYS), config.base()
    table = TABLES[preset.table]
    config.set_model(found, table.model)
    small = table.divided(flatten(found.to_dict())) | SHORT | table.tiny
    config.set_values(found, small if preset.tiny else LARGE | table.train)
    return found


def variants(base: lab.Experiment, arg: str) -> list[lab.Variant]:
    """One for each row."""
    preset = config.parse(arg, KEYS)
    table, found = TABLES[preset.table], []
    for part in preset.rows.split("+"):
        if not any(part in name for name in table.rows):
            raise ValueError(f"rows={part}: no row of {preset.table} contains it; the rows are "
                             f"{', '.join(table.rows)}")  # fmt: skip
    for name, changes in table.rows.items():
        if preset.tiny:
            instead = {f: value for f, value in table.tiny_rows.items() if f in changes}
            changes = changes | table.divided(changes) | instead
        if any(part in name for part in preset.rows.split("+")):
            found.append(lab.Variant(changes, name))
    return found


def describe(arg: str) -> lab.Description:
    """The question of the table."""
    return lab.Description(question=TABLES[config.parse(arg, KEYS).table].question)
