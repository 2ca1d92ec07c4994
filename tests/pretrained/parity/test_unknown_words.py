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


def stored(family, folder):
    """(config.json of a peer, config.json -> what it computes then, its inputs)"""
    import peers

    theirs, given = peers.make(family), peers.inputs(family)
    theirs.save_pretrained(folder)

    def outputs(config):
        (folder / "config.json").write_text(json.dumps(config))
        loaded = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
        return peers.outputs(loaded, given)

    return json.loads((folder / "config.json").read_text()), outputs, given


def check_equal(got, expected):
    assert set(got) == set(expected)
    for name, a in expected.items():
        np.testing.assert_array_equal(got[name], a, name)


@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_words_outside_the_table_change_nothing(family, tmp_path):
    """All that any other family reads and this one does not, with several values each."""
    config, outputs, _ = stored(family, tmp_path)
    expected, plain = outputs(config), pretrained.load_config(tmp_path)
    every = set(OWN).union(*(attributes.known_words(other) for other in pretrained.FAMILIES))
    one = pretrained.FAMILIES[family]
    fixed = {a.name for a in one.attributes} | set(attributes.FIXED)
    others = sorted(n for n in every - fixed if attributes.changes_nothing(family, n))
    others = [n for n in others if not attributes.matches(n, attributes.HARMLESS)]
    assert len(others) > 100
    for shift in range(3):
        words = {n: VALUES[(i + shift) % len(VALUES)] for i, n in enumerate(others)}
        check_equal(outputs(words | config), expected)
    with pytest.warns(UserWarning, match="ignored") as caught:
        assert pretrained.load_config(tmp_path) == plain
    assert len(caught) == 1


@pytest.mark.parametrize(("family", "words", "others"), SAME)
def test_words_that_say_the_same(family, words, others, tmp_path):
    """In transformers too, and the outputs are those of our model."""
    import peer_outputs

    config, outputs, given = stored(family, tmp_path)
    expected = outputs(config | others)
    check_equal(outputs(config | words), expected)
    seen = peer_outputs.run(*pretrained.load(tmp_path), given)
    assert peer_outputs.compare(seen, expected, close)
