r"""Can many narrow heads do what one full-rank head does? Not finding the farthest of some points.

    python -m experiments.sweep --config=experiments/configs/one_wide_beats_many_narrow.py \
        --workdir=runs/rank

Of points on a sphere, and for each of them, a layer of attention says the one that is farthest from
it (Amsel, Yehudai and Bruna, ICLR 2025, arXiv 2407.16153). One head as wide as the points does it:
scores of a large negative multiple of x_i . x_j. A head of a quarter of that width sees the points
through a projection of that rank, and no number of such heads makes up for it, unless it is
exponential in the dimension. No positions, no causal mask; a vector stands in the place of a word,
and a vector is the answer.

Words after the colon: `paper` (16 points in 64 dimensions, heads of 4: for a GPU), `tiny`.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from experiments.configs import byte_lm
from experiments.running.claims import Claim, Drawing, Expect

D, NARROW = 8, 4
"""The dimensions, and how many times narrower a narrow head is."""


def sized(dimensions: int) -> dict[str, Any]:
    """What follows the dimensions of the points."""
    names = ("data.dimensions", "model.vocab_size", "model.width", "model.pooled_classes")
    return dict.fromkeys(names, dimensions)


VALUES = sized(D) | {
    "model.kind": "encoder",
    "model.max_len": 16,
    "model.positions": "none",
    "model.readout": "none",
    "model.pooler": "each",
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.ffn_width": 0,
    "model.norm_kind": "rms",
    "model.norm_bias": False,
    "model.attention_biases": "",
    "train.length": 8,
    "train.batch_size": 128,
    "train.steps": 4000,
    "train.learning_rate": 3e-2,
    "train.final_learning_rate": 3e-4,
    "train.warmup_steps": 200,
    "train.weight_decay": 0.0,
    "train.optimizer": "adam",
    "train.log_every": 500,
    "train.eval_every": 500,
    "train.eval_batch_size": 256,
    "train.eval_windows": 0,
    "train.checkpoint_every": 4000,
}
VARIANTS = {
    "paper": sized(64) | {"train.length": 16, "train.steps": 100_000, "train.learning_rate": 1e-2},
    "tiny": {"data.heldout_rows": 32} | byte_lm.SHORTEST,
}
CLAIM = Claim(
    question="Can many narrow heads do what one full-rank head does?",
    source="Amsel, Yehudai and Bruna, ICLR 2025 (arXiv 2407.16153): a theorem, and its direction",
    expects=(
        Expect("one full-rank head", "at most", 10,
               "one full-rank head leaves {mean:.2f} % of the variance"),
        Expect("narrow heads, equal parameters", "at least", 4,
               "narrow heads of as many parameters leave {ratio:.0f} times as much",
               of="one full-rank head"),
        Expect("narrow heads, 64 times", "at least", 4,
               "narrow heads of 64 times as many parameters {ratio:.0f} times",
               of="one full-rank head"),
    ),
    drawing=Drawing(
        "bars",
        "**What the answers leave unexplained, by heads.** Mean ± standard deviation over seeds. "
        "Dashed: what needs no model.",
    ),
)  # fmt: skip


def get_config(arg: str = "") -> ConfigDict:
    """What all arms have in common: one full-rank head."""
    return byte_lm.other_data(arg, "regression", "farthest", VALUES, VARIANTS)


def sweep(add: Callable, arg: str = "") -> None:
    """One full-rank head, narrow ones of as many and of 64 times the parameters, a control."""
    paper = "paper" in arg.split(",")
    width, narrow = (64, 16) if paper else (D, NARROW)
    one = {"model.head_dim": width // narrow}
    more = narrow * (4 if "tiny" in arg.split(",") else 64)
    add("one full-rank head")
    add("narrow heads, equal parameters", **one, **{"model.num_heads": narrow})
    add("narrow heads, 64 times", **one, **{"model.num_heads": more})
    add(
        "narrow heads, feed-forward",
        **one,
        **{"model.num_heads": narrow, "model.ffn_width": 8 * width},
    )


def claim(arg: str = "") -> dict[str, Any]:
    """What is known beforehand."""
    return CLAIM.record()
