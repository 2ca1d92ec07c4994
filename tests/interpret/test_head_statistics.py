"""Statistics of heads: against NumPy row by row, of heads whose numbers are known, and beside what
chance gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from interpreted_models import config_of, random_params
from scipy.spatial.distance import jensenshannon

from attnlab import interpret
from attnlab.interpret import STATISTICS, head_statistics, js_divergence, linear_cka, mean_heads
from attnlab.models import FFN, EncoderConfig, ModelInputs, run_model

TOKENS = np.array([[4, 1, 4, 2, 2, 0, 1], [3, 3, 5, 3, 6, 1, 0]])
RNG = np.random.default_rng(0)


def softmax(scores, allowed):
    made = np.where(allowed, np.exp(scores), 0)
    return made / made.sum(-1, keepdims=True)


def by_hand(probs, tokens, allowed, real):
    """name -> [L, N], one row after the other."""
    found = {name: [] for name in STATISTICS}
    for b, t in np.argwhere(real):
        seen = [s for s in range(probs.shape[-1]) if allowed[b, t, s]]
        if len(seen) < 2:
            continue
        p = probs[:, b, :, t]
        same = [s for s in seen if s != t and tokens[b, s] == tokens[b, t]]
        after = [s for s in seen if s > 0 and s != t + 1 and tokens[b, s - 1] == tokens[b, t]]
        targets = {"previous_token": [t - 1], "diagonal": [t], "first_token": [0]}
        for name, target in (targets | {"duplicate_token": same, "induction": after}).items():
            if kept := [s for s in target if s in seen]:
                found[name].append(p[..., kept].sum(-1))
        found["entropy"].append(-(p[..., seen] * np.log(p[..., seen])).sum(-1))
        found["distance"].append(sum(p[..., s] * abs(s - t) for s in seen))
    return {name: np.mean(rows, axis=0) for name, rows in found.items()}


@pytest.mark.parametrize("causal", [True, False])
def test_statistics_are_what_their_formulas_say(causal):
    real = np.ones((2, 7), bool)
    real[1, 5:] = False
    allowed = np.broadcast_to(real[:, None], (2, 7, 7))
    allowed = allowed & np.tri(7, dtype=bool) if causal else allowed
    probs = softmax(RNG.normal(size=(3, 2, 5, 7, 7)), allowed[:, None])
    got = head_statistics(jnp.asarray(probs, jnp.float32), jnp.asarray(TOKENS), jnp.asarray(real))
    expected = by_hand(probs, TOKENS, allowed, real)
    assert list(got) == list(STATISTICS)
    assert_close(got, {n: a.astype(np.float32) for n, a in expected.items()})
    # What a mask hides can be told, too: here by nothing less than a head that is certain.
    hard = np.eye(7)[probs.argmax(-1)]
    found = head_statistics(hard, TOKENS, real, visible=allowed)
    clipped = by_hand(np.maximum(hard, 1e-30), TOKENS, allowed, real)
    for name in ("first_token", "duplicate_token"):
        assert_close(found[name], clipped[name])


def test_what_cannot_be_told_is_left_out():
    probs = np.full((1, 2, 3, 7, 4), 0.25)
    assert sorted(head_statistics(probs)) == ["entropy", "first_token"]
    across = head_statistics(probs, TOKENS, key_tokens=np.array([[4, 9, 9, 4], [9, 9, 9, 9]]))
    assert sorted(across) == ["duplicate_token", "entropy", "first_token", "induction"]
    # Tokens 4 stand at queries 0 and 2 and at keys 0 and 3, which are those of another text.
    np.testing.assert_allclose(across["duplicate_token"], np.full((1, 3), 0.5), rtol=1e-6)
    other = {"key_tokens": np.array([[1, 4, 4, 1], [9, 9, 9, 9]]), "same_text": False}
    across = head_statistics(probs[..., :4, :], TOKENS[:, :4], **other)
    assert sorted(across) == ["duplicate_token", "entropy", "first_token", "induction"]
    # Query 1 is token 1, of keys 0 and 3; queries 0 and 2 are token 4, before keys 2 and 3.
    np.testing.assert_allclose(across["duplicate_token"], np.full((1, 3), 0.5), rtol=1e-6)
    np.testing.assert_allclose(across["induction"], np.full((1, 3), (4 * 0.25 + 0.25) / 3))
    square = head_statistics(probs[..., :4, :])
    assert "distance" in square
    assert "duplicate_token" not in square
    distinct = head_statistics(probs[..., :4, :], np.arange(8).reshape(2, 4))
    assert np.isnan(distinct["duplicate_token"]).all()
    with pytest.raises(ValueError, match=r"tokens \(2, 7\) must be \(2, 4\)"):
        head_statistics(probs[..., :4, :], TOKENS)
    whole = np.ones_like(probs, int), None, np.full((2, 7), 2)  # of probs and mask, any numbers
    assert head_statistics(*whole)["first_token"].tolist() == [[1, 1, 1]]


def test_each_layer_has_the_keys_that_its_window_shows():
    """Of windows of 1 token back, of all tokens back, and of none."""
    window = np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool)
    allowed = np.stack([window, np.tri(5, dtype=bool), np.eye(5, dtype=bool)])[:, None, None]
    probs = softmax(RNG.normal(size=(3, 2, 4, 5, 5)), allowed)
    for visible in (None, allowed[:, 0]):
        found = head_statistics(interpret.uniform_attention(jnp.asarray(probs)), visible=visible)
        of_sizes = lambda f: np.mean([f(n) for n in (2, 3, 4, 5)])
        entropies = np.log(2), of_sizes(np.log), np.nan
        masses = 1 / 2, of_sizes(lambda n: 1 / n), np.nan
        for name, expected in (("entropy", entropies), ("previous_token", masses)):
            every = np.broadcast_to(np.array(expected)[:, None], (3, 4))
            np.testing.assert_allclose(found[name], every, rtol=1e-5)


def test_differences_between_heads():
    allowed = np.tri(6, dtype=bool)
    probs = softmax(RNG.normal(size=(2, 3, 4, 6, 6)), allowed)
    probs[1, :, 2] = probs[0, :, 1]
    mask = np.ones((3, 6), bool)
    mask[0, 4:] = False

    rows = np.moveaxis(probs, 2, 1).reshape(8, 3, 6, 6)[:, mask]
    distances = jensenshannon(rows[:, None], rows[None], axis=-1)  # its root
    expected = np.mean(distances**2, axis=-1).reshape(2, 4, 2, 4)
    got = js_divergence(jnp.asarray(probs, jnp.float32), mask)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert got[0, 1, 1, 2] < 1e-6 < got[0, 1, 1, 1]
    half = jnp.asarray(probs, jnp.bfloat16)
    exact = js_divergence(half.astype(jnp.float32), mask)
    np.testing.assert_allclose(js_divergence(half, mask), exact, atol=2e-6)
    with pytest.raises(ValueError, match=r"mask \(6, 3\) must be \(3, 6\), True"):
        js_divergence(half, mask.T)
    found = interpret.mean_over_pairs(expected)
    others = expected[1, :, 1].sum() - np.trace(expected[1, :, 1])
    np.testing.assert_allclose(found["heads"][1], others / 12, rtol=1e-5)
    np.testing.assert_allclose(found["layers"][0, 1], expected[0, :, 1].mean(), rtol=1e-5)


def test_alignment_of_values_is_that_of_kornblith():
    """|Y^T X|^2 / (|X^T X| |Y^T Y|), whatever basis a head writes its values in."""
    heads = RNG.normal(size=(2, 3, 6, 4, 5))
    mask = np.ones((3, 6), bool)
    mask[2, 2:] = False
    flat = np.moveaxis(heads, 3, 1).reshape(8, 3, 6, 5)[:, mask]
    flat = flat - flat.mean(1, keepdims=True)
    size = lambda a, b: np.linalg.norm(np.einsum("amd,bme->abde", a, b), axis=(2, 3))
    between_two = size(flat, flat) ** 2
    own = np.sqrt(np.diagonal(between_two))
    expected = (between_two / (own[:, None] * own)).reshape(2, 4, 2, 4)
    np.testing.assert_allclose(linear_cka(heads, "heads", mask), expected, atol=1e-5)
    turn = np.linalg.qr(RNG.normal(size=(5, 5)))[0]
    np.testing.assert_allclose(linear_cka(3 * heads @ turn, "heads", mask), expected, atol=1e-5)
    as_outputs = np.moveaxis(heads, 3, 2)
    np.testing.assert_allclose(linear_cka(as_outputs, "outputs", mask), expected, atol=1e-5)
    np.testing.assert_allclose(linear_cka(1e-12 * heads, "heads", mask), expected, atol=1e-5)
    half = linear_cka(jnp.asarray(300 * heads, jnp.float16), "heads", mask)  # squares: infinite
    np.testing.assert_allclose(half, expected, atol=1e-3)


def test_what_tokens_hold_that_do_not_count_is_not_read():
    """NaN there, as beyond a table of positions, changes no comparison of heads."""
    mask = np.ones((3, 6), bool)
    mask[1, 2:] = False
    probs = RNG.dirichlet(np.ones(5), (2, 3, 4, 6)).astype(np.float32)
    heads = RNG.normal(size=(2, 3, 6, 4, 7)).astype(np.float32)
    for f, a, axis in ((js_divergence, probs, 3), (linear_cka, heads, 2), (mean_heads, heads, 2)):
        spoilt = np.where(np.expand_dims(mask, (0, *({2, 3} - {axis}), 4)), a, np.nan)
        rest = {"name": "heads"} if f is linear_cka else {}
        got = f(jnp.asarray(spoilt), mask=mask, **rest)
        np.testing.assert_array_equal(got, f(jnp.asarray(a), mask=mask, **rest))
    for name in ("math:pi", "head"):
        with pytest.raises(ValueError, match=f"unknown value '{name}'"):
            linear_cka(heads, name)


def test_effective_rank():
    turn = np.linalg.qr(RNG.normal(size=(7, 7)))[0]
    scores = np.stack([turn[:, :3] @ turn[:3], 5 * turn])[None, None]
    np.testing.assert_allclose(interpret.effective_rank(scores), [[3, 7]], rtol=1e-4)


ENCODER = EncoderConfig(num_layers=2)
CONFIG = config_of(
    kind="encoder_decoder", num_layers=1, ffn=FFN(width=0), sharing="albert", encoder=ENCODER
)


def test_padding_is_neither_counted_nor_shuffled():
    """Texts of one token each are the same shuffled, so only their padding could change them."""
    source, tokens = (np.array([[4] * n + [0] * (6 - n), [2] * n + [0] * (6 - n)]) for n in (4, 3))
    masks = {"source_padding_mask": source > 0, "padding_mask": tokens > 0}
    inputs, params = ModelInputs(source=source, **masks), random_params(CONFIG, scale=1)
    key = {"key": jax.random.key(0), "name": "cross.probs"}
    found = interpret.statistics_with_baselines(CONFIG, params, tokens, inputs, **key)
    tokens, source = tokens[:, :3], source[:, :4]  # without padding
    alone = ModelInputs(source=source, capture=("cross.probs",))
    probs = run_model(params, tokens, CONFIG, alone).captured["cross.probs"]
    expected = head_statistics(probs, tokens, key_tokens=source)
    assert sorted(found["model"]) == sorted(expected)
    assert_close(found["model"], expected)
    assert_close(found["shuffled"], expected)
    packed = ModelInputs(source=source, segments=(tokens, source))
    with pytest.raises(ValueError, match="segments"):
        interpret.statistics_with_baselines(CONFIG, params, tokens, packed, **key)


@pytest.mark.slow
def test_beside_what_was_not_learnt():
    source, params = jnp.asarray(TOKENS[:, :5]), random_params(CONFIG, scale=1)
    inputs = ModelInputs(source=source, capture=("encoder.probs",))
    key = {"key": jax.random.key(0), "name": "encoder.probs"}
    found = interpret.statistics_with_baselines(CONFIG, params, TOKENS, inputs, **key)
    assert sorted(found) == ["initial", "model", "shuffled", "uniform"]
    probs = run_model(params, TOKENS, CONFIG, inputs).captured["encoder.probs"]
    own = head_statistics(probs, source)
    assert_close(found["model"], own)
    assert_close(found["uniform"], head_statistics(interpret.uniform_attention(probs), source))
    np.testing.assert_allclose(found["uniform"]["diagonal"], 1 / 5, rtol=1e-5)
    for other in ("initial", "shuffled"):
        assert not np.allclose(found[other]["entropy"], own["entropy"], atol=1e-4)
    mixed = interpret.shuffle_tokens(jax.random.key(3), TOKENS, TOKENS > 0)
    assert (mixed[TOKENS == 0] == 0).all()
    assert (np.sort(mixed, axis=1) == np.sort(TOKENS, axis=1)).all()
    assert (mixed != TOKENS).any()
