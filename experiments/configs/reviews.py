r"""Is a review for or against? A text and its class, read by an encoder that pools its tokens.

    python -m experiments.run --config=experiments/configs/reviews.py \
        --config.data.path=PATH/sentence_polarity.zip --workdir=runs/reviews

Sentences of film reviews (Pang and Lee 2005), split by the hash of the sentence: 8,550 for
training, 1,057 for validation, 1,055 for the test. The commonest class of the training part is
right for 48.8 % of the test, naive Bayes on whether a word occurs for 77.6 %. Measured,
three seeds, 2 minutes on 2 CPU cores: 70.9 % (69.2 to 71.8); counts of words are still better.

Presets after the colon: `layout=`, `sharing=`, `long` (whole reviews, the first 512 tokens: the
path is then that of movie_reviews.zip), `max` (the largest of the tokens, not their mean), `tiny`.
"""

from attnlab import lab
from experiments import config

VALUES = {
    "data.tokenizer": "bpe:4096",
    "model.kind": "encoder",
    "model.vocab_size": 4096,
    "model.max_len": 64,
    "model.output.kind": "none",
    "model.output.pooler": "mean",
    "model.output.num_classes": 2,
    "model.num_layers": 2,
    "model.dropout.rate": 0.5,
    "model.dropout.attention": 0.1,
    "train.length": 64,
    "train.batch_size": 32,
    "train.steps": 800,
    "train.optimizer.learning_rate": 1e-3,
    "train.schedule.final_learning_rate": 1e-4,
    "train.optimizer.weight_decay": 0.1,
    "train.evaluation.every": 100,
    "train.evaluation.windows": 0,
}
PRESETS: dict[str, config.Values] = {
    "max": {"model.output.pooler": "max"},
    "long": {"model.max_len": 512, "train.length": 512, "train.batch_size": 16},
    "tiny": {
        "data.tokenizer": "bpe:280",
        "model.vocab_size": 280,
        "model.max_len": 16,
        **config.TINY,
        "train.length": 16,
    },
}

get_config = config.other_data("text_class", "labelled", VALUES, PRESETS)

variants = lab.grid(layout=("standard", "wide", "narrow"), model__output__pooler=("mean", "max"))
"""What a head reads, and how the tokens are pooled."""
