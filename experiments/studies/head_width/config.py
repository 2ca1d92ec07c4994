r"""The head-width study: which head_dim and how many heads, at equal FLOPs per token?

    python -m experiments.studies.head_width --data=DATA --rows=runs.csv --workdir=WORK \
        --config=experiments/studies/head_width/config.py:stage=0

Presets after the colon: `stage=0,1,3,2,6,5,4` runs stages in that order; `tiny` is a study of
seconds, for tests; `gpu` is the study of larger models on one GPU
(`experiments.studies.head_width.gpu_study`), `gpu=0.001` a thousandth of its training, for a check.

The plan is docs/results/head_width/plan.md; its stages and rules in
code are `experiments.studies.head_width.design`.
"""

from ml_collections import ConfigDict

from experiments.studies.head_width.design import ORDER, TITLES


def get_config(arg: str = "") -> ConfigDict:
    """`stage=0,1,...` or `tiny` -> the stages to run; `gpu` -> the fraction of its training."""
    name, _, value = arg.partition("=")
    if name == "gpu":
        return ConfigDict({"stages": (), "gpu_scale": _scale(value or "1")})
    if arg == "tiny":
        stages: tuple[int, ...] = (-1,)
    elif not arg:
        stages = ORDER
    elif name == "stage" and all(one.isdecimal() for one in value.split(",")):
        stages = tuple(int(one) for one in value.split(","))
    else:
        raise ValueError(
            f"unknown preset {arg!r}; use stage=0 to stage=7, a list such as stage=0,1, tiny, or "
            "gpu"
        )
    if unknown := set(stages) - {*TITLES, -1}:
        raise ValueError(f"unknown stage {min(unknown)}; stages are {', '.join(map(str, TITLES))}")
    return ConfigDict({"stages": stages})


def _scale(text: str) -> float:
    """Fraction of the training of the study on a GPU."""
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise ValueError(
            f"preset gpu={text}: the fraction of training must be a number above 0 and at most 1, "
            "such as gpu=0.001"
        )
    return scale
