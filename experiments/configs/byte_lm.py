r"""How well does one head layout under one sharing plan predict bytes of real text?

    python -m experiments.run --config=experiments/configs/byte_lm.py:layout=wide,sharing=albert \
        --workdir=runs/one

2 CPU cores, 3 seeds: standard heads take 40 seconds to 2.75 bits per byte of the held-out part of
the Python 3.11 standard library (unigram 4.76, gzip 1.89), wide heads 65 seconds to 2.66.

Presets after the colon, separated by commas: `layout=LAYOUT`, `sharing=PLAN` (`albert`, `cycle:3`),
`data=DATASET` (`tokens`: files of `experiments.prepare`), `model=MODEL` (a published one, as
`bert_base` or `albert_xxlarge`: its sizes, and a task for its kind), `masked` (an encoder that
fills in masked bytes), `seq2seq` (an encoder and a decoder that write the spans cut out of a text,
as T5 does; bits per target token then), `tiny` (seconds, for tests), or `nanogpt_cpu`: nanoGPT's
CPU setting on Tiny Shakespeare,

    python -m experiments.run --config=experiments/configs/byte_lm.py:nanogpt_cpu \
        --config.data.path=PATH/tinyshakespeare --workdir=runs/shakespeare

which reaches 1.88 nats (2.71 bits) per character on the whole validation text.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments import config

PRESETS: dict[str, config.Values] = {
    "masked": {
        "task": "masked_lm",
        "model.kind": "encoder",
        "model.vocab_size": 257,
    },
    "seq2seq": {
        "task": "span_corruption",
        "model.kind": "encoder_decoder",
        "model.vocab_size": 357,
    },
    "nanogpt_cpu": {
        "model.width": 128,
        "model.ffn.width": 512,
        "model.heads.biases": "",
        "model.ffn.bias": False,
        "model.norm.bias": False,
        "model.init.std": 0.02,
        "model.init.residual": "depth",
        "train.batch_size": 12,
        "train.steps": 2000,
        "train.optimizer.learning_rate": 1e-3,
        "train.schedule.final_learning_rate": 1e-4,
        "train.schedule.warmup_steps": 100,
        "train.evaluation.every": 500,
        "train.checkpoint_every": 200,
        "train.evaluation.windows": 0,
    },
    "tiny": {
        "model.num_layers": 2,
        "model.max_len": 16,
        **config.TINY,
        "train.length": 16,
        "train.evaluation.windows": 32,
    },
}
KEYS = config.keys(PRESETS) | {"data": "", "model": ""}


def get_config(arg: str = "") -> ConfigDict:
    """The base config with presets."""
    return with_presets(config.parse(arg, KEYS))


def with_presets(preset: Any) -> ConfigDict:
    """The base config with presets that were parsed, of `KEYS`."""
    found = config.base()
    if preset.model:
        from attnlab.pretrained import published_config  # most runs need no published family

        config.set_model(found, published_config(preset.model))
    if preset.data:
        config.set_values(found, {config.SOURCE: preset.data})
    config.set_presets(found, preset, PRESETS)
    return found
