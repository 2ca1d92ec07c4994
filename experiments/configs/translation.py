r"""English to German in minutes: an encoder reads a line, a decoder writes another.

    python -m experiments.run --config=experiments/configs/translation.py \
        --config.data.path=PATH/multi30k --workdir=runs/translation

Multi30k (Elliott et al. 2016, arXiv 1605.00459): 29,000 captions of pictures, 1,014 for
validation, 1,000 for the test. One vocabulary for both languages. A byte of the German test costs
4.54 bits by its frequency and 2.56 under gzip; an n-gram model that does not see the English needs
1.31 (Witten-Bell). Measured, one seed, 9 minutes on 2 CPU cores: 0.90 bits, and 50.5 chrF and 25.6
BLEU for greedy decoding.

Presets after the colon: `layout=`, `sharing=`, `reverse` (German to English), `bytes` (no subwords:
rows of up to 256), `tiny`. `--config.task=transduction` leaves out the metrics that need sacrebleu.
"""

from attnlab import lab
from experiments import config

VALUES = {
    "data.parts": "train,val,test_2016_flickr",
    "data.tokenizer": "bpe:4096",
    "model.kind": "encoder_decoder",
    "model.vocab_size": 4098,
    "model.max_len": 96,
    "model.width": 128,
    "model.num_layers": 2,
    "model.heads.num_heads": 4,
    "model.ffn.width": 512,
    "model.dropout.rate": 0.1,
    "train.length": 28,
    "train.batch_size": 64,
    "train.steps": 1500,
    "train.seeds": (0,),
    "train.label_smoothing": 0.1,
    "train.optimizer.learning_rate": 3e-3,
    "train.schedule.final_learning_rate": 3e-4,
    "train.schedule.warmup_steps": 100,
    "train.optimizer.weight_decay": 0.01,
    "train.evaluation.every": 250,
    "train.evaluation.windows": 0,
    "train.checkpoint_every": 250,
}
PRESETS: dict[str, config.Values] = {
    "reverse": {"data.languages": "de-en"},
    "bytes": {
        "data.tokenizer": "bytes",
        "model.vocab_size": 258,
        "model.max_len": 520,
        "train.length": 128,
    },
    "tiny": {
        "data.parts": "train,val,test",
        "data.tokenizer": "bpe:280",
        "model.vocab_size": 282,
        "model.max_len": 32,
        **config.TINY,
        "train.length": 12,
    },
}

get_config = config.other_data("translation", "pairs", VALUES, PRESETS)

variants = lab.grid(layout=("standard", "wide", "narrow"), sharing=("separate", "albert"))
"""Each layout, with separate and with shared layers."""
