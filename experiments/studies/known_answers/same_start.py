r"""Why do heads differ? They start at different weights, and training amplifies the difference.

    python -m experiments.sweep --config=experiments/studies/known_answers/same_start.py \
        --workdir=runs/same

Two heads with equal weights have equal outputs, therefore equal gradients and equal updates. Their
distance stays 0.0 to the bit while every weight changes, and together they are one head with its
output times 2. On the Endpoint Selection Problem (`two_heads_beat_one.py`) the second head is then
worth nothing: one head is right in at most 75 % of the cases, two different heads in all. Any
difference at the start is enough: independent initial weights, a little noise, different values
with equal scores (other W_V and W_O), dropout of probabilities. Training amplifies it.

The control is exact: one head that starts like the first of the two, with its output times 2,
trained by Adam, which does not depend on the scale of a gradient, without clipping, which does.

Results, in 2.2 minutes on 2 CPU cores: docs/results/known_answers.md.

Presets after the colon: `tiny`.
"""

from experiments import config
from experiments.studies.known_answers import two_heads_beat_one
from experiments.studies.known_answers.common import described, expect, named

VALUES: config.Values = {
    **two_heads_beat_one.VALUES,
    "model.heads.num_heads": 2,
    "model.heads.head_dim": 16,
    "model.heads.biases": "",  # a key bias has no gradient, so it would not move
    "train.optimizer.clip_norm": 0.0,
    "train.seeds": (0, 1, 2),
    "callbacks": ("heads",),
}
PRESETS = {"tiny": {**two_heads_beat_one.TINY, "train.optimizer.learning_rate": 3e-2}}
get_config = config.other_data("endpoint", "endpoints", VALUES, PRESETS)
STARTS = "experiments.studies.known_answers.starts"
EQUAL: dict[str, object] = {"init": f"{STARTS}:equal"}
ONE = {
    "model.heads.num_heads": 1,
    "model.attention.output_scale": 2.0,
    "init": f"{STARTS}:first_of_two",
}
variants = named(
    {
        "apart": {},
        "equal": EQUAL,
        "one head, output times 2": ONE,
        "noise of 1e-4": {"init": f"{STARTS}:nearly_equal"},
        "values apart": {"init": f"{STARTS}:equal_probs"},
        "dropout of probabilities": EQUAL | {"model.dropout.attention": 0.1},
    }
)
APART, MOVED = "weights/heads_apart", "weights/least_moved"
description = described(
    "Why do heads differ, and do heads that start equal stay equal?",
    "symmetry: equal weights have equal gradients",
    expect("equal", "exactly", 0, "heads that start equal end at a distance of {max}",
           number=APART),
    expect("equal", "at least", 1e-3,
           "while the array that moved least has moved by {min:.3f}", number=MOVED),
    expect("equal", "at most", 75, "and are worth one head: {max:.1f} % of the cases right"),
    expect("one head, output times 2", "at most", 1.001,
           "one head with its output times 2 has {ratio:.4f} of their loss", over="equal",
           number="loss"),
    *(expect(name, "at least", 0.01, f"{name}: they part to {{min:.2f}}", number=APART)
      for name in ("noise of 1e-4", "values apart", "dropout of probabilities")),
    expect("noise of 1e-4", "at least", 100, "with that noise {min:.1f} % are right"),
    expect("apart", "at least", 100, "with independent initial weights {min:.1f} %"),
)  # fmt: skip
