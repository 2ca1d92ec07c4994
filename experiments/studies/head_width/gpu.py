"""The head-width study on one GPU: larger models, all texts mixed, several seeds in one program.

D = 256, 6 layers, T = 256, 23.5 MB of the eight texts together, in bfloat16.
Each program trains the seeds of a variant at one learning rate and scores the held-out part of
every text.

The programs are those of the published scores. D = 256 is outside what the formula of stage 1 was
fitted on, so 4 heads of 64 were first trained at five multiples of its rate for an eighth of the
bytes. The multiple that validation chose was used for every variant, halved, doubled and fourfold
too. At the best of these factors the five variants with N h = D were then trained from four seeds
more.
"""

import dataclasses
import functools
import hashlib
import itertools
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
from experiments.studies.head_width.rows import PUBLISHED, read_csv
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
SEEDS = (0, 1)
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Learning rates of the variants with N h = D, in multiples of the tuned one; others lack 0.5."""
ADDED_SEEDS = (2, 3, 4, 5)
"""Of the variants with N h = D, at the best of `FACTORS`."""
TUNING_SEEDS = (8,)
SCORED = 0.25
"""Share of `HELDOUT_BYTES` and `VALIDATION_BYTES` that is scored."""
VARIANTS = (
    *(Variant(WIDTH // h, h, width=WIDTH, length=LENGTH) for h in (16, 32, 64, 128, 256)),
    Variant(6, 64, width=WIDTH, length=LENGTH),
    Variant(4, 64, width=WIDTH, length=LENGTH, plan="albert"),
    Variant(4, 64, width=WIDTH, length=LENGTH, plan="cycle:2"),
)
"""N h = D at five head widths, N h = 3D/2 at 64, and two sharing plans at 64."""
TUNED, WIDEST = VARIANTS[2], VARIANTS[4]
PROGRAM = ["point", "plan", "learning_rate", "steps"]
COLUMNS = [
    "point", "plan", "learning_rate", "seed", "text", "heldout_bits", "validation_bits",
    *(f"ngram{k + 1}" for k in CONTEXTS), "ffn_width", "parameters", "flops_per_token", "steps",
    "seconds", "device", "commit",
]  # fmt: skip
"""A row is one seed of a program on one text. `validation_bits` are of the validation parts of all
texts together; `seconds` are of the training of all seeds of the program."""


class Program(NamedTuple):
    """One training of several seeds of a variant; a step reads `BATCH` windows of T bytes."""

    variant: Variant
    learning_rate: float
    steps: int
    seeds: tuple[int, ...] = SEEDS

    @property
    def keys(self) -> set[tuple[object, ...]]:
        """`PROGRAM` and the seed of each of its rows."""
        own = self.variant.point, self.variant.plan, self.learning_rate, self.steps
        return {(*own, seed) for seed in self.seeds}


def fills_width(variant: Variant) -> bool:
    """Is N h = D, and nothing shared?"""
    return variant.num_heads * variant.head_dim == WIDTH and variant.plan == "separate"


def published_programs(share: float = 1.0) -> list[Program]:
    """The programs of the published scores, on a share of their bytes."""
    scores, found = read_scores(PUBLISHED), []
    variants = {(v.point, v.plan): v for v in VARIANTS}
    for seeds in (TUNING_SEEDS, SEEDS, ADDED_SEEDS):
        own = scores.loc[scores["seed"].isin(seeds), PROGRAM].drop_duplicates()
        for point, plan, rate, steps in own.itertuples(index=False):
            steps = max(2, round(share * steps))
            found.append(Program(variants[point, plan], rate, steps, seeds))
    return found


def read_scores(folder: Path) -> DataFrame:
    """The rows of gpu_runs.csv, none where there is no file."""
    return read_csv(folder / "gpu_runs.csv", COLUMNS)


def left(programs: Sequence[Program], scores: DataFrame) -> list[Program]:
    """The programs of which a seed has no scores yet."""
    there = set(scores[[*PROGRAM, "seed"]].itertuples(index=False, name=None))
    return [one for one in programs if not one.keys <= there]


def model_config(variant: Variant) -> ModelConfig:
    """The model of a variant: the FLOPs per token of 16 heads of 16 with an FFN of 4 D.

    >>> model_config(VARIANTS[5]).ffn.width
    640
    """
    compute = Compute(dtype="bfloat16", remat=False)
    return spec.model_config(variant, num_layers=NUM_LAYERS, compute=compute)


def run_specs(program: Program, data: Path, share: float = 1.0) -> list[lab.RunSpec]:
    """A run for each seed, with the optimizer and the schedule of the registered runs, scored on a
    share of the published windows."""
    variant, rate, steps, seeds = program
    train = spec.make_training(
        OptimizerConfig(name="muon", learning_rate=rate),
        steps,
        batch_size=BATCH,
        length=LENGTH,
        evaluation=EvaluationConfig(every=steps, batch_size=BATCH, windows=1, curve_windows=64),
        log_every=max(1, steps // 20),
        checkpoint_every=max(1, steps // 4),
    )
    mixture = Mixture(folder=str(data), share=share * SCORED)
    experiment = lab.Experiment(model=model_config(variant), train=train, data=mixture)
    tags: dict[str, lab.Tag] = {"point": variant.point, "plan": variant.plan, "steps": steps}
    stem = f"{variant.point}-{variant.plan.replace(':', '')}-{rate:g}-{steps}"
    return [lab.RunSpec(f"{stem}-seed{seed}", experiment, seed, tags) for seed in seeds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(StudyText):
    """The training parts of all texts, one behind the other, as a dataset.

    Attributes:
      share: of `HELDOUT_BYTES` and `VALIDATION_BYTES` that is scored.
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
