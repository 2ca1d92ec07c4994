"""Words of config.json that no computation reads are let pass with a warning."""

import warnings

import pytest
from goldens import golden_folder

from attnlab import pretrained

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
