r"""Can an encoder and a decoder share one set of weights? T5's question on a small task.

    python -m experiments.sweep \
        --config=experiments/studies/known_answers/shared_encoder_decoder.py \
        --config.data.path=PATH/multi30k --workdir=runs/stacks

English to German on Multi30k (see translation.py). Raffel et al. 2020 (arXiv 1910.10683), Table 2:
an encoder and a decoder that share all weights score nearly as well as separate ones (82.81 against
83.28 on GLUE, with half the parameters), and better than two of half the depth (80.88, also half
the parameters). The variants here: two layers each, two layers shared by both, and one layer each;
the decoder always has its own cross-attention.

Half as wide as translation.py and 400 steps long, so that three seeds are affordable. Results:
docs/results/known_answers.md. Its two variants with merged attention (one softmax over both texts,
T5Gemma 2, arXiv 2512.14856) ran at commit 3474c4607e3c, which has that option.

Presets after the colon: those of translation.py (`reverse`, `bytes`, `tiny`).
"""

from ml_collections import ConfigDict

from experiments.configs import translation
from experiments.studies.known_answers.common import described, expect, named

OWN, SHARED, HALF = "two of their own", "one for both", "half the depth"
SMALLER = {
    "model.width": 64,
    "model.ffn.width": 256,
    "train.steps": 400,
    "train.seeds": (0, 1, 2),
}
"""Smaller than translation.py, so that three variants with three seeds take minutes."""
variants = named(
    {
        OWN: {},
        SHARED: {"model.encoder.shares_decoder": True},
        HALF: {"model.num_layers": 1},
    }
)
description = described(
    "Can an encoder and a decoder share their weights?",
    "Raffel et al. 2020 (arXiv 1910.10683), Table 2: the order of the variants, no values",
    expect(SHARED, "at most", 1.0,
           "shared weights need {ratio:.3f} times the bits of separate ones at half the depth",
           over=HALF),
    expect(SHARED, "at least", 1.0,
           "and {ratio:.3f} times the bits of separate weights at full depth", over=OWN),
)  # fmt: skip


def get_config(arg: str = "") -> ConfigDict:
    """translation.py at half its width, 400 steps, three seeds."""
    config = translation.get_config(arg)
    if "tiny" not in arg.split(","):
        config.update_from_flattened_dict(SMALLER)
    return config
