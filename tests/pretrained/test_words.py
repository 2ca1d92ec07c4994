"""Words of config.json that no computation reads are let pass with a warning."""

import warnings

import pytest
from goldens import FULL, GOLDEN, SAME, SLIDING, golden_folder, split, write

from attnlab import pretrained

[CLASSES] = [path for path in GOLDEN if path.stem == "llama-classes"]
CODE = dict(AutoConfig="configuration_x.XConfig", AutoModelForCausalLM="modeling_x.XForCausalLM")
HUB = {
    # family: (words of folders on the hub which transformers passes over, those it reads)
    "llama": (
        {"is_llama_config": True, "transformers.js_config": {"kv_cache_dtype": {"fp16": "x"}}},
        dict(pretraining_tp=1, rope_interleaved=False, rope_scaling=None, torch_dtype="bfloat16"),
    ),
    "qwen2": (dict(model_max_length=16384, unsloth_fixed=True), dict(use_mrope=False)),
    "phi3": (
        dict(auto_map=CODE),
        dict(_name_or_path="Phi-3-mini-4k-instruct", attention_bias=False, use_cache=True),
    ),
    "falcon": (
        dict(auto_map=CODE, use_flash_attn=True),
        dict(apply_residual_connection_post_layernorm=False, torch_dtype="bfloat16"),
    ),
    "gpt2": ({"n" * 5000: 1} | {f"word_{i}": [i] for i in range(100)}, {}),
}


def warned(folder):
    """(config, the messages of all warnings)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = pretrained.load_config(folder)
    return config, [str(one.message) for one in caught]


@pytest.mark.parametrize("family", HUB)
def test_words_of_the_hub(family, tmp_path):
    """One short warning, which names the words that change nothing here, and no other word; none
    for those that are off."""
    passed, read = HUB[family]
    plain = pretrained.load_config(golden_folder(tmp_path / "plain", family))
    found, [message] = warned(golden_folder(tmp_path / "a", family, passed | read))
    assert found == plain
    assert all(word[:16] in message for word in list(passed)[:8])
    assert not any(word in message for word in read)
    assert ("not run" in message) == ("auto_map" in passed)
    assert len(message) < 1000
    for off in (None, False):
        given = dict.fromkeys(passed, off) | read
        assert warned(golden_folder(tmp_path / "b", family, given)) == (plain, [])
    quantized = dict.fromkeys(("quantization_config", "compression_config"))
    assert warned(golden_folder(tmp_path / "c", family, quantized)) == (plain, [])


@pytest.mark.parametrize(("family", "words", "others"), SAME)
def test_words_that_change_nothing(family, words, others, tmp_path):
    """They are read without a word, and say the same as others or none."""
    plain = pretrained.load_config(golden_folder(tmp_path / "plain", family, others))
    assert warned(golden_folder(tmp_path / "words", family, words)) == (plain, [])


@pytest.mark.parametrize(("window", "one", "other"), [(3, SLIDING, FULL), (None, FULL, SLIDING)])
def test_layer_types_of_a_family_with_one_window(window, one, other, tmp_path):
    words = {"sliding_window": window, "layer_types": [one] * 2}
    found = pretrained.load_config(golden_folder(tmp_path / "a", "mistral", words))
    assert found.attention.window == (window and window - 1)
    folder = golden_folder(tmp_path / "b", "mistral", words | {"layer_types": [one, other]})
    with pytest.raises(ValueError, match=rf"layer_types = .* only '{one}' for every layer"):
        pretrained.load_config(folder)


@pytest.mark.parametrize("pattern", ["LLLG", None, 0])
def test_a_pattern_of_layers_is_needed_without_layer_types(pattern, tmp_path):
    words = {"layer_types": None, "sliding_window_pattern": pattern}
    for family in ("exaone4", "cohere2", "gemma3_text"):
        folder = golden_folder(tmp_path / family, family, words)
        with pytest.raises(ValueError, match=r"sliding_window_pattern = .* needs layer_types"):
            pretrained.load_config(folder)


def test_a_number_of_classes_without_their_names(tmp_path):
    config, tensors, _, expected = split(CLASSES)
    count = expected["logits"].shape[-1]
    assert count != 2
    named = pretrained.load(write(tmp_path / "named", config, tensors))
    plain = {n: a for n, a in config.items() if n not in ("id2label", "label2id")}
    found = pretrained.load(write(tmp_path / "plain", plain | {"num_labels": count}, tensors))
    assert found[0].config.output == named[0].config.output


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
