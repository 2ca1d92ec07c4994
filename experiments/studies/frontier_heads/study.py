r"""Are the heads of 2024 and 2025 better than plain ones, at equal FLOPs?

    python -m experiments.sweep --config=experiments/studies/frontier_heads/study.py \
        --workdir=runs/frontier_heads

Differential attention (arXiv 2410.05258), mixture-of-heads (arXiv 2410.11842; all heads are
computed, those not chosen count 0), gates per head and per element (arXiv 2505.06708) and a learnt
soft cap per head (that of arXiv 2408.00118), each against standard heads. The width of the FFN
makes up for what a variant costs more, so that all have the FLOPs per token of standard heads.

8 minutes on 2 cores for 6 variants x 3 seeds on the default text: docs/results/frontier_heads.md,
whose seventh variant, sigmoid attention, is no longer in the library.

Presets after the colon: those of byte_lm.py (`tiny`, a sharing plan, ...).
"""

import dataclasses

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.heads import Differential, Extra, Gate, Layout, LearntSoftCap, MixtureOfHeads
from attnlab.models import match_budget
from experiments.configs import byte_lm

STANDARD, DIFFERENTIAL = "standard", "differential"
EXTRAS: dict[str, tuple[Extra, dict[str, object]]] = {
    "mixture of heads": (MixtureOfHeads(), {}),
    "gate per head": (Gate(by="head"), {"by": "head"}),
    "gate per element": (Gate(by="element"), {"by": "element"}),
    "learnt soft cap": (LearntSoftCap(), {}),
}
"""Variant -> its extra, and the fields that flags set."""
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
        variant = dataclasses.replace(model, heads=heads)
        return match_budget(variant, model, "flops", length=length).config.ffn.width

    width = ffn_width(model.heads.to(Differential))
    differential = {"model.heads.layout": DIFFERENTIAL, "model.ffn.width": width}
    plain: dict[str, object] = {"model.heads.layout": STANDARD}
    found = [lab.Variant(plain, STANDARD), lab.Variant(differential, DIFFERENTIAL)]
    for name, (extra, fields) in EXTRAS.items():
        heads = dataclasses.replace(model.heads, extras=(*model.heads.extras, extra))
        flags = plain | {f"model.heads.extras.{extra.name}.{f}": v for f, v in fields.items()}
        flags[f"model.heads.extras.{extra.name}.on"] = True
        found.append(lab.Variant(flags | {"model.ffn.width": ffn_width(heads)}, name))
    return found
