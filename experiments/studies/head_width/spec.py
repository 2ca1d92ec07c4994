"""`Variant` and `StudyRun`: what one run of the head-width study trains, and how."""

import dataclasses
from pathlib import Path
from typing import Any

from attnlab import lab
from attnlab.heads import HeadNorm, Standard, make_layout
from attnlab.heads.layout import Bias
from attnlab.models import FFN, Compute, ModelConfig, Rotary, match_budget
from attnlab.models.budget import Budget
from attnlab.training import EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from experiments.studies.head_width.texts import StudyText

NUM_LAYERS = 4
BATCH_TOKENS = 2048
"""Tokens of a batch, at every length."""
BIASES: tuple[Bias, ...] = ("q", "k", "v", "o")
PARAMETRIZATIONS = {
    "one_rate": "AdamW with one learning rate",
    "fan_in": "AdamW, learning rate per matrix x 64 / fan-in",
    "qk_norm": "AdamW with one learning rate, RMS norm of q and k",
    "muon": "Muon, AdamW for embeddings and vectors",
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model of the study: `num_heads` heads of `head_dim` in a residual stream of `width`.

    The FFN width is solved so that the model has the budget ("flops" per token at `length`, or
    "parameters") of the reference: heads of 16, num_heads x 16 = width, FFN 4 x width, layers that
    share nothing.
    """

    num_heads: int
    head_dim: int
    layout: str = "standard"
    width: int = 64
    length: int = 128
    plan: str = "separate"
    budget: Budget = "flops"

    @property
    def point(self) -> str:
        """ "4x16": num_heads x head_dim, with the layout where it is not standard."""
        name = f"{self.num_heads}x{self.head_dim}"
        return name if self.layout == "standard" else f"{name}-{self.layout}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyRun(Variant):
    """One run of a variant. Its `id` names its folder and its row."""

    stage: int
    parametrization: str
    text: str
    seed: int
    learning_rate: float
    bytes_per_parameter: float = 20.0

    @property
    def id(self) -> str:
        """Every field, for the name of a folder.

        >>> StudyRun(4, 16, stage=0, parametrization="one_rate", text="python", seed=7,
        ...          learning_rate=0.005).id
        's0-4x16-D64-T128-separate-flops-one_rate-python-7-0.005-20'
        """
        plan = self.plan.replace(":", "")
        shape = f"{self.point}-D{self.width}-T{self.length}-{plan}-{self.budget}"
        run = f"{self.parametrization}-{self.text}-{self.seed}-{self.learning_rate:.6g}"
        return f"s{self.stage}-{shape}-{run}-{self.bytes_per_parameter:g}"


def reference_parameters(width: int) -> int:
    """Parameters of the reference without embeddings, biases and norms: 12 L D^2.

    >>> reference_parameters(64)
    196608
    """
    return 12 * NUM_LAYERS * width**2


def num_steps(run: StudyRun) -> int:
    """Steps of `BATCH_TOKENS` that read bytes_per_parameter x `reference_parameters` bytes."""
    total = run.bytes_per_parameter * reference_parameters(run.width)
    return max(2, round(total / BATCH_TOKENS))


def model_config(
    variant: Variant,
    parametrization: str = "one_rate",
    num_layers: int = NUM_LAYERS,
    compute: Compute = Compute(),  # noqa: B008
) -> ModelConfig:
    """The model of a variant, its FFN width solved.

    >>> model_config(Variant(3, 32)).ffn.width
    128

    Raises ValueError where the heads alone cost more than the reference.
    """
    reference = ModelConfig(
        width=variant.width,
        num_layers=num_layers,
        heads=Standard(
            num_heads=variant.width // 16 or 1, head_dim=min(16, variant.width), biases=BIASES
        ),
        ffn=FFN(width=4 * variant.width),
        max_len=variant.length,
        positions=Rotary(),
        compute=compute,
    )
    heads = make_layout(
        variant.layout, num_heads=variant.num_heads, head_dim=variant.head_dim, biases=BIASES
    )
    config = dataclasses.replace(reference, heads=heads, sharing=variant.plan)
    solved = match_budget(config, reference, variant.budget, length=variant.length).config
    if parametrization != "qk_norm":
        return solved
    normed = dataclasses.replace(solved.heads, qk_norm=HeadNorm("rms"))  # type: ignore[call-arg]
    return dataclasses.replace(solved, heads=normed)


def make_training(optimizer: OptimizerConfig, steps: int, **fields: Any) -> TrainConfig:
    """Warm-up 5 %, cosine to a tenth, clipping at 1; `fields` are those of `TrainConfig`."""
    schedule = ScheduleConfig(
        final_learning_rate=optimizer.learning_rate / 10, warmup_steps=steps // 20
    )
    return TrainConfig(steps=steps, optimizer=optimizer, schedule=schedule, **fields)


def train_config(run: StudyRun) -> TrainConfig:
    """The training of a run."""
    steps, length = num_steps(run), run.length
    optimizer = OptimizerConfig(
        name="muon" if run.parametrization == "muon" else "adamw",
        learning_rate=run.learning_rate,
        base_fan_in=64 if run.parametrization == "fan_in" else None,
    )
    return make_training(
        optimizer,
        steps,
        batch_size=BATCH_TOKENS // length,
        length=length,
        seeds=(run.seed,),
        evaluation=EvaluationConfig(every=steps, batch_size=32, windows=64, curve_windows=64),
        log_every=max(1, steps // 10),
        checkpoint_every=max(1, min(480, steps // 2)),
    )


def run_spec(run: StudyRun, data: Path) -> lab.RunSpec:
    """A run for `lab.sweep`; `data` is the folder of the texts. Its tags are its fields."""
    experiment = lab.Experiment(
        model=model_config(run, run.parametrization),
        train=train_config(run),
        data=StudyText(name=run.text, folder=str(data)),
    )
    tags = dataclasses.asdict(run)
    del tags["seed"]
    return lab.RunSpec(run.id, experiment, run.seed, tags)
