"""The mixed model beside statsmodels."""

import functools
import warnings

import numpy as np
import pytest

from experiments.studies.head_width import analysis
from experiments.studies.head_width.mixed_model import fit_reml
from experiments.studies.head_width.simulated import Simulation, study_rows


@functools.cache
def simulation():
    return Simulation(study_rows((3,)))


@pytest.fixture(scope="module")
def frame():
    sim = simulation()
    frame = analysis.columns(sim.rows, sim.formula)
    frame["bits"] = sim.bits(np.random.default_rng(2))
    return frame


@pytest.mark.parametrize("draw", [2, 3, 4])
def test_reml_agrees_with_statsmodels(frame, draw):
    """Texts, slopes of texts and seeds. In draws 2 and 3 a search from theta = 1 steps onto
    theta = 0 of the seeds, where the gradient is 0, and must not stay there."""
    statsmodels = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    bits = simulation().bits(np.random.default_rng(draw))
    text, seed = (np.unique(frame[n], return_inverse=True)[1] for n in ("text", "seed"))
    u = frame["u"] - 4
    fixed = {"one": np.ones(len(u)), "u": u, "u2": u**2, "v": frame["v"]}
    of_text, of_seed = (np.eye(x.max() + 1)[x] for x in (text, seed))
    random = [of_text, of_text * u[:, None], of_seed]
    ours = fit_reml(bits, fixed, random, 8)
    names = [[[f"{i}-{j}" for j in range(z.shape[1])]] for i, z in enumerate(random)]
    components = statsmodels.VCSpec(["text", "slope", "seed"], names, [[z] for z in random])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "The MLE may be on the boundary of the parameter space."
        theirs = statsmodels.MixedLM(
            bits, np.column_stack(list(fixed.values())), np.zeros(len(u)), exog_vc=components
        ).fit(reml=True, method=["powell", "lbfgs"])
    assert ours.coefficients == pytest.approx(theirs.fe_params, abs=1e-6)
    errors = np.sqrt(np.diag(ours.covariance))
    assert errors[1:] == pytest.approx(np.asarray(theirs.bse_fe)[1:], rel=1e-2)
    # Their search stops a little earlier.
    assert -2 * theirs.llf - 0.05 < ours.criterion < -2 * theirs.llf + 1e-3
    assert np.array(ours.component_sd) == pytest.approx(np.sqrt(theirs.vcomp), rel=0.06)
    assert ours.residual_sd**2 == pytest.approx(theirs.scale, rel=1e-2)
