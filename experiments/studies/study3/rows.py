"""Rows: CSV files with frozen columns, one line a run, and how results of `lab.sweep` get there."""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path

import pandas
from pandas import DataFrame

from attnlab import lab
from attnlab.atomic import write_atomic
from attnlab.lab.machine import processor
from attnlab.models import flops_per_token
from attnlab.training.loggers import read_metrics
from experiments.studies.head_width.ngrams import baselines
from experiments.studies.head_width.rows import GRAMS, append_csv
from experiments.studies.head_width.texts import load_text, make_dataset
from experiments.studies.study3.copying import PROBE, PROBE_EVERY, copy_step, split_bits
from experiments.studies.study3.parts import Done
from experiments.studies.study3.spec import (
    BATCH_TOKENS,
    Run,
    Variant,
    model_config,
    narrow_variant,
    num_steps,
)

PINNED = "7986c4264a3d"
"""The commit of parts A to C, whose rows have version 1."""
PUBLISHED = Path(__file__).parents[3] / "docs/results/study3"
OLD, NEW = "runs.csv", "later_runs.csv"
"""Rows of the pinned commit, and of later parts."""
VERSION = 2
LATER_FIELDS = ("kind", "cache", "budget", "shared", "repeats", "num_layers")
"""Of `Variant`; rows of version 1 have their defaults."""
RUN = ("part", "role", *(f.name for f in dataclasses.fields(Variant)), "text", "replicate", "seed",
       "learning_rate", "first_rate")  # fmt: skip
BITS = ("heldout_bits", "heldout_copy_bits", "heldout_other_bits", "validation_bits",
        "validation_copy_bits", "validation_other_bits", "train_bits")  # fmt: skip
"""Bits per byte, infinite where the run diverged. NaN: no byte of that kind was scored."""
FLOATS = ("bytes_per_parameter", "learning_rate", "first_rate", "training_flops", *BITS, *GRAMS,
          "seconds", "cpu_seconds")  # fmt: skip
COLUMNS = [
    *RUN, "ffn_width", "parameters", "flops_per_token", "training_flops", "steps", "bytes_trained",
    "status", *BITS[:3], "heldout_bytes", "heldout_copy_bytes", *BITS[3:], "copy_step",
    "probe_bits", *GRAMS, "text_sha256", "commit", "python", "jax", "numpy", "optax", "flax",
    "machine", "seconds", "cpu_seconds", "version",
]  # fmt: skip
"""`GRAMS`: n-grams of the bytes the run was trained on, and gzip. `copy_step`: first step with the
probe below 2 bits, -1 for never; part D alone, else 0. `probe_bits`: step:bits, separated by
spaces. `seconds` are of training and scoring, over every start of the run, without a first half
that other runs use too; on one thread and core. Version 1 alone has `cpu_seconds`."""


def read_rows(path: Path) -> DataFrame:
    """Every row of the file, of either version; empty where there is none.

    Raises ValueError for other columns, or a run that is there twice.
    """
    if not path.exists():
        return DataFrame(columns=COLUMNS)
    texts = ("text_sha256", "commit", "probe_bits", "budget", "shared")
    rows = pandas.read_csv(path, dtype=dict.fromkeys([*texts, *FLOATS], str))
    defaults = {name: getattr(Variant(1, 1), name) for name in LATER_FIELDS}
    if list(rows.columns) == [name for name in COLUMNS if name not in LATER_FIELDS]:
        rows = rows.assign(**defaults)
    elif list(rows.columns) != COLUMNS:
        raise ValueError(f"{path} has other columns than rows of study 3; name another file")
    rows = rows[COLUMNS].fillna({"budget": "", "shared": "", "probe_bits": ""})
    rows = rows.astype(dict.fromkeys(FLOATS, float))  # of texts, since `read_csv` rounds floats
    ids = [run.id for run in runs_of(rows)]
    if len(set(ids)) != len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ValueError(f"{path} has the run {twice} twice")
    return rows


def runs_of(rows: DataFrame) -> list[Run]:
    """The run of each row."""
    hints = typing.get_type_hints(Variant) | typing.get_type_hints(Run)
    found = []
    for values in rows[list(RUN)].to_dict("records"):
        of = {str(name): hints[str(name)](value) for name, value in values.items()}
        variant = Variant(**{f.name: of.pop(f.name) for f in dataclasses.fields(Variant)})
        found.append(Run(variant=variant, **of))
    return found


def done_in(*tables: DataFrame) -> Done:
    """Id of each run -> its validation bits."""
    ids = (run.id for rows in tables for run in runs_of(rows))
    bits = (float(value) for rows in tables for value in rows["validation_bits"])
    return dict(zip(ids, bits, strict=True))


def add_rows(path: Path, rows: DataFrame) -> list[str]:
    """Adds those whose run is not there to the file; returns their ids. A kill leaves the old file
    or the new one."""
    known = {run.id for run in runs_of(read_rows(path))}
    ids = [run.id for run in runs_of(rows)]
    new = rows[[one not in known for one in ids]]
    if len(new):
        append_csv(path, new)
    return [one for one in ids if one not in known]


def new_rows(
    runs: Mapping[str, Run], results: lab.Results, data: Path, shared: Path, commit: str
) -> DataFrame:
    """Results of `lab.sweep` as rows.

    Args:
      runs: by id; results of other runs are left out.
      results: with their folders.
      data: the folder of the texts.
      shared: a folder for n-gram baselines, which runs of equal batches share.
      commit: of the code.
    """
    found = [
        _row(runs[result.spec.id], result, result.folder, data)
        | _baselines(runs[result.spec.id], data, shared)
        | {"commit": commit, "machine": processor(), "version": VERSION, "cpu_seconds": math.nan}
        for result in results
        if result.spec.id in runs
    ]
    return DataFrame(found, columns=COLUMNS)


def _row(run: Run, result: lab.RunResult, folder: Path | None, data: Path) -> dict[str, object]:
    """What a run left, without its baselines and origin."""
    variant, steps = run.variant, num_steps(run.variant)
    count, sha256 = _scored_bytes(run.text, data, variant.length)
    halves = (narrow_variant(variant), variant)
    flops = sum(flops_per_token(model_config(one), variant.length) / 2 for one in halves)
    versions = result.provenance.environment
    row = dataclasses.asdict(run) | dataclasses.asdict(variant) | {
        "ffn_width": result.sizes.ffn_width,
        "parameters": result.sizes.parameters,
        "flops_per_token": result.sizes.flops_per_token,
        "training_flops": 3.0 * flops * steps * BATCH_TOKENS,
        "steps": steps,
        "bytes_trained": steps * BATCH_TOKENS,
        "status": result.status,
        "copy_step": 0,
        "probe_bits": "",
        "text_sha256": sha256,
        "seconds": result.timing.seconds,
        "heldout_bytes": 0,
        "heldout_copy_bytes": 0,
        **{name: versions.get(name, "") for name in ("python", "jax", "numpy", "optax", "flax")},
        **dict.fromkeys(BITS, math.inf),
    }  # fmt: skip
    if result.status != "complete":
        return row
    *heldout, share = split_bits(result.scores.heldout)
    *validation, _ = split_bits(result.scores.validation)
    train = split_bits(result.scores.train)[0]
    row |= dict(zip(BITS, (*heldout, *validation, train), strict=True))
    row |= {"heldout_bytes": count, "heldout_copy_bytes": round(share * count)}
    if run.part == "D":
        assert folder is not None
        log = [line for line in read_metrics(folder / "metrics.jsonl") if PROBE in line]
        curve = {int(line["step"]): float(line[PROBE][0]) for line in log}
        if lacks := set(range(0, steps + 1, PROBE_EVERY)) - set(curve):
            raise ValueError(f"{run.id} has no probe at step {min(lacks)}; see its log")
        probes = " ".join(f"{step}:{bits:.4f}" for step, bits in curve.items())
        row |= {"copy_step": copy_step(curve), "probe_bits": probes}
    return row


@functools.cache
def _scored_bytes(text: str, data: Path, length: int) -> tuple[int, str]:
    """Bytes of the held-out windows, and the digest of the text."""
    corpus = load_text(text, data)
    return int(make_dataset(corpus, length).heldout(0)["valid"].sum()), corpus.sha256


def _baselines(run: Run, data: Path, shared: Path) -> dict[str, float]:
    """The n-gram baselines of a run."""
    corpus, length, steps = load_text(run.text, data), run.variant.length, num_steps(run.variant)
    path = shared / f"{corpus.sha256[:16]}-{run.seed}-{length}-{steps}.json"
    if not path.exists():
        found = baselines(corpus, length, BATCH_TOKENS // length, steps, run.seed)
        shared.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(found).encode())
    kept: dict[str, float] = json.loads(path.read_text())
    return kept
