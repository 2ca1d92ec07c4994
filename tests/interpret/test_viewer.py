"""A page of heads keeps what it was given, loads nothing, and is no way in for a token."""

import html
import re

import numpy as np
import pytest
from written_page import Parsed, softmax

from attnlab.interpret import AttentionMaps, Panel, view, view_panels
from attnlab.sharing import Plan

LAYERS, HEADS, LENGTH, SIZE = 3, 2, 7, 5
TOKENS = [f"a{i}" for i in range(LENGTH)]
KEYS = [f"b{i}" for i in range(SIZE)]


PROBS = softmax(LAYERS, HEADS, LENGTH, SIZE)


def test_values_are_kept_in_steps_of_the_largest_of_their_row():
    found = Parsed(view(PROBS, TOKENS, keys=KEYS).html).probs()
    largest = PROBS.max(-1, keepdims=True)
    assert np.all(np.abs(found - PROBS) <= largest / 510 + 1e-7)
    assert np.abs(found - PROBS).max() > 1e-4  # it is a byte each
    flat = np.full((1, 1, 1, 600), 1 / 600)  # all below a step of 1/255
    assert np.allclose(Parsed(view(flat, ["x"], keys=["y"] * 600).html).probs(), flat)


def test_a_decoder_takes_half():
    probs = softmax(LAYERS, HEADS, LENGTH, LENGTH, causal=True)
    causal = Parsed(view(probs[:, None], TOKENS).html)  # with its axis of texts
    whole = Parsed(view(softmax(LAYERS, HEADS, LENGTH, LENGTH), TOKENS).html)
    assert [page.panels[0]["maps"][0]["lower"] for page in (causal, whole)] == [True, False]
    assert np.abs(causal.probs() - probs).max() <= 1 / 510
    sizes = [len(page.scripts["v0-0-2-1"]) for page in (causal, whole)]
    assert sizes == [4 * -(-n // 3) for n in (4 * 7 + 7 * 8 // 2, 4 * 7 + 7 * 7)]


def test_mixed_probs_may_be_negative():
    mixed = np.random.default_rng(0).normal(size=(LAYERS, HEADS, LENGTH, SIZE))
    found = Parsed(view(mixed, TOKENS, keys=KEYS).html).probs()
    assert np.all(np.abs(found - mixed) <= np.abs(mixed).max(-1, keepdims=True) / 254 + 1e-6)


ODD = [
    "</script><script>alert(1)</script>", "<!--", "\"'&amp;", "{{values}}", "שלום", "\u202eمرحبا",
    "\u2028", "\ud800", "\n", "", "\\", "👩‍👩‍👧", "http://a.b/c",
]  # fmt: skip


def test_a_token_is_a_text_whatever_it_is():
    probs = softmax(1, 1, len(ODD), len(ODD))
    page = view(probs, ODD, title="<b>&{{page}}", description="<i>{{values}}")
    parsed = Parsed(page.html)
    told = parsed.panels[0]
    assert told["maps"][0]["tokens"] == ODD
    assert told["description"] == "<i>{{values}}"
    assert set(parsed.scripts) == {"page", "v0-0-0-0", "code"}
    assert [tag for tag, _ in parsed.tags].count("script") == 3
    assert parsed.texts.count("<b>&{{page}}") == 2
    page.html.encode()  # half of a pair would raise


def test_it_loads_nothing():
    page = view(PROBS, TOKENS, keys=KEYS).html
    assert "http" not in page
    assert not re.search(r"\b(src|href|srcset|action)\s*=|url\(|@import|//[a-z]+\.", page)
    code = Parsed(page).scripts["code"]
    asks = r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import)\b"
    assert not re.search(asks, code)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in Parsed(page).tags}


def test_what_it_tells():
    plan = Plan(attention=(0, 1, 0, 2), kv=(0, 1, "@0", "@1"), ffn=(0, 0, 0, 0))
    statistics = {"entropy": np.arange(8.0).reshape(4, 2), "same": np.full((4, 2), np.nan)}
    probs = softmax(4, 2, LENGTH, LENGTH, causal=True)
    groups = dict(plan.items()) | {"ffn": np.array(plan["ffn"])}
    maps = AttentionMaps(probs, TOKENS, statistics=statistics, plan=groups, name="decoder")
    cross = AttentionMaps(PROBS, TOKENS, KEYS, name="cross")
    parsed = Parsed(view_panels([Panel([maps, cross], "one", "of 4"), Panel([cross], "two")]).html)
    assert [side["name"] for side in parsed.panels] == ["one", "two"]
    told, other = parsed.panels[0]["maps"]
    assert told["plan"]["attention"] == [0, 1, 0, 2]
    assert told["plan"]["kv"] == [0, 1, "@0", "@1"]
    assert told["statistics"] == {
        "entropy": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "same": [[None] * 2] * 4,
    }
    assert (other["name"], other["tokens"], other["keys"]) == ("cross", TOKENS, KEYS)
    assert np.abs(parsed.probs(0, 1) - PROBS).max() <= 1 / 510
    assert np.array_equal(parsed.probs(1, 0), parsed.probs(0, 1))


def test_saved_once_and_shown_in_a_notebook(tmp_path):
    page = view(PROBS, TOKENS, keys=KEYS)
    inside = re.fullmatch(r'<iframe [^>]*srcdoc="([^"]*)"[^>]*></iframe>', page._repr_html_())
    assert html.unescape(inside[1]) == page.html
    path = page.save(tmp_path / "heads.html")
    assert path.read_text(encoding="utf-8") == page.html
    with pytest.raises(FileExistsError):
        page.save(path)
    page.save(path, overwrite=True)
    with pytest.raises(UnicodeEncodeError):  # the older page is not lost
        view(PROBS, TOKENS, keys=KEYS, title="\udc80").save(path, overwrite=True)
    assert path.read_text(encoding="utf-8") == page.html


REFUSED = [
    ({"probs": PROBS[0]}, "of one text"),
    ({"probs": np.stack([PROBS] * 2, 1)}, "choose one"),
    ({"probs": PROBS[:, :, :0]}, "are empty"),
    ({"tokens": TOKENS[1:]}, "6 tokens do not fit .*: give 7"),
    ({"tokens": "a b c"}, "must be a list of 7 strings"),
    ({"keys": None}, "7 keys do not fit"),
    ({"statistics": {"first": np.ones((2, 3))}}, r"'first' \(2, 3\) must be .* \(3, 2\)"),
    ({"plan": {"attention": (0, 1)}}, "'attention' has 2 layers, probs have 3"),
    ({"probs": np.where(PROBS > 0.5, np.nan, PROBS)}, "NaN or inf"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_cannot_be_shown_is_refused(changes, said):
    given = {"probs": PROBS, "tokens": TOKENS, "keys": KEYS} | changes
    with pytest.raises(ValueError, match=said):
        view(**given)
