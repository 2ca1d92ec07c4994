"""What words of config.json say; those that no computation reads are let pass with a warning."""

import math
import operator
import warnings

import pytest
from goldens import FULL, GROWING, LENGTH, SAME, SLIDING, golden_folder

from attnlab import pretrained
from attnlab.pretrained.fields import Source

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


BY_FACTORS = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, LENGTH: 8}
OF_ALL = YARN | {"mscale_all_dim": 1.0, "factor": 40.0}
WHOLE = 0.1 * math.log(40.0) + 1


def drops(*places, rate=0.5):
    return {"dropout.places": places, "dropout.rate": rate, "dropout.embedding_rate": rate}


READ = [
    # family, words of config.json, path in the config or word that is written -> its value
    ("roberta", {"pad_token_id": 0}, {"positions.pad_token": 0}),
    ("roberta", {"pad_token_id": 4}, {"positions.pad_token": 4}),
    ("mpnet", {"pad_token_id": 4}, {"positions.pad_token": 1}),  # transformers has no choice of it
    # Also where their share of a head, times its width, is rounded below them.
    ("gptj", {"n_embd": 88, "n_head": 2, "rotary_dim": 30}, {"rotary_size": 30, "rotary_dim": 30}),
    ("gptj", {"n_embd": 264, "n_head": 3, "rotary_dim": 60}, {"rotary_size": 60, "rotary_dim": 60}),
    ("gptj", {"n_embd": 392, "n_head": 4, "rotary_dim": 2}, {"rotary_size": 2, "rotary_dim": 2}),
    # What is written is above 0, for a window of the token itself as well.
    ("modernbert", {"local_attention": 1}, {"local_attention": 1}),
    ("mistral", {"sliding_window": 3, "layer_types": [SLIDING] * 32}, {"attention.window": 2}),
    ("mistral", {"sliding_window": None, "layer_types": [FULL] * 32}, {"attention.window": None}),
    # Where no word beside `rope_parameters` says the length of training, Phi-3 has its own.
    *(("phi3", {"rope_parameters": BY_FACTORS | {LENGTH: 8}} | said,
       {"positions.scaling": f"longrope:{length}" + ",1" * 48 + ",2" * 48})
      for said, length in (({}, 4096), ({LENGTH: 16}, 16))),
    # YaRN scales scores and rotated numbers, and scores of layers with rotary positions alone.
    *(("deepseek_v3", {"rope_parameters": OF_ALL | {"mscale": weight}, "num_hidden_layers": 2},
       {"positions.scale": pytest.approx(scale), "attention.layer_scales": (WHOLE**2,) * 2})
      for weight, scale in ((1.0, 1.0), (0.7, (0.07 * math.log(40.0) + 1) / WHOLE))),
    ("smollm3", {"rope_parameters": YARN | {"attention_factor": 1.5}, "num_hidden_layers": 4},
     {"attention.layer_scales": (2.25, 2.25, 2.25, 1.0)}),
    *(("ministral3", {"rope_parameters": rope}, {"attention.position_scale": (0.5, 8)})
      for rope in GROWING),
    # What config.json of the first releases calls "gelu", and no file that is written, is tanh's.
    *(("gemma", {"hidden_act": "gelu"} | more,
       {"ffn.activation": "gated_gelu_tanh", "hidden_act": "gelu_new"})
      for more in ({}, {"hidden_activation": "gelu_new"})),
    ("gemma", {"hidden_act": "gelu_python"},
     {"ffn.activation": "gated_gelu", "hidden_act": "gelu_python"}),
    # A bare model says the usual one of a head which somebody adds to it in transformers.
    ("modernbert", {"classifier_activation": "relu"},
     {"output.transform": None, "classifier_activation": "gelu"}),
    # Dropout is where transformers applies it.
    ("opt", {"dropout": 0.5}, drops("attention", "ffn")),
    ("bloom", {"hidden_dropout": 0.5}, drops("attention", "ffn")),
    ("falcon", {"hidden_dropout": 0.5}, drops("attention", "ffn")),
    ("phi3", {"embd_pdrop": 0.5}, drops("attention", "ffn", rate=0.0)),
    ("stablelm", {"hidden_dropout": 0.5}, drops("ffn")),
    ("dinov2", {"hidden_dropout_prob": 0.5}, drops("embeddings")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "words", "expected"), READ)
def test_words_that_set_fields(family, words, expected):
    """And what is written says the same."""
    family = pretrained.FAMILIES[family]
    config = family.read(words)[1]
    written = family.write(config)
    assert family.read(written)[1] == config
    for name, value in expected.items():
        found = written[name] if name in written else operator.attrgetter(name)(config)
        assert found == value, name


def test_a_number_of_classes_without_their_names():
    family, source = pretrained.FAMILIES["llama"], Source("LlamaForSequenceClassification")
    named = {"id2label": {str(i): f"a kind of {i}" for i in range(3)}}
    found = [family.read(words, source)[1] for words in ({"num_labels": 3}, named)]
    assert found[0] == found[1]
    assert found[0].output.num_classes == 3
