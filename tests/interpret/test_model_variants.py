"""Interpretation of encoders with heads of their own, layer types and scales."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from interpreted_models import config_of, random_params

from attnlab import heads
from attnlab.interpret import (
    circuit,
    decompose_scores,
    head_gates,
    head_predictions,
    model_panel,
    record,
)
from attnlab.models import Attention, EncoderConfig, LayerOverrides, ModelInputs, Relative

SOURCE = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32)
TOKENS = np.array([[6, 5, 3, 5, 8]], np.int32)
TEXTS = {"source": SOURCE, "tokens": TOKENS}
WORDS = {"source": list("abcdefg"), "tokens": list("hijkl")}
OWN_HEADS = config_of(
    kind="encoder_decoder", encoder=EncoderConfig(num_layers=2, num_heads=4), head_dim=6,
    positions=Relative(buckets=8), sharing="albert", num_layers=2,
)  # fmt: skip


@pytest.mark.slow
def test_an_encoder_with_its_own_number_of_heads():
    config, params = OWN_HEADS, random_params(OWN_HEADS)
    recording = record(config, params, TOKENS, ModelInputs(source=SOURCE))
    split = decompose_scores(recording, 1, 3, attention="encoder")
    scores = jnp.sum(split.terms, axis=(0, 1)) + split.bias
    assert_close(scores, recording.outputs.captured["encoder.scores"][1, :, 3], loosen=10)
    assert head_gates(config, "encoder.heads").shape == (2, 4)
    assert head_gates(config, "cross.heads", by="group").shape == (1, 3)
    assert circuit(config, params, "ov", attention="encoder").singular_values.shape == (2, 4, 6)
    with pytest.raises(ValueError, match="layers have 3 or 4 heads"):
        model_panel(config, params, TEXTS, WORDS)


@pytest.mark.slow
def test_layer_types_with_equal_heads_have_a_panel():
    types = ((1, LayerOverrides(window=2)), (1, LayerOverrides(sharing="albert")))
    config = config_of(num_layers=5, layer_types=types, num_heads=4, num_kv_heads=2)
    panel = model_panel(config, random_params(config), {"tokens": TOKENS}, WORDS)
    assert panel.maps[0].probs.shape == (5, 4, 5, 5)
    groups = panel.maps[0].plan["attention"]
    assert groups[1] == groups[3]
    assert len(set(groups)) == 4
    assert "2 layer types" in panel.description


def test_layer_types_with_different_heads_are_refused():
    types = ((1, LayerOverrides(heads=heads.Standard(num_heads=1))), (1, LayerOverrides()))
    config = config_of(layer_types=types)
    for call in (
        lambda: model_panel(config, {}, {"tokens": TOKENS}, WORDS),
        lambda: head_predictions(config, {}, []),
        lambda: head_gates(config),
    ):
        with pytest.raises(ValueError, match="layers have 1 or 3 heads"):
            call()


def test_circuits_have_the_scale_of_their_layer():
    config, scales = config_of(), (0.5, 1.0, 2.0)
    params = random_params(config)
    scaled = dataclasses.replace(config, attention=Attention(layer_scales=scales))
    plain = circuit(config, params, "qk").singular_values
    expected = plain * np.reshape(scales, (3, 1, 1))
    np.testing.assert_allclose(circuit(scaled, params, "qk").singular_values, expected, rtol=1e-12)
