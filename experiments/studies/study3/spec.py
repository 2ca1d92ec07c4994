"""`Variant` and `Run`: what one run of the study trains, and how."""

import dataclasses
import functools
import math
from pathlib import Path

from attnlab import lab
from attnlab.heads import GroupedTied, HeadNorm, Latent, Layout, Standard, TensorProduct
from attnlab.models import FFN, Attention, ModelConfig, flops_per_token, match_budget
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
from experiments.studies.study3.copying import COPY, probe
from experiments.studies.study3.windows import FIRST_HALF, SECOND_HALF, StudyWindows

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
ADAMW_CENTRE = 0.0075
"""Best rate of AdamW with QK-norm at D = 64 in stage 0 of the second study: 0.0064 to 0.0087."""
KINDS = {
    "standard": "num_heads of head_dim, each with its own key and value",
    "fewer": "fewer heads",
    "gqa": "grouped-query",
    "gqa_double": "grouped-query, head_dim doubled",
    "mqa": "multi-query",
    "tied": "grouped, value = key",
    "grouped_tied": "grouped-tied",
    "mla": "multi-head latent",
    "tensor_product": "tensor product",
    "cla": "grouped-query, two layers share (CLA:2)",
}
"""Layouts of part E."""
SHARED = {
    "": "parts A to E: 4 layers that share nothing",
    "none": "nothing",
    "attention": "attention",
    "ffn": "FFN",
    "both": "attention and FFN",
}
"""What the layers of part F share; their sublayers are scaled by 1 / number of layers."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model and its training.

    Parts A to D have `num_heads` heads of `head_dim` and an FFN of 4 x width: with num_heads x
    head_dim = width the budget of the second study, in FLOPs and in parameters. The 4x64 of part C
    has the same FFN and so a larger attention. Of part E (`budget`) a layout keeps 1 / `cache` of
    the numbers of 8 heads of 8, and the FFN makes parameters equal; "flops": the steps make the
    FLOPs of the training equal, too. In part F (`shared`) each group of parameters is used by
    `repeats` layers, one after the other.
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
    kind: str = "standard"
    cache: int = 1
    budget: str = ""
    shared: str = ""
    repeats: int = 1
    num_layers: int = NUM_LAYERS

    @property
    def name(self) -> str:
        """Its fields but lengths and widths of parts A to D, for the name of a folder.

        >>> Variant(8, 8, kind="mla", cache=4, budget="parameters").name
        '8x8-D64-T128-rotary-muon-scratch-root-20-mla-4-parameters'
        """
        shape = f"{self.num_heads}x{self.head_dim}-D{self.width}-T{self.length}-{self.positions}"
        shape += f"-{self.optimizer}-{self.start}-{self.scale}-{self.bytes_per_parameter:.6g}"
        if self.budget:
            shape += f"-{self.kind}-{self.cache}-{self.budget}"
        return shape + (f"-{self.shared}-{self.repeats}-L{self.num_layers}" if self.shared else "")


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
        end = f"{self.text}-{self.replicate}-{self.seed}"
        rates = f"{self.learning_rate:.6g}-{self.first_rate:.6g}"
        return f"{self.part}-{self.role}-{self.variant.name}-{end}-{rates}"


def log_rate(variant: Variant) -> float:
    """ln of the rate by the fitted formula of the second study
    (docs/results/head_width/stage1.md), of standard heads that share nothing."""
    return (
        -3.953
        - 0.171 * math.log(variant.head_dim)
        + 0.024 * math.log(variant.num_heads)
        - 1.885 * math.log(variant.width / 64)
        - 0.588 * math.log(variant.bytes_per_parameter * _flops_ratio(variant) / 20)
        + 0.273 * math.log(variant.length / 128)
    )


def rate_centre(variant: Variant) -> float:
    """The centre of a tuning grid: of `log_rate`; one number for AdamW.

    >>> rate_centre(Variant(4, 16))
    0.0124
    """
    if variant.optimizer == "adamw_qk_norm":
        return ADAMW_CENTRE
    return float(f"{math.exp(log_rate(variant)):.3g}")


def cache_numbers(variant: Variant) -> int:
    """Numbers of part E's models that a cache keeps, a token and layer: 2 D / `cache`.

    >>> cache_numbers(Variant(8, 8, cache=4))
    32
    """
    return 2 * variant.width // variant.cache


def layout_of(variant: Variant) -> Layout:
    """The heads of a variant. `head_dim` and `num_heads` are those of the queries without the part
    that has positions alone (MLA, grouped-tied).

    >>> layout_of(Variant(8, 8, kind="mla", cache=4)).latent_dim
    24
    """
    n, h, numbers = variant.num_heads, variant.head_dim, cache_numbers(variant)
    rotary = numbers // 4
    if variant.kind == "mla":
        return Latent(
            num_heads=n, head_dim=h, latent_dim=numbers - rotary, rotary_dim=rotary, biases=("o",)
        )
    if variant.kind == "grouped_tied":
        groups = n // variant.cache
        size = (numbers - rotary) // groups
        return GroupedTied(
            num_heads=n, num_kv_heads=groups, value_dim=size, rotary_dim=rotary, biases=("o",)
        )
    if variant.kind == "tensor_product":
        rank = numbers // (2 * (n + h))
        return TensorProduct(num_heads=n, head_dim=h, key_rank=rank, value_rank=rank, biases=("o",))
    kept = {"tied": h, "cla": h}.get(variant.kind, 2 * h)  # numbers of a head, a layer of these
    tied = variant.kind == "tied"
    return Standard(
        num_heads=n,
        head_dim=h,
        num_kv_heads=numbers // kept if variant.budget else None,
        tie="kv" if tied else "",
        biases=("q", "k", "o") if tied else BIASES,
        scale={"root": None, "old": 0.25, "inverse": 4 / h}[variant.scale],
        qk_norm=HeadNorm("rms") if variant.optimizer == "adamw_qk_norm" else None,
    )


def plan_of(variant: Variant) -> str:
    """The sharing plan of a variant.

    >>> plan_of(Variant(4, 16, shared="ffn", repeats=4, num_layers=8))
    'attention=0,1,2,3,4,5,6,7 ffn=0,0,0,0,1,1,1,1'
    """
    if variant.kind == "cla":
        return f"cla:{variant.num_layers // 2}"
    if variant.shared in ("", "none"):
        return "separate"
    own = [str(i) for i in range(variant.num_layers)]
    groups = [str(i // variant.repeats) for i in range(variant.num_layers)]
    attention = own if variant.shared == "ffn" else groups
    ffn = own if variant.shared == "attention" else groups
    return f"attention={','.join(attention)} ffn={','.join(ffn)}"


@functools.cache
def model_config(variant: Variant) -> ModelConfig:
    """The model of a variant.

    >>> model_config(Variant(4, 64, scale="inverse")).heads.scale
    0.0625
    """
    scale = 1 / variant.num_layers if variant.shared else 1.0
    model = ModelConfig(
        width=variant.width,
        num_layers=variant.num_layers,
        heads=layout_of(variant),
        attention=Attention(output_scale=scale),
        ffn=FFN(width=4 * variant.width, output_scale=scale),
        max_len=variant.length,
        positions=POSITIONS[variant.positions],
        sharing=plan_of(variant),
    )
    if not variant.budget or variant == reference(variant):
        return model
    return match_budget(model, model_config(reference(variant)), "parameters").config


def reference(variant: Variant) -> Variant:
    """The multi-head attention that a layout of part E is compared with: 8 heads of D / 8."""
    size = {"num_heads": 8, "head_dim": variant.width // 8, "positions": "half"}
    more = {"kind": "standard", "cache": 1, "optimizer": "muon", "budget": "parameters"}
    return dataclasses.replace(variant, **size, **more)  # type: ignore[arg-type]


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
    return max(2, 2 * round(total * _flops_ratio(variant) / BATCH_TOKENS / 2))


def _flops_ratio(variant: Variant) -> float:
    """By how much its steps are more, for FLOPs of the training equal to those of `reference`."""
    if variant.budget != "flops":
        return 1.0
    ours, theirs = (
        flops_per_token(model_config(one), one.length) for one in (variant, reference(variant))
    )
    return theirs / ours


def train_config(run: Run) -> TrainConfig:
    """The whole training of a run: warm-up 5 %, cosine to a tenth, clipping at 1."""
    variant, rate, steps = run.variant, run.learning_rate, num_steps(run.variant)
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
        evaluation=EvaluationConfig(every=steps, batch_size=32, windows=64, curve_windows=64),
        log_every=max(1, steps // 10),
        checkpoint_every=max(1, min(480, steps // 4)),
    )


def run_spec(run: Run, data: Path, start: Path | None = None) -> lab.RunSpec:
    """A run for `lab.sweep`.

    Args:
      run: the run.
      data: the folder of the texts.
      start: the folder of the parameters of `half_spec`, where the run has a reset half way: it is
        the second half.
    """
    train, skipped = train_config(run), 0
    if run.variant.start != "scratch":
        skipped = train.steps // 2
        train = _half(train, SECOND_HALF)
    experiment = lab.Experiment(
        model=model_config(run.variant),
        train=train,
        data=StudyWindows(name=run.text, folder=str(data), skipped=skipped),
        task=COPY,
        start=str(start) if start else "",
        callbacks=(probe,) if run.part == "D" else (),
    )
    return lab.RunSpec(run.id, experiment, run.seed, {"part": run.part, "role": run.role})


def half_spec(run: Run, data: Path) -> lab.RunSpec:
    """The training before the reset of a run. Several runs have the same one."""
    before = narrow_variant(run.variant)
    one = dataclasses.replace(
        run, part="half", role="first", variant=before, learning_rate=run.first_rate, first_rate=0.0
    )
    whole = run_spec(one, data)
    train = _half(whole.config.train, FIRST_HALF)
    return dataclasses.replace(whole, config=dataclasses.replace(whole.config, train=train))


def _half(train: TrainConfig, schedule: str) -> TrainConfig:
    return dataclasses.replace(
        train,
        steps=train.steps // 2,
        schedule=dataclasses.replace(train.schedule, name=schedule),
    )
