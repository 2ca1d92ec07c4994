r"""Does training in bfloat16 cost anything? The same run in both, layout by layout, seed by seed.

    python -m experiments.sweep --workdir=runs/precision \
        --config=experiments/studies/precision/study.py:layouts=standard+wide

With `dtype=bfloat16` products and activations are in bfloat16; parameters, moments of the
optimizer, statistics of norms, softmax and loss stay in float32. Both variants of a layout start
from the same weights and read the same batches, so the two losses of a seed are a pair.

    python -m experiments.sweep --config=experiments/studies/precision/study.py:small \
        --workdir=runs/precision_small

does the same for every layout.

Presets after the colon: `layouts=standard+wide` (left out: all of them), `small` (half the layers,
half the FFN width, texts half as long, a quarter of the batch), `tiny`. bfloat16 is not faster on a
CPU."""

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.heads import LAYOUTS
from experiments import config
from experiments.configs import byte_lm

PRESETS: dict[str, config.Values] = {
    **byte_lm.PRESETS,
    "small": {
        "model.num_layers": 2,
        "model.ffn.width": 128,
        "model.max_len": 32,
        "train.length": 32,
        "train.batch_size": 4,
        "train.evaluation.every": 800,
    },
}
KEYS = config.keys(PRESETS) | {"layouts": ""}


def _layouts(arg: str) -> list[str]:
    found = config.parse(arg, KEYS).layouts
    return found.split("+") if found else list(LAYOUTS)


def get_config(arg: str = "") -> ConfigDict:
    """What all variants have in common: the small decoder."""
    found = config.base()
    config.set_presets(found, config.parse(arg, KEYS), PRESETS)
    return found


def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
    """Every layout that was asked for, in both precisions."""
    return lab.grid(layout=_layouts(preset), model__compute__dtype=["float32", "bfloat16"])


def describe(preset: str) -> lab.Description:
    """Each layout's bfloat16 against its float32."""
    pairs = tuple(
        ({"layout": layout, "dtype": "bfloat16"}, {"layout": layout, "dtype": "float32"})
        for layout in _layouts(preset)
    )
    return lab.Description(question="Does training in bfloat16 cost anything?", pairs=pairs)
