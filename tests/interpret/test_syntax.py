"""What a head is said to read of grammar is what it reads, and luck is not taken for it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from interpreted_models import config_of, random_params

from attnlab.interpret import syntax
from attnlab.interpret.syntax import ALL, DIRECTIONS, OFFSETS, CorrectCounts
from attnlab.interpret.treebank import Tree, read_trees, treebank_parts
from attnlab.load import LoadedModel
from attnlab.models import EncoderConfig, Learned, ModelInputs, run_model


def test_word_maps_by_hand():
    """To a word the sum, from it the mean; a token of two words belongs to each by its letters."""
    rng = np.random.default_rng(0)
    tokens = np.array([[0, 0], [0, 2], [2, 3], [3, 8], [8, 9]])  # special, "ab", "c", "d efg", " "
    words = np.array([[0, 3], [3, 4], [5, 8]])  # "abc", "d", "efg"
    shares = syntax.token_word_overlap(tokens, words)
    belongs = {0: {}, 1: {0: 1}, 2: {0: 1}, 3: {1: 1 / 4, 2: 3 / 4}, 4: {}}
    for token, by_word in belongs.items():
        assert shares[token].tolist() == [by_word.get(word, 0) for word in range(3)]
    probs = rng.dirichlet(np.ones(5), (2, 1, 3, 5))
    expected = np.zeros((2, 1, 3, 3, 3))
    for i, j in np.ndindex(3, 3):
        weights = {t: by[i] for t, by in belongs.items() if i in by}
        for t, weight in weights.items():
            to = sum(probs[..., t, s] * by[j] for s, by in belongs.items() if j in by)
            expected[..., i, j] += weight / sum(weights.values()) * to
    got = jax.jit(syntax.word_attention)(probs, shares[None])
    assert_close(got, expected.astype(np.float32))


def test_a_word_picks_another_one_or_none():
    maps = np.array([[9, 0, 0], [5, 9, 0], [1, 2, 9]], float)  # of a decoder
    to_head, from_head = syntax.predicted_words(jnp.asarray(maps)[None, None, None])[0, 0, 0]
    assert to_head.tolist() == [-1, 0, 1]
    assert from_head.tolist() == [1, 2, -1]


def test_planted_probabilities_are_found():
    """Three heads, each of which looks along one relation, at all tokens of the word."""
    rng = np.random.default_rng(3)
    kinds, words, tokens = np.array(["x", "y", "z:z"]), 8, 17
    predict = jax.jit(lambda *maps: syntax.predicted_words(syntax.word_attention(*maps)))
    parts = []
    for count in (40, 50):
        trees, shares = [], np.zeros((count, tokens, words), np.float32)
        probs = rng.dirichlet(np.ones(tokens), (2, count, 3, tokens)).astype(np.float32)
        for i in range(count):
            order = rng.permutation(words)  # the first is the root, each depends on the one before
            heads = np.empty(words, int)
            heads[order] = [-1, *order[:-1]]
            labels = kinds[rng.integers(0, 3, words)]
            ends = np.sort(rng.choice(np.arange(1, tokens), words, replace=False))
            for word, place in enumerate(np.split(np.arange(tokens), ends)[:words]):
                shares[i, place, word] = 1  # behind the last word stands something else
            own = [np.flatnonzero(column) for column in shares[i].T]
            for word in np.flatnonzero(heads >= 0):
                # Layer 1: head 0 looks along x, head 2 along z; layer 0: head 1 against y.
                layer, head = {"x": (1, 0), "y": (0, 1), "z:z": (1, 2)}[labels[word]]
                asks, asked = own[word], own[heads[word]]
                asks, asked = (asked, asks) if labels[word] == "y" else (asks, asked)
                probs[layer, i, head, asks[:, None], asked] = 9
            trees.append(Tree("", ("",) * words, np.zeros((words, 2), int), heads, (*labels,)))
        picks = np.moveaxis(np.asarray(predict(probs, shares)), 1, 0)
        parts.append(syntax.count_correct(trees, picks, ["x", "y", "z", "z:z"]))
    found = {one.label: one for one in syntax.evaluate_heads(*parts)}
    where = {label: (one.layer, one.head, one.direction) for label, one in found.items()}
    assert where["x"] == (1, 0, "to head")
    assert where["y"] == (0, 1, "from head")
    assert where["z"] == where["z:z"] == (1, 2, "to head")
    for one in found.values():
        assert one.by_head == 1
        assert one.is_significant
        assert one.by_offset < 0.4


def test_texts_that_run_together_do_not_meet():
    """What fills a text up is looked at by nobody; an encoder-decoder shows its encoder."""
    encoder = EncoderConfig(num_layers=3)
    config = config_of(
        num_heads=2, kind="encoder_decoder", vocab_size=30, max_len=14, num_layers=1,
        encoder=encoder, sharing="albert",
    )  # fmt: skip
    rng, params = np.random.default_rng(0), random_params(config)
    texts = [(rng.integers(0, 30, n).astype(np.int32), np.eye(n)) for n in (9, 14, 5)]
    got = syntax.head_predictions(config, params, texts)
    tokens = texts[0][0][None]
    inputs = ModelInputs(source=tokens, capture=("encoder.probs",))
    probs = run_model(params, tokens[:, :1], config, inputs).captured["encoder.probs"]
    probs = np.array(probs)[:, 0]
    probs[..., np.arange(9), np.arange(9)] = 0
    assert np.array_equal(got[0][:, :, 0], probs.argmax(-1))
    assert np.array_equal(got[0][:, :, 1], probs.argmax(-2))
    assert [picks.shape for picks in got] == [(3, 2, 2, 9), (3, 2, 2, 14), (3, 2, 2, 5)]


def test_padding_that_a_model_has_no_positions_for_changes_nothing():
    """Padding tokens are beyond the table of a model that counts positions from its pad token."""
    rng = np.random.default_rng(5)
    shares = syntax.token_word_overlap(*(np.stack([np.arange(17), np.arange(1, 18)], 1),) * 2)
    tokens = rng.integers(2, 11, 17)
    fields = {"kind": "encoder", "num_layers": 2, "positions": Learned(pad_token=1)}
    found = []
    for size in (20, 64):  # padded to 32 tokens
        config = config_of(**fields, max_len=size)
        params = random_params(config_of(**fields, max_len=64))
        params = params | {"positions": params["positions"][:size]}
        found.append(syntax.head_predictions(config, params, [(tokens, shares)])[0])
    np.testing.assert_array_equal(*found)
    assert found[0].min() >= 0


@pytest.mark.parametrize("pad_token", [None, 1])
def test_a_text_that_is_too_long_raises(pad_token):
    """With a pad token, positions begin after it."""
    config = config_of(kind="encoder", positions=Learned(pad_token=pad_token), max_len=20)
    most = 20 if pad_token is None else 18
    texts = [(np.full(n, 5), np.eye(n)) for n in (most, most + 1)]
    with pytest.raises(ValueError, match=f"{most + 1} tokens; .* at most {most}"):
        syntax.head_predictions(config, {}, texts)
    opened = LoadedModel("", Path(), config, {})
    opened.read([5] * most)
    with pytest.raises(ValueError, match=f"1 to {most}"):
        opened.read([5] * (most + 1))


def by_luck(rng, sentences=100, layers=6, labels=12):
    """Every offset and every one of 10 heads a layer is right in 40 % of the cases, by chance."""
    cases = rng.integers(0, 5, (sentences, labels))

    def draw(*shape):
        every = cases.reshape(sentences, *(1 for _ in shape), labels)
        return rng.binomial(np.broadcast_to(every, (sentences, *shape, labels)), 0.4)

    names, offsets = tuple(map(str, range(labels))), np.repeat(draw(1), len(OFFSETS), axis=1)
    return CorrectCounts(names, cases, offsets, 0 * cases, draw(layers, 5, len(DIRECTIONS)))


def test_the_best_of_many_heads_is_no_better_by_luck():
    """Of 40 families of 12 labels one in 40 should have a head that wins; judged in the sentences
    where it was chosen every other has one."""
    rng = np.random.default_rng(0)
    won = lambda *parts: any(one.is_significant for one in syntax.evaluate_heads(*parts, draws=300))
    pairs = [(by_luck(rng), by_luck(rng)) for _ in range(40)]
    assert sum(won(*pair) for pair in pairs) <= 3
    assert sum(won(one, one) for one, _ in pairs) > 15


def test_the_interval_of_one_label_is_that_of_a_ratio():
    """Of sums of right ones and of words, which go up and down together: every head is right."""
    choosing, judging = (by_luck(np.random.default_rng(s), 1500, 1, labels=1) for s in (1, 2))
    every = np.broadcast_to(judging.cases[:, None, None, None], judging.heads.shape)
    judging = judging._replace(heads=every)
    (one,) = syntax.evaluate_heads(choosing, judging, draws=2000)
    gain = judging.heads[:, one.layer, one.head, DIRECTIONS.index(one.direction), 0]
    gain = gain - judging.offsets[:, OFFSETS.index(one.offset), 0]
    cases = judging.cases[:, 0]
    mean = gain.sum() / cases.sum()
    assert abs(one.by_head - one.by_offset - mean) < 1e-12
    assert abs(one.gain - mean) < 1e-12
    assert abs((one.low + one.high) / 2 - mean) < 1e-12
    half = 1.96 * np.std(gain - mean * cases) / cases.mean() / np.sqrt(len(cases))
    assert abs((one.high - one.low) / 2 / half - 1) < 0.06  # 2000 draws


def test_the_longest_word_is_a_baseline_too():
    """A head that is right where the longest word is, and only there, gains nothing."""
    parts = [by_luck(np.random.default_rng(seed)) for seed in (1, 2)]
    parts = [part._replace(longest=part.cases, offsets=0 * part.offsets) for part in parts]
    every = [np.broadcast_to(a.cases[:, None, None, None], a.heads.shape) for a in parts]
    parts = [part._replace(heads=heads) for part, heads in zip(parts, every, strict=True)]
    for one in syntax.evaluate_heads(*parts):
        assert (one.by_head, one.by_longest, one.gain, one.is_significant) == (1, 1, 0, False)
    without = (part._replace(longest=0 * part.longest) for part in parts)
    assert all(one.gain == 1 for one in syntax.evaluate_heads(*without))


def test_what_is_refused():
    """The bootstrap of one sentence would always draw it, and a gain of any size be certain."""
    choosing, judging = (by_luck(np.random.default_rng(seed)) for seed in (1, 2))
    one = {n: a[:1] for n, a in judging._asdict().items() if n != "labels"}
    nothing = by_luck(np.random.default_rng(0), labels=0)
    tree = Tree("a", ("a",), np.array([[0, 1]]), np.array([-1]), ("root",))
    for call, message in (
        (lambda: syntax.count_correct([], [], ["x"]), "0 sentences and 0 predictions"),
        (lambda: syntax.count_correct([tree], [], ["x"]), "1 sentences and 0 predictions: give"),
        (judging._replace(labels=judging.labels[::-1]), "need the same labels"),
        (lambda: syntax.evaluate_heads(nothing, nothing), "need the same labels"),
        (judging._replace(cases=0 * judging.cases), "each with a word"),
        (judging._replace(**one | {"cases": 1 + one["cases"]}), "two test sentences or more"),
    ):
        with pytest.raises(ValueError, match=message):
            call() if callable(call) else syntax.evaluate_heads(choosing, call)


@pytest.mark.slow
def test_fixed_offsets_of_a_real_treebank(shared_data):
    """UD_English-EWT, chosen in train, right in dev: counted by others (shared/data/ANCHORS.md)."""
    parts = treebank_parts(shared_data / "ud_english_ewt")
    trees = [read_trees(parts[name]) for name in ("train", "dev")]
    labels = syntax.frequent_labels(*trees)
    nobody = [[np.full((1, 1, 2, len(t.heads)), -1) for t in some] for some in trees]
    pairs = zip(trees, nobody, strict=True)
    tallies = [syntax.count_correct(some, none, labels) for some, none in pairs]
    rows = syntax.evaluate_heads(*tallies)
    found = {row.label: (row.cases, row.offset, round(100 * row.by_offset, 1)) for row in rows}
    assert found[ALL] == (23146, 1, 31.6)
    assert found["nsubj"] == (2137, 1, 33.9)
    assert found["det"] == (1841, 1, 58.9)
    assert found["obl"] == (1142, -3, 18.0)
    assert found["punct"] == (3061, -1, 20.3)
    assert found["conj"] == (916, -2, 26.6)
    assert found["flat"] == (281, -1, 75.8)
