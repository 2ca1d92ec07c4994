"""What a folder says and no computation reads is there again after load and save."""

import dataclasses
import json

import pytest
from goldens import FAMILIES, split, write

from attnlab import pretrained
from attnlab.models import ModelConfig, from_dict, from_json, to_json
from experiments.configs import pretrained as config_file

TOKENS = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8, "unk_token_id": None}
TOKENS |= {"forced_bos_token_id": 9, "sep_token_id": 10, "cls_token_id": 11, "mask_token_id": 12}
TOKENS |= {"decoder_start_token_id": 3}
GENERATION = {"eos_token_id": [6, 7, 9], "temperature": 0.6, "do_sample": True}


def said(folder, file="config.json"):
    return json.loads((folder / file).read_text())


def saved(family, words, tmp_path, change=lambda config: config, **options):
    """The folder after load and save, of a family's golden file with `words` in its config.json."""
    config, tensors, _, _ = split(FAMILIES[family])
    write(tmp_path / "theirs", config | words, tensors)
    model, params = pretrained.load(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", change(model.config).build(), params, **options)
    return tmp_path / "ours"


NAMES = {str(i): f"a kind of {i}" for i in range(5)}
LABELS = {"id2label": NAMES, "label2id": {name: int(i) for i, name in NAMES.items()}}
# Positions are counted by an id that is that of the model.
PADDED = {"pad_token_id": 4, "eos_token_id": 6}
KEPT = dict.fromkeys(("llama", "mistral", "bert", "mbart", "marian", "phi3"), TOKENS)


@pytest.mark.parametrize(("family", "words"), (KEPT | dict(roberta=PADDED, vit=LABELS)).items())
def test_words_are_kept(family, words, tmp_path):
    """Ids of special tokens and names of classes."""
    found = said(saved(family, words, tmp_path))
    assert {name: found[name] for name in words} == words
    assert found["model_type"] == family


def test_ids_without_a_word_in_config_json(tmp_path):
    """The reader's defaults, as it would have filled them in: none where it knows none."""
    config, tensors, _, _ = split(FAMILIES["llama"])
    config = {n: a for n, a in config.items() if not n.endswith("_token_id")}
    write(tmp_path / "theirs", config, tensors)
    model, params = pretrained.load(tmp_path / "theirs")
    ids = {}
    for family in ("llama", "mistral"):
        pretrained.save(tmp_path / family, model, params, family=family)
        found = said(tmp_path / family)
        ids[family] = [found.get(f"{n}_token_id") for n in ("bos", "eos", "pad")]
    assert ids == {"llama": [1, 2, None], "mistral": [1, 2, None]}


def test_a_new_model_has_no_ids_that_a_reader_could_fill_in(tmp_path):
    config, tensors, _, _ = split(FAMILIES["llama"])
    model, params = pretrained.load(write(tmp_path / "theirs", config | TOKENS, tensors))
    new = dataclasses.replace(model.config, metadata="").build()
    pretrained.save(tmp_path / "new", new, params, family="llama")
    assert [said(tmp_path / "new")[f"{n}_token_id"] for n in ("bos", "eos")] == [None, None]


def test_generation_config(tmp_path):
    config, tensors, _, _ = split(FAMILIES["llama"])
    theirs = write(tmp_path / "theirs", config | TOKENS, tensors)
    (theirs / "generation_config.json").write_text(json.dumps(GENERATION))
    model, params = pretrained.load(theirs)
    pretrained.save(tmp_path / "ours", model, params)
    assert said(tmp_path / "ours", "generation_config.json") == GENERATION
    # That of another model would be read beside a model without one.
    plain = dataclasses.replace(model.config, metadata="").build()
    pretrained.save(tmp_path / "ours", plain, params)
    assert not (tmp_path / "ours" / "generation_config.json").exists()
    (theirs / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"generation_config\.json is not JSON"):
        pretrained.load(theirs)


def test_another_model_type_where_the_first_cannot_write_the_model(tmp_path):
    wider = lambda c: dataclasses.replace(c, attention=dataclasses.replace(c.attention, window=4))
    found = said(saved("llama", TOKENS, tmp_path, wider))
    assert found["model_type"] != "llama"
    assert found["eos_token_id"] == TOKENS["eos_token_id"]


def test_metadata_is_kept_in_json_and_changes_no_comparison(tmp_path):
    config, tensors, _, _ = split(FAMILIES["llama"])
    found = pretrained.load_config(write(tmp_path / "theirs", config | TOKENS, tensors))
    plain = dataclasses.replace(found, metadata="")
    assert found.metadata
    assert found == plain
    assert hash(found) == hash(plain)
    assert from_json(to_json(found)).metadata == found.metadata
    assert "metadata" not in repr(found)
    assert "metadata" not in json.loads(to_json(ModelConfig()))["model"]


def test_a_run_that_starts_from_the_folder_keeps_metadata(tmp_path):
    """Through the flags of its config, so that the folder that it is exported to has them."""
    config, tensors, _, _ = split(FAMILIES["llama"])
    folder = write(tmp_path / "theirs", config | TOKENS, tensors)
    made = config_file.get_config(str(folder))
    found = from_dict(made.model.to_dict())
    assert json.loads(found.metadata)["config"]["eos_token_id"] == TOKENS["eos_token_id"]
    assert from_json(to_json(found)).metadata == pretrained.load_config(folder).metadata


@pytest.mark.parametrize("text", ["x", "[1]", "3"])
def test_metadata_that_are_something_else(text, tmp_path):
    config, tensors, _, _ = split(FAMILIES["llama"])
    model, params = pretrained.load(write(tmp_path / "theirs", config, tensors))
    wrong = dataclasses.replace(model.config, metadata=text).build()
    with pytest.raises(ValueError, match="metadata must be JSON"):
        pretrained.save(tmp_path / "ours", wrong, params)
