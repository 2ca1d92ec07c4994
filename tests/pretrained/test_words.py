"""Words of config.json that no computation reads are let pass with a warning."""

import warnings

import pytest
from goldens import FAMILIES, golden_folder, split
from hub_words import HUB, PASSED

from attnlab import pretrained

LONG = {"n" * 5000: 1} | {f"word_{i}": i for i in range(100)}


def warned(folder):
    """(config, the messages of all warnings)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = pretrained.load_config(folder)
    return config, [str(one.message) for one in caught]


@pytest.mark.parametrize("name", HUB)
def test_a_config_of_the_hub(name, tmp_path):
    """One warning, which names every word that changes nothing here."""
    family = HUB[name]["model_type"]
    config = split(FAMILIES[family])[0]
    words = {n: a for n, a in HUB[name].items() if n not in config and n != "rope_theta"}
    found, messages = warned(golden_folder(tmp_path / family, family, words))
    assert found == pretrained.load_config(golden_folder(tmp_path / "plain", family))
    assert len(messages) == bool(PASSED[name])
    assert all(word in messages[0] for word in PASSED[name])
    assert "auto_map" not in PASSED[name] or "not run" in messages[0]


@pytest.mark.parametrize("value", [None, False])
def test_a_word_that_is_off_passes_silently(value, tmp_path):
    for family, name in (("phi3", "attention_bias"), ("phi3", "my_note")):
        assert warned(golden_folder(tmp_path / "a", family, {name: value}))[1] == []
    for name in ("quantization_config", "compression_config"):
        assert warned(golden_folder(tmp_path / "a", "llama", {name: None}))[1] == []


def test_a_long_name_is_cut(tmp_path):
    [message] = warned(golden_folder(tmp_path / "folder", "gpt2", LONG))[1]
    assert len(message) < 1000


@pytest.mark.parametrize("kind", ["linear", "yarn", "default"])
def test_queries_that_grow_beside_any_rotary_words(kind, tmp_path):
    """In the words of transformers before 5, too; what is written says the same."""
    words = {"rope_type": kind, "llama_4_scaling_beta": 0.5, "rope_theta": 50.0}
    words |= {"original_max_position_embeddings": 8}
    words |= {} if kind == "default" else {"factor": 4.0}
    read = lambda **given: pretrained.load_config(golden_folder(tmp_path, "ministral3", given))
    today = read(rope_parameters=words)
    assert today.attention.position_scale == (0.5, 8)
    assert read(rope_parameters=None, rope_scaling=words) == today
    written = pretrained.FAMILIES["ministral3"].write(today)
    assert read(rope_parameters=written["rope_parameters"]) == today
