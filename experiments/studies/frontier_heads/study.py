r"""Are the heads of 2024 and 2025 better than plain ones, at equal FLOPs?

    python -m experiments.sweep --config=experiments/studies/frontier_heads/study.py \
        --workdir=runs/frontier_heads

Differential attention (arXiv 2410.05258), mixture-of-heads (arXiv 2410.11842; all heads are
computed, those not chosen count 0), gates per head and per element (arXiv 2505.06708), a learnt
soft cap per head (that of arXiv 2408.00118) and sigmoid attention (arXiv 2409.04431), each against
standard heads. The width of the FFN makes up for what a variant costs more, so that all have the
FLOPs per token of standard heads.

9 minutes on 2 cores for 7 variants x 3 seeds on the default text: docs/results/frontier_heads.md.

Presets after the colon: those of byte_lm.py (`tiny`, a sharing plan, ...).
"""

import dataclasses

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.heads import (
    Differential,
    Extra,
    Gate,
    Layout,
    LearntSoftCap,
    MixtureOfHeads,
    Sigmoid,
)
from attnlab.models import ModelConfig, match_budget
from experiments.configs import byte_lm

STANDARD, DIFFERENTIAL = "standard", "differential"
EXTRAS: dict[str, tuple[str, type[Extra], dict[str, object]]] = {
    "mixture of heads": ("mixture_of_heads", MixtureOfHeads, {}),
    "gate per head": ("gate", Gate, {"by": "head"}),
    "gate per element": ("gate", Gate, {"by": "element"}),
    "learnt soft cap": ("learnt_soft_cap", LearntSoftCap, {}),
    "sigmoid": ("sigmoid", Sigmoid, {}),
}
"""Variant -> flag of its extra, the extra, and its fields."""
description = lab.Description(
    question="Are the heads of 2024 and 2025 better than plain ones, at equal FLOPs?",
    pairs=tuple(({"name": name}, {"name": STANDARD}) for name in (DIFFERENTIAL, *EXTRAS)),
    matched="flops",
)


def get_config(arg: str = "") -> ConfigDict:
    """What all variants have in common."""
    config = byte_lm.get_config(arg)
    # A mixture of heads chooses 2 beside one that every token uses.
    config.model.heads.num_heads = max(4, config.model.heads.num_heads)
    return config


def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
    """Standard heads and each other kind, with the FFN width that equal FLOPs leave."""
    model, length = base.model, base.train.length

    def ffn_width(heads: Layout) -> int:
        variant: ModelConfig = dataclasses.replace(model, heads=heads)
        return match_budget(variant, model, "flops", length=length).config.ffn.width

    width = ffn_width(model.heads.to(Differential))
    differential = {"model.heads.layout": DIFFERENTIAL, "model.ffn.width": width}
    found = [lab.Variant({}, STANDARD), lab.Variant(differential, DIFFERENTIAL)]
    for name, (flag, kind, fields) in EXTRAS.items():
        fields = fields | ({"length": length} if kind is Sigmoid else {})
        own = {f"model.heads.extras.{flag}.{field}": value for field, value in fields.items()}
        own[f"model.heads.extras.{flag}.on"] = True
        heads = dataclasses.replace(model.heads, extras=(*model.heads.extras, kind(**fields)))
        found.append(lab.Variant(own | {"model.ffn.width": ffn_width(heads)}, name))
    return found
