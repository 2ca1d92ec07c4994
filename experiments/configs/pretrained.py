r"""What do published weights become when trained on under another plan of sharing?

    python -m experiments.run --config=experiments/configs/pretrained.py:FOLDER \
        --config.model.plan=attention_only --config.train.steps=20 --workdir=runs/one

FOLDER, after the colon, holds config.json and safetensors (see `attnlab.pretrained`). The model is
the folder's, every field of it a flag; what would need other weights is refused. The task is the
first for its kind of model: bytes are ids below 256 of its vocabulary, so the numbers say how
weights take to a change, not what the model knew of words. 20 steps of a tiny ALBERT: seconds.
See docs/recipes.md.
"""

from ml_collections import ConfigDict

from attnlab import pretrained
from experiments.configs import byte_lm


def get_config(arg: str = "") -> ConfigDict:
    """The config of a run that starts from the folder `arg`."""
    if not arg:
        raise ValueError("name the folder after the colon: pretrained.py:FOLDER")
    model, config = pretrained.load_config(arg), byte_lm.get_config()
    config.start = arg
    byte_lm.set_model(config, model)
    config.train.update(
        steps=200,
        warmup_steps=10,
        length=min(config.train.length, model.max_len),
        learning_rate=1e-4,
        final_learning_rate=1e-5,
        seeds=(0,),
    )
    return config
