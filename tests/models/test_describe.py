"""The summary of a model adds up."""

import re

import pytest

from attnlab.heads import Latent, Wide
from attnlab.models import cost, specs
from attnlab.models.config import EncoderConfig, LayerOverrides, ModelConfig
from attnlab.models.describe import describe

CONFIGS = {
    "plain": ModelConfig(),
    "cla": ModelConfig(sharing="cla:2"),
    "encoder": ModelConfig(kind="encoder", heads=Latent(num_heads=4)),
    "two stacks": ModelConfig(kind="encoder_decoder", encoder=EncoderConfig(num_layers=2)),
    "one set of weights": ModelConfig(
        kind="encoder_decoder", encoder=EncoderConfig(shares_decoder=True), sharing="albert"
    ),
    "types": ModelConfig(
        layer_types=(
            (2, LayerOverrides(window=3, heads=Wide(num_heads=2))),
            (1, LayerOverrides(ffn=specs.FFN(width=8))),
        )
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_add_up(name):
    config = CONFIGS[name]
    table = describe(config, 16).split("\n\n")[2].splitlines()[1:]
    numbers = [
        tuple(int(n.replace(",", "")) for n in re.findall(r"[\d,]+", row)[-2:]) for row in table
    ]
    *rows, total = numbers
    assert total == (cost.num_parameters(config), cost.flops_per_token(config, 16))
    assert tuple(map(sum, zip(*rows, strict=True))) == total
    for stack in config.stacks:
        assert any(row.startswith(stack) for row in table)
