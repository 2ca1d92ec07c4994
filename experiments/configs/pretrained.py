r"""How do published weights train further under another sharing plan?

    python -m experiments.run --config=experiments/configs/pretrained.py:FOLDER \
        --config.model.sharing=attention_only --config.train.steps=20 --workdir=runs/one

FOLDER, after the colon, holds config.json and safetensors (see `attnlab.pretrained`). The model is
that of the folder, and each of its fields is a flag; a value that needs other weights raises an
error. The task is the first one for its kind of model. The text is tokenized by the folder's
tokenizer.json, and losses are bits per byte. Without that file, or if the vocabulary has no id left
for the symbols of the task (a mask, for example), the text is read as bytes, ids 0 to 255: the
losses then show how the weights respond to a change, not what the model knew about words. 20 steps
of a tiny ALBERT take seconds. See docs/howto/checkpoints.md.
"""

from ml_collections import ConfigDict

from attnlab import pretrained
from attnlab.data.tokenizer import FILE, num_tokens
from attnlab.pretrained.hub import find_folder
from attnlab.training.objectives import OBJECTIVES
from experiments import config


def get_config(arg: str = "") -> ConfigDict:
    """The config of a run that starts from the folder `arg`."""
    if not arg:
        raise ValueError("name the folder after the colon: pretrained.py:FOLDER")
    model, found = pretrained.load_config(arg), config.base()
    found.start = arg
    config.set_model(found, model)
    path = find_folder(arg) / FILE
    symbols = len(OBJECTIVES[found.task].special_tokens)
    if path.is_file() and num_tokens(str(path)) + symbols <= model.vocab_size:
        found.data.tokenizer = str(path)
    found.train.update(steps=200, length=min(found.train.length, model.max_len), seeds=(0,))
    found.train.optimizer.learning_rate = 1e-4
    found.train.schedule.update(warmup_steps=10, final_learning_rate=1e-5)
    return found
