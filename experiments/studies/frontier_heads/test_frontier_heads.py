"""All variants cost as much as standard heads; what a variant adds is in its heads alone."""

import dataclasses

from config_files import experiments

from attnlab.models import flops_per_token
from experiments.studies.frontier_heads.study import DIFFERENTIAL, EXTRAS, STANDARD


def test_equal_flops():
    """Up to the FLOPs of one hidden unit of the FFNs."""
    found = {title: one.model for title, one in experiments("frontier_heads").items()}
    base = found.pop(STANDARD)
    assert list(found) == [DIFFERENTIAL, *EXTRAS]
    unit = base.num_layers * 4 * base.width
    for name, model in found.items():
        assert abs(flops_per_token(model, 64) - flops_per_token(base, 64)) <= unit
        assert dataclasses.replace(model, heads=base.heads, ffn=base.ffn) == base
        extras = [EXTRAS[name][0]] if name in EXTRAS else []
        assert list(model.heads.extras) == extras
