"""Whole models with other heads, and layouts from outside that have a form of their own."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep
from conversions import bases, each_head, logits, random_model, random_params

from attnlab import ModelConfig, transforms
from attnlab.heads import Blocked, Narrow, NarrowTied, Rewrite, Standard, Wide, weight_shapes
from attnlab.models import Alibi, Compute, LayerOverrides, Learned, NoPositions, Relative, Rotary
from attnlab.sharing import Plan
from attnlab.transforms import Conversion, ModelConversion, Undecided, convert, convert_model

STANDARD, WIDE, SIX = Standard(num_heads=3), Wide(num_heads=3), Standard(num_heads=6, head_dim=4)
MODEL = ModelConfig(width=12, heads=STANDARD, num_layers=2, vocab_size=17, max_len=9)
ROBERTA = dict(kind="encoder", max_len=11, positions=Learned(pad_token=1))
CASES = {
    "separate": (STANDARD, WIDE, {}, 2),
    "shared": (Narrow(num_heads=3), WIDE, dict(sharing="albert"), 1),
    "rotary": (NarrowTied(num_heads=3), SIX, dict(positions=Rotary()), 2),
    "encoder-decoder": (STANDARD, WIDE, dict(kind="encoder_decoder"), 2 + 2 + 2),
    "padding not counted": (STANDARD, WIDE, ROBERTA, 2),
}


def changed(**fields):
    return dataclasses.replace(MODEL, **fields)


@pytest.mark.parametrize("name", deep(CASES, "shared"))
def test_a_whole_model_there_and_back(name):
    one, two, options, groups = CASES[name]
    config = changed(heads=one, **options)
    params = random_model(config, scale=0.3)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 17, (2, 9)))
    expected = logits(config, params, tokens)
    for heads in (two, one):
        found = convert_model(config, params, heads=heads)
        assert isinstance(found, ModelConversion), found
        assert found.config == dataclasses.replace(config, heads=heads)
        assert len(found.errors) == groups
        assert max(map(max, found.errors.values())) < 4e-6
        config, params = found.config, found.params
        got = logits(config, params, tokens)
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_the_group_that_is_not_converted_is_named():
    config = changed(heads=WIDE, positions=Rotary())
    found = convert_model(config, random_model(config, scale=0.3), heads=STANDARD)
    assert isinstance(found, Undecided)
    assert found.reason.startswith("layers/attention, group 0")


@pytest.mark.parametrize("positions", [Alibi(), Relative()], ids=str)
def test_positions_that_differ_between_heads_keep_their_number(positions):
    """A slope, or a column of a table, belongs to each head; with as many heads all is exact."""
    config = changed(positions=positions)
    params = random_model(config, scale=0.5)
    with pytest.raises(ValueError, match=f"{positions.name}.* 3 heads cannot become 6; .*heads=3"):
        convert_model(config, params, heads=SIX)
    found = convert_model(config, params, heads=WIDE)
    assert isinstance(found, ModelConversion)
    assert found.logits_error < 1e-5


def test_rotary_positions_of_some_layers():
    """Where a layer has them, wide heads cannot compute the same, whatever other layers have."""
    types = ((1, LayerOverrides()), (1, LayerOverrides(positions=Rotary())))
    config = changed(positions=NoPositions(), layer_types=types)
    found = convert_model(config, random_model(config, scale=0.5), heads=WIDE)
    assert isinstance(found, Undecided)
    assert found.reason.startswith("layers_1/attention, group 0")


@pytest.mark.usefixtures("x64")
def test_a_layer_without_positions_among_rotary_ones():
    """Its queries and keys may have any basis, those of the others may not."""
    types = ((1, LayerOverrides(positions=NoPositions())), (1, LayerOverrides()))
    grouped = Standard(num_heads=6, num_kv_heads=2, head_dim=4)
    compute = Compute(dtype="float64")
    config = changed(heads=grouped, positions=Rotary(), layer_types=types, compute=compute)
    params = random_model(config, scale=0.5)
    for stack in ("layers_0", "layers_1"):
        group = params[stack]["attention"]
        own, each = each_head({n: group[n][0] for n in config.layout.shapes}, config.layout)
        if stack == "layers_0":
            own = transforms.reparametrize(own, each, qk=bases((6, 4, 4)))
        params[stack]["attention"] = group | {name: a[None] for name, a in own.items()}
    ungrouped = dataclasses.replace(config, heads=dataclasses.replace(grouped, num_kv_heads=6))
    found = convert_model(ungrouped, params, heads=grouped)
    assert isinstance(found, ModelConversion), found
    assert found.logits_error < 1e-9


def test_a_conversion_whose_outputs_cannot_be_compared_is_undecided():
    """Logits beyond the range of float32."""
    params = random_model(MODEL)
    params["embedding"] *= 1e38
    found = convert_model(MODEL, params, heads=WIDE)
    assert isinstance(found, Undecided)
    assert np.isnan(found.forward_error)
    assert "nan" in found.reason


def test_shared_keys_and_values_are_refused():
    plan = Plan(attention=(0, 1), ffn=(0, 1), kv=(0, 0))
    config = changed(sharing=plan)
    with pytest.raises(ValueError, match="change_plan"):
        convert_model(config, random_model(config, scale=0.3), heads=WIDE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubled(Standard):
    """Queries twice as long, so that its form is standard heads with another W_Q."""

    def project_q(self, params, x, rotate):
        return 2 * super().project_q(params, x, rotate)

    def general(self, *, rotary=False, shift_invariant=True):
        return Rewrite(self.to(Standard), lambda w: {**w, "q": 2 * w["q"]})

    def inverse(self, w, other, tolerance):
        return {"q": w["q"] / 2}


def test_a_layout_from_outside_is_converted_by_its_own_methods():
    """There and back, and to a layout beyond its form; a subclass without them is not."""
    outside, inside = Doubled(width=12, num_heads=3), Standard(width=12, num_heads=3)
    params = random_params(outside)
    there = convert(params, outside, inside)
    assert isinstance(there, Conversion)
    np.testing.assert_allclose(there.params["q"], 2 * params["q"], rtol=1e-14)
    assert isinstance(convert(there.params, inside, outside), Conversion)
    assert isinstance(convert(params, outside, Wide(width=12, num_heads=3)), Conversion)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Tripled(Doubled):
        def project_q(self, params, x, rotate):
            return 1.5 * super().project_q(params, x, rotate)

    other = Tripled(width=12, num_heads=3)
    assert isinstance(other.general(), Blocked)
    assert other.inverse(params, inside, 1e-12) is None
    assert weight_shapes(other) == weight_shapes(outside)
    assert not isinstance(convert(params, other, inside), Conversion)
