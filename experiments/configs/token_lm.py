r"""Which tokens predict a text best: its bytes, or byte pairs (BPE) that were learnt from it?

    python -m experiments.run --config=experiments/configs/token_lm.py --workdir=runs/bpe
    python -m experiments.sweep --config=experiments/configs/token_lm.py --workdir=runs/tokens

Losses are bits per byte of the same held-out text, so the variants can be compared. Measured
with bpe:4096, three seeds, 7 minutes on one CPU core: 1.80 (1.80 to 1.81); gzip takes 1.89.

Presets after the colon: `tokenizer=bpe:N` (N tokens, learnt from the training part and kept in the
folder of the run; 4096 if left out) or `tokenizer=bytes`, and those of byte_lm.py (`tiny`,
`masked`, `seq2seq`, `layout=`, `sharing=`).

With your own tokenizer.json:

    python -m experiments.run --config=experiments/configs/token_lm.py \
        --config.data.tokenizer=PATH/tokenizer.json --config.model.vocab_size=50257 \
        --workdir=runs/own

A row has the same number of tokens for all tokenizers, so with longer tokens it holds more text,
and the embedding is larger: the report prints parameters beside every loss."""

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.data import Text
from attnlab.training.objectives import OBJECTIVES, Objective
from experiments import config
from experiments.configs import byte_lm

TOKENIZERS = ("bytes", "bpe:512", "bpe:4096")
KEYS = byte_lm.KEYS | {"tokenizer": "bpe:4096"}


def get_config(arg: str = "") -> ConfigDict:
    """The base config, with room for the tokens of the text and of the task."""
    preset = config.parse(arg, KEYS)
    found = byte_lm.with_presets(preset)
    config.set_values(found, _tokens(OBJECTIVES[found.task], preset.tokenizer))
    if not preset.tiny:
        found.train.steps = 1200  # the 800 of byte_lm.py end a little above the bits of gzip
    return found


def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
    """One variant for each tokenizer."""
    return [lab.Variant(_tokens(base.objective, name), name) for name in TOKENIZERS]


def _tokens(objective: Objective, name: str) -> dict:
    size = Text(tokenizer=name).sizes().vocab_size + len(objective.special_tokens)
    return {"data.tokenizer": name, "model.vocab_size": size}
