"""What does a model lose when its heads become GQA, MQA or latent heads, and does training mend it?

    python -m experiments.studies.approximate_conversion

A decoder of bytes (2 layers of width 64, 8 heads of 8, rotary positions, FFN 128) is trained for
400 steps on the default text. `approximate_model` converts it, from the weights alone or by least
squares on 64 rows of the training part, and every model is trained for 200 more steps on the same
batches, the unconverted one too. Bits per byte are of 256 rows of the held-out part.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas

from attnlab import FFN, ModelConfig, training
from attnlab.data import Text
from attnlab.data.dataset import Dataset
from attnlab.heads import Latent, Standard, cache_bytes_per_token
from attnlab.interpret import token_loss
from attnlab.lab.stats import paired_difference
from attnlab.models import Rotary
from attnlab.report.page import table
from attnlab.training import EvaluationConfig, OptimizerConfig, TrainConfig
from attnlab.transforms import approximate_model
from experiments.studies.rows import render

MODEL = ModelConfig(
    width=64, num_layers=2, heads=Standard(num_heads=8), ffn=FFN(width=128), positions=Rotary(),
    max_len=65,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=400, batch_size=8, seeds=(0, 1, 2, 3, 4),
    optimizer=OptimizerConfig(learning_rate=0.003),
    evaluation=EvaluationConfig(every=1000, windows=64, curve_windows=1),
)  # fmt: skip
MORE = dataclasses.replace(
    TRAIN,
    steps=200,
    optimizer=OptimizerConfig(learning_rate=0.001),
    seeds=(10, 11, 12, 13, 14),
)
HEADS = {
    "GQA, 2 key heads": Standard(num_heads=8, num_kv_heads=2),
    "MQA": Standard(num_heads=8, num_kv_heads=1),
    "latent of 24, 8 rotated": Latent(
        num_heads=8, latent_dim=24, rotary_dim=8, latent_norm=False
    ),
}  # fmt: skip
UNCHANGED = "8 key heads, unchanged"


def trained(config: ModelConfig, train: TrainConfig, data: Dataset, start: Any = None) -> list[Any]:
    """Parameters of every seed."""
    objective = training.OBJECTIVES["causal_lm"]
    options = training.FitOptions(params=start)
    found = training.fit_in_memory(config.build(), objective, train, data, options=options)
    return [found.params(i) for i in range(len(train.seeds))]


def run(train: TrainConfig = TRAIN, more: TrainConfig = MORE) -> Iterator[dict[str, Any]]:
    """A row for each heads, method and seed."""
    data = Text().load(train.length)
    heldout, rows = (jnp.asarray(a["tokens"]) for a in (data.heldout(256), data.train(64)))

    def bits(config: ModelConfig, params: Any) -> float:
        loss = token_loss(config, params, heldout[:, :-1], targets=heldout[:, 1:])
        return float(loss({}).mean()) / math.log(2)

    before = trained(MODEL, train, data)
    variants = [(UNCHANGED, MODEL.heads, "")]
    variants += [(n, heads, m) for n, heads in HEADS.items() for m in ("weights", "inputs")]
    for name, heads, method in variants:
        config, errors, start = MODEL, [0.0] * len(before), before
        if method:
            found = [
                approximate_model(
                    MODEL, params, heads=heads, tokens=rows[:, :-1], fit=method == "inputs"
                )
                for params in before
            ]
            config, start = found[0].config, [one.params for one in found]
            errors = [float(np.mean([error for _, error in one.approximations])) for one in found]
        after = trained(config, more, data, start)
        cache = cache_bytes_per_token(config.layout, bytes_per_number=1)
        for i, seed in enumerate(train.seeds):
            yield {
                "heads": name, "method": method, "seed": seed, "cache": cache,
                "error": f"{errors[i]:.4f}", "before": f"{bits(MODEL, before[i]):.4f}",
                "converted": f"{bits(config, start[i]):.4f}",
                "trained": f"{bits(config, after[i]):.4f}",
            }  # fmt: skip


def write_rows(path: Path) -> pandas.DataFrame:
    """All rows anew, as they are read from the file."""
    pandas.DataFrame(run()).to_csv(path, index=False)
    return pandas.read_csv(path)


METHODS = {"": "", "weights": "from the weights", "inputs": "least squares"}


def words(differences: pandas.Series) -> str:
    """Mean and interval over seeds; "inconclusive" where the interval holds zero."""
    found = paired_difference(differences)
    text = f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    return text + ", inconclusive" * (found.low <= 0 <= found.high)


def page(rows: pandas.DataFrame) -> str:
    """The Markdown page of the rows."""
    rows = rows.fillna({"method": ""})
    of = {
        key: some.set_index("seed") for key, some in rows.groupby(["heads", "method"], sort=False)
    }
    unchanged, lines, fitted = of[UNCHANGED, ""].trained, [], []
    for (name, method), some in of.items():
        lost = words(some.trained - unchanged) if method else ""
        numbers = (f"{some[n].mean():.3f}" for n in ("error", "before", "converted", "trained"))
        lines.append((name, METHODS[method], str(some.cache.iloc[0]), *numbers, lost))
        if method == "inputs":
            from_weights = of[name, "weights"]
            fitted.append((name, words(some.converted - from_weights.converted),
                           words(some.trained - from_weights.trained)))  # fmt: skip
    latent, grouped = of["latent of 24, 8 rotated", "inputs"], of["GQA, 2 key heads", "inputs"]
    header = ("heads", "converted", "cache", "error", "before", "after", "200 steps later",
              "above the unchanged model")  # fmt: skip
    return render(
        __file__,
        variants=table(header, lines),
        fitted=table(("heads", "at once", "200 steps later"), fitted),
        latent=words(latent.trained - grouped.trained),
        seeds=rows.seed.nunique(),
    )
