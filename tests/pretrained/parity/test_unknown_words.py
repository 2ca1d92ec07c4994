"""Words of config.json that transformers does not read change nothing that it computes.

pip install -e ".[test,parity]" && pytest -m parity tests/pretrained/parity
"""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.parity

from goldens import SAME, close  # noqa: E402

from attnlab import pretrained  # noqa: E402
from attnlab.pretrained import attributes  # noqa: E402

VALUES = (True, 2, 0.3, "none", [1, 0], {"factor": 2.0}, "sliding_attention")
OWN = ("my_note", "unsloth_fixed", "use_mrope", "auto_map", "model_max_length", "transformers.js")


def test_the_table_is_that_of_this_version():
    import transformers
    import words

    written = json.loads(words.FILE.read_text())
    if transformers.__version__ != written["transformers"]:
        pytest.skip(f"the table is of transformers {written['transformers']}")
    assert words.table() == written


@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_words_outside_the_table_change_nothing(family, tmp_path):
    """All that any other family reads and this one does not, with several values each."""
    import peers

    theirs = peers.make(family)
    theirs.save_pretrained(tmp_path)
    given = peers.inputs(family)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = peers.outputs(theirs, given)
    every = set(OWN).union(*(attributes.known_words(other) for other in pretrained.FAMILIES))
    one = pretrained.FAMILIES[family]
    fixed = {a.name for a in one.attributes} | set(attributes.FIXED)
    others = sorted(n for n in every - fixed if attributes.changes_nothing(family, n))
    others = [n for n in others if not attributes.matches(n, attributes.HARMLESS)]
    assert len(others) > 100
    for shift in range(3):
        words = {n: VALUES[(i + shift) % len(VALUES)] for i, n in enumerate(others)}
        (tmp_path / "config.json").write_text(json.dumps(words | config))
        loaded = type(theirs).from_pretrained(tmp_path, attn_implementation="eager").eval()
        got = peers.outputs(loaded, given)
        assert set(got) == set(expected)
        for name, a in expected.items():
            np.testing.assert_array_equal(got[name], a, name)
    (tmp_path / "config.json").write_text(json.dumps(words | config))
    with pytest.warns(UserWarning, match="ignored") as caught:
        found = pretrained.load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(caught) == 1
    assert found == pretrained.load_config(tmp_path)


@pytest.mark.parametrize(("family", "words", "others"), SAME)
def test_words_that_say_the_same(family, words, others, tmp_path):
    """In transformers too, and the outputs are those of our model."""
    import peer_outputs
    import peers

    theirs, given = peers.make(family), peers.inputs(family)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def outputs(changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        loaded = type(theirs).from_pretrained(tmp_path, attn_implementation="eager").eval()
        return peers.outputs(loaded, given)

    expected = outputs(others)
    for name, a in outputs(words).items():
        np.testing.assert_array_equal(a, expected[name], name)
    seen = peer_outputs.run(*pretrained.load(tmp_path), given)
    assert peer_outputs.compare(seen, expected, close)


@pytest.mark.parametrize("family", ["llama", "qwen3", "ministral3"])
def test_length_of_training_beside_the_rotary_words_counts(family, tmp_path):
    """As Phi-3 writes it; the other families of transformers read it there too."""
    import peer_outputs
    import peers

    rope = peers.YARN | ({"llama_4_scaling_beta": 0.7} if family == "ministral3" else {})
    theirs = peers.make(family, rope_parameters=rope)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = type(theirs).from_pretrained(tmp_path, attn_implementation="eager").eval()
    given = peers.inputs(family)
    expected = peers.outputs(loaded, given)
    assert np.abs(expected["logits"] - peers.outputs(theirs, given)["logits"]).max() > 1e-3
    seen = peer_outputs.run(*pretrained.load(tmp_path), given)
    peer_outputs.compare(seen, expected, close)
