"""The head-width study on one GPU: larger models, all texts mixed, several seeds in one program.

D = 256, 6 layers, T = 256, 94 MB of the eight texts together (each about 1.6 times), in bfloat16.
Each program trains the seeds of a variant at one learning rate and scores the held-out part of
every text.

D = 256 is outside what the formula of stage 1 was fitted on. So 4 heads of 64 are first trained
at five multiples of its rate for an eighth of the bytes; the multiple that validation chooses is
used for every variant, halved, doubled and fourfold too. At the best of these factors the five
variants with N h = D are then trained from four seeds more.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pandas
from pandas import DataFrame

from attnlab import lab
from attnlab.data import Batch, Dataset
from attnlab.data.text import Corpus, dataset_of_corpus
from attnlab.lab.executors import InProcess
from attnlab.lab.result import ModelSizes, RunResult, Scores, Timing
from attnlab.lab.workdir import complete_result, run_folder, specs_in
from attnlab.models import (
    Compute,
    ModelConfig,
    applied_parameters,
    flops_per_token,
    matrix_axes,
    num_parameters,
)
from attnlab.training import EvaluationConfig, OptimizerConfig, sharding
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import make_optimizer
from attnlab.training.fit import fit
from attnlab.training.interrupts import NonFiniteLoss
from attnlab.training.loggers import Recorder
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.step import Evaluator
from experiments.studies.head_width import spec
from experiments.studies.head_width.ngrams import CONTEXTS, target_bits
from experiments.studies.head_width.rates import RateFormula, fit_rates, parabola_minimum
from experiments.studies.head_width.rows import PUBLISHED, read_rows
from experiments.studies.head_width.spec import Variant
from experiments.studies.head_width.texts import (
    HELDOUT_BYTES,
    TEXTS,
    VALIDATION_BYTES,
    StudyText,
    load_text,
    scored_windows,
)

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
COLUMNS = [
    "point", "plan", "learning_rate", "seed", "text", "heldout_bits", "validation_bits",
    *(f"ngram{k + 1}" for k in CONTEXTS), "ffn_width", "parameters", "flops_per_token", "steps",
    "seconds", "device", "commit",
]  # fmt: skip
"""A row is one seed of a program on one text. `validation_bits` are of the validation parts of all
texts together; `seconds` are of the training of all seeds of the program."""


class Program(NamedTuple):
    """One training of several seeds: a variant at a learning rate, on a share of
    `TRAINING_BYTES`."""

    variant: Variant
    learning_rate: float
    share: float = 1.0
    seeds: tuple[int, ...] = SEEDS

    @property
    def steps(self) -> int:
        """Steps of `BATCH` windows of T bytes."""
        return max(2, round(self.share * TRAINING_BYTES / (BATCH * LENGTH)))

    def scored(self, scores: DataFrame) -> DataFrame:
        """The rows of its seeds."""
        named = {"point": self.variant.point, "plan": self.variant.plan, "steps": self.steps,
                 "learning_rate": self.learning_rate}  # fmt: skip
        mask = scores["seed"].isin(self.seeds)
        for name, value in named.items():
            mask &= scores[name] == value
        return scores[mask]


def fills_width(variant: Variant) -> bool:
    """Is N h = D, and nothing shared?"""
    return variant.num_heads * variant.head_dim == WIDTH and variant.plan == "separate"


def factors(variant: Variant) -> tuple[float, ...]:
    """Those of `FACTORS` at which a variant is trained: the lowest only where N h = D."""
    return FACTORS if fills_width(variant) else FACTORS[1:]


def published_formula() -> RateFormula:
    """The learning rates of the published rows of stage 1."""
    rows = read_rows(PUBLISHED / "runs.csv")
    return fit_rates(rows[rows["stage"] == 1])


def formula_rate(formula: RateFormula, variant: Variant, share: float) -> float:
    """The rate of stage 1's formula at the bytes per parameter of this share."""
    each = share * TRAINING_BYTES / (12 * NUM_LAYERS * WIDTH**2)
    fields = dataclasses.asdict(variant) | {"bytes_per_parameter": each}
    return formula.rates(DataFrame([fields]))[0]


def left(programs: Sequence[Program], scores: DataFrame) -> list[Program]:
    """The programs of which a seed has no scores yet."""
    return [one for one in programs if not set(one.seeds) <= set(one.scored(scores)["seed"])]


def tuning_programs(formula: RateFormula, share: float = 1.0) -> list[Program]:
    """4 heads of 64 at `TUNING_FACTORS` times the rate of the formula."""
    short = TUNING_SHARE * share
    rates = [formula_rate(formula, TUNED, short) * factor for factor in TUNING_FACTORS]
    return [Program(TUNED, float(f"{rate:.4g}"), short, TUNING_SEEDS) for rate in rates]


def tuned_multiple(formula: RateFormula, scores: DataFrame, share: float = 1.0) -> float:
    """Best rate over that of the formula: the minimum of the parabola in ln r through the best of
    the tuning programs and those beside it, by validation bits."""
    programs = tuning_programs(formula, share)
    bits = {one.learning_rate: _validation(one, scores) for one in programs}
    best = math.exp(parabola_minimum(bits).log_rate)
    return best / formula_rate(formula, TUNED, TUNING_SHARE * share)


def programs_at(
    formula: RateFormula, multiple: float, factor: float, share: float, seeds: tuple[int, ...]
) -> list[Program]:
    """The variants that are trained at a factor, those with N h = D first."""
    return [
        Program(
            v, float(f"{formula_rate(formula, v, share) * multiple * factor:.4g}"), share, seeds
        )
        for v in VARIANTS
        if factor in factors(v)
    ]


def best_factor(
    formula: RateFormula, multiple: float, scores: DataFrame, share: float = 1.0
) -> float:
    """Which of `FACTORS` has the lowest validation bits, mean over the variants with N h = D."""
    bits = {}
    for factor in FACTORS:
        programs = programs_at(formula, multiple, factor, share, SEEDS)
        some = [_validation(one, scores) for one in programs if fills_width(one.variant)]
        bits[factor] = float(np.mean(some))
    return min(bits, key=bits.__getitem__)


def _validation(program: Program, scores: DataFrame) -> float:
    return float(program.scored(scores)["validation_bits"].mean())


def next_programs(formula: RateFormula, scores: DataFrame, share: float = 1.0) -> list[Program]:
    """The programs without scores that can be trained now; none when the study is complete."""
    if undone := left(tuning_programs(formula, share), scores):
        return undone
    multiple = tuned_multiple(formula, scores, share)
    every = [programs_at(formula, multiple, factor, share, SEEDS) for factor in FACTORS]
    if undone := left(list(itertools.chain(*every)), scores):
        return undone
    factor = best_factor(formula, multiple, scores, share)
    added = programs_at(formula, multiple, factor, share, ADDED_SEEDS)
    return left([one for one in added if fills_width(one.variant)], scores)


def model_config(variant: Variant) -> ModelConfig:
    """The model of a variant: the FLOPs per token of 16 heads of 16 with an FFN of 4 D.

    >>> model_config(VARIANTS[5]).ffn.width
    640
    """
    compute = Compute(dtype="bfloat16", remat=False)
    return spec.model_config(variant, num_layers=NUM_LAYERS, compute=compute)


def run_specs(program: Program, data: Path) -> list[lab.RunSpec]:
    """A run for each seed, with the optimizer and the schedule of the registered runs."""
    variant, rate, steps = program.variant, program.learning_rate, program.steps
    train = spec.make_training(
        OptimizerConfig(name="muon", learning_rate=rate),
        steps,
        batch_size=BATCH,
        length=LENGTH,
        evaluation=EvaluationConfig(every=steps, batch_size=BATCH, windows=1, curve_windows=64),
        log_every=max(1, steps // 20),
        checkpoint_every=max(1, steps // 4),
    )
    share = program.share / (TUNING_SHARE if program.seeds == TUNING_SEEDS else 1)
    mixture = Mixture(folder=str(data), share=share)
    experiment = lab.Experiment(model=model_config(variant), train=train, data=mixture)
    tags: dict[str, lab.Tag] = {"point": variant.point, "plan": variant.plan, "steps": steps}
    stem = f"{variant.point}-{variant.plan.replace(':', '')}-{rate:g}-{program.share:g}"
    return [lab.RunSpec(f"{stem}-seed{s}", experiment, s, tags) for s in program.seeds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(StudyText):
    """The training parts of all texts, one behind the other, as a dataset.

    Attributes:
      share: of the windows that a study of full size scores.
    """

    name: str = "mixture"
    share: float = 1.0

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Random training windows; the validation windows of all texts."""
        texts = {name: load_text(name, Path(self.folder)) for name in TEXTS}
        together = hashlib.sha256("".join(t.sha256 for t in texts.values()).encode()).hexdigest()
        train = np.concatenate([text.train for text in texts.values()])
        corpus = Corpus("mixture", train, texts["web"].heldout, together)
        kept = self.windows("validation", VALIDATION_BYTES).values()
        rows = {name: np.concatenate([one[name] for one in kept]) for name in ("tokens", "valid")}
        dataset = dataset_of_corpus(corpus, length)
        return dataclasses.replace(
            dataset, validation=functools.partial(_evenly, rows), baselines=dict
        )

    def windows(self, part: str, most: int) -> dict[str, Batch]:
        """The scored windows of the validation or the held-out part of each text."""
        most = max(4 * LENGTH, round(self.share * most))
        texts = {name: getattr(load_text(name, Path(self.folder)), part) for name in TEXTS}
        return {name: scored_windows(text, LENGTH, most) for name, text in texts.items()}

    def heldout(self) -> dict[str, Batch]:
        """The held-out windows of each text."""
        return self.windows("heldout", HELDOUT_BYTES)


def _evenly(rows: Batch, count: int) -> Batch:
    """`count` of the rows, evenly spaced; 0: all."""
    total = len(rows["tokens"])
    places = np.linspace(0, total - 1, min(count or total, total)).round().astype(int)
    return {name: a[places] for name, a in rows.items()}


@functools.cache
def ngrams(data: Mixture, steps: int) -> DataFrame:
    """Bits per byte of n-grams of the bytes that the first seed is trained on; a row a text."""
    train = data.load(LENGTH).batches
    assert callable(train)
    batches = [train(SEEDS[0], step, BATCH, slice(None))["tokens"] for step in range(1, steps + 1)]
    rows = data.heldout()
    tokens = np.concatenate([one["tokens"] for one in rows.values()])
    # All texts at once, since counting takes the time.
    bits = target_bits(np.concatenate(batches).astype(np.uint8), tokens.astype(np.uint8))
    ends = np.cumsum([len(one["tokens"]) for one in rows.values()])[:-1]
    found = {
        f"ngram{k + 1}": [
            float(part[one["valid"]].mean())
            for part, one in zip(np.split(every, ends), rows.values(), strict=True)
        ]
        for k, every in bits.items()
    }
    return DataFrame(found, index=list(rows))


class SeedsTogether(InProcess):
    """An executor for `lab.sweep`: runs that differ in their seed alone are one program."""

    def start(self, workdir: Path, count: int) -> None:
        """Trains what has no result, from the newest checkpoint of each program if any."""
        specs = specs_in(workdir).values()
        undone = [one for one in specs if not complete_result(workdir, one)]
        for _, same in itertools.groupby(undone, key=lambda one: one.config.to_json()):
            for result in train_together(list(same), workdir):
                folder = run_folder(workdir, result.spec)
                folder.mkdir(parents=True, exist_ok=True)
                result.write(folder)


def train_together(specs: Sequence[lab.RunSpec], workdir: Path) -> list[RunResult]:
    """Trains runs that differ in their seed alone, and scores each on the held-out part of every
    text."""
    experiment = specs[0].config
    model, data = experiment.model, experiment.data
    assert isinstance(data, Mixture)
    config = dataclasses.replace(experiment.train, seeds=tuple(one.seed for one in specs))
    dataset, module, objective = data.load(config.length), model.build(), OBJECTIVES["causal_lm"]
    folder = workdir / "programs" / specs[0].id
    folder.mkdir(parents=True, exist_ok=True)
    sizes = ModelSizes(
        parameters=num_parameters(model),
        applied_parameters=applied_parameters(model),
        flops_per_token=flops_per_token(model, config.length),
        ffn_width=model.ffn.width,
    )
    diverged = [RunResult(spec=one, status="diverged", scores=Scores(), sizes=sizes)
                for one in specs]  # fmt: skip
    with (
        Recorder(folder, config.seeds) as recorder,
        Checkpoints(folder / "checkpoints", say=recorder.say) as checkpoints,
    ):
        optimizer = make_optimizer(config, matrix_axes(model))
        try:
            fitted = fit(module, objective, optimizer, config, dataset, recorder=recorder,
                         checkpoints=checkpoints)  # fmt: skip
        except NonFiniteLoss:
            return diverged
    mesh = sharding.data_mesh(batch_size=BATCH)
    evaluate = Evaluator(module, objective.bind(dataset.sizes), mesh, BATCH)
    heldout = {text: evaluate(fitted.state.params, rows)["bits_per_byte"]
               for text, rows in data.heldout().items()}  # fmt: skip
    validation, seconds = fitted.validation["bits_per_byte"], round(fitted.wall_seconds, 1)
    return [
        dataclasses.replace(
            one,
            status="complete",
            scores=Scores(
                heldout={text: float(bits[i]) for text, bits in heldout.items()},
                validation={"bits_per_byte": float(validation[i])},
            ),
            timing=Timing(seconds=seconds),
        )
        for i, one in enumerate(diverged)
    ]


def new_scores(results: lab.Results, commit: str) -> DataFrame:
    """Results of `lab.sweep` as rows, with the n-gram baselines of each text."""
    data = results.runs[0].spec.config.data
    assert isinstance(data, Mixture)
    runs = results.to_pandas().rename(columns={"validation_bits_per_byte": "validation_bits"})
    runs = runs.reindex(columns=[*COLUMNS, *(f"heldout_{text}" for text in TEXTS)])
    runs["device"], runs["commit"] = jax.local_devices()[0].device_kind, commit
    found = []
    for text in TEXTS:
        grams = [ngrams(data, steps).loc[text] for steps in runs["steps"]]
        more = {"text": text, "heldout_bits": runs[f"heldout_{text}"]}
        more |= {name: [one[name] for one in grams] for name in grams[0].index}
        found.append(runs.assign(**more))
    return pandas.concat(found, ignore_index=True)[COLUMNS].fillna(np.inf)
