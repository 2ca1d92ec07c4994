"""The head-width study on one GPU: larger models, all texts mixed, several seeds in one program.

D = 256, 6 layers, T = 256, 94 MB of the eight texts together (each about 1.6 times), in bfloat16.
Each program trains the seeds of a variant at one learning rate and scores the held-out part of
every text.

D = 256 is outside what the formula of stage 1 was fitted on. So 4 heads of 64 are first trained
at five multiples of its rate for an eighth of the bytes; the multiple that validation chooses is
used for every variant, halved and doubled too.
"""

import csv
import dataclasses
import functools
import hashlib
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from attnlab.data.dataset import Batch, Dataset
from attnlab.data.text import Corpus, dataset_of_corpus, sample
from attnlab.heads import Standard
from attnlab.lab.head_width.rates import RateFormula, parabola_minimum
from attnlab.lab.head_width.rows import check_columns, read_flat, write_records
from attnlab.lab.head_width.run import HELDOUT_BYTES, VALIDATION_BYTES, Place, scored_windows
from attnlab.lab.head_width.spec import BIASES, Variant
from attnlab.lab.head_width.texts import TEXTS, load_text
from attnlab.lab.ngrams import target_bits
from attnlab.models import (
    FFN,
    Compute,
    ModelConfig,
    Rotary,
    flops_per_token,
    match_budget,
    matrix_axes,
)
from attnlab.models import num_parameters as count_parameters
from attnlab.training import sharding
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import (
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from attnlab.training.fit import FitResult, fit
from attnlab.training.interrupts import NonFiniteLoss
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.optimizers import make_optimizer
from attnlab.training.step import Evaluator

WIDTH, NUM_LAYERS, LENGTH, BATCH = 256, 6, 256, 32
TRAINING_BYTES = 94e6
SEEDS = (0, 1)
FACTORS = (0.5, 1.0, 2.0)
"""Learning rates, in multiples of the tuned one."""
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
        return f"{self.variant.point}-{plan}-{self.learning_rate:g}-{self.scale:g}"

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
    return float(np.mean([s.validation_bits for s in scores if _key_of(s) == _key(program)]))


def programs(formula: RateFormula, multiple: float, scale: float = 1.0) -> list[Program]:
    """All programs: `VARIANTS` at `FACTORS` times `multiple` times the rate of the formula."""
    return [
        Program(v, float(f"{formula_rate(formula, v, scale) * multiple * factor:.4g}"), scale)
        for v in VARIANTS
        for factor in FACTORS
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


class Mixture:
    """The training parts of all texts one behind the other, and the scored windows of each.

    Args:
      place: with the folder of the texts.
      scale: share of the windows that a study of full size scores.
    """

    def __init__(self, place: Place, scale: float = 1.0) -> None:
        texts = {name: load_text(name, place.data) for name in TEXTS}
        together = hashlib.sha256("".join(t.sha256 for t in texts.values()).encode()).hexdigest()
        train = np.concatenate([text.train for text in texts.values()])
        heldout, validation = (
            max(4 * LENGTH, round(scale * most)) for most in (HELDOUT_BYTES, VALIDATION_BYTES)
        )
        self._ngrams: dict[int, dict[str, dict[int, float]]] = {}
        self.heldout = {n: self._windows(t.heldout, heldout) for n, t in texts.items()}
        kept = [self._windows(t.validation, validation) for t in texts.values()]
        self.corpus = Corpus("mixture", train, texts["web"].heldout, together)
        rows = {name: np.concatenate([one[name] for one in kept]) for name in kept[0]}
        self.dataset: Dataset = dataclasses.replace(
            dataset_of_corpus(self.corpus, LENGTH),
            validation=functools.partial(_evenly, rows),
        )

    @staticmethod
    def _windows(text: np.ndarray | None, most: int) -> Batch:
        assert text is not None
        return scored_windows(text, LENGTH, most)

    def ngrams(self, steps: int) -> dict[str, dict[int, float]]:
        """Bits per byte of n-grams by text and bytes of context, counted on the first seed."""
        if steps not in self._ngrams:
            draw = functools.partial(sample, self.corpus.train, LENGTH, BATCH, seed=SEEDS[0])
            train = np.concatenate([draw(step=i) for i in range(1, steps + 1)]).astype(np.uint8)
            rows = {name: one["tokens"].astype(np.uint8) for name, one in self.heldout.items()}
            # All texts at once, since counting takes the time.
            bits = target_bits(train, np.concatenate(list(rows.values())))
            ends = np.cumsum([len(one) for one in rows.values()])[:-1]
            by_text = {k: np.split(of_order, ends) for k, of_order in bits.items()}
            self._ngrams[steps] = {
                name: {k: float(parts[i][self.heldout[name]["valid"]].mean())
                       for k, parts in by_text.items()}
                for i, name in enumerate(rows)
            }  # fmt: skip
        return self._ngrams[steps]


def _evenly(rows: Batch, count: int) -> Batch:
    """`count` of the rows, evenly spaced; 0: all."""
    total = len(rows["tokens"])
    places = np.linspace(0, total - 1, min(count or total, total)).round().astype(int)
    return {name: a[places] for name, a in rows.items()}


def train(program: Program, mixture: Mixture, folder: Path) -> FitResult:
    """Trains all seeds of a program, from the newest checkpoint in the folder if any."""
    config, model = train_config(program), model_config(program.variant)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        Recorder(folder, config.seeds) as recorder,
        Checkpoints(folder / "checkpoints", say=recorder.say) as checkpoints,
    ):
        return fit(
            model.build(),
            OBJECTIVES["causal_lm"],
            make_optimizer(config, matrix_axes(model)),
            config,
            mixture.dataset,
            recorder=recorder,
            checkpoints=checkpoints,
        )


def run_program(program: Program, mixture: Mixture, place: Place) -> list[TextScore]:
    """Trains a program in `place.work` and scores every text; one that diverged scores infinity."""
    began, seconds = time.perf_counter(), 0.0
    validation = np.full(len(program.seeds), np.inf)
    heldout = dict.fromkeys(mixture.heldout, validation)
    model = model_config(program.variant)
    try:
        fitted = train(program, mixture, place.work / "gpu" / program.id)
    except NonFiniteLoss:
        seconds = time.perf_counter() - began
    else:
        seconds, validation = fitted.wall_seconds, fitted.validation["bits_per_byte"]
        objective = OBJECTIVES["causal_lm"].bind(mixture.dataset.sizes)
        mesh = sharding.data_mesh(batch_size=BATCH)
        evaluator = Evaluator(model.build(), objective, mesh, BATCH)
        for text, rows in mixture.heldout.items():
            heldout[text] = evaluator(fitted.state.params, rows)["bits_per_byte"]
    sizes = ProgramSizes(
        ffn_width=model.ffn.width,
        parameters=count_parameters(model),
        flops_per_token=flops_per_token(model, LENGTH),
        steps=program.steps,
    )
    device = jax.local_devices()[0].device_kind
    origin = ProgramOrigin(round(seconds, 1), device, place.commit)
    point, plan, rate = program.variant.point, program.variant.plan, program.learning_rate
    found: list[TextScore] = []
    for text, grams in mixture.ngrams(program.steps).items():
        for seed, bits, kept in zip(program.seeds, heldout[text], validation, strict=True):
            run = ProgramSeed(point, plan, rate, seed)
            scores = float(bits), float(kept), grams[2], grams[3], grams[4]
            found.append(TextScore(run, text, *scores, sizes, origin))
    return found


def measured_speed(mixture: Mixture, steps: int) -> float:
    """FLOP/s of training all seeds of 4 heads of 64, without compilation; nothing is kept."""
    program = Program(VARIANTS[2], 0.01, steps * BATCH * LENGTH / TRAINING_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        fitted = train(program, mixture, Path(folder))
    tokens = BATCH * LENGTH * len(program.seeds) * program.steps
    return fitted.tokens_per_second * program_flops(program) / tokens


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
    """The programs that have no scores in the file yet."""
    done = set(map(_key_of, scores))
    return [program for program in wanted if _key(program) not in done]


def _key(program: Program) -> tuple[str, str, float, int]:
    variant = program.variant
    return variant.point, variant.plan, program.learning_rate, program.steps


def _key_of(score: TextScore) -> tuple[str, str, float, int]:
    return score.run.point, score.run.plan, score.run.learning_rate, score.sizes.steps
