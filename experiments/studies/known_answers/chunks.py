r"""Why did wide heads look better than narrow ones? Three causes, each with its size.

    python -m experiments.sweep --config=experiments/studies/known_answers/chunks.py \
        --workdir=runs/chunks

Bloem's blog (2019 to 2021) says that heads that read all of x give better results than heads that
each read a slice of it. The code of the blog (github.com/pbloem/former, SelfAttentionNarrow) had
(a) one projection for all heads, (b) scores divided by sqrt(width) where sqrt(width / heads) is
right, so sqrt(heads) times too small, (c) far fewer parameters. Here each cause is removed alone
and all together, and compared with standard heads, which read all of x and are as wide as a slice.
Equal parameters: a wider FFN makes up for the parameters that wide heads have more.

Results, in 20 minutes (`tuned`: 17, `reviews`: 14) on 2 CPU cores: docs/results/known_answers.md.

Presets after the colon: those of byte_lm.py (`tiny`), `tuned` (the seven variants that are
compared, with a validation part, and rates from 0.003 to 0.012 to begin with: 0.003 alone suits
narrow heads least) and `reviews` (the class of a review in place of the next byte, the other task
of `former`; then the presets of reviews.py, and only the seven variants that are compared).

    python -m experiments.sweep --tune_from=docs/results/known_answers/chunks_tuned.csv \
        --config=experiments/studies/known_answers/chunks.py:tuned --workdir=runs/chunks_tuned
    python -m experiments.sweep --config=experiments/studies/known_answers/chunks.py:reviews \
        --config.data.path=PATH/sentence_polarity.zip --workdir=runs/chunks_reviews
"""

import dataclasses

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.models import match_budget, with_layout
from experiments import config
from experiments.configs import byte_lm, reviews
from experiments.studies.known_answers.common import described, expect, named

OWN, ONE, SMALL, EQUAL = "own chunks", "one for all chunks", ", small scores", ", equal parameters"
WIDE, STANDARD, CODE = "wide", "standard", ONE + SMALL
OWN_PRESETS = {"reviews": False, "tuned": False}
KEYS = byte_lm.KEYS | config.keys(reviews.PRESETS) | OWN_PRESETS
UNDONE = {
    OWN + SMALL: "maps of its own for every chunk leave",
    ONE: "the right scale leaves",
    CODE + EQUAL: "as many parameters leave",
}
"""A variant with one cause less than his code -> the words for what that leaves."""
PAIRS = (
    (WIDE, CODE),
    *((undone, CODE) for undone in UNDONE),
    (OWN + EQUAL, CODE),
    (WIDE, OWN + EQUAL),
    (STANDARD + EQUAL, OWN + EQUAL),
    (WIDE, STANDARD + EQUAL),
)
"""The statement; each cause undone; all undone; and what is then left of it."""


def get_config(arg: str = "") -> ConfigDict:
    """What all variants have in common."""
    preset = config.parse(arg, KEYS)
    task = reviews if preset.reviews else byte_lm
    found = task.get_config(",".join(a for a in arg.split(",") if a not in OWN_PRESETS))
    if preset.tuned:
        found.data.validation = 0.1
        found.train.optimizer.learning_rate = 0.006
        found.train.schedule.final_learning_rate = 0.0006
    return found


def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
    """Wide and standard heads, and chunks with every cause undone or not."""
    wide, small = with_layout(base.model, "wide", "separate"), base.model.width**-0.5
    changes: dict[str, config.Values] = {WIDE: {"model.heads.layout": "wide"}}
    for name, layout, scale in (
        (STANDARD, "standard", None),
        (OWN, "narrow", None),
        (OWN + SMALL, "narrow", small),
        (ONE, "narrow_tied", None),
        (ONE + SMALL, "narrow_tied", small),
    ):
        model = with_layout(base.model, layout, "separate")
        model = dataclasses.replace(model, heads=dataclasses.replace(model.heads, scale=scale))
        as_many = match_budget(model, wide, "parameters").config
        scaled = {"model.heads.scale": scale} if scale else {}
        changes[name] = {"model.heads.layout": layout, **scaled}
        changes[name + EQUAL] = {**changes[name], "model.ffn.width": as_many.ffn.width}
    compared = {name for pair in PAIRS for name in pair}
    if {*OWN_PRESETS} & {*preset.split(",")}:
        changes = {name: values for name, values in changes.items() if name in compared}
    return named(changes)


def describe(preset: str) -> lab.Description:
    """The statement, and that each cause is one."""
    text = "reviews" not in preset.split(",")
    what = "bits" if text else "right answers"
    sentences = {
        (WIDE, CODE): f"wide heads have {{ratio:.3f}} of the {what} of his chunks",
        **{(name, CODE): f"{words} {{ratio:.3f}}" for name, words in UNDONE.items()},
        (OWN + EQUAL, CODE): "all three at once leave {ratio:.3f}",
        (WIDE, OWN + EQUAL): "and wide heads have {ratio:.3f} of that",
    }
    found = described(
        "Why did wide heads look better than chunks?",
        "Bloem's blog and code, 2019 to 2021",
        *(expect(name, "at most" if text else "at least", 1.0, sentence, over=over)
          for (name, over), sentence in sentences.items()),
    )  # fmt: skip
    return dataclasses.replace(found, pairs=tuple(({"name": a}, {"name": b}) for a, b in PAIRS))
