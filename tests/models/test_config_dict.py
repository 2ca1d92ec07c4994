"""Configs as nested dicts for flags and as JSON: exact round trips, clear refusals."""

import dataclasses
import json

import numpy as np
import pytest

from attnlab.heads import EXTRAS, LAYOUTS, Extra, Latent, SoftCap, Standard
from attnlab.models import specs
from attnlab.models.config import LayerOverrides, ModelConfig
from attnlab.models.flags import choose, field_types, from_dict, from_json, to_dict, to_json
from attnlab.pretrained import PUBLISHED, published_config


@pytest.mark.parametrize("name", [*PUBLISHED, "transformer_base"])
def test_published_configs(name):
    config = published_config(name)
    assert from_json(to_json(config)) == from_dict(to_dict(config)) == config


def test_numbers_of_numpy_become_those_of_python():
    def config(integer, number, boolean):
        return ModelConfig(
            width=integer(8),
            heads=Standard(num_heads=integer(2), scale=number(0.5), extras=(SoftCap(number(2)),)),
            attention=specs.Attention(layer_scales=[number(0.5)] * 4),
            norm=specs.Norm(eps=number(0.25), scale=boolean(1)),
            layer_types=((integer(1), LayerOverrides(window=integer(3))), (1, LayerOverrides())),
        )

    numpy, plain = config(np.int32, np.float32, np.bool_), config(int, float, bool)
    assert (numpy, hash(numpy), repr(numpy)) == (plain, hash(plain), repr(plain))
    assert from_json(to_json(numpy)) == plain
    with pytest.raises(ValueError, match=r"num_heads must be a whole number .* not 2\.0"):
        config(np.float32, float, bool)


def test_json_keeps_its_meaning_when_defaults_change():
    """Every field of what was chosen is written, defaults too."""
    fields = json.loads(to_json(ModelConfig()))["model"]
    assert set(fields["heads"]) == {*field_types(Standard), "layout"}
    assert set(fields["ffn"]) == {*field_types(specs.FFN)}


def test_layouts_and_extras_from_outside(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Half(Standard):
        divisor: int = 2

    @dataclasses.dataclass(frozen=True)
    class Noise(Extra):
        rate: float = 0.1

    config = ModelConfig(heads=Half(num_heads=4, divisor=3, extras=(Noise(rate=0.5),)))
    with pytest.raises(ValueError, match="class Half"):
        to_dict(config)
    monkeypatch.setitem(LAYOUTS, "half", Half)
    with pytest.raises(ValueError, match="class Noise"):
        to_json(config)
    monkeypatch.setitem(EXTRAS, "noise", Noise)
    assert from_json(to_json(config)) == from_dict(to_dict(config)) == config
    fields = to_dict(ModelConfig())
    assert fields["heads"]["extras"]["noise"] == {"on": False, "rate": 0.1}
    fields["heads"] = choose(fields["heads"], "half") | {"divisor": 5}
    assert from_dict(fields).heads.divisor == 5


def test_another_choice_keeps_the_fields_that_both_have():
    config = ModelConfig(heads=Standard(num_heads=4, scale=0.5, biases=("q", "o")))
    fields = to_dict(config)["heads"]
    latent = choose(fields, "latent") | {"latent_dim": 5}
    heads = from_dict({"width": 64, "heads": latent}).heads
    assert (type(heads), heads.num_heads, heads.scale) == (Latent, 4, 0.5)
    assert set(heads.biases) == {"q", "o"} & set(Latent.bias_names)
    with pytest.raises(ValueError, match="'latnt'"):
        choose(fields, "latnt")
