"""Every malformed folder ends in one ValueError that names the file, the field and the value."""

import contextlib
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep
from goldens import FAMILIES, SOME_FAMILIES, split, write

from attnlab import pretrained

HUGE = [10**9, 2**31 - 1, 10**10, 10**30]
ODD = [-1, 0, True, 1.5, math.nan, math.inf, -math.inf, "x", None, [], {}, [[]], *HUGE]


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


def gpt2(tmp_path, changes=None, tensors=None):
    config, held, _, _ = split(FAMILIES["gpt2"])
    return write(tmp_path / "folder", config | (changes or {}), held | (tensors or {}))


ATTRIBUTES = [
    ("num_hidden_layers", 10**5, "100000"),  # of layers that share their weights, too
    ("model_type", ["gpt2"], "['gpt2']"),
    ("model_type", None, "None"),
    ("model_type", "g" * 5000, "ggg"),
    ("architectures", "GPT2Model", "'GPT2Model'"),
    ("architectures", [7], "[7]"),
    ("vocab_size", 10**30, "1000000"),
    ("n_inner", "wide", "'wide'"),
    ("n_layer", 10**5, "100000"),
    ("layer_norm_epsilon", -1e-5, "-1e-05"),
    ("layer_norm_epsilon", math.inf, "inf"),
    ("layer_norm_epsilon", 10**400, "1000"),
    ("resid_pdrop", math.nan, "nan"),
    ("is_causal", [7], "[7]"),
]


@pytest.mark.parametrize(("name", "value", "part"), ATTRIBUTES, ids=str)
def test_an_attribute(name, value, part, tmp_path):
    config, tensors, _, _ = split(FAMILIES["albert" if name.startswith("num_") else "gpt2"])
    folder = write(tmp_path / "folder", config | {name: value}, tensors)
    for load in (pretrained.load, pretrained.load_config):
        refused(functools.partial(load, folder), "config.json", name[:10], part)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[" * 10**5 + "]" * 10**5, ["nested"]),
        ('{"a":' * 10**5 + "1" + "}" * 10**5, ["nested"]),
        ('{"a": 1, "a": 2}', ["'a'", "twice"]),
        ('{"b": {"a": 1, "a": 1}}', ["'a'", "twice"]),
        ('{"' + "n" * 5000 + '": 1, "' + "n" * 5000 + '": 2}', ["nnn", "twice"]),
        ("9" * 5000, ["not JSON"]),
        ("[]", ["no JSON object"]),
        ("", ["not JSON"]),
    ],
    ids=[*"abcdefgh"],
)
def test_json(file, text, parts, tmp_path):
    folder = gpt2(tmp_path)
    if file != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(text)
    refused(lambda: pretrained.load(folder), file, *parts)


def test_bytes_that_are_no_text(tmp_path):
    folder = gpt2(tmp_path)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    refused(lambda: pretrained.load(folder), "config.json", "not JSON")


@pytest.mark.parametrize(
    "name", ["..", ".", "", "notes", "/", "a/b", "a\0b", "s" * 5000, "\ud800", 7, None, ["a"], {}]
)
def test_the_name_of_a_shard(name, tmp_path):
    folder = gpt2(tmp_path)
    (folder / "notes").mkdir()
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    refused(lambda: pretrained.load(folder), index.name, repr(name)[:20])
    index.write_text(json.dumps({"weight_map": [] if name else name}))
    refused(lambda: pretrained.load(folder), index.name, "weight_map")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_without_weights(family, tmp_path):
    config, _, _, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, {})
    refused(lambda: pretrained.load(folder))
    (folder / "model.safetensors").unlink()
    refused(lambda: pretrained.load(folder), "holds no model.safetensors")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", ""])
def test_the_name_of_a_folder(name, tmp_path):
    refused(lambda: pretrained.load(f"{tmp_path}/{name}"), "config.json")


def test_one_pattern_alone(tmp_path):
    folder = gpt2(tmp_path, {"my_note": 1})
    for load in (pretrained.load, pretrained.load_config):
        refused(functools.partial(load, folder, ignore="my_*"), "ignore=('my_*',)")


def test_a_file_in_the_place_of_its_folder(tmp_path, monkeypatch):
    name = gpt2(tmp_path).name
    monkeypatch.chdir(tmp_path)
    for path in (f"{name}/config.json", tmp_path / name / "model.safetensors"):
        refused(lambda: pretrained.load(path), str(path), "is a file; pass the folder")  # noqa: B023


def test_a_tensor_with_a_long_name(tmp_path):
    folder = gpt2(tmp_path, tensors={"t" * 5000: np.ones(2, np.float32)})
    refused(lambda: pretrained.load(folder), "ttt")
    pretrained.load(folder, ignore=("ttt*",))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt2", "rotary_emb.inv_freq"),
        ("gpt_neox", "rotary_emb.inv_freq"),
        ("modernbert", "embeddings.position_ids"),
    ],
)
def test_a_tensor_of_other_families(family, name, tmp_path):
    """What one family leaves unread is refused where its checkpoints never had it."""
    config, held, _, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, held | {name: np.ones(2, np.float32)})
    refused(lambda: pretrained.load(folder), name)


def test_a_tensor_twice_in_the_header(tmp_path):
    folder = gpt2(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length].rstrip()
    first = header.index(b'"transformer.h.0.ln_1.bias"')
    entry = header[first : header.index(b"}", first) + 1]
    twice = header[:-1] + b"," + entry + b"}"
    twice += b" " * (-len(twice) % 8)
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + whole[8 + length :])
    refused(lambda: pretrained.load(folder), "model.safetensors", "h.0.ln_1.bias", "twice")


NAME = "transformer.h.0.ln_1.bias"
BAD = {
    "nan": (np.float32, math.nan, ["nan", "allow_nonfinite"]),
    "inf": (np.float32, -math.inf, ["-inf", "allow_nonfinite"]),
    "bfloat16": (jnp.bfloat16, math.nan, ["nan", "allow_nonfinite"]),
    "beyond": (np.float64, 1e300, ["1e+300", "float32"]),
    "int": (np.int64, 1, ["int64"]),
    "bool": (np.bool_, 1, ["bool"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_weight(case, tmp_path):
    dtype, value, parts = BAD[case]
    bad = np.zeros(12, dtype)
    bad[5] = value
    folder = gpt2(tmp_path, tensors={NAME: bad})
    refused(lambda: pretrained.load(folder), "h.0.ln_1.bias", "model.safetensors", *parts)
    if "allow_nonfinite" in parts:
        params = pretrained.load(folder, allow_nonfinite=True)[1]
        got = params["layers"]["attention"]["norm"]["bias"][0, 5]
        np.testing.assert_array_equal(got, np.float32(value))
    else:
        refused(lambda: pretrained.load(folder, allow_nonfinite=True), "h.0.ln_1.bias")


def test_a_weight_in_a_packed_tensor(tmp_path):
    """One that lies beside others is looked at too."""
    name = "transformer.h.1.attn.c_attn.weight"
    bad = np.array(split(FAMILIES["gpt2"])[1][name])
    bad[3, -1] = np.nan
    folder = gpt2(tmp_path, tensors={name: bad})
    refused(lambda: pretrained.load(folder), "h.1.attn.c_attn.weight", "nan")


def test_rounding_and_range(tmp_path):
    """float64 is rounded to float32; float32 beyond the range of bfloat16 is refused there."""
    params = pretrained.load(gpt2(tmp_path, tensors={NAME: np.full(12, 0.1)}))[1]
    assert params["layers"]["attention"]["norm"]["bias"][0, 0] == np.float32(0.1)
    folder = gpt2(tmp_path, tensors={NAME: np.full(12, 3.4e38, np.float32)})
    pretrained.load(folder)
    refused(lambda: pretrained.load(folder, param_dtype="bfloat16"), "h.0.ln_1.bias", "bfloat16")


@pytest.mark.parametrize("fields", [{"width": 24}, {"num_layers": 1}, {"max_len": 2}])
def test_fields_that_change_the_shapes_of_weights(fields, tmp_path):
    refused(lambda: pretrained.load(gpt2(tmp_path), **fields), *fields, "shapes of weights")


def test_nonfinite_weights_are_written_on_request(tmp_path):
    folder = gpt2(tmp_path, tensors={NAME: np.full(12, np.inf, np.float32)})
    model, params = pretrained.load(folder, allow_nonfinite=True)
    refused(
        lambda: pretrained.save(tmp_path / "saved", model, params), "layers.attention.norm.bias"
    )
    assert not (tmp_path / "saved").exists()
    pretrained.save(tmp_path / "saved", model, params, allow_nonfinite=True)
    again = pretrained.load(tmp_path / "saved", allow_nonfinite=True)[1]
    jax.tree.map(np.testing.assert_array_equal, params, again)


@pytest.mark.parametrize("family", deep(FAMILIES, *SOME_FAMILIES))
def test_no_attribute_ends_in_another_error(family, tmp_path):
    """Each attribute, each odd value: a ValueError, or the same shapes as the file."""
    config, tensors, _, _ = split(FAMILIES[family])
    names = [one.name for one in pretrained.FAMILIES[family].attributes]
    folder = write(tmp_path / "folder", config, tensors)
    pretrained.load(folder)
    for name in {*names, "rope_theta", "rope_scaling", "rope_parameters", "is_decoder"}:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(config | {name: value}))
            try:
                with contextlib.suppress(ValueError):
                    pretrained.load(folder)
            except Exception as error:
                raise AssertionError(f"{name} = {value!r}: {error!r}") from error


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("outer", ["rope_parameters", "rope_scaling"])
def test_rotary_positions(family, outer, tmp_path):
    config, tensors, _, _ = split(FAMILIES[family])
    folder = write(tmp_path / "folder", config, tensors)
    linear = {"rope_type": "linear", "factor": 2.0}
    names = ["rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "full_attention"]
    for name, value, given in itertools.product(names, [*ODD, 10**400], [{}, linear]):
        text = json.dumps(config | {outer: given | {name: value}})
        (folder / "config.json").write_text(text)
        with contextlib.suppress(ValueError):
            pretrained.load_config(folder)


HEADS = [
    ("bert", "BertForMultipleChoice", "classifier.bias", "BertForMaskedLM"),
    ("llama", "LlamaForReward", "v_head.weight", "LlamaForCausalLM"),
    ("t5", "T5ForQuestionAnswering", "qa_outputs.weight", "T5ForConditionalGeneration"),
    ("bart", "BartForSequenceClassification", "classification_head.dense.bias", "BartModel"),
    ("vit", "ViTForMaskedImageModeling", "classifier.bias", "ViTForImageClassification"),
    ("dinov2", "Dinov2ForImageClassification", "classifier.bias", "Dinov2Model"),
]


@pytest.mark.parametrize(("family", "architecture", "tensor", "known"), HEADS)
def test_a_task_head(family, architecture, tensor, known, tmp_path):
    config, held, _, _ = split(FAMILIES[family])
    config |= {"architectures": [architecture]}
    folder = write(tmp_path / "folder", config, held | {tensor: np.ones(2, np.float32)})
    message = refused(lambda: pretrained.load(folder), architecture, known, tensor, "base_model")
    assert "ignore" not in message
