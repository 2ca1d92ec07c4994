"""Rows without a training, and rows of the whole study with known effects, for tests."""

import math
import re

import numpy as np
import pandas
from pandas import DataFrame

from experiments.studies.head_width import design
from experiments.studies.head_width.rates import fit_rates
from experiments.studies.head_width.rows import COLUMNS, PUBLISHED, runs_of
from experiments.studies.head_width.spec import BATCH_TOKENS, num_steps

PLAN = (PUBLISHED / "plan.md").read_text()
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FLOPS = {16: 10_000, 32: 180_224, 64: 557_056, 96: 1_130_496}
SD_SEED, SD_RESIDUAL, SD_TEXT = 0.013, 0.028, 0.016
"""Standard deviations that the plan's power section takes: text is of a difference, 2x32 - 4x16."""
EFFECTS = {"best": 4.5, "b2": 0.006, "wide": 0.02, "narrow": 0.03, "albert": 0.12,
           "attention_only": 0.0, "k": 0.05, "trend": 0.5}  # fmt: skip
NOTHING = EFFECTS | {"wide": 0.0, "albert": 0.0, "attention_only": 0.01, "trend": 0.0}
"""P1 is 0 (4x16 and 2x32 lie around the best), S2, S3 and S4 are 0, S5 is at its margin."""


def check_page(made, name):
    """A page has the words of the committed one, and its numbers up to rounding."""
    kept = (PUBLISHED / name).read_text()
    assert NUMBER.sub("#", made) == NUMBER.sub("#", kept)
    found, expected = ([float(n) for n in NUMBER.findall(text)] for text in (made, kept))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-4)


def rows_of(runs, bits):
    """Rows of runs with these validation bits, infinite where they diverged."""
    lines = [
        run.fields
        | {
            "ffn_width": 4 * run.variant.width, "parameters": 200_000,
            "flops_per_token": FLOPS[run.variant.width], "steps": num_steps(run),
            "bytes_trained": num_steps(run) * BATCH_TOKENS,
            "status": "complete" if one < 99 else "diverged", "heldout_bits": one + 0.1,
            "validation_bits": one, "train_bits": one - 0.1, "unigram": 4.5, "ngram3": 2.6,
            "ngram4": 2.1, "ngram5": 2.0, "gzip": 2.5, "text_sha256": "d1", "commit": "abc",
            "seconds": 100.0, "cpu_seconds": 99.0, "machine": "a machine", "version": 1,
        }
        for run, one in zip(runs, bits, strict=True)
    ]  # fmt: skip
    return DataFrame(lines, columns=COLUMNS)


def bits_of(run):
    """Best at 0.008 / sqrt(h / 16); fan_in is best by 0.02 and does not depend on h."""
    if run.parametrization == "fan_in":
        return 1.98 + 0.05 * math.log(run.learning_rate / 0.008) ** 2
    best = 0.008 * (16 / run.variant.head_dim) ** 0.5
    return 2.0 + 0.05 * math.log(run.learning_rate / best) ** 2


def complete(stage, rows, bits_of=bits_of):
    """What the command does: runs until the stage asks for no more."""
    while True:
        done = set(runs_of(rows))
        left = [run for run in design.stage_runs(stage, rows) if run not in done]
        if not left:
            return rows
        rows = pandas.concat([*([rows] if len(rows) else []), rows_of(left, map(bits_of, left))])


def study_rows(stages):
    """Rows of stages 0, 1 and `stages`."""
    rows = DataFrame(columns=COLUMNS)
    for stage in (0, 1, *stages):
        rows = complete(stage, rows)
    return rows.reset_index(drop=True)


class Simulation:
    """Draws of held-out bits for the judged rows of `rows`."""

    def __init__(self, rows, effects=EFFECTS):
        self.effects, self.formula = effects, fit_rates(rows[rows["stage"] == 1])
        self.rows = r = rows[rows["stage"] >= 2].reset_index(drop=True)
        self.u = np.log2(r["head_dim"].to_numpy(float)) - 4
        self.v = np.log2((r["num_heads"] * r["head_dim"] / r["width"]).to_numpy())
        size = np.log2((r["width"] / 64).to_numpy())
        best = effects["best"] + effects["trend"] * size
        x = np.log((r["learning_rate"] / self.formula.rates(r)).to_numpy())
        self.mean = (
            2.0 - 0.1 * size + effects["b2"] * ((self.u + 4 - best) ** 2 - best**2)
            + effects["wide"] * self.v**2 + effects["narrow"] * (r["layout"] == "narrow").to_numpy()
            + r["plan"].map(lambda plan: effects.get(plan, 0.0)).to_numpy() + effects["k"] * x**2
        )  # fmt: skip
        self.texts, self.seeds, self.plans = (
            np.unique(r[name], return_inverse=True)[1] for name in ("text", "seed", "plan")
        )
        self.shared = (r["plan"] != "separate").to_numpy()

    def bits(self, random):
        """One draw: text levels, random slopes of u and v, seeds, residuals, text x plan."""
        level, b, c = random.normal(size=(3, 8)) * np.array([[0.3], [SD_TEXT], [SD_TEXT]])
        seed = random.normal(size=self.seeds.max() + 1) * SD_SEED
        t = self.texts
        noise = random.normal(size=len(t)) * SD_RESIDUAL
        if self.shared.any():
            noise += (random.normal(size=(5, 8)) * SD_TEXT)[self.plans, t] * self.shared
        return self.mean + level[t] + b[t] * self.u + c[t] * self.v + seed[self.seeds] + noise

    def drawn_rows(self, random):
        """The rows with one draw as their held-out scores."""
        bits = self.bits(random)
        return self.rows.assign(heldout_bits=bits, validation_bits=bits, train_bits=bits)
