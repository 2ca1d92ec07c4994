"""The law of part F on simulated studies whose exponents are known."""

import numpy as np
import pytest

from experiments.studies.study3 import worth
from experiments.studies.study3.worth import Law

DESIGN = worth.design_of(worth.planned())
TEXTS = 6


def simulated(law, rng, noise=0.006):
    """[texts, models]: each text has its own E, A and B; noise as of one seed."""
    terms = worth.basis(DESIGN, law)
    scales = np.array([1.2, 0.6, 0.2]) * (1 + 0.15 * rng.standard_normal((TEXTS, 3)))
    return scales @ terms.T + noise * rng.standard_normal((TEXTS, len(terms)))


def test_the_law_by_hand():
    """8 layers at D = 64 of which 4 share an attention: 8 FFNs and 2 attentions, r = 4."""
    index = [v.shared == "attention" and v.repeats == 4 and v.width == 64
             for v in worth.planned()].index(True)  # fmt: skip
    law = Law(alpha=0.5, beta=1.0, attention=0.5, ffn=0.1, both=0.0)
    counted = 8 * 8 / 12 + 4**0.5 * 2 * 4 / 12  # in layers
    expected = [1.0, counted**-0.5, 1.0]
    np.testing.assert_allclose(worth.basis(DESIGN, law)[index], expected)


@pytest.mark.parametrize("attention", [1.0, 0.0])
def test_phi_of_1_is_as_good_as_no_sharing_and_0_as_the_parameters_alone(attention):
    """Sharing that costs nothing has the loss of 8 layers of their own."""
    variants = worth.planned()
    law = Law(alpha=0.4, beta=1.0, attention=attention, ffn=attention, both=attention)
    terms = worth.basis(DESIGN, law)[:, 1]
    eight = next(i for i, v in enumerate(variants) if v.shared == "none" and v.num_layers == 8)
    two = next(i for i, v in enumerate(variants) if v.shared == "none" and v.num_layers == 2)
    both = next(i for i, v in enumerate(variants) if v.shared == "both" and v.repeats == 4)
    assert terms[both] == pytest.approx(terms[eight if attention else two])


def test_exponents_are_found_without_noise():
    law = Law(alpha=0.35, beta=0.8, attention=0.6, ffn=0.25, both=0.4)
    losses = simulated(law, np.random.default_rng(0), noise=0.0)
    found = worth.estimate(DESIGN, losses, draws=5)
    assert found.law.attention == pytest.approx(0.6, abs=1e-3)
    assert found.law.ffn == pytest.approx(0.25, abs=1e-3)
    assert found.law.both == pytest.approx(0.4, abs=1e-3)
    assert found.found["F1"].mean == pytest.approx(0.35, abs=1e-3)
    assert found.found["F2"].mean == pytest.approx(0.4 - 0.15, abs=1e-3)
    assert found.bootstrap["F1"] == pytest.approx((0.35, 0.35), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("law", [
    Law(alpha=0.35, beta=0.8, attention=0.4, ffn=0.4, both=0.16),  # F1 and F2 are not true
    Law(alpha=0.35, beta=0.8, attention=0.6, ffn=0.3, both=0.4),
], ids=["no difference", "a difference"])  # fmt: skip
def test_intervals_cover_and_false_positives_are_few(law):
    rng, draws = np.random.default_rng(7), 500
    found = [worth.estimate(DESIGN, simulated(law, rng)).found for _ in range(draws)]
    for name, of in worth.STATISTICS.items():
        covered = np.mean([one[name].low <= of(law) <= one[name].high for one in found])
        assert 0.92 <= covered <= 0.98, name
        if of(law) == 0:
            assert np.mean([one[name].p < 0.05 for one in found]) <= 0.06 + 0.02, name
