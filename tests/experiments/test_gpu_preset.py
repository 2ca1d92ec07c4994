"""The preset `scale=gpu` of the main experiment."""

import math

import pytest
from config_files import planned

from attnlab.models import num_parameters
from experiments.configs import heads_and_sharing
from experiments.sweep import training_flops


def test_the_study_at_the_scale_of_a_gpu():
    """Nine variants of about 10 million parameters, and the minutes that the lab note names."""
    preset = "study,match=parameters,scale=gpu"
    config = heads_and_sharing.get_config(preset)
    assert config == heads_and_sharing.get_config("scale=gpu,match=parameters,study")
    specs = planned("heads_and_sharing", preset).specs()
    assert len(specs) == 9 * 10
    sizes = [num_parameters(spec.config.model) for spec in specs]
    assert 9e6 < min(sizes) <= max(sizes) < 1.01 * min(sizes) < 11e6
    assert {(s.config.model.compute.dtype, s.config.train.steps) for s in specs} == {
        ("bfloat16", 1000)
    }
    # Standard heads of separate layers: 4 D^2 + 2 D F in each of 4 layers and the LM head are
    # multiplied once a token, keys and values of 256 tokens beside; 3 passes of a seed.
    d, f, t = 352, 8 * 352, 256
    each = 2 * (4 * (4 * d**2 + 2 * d * f) + d * 256) + 4 * (2 * 2 * t * d)
    one = next(s for s in specs if s.tags == {"layout": "standard", "sharing": "separate"})
    assert training_flops([one]) == 3 * each * 1000 * 32 * t
    # With 5 learning rates of one seed each; three texts.
    minutes = 3 * training_flops(specs) * 1.5 / (0.3 * 989.4e12) / 60
    assert math.isclose(minutes, 27.6, abs_tol=0.1)
    assert "27.6 minutes" in heads_and_sharing.__doc__
    with pytest.raises(ValueError, match="gpu"):
        heads_and_sharing.get_config("scale=tpu")
