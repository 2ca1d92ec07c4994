"""Words of config.json that no computation reads are let pass with a warning, others refused."""

import contextlib
import warnings

import pytest
from goldens import FAMILIES, split, write
from hub_words import HUB, PASSED

from attnlab import pretrained


@contextlib.contextmanager
def warned():
    """The messages of all warnings."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(one.message) for one in caught]


def folder_of(family, words, tmp_path):
    config, tensors, _, _ = split(FAMILIES[family])
    return write(tmp_path / family, config | words, tensors)


@pytest.mark.parametrize("name", HUB)
def test_a_config_of_the_hub(name, tmp_path):
    """One warning, which names every word that changes nothing here."""
    family = HUB[name]["model_type"]
    config, tensors, _, _ = split(FAMILIES[family])
    words = {n: a for n, a in HUB[name].items() if n not in config and n != "rope_theta"}
    folder = write(tmp_path / family, config | words, tensors)
    with warned() as messages:
        model, _ = pretrained.load(folder)
    assert model.config == pretrained.load_config(write(tmp_path / "plain", config, tensors))
    assert len(messages) == bool(PASSED[name])
    assert all(word in messages[0] for word in PASSED[name])
    if "auto_map" in PASSED[name]:
        assert "not run" in messages[0]


@pytest.mark.parametrize("value", [None, False])
def test_a_word_that_is_off_passes_silently(value, tmp_path):
    pretrained.load_config(folder_of("phi3", {"attention_bias": value, "my_note": value}, tmp_path))


def test_a_long_name_is_cut(tmp_path):
    folder = folder_of("gpt2", {"n" * 5000: 1} | {f"word_{i}": i for i in range(100)}, tmp_path)
    with warned() as messages:
        pretrained.load_config(folder)
    assert len(messages) == 1
    assert len(messages[0]) < 1000


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_quantized_weights(name, tmp_path):
    folder = folder_of("llama", {name: {"quant_method": "bitsandbytes"}}, tmp_path)
    with pytest.raises(ValueError, match=f"{name}.*dequantize") as caught:
        pretrained.load(folder)
    assert "ignore" not in str(caught.value)
    pretrained.load(folder_of("llama", {name: None}, tmp_path))
