"""Rows without a training, for tests."""

import dataclasses
import re

import numpy as np
from conftest import ROOT

from experiments.studies.head_width.rows import Baselines, Origin, Row, Scores, Sizes
from experiments.studies.head_width.spec import StudyRun, Variant

PUBLISHED = ROOT / "docs/results/head_width"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def check_page(made, name):
    """A page has the words of the committed one, and its numbers up to rounding."""
    kept = (PUBLISHED / name).read_text()
    assert NUMBER.sub("#", made) == NUMBER.sub("#", kept)
    found, expected = ([float(n) for n in NUMBER.findall(text)] for text in (made, kept))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-4)


def make_row(rate, bits=2.0, variant=Variant(4, 16), *, name="one_rate", text="python", **spec):  # noqa: B008
    """A row of one run with these validation bits."""
    status = "complete" if bits < 99 else "diverged"
    fields = dict(stage=0, seed=1) | spec
    return Row(
        StudyRun(variant=variant, parametrization=name, text=text, learning_rate=rate, **fields),
        Sizes(256, 216_448, 557_056, 1920, 3_932_160),
        Scores(status, bits + 0.1, bits, bits - 0.1),
        Baselines(4.5, 2.6, 2.1, 2.0, 2.5),
        Origin("d1", "abc", 100.0, 99.0, "a machine"),
    )


def of_spec(spec, bits):
    """The row of a spec."""
    row = make_row(spec.learning_rate, bits)
    return dataclasses.replace(row, spec=spec)
