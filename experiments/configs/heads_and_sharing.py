r"""Wide, standard or narrow heads, each layer its own weights or all layers one set: which is best?

    python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
        --workdir=runs/first

2 slow CPU cores: 7 minutes for 3 layouts x 2 plans x 3 seeds; about 2.7 (wide, separate) to 3.2
bits per byte (narrow, albert) on the Python 3.11 standard library.

Words after the colon: `match=parameters` or `match=flops` (every arm gets the ffn_width that
brings it to the budget of standard heads with separate layers), `lr` (three learning rates an
arm), `study` (a plan between the two, and a validation part to choose learning rates by), and the
words of byte_lm.py (`tiny`, `masked`, ...). The study itself is, for each budget and each text,

    python -m experiments.sweep --tune=5 --max_seeds=12 --smallest=0.01 \
        --config=experiments/configs/heads_and_sharing.py:study,match=parameters \
        --config.data.path=TEXT --workdir=runs/study
"""

from collections.abc import Callable

from ml_collections import ConfigDict

from experiments.configs import byte_lm

LAYOUTS = ("standard", "wide", "narrow")
PLANS = ("separate", "albert")
STUDY = ("separate", "cycle:2", "albert")
LEARNING_RATES = (1e-3, 3e-3, 1e-2)


def get_config(arg: str = "") -> ConfigDict:
    """What all arms have in common."""
    words = [w for w in arg.split(",") if w]
    others = [w for w in words if w not in ("lr", "study") and "=" not in w]
    config = byte_lm.get_config(",".join(others))
    if "study" in words:
        config.data.validation = 0.1
    for word in (w for w in words if "=" in w):
        name, budget = word.split("=")
        if name != "match" or budget not in ("parameters", "flops"):
            raise ValueError(f"unknown word {word!r}; known: match=parameters, match=flops")
        config.match.budget = budget
        # Wide heads cost 16 D^2 a layer: the reference needs a wide FFN to have that to give.
        config.model.ffn_width = 8 * config.model.width
    return config


def pairs(arg: str = "") -> list[tuple[str, str]]:
    """Layouts under each plan against standard heads; each layout's plans against its first."""
    layouts = [
        (f"{layout} · {plan}", f"standard · {plan}")
        for plan in _plans(arg)
        for layout in LAYOUTS
        if layout != "standard"
    ]
    first, *others = _plans(arg)
    return layouts + [
        (f"{layout} · {other}", f"{layout} · {first}") for other in others for layout in LAYOUTS
    ]


def sweep(add: Callable, arg: str = "") -> None:
    """One `add(**overrides)` per arm."""
    for layout in LAYOUTS:
        for plan in _plans(arg):
            arm = {"model.layout": layout, "model.plan": plan}
            if "lr" in arg.split(","):
                for rate in LEARNING_RATES:
                    final = rate / 10
                    add(**arm, **{"train.learning_rate": rate, "train.final_learning_rate": final})
            else:
                add(**arm)


def _plans(arg: str) -> tuple[str, ...]:
    return STUDY if "study" in arg.split(",") else PLANS
