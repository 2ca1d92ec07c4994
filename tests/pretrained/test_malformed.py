"""Every malformed folder ends in one ValueError that names the file, the field and the value."""

import contextlib
import itertools
import json
import math
import os
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep
from goldens import ATTRIBUTES, FAMILIES, FULL, SLIDING, SOME_FAMILIES, golden_folder, split, write

from attnlab import pretrained
from attnlab.pretrained.tensors import INDEX, write_file

HUGE = [10**9, 2**31 - 1, 10**10, 10**30]
ODD = [-1, 0, True, 1.5, math.nan, math.inf, -math.inf, "x", None, [], {}, [[]], *HUGE]
ONES = np.ones(2, np.float32)


def refused(call, *parts):
    """The message of the ValueError that `call` raises."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is returned)
        call()
    assert type(caught.value) is ValueError
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert len(message) < 1000
    return message


def refused_folder(folder, *parts, **options):
    return refused(lambda: pretrained.load(folder, **options), *parts)


def rope(kind, **words):
    """rope_parameters of a kind."""
    return {"rope_parameters": {"rope_type": kind} | words}


NO_ROPE = {"rope_parameters": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "truncate": False}
QUANTIZED = {"quant_method": "bitsandbytes"}
WORDS = [
    *((family, {n: a}, f"{n} = ") for family in ATTRIBUTES for n, a in ATTRIBUTES[family].items()),
    *((family, {"per_layer_config": {"0": {}}}, "per_layer_config = ") for family in FAMILIES),
    ("marian", {"d_model": 9}, "d_model = 9 is odd"),
    ("gpt2", {"model_type": ["gpt2"]}, "model_type = ['gpt2']"),
    ("gpt2", {"model_type": None}, "model_type = None"),
    ("gpt2", {"model_type": "g" * 5000}, "model_type = 'ggg"),
    ("gpt2", {"model_type": "gpt2x"}, "unknown model_type 'gpt2x': did you mean 'gpt2'?"),
    # No reference, which would run code.
    ("gpt2", {"model_type": "os:getcwd"}, "unknown model_type 'os:getcwd'"),
    ("gpt2", {"model_type": "qwen3_next"}, "linear-attention"),
    ("gpt2", {"model_type": "mamba"}, "state-space"),
    ("gpt2", {"model_type": "deberta-v2"}, "disentangled"),
    ("gpt2", {"architectures": "GPT2Model"}, "architectures = 'GPT2Model'"),
    ("gpt2", {"architectures": [7]}, "architectures = [7]"),
    ("gpt2", {"vocab_size": 10**30}, "vocab_size = 1000000"),
    ("gpt2", {"n_inner": "wide"}, "n_inner = 'wide'"),
    ("gpt2", {"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon = -1e-05"),
    ("gpt2", {"layer_norm_epsilon": math.inf}, "layer_norm_epsilon = inf"),
    ("gpt2", {"layer_norm_epsilon": 10**400}, "layer_norm_epsilon = 1000"),
    ("gpt2", {"resid_pdrop": math.nan}, "resid_pdrop = nan"),
    ("gpt2", {"is_causal": [7]}, "is_causal = [7]"),
    ("llama", {"quantization_config": QUANTIZED}, "model.dequantize()"),
    ("llama", {"compression_config": QUANTIZED}, "model.dequantize()"),
    ("llama", rope("su3", factor=4.0), "rope_type = 'su3' is not supported"),
    ("llama", rope("yarn_smooth", factor=2.0), "rope_type = 'yarn_smooth' is not supported"),
    ("llama", rope("longrope", short_factor="x"), "short_factor = 'x' of the rotary"),
    ("llama", rope("longrope", short_factor=[1.0]), "rope_type 'longrope' needs long_factor"),
    ("llama", rope("longrope", short_factor=[1], long_factor=[1, 2]), "long_factor = [1, 2] has 2"),
    ("llama", rope("longrope", short_factor=[1.0], long_factor=[2.0]), "longrope needs 2 of each"),
    ("llama", rope("yarn", factor=2.0, truncate=1), "truncate = 1 of the rotary"),
    ("llama", rope("yarn", factor=2.0, mscale=0), "mscale = 0 of the rotary"),
    ("llama", rope("linear", factor="two"), "factor = 'two' of the rotary positions"),
    ("llama", rope("linear", factor=True), "factor = True of the rotary positions"),
    ("llama", rope("linear"), "rope_type 'linear' needs factor"),
    ("llama", NO_ROPE | {"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs"),
    ("llama", rope("default", mscale=2), "mscale = 2 of the rotary positions"),
    ("llama", rope("llama3", factor=2, low_freq_factor=4, high_freq_factor=1),
     "low_freq_factor must be less than high_freq_factor"),
    ("llama", rope("default", partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not"),
    # What versions of transformers read differently.
    ("cohere", NO_ROPE, "rope_parameters has no rope_theta"),
    ("olmo3", NO_ROPE, "rope_parameters has no rope_theta"),
    ("olmo3", NO_ROPE | {"rope_theta": 9.0}, "rope_theta = 9.0 is not supp"),
    ("gpt_oss", NO_ROPE | {"rope_theta": 9.0}, "no rope_type, and its"),
    ("modernbert", {"rope_scaling": rope("linear", factor=2.0)}, "rope_scaling = {'rope_param"),
    ("gemma3_text", {"rope_parameters": {"full_attention": YARN}}, "truncate = False"),
    ("gemma3_text", NO_ROPE | {"rope_scaling": YARN}, "truncate = False"),
    ("gemma3_text", NO_ROPE | {"rope_scaling": {"type": "linear"}}, "needs rope_type"),
    *((family, rope("linear", factor=3.0, rope_theta=77.0)
       | {"rope_scaling": {"type": "linear", "factor": 3.0}},
       "rope_parameters.rope_theta = 77.0 is not read beside rope_scaling")
      for family in ("llama", "qwen2", "ministral3")),
    ("phi3", rope("linear", factor=2.0), "rope_type = 'linear' is not supported"),
    ("llama", rope("linear", factor=2.0, note=1), "note = 1 of the rotary positions (rope_ty"),
    ("llama", rope("linear", factor=2.0, note=1), "delete it from config.json"),
    *(("mistral", {"sliding_window": window, "layer_types": [one, other]}, f"only '{one}' for")
      for window, one, other in ((3, SLIDING, FULL), (None, FULL, SLIDING))),
    *((family, {"layer_types": None, "sliding_window_pattern": pattern},
       f"sliding_window_pattern = {pattern!r} needs layer_types")
      for family in ("exaone4", "cohere2", "gemma3_text") for pattern in ("LLLG", None, 0)),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 3}, "slow_but_exact = True is supported"),
]  # fmt: skip
"""(family, words of its config.json, what the message has)"""
OTHERS = {bool: ["yes"], int: ["two"], float: ["two"], str: [7], list: [3], dict: [[1]]}
"""Type of an attribute -> values that it does not have."""


def wrong_values(attribute, config):
    """Of another type, too small, or no activation."""
    kind = attribute.kind or type(attribute.default)
    names_activation = kind is str and "act" in attribute.name and attribute.name in config
    values = OTHERS.get(kind, []) + ["mish"] * names_activation
    return [*values, attribute.least - 1] if kind is int else values


@pytest.mark.parametrize("family", FAMILIES)
def test_words_that_change_what_is_computed(family, tmp_path):
    """Refused by name; another word can be left out by a pattern."""
    config, tensors, _, _ = split(FAMILIES[family])
    rows = [(words, part) for one, words, part in WORDS if one == family]
    for one in pretrained.FAMILIES[family].attributes:
        wrong = wrong_values(one, config)
        rows += [({one.name: a}, f"config.json: {one.name} = {a!r}") for a in wrong]
    folder = write(tmp_path / "folder", config, tensors)
    for words, part in rows:
        (folder / "config.json").write_text(json.dumps(config | words))
        file = "config.json" if part.endswith(" = ") else ""
        message = refused(lambda: pretrained.load_config(folder), part, file)
        assert QUANTIZED not in words.values() or "ignore" not in message
    (folder / "config.json").write_text(json.dumps(config | {"my_note": [1]}))
    assert pretrained.load_config(folder, ignore=("my_note",)).width > 0


FILES = [
    ("[" * 10**5 + "]" * 10**5, "nested"),
    ('{"a":' * 10**5 + "1" + "}" * 10**5, "nested"),
    ('{"a": 1, "a": 2}', "the key 'a' twice"),
    ('{"b": {"a": 1, "a": 1}}', "the key 'a' twice"),
    ('{"' + "n" * 5000 + '": 1, "' + "n" * 5000 + '": 2}', "nnn"),
    ("9" * 5000, "not JSON"),
    ("[]", "no JSON object"),
    ("{", "not JSON"),
    ("", "not JSON"),
    (b"\xff\xfe{}", "not JSON"),
]


@pytest.mark.parametrize("file", ["config.json", INDEX, "generation_config.json"])
def test_files_that_are_no_json(file, tmp_path):
    folder = golden_folder(tmp_path / "folder", "gpt2")
    if file == INDEX:
        (folder / "model.safetensors").unlink()
    for text, part in FILES:
        (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        refused_folder(folder, file, part)


def test_several_files_with_an_index(tmp_path):
    whole = pretrained.load(golden_folder(tmp_path / "whole", "bert"))[1]
    config, tensors, _, _ = split(FAMILIES["bert"])
    folder, names = write(tmp_path / "parts", config, tensors), sorted(tensors)
    (folder / "model.safetensors").unlink()
    (folder / "notes").mkdir()
    for i in range(2):
        write_file(folder / f"part-{i}.safetensors", {name: tensors[name] for name in names[i::2]})

    def load(places):
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        return pretrained.load(folder)[1]

    index = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    jax.tree.map(np.testing.assert_array_equal, whole, load(index))
    wrong = index | {names[0]: index[names[1]]}
    refused(lambda: load(wrong), f"disagree about the tensor '{names[0]}'")
    for name in ["..", ".", "", "notes", "/", "a/b", "a\0b", "s" * 5000, "\ud800", 7, None, ["a"],
                 {}, "../whole/model.safetensors"]:  # fmt: skip
        refused(lambda: load(index | {names[0]: name}), INDEX, repr(name)[:20])  # noqa: B023
        refused(lambda: load([] if name else name), INDEX, "weight_map")  # noqa: B023


def test_the_name_of_a_folder(tmp_path, monkeypatch):
    for name in ("x" * 5000, "a\0b"):
        refused_folder(f"{tmp_path}/{name}", "no folder")
    refused_folder(tmp_path / "nowhere", "there is no folder", "nowhere")
    refused_folder(tmp_path, "config.json is missing")
    folder = golden_folder(tmp_path / "folder", "gpt2", {"my_note": 1})
    for load in (pretrained.load, pretrained.load_config):
        refused(lambda: load(folder, ignore="my_*"), "ignore=('my_*',)")  # noqa: B023
    monkeypatch.chdir(tmp_path)
    for path in ("folder/config.json", folder / "model.safetensors"):
        refused_folder(path, str(path), "is a file; pass the folder")


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_that_are_missing_or_too_many(family, tmp_path):
    """None, no file, and one more, which can be left out by a pattern."""
    config, tensors, _, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, {})
    refused_folder(folder)
    (folder / "model.safetensors").unlink()
    refused_folder(folder, "holds no model.safetensors")
    name = "decoder.0.weight" if family == "vit" else "classifier.weight"
    write(folder, config, tensors | {name: np.ones((2, 12), np.float32)})
    refused_folder(folder, "1 tensors have no place", f"'{name}'")
    pretrained.load(folder, ignore=(f"{name.partition('.')[0]}.*",))


@pytest.mark.parametrize("family", deep(FAMILIES, *SOME_FAMILIES))
def test_a_tensor_that_is_missing_or_of_a_wrong_shape_is_named(family, tmp_path):
    """Any one of them, unless its absence means another model: a bare one, or one without heads."""
    config, tensors, _, _ = split(FAMILIES[family])
    for name, a in tensors.items():
        short = name.removeprefix(pretrained.FAMILIES[family].table.prefix)
        left = {other: one for other, one in tensors.items() if other != name}
        folder = write(tmp_path / "folder", config, left)
        refused_folder(folder, f"missing, the first is '{short}'")
        wrong = np.concatenate([a] * 2)
        folder = write(tmp_path / "folder", config, left | {name: wrong})
        message = refused_folder(folder, f"'{short}' has shape {wrong.shape}")
        assert f"asks for {a.shape}" in message


NAME, PACKED = "transformer.h.0.ln_1.bias", "transformer.h.1.attn.c_attn.weight"


def weight(dtype, value, name=NAME):
    bad = split(FAMILIES["gpt2"])[1][name].astype(dtype)
    bad.flat[-1] = value
    return {name: bad}


TENSORS = [
    ("gpt2", weight(np.float64, 1e300), ["h.0.ln_1.bias", "1e+300", "float32"]),
    ("gpt2", weight(np.int64, 1), ["h.0.ln_1.bias", "model.safetensors", "int64"]),
    ("gpt2", weight(np.bool_, 1), ["h.0.ln_1.bias", "model.safetensors", "bool"]),
    ("gpt2", {"more": np.ones(2, np.uint32)}, ["'more' has the unknown dtype 'U32'"]),
    ("gpt2", {"t" * 5000: ONES}, ["ttt"]),
    # What one family leaves unread is refused where its checkpoints never had it.
    ("gpt2", {"rotary_emb.inv_freq": ONES}, ["rotary_emb.inv_freq"]),
    ("gpt_neox", {"rotary_emb.inv_freq": ONES}, ["rotary_emb.inv_freq"]),
    ("modernbert", {"embeddings.position_ids": ONES}, ["embeddings.position_ids"]),
]
NONFINITE = [
    (weight(np.float32, math.nan), ["h.0.ln_1.bias", "nan"]),
    (weight(np.float32, -math.inf), ["h.0.ln_1.bias", "-inf"]),
    (weight(jnp.bfloat16, math.nan), ["h.0.ln_1.bias", "nan"]),
    (weight(np.float32, math.nan, PACKED), ["h.1.attn.c_attn.weight", "nan"]),
]


def test_tensors_that_are_no_weights(tmp_path):
    for i, (family, tensors, parts) in enumerate(TENSORS):
        folder = golden_folder(tmp_path / str(i), family, tensors=tensors)
        refused_folder(folder, *parts, allow_nonfinite=True)
        if "unknown dtype" not in parts[0] and not {NAME} & set(tensors):
            pretrained.load(folder, ignore=tuple(tensors))
    # float64 is rounded to float32; float32 beyond the range of bfloat16 is refused there.
    folder = golden_folder(tmp_path / "wide", "gpt2", tensors={NAME: np.full(12, 0.1)})
    params = pretrained.load(folder)[1]
    assert params["layers"]["attention"]["norm"]["bias"][0, 0] == np.float32(0.1)
    folder = golden_folder(tmp_path / "large", "gpt2", tensors=weight(np.float32, 3.4e38))
    pretrained.load(folder)
    refused_folder(folder, "h.0.ln_1.bias", "bfloat16", param_dtype="bfloat16")


def test_weights_that_are_not_finite(tmp_path):
    """Read and written on request alone."""
    for i, (tensors, parts) in enumerate(NONFINITE):
        folder = golden_folder(tmp_path / str(i), "gpt2", tensors=tensors)
        refused_folder(folder, "model.safetensors", "allow_nonfinite", *parts)
        assert pretrained.load_config(folder).width == 12  # reads no weight
        model, params = pretrained.load(folder, allow_nonfinite=True)
        saved = tmp_path / f"saved {i}"
        refused(lambda: pretrained.save(saved, model, params), "layers.attention.")  # noqa: B023
        assert not saved.exists()
        pretrained.save(saved, model, params, allow_nonfinite=True)
        again = pretrained.load(saved, allow_nonfinite=True)[1]
        jax.tree.map(np.testing.assert_array_equal, params, again)
        if NAME in tensors:
            got = params["layers"]["attention"]["norm"]["bias"][0]
            np.testing.assert_array_equal(got, tensors[NAME].astype(np.float32))


def test_damaged_files(tmp_path):
    folder = golden_folder(tmp_path / "folder", "bert")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    damaged = [whole[:kept] for kept in (0, 5, 100, len(whole) - 1)]
    damaged.append(whole[:8] + b"x" * length + whole[8 + length :])
    damaged.append(whole.replace(b'"F32"', b'"F33"', 1))
    for found in damaged:
        path.write_bytes(found)
        refused_folder(folder, "model.safetensors is no whole safetensors file")
    header = whole[8 : 8 + length].rstrip()
    first = header.index(b'"bert.embeddings.LayerNorm.bias"')
    entry = header[first : header.index(b"}", first) + 1]
    twice = header[:-1] + b"," + entry + b"}"
    twice += b" " * (-len(twice) % 8)
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + whole[8 + length :])
    refused_folder(folder, "model.safetensors", "embeddings.LayerNorm.bias", "twice")


class Trap:
    """Unpickled, it leaves a folder behind."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_a_pickle_is_refused_and_never_opened(tmp_path):
    folder = golden_folder(tmp_path / "folder", "bert")
    trap = [pickle.dumps(Trap(tmp_path / "sprung"), protocol) for protocol in range(2, 6)]
    for content in (*trap, b"PK" + bytes(700)):
        (folder / "model.safetensors").write_bytes(content)
        assert re.search("pickle .* never opened", refused_folder(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused_folder(folder, "holds no model.safetensors", "never opened")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("fields", [{"width": 24}, {"num_layers": 1}, {"max_len": 2}])
def test_fields_that_change_the_shapes_of_weights(fields, tmp_path):
    refused_folder(golden_folder(tmp_path / "a", "gpt2"), *fields, "shapes of weights", **fields)


ROPE_WORDS = "rope_type type rope_theta factor partial_rotary_factor full_attention".split()  # noqa: SIM905
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("family", deep(FAMILIES, *SOME_FAMILIES[::2]))
def test_no_value_ends_in_another_error(family, tmp_path):
    """Each attribute, each odd value: a ValueError, or the same shapes as the file."""
    config, tensors, _, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, tensors)
    pretrained.load(folder)
    outer = {"rope_scaling", "rope_parameters"}
    names = {one.name for one in pretrained.FAMILIES[family].attributes}
    changes = itertools.product(names | outer | {"rope_theta", "is_decoder"}, ODD)
    rotary = itertools.product(outer & names, [{}, LINEAR], ROPE_WORDS, [*ODD, 10**400])
    inner = [(name, given | {word: value}) for name, given, word, value in rotary]
    calls = {pretrained.load: changes, pretrained.load_config: inner}
    for call, name, value in ((f, *change) for f, own in calls.items() for change in own):
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        try:
            with contextlib.suppress(ValueError):
                call(folder)
        except Exception as error:
            raise AssertionError(f"{name} = {value!r}: {error!r}") from error


HEADS = [
    ("bert", "BertForMultipleChoice", "classifier.bias", "BertForMaskedLM"),
    ("llama", "LlamaForReward", "v_head.weight", "LlamaForCausalLM"),
    ("t5", "T5ForQuestionAnswering", "qa_outputs.weight", "T5ForConditionalGeneration"),
    ("bart", "BartForSequenceClassification", "classification_head.dense.bias", "BartModel"),
    ("vit", "ViTForMaskedImageModeling", "classifier.bias", "ViTForImageClassification"),
    ("dinov2", "Dinov2ForImageClassification", "classifier.bias", "Dinov2Model"),
]


def test_heads_of_tasks_that_are_not_read(tmp_path):
    for family, architecture, tensor, known in HEADS:
        words = {"architectures": [architecture]}
        folder = golden_folder(tmp_path / family, family, words, {tensor: ONES})
        assert "ignore" not in refused_folder(folder, architecture, known, tensor, "base_model")


COPIES = [
    ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("modernbert", "decoder.weight", "model.embeddings.tok_embeddings.weight"),
    ("bart", "model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("t5", "decoder.embed_tokens.weight", "shared.weight"),
]


@pytest.mark.parametrize(("family", "copy", "original"), COPIES)
def test_a_tensor_that_is_stored_twice_has_the_same_numbers(family, copy, original, tmp_path):
    """transformers 5 reads both where they differ, 4 the one or the other."""
    again = split(FAMILIES[family])[1][original].astype(np.float64)
    pretrained.load(golden_folder(tmp_path / "folder", family, tensors={copy: again}))
    again[..., -1] += 1
    folder = golden_folder(tmp_path / "folder", family, tensors={copy: again})
    short = copy.removeprefix("model.")
    refused_folder(folder, f"the tensor '{short}' differs")
    for name in (copy, short):
        pretrained.load(folder, ignore=(name,))
