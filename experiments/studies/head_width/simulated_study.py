"""Rows of the whole study with known effects, for tests."""

import dataclasses
import math

import numpy as np
from study_rows import of_spec
from test_head_width import bits_of, run_all

from experiments.studies.head_width import design
from experiments.studies.head_width.rates import fit_rates
from experiments.studies.head_width.rows import Scores, Sizes
from experiments.studies.head_width.spec import BATCH_TOKENS, num_steps

FLOPS = {32: 180_224, 64: 557_056, 96: 1_130_496}
SD_SEED, SD_RESIDUAL, SD_TEXT = 0.013, 0.028, 0.016
"""Standard deviations that the plan's power section takes: text is of a difference, 2x32 - 4x16."""
EFFECTS = {"best": 4.5, "b2": 0.006, "wide": 0.02, "narrow": 0.03, "albert": 0.12,
           "attention_only": 0.0, "k": 0.05, "trend": 0.5}  # fmt: skip
NOTHING = EFFECTS | {"wide": 0.0, "albert": 0.0, "attention_only": 0.01, "trend": 0.0}
"""P1 is 0 (4x16 and 2x32 lie around the best), S2, S3 and S4 are 0, S5 is at its margin."""


def mean_bits(spec, effects):
    """The expected score of a run, without its text."""
    v = spec.variant
    u, wide = math.log2(v.head_dim), math.log2(v.num_heads * v.head_dim / v.width)
    size = math.log2(v.width / 64)
    best = effects["best"] + effects["trend"] * size
    bits = (
        2.0 - 0.1 * size + effects["b2"] * ((u - best) ** 2 - best**2) + effects["wide"] * wide**2
    )
    bits += effects["narrow"] * (v.layout == "narrow")
    return bits + (effects[v.plan] if v.plan in ("albert", "attention_only") else 0.0)


def rows_of(stages):
    """Rows of stages 0, 1 and `stages`, with scores of 2 bits where they are judged."""
    rows = run_all(1, run_all(0, []))
    for stage in stages:
        for spec in design.stage_runs(stage, rows):
            total = num_steps(spec) * BATCH_TOKENS
            sizes = Sizes(
                4 * spec.variant.width, 200_000, FLOPS[spec.variant.width], total // 2048, total
            )
            rows.append(dataclasses.replace(of_spec(spec, bits_of(spec)), sizes=sizes))
    return rows


class Simulation:
    """Draws of held-out bits for the judged rows of `rows`."""

    def __init__(self, rows, effects=EFFECTS):
        self.effects, self.formula = effects, fit_rates([r for r in rows if r.spec.stage == 1])
        self.rows = [r for r in rows if r.spec.stage >= 2]
        s = [r.spec for r in self.rows]
        self.mean = np.array([mean_bits(one, effects) for one in s])
        self.u = np.array([math.log2(one.variant.head_dim) - 4 for one in s])
        self.v = np.array([math.log2(o.variant.num_heads * o.variant.head_dim / o.variant.width)
                           for o in s])  # fmt: skip
        rates = [self.formula.rate(o.variant, o.bytes_per_parameter) for o in s]
        x = np.log([o.learning_rate for o in s]) - np.log(rates)
        self.mean += effects["k"] * x**2
        self.texts = np.unique([o.text for o in s], return_inverse=True)[1]
        self.seeds = np.unique([o.seed for o in s], return_inverse=True)[1]
        self.plans = np.unique([o.variant.plan for o in s], return_inverse=True)[1]
        self.shared = np.array([o.variant.plan != "separate" for o in s])

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
        return [
            dataclasses.replace(row, scores=Scores("complete", float(b), float(b), float(b)))
            for row, b in zip(self.rows, self.bits(random), strict=True)
        ]
