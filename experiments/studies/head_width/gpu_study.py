"""The head-width study on one GPU: larger models, all texts mixed, several seeds in one program.

D = 256, 6 layers, T = 256, 94 MB of the eight texts together (each about 1.6 times), in bfloat16.
Each program trains the seeds of a variant at one learning rate and scores the held-out part of
every text.

D = 256 is outside what the formula of stage 1 was fitted on. So 4 heads of 64 are first trained
at five multiples of its rate for an eighth of the bytes; the multiple that validation chooses is
used for every variant, halved, doubled and fourfold too. At the best of these factors the five
variants with N h = D are then trained from four seeds more.
"""

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlab.heads import Standard
from attnlab.models import (
    FFN,
    Compute,
    ModelConfig,
    Rotary,
    flops_per_token,
    match_budget,
)
from attnlab.training import (
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from experiments.studies.head_width.rates import RateFormula, parabola_minimum
from experiments.studies.head_width.rows import check_columns, read_flat, write_records
from experiments.studies.head_width.spec import BIASES, Variant

WIDTH, NUM_LAYERS, LENGTH, BATCH = 256, 6, 256, 32
TRAINING_BYTES = 94e6
SEEDS = (0, 1)
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Learning rates, in multiples of the tuned one; `factors` has those of a variant."""
ADDED_SEEDS = (2, 3, 4, 5)
"""Of the variants with N h = D, at the best of `FACTORS`."""
TUNING_SEEDS = (8,)
TUNING_FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""In multiples of the rate of the formula."""
TUNING_SHARE = 0.125
"""Of the bytes of a program."""
VARIANTS = (
    *(Variant(WIDTH // h, h, width=WIDTH, length=LENGTH) for h in (16, 32, 64, 128, 256)),
    Variant(6, 64, width=WIDTH, length=LENGTH),
    Variant(4, 64, width=WIDTH, length=LENGTH, plan="albert"),
    Variant(4, 64, width=WIDTH, length=LENGTH, plan="cycle:2"),
)
"""N h = D at five head widths, N h = 3D/2 at 64, and two sharing plans at 64."""
TUNED = VARIANTS[2]


@dataclasses.dataclass(frozen=True)
class Program:
    """One training of all seeds: a variant at a learning rate."""

    variant: Variant
    learning_rate: float
    scale: float = 1.0
    """Share of `TRAINING_BYTES`."""
    seeds: tuple[int, ...] = SEEDS

    @property
    def id(self) -> str:
        """Names its folder."""
        plan = self.variant.plan.replace(":", "")
        seeds = "" if self.seeds == SEEDS else f"-seeds{self.seeds[0]}"
        return f"{self.variant.point}-{plan}-{self.learning_rate:g}-{self.scale:g}{seeds}"

    @property
    def steps(self) -> int:
        """Steps of `BATCH` windows of T bytes."""
        return max(2, round(self.scale * TRAINING_BYTES / (BATCH * LENGTH)))


@dataclasses.dataclass(frozen=True)
class ProgramSeed:
    """One seed of a program."""

    point: str
    plan: str
    learning_rate: float
    seed: int


@dataclasses.dataclass(frozen=True)
class ProgramSizes:
    """The size of the model and of its training."""

    ffn_width: int
    parameters: int
    flops_per_token: int
    steps: int


@dataclasses.dataclass(frozen=True)
class ProgramOrigin:
    """Where a score comes from. Seconds are of the training of all seeds."""

    seconds: float
    device: str
    commit: str


@dataclasses.dataclass(frozen=True)
class TextScore:
    """Held-out bits per byte of one seed of a program on one text: a line of the CSV file, the
    fields of every part side by side."""

    run: ProgramSeed
    text: str
    heldout_bits: float
    validation_bits: float
    """Of the validation parts of all texts together."""
    ngram3: float
    """Bits per byte of n-grams of the bytes that were trained on."""
    ngram4: float
    ngram5: float
    sizes: ProgramSizes
    origin: ProgramOrigin


def formula_rate(formula: RateFormula, variant: Variant, scale: float) -> float:
    """The rate of stage 1's formula at the bytes per parameter of this scale."""
    each = scale * TRAINING_BYTES / (12 * NUM_LAYERS * WIDTH**2)
    return formula.rate(variant, each)


def tuning_programs(formula: RateFormula, scale: float = 1.0) -> list[Program]:
    """4 heads of 64 at `TUNING_FACTORS` times the rate of the formula."""
    share = TUNING_SHARE * scale
    rate = formula_rate(formula, TUNED, share)
    return [
        Program(TUNED, float(f"{rate * factor:.4g}"), share, TUNING_SEEDS)
        for factor in TUNING_FACTORS
    ]


def tuned_multiple(
    formula: RateFormula, scores: Sequence["TextScore"], scale: float = 1.0
) -> float | None:
    """Best rate over that of the formula: the minimum of the parabola in ln r through the best of
    the tuning programs and those beside it, by validation bits; None where one has no scores."""
    wanted = tuning_programs(formula, scale)
    if left(wanted, scores):
        return None
    bits = {p.learning_rate: _validation(p, scores) for p in wanted}
    log_rate = parabola_minimum(bits).log_rate
    return math.exp(log_rate) / formula_rate(formula, TUNED, TUNING_SHARE * scale)


def _validation(program: Program, scores: Sequence["TextScore"]) -> float:
    return float(np.mean([s.validation_bits for s in scores if _key_of(s) in _keys(program)]))


def fills_width(variant: Variant) -> bool:
    """Is N h = D, and nothing shared?"""
    return variant.num_heads * variant.head_dim == WIDTH and variant.plan == "separate"


def factors(variant: Variant) -> tuple[float, ...]:
    """Those of `FACTORS` at which a variant is trained: the lowest only where N h = D."""
    return FACTORS if fills_width(variant) else FACTORS[1:]


def programs(formula: RateFormula, multiple: float, scale: float = 1.0) -> list[Program]:
    """`VARIANTS` at their `factors` times `multiple` times the rate of the formula."""
    return [
        Program(v, _rate(formula, v, multiple * factor, scale), scale)
        for v in VARIANTS
        for factor in factors(v)
    ]


def _rate(formula: RateFormula, variant: Variant, multiple: float, scale: float) -> float:
    return float(f"{formula_rate(formula, variant, scale) * multiple:.4g}")


def best_factor(
    formula: RateFormula, multiple: float, scores: Sequence["TextScore"], scale: float = 1.0
) -> float | None:
    """Which of `FACTORS` has the lowest validation bits, mean over the variants with N h = D; None
    where one of their programs has no scores."""
    bits = {}
    for factor in FACTORS:
        wanted = _at_factor(formula, multiple, factor, scale, SEEDS)
        if left(wanted, scores):
            return None
        bits[factor] = float(np.mean([_validation(program, scores) for program in wanted]))
    return min(bits, key=bits.__getitem__)


def seed_programs(
    formula: RateFormula, multiple: float, factor: float, scale: float = 1.0
) -> list[Program]:
    """The variants with N h = D at `best_factor`, from `ADDED_SEEDS`."""
    return _at_factor(formula, multiple, factor, scale, ADDED_SEEDS)


def _at_factor(
    formula: RateFormula, multiple: float, factor: float, scale: float, seeds: tuple[int, ...]
) -> list[Program]:
    return [
        Program(v, _rate(formula, v, multiple * factor, scale), scale, seeds)
        for v in VARIANTS
        if fills_width(v)
    ]


def model_config(variant: Variant) -> ModelConfig:
    """The model of a variant: the FLOPs per token of 16 heads of 16 with an FFN of 4 D.

    >>> model_config(VARIANTS[5]).ffn.width
    640
    """
    heads = Standard(num_heads=WIDTH // 16, head_dim=16, biases=BIASES)
    reference = ModelConfig(
        width=WIDTH, num_layers=NUM_LAYERS, max_len=LENGTH, heads=heads,
        ffn=FFN(width=4 * WIDTH), positions=Rotary(),
        compute=Compute(dtype="bfloat16", remat=False),
    )  # fmt: skip
    made = dataclasses.replace(heads, num_heads=variant.num_heads, head_dim=variant.head_dim)
    config = dataclasses.replace(reference, heads=made, sharing=variant.plan)
    return match_budget(config, reference, "flops", length=LENGTH).config


def train_config(program: Program) -> TrainConfig:
    """As the registered runs: Muon, warm-up 5 %, cosine to a tenth."""
    steps = program.steps
    return TrainConfig(
        steps=steps,
        batch_size=BATCH,
        length=LENGTH,
        seeds=program.seeds,
        optimizer=OptimizerConfig(name="muon", learning_rate=program.learning_rate),
        schedule=ScheduleConfig(
            final_learning_rate=program.learning_rate / 10, warmup_steps=steps // 20
        ),
        evaluation=EvaluationConfig(every=steps, batch_size=BATCH, windows=1, curve_windows=64),
        log_every=max(1, steps // 20),
        checkpoint_every=max(1, steps // 4),
    )


def program_flops(program: Program) -> float:
    """FLOPs of a training of all seeds: three forward passes of each."""
    tokens = program.steps * BATCH * LENGTH * len(program.seeds)
    return 3.0 * flops_per_token(model_config(program.variant), LENGTH) * tokens


def read_scores(path: Path) -> list[TextScore]:
    """The lines of a CSV file of `TextScore`s, none where there is no file.

    Raises WrongRows for a file of something else.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        check_columns(path, reader.fieldnames or [], TextScore)
        return [read_flat(TextScore, line) for line in reader]


def append_scores(path: Path, scores: Sequence[TextScore]) -> None:
    """Adds one or more lines to the file; a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, [*read_scores(path), *scores])


def left(wanted: Sequence[Program], scores: Sequence[TextScore]) -> list[Program]:
    """The programs of which a seed has no scores in the file yet."""
    done = set(map(_key_of, scores))
    return [program for program in wanted if not _keys(program) <= done]


Key = tuple[str, str, float, int, int]


def _keys(program: Program) -> set[Key]:
    variant, rate = program.variant, program.learning_rate
    return {(variant.point, variant.plan, rate, program.steps, seed) for seed in program.seeds}


def _key_of(score: TextScore) -> Key:
    run = score.run
    return run.point, run.plan, run.learning_rate, score.sizes.steps, run.seed
