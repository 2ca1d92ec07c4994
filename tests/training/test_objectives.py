"""Inputs, targets and what counts."""

import dataclasses
import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_data
from conftest import assert_close

from attnlab.data import BYTES, DataSizes
from attnlab.models import ModelConfig, Norm, OutputHead, param_shapes
from attnlab.training import objectives
from attnlab.training.objectives import OBJECTIVES, language, sequences

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (40, 101)))
BATCH = {"tokens": TOKENS}
MASK = FIRST_SENTINEL = BYTES.vocab_size
START = FIRST_SENTINEL + language.NUM_SENTINELS


def test_masked_lm_hides_what_it_asks():
    example = objectives.masked_lm(BATCH, jax.random.key(0))
    np.testing.assert_array_equal(example.targets, TOKENS[:, 1:])
    asked, inputs = np.asarray(example.weights, bool), example.inputs["tokens"]
    np.testing.assert_array_equal(inputs[~asked], example.targets[~asked])
    shown = np.asarray(inputs[asked])
    masked = shown == MASK
    same = shown == np.asarray(example.targets[asked])
    np.testing.assert_allclose(asked.mean(), 0.15, atol=0.02)
    np.testing.assert_allclose([masked.mean(), same.mean()], [0.8, 0.1], atol=0.04)
    other = objectives.masked_lm(BATCH, jax.random.key(1))
    assert (other.weights != example.weights).any()


def test_own_tokens_come_behind_the_vocabulary():
    """Of 1,000 tokens: mask 1000, random ones anywhere below, sentinels 1000, 1001, ..."""
    sizes = DataSizes(1000)
    shown = objectives.masked_lm(BATCH, jax.random.key(0), sizes).inputs["tokens"]
    assert int(shown.max()) == 1000
    assert 256 < int(jnp.sort(shown[shown < 1000])[-1]) < 1000  # BATCH itself is below 256
    example = objectives.span_corruption(BATCH, jax.random.key(0), sizes)
    assert example.targets[:, 0].tolist() == [1000] * 40
    assert example.inputs["tokens"][:, 0].tolist() == [1100] * 40


def test_metrics_by_hand():
    """Two targets that count, of 3 and 1 bytes, with probabilities 1/4 and 1/2: 3 bits for 4."""
    p = jnp.array([[[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]]])
    example = objectives.Example(
        {}, jnp.array([[0, 1, 1]]), jnp.array([[1.0, 1.0, 0.0]]), jnp.array([[3.0, 1.0, 7.0]])
    )
    value = lambda m, e: np.divide(*map(np.sum, m.measure(jnp.log(p), e))) / m.divisor
    np.testing.assert_allclose(value(objectives.bits("byte"), example), 3 / 4, rtol=1e-6)
    plain = example._replace(sizes=None)
    np.testing.assert_allclose(value(objectives.bits("byte"), plain), 3 / 2, rtol=1e-6)
    np.testing.assert_allclose(value(objectives.accuracy("texts"), example), 0, rtol=1e-6)
    right = example._replace(targets=jnp.array([[1, 0, 1]]))
    np.testing.assert_allclose(value(objectives.accuracy("texts"), right), 100, rtol=1e-6)


# length -> hidden bytes, spans: 0.15 T and a third of it, rounded, at least 1
COUNTS = {2: (1, 1), 7: (1, 1), 31: (5, 2), 100: (15, 5), 512: (77, 26), 1990: (298, 99)}


def corrupt(length, batch=50, seed=0):
    tokens = np.random.default_rng(length).integers(0, 256, (batch, length + 1))
    run = jax.jit(lambda t: objectives.span_corruption({"tokens": t}, jax.random.key(seed)))
    return tokens[:, 1:], jax.tree.map(np.asarray, run(tokens))


def cut(row):
    """The runs of bytes before, between and behind the sentinels of a row, and the sentinels."""
    at = np.flatnonzero(row >= FIRST_SENTINEL)
    pieces = np.split(row, at)
    return [pieces[0].tolist()] + [p[1:].tolist() for p in pieces[1:]], row[at].tolist()


@pytest.mark.parametrize(("length", "counts"), COUNTS.items())
def test_source_and_targets_make_the_text_again(length, counts):
    """At every sentinel of the source the span of the targets, and nothing is left over."""
    texts, example = corrupt(length)
    hidden, spans = counts
    source, targets = example.inputs["source"], example.targets
    assert source.shape == (50, length - hidden + spans)
    assert targets.shape == example.inputs["tokens"].shape == (50, hidden + spans + 1)
    for text, one, two in zip(texts, source, targets, strict=True):
        (kept, in_source), (cuts, in_target) = cut(one), cut(two)
        assert in_source == list(range(256, 256 + spans))
        assert in_target == list(range(256, 256 + spans + 1))
        assert cuts[0] == cuts[-1] == kept[-1] == []  # a sentinel first, a sentinel last
        assert all(cuts[1:-1])
        assert all(kept[:-1])
        pairs = zip(kept, [*cuts[1:-1], []], strict=True)
        assert [b for keep, span in pairs for b in [*keep, *span]] == text.tolist()
        assert sum(map(len, cuts)) == hidden
    np.testing.assert_array_equal(example.inputs["tokens"][:, 0], START)
    np.testing.assert_array_equal(example.inputs["tokens"][:, 1:], targets[:, :-1])
    assert example.weights.all()


def test_every_way_to_cut_is_equally_likely():
    """31 bytes: 5 hidden ones in 2 spans, 4 ways, and 26 kept ones in 2 pieces, 25 ways."""
    _, example = corrupt(31, batch=20_000)
    spans = np.argmax(example.targets == 257, axis=1) - 1
    pieces = np.argmax(example.inputs["source"] == 256, axis=1)
    seen = np.zeros((4, 25))
    np.add.at(seen, (spans - 1, pieces - 1), 1)
    assert abs(seen - 200).max() < 5 * 200**0.5
    _, other = corrupt(31, batch=20_000, seed=1)
    assert (other.targets != example.targets).any()


def test_span_corruption_by_hand():
    """Of 13 bytes the last two are hidden, whatever is drawn: 15 % of them are one span, and a text
    ends with a span. The last byte is padding."""
    text = list(b"abcdefghijklm")
    batch = {"tokens": jnp.array([[96, *text]]), "valid": jnp.arange(13)[None] < 12}
    example = objectives.span_corruption(batch, jax.random.key(0))
    assert example.inputs["source"].tolist() == [[*text[:11], 256]]
    assert example.targets.tolist() == [[256, *text[11:], 257]]
    assert example.inputs["tokens"].tolist() == [[356, 256, *text[11:]]]
    assert example.weights.tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("objective", language.LANGUAGE.values(), ids=language.LANGUAGE)
def test_padding_never_counts(objective):
    """A text of different bytes: each target byte counts as it does without filling, if valid."""
    tokens = jnp.broadcast_to(jnp.arange(101), (40, 101))
    valid = np.arange(100) < np.arange(40)[:, None] * 2
    key = jax.random.key(0)
    prepare = jax.jit(lambda v: objective.prepare({"tokens": tokens, "valid": v}, key))
    whole, part = prepare(np.ones_like(valid)), prepare(valid)
    np.testing.assert_array_equal(part.targets, whole.targets)
    row, column = np.nonzero(whole.targets < FIRST_SENTINEL)
    expected = whole.weights[row, column] * valid[row, whole.targets[row, column] - 1]
    np.testing.assert_array_equal(part.weights[row, column], expected)
    assert not part.weights[0].any()
    assert 0 < part.weights.sum() < whole.weights.sum()


def test_cross_entropy_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]])) + 7.0
    nats = objectives.cross_entropy(logits, jnp.array([[1, 2]]))
    assert_close(nats, -jnp.log(jnp.array([[0.25, 0.8]])), loosen=10)
    p = np.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]])
    q = np.array([[[0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]])  # 0.7 on the target, 0.3 / 3 on each
    smooth = objectives.cross_entropy(logits, jnp.array([[1, 2]]), 0.3)
    assert_close(smooth, jnp.asarray(-(q * np.log(p)).sum(-1)), loosen=10)


def test_every_line_is_translated(tmp_path):
    """A model that writes the first line and the start token whatever it reads: its logits depend
    on the position alone. (`generate` refuses a row without a token.)"""
    sacrebleu = pytest.importorskip("sacrebleu")
    data, _, _ = small_data.pairs(tmp_path)
    dataset = dataclasses.replace(data, tokenizer="bytes").load(32)
    first, start = dataset.heldout(0)["target"][0], dataset.sizes.vocab_size
    written = [*first[first >= 0], start, start + 1]  # and the end token
    config = ModelConfig(
        kind="encoder_decoder",
        vocab_size=dataset.sizes.vocab_size + 2,
        max_len=32,
        width=32,
        num_layers=1,
        norm=Norm(kind="rms"),
        output=OutputHead(kind="own"),
    )
    params = jax.tree.map(lambda a: jnp.zeros(a.shape), param_shapes(config))
    params["positions"], params["final_norm"] = jnp.eye(32), {"scale": jnp.ones(32)}
    params["lm_head"] = params["lm_head"].at[jnp.arange(len(written)), jnp.array(written)].set(1)
    german = gzip.decompress((tmp_path / "test.de.gz").read_bytes()).decode().splitlines()
    assert len(german) % sequences.GENERATED_ROWS  # the last part is padded
    scores = OBJECTIVES["translation"].final_metrics(config.build(), params, dataset)
    ours = [german[0]] * len(german)
    assert scores["chrf"] == sacrebleu.corpus_chrf(ours, [german]).score > 0
    assert scores["bleu"] == sacrebleu.corpus_bleu(ours, [german]).score
