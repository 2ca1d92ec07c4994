r"""Do more heads help, or does each become too small to choose what to attend to?

    python -m experiments.sweep --config=experiments/studies/known_answers/low_rank.py \
        --workdir=runs/low_rank

Bhojanapalli et al. 2020 (arXiv 2002.07028): with H = D / N, as usual, every added head makes all
heads smaller, and the scores of a head of width H have rank H at most. Beyond some number more
heads hurt. With a fixed width of heads more heads keep helping, and a narrower model with such
heads is better than a wider one without (its figure 1). `experiments/studies/rank_bound` shows the
theorem alone, without a model or training. Variants: 2, 8 and 32 heads with H = 64 / N and with H =
16, which costs parameters; and a model 48 wide with 8 heads of 16, which is smaller than the one of
64 with H = 64 / N.

Results, in 13 minutes on 2 CPU cores: docs/results/known_answers.md.

Presets after the colon: those of byte_lm.py (`tiny`, ...).
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.configs import byte_lm
from experiments.studies.known_answers.common import described, expect, named

HEADS = {n: {"model.heads.num_heads": n} for n in (2, 8, 32)}
WIDE = {"model.heads.head_dim": 16}
SMALLER = {"model.width": 48, "model.ffn.width": 192}
variants = named(
    {f"H = D/N, {n} heads": heads for n, heads in HEADS.items()}
    | {f"H = 16, {n} heads": WIDE | heads for n, heads in HEADS.items()}
    | {"D = 48 and H = 16, 8 heads": WIDE | HEADS[8] | SMALLER}
)
description = described(
    "Do more heads help, or does the rank of each head's scores become too small?",
    "Bhojanapalli et al. 2020 (arXiv 2002.07028): the order of the variants, no values",
    expect("H = D/N, 32 heads", "at least", 1,
           "32 heads of width 2 need {ratio:.3f} times the bits of 8 heads of width 8",
           over="H = D/N, 8 heads"),
    expect("H = 16, 8 heads", "at most", 1,
           "8 heads of width 16 need {ratio:.3f} times the bits of 2 such heads",
           over="H = 16, 2 heads"),
    expect("H = 16, 32 heads", "at most", 1,
           "32 heads of width 16 need {ratio:.3f} times the bits of 8 such heads",
           over="H = 16, 8 heads"),
    expect("D = 48 and H = 16, 8 heads", "at most", 1,
           "a model of width 48 with 8 heads of width 16 needs {ratio:.3f} times the bits of one "
           "of width 64 with 8 heads of width 8",
           over="H = D/N, 8 heads"),
)  # fmt: skip
description = dataclasses.replace(
    description,
    pairs=tuple((one.tags, one.over) for one in description.expectations if one.over),
)


def get_config(arg: str = "") -> ConfigDict:
    """What all variants have in common."""
    config = byte_lm.get_config(arg)
    config.model.width = max(32, config.model.width)  # of `tiny`, where 32 heads need as much
    return config
