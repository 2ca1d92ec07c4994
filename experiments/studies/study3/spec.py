"""`Variant` and `Run`: what one run of the study trains, and how."""

import dataclasses
import math

from attnlab.heads import HeadNorm, Standard
from attnlab.models import FFN, ModelConfig
from attnlab.models.specs import Learned, NoPositions, Positions, Relative, Rotary
from attnlab.training import (
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from experiments.studies.head_width.spec import (
    BATCH_TOKENS,
    BIASES,
    NUM_LAYERS,
    reference_parameters,
)

POSITIONS: dict[str, Positions] = {
    "rotary": Rotary(),
    "rotary100": Rotary(base=100.0),
    "half": Rotary(fraction=0.5),
    "t5": Relative(),
    "learned": Learned(),
    "none": NoPositions(),
}
OPTIMIZERS = {
    "muon": "Muon, q, k and v joint over heads",
    "muon_per_head": "Muon, q, k and v of each head by itself",
    "adamw_qk_norm": "AdamW, RMS norm of q and k",
}
SCALES = {
    "root": "1/sqrt(h)",
    "old": "1/sqrt(16), that of 4x16",
    "inverse": "4/h: 1/h, normalized to equal 1/sqrt(h) at h = 16",
}
STARTS = {
    "scratch": "one training",
    "reset": "optimizer state reset half way",
    "converted": "4x16 half way, then converted exactly, optimizer state reset",
}
FACTORS = (0.6, 1.0, 1.7)
"""Learning rates of a tuning grid, as multiples of its centre."""
ADAMW_CENTRE = 0.0075
"""Best rate of AdamW with QK-norm at D = 64 in stage 0 of the second study: 0.0064 to 0.0087."""
PROBES = 20
"""Evaluations of the repeated-bytes probe in a run of part D."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model and its training: `num_heads` heads of `head_dim`, FFN 4 x width.

    With num_heads x head_dim = width this is the budget of the second study, in FLOPs and in
    parameters. The 4x64 of part C has the same FFN and so a larger attention.
    """

    num_heads: int
    head_dim: int
    width: int = 64
    length: int = 128
    positions: str = "rotary"
    optimizer: str = "muon"
    start: str = "scratch"
    scale: str = "root"
    bytes_per_parameter: float = 20.0


@dataclasses.dataclass(frozen=True)
class Run:
    """One run. Its `id` names its folder and its row.

    Attributes:
      part: of `parts.PARTS`.
      role: "tuning" chooses learning rates by validation bits; "judged" is scored on held-out bits.
      variant: what is trained.
      text: one of the texts of the second study.
      replicate: 0, or the number of a further seed.
      seed: of initial weights and batches.
      learning_rate: the peak of the schedule (after the reset, where there is one).
      first_rate: the peak before the reset; 0 where there is none.
    """

    part: str
    role: str
    variant: Variant
    text: str
    replicate: int
    seed: int
    learning_rate: float
    first_rate: float = 0.0

    @property
    def id(self) -> str:
        """Every field.

        >>> Run("A", "judged", Variant(4, 16), "python", 0, 7, 0.0127).id
        'A-judged-4x16-D64-T128-rotary-muon-scratch-root-20-python-0-7-0.0127-0'
        """
        v = self.variant
        shape = f"{v.num_heads}x{v.head_dim}-D{v.width}-T{v.length}-{v.positions}-{v.optimizer}"
        shape += f"-{v.start}-{v.scale}-{v.bytes_per_parameter:g}"
        end = f"{self.text}-{self.replicate}-{self.seed}"
        return (
            f"{self.part}-{self.role}-{shape}-{end}-{self.learning_rate:.6g}-{self.first_rate:.6g}"
        )


def rate_centre(variant: Variant) -> float:
    """The centre of a tuning grid: the fitted formula of the second study
    (docs/results/head_width/stage1.md), of standard heads that share nothing; one number for AdamW.

    >>> rate_centre(Variant(4, 16))
    0.0124
    """
    if variant.optimizer == "adamw_qk_norm":
        return ADAMW_CENTRE
    total = (
        -3.953
        - 0.171 * math.log(variant.head_dim)
        + 0.024 * math.log(variant.num_heads)
        - 1.885 * math.log(variant.width / 64)
        - 0.588 * math.log(variant.bytes_per_parameter / 20)
        + 0.273 * math.log(variant.length / 128)
    )
    return float(f"{math.exp(total):.3g}")


def model_config(variant: Variant) -> ModelConfig:
    """The model of a variant.

    >>> model_config(Variant(4, 64, scale="inverse")).heads.scale
    0.0625
    """
    scale = {"root": None, "old": 0.25, "inverse": 4 / variant.head_dim}[variant.scale]
    qk_norm = HeadNorm("rms") if variant.optimizer == "adamw_qk_norm" else None
    return ModelConfig(
        width=variant.width,
        num_layers=NUM_LAYERS,
        heads=Standard(
            num_heads=variant.num_heads,
            head_dim=variant.head_dim,
            biases=BIASES,
            scale=scale,
            qk_norm=qk_norm,
        ),
        ffn=FFN(width=4 * variant.width),
        max_len=variant.length,
        positions=POSITIONS[variant.positions],
    )


def narrow_variant(variant: Variant) -> Variant:
    """The model before the reset: 4x16 of a converted one, else the variant, from scratch."""
    if variant.start != "converted":
        return dataclasses.replace(variant, start="scratch")
    return dataclasses.replace(variant, start="scratch", scale="root", head_dim=16)


def num_steps(variant: Variant) -> int:
    """Steps that read bytes_per_parameter x 12 L D^2 bytes; even, so that they can be halved.

    >>> num_steps(Variant(4, 16)), num_steps(Variant(2, 16, width=32))
    (1920, 480)
    """
    total = variant.bytes_per_parameter * reference_parameters(variant.width)
    return max(2, 2 * round(total / BATCH_TOKENS / 2))


def train_config(run: Run, *, rate: float | None = None) -> TrainConfig:
    """The whole training of a run: warm-up 5 %, cosine to a tenth, clipping at 1.

    Args:
      run: the run.
      rate: in place of its learning rate.
    """
    variant, rate = run.variant, run.learning_rate if rate is None else rate
    steps = num_steps(variant)
    every = max(1, steps // PROBES) if run.part == "D" else steps
    return TrainConfig(
        steps=steps,
        batch_size=BATCH_TOKENS // variant.length,
        length=variant.length,
        seeds=(run.seed,),
        optimizer=OptimizerConfig(
            name="adamw" if variant.optimizer == "adamw_qk_norm" else "muon",
            learning_rate=rate,
            per_head=variant.optimizer == "muon_per_head",
        ),
        schedule=ScheduleConfig(final_learning_rate=rate / 10, warmup_steps=steps // 20),
        evaluation=EvaluationConfig(every=every, batch_size=32, windows=64, curve_windows=64),
        log_every=max(1, steps // 10),
        checkpoint_every=max(1, min(480, steps // 4)),
    )
