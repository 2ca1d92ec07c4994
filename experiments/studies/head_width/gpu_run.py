"""Runs the programs of `gpu_study`: the texts together, training, scores of every text."""

import dataclasses
import functools
import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from attnlab.data.dataset import Batch, Dataset
from attnlab.data.text import Corpus, dataset_of_corpus, sample
from attnlab.models import flops_per_token
from attnlab.models import num_parameters as count_parameters
from attnlab.training import sharding
from attnlab.training.fit import FitResult
from attnlab.training.interrupts import NonFiniteLoss
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.step import Evaluator
from experiments.studies.head_width import run
from experiments.studies.head_width.gpu_study import (
    BATCH,
    LENGTH,
    SEEDS,
    TRAINING_BYTES,
    TUNED,
    Program,
    ProgramOrigin,
    ProgramSeed,
    ProgramSizes,
    TextScore,
    append_scores,
    best_factor,
    left,
    model_config,
    program_flops,
    programs,
    read_scores,
    seed_programs,
    train_config,
    tuned_multiple,
    tuning_programs,
)
from experiments.studies.head_width.ngrams import target_bits
from experiments.studies.head_width.rates import RateFormula
from experiments.studies.head_width.run import (
    HELDOUT_BYTES,
    VALIDATION_BYTES,
    Place,
    scored_windows,
)
from experiments.studies.head_width.texts import TEXTS, check_texts, load_text


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
    model, config = model_config(program.variant), train_config(program)
    return run.train(model, config, mixture.dataset, folder, speaks=True)


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
            own = ProgramSeed(point, plan, rate, seed)
            scores = float(bits), float(kept), grams[2], grams[3], grams[4]
            found.append(TextScore(own, text, *scores, sizes, origin))
    return found


def measured_speed(mixture: Mixture, steps: int) -> float:
    """FLOP/s of training all seeds of 4 heads of 64, without compilation; nothing is kept."""
    program = Program(TUNED, 0.01, steps * BATCH * LENGTH / TRAINING_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        fitted = train(program, mixture, Path(folder))
    tokens = BATCH * LENGTH * len(program.seeds) * program.steps
    return fitted.tokens_per_second * program_flops(program) / tokens


@dataclasses.dataclass(frozen=True)
class Study:
    """The tuning programs and, as soon as those have scores, the programs of a study.

    Attributes:
      formula: of the learning rates of stage 1.
      scale: share of `TRAINING_BYTES`.
      path: CSV file of the scores.
      place: of data and unfinished programs.
      say: gets a line of progress.
    """

    formula: RateFormula
    scale: float
    path: Path
    place: Place
    say: Callable[[str], None] = print

    def status(self) -> str:
        """How many programs have scores."""
        scores = read_scores(self.path)
        tuning, others = (
            f"{len(some) - len(left(some, scores))}/{len(some)}" for some in self._programs(scores)
        )
        return f"{tuning} tuning programs, {others} programs"

    def measure(self, steps: int) -> str:
        """The speed of a few steps, and what it means for the programs that are left."""
        check_texts(TEXTS, self.place.data)
        rate = measured_speed(Mixture(self.place, 0.001), steps)
        scores = read_scores(self.path)
        wanted = [one for some in self._programs(scores) for one in left(some, scores)]
        flops = sum(map(program_flops, wanted))
        return (
            f"{rate:.3g} FLOP/s; {len(wanted)} programs of {flops:.3g} FLOP to go: "
            f"{flops / rate / 60:.1f} minutes, without compilation and scoring"
        )

    def run(self) -> None:
        """Runs the programs that are left, one after the other; the scores of each are kept when it
        ends."""
        check_texts(TEXTS, self.place.data)
        mixture = Mixture(self.place, self.scale)
        self._run(tuning_programs(self.formula, self.scale), mixture)
        multiple = tuned_multiple(self.formula, read_scores(self.path), self.scale)
        assert multiple is not None
        self.say(f"tuned: {multiple:.3g} times the learning rate of the formula")
        self._run(programs(self.formula, multiple, self.scale), mixture)
        factor = best_factor(self.formula, multiple, read_scores(self.path), self.scale)
        assert factor is not None
        self.say(f"more seeds: at {factor:g} times the tuned learning rates")
        self._run(seed_programs(self.formula, multiple, factor, self.scale), mixture)

    def _programs(self, scores: Sequence[TextScore]) -> tuple[list[Program], list[Program]]:
        """The tuning programs and the others. Before the tuning is done the rates of the others are
        those of the formula; before the best factor is known the added seeds are at 1."""
        multiple = tuned_multiple(self.formula, scores, self.scale) or 1.0
        factor = best_factor(self.formula, multiple, scores, self.scale) or 1.0
        others = programs(self.formula, multiple, self.scale)
        added = seed_programs(self.formula, multiple, factor, self.scale)
        return tuning_programs(self.formula, self.scale), [*others, *added]

    def _run(self, wanted: Sequence[Program], mixture: Mixture) -> None:
        undone = left(wanted, read_scores(self.path))
        for number, program in enumerate(undone, 1):
            append_scores(self.path, run_program(program, mixture, self.place))
            self.say(f"{program.id}: program {number} of {len(undone)}")
