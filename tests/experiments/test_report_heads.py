"""What a report shows of heads: chosen and measured where a run ends, drawn from what it left."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from written_arms import Page, write_arm, written

from attnlab import ModelConfig
from attnlab.data.dataset import BYTES
from attnlab.data.text import decode_bytes
from attnlab.heads import Standard
from attnlab.training.objectives import OBJECTIVES
from experiments.reporting import figures, heads
from experiments.running import maps, writing

TASK = OBJECTIVES["causal_lm"].bind(BYTES)
ROWS = [
    rb"        if x:".ljust(24) + b"\n",
    b"the words of a sentence, ",
    b"x = [1, 2, 3, 4, 5, 6, 7]",
    b"\n" * 25,
]


def source_of(rows):
    tokens = np.stack([np.frombuffer(row, np.uint8) for row in rows]).astype(np.int32)
    held = {"tokens": tokens, "valid": np.ones_like(tokens[:, 1:], bool)}
    return types.SimpleNamespace(heldout=lambda n: held, decode=decode_bytes, sizes=BYTES)


def test_the_row_with_words_is_looked_at():
    """Escapes of line ends are no words."""
    rows = maps.shown_rows(TASK, source_of(ROWS))
    texts = [bytes(np.asarray(row.example.inputs["tokens"][0]).tolist()) for row in rows]
    assert texts == [ROWS[i][:-1] for i in (1, 0, 2, 3)]
    assert all(row.ends == {"tokens": 24} for row in rows)


def test_statistics_of_heads_are_those_of_their_probabilities():
    config = ModelConfig(
        width=8, heads=Standard(num_heads=2), num_layers=3, sharing="cycle:2", max_len=24
    )
    model, source = config.build(), source_of(ROWS[1:2])
    rows = maps.shown_rows(TASK, source)
    init = lambda key: model.init(key, jnp.zeros((1, 24), int))["params"]
    shapes = jax.eval_shape(init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), shapes)
    fitted = types.SimpleNamespace(
        state=types.SimpleNamespace(params=jax.tree.map(lambda a: a[None], params)), step=5
    )
    asked = []
    begun = lambda inputs: asked.append(inputs) or params
    left = maps.of_fitted(config, TASK, fitted, source, rows, 7, begun)
    assert left["sets"].tolist() == [0, 1, 0]
    assert "".join(left["pieces_tokens"]) == str(left["written_tokens"]) == ROWS[1][:-1].decode()
    found = dict(zip(left["names"].tolist(), left["statistics"], strict=True))
    probs = left["probs"].astype(np.float64)
    # The first query has no choice and is left out. Probabilities are kept in half precision.
    half = {"rtol": 0, "atol": 1e-3}
    np.testing.assert_allclose(found["first_token"], probs[:, :, 1:, 0].mean(-1), **half)
    back = np.diagonal(probs, -1, axis1=2, axis2=3).mean(-1)
    np.testing.assert_allclose(found["previous_token"], back, **half)
    assert_close(left["fresh"], left["statistics"])  # the same weights
    [inputs] = asked
    assert inputs["tokens"].shape == (1, 24)


def test_a_text_longer_than_the_model_goes_on_from_its_end(monkeypatch):
    seen = []

    def count_on(params, prompt, config, new, *, sampling, key):
        seen.append((np.asarray(prompt)[0].tolist(), sampling.temperature))
        return prompt[:, -1:] + 1 + jnp.arange(new)[None]

    monkeypatch.setattr(writing, "generate", count_on)
    monkeypatch.setattr(writing, "LENGTH", 12)
    config = ModelConfig(width=8, heads=Standard(num_heads=2), num_layers=1, max_len=9)
    row = maps.shown_rows(TASK, source_of([bytes(range(65, 90))]))[0]
    told = writing.sample(config, {}, source_of(ROWS), row, 3)
    assert told == {"prompt": "ABCD", "written": "EFGHIJKLMNOP", "temperature": 0.8, "seed": 3}
    assert [bytes(text) for text, _ in seen] == [b"ABCD", b"FGHI", b"KLMN"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A report of arms of which one left all there is, one nothing but a map."""
    folder = tmp_path_factory.mktemp("shown")
    write_arm(folder / "old", "wide", "separate", 2.8, 400_000)
    sample = {
        "prompt": "if a",
        "written": r"<b>\n```\n  &amp; it\'s",
        "temperature": 0.8,
        "seed": 0,
    }
    write_arm(folder / "new", "standard", "albert", 2.9, 200_000, sample=sample)
    with np.load(folder / "new" / "maps.npz") as left:
        left = dict(left)
    nan = np.nan
    values = [(0.125, 0.5, 0.25), (nan, nan, nan), (1.5, 0, 3), (9, 9, 9)]
    left |= {
        "pieces_tokens": np.array(["if", " ", "$a", ":", r"\n", " ", "<", "incomprehensible"]),
        "sets": np.array([0, 0]),
        "names": np.array(["previous_token", "duplicate_token", "entropy", "diagonal"]),
        "statistics": np.array([[[a, b, c]] * 2 for a, b, c in values]),
        "fresh": np.zeros((4, 2, 3)) + 0.0625,
        "rows": np.array(8),
    }  # fmt: skip
    np.savez_compressed(folder / "new" / "maps.npz", **left)
    with pytest.MonkeyPatch.context() as patch:  # what is drawn elsewhere is tested elsewhere
        patch.setattr(figures, "of_panel", lambda panel, name: [])
        return folder, *written(folder)


def test_tokens_stand_at_the_sides_and_sets_at_the_layers(shown):
    folder, *_ = shown
    svg = (folder / "figures" / "map-standard-albert.svg").read_text()
    for word in (">if<", ">·<", ">$a<", r">\n<", ">&lt;<", ">incompre…<"):
        assert svg.count(word) >= 1 + 3, word  # the first map of two, and below each of three
    assert "layer 1, group 0" in svg
    old = (folder / "figures" / "map-wide-separate.svg").read_text()
    assert ">if<" not in old
    assert "layer 1<" in old


def test_statistics_stand_beside_the_untrained_model(shown):
    folder, markdown, _ = shown
    svg = (folder / "figures" / "heads-standard-albert.svg").read_text()
    assert "% on the previous token" in svg
    assert "mean 29, untrained 6" in svg
    assert "mean 1.5, untrained 0.1" in svg
    assert "same token" not in svg  # nobody has it
    assert [svg.count(f">{n}<") for n in ("50", "12", "3.0")] == [2, 2, 2]
    assert "means over 8 held-out rows" in markdown
    assert "heads-wide" not in markdown  # an older run


def test_what_is_written_is_shown_as_it_is(shown):
    folder, markdown, html = shown
    assert "````text\n<b>\n```\n  &amp; it's\n````" in markdown
    assert "<pre>&lt;b&gt;\n```\n  &amp;amp; it&#x27;s</pre>" in html
    assert "<b>\n```\n  &amp; it's" in "".join(Page(html).text)
    found = json.loads((folder / "new" / "result.json").read_text())["heldout_bits_per_byte"][0]
    assert f"**standard · albert**, seed 0, {found:.3f} bits per byte:" in markdown
    assert markdown.count("```text\nif a\n```") == 1
    assert heads._lines(r"\\n") == r"\n"
