"""The head-width study on one GPU: larger models, all texts mixed, several seeds in one program.

D = 256, 6 layers, T = 256, 94 MB of the eight texts together (each about 1.6 times). Each program
trains four seeds of a variant at one learning rate and scores the held-out part of every text.
The learning rates are those of the formula that stage 1 fitted, times 0.8 and 1.25; D = 256 is
outside what it was fitted on.
"""

import csv
import dataclasses
import functools
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from attnlab.data.dataset import Batch, Dataset
from attnlab.data.text import Corpus, dataset_of_corpus, sample
from attnlab.heads import Standard
from attnlab.lab.head_width.rates import RateFormula
from attnlab.lab.head_width.rows import check_columns, read_flat, write_records
from attnlab.lab.head_width.run import HELDOUT_BYTES, VALIDATION_BYTES, Place, scored_windows
from attnlab.lab.head_width.spec import BIASES, Variant
from attnlab.lab.head_width.texts import TEXTS, load_text
from attnlab.lab.ngrams import witten_bell
from attnlab.models import FFN, ModelConfig, Rotary, flops_per_token, match_budget, matrix_axes
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
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.optimizers import make_optimizer
from attnlab.training.step import Evaluator

WIDTH, NUM_LAYERS, LENGTH, BATCH = 256, 6, 256, 32
TRAINING_BYTES = 94e6
SEEDS = (0, 1, 2, 3)
FACTORS = (0.8, 1.25)
"""Learning rates, in multiples of the fitted one."""
VARIANTS = (
    *(Variant(WIDTH // h, h, width=WIDTH, length=LENGTH) for h in (16, 32, 64, 128, 256)),
    Variant(6, 64, width=WIDTH, length=LENGTH),
    Variant(4, 64, width=WIDTH, length=LENGTH, plan="albert"),
    Variant(4, 64, width=WIDTH, length=LENGTH, plan="cycle:2"),
)
"""N h = D at five head widths, N h = 3D/2 at 64, and two sharing plans at 64."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One training of all seeds: a variant at a learning rate."""

    variant: Variant
    learning_rate: float
    scale: float = 1.0
    """Share of `TRAINING_BYTES`."""

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
    ngram3: float
    """Bits per byte of n-grams of the bytes that were trained on."""
    ngram4: float
    ngram5: float
    sizes: ProgramSizes
    origin: ProgramOrigin


def programs(formula: RateFormula, scale: float = 1.0) -> list[Program]:
    """All programs: `VARIANTS` at two learning rates each."""
    each = TRAINING_BYTES / (12 * NUM_LAYERS * WIDTH**2)
    rates = {v: [formula.rate(v, each) * factor for factor in FACTORS] for v in VARIANTS}
    return [Program(v, float(f"{rate:.4g}"), scale) for v in VARIANTS for rate in rates[v]]


def model_config(variant: Variant) -> ModelConfig:
    """The model of a variant: the FLOPs per token of 16 heads of 16 with an FFN of 4 D.

    >>> model_config(VARIANTS[5]).ffn.width
    640
    """
    heads = Standard(num_heads=WIDTH // 16, head_dim=16, biases=BIASES)
    reference = ModelConfig(
        width=WIDTH, num_layers=NUM_LAYERS, max_len=LENGTH, heads=heads,
        ffn=FFN(width=4 * WIDTH), positions=Rotary(),
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
        seeds=SEEDS,
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
    tokens = program.steps * BATCH * LENGTH * len(SEEDS)
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
        draw = functools.partial(sample, self.corpus.train, LENGTH, BATCH, seed=SEEDS[0])
        train = np.concatenate([draw(step=step) for step in range(1, steps + 1)]).astype(np.uint8)
        rows = {name: one["tokens"].astype(np.uint8) for name, one in self.heldout.items()}
        return {name: witten_bell(train, rows[name], self.heldout[name]["valid"]) for name in rows}


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
    """Trains a program in `place.work` and scores every text."""
    fitted = train(program, mixture, place.work / "gpu" / program.id)
    model = model_config(program.variant)
    objective = OBJECTIVES["causal_lm"].bind(mixture.dataset.sizes)
    evaluator = Evaluator(model.build(), objective, sharding.data_mesh(batch_size=BATCH), BATCH)
    ngrams = mixture.ngrams(program.steps)
    sizes = ProgramSizes(
        ffn_width=model.ffn.width,
        parameters=count_parameters(model),
        flops_per_token=flops_per_token(model, LENGTH),
        steps=program.steps,
    )
    device = jax.local_devices()[0].device_kind
    origin = ProgramOrigin(round(fitted.wall_seconds, 1), device, place.commit)
    found: list[TextScore] = []
    for text, rows in mixture.heldout.items():
        bits = evaluator(fitted.state.params, rows)["bits_per_byte"]
        for seed, of_seed in zip(SEEDS, bits, strict=True):
            run = ProgramSeed(
                program.variant.point, program.variant.plan, program.learning_rate, seed
            )
            grams = ngrams[text]
            bits_of = float(of_seed), grams[2], grams[3], grams[4]
            found.append(TextScore(run, text, *bits_of, sizes, origin))
    return found


def measured_speed(mixture: Mixture, steps: int) -> float:
    """FLOP/s of training all seeds of 4 heads of 64, without compilation; nothing is kept."""
    program = Program(VARIANTS[2], 0.01, steps * BATCH * LENGTH / TRAINING_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        fitted = train(program, mixture, Path(folder))
    tokens = BATCH * LENGTH * len(SEEDS) * program.steps
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
    done = {
        (score.run.point, score.run.plan, score.run.learning_rate, score.sizes.steps)
        for score in scores
    }
    return [
        p for p in wanted if (p.variant.point, p.variant.plan, p.learning_rate, p.steps) not in done
    ]
