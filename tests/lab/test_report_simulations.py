"""What a report promises, on simulated scores: 95 % intervals hold the truth, and at most one
report in twenty names a difference that is not there.

Thousands of draws are judged by formulas on arrays; the public functions judge some of the same
draws and have to agree with them.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special

from attnlab.lab import RunSpec, Scores
from attnlab.lab.policies import AddSeeds, DecideComparisons
from attnlab.lab.stats import LOOKS, average_effects, compare_pairs

FACTORIALS = [(2, 2), (3, 2), (2, 3), (4, 4)]
SEEDS = 2, 3, 5
SPREADS = {
    "equal": lambda n: np.ones(n),
    "last": lambda n: np.linspace(1, 6, n),
    "first": lambda n: np.linspace(6, 1, n),  # the baseline varies most
}
CASES = [*((spread, False) for spread in SPREADS), ("equal", True), ("first", True)]
"""(spread, is there an interaction?)."""
FEW, MANY = 2_000, 20_000
DRAWS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
COVERED = {FEW: (0.925, 0.975), MANY: (0.935, 0.975)}
"""Draws -> the range of the coverage of every interval: of few draws chance allows more."""
FALSE = {FEW: 0.07, MANY: 0.055}


@dataclasses.dataclass
class Factorial:
    """Scores of every combination of two tags: mean + effect of the seed + noise."""

    levels: tuple[int, int]
    spread: str = "equal"
    interaction: bool = False

    @property
    def variants(self):
        rows, columns = map(range, self.levels)
        return [(("layout", a), ("plan", b)) for a, b in itertools.product(rows, columns)]

    @property
    def means(self):
        """[variants]; an interaction has no effect on averages."""
        rows, columns = (np.arange(n) - (n - 1) / 2 for n in self.levels)
        return np.outer(rows, columns).ravel() * 3.0 * self.interaction

    @property
    def pairs(self):
        """Every variant against the first."""
        return [(variant, self.variants[0]) for variant in self.variants[1:]]

    def draw(self, rng, draws, seeds):
        """[draws, variants, seeds]."""
        n = len(self.variants)
        noise = rng.normal(size=(draws, n, seeds)) * SPREADS[self.spread](n)[:, None]
        return self.means[:, None] + noise + rng.normal(size=(draws, 1, seeds))

    def scores(self, y):
        """Of one draw, for the public functions."""
        rows = zip(self.variants, y, strict=True)
        return {v: {("", s): float(x) for s, x in enumerate(row)} for v, row in rows}

    def gaps(self, y):
        """Differences of `pairs` [draws, pairs, seeds] and the true ones [pairs]."""
        return y[:, 1:] - y[:, :1], self.means[1:] - self.means[0]

    def effects(self, y):
        """Differences of averages from those of the first value [draws, effects, seeds]."""
        grid = y.reshape(len(y), *self.levels, -1)
        layouts, plans = grid.mean(2), grid.mean(1)
        return np.concatenate([layouts[:, 1:] - layouts[:, :1], plans[:, 1:] - plans[:, :1]], 1)


def paired(d, truth=0.0):
    """p of the true mean by Student's paired t (seeds on the last axis); half of the interval."""
    df, error = d.shape[-1] - 1, d.std(-1, ddof=1) / np.sqrt(d.shape[-1])
    p = 2 * special.stdtr(df, -abs(d.mean(-1) - truth) / error)
    return p, special.stdtrit(df, 0.975) * error


def false_families(p, null):
    """Share of the draws in which Holm's correction rejects a true hypothesis; p [draws, n]."""
    order = np.argsort(p, axis=1)
    ranked = np.take_along_axis(p, order, 1) * np.arange(p.shape[1], 0, -1)
    corrected = np.empty_like(p)
    np.put_along_axis(corrected, order, np.maximum.accumulate(ranked, axis=1), 1)
    return float((corrected < 0.05)[:, null].any(1).mean()) if null.any() else 0.0


def check(p, p_true, null, draws, about):
    low, high = COVERED[draws]
    covered = (p_true > 0.05).mean(0)
    assert low <= covered.min() <= covered.max() <= high, about
    assert false_families(p, null) <= FALSE[draws], about


def agree(found, p, half):
    """Do the public results of one draw have these p-values and intervals?"""
    np.testing.assert_allclose([c.difference.p for c in found], p, rtol=1e-6)
    widths = [c.difference.high - c.difference.mean for c in found]
    np.testing.assert_allclose(widths, half, rtol=1e-6)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("levels", FACTORIALS, ids=str)
def test_intervals_hold_whatever_the_spreads_of_the_variants(levels, draws):
    """Of every pair and of every averaged effect."""
    rng = np.random.default_rng(0)
    for seeds, (spread, interaction) in itertools.product(SEEDS, CASES):
        about = levels, seeds, spread, interaction
        factorial = Factorial(levels, spread, interaction)
        y = factorial.draw(rng, draws, seeds)
        gaps, truth = factorial.gaps(y)
        p, half = paired(gaps)
        check(p, paired(gaps, truth)[0], truth == 0, draws, about)
        of_effects, half_effects = paired(factorial.effects(y))
        check(of_effects, of_effects, np.ones(of_effects.shape[1], bool), draws, about)
        for i in range(2 if draws == FEW else 50):
            scores = factorial.scores(y[i])
            agree(compare_pairs(scores, factorial.pairs), p[i], half[i])
            agree(average_effects(scores), of_effects[i], half_effects[i])


class Sweep:
    """What a policy needs of results: a sweep whose scores are drawn beforehand."""

    metric, config = "loss", SimpleNamespace(to_dict=lambda: {"data": {}})

    def __init__(self, factorial, y, seeds):
        self.names, self.y = factorial.variants, y
        self.variants = {
            v: [self.run(i, s) for s in range(seeds)] for i, v in enumerate(self.names)
        }

    def run(self, i, seed):
        spec = RunSpec(f"{i}-seed{seed}", self.config, seed)
        return SimpleNamespace(spec=spec, scores=Scores(heldout={"loss": float(self.y[i, seed])}))

    def variant(self, tags):
        return tuple(tags.items())

    def scores(self):
        return {v: {("", r.spec.seed): r.scores.heldout["loss"] for r in runs}
                for v, runs in self.variants.items()}  # fmt: skip

    def follow(self, policy):
        """Runs what the policy proposes until it proposes nothing."""
        while proposed := policy.propose(self):
            for spec in proposed:
                i = int(spec.id.split("-")[0])
                self.variants[self.names[i]].append(self.run(i, spec.seed))
        return self.scores()


POLICIES = {
    "DecideComparisons": lambda pairs: DecideComparisons([(dict(a), dict(b)) for a, b in pairs]),
    "AddSeeds": lambda pairs: AddSeeds(half_width=2.0, most=12),
}


@pytest.mark.parametrize(
    ("levels", "draws"),
    [((2, 2), 100), *(pytest.param(n, 4000, marks=pytest.mark.slow) for n in FACTORIALS)],
    ids=str,
)
@pytest.mark.parametrize("spread", ["equal", "first"])
@pytest.mark.parametrize("policy", POLICIES)
def test_seeds_that_a_policy_adds_find_nothing_where_nothing_is(policy, spread, levels, draws):
    """To three seeds, up to nine are added. `DecideComparisons` looks at differences, so the test
    that holds at any time judges: it covers more than 97.5 %, since it promises 95 % to whoever
    looks after every seed. Averaged effects have the first three seeds."""
    factorial, looks = Factorial(levels, spread), policy == "DecideComparisons"
    held, wrong, added = [], 0, 0
    effects_held, effects_wrong = [], 0
    for y in factorial.draw(np.random.default_rng(2), draws, 12):
        scores = Sweep(factorial, y, 3).follow(POLICIES[policy](factorial.pairs))
        added += sum(map(len, scores.values())) > 3 * len(scores)
        found = compare_pairs(scores, factorial.pairs, seeds_added=looks)
        held += [c.difference.low <= 0 <= c.difference.high for c in found]
        wrong += any(c.conclusion in ("better", "worse") for c in found)
        planned = {v: {k: x for k, x in some.items() if k[1] < 3} for v, some in scores.items()}
        averages = average_effects(planned)
        effects_held += [c.difference.low <= 0 <= c.difference.high for c in averages]
        effects_wrong += any(c.conclusion in ("better", "worse") for c in averages)
    chance = 0.1 if draws < FEW else 0.01  # 4,000 draws: 3 standard errors
    assert added > draws / 4
    assert 0.935 - chance <= np.mean(held) <= (1.0 if looks else 0.975 + chance)
    assert wrong / draws <= 0.055 + chance
    assert 0.935 - chance <= np.mean(effects_held) <= 0.975 + chance
    assert effects_wrong / draws <= 0.055 + chance


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("texts", [2, 3, 4, 8])
def test_intervals_over_texts_hold(texts, draws):
    """With as many seeds for each text, and with unequal ones."""
    rng = np.random.default_rng(3)
    a, b = ((("v", "a"),), (("v", "b"),))
    unequal = [1 + (5 * i) % 6 for i in range(texts)]
    for seeds, spread in itertools.product(([1], [3], unequal), (0.0, 0.3, 1.0, 6.0)):
        counts = seeds * texts if len(seeds) == 1 else seeds
        means = rng.normal(size=(draws, texts)) * spread
        d = [means[:, [t]] + rng.normal(size=(draws, n)) for t, n in enumerate(counts)]
        p, half = paired(np.stack([of_text.mean(1) for of_text in d], axis=1))
        low, high = COVERED[draws]
        assert low <= (p > 0.05).mean() <= high, (texts, seeds, spread)
        for i in range(2):
            scores = {(f"text {t}", s): float(d[t][i, s])
                      for t, n in enumerate(counts) for s in range(n)}  # fmt: skip
            found = compare_pairs({a: scores, b: dict.fromkeys(scores, 0.0)}, [(a, b)])
            agree(found, p[i], half[i])


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("texts", [2, 3, 4, 8])
def test_looks_at_several_texts_find_nothing_where_nothing_is(texts, draws):
    """After 3, 6, 9 and 12 seeds of each text, as `DecideComparisons` adds them."""
    rng = np.random.default_rng(4)
    for spread in (0.0, 0.3, 0.6, 1.0, 2.0, 6.0):
        d = rng.normal(size=(draws, texts, 1)) * spread + rng.normal(size=(draws, texts, 12))
        looks = [LOOKS * paired(d[:, :, :n].mean(2))[0] < 0.05 for n in (3, 6, 9, 12)]
        assert np.any(looks, axis=0).mean() <= FALSE[draws], spread
