"""Tiny random models of transformers, with large weights: equal outputs, equal files.

pip install -e ".[test,parity]" && pytest -m parity tests/pretrained/parity
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.parity

from goldens import close, said  # noqa: E402

from attnlab import pretrained  # noqa: E402

NAMES = re.findall(r'^    "(.+?)": peer\(', Path(__file__).with_name("peers.py").read_text(), re.M)


@pytest.fixture(params=NAMES, scope="module")
def peer(request, tmp_path_factory):
    """(name, the peer's model, its folder); the tests of one name follow each other."""
    import peers  # fails, not skips, without torch and transformers

    assert set(NAMES) == set(peers.PEERS)
    model, folder = peers.make(request.param), tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return request.param, model, folder


def test_outputs_layer_by_layer(peer):
    """Also at other positions, where the peer takes them."""
    import peer_outputs
    import peers

    name, theirs, folder = peer
    calls = [peers.inputs(name)]
    if not name.startswith(("distilbert", "bloom", *peers.SEQ2SEQ)) and "input_ids" in calls[0]:
        positions = np.random.default_rng(3).integers(5, 30, calls[0]["input_ids"].shape)
        calls.append(calls[0] | {"position_ids": positions})
    model, params = pretrained.load(folder)
    for given in calls:
        seen = peer_outputs.run(model, params, given)
        compared = peer_outputs.compare(seen, peers.outputs(theirs, given), close)
        assert {"hidden", "probs"} <= set(compared)
        assert set(compared) & {"logits", "last", "classes"}


def test_round_trip(peer, tmp_path):
    """load, save, load in transformers: bit-equal, nothing missing, nothing unused."""
    import torch

    name, theirs, folder = peer
    model, params = pretrained.load(folder)
    # Several families can express the same model.
    pretrained.save(tmp_path / "ours", model, params, family=theirs.config.model_type)
    again, _ = pretrained.load(tmp_path / "ours")
    assert again.config == model.config or name == "albert-one-call-two-blocks"
    loaded, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    if name in ("albert-one-call-two-blocks", "deepseek_v3-halves"):
        return  # the same blocks, as two groups of one; the same pairs, as neighbours
    before, after = theirs.state_dict(), loaded.state_dict()
    assert set(before) == set(after)
    # Stored and never read: written as a copy of the bias that is read.
    unused = "cls.predictions.bias" if name == "bert-untied-gelu_new" else ""
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]) or key == unused, key


IDS = "bos eos pad sep cls mask unk decoder_start forced_bos forced_eos".split()  # noqa: SIM905


@pytest.mark.parametrize("family", pretrained.FAMILIES)
@pytest.mark.parametrize("generation", [False, True])
def test_ids_of_special_tokens(family, generation, tmp_path):
    """transformers reads those of the folder that was loaded, and none of a new model; also from
    generation_config.json."""
    import dataclasses

    import peers
    import transformers as tr

    theirs = peers.make(family)
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").unlink(missing_ok=True)
    ids = {f"{name}_token_id": 11 + i for i, name in enumerate(IDS)} | {"eos_token_id": [5, 6]}
    known = [field.name for field in dataclasses.fields(theirs.config)]
    kept = known if family != "xlm-roberta" else ()  # no word: the reader's own
    config = said(tmp_path / "theirs") | {name: i for name, i in ids.items() if name in kept}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    if generation:
        more = json.dumps({"eos_token_id": [5, 6, 7], "top_k": 9, "pad_token_id": 8})
        (tmp_path / "theirs" / "generation_config.json").write_text(more)
    model, params = pretrained.load(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", model, params)
    before, after = (tr.AutoConfig.from_pretrained(tmp_path / f) for f in ("theirs", "ours"))
    names = [name for name in known if name.endswith("_token_id")]
    assert after.model_type == before.model_type
    assert [getattr(after, n) for n in names] == [getattr(before, n) for n in names]
    if hasattr(type(theirs), "generate"):
        read = [type(theirs).from_pretrained(tmp_path / f) for f in ("theirs", "ours")]
        settings = [one.generation_config.to_diff_dict() for one in read]
        assert settings[0] == settings[1]
    new = dataclasses.replace(model.config, metadata="").build()
    pretrained.save(tmp_path / "new", new, params, family=family)
    fresh = type(theirs).from_pretrained(tmp_path / "new").config
    kept = {a.name for f in pretrained.FAMILIES[family].fields for a in f.attributes}
    kept |= {"eos_token_id"} if family.startswith("glm") else set()  # GLM's config replaces null
    if model.config.kind != "encoder_decoder":
        assert all(getattr(fresh, n) is None for n in names if n not in kept)


def test_what_config_json_leaves_out():
    """Defaults are those of transformers, or refused where its versions differ."""
    import peers

    differ = {"cohere", "cohere2", "gpt_oss", "olmo3"}
    unusable = {"glm4_moe"}  # default sizes of no model: 96 heads in 4,096 numbers
    classes = {config.model_type: config for _, config, _ in peers.PEERS.values()}
    for name, family in pretrained.FAMILIES.items():
        if name in unusable:
            continue
        expected = family.read(json.loads(classes[name]().to_json_string()))[1]
        if name not in differ:
            assert family.read({})[1] == expected, name
            continue
        with pytest.raises(ValueError, match="not the same in all versions"):
            family.read({})


NO_STEPS = "bert albert roberta xlm distil electra camembert vit dinov2 mpnet modernbert".split()  # noqa: SIM905
STEPPED = [
    n
    for n in NAMES
    if not n.startswith(tuple(NO_STEPS))
    and not n.endswith(("-classes", "-tokens", "-questions", "-both-ways"))
    and n not in ("gpt2-bare-inner-relu", "t5-encoder", "phi3-longrope")  # 12 tokens, trained for 8
]


@pytest.mark.parametrize("peer", STEPPED, indirect=True)
def test_step_by_step(peer):
    """Token by token with a cache, longer than a window: to 1e-3 of the spread of the logits."""
    import jax
    import peers

    _, theirs, folder = peer
    model, params = pretrained.load(folder)
    ids = np.random.default_rng(5).integers(5, 97, (2, 12))
    given, options = {"input_ids": ids}, {}
    if model.config.kind == "encoder_decoder":
        source = np.random.default_rng(6).integers(5, 97, (2, 9))
        given, options = {"input_ids": source, "decoder_input_ids": ids}, {"source": source}
    found = peers.outputs(theirs, given)
    expected = found["logits"] if "logits" in found else found["last_hidden_state"]
    step, cache, got = jax.jit(model.apply), model.config.init_cache(2, 12), []
    for i in range(12):
        outputs = step({"params": params}, ids[:, i : i + 1], cache=cache, **options)
        cache = outputs.cache
        got.append(outputs.hidden if outputs.logits is None else outputs.logits)
    error = np.abs(np.concatenate(got, axis=1) - expected).max()
    assert error < 1e-3 * expected.std()
