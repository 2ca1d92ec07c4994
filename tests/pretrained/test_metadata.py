"""What a folder says and no computation reads is there again after load and save."""

import dataclasses
import json

import numpy as np
import pytest
from goldens import FAMILIES, golden_folder, said, saved, split, write

from attnlab import pretrained
from attnlab.models import ModelConfig, OutputHead, from_dict, from_json, to_json
from attnlab.pretrained.tensors import read_file
from experiments.configs import pretrained as config_file

TOKENS = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8, "unk_token_id": None}
TOKENS |= {"forced_bos_token_id": 9, "sep_token_id": 10, "cls_token_id": 11, "mask_token_id": 12}
TOKENS |= {"decoder_start_token_id": 3}
NAMES = {str(i): f"a kind of {i}" for i in range(5)}
KEPT = {
    **dict.fromkeys(("llama", "mistral", "bert", "mbart", "marian", "phi3"), TOKENS),
    # Positions are counted by an id that is that of the model.
    "roberta": {"pad_token_id": 4, "eos_token_id": 6},
    "vit": {"id2label": NAMES, "label2id": {name: int(i) for i, name in NAMES.items()}},
}


def load(tmp_path, family="llama", words=TOKENS):
    return pretrained.load(golden_folder(tmp_path / "theirs", family, words))


def changed(model, **fields):
    return dataclasses.replace(model.config, **fields).build()


@pytest.mark.parametrize(("family", "words"), KEPT.items())
def test_words_are_kept(family, words, tmp_path):
    """Ids of special tokens and names of classes."""
    found = saved(tmp_path / "ours", *load(tmp_path, family, words))
    assert {name: found[name] for name in words} == words
    assert found["model_type"] == family


OTHER_CLASSES = [
    {"id2label": {"0": "a kind"}, "label2id": {"a kind": 0}},
    {"num_labels": 3, "problem_type": "regression"},
]


@pytest.mark.parametrize("words", OTHER_CLASSES)
def test_names_and_number_of_the_classes_of_another_classifier(words, tmp_path):
    """They are not kept for a model with 5."""
    model, params = load(tmp_path, "gpt2", words)
    head = OutputHead(kind="none", pooler="last", num_classes=5, classifier_bias=False)
    other = changed(model, output=head)
    params = params | {"classifier": np.ones((model.config.width, 5), np.float32)}
    found = saved(tmp_path / "ours", other, params)
    assert len(found["id2label"]) == len(found["label2id"]) == 5
    assert not {"num_labels", "problem_type"} & set(found)
    assert pretrained.load_config(tmp_path / "ours") == other.config


def test_the_head_of_next_sentences_keeps_its_name(tmp_path):
    config, tensors, _, _ = split(FAMILIES["bert"])
    tensors = {n: a for n, a in tensors.items() if not n.startswith("cls.predictions.")}
    words = {"architectures": ["BertForNextSentencePrediction"]}
    theirs = write(tmp_path / "theirs", config | words, tensors)
    found = saved(tmp_path / "ours", *pretrained.load(theirs))
    assert found["architectures"] == words["architectures"]
    assert set(read_file(tmp_path / "ours" / "model.safetensors")) == set(tensors)


def test_ids_without_a_word_in_config_json(tmp_path):
    """The reader's defaults, as it would have filled them in: none where it knows none; a new model
    has none that a reader could fill in."""
    config, tensors, _, _ = split(FAMILIES["llama"])
    config = {n: a for n, a in config.items() if not n.endswith("_token_id")}
    model, params = pretrained.load(write(tmp_path / "theirs", config, tensors))
    new = changed(model, metadata="")
    for one, family, ids in (
        (model, "llama", [1, 2]), (model, "mistral", [1, 2]), (new, "llama", [None, None]),
    ):  # fmt: skip
        found = saved(tmp_path / "ours", one, params, family=family)
        assert [found[f"{n}_token_id"] for n in ("bos", "eos")] == ids
        assert "pad_token_id" not in found


def test_generation_config(tmp_path):
    generation = {"eos_token_id": [6, 7, 9], "temperature": 0.6, "do_sample": True}
    theirs = golden_folder(tmp_path / "theirs", "llama", TOKENS)
    (theirs / "generation_config.json").write_text(json.dumps(generation))
    model, params = pretrained.load(theirs)
    pretrained.save(tmp_path / "ours", model, params)
    assert said(tmp_path / "ours", "generation_config.json") == generation
    # That of another model would be read beside a model without one.
    pretrained.save(tmp_path / "ours", changed(model, metadata=""), params)
    assert not (tmp_path / "ours" / "generation_config.json").exists()


def test_another_model_type_where_the_first_cannot_write_the_model(tmp_path):
    model, params = load(tmp_path)
    attention = dataclasses.replace(model.config.attention, window=4)
    found = saved(tmp_path / "ours", changed(model, attention=attention), params)
    assert found["model_type"] != "llama"
    assert found["eos_token_id"] == TOKENS["eos_token_id"]


def test_metadata_is_kept_in_json_and_changes_no_comparison(tmp_path):
    """Also through the flags of a run that starts from the folder."""
    folder = golden_folder(tmp_path / "theirs", "llama", TOKENS)
    found = pretrained.load_config(folder)
    plain = dataclasses.replace(found, metadata="")
    assert json.loads(found.metadata)["config"]["eos_token_id"] == TOKENS["eos_token_id"]
    assert (found, hash(found)) == (plain, hash(plain))
    assert "metadata" not in repr(found)
    assert "metadata" not in json.loads(to_json(ModelConfig()))["model"]
    of_run = from_dict(config_file.get_config(str(folder)).model.to_dict())
    for config in (found, of_run):
        assert from_json(to_json(config)).metadata == found.metadata


@pytest.mark.parametrize("text", ["x", "[1]", "3"])
def test_metadata_that_are_something_else(text, tmp_path):
    model, params = load(tmp_path)
    with pytest.raises(ValueError, match="metadata must be JSON"):
        pretrained.save(tmp_path / "ours", changed(model, metadata=text), params)
