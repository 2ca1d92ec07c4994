"""Results as runs would have left them, with scores that are known beforehand."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
from small_experiment import MODEL, train_config

from attnlab import lab
from attnlab.data import Text
from attnlab.lab.policies import FIRST_RATE

TRAIN = train_config(40, every=10, windows=32, curve_windows=16, checkpoint_every=20)
BASE = lab.Experiment(model=MODEL, train=TRAIN, data=Text())


def made(
    tags: Mapping[str, lab.spec.Tag],
    seed: int,
    score: float | None,
    *,
    values: Mapping[str, object] | None = None,
    data: Text = BASE.data,
    sha256: str = "",
    parameters: int = 1000,
    more: Mapping[str, float] | None = None,
    validation: float | None = None,
    unigram: float = 4.7,
) -> lab.RunResult:
    """The result of a run whose held-out bits per byte are `score`; None: it diverged.

    `values` are fields of the config, `more` further held-out metrics, `validation` bits per byte.
    The files of `data` need not exist.
    """
    config = lab.with_values(BASE, values or {})
    config = dataclasses.replace(config, data=data, checks_data=False)
    name = re.sub(r"[^A-Za-z0-9]+", "_", f"run {dict(tags)} {dict(values or {})} {data.path}")
    spec = lab.RunSpec(f"{name}-seed{seed}", config, seed, tags)
    heldout = {} if score is None else {"bits_per_byte": score, "loss": score, **(more or {})}
    return lab.RunResult(
        spec=spec,
        status="diverged" if score is None else "complete",
        scores=lab.Scores(
            heldout=heldout,
            train=heldout,
            validation={} if validation is None else {"bits_per_byte": validation},
            baselines={"bits_per_byte": {"unigram": unigram, "5-gram": 2.9}},
        ),
        sizes=lab.ModelSizes(
            parameters=parameters, applied_parameters=2 * parameters,
            flops_per_token=4 * parameters, ffn_width=12,
        ),
        data=lab.result.DataInfo(sha256=sha256),
        timing=lab.Timing(seconds=0.0 if score is None else 2.5, tokens_per_second=1000.0),
        provenance=lab.Provenance(environment={"python": "3.11", "jax": "0"}),
    )  # fmt: skip


def noisy(
    means: Mapping[tuple[tuple[str, lab.spec.Tag], ...], float],
    seeds: Sequence[int],
    spread: float = 0.01,
    key: int = 0,
    **fields,
) -> list[lab.RunResult]:
    """Runs of variants with these mean scores and normal noise; `fields` as of `made`."""
    rng, found = np.random.default_rng(key), []
    for i, (tags, mean) in enumerate(means.items()):
        fields["parameters"] = 1000 + 300 * i
        for seed in seeds:
            found.append(made(dict(tags), seed, mean + spread * rng.standard_normal(), **fields))
    return found


def tuned(scores: Sequence[float], first: float = 0.002, **fields) -> list[lab.RunResult]:
    """Runs at rates from `first` on, each twice the one before, with these validation scores."""
    found = []
    for i, score in enumerate(scores):
        rate = first * 2**i
        tags, values = {"layout": "wide", "learning_rate": rate}, {FIRST_RATE: rate}
        found.append(made(tags, 1000, 2.0, values=values, validation=score, **fields))
    return found


def with_curves(runs: Sequence[lab.RunResult], folder) -> lab.Results:
    """The results, with a metrics.jsonl for each run whose last point is its score + 0.01."""
    found = []
    for run in runs:
        place = folder / "runs" / run.spec.id
        place.mkdir(parents=True)
        end = run.scores.heldout.get("bits_per_byte", 5.0)
        rows = [
            {"step": step, "eval/bits_per_byte": [end + 0.01 + 3 * (fall - np.exp(-4))]}
            for step, fall in zip((10, 20, 30, 40), np.exp([-1, -2, -3, -4]), strict=True)
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (place / "metrics.jsonl").write_text("".join(lines))
        found.append(dataclasses.replace(run, folder=place))
    return lab.Results(found)
