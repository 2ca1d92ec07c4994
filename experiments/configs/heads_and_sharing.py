r"""Wide, standard or narrow heads, separate or shared layers: which predicts text best?

    python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
        --workdir=runs/first

2 slow CPU cores: 7 minutes for 3 layouts x 2 plans x 3 seeds; about 2.7 (wide, separate) to 3.2
bits per byte (narrow, albert) on the Python 3.11 standard library.

To train only some of them: `--vary=model.heads.layout=standard,wide --vary=model.sharing=separate`.

Presets after the colon: `match=parameters` or `match=flops` (the ffn.width of every variant is
chosen such that it has the budget of standard heads with separate layers), `match=cache`
(the number of heads is chosen for an equal decoding cache: one wide head for four others), `study`
(a third plan, and a validation part to choose learning rates), `confirm` (only standard and wide
heads, so that their mean over plans is the single comparison; to be run with new seeds), and those
of byte_lm.py (`tiny`, `masked`, ...).

The study itself is, for each budget and each text,

    python -m experiments.sweep --tune=5 --max_seeds=12 --margin=0.01 \
        --config=experiments/configs/heads_and_sharing.py:study,match=parameters \
        --config.data.path=TEXT --workdir=runs/study

For another text or budget, `--tune_from=runs/study` in place of --tune uses the rates found there,
`--tune_from=docs/results/heads_and_sharing.csv` those of the published study.
"""

from typing import Any

from ml_collections import ConfigDict

from attnlab import lab
from experiments import config
from experiments.configs import byte_lm

LAYOUTS = ("standard", "wide", "narrow")
PLANS = ("separate", "albert")
STUDY = ("separate", "cycle:2", "albert")
QUESTION = "Wide, standard or narrow heads, separate or shared layers: which predicts best?"
KEYS = byte_lm.KEYS | {
    "match": ("", "parameters", "flops", "cache"),
    "study": False,
    "confirm": False,
}


def get_config(arg: str = "") -> ConfigDict:
    """What all variants have in common."""
    preset = config.parse(arg, KEYS)
    found = byte_lm.with_presets(preset)
    if preset.study:
        found.data.validation = 0.1
    found.match.budget = preset.match
    if preset.match:
        # Wide heads cost 16 D^2 a layer, so the reference has a wide FFN. In FLOPs they cost more:
        # they also score and sum over D numbers for each key.
        found.model.ffn.width = (12 if preset.match == "flops" else 8) * found.model.width
    return found


def describe(arg: str = "") -> lab.Description:
    """Layouts under each plan against standard heads; each layout's plans against its first,
    unless the question is of layouts alone."""
    preset = config.parse(arg, KEYS)
    first, *others = _plans(preset)
    pairs = [
        ({"layout": layout, "sharing": plan}, {"layout": "standard", "sharing": plan})
        for plan in _plans(preset)
        for layout in _layouts(preset)
        if layout != "standard"
    ]
    if not preset.confirm:
        pairs += [
            ({"layout": layout, "sharing": other}, {"layout": layout, "sharing": first})
            for other in others
            for layout in LAYOUTS
        ]
    return lab.Description(question=QUESTION, pairs=tuple(pairs))


def variants(base: lab.Experiment, arg: str) -> list[lab.Variant]:
    """Each layout under each plan."""
    preset = config.parse(arg, KEYS)
    return lab.grid(layout=_layouts(preset), sharing=_plans(preset))


def _plans(preset: Any) -> tuple[str, ...]:
    return STUDY if preset.study else PLANS


def _layouts(preset: Any) -> tuple[str, ...]:
    return ("standard", "wide") if preset.confirm else LAYOUTS
