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
import math
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from pandas import DataFrame

from attnlab import training
from attnlab.data import Batch, Dataset
from attnlab.data.batching import evenly_spaced, select_rows
from attnlab.data.text import Corpus, dataset_of_corpus
from attnlab.models import Compute, ModelConfig, flops_per_token, matrix_axes, num_parameters
from attnlab.training.step import Evaluator
from experiments.studies.head_width import spec, texts
from experiments.studies.head_width.ngrams import NAMES, target_bits
from experiments.studies.head_width.rows import PUBLISHED, read_csv
from experiments.studies.head_width.spec import Variant

WIDTH, NUM_LAYERS, LENGTH, BATCH = 256, 6, 256, 32
SEEDS = (0, 1)
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Learning rates of the variants with N h = D, in multiples of the tuned one; others lack 0.5."""
ADDED_SEEDS = (2, 3, 4, 5)
"""Of the variants with N h = D, at the best of `FACTORS`."""
TUNING_SEEDS = (8,)
SCORED = {"validation": texts.VALIDATION_BYTES // 4, "heldout": texts.HELDOUT_BYTES // 4}
"""Bytes of each text that are scored, at most."""
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
    *NAMES, "ffn_width", "parameters", "flops_per_token", "steps", "seconds", "device", "commit",
]  # fmt: skip
"""A row is one seed of a program on one text. `validation_bits` are of the validation parts of all
texts together; `seconds` are of the training of all seeds of the program."""


class Program(NamedTuple):
    """One training of several seeds of a variant; a step reads `BATCH` windows of T bytes."""

    variant: Variant
    learning_rate: float
    steps: int
    seeds: tuple[int, ...]


def fills_width(variant: Variant) -> bool:
    """Is N h = D, and nothing shared?"""
    return variant.num_heads * variant.head_dim == WIDTH and variant.plan == "separate"


def read_scores(folder: Path) -> DataFrame:
    """The rows of gpu_runs.csv, none where there is no file."""
    return read_csv(folder / "gpu_runs.csv", COLUMNS)


def missing(scores: DataFrame, share: float = 1.0) -> list[Program]:
    """The programs of the published scores, on a share of their bytes, with the seeds that have no
    scores here."""
    wanted = read_scores(PUBLISHED)[[*PROGRAM, "seed"]].drop_duplicates()
    wanted["steps"] = (share * wanted["steps"]).round().clip(lower=2).astype(int)
    there = set(scores[[*PROGRAM, "seed"]].itertuples(index=False, name=None))
    variants = {(v.point, v.plan): v for v in VARIANTS}
    seeds: dict[tuple[Variant, float, int], tuple[int, ...]] = {}
    for row in wanted.itertuples(index=False, name=None):
        if row not in there:
            point, plan, rate, steps, seed = row
            program = variants[point, plan], rate, steps
            seeds[program] = (*seeds.get(program, ()), seed)
    return [Program(*program, of) for program, of in seeds.items()]


def model_config(variant: Variant) -> ModelConfig:
    """The model of a variant: the FLOPs per token of 16 heads of 16 with an FFN of 4 D.

    >>> model_config(VARIANTS[5]).ffn.width
    640
    """
    compute = Compute(dtype="bfloat16", remat=False)
    return spec.model_config(variant, num_layers=NUM_LAYERS, compute=compute)


@functools.cache
def windows(data: Path, part: str, share: float) -> dict[str, Batch]:
    """The scored windows of a part of each text, "validation" or "heldout"."""
    most = max(4 * LENGTH, round(share * SCORED[part]))
    return {
        name: texts.scored_windows(getattr(texts.load_text(name, data), part), LENGTH, most)
        for name in texts.TEXTS
    }


@functools.cache
def mixture(data: Path, share: float) -> Dataset:
    """Random windows of the training parts of all texts, one behind the other, and the validation
    windows of all texts."""
    train = np.concatenate([texts.load_text(name, data).train for name in texts.TEXTS])
    kept = windows(data, "validation", share).values()
    rows = {name: np.concatenate([one[name] for one in kept]) for name in ("tokens", "valid")}
    total = len(rows["tokens"])
    corpus = Corpus("mixture", train, texts.load_text("web", data).heldout, "")
    return dataclasses.replace(
        dataset_of_corpus(corpus, LENGTH),
        validation=lambda count: select_rows(rows, evenly_spaced(total, count)),
    )


@functools.cache
def ngrams(data: Path, share: float, steps: int) -> DataFrame:
    """Bits per byte of n-grams of the bytes that the first seed is trained on; a row a text."""
    train, rows = mixture(data, share).batches, windows(data, "heldout", share)
    assert callable(train)
    batches = [train(SEEDS[0], step, BATCH, slice(None))["tokens"] for step in range(1, steps + 1)]
    tokens = np.concatenate([one["tokens"] for one in rows.values()])
    # All texts at once, since counting takes the time.
    bits = target_bits(np.concatenate(batches).astype(np.uint8), tokens.astype(np.uint8))
    valid = np.concatenate([one["valid"] for one in rows.values()])
    names = np.repeat(list(rows), [one["valid"].sum() for one in rows.values()])
    found = DataFrame(dict(zip(NAMES, (each[valid] for each in bits.values()), strict=True)))
    return found.groupby(names).mean()


def train(program: Program, data: Path, commit: str, share: float = 1.0) -> DataFrame:
    """The rows of a program: trains its seeds together, with the optimizer and the schedule of the
    registered runs, and scores them on a share of the published windows of every text."""
    variant, rate, steps, seeds = program
    model, dataset = model_config(variant), mixture(data, share)
    module, objective = model.build(), training.OBJECTIVES["causal_lm"]
    config = spec.make_training(
        training.OptimizerConfig(name="muon", learning_rate=rate),
        steps,
        batch_size=BATCH,
        length=LENGTH,
        seeds=seeds,
        evaluation=training.EvaluationConfig(
            every=steps, batch_size=BATCH, windows=1, curve_windows=64
        ),
        checkpoint_every=steps,
    )
    heldout = dict.fromkeys(texts.TEXTS, np.full(len(seeds), np.inf))
    validation, seconds = np.full(len(seeds), np.inf), math.nan
    try:
        optimizer = training.make_optimizer(config, matrix_axes(model))
        made = training.fit_in_memory(module, objective, config, dataset, optimizer=optimizer)
        found = made.result
        mesh = training.sharding.data_mesh(batch_size=BATCH)
        evaluate = Evaluator(module, objective.bind(dataset.sizes), mesh, BATCH)
        for text, rows in windows(data, "heldout", share).items():
            heldout[text] = evaluate(found.state.params, rows)["bits_per_byte"]
        validation, seconds = found.validation["bits_per_byte"], round(found.wall_seconds, 1)
    except training.NonFiniteLoss:
        print(f"{variant.point} {variant.plan} diverged at {rate:g}")
    same = {
        "point": variant.point, "plan": variant.plan, "learning_rate": rate, "steps": steps,
        "ffn_width": model.ffn.width, "parameters": num_parameters(model),
        "flops_per_token": flops_per_token(model, LENGTH), "seconds": seconds,
        "device": jax.local_devices()[0].device_kind, "commit": commit,
    }  # fmt: skip
    grams = ngrams(data, share, steps)
    lines = [
        same | {"seed": seed, "text": text, "heldout_bits": float(heldout[text][i]),
                "validation_bits": float(validation[i]), **grams.loc[text]}
        for text in texts.TEXTS for i, seed in enumerate(seeds)
    ]  # fmt: skip
    return DataFrame(lines, columns=COLUMNS)
