"""The variants of a layout differ in their precision alone."""

import dataclasses

from config_files import experiments, planned

from attnlab.models import Compute


def test_pairs_of_precisions():
    found = experiments("precision", "layouts=standard+wide")
    assert len(found) == 4
    models = [one.model for one in found.values()]
    for single, half in zip(models[::2], models[1::2], strict=True):
        assert dataclasses.replace(half, compute=single.compute) == single
        assert (single.compute, half.compute.dtype) == (Compute(), "bfloat16")
    pairs = planned("precision", "layouts=wide").description.pairs
    assert pairs == (
        ({"layout": "wide", "dtype": "bfloat16"}, {"layout": "wide", "dtype": "float32"}),
    )
