r"""What do published weights become when trained on under another plan of sharing?

    python -m experiments.run --config=experiments/configs/pretrained.py:FOLDER \
        --config.model.sharing=attention_only --config.train.steps=20 --workdir=runs/one

FOLDER, after the colon, holds config.json and safetensors (see `attnlab.pretrained`). The model is
the folder's, every field of it a flag; what would need other weights is refused. The task is the
first for its kind of model. The text is read by the folder's tokenizer.json, losses are bits per
byte as ever. Without that file, or where the model has no number left for the symbols of the task
(a mask, say), it is read byte by byte, ids below 256 of the vocabulary: the losses then say how
weights take to a change, not what the model knew of words. 20 steps of a tiny ALBERT: seconds. See
docs/howto/checkpoints.md.
"""

from pathlib import Path

from ml_collections import ConfigDict

from attnlab import pretrained
from attnlab.data.tokenizer import FILE, num_tokens
from attnlab.training.objectives import OBJECTIVES
from experiments.configs import byte_lm


def get_config(arg: str = "") -> ConfigDict:
    """The config of a run that starts from the folder `arg`."""
    if not arg:
        raise ValueError("name the folder after the colon: pretrained.py:FOLDER")
    model, config = pretrained.load_config(arg), byte_lm.get_config()
    config.start = arg
    byte_lm.set_model(config, model)
    path = Path(arg) / FILE
    symbols = len(OBJECTIVES[config.task].special_tokens)
    if path.is_file() and num_tokens(str(path)) + symbols <= model.vocab_size:
        config.data.tokenizer = str(path)
    config.train.update(
        steps=200,
        warmup_steps=10,
        length=min(config.train.length, model.max_len),
        learning_rate=1e-4,
        final_learning_rate=1e-5,
        seeds=(0,),
    )
    return config
