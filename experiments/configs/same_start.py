r"""Why do heads differ? Because they start apart: heads that start equal stay equal for ever.

    python -m experiments.sweep --config=experiments/configs/same_start.py --workdir=runs/same

Two heads whose weights are equal have equal outputs, so equal gradients, so equal updates: their
distance stays 0.0 to the bit while every weight moves, and the two are one head with its output
times 2. On the Endpoint Selection Problem (`two_heads_beat_one.py`) that costs the second head all
that it is worth: one head is right in 75 % of the cases at most, two heads that differ in all.
Whatever tells heads apart will do: a start of their own, a whisper of noise, different values under
equal scores (W_V and W_O apart), dropout of probabilities.

The control is exact: one head that starts as the first of the two did, with its output times 2,
under Adam, which does not see the size of a gradient, without clipping, which does.

Measured, three seeds, 2.2 minutes on 2 busy CPU cores: equal heads stay at a distance of 0.0 to the
bit while the array that moves least moves by 0.046 (root mean square), and are right in 49.4 to
50.0 % of the cases; the control has 1.0000 times their loss. A noise of 1e-4 of the size of the
weights ends at a distance of 0.20 to 0.22, values apart at 0.73 to 0.77, dropout at 0.42 to 0.47,
and all three are right in 100 %, as heads that start apart are.

Words after the colon: `tiny`.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from experiments.configs import byte_lm, two_heads_beat_one
from experiments.running.claims import Claim, Drawing, Expect

VALUES = two_heads_beat_one.VALUES | {
    "model.heads.num_heads": 2,
    "model.heads.head_dim": 16,
    "model.heads.biases": "",  # a key bias has no gradient, so it would not move
    "train.clip_norm": 0.0,
    "train.seeds": (0, 1, 2),
    "watch_heads": True,
}
VARIANTS = {"tiny": two_heads_beat_one.VARIANTS["tiny"] | {"train.learning_rate": 3e-2}}
EQUAL = {"same.values": "outputs"}
ARMS: dict[str, dict[str, Any]] = {
    "apart": {},
    "equal": EQUAL,
    "one head, output times 2": {
        "model.heads.num_heads": 1, "model.attention.output_scale": 2.0, "same.first_of": 2,
    },
    "noise of 1e-4": EQUAL | {"same.noise": 1e-4},
    "values apart": {"same.values": "probs"},
    "dropout of probabilities": EQUAL | {"model.dropout.attention": 0.1},
}  # fmt: skip
FREE = ("noise of 1e-4", "values apart", "dropout of probabilities")
APART, MOVED = "weights_heads_apart", "weights_least_moved"
CLAIM = Claim(
    question="Why do heads differ, and do heads that start equal ever part?",
    source="symmetry: equal weights have equal gradients",
    expects=(
        Expect("equal", "exactly", 0, "heads that start equal end at a distance of {most}",
               number=APART),
        Expect("equal", "at least", 1e-3,
               "while the array that moved least has moved by {least:.3f}", number=MOVED),
        Expect("equal", "at most", 75, "and are worth one head: {most:.1f} % of the cases right"),
        Expect("one head, output times 2", "at most", 1.001,
               "one head with its output times 2 has {ratio:.4f} of their loss", of="equal",
               number="heldout_loss"),
        *(Expect(name, "at least", 0.01, f"{name}: they part to {{least:.2f}}", number=APART)
          for name in FREE),
        Expect("noise of 1e-4", "at least", 100, "with that noise {least:.1f} % are right"),
        Expect("apart", "at least", 100, "as with heads that start apart, {least:.1f} %"),
    ),
    drawing=Drawing(
        "curves",
        "**Distance between the two heads while training.** Root mean square of the difference of "
        "their weights, of that of heads drawn apart at their size; 0 is equal to the bit. Line: "
        "mean over seeds; band: lowest to highest.",
        number="weights/heads_apart",
        label="distance between heads",
    ),
)  # fmt: skip


def get_config(arg: str = "") -> ConfigDict:
    """What all arms have in common: two heads on the complete graph."""
    return byte_lm.other_data(arg, "endpoint", "endpoints", VALUES, VARIANTS)


def sweep(add: Callable, arg: str = "") -> None:
    """Heads that start apart, equal, and nearly equal in every way."""
    for name, changes in ARMS.items():
        add(name, **changes)


claim = CLAIM.record
"""What is known beforehand."""
