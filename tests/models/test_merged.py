"""Merged attention: a decoder that attends to its own text and the source in one softmax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from layout_cases import CASES, SELF
from layout_cases import make as make_heads
from test_models import random_params

from attnlab import explain_heads, flops_per_token, heads, num_parameters, prefill
from attnlab.heads import HeadInputs, attend_heads
from attnlab.heads.positions import rotary_angles
from attnlab.models import (
    FFN,
    Attention,
    Compute,
    EncoderConfig,
    ModelConfig,
    NoPositions,
    Norm,
    OutputHead,
    Relative,
    Rotary,
)

B, T, S = 2, 5, 7
LAYOUT = heads.Standard(
    num_heads=4, num_kv_heads=2, head_dim=6, value_dim=3, biases=("q", "k", "v", "o")
)
CONFIG = ModelConfig(
    kind="encoder_decoder", encoder=EncoderConfig(cross="merged", num_layers=2), width=12,
    heads=LAYOUT, num_layers=3, vocab_size=17, max_len=9, ffn=FFN(width=8), positions=Rotary(),
    compute=Compute(dtype="float64"),
)  # fmt: skip
RNG = np.random.default_rng(0)
SOURCE, TOKENS = (jnp.asarray(RNG.integers(0, 17, (B, n))) for n in (S, T))


def by_hand(w, x, source, is_token, angles):
    """[B, T, O] of standard heads, key by key: own ones rotated up to the query, then those of the
    source that are tokens."""

    def project(name, a):
        return np.einsum("btd,dnh->btnh", a, w[name]) + w[f"{name}_bias"]

    def rotated(a):
        first, second = np.split(a, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    q, k, v = rotated(project("q", x)), rotated(project("k", x)), project("v", x)
    source_k, source_v = (project(name, source) for name in "kv")
    out = np.zeros((*x.shape[:2], w["o"].shape[-1])) + w["o_bias"]
    for b, t, n in np.ndindex(q.shape[:3]):
        g = n // (q.shape[2] // k.shape[2])
        keys = np.concatenate([k[b, : t + 1, g], source_k[b, is_token[b], g]])
        values = np.concatenate([v[b, : t + 1, g], source_v[b, is_token[b], g]])
        scores = np.exp(keys @ q[b, t, n] / np.sqrt(q.shape[-1]))
        out[b, t] += (scores / scores.sum()) @ values @ w["o"][n]
    return out


def heads_case():
    """Small random weights, a text, a source, which of its tokens are there, angles."""
    layout = dataclasses.replace(LAYOUT, width=12, out_width=10)
    rng = np.random.default_rng(0)
    params = {n: rng.normal(size=shape) for n, shape in heads.weight_shapes(layout).items()}
    x, source = rng.normal(size=(B, T, 12)), rng.normal(size=(B, S, 12))
    angles = np.asarray(rotary_angles(jnp.arange(T), 6))
    return layout, params, x, source, rng.random((B, S)) < 0.6, angles


def test_the_definition(x64):
    layout, params, x, source, is_token, angles = heads_case()

    @jax.jit
    def run(params, x, source, mask):
        def call(source, mask):
            inputs = HeadInputs(source=source, source_mask=mask, rotary=jnp.asarray(angles))
            return attend_heads(params, x, layout, inputs, is_causal=True).output

        others = (source, jnp.zeros((1, S), bool)), (source[:, :0], None), (None, None)
        return call(source, mask), [call(*other) for other in others]

    got, (masked, empty, alone) = run(params, x, source, is_token[:, None, None])
    expected = by_hand(params, x, source, is_token, angles)
    assert np.abs(got - expected).max() < 1e-10 * np.abs(expected).max()
    # A source that is masked, or of no token, leaves self-attention.
    assert_close(masked, alone)
    assert_close(empty, alone)


@pytest.mark.parametrize("name", deep(SELF, "latent"))
def test_every_layout_and_form_is_a_call_on_both_texts(name, x64):
    """Without positions: attention of x to [x; source], with a mask."""
    layout = CASES[name]
    params, x, *_ = make_heads(layout, jnp.float64, length=T)
    source = make_heads(layout, jnp.float64, length=S, seed=1).x
    mask = np.concatenate([np.tri(T, dtype=bool), np.ones((T, S), bool)], axis=1)
    report = explain_heads(layout, x, HeadInputs(source=source), is_causal=True)["order"]
    orders = [order for order, cost in report.items() if isinstance(cost, int)]
    both = HeadInputs(context=jnp.concatenate([x, source], axis=1), order="factored")
    expected = attend_heads(params, x, layout, both, mask=mask).output
    for order in orders:
        inputs = HeadInputs(source=source, order=order)
        got = attend_heads(params, x, layout, inputs, is_causal=True).output
        assert_close(got, expected, loosen=1000)


@pytest.mark.parametrize(
    "fields",
    deep(
        [
            dict(sharing="cla:2"),
            dict(sharing="albert", positions=Relative(),
                 encoder=EncoderConfig(cross="merged", num_layers=3, shares_decoder=True)),
            dict(heads=heads.Latent(num_heads=4, latent_dim=5, rotary_dim=4),
                 attention=Attention(window=2)),
            dict(heads=heads.Standard(num_heads=4, num_kv_heads=2, head_dim=6, tie="kv")),
            dict(heads=heads.Wide(num_heads=4, extras=(heads.TalkingHeads(),)),
                 positions=NoPositions(), norm=Norm(position="post")),
        ],
    ),
)  # fmt: skip
def test_decoding_in_pieces(fields, x64):
    """With a cache, and a target whose rows are padded on the left: the logits of the whole."""
    config = dataclasses.replace(CONFIG, **fields)
    model = config.build()
    params = jax.tree.map(lambda a: a.astype(jnp.float64), random_params(config))
    source_mask = jnp.arange(S)[None] < jnp.array([[S], [4]])
    is_token = jnp.arange(T)[None] >= jnp.array([[0], [2]])

    @jax.jit
    def run(params):
        given = dict(source=SOURCE, source_padding_mask=source_mask)
        whole = model.apply({"params": params}, TOKENS, capture=("probs",), **given)
        more = given | {"encoded": whole.encoded}
        logits, cache = prefill(params, TOKENS[:, :3], config, config.init_cache(B, T), **more)
        rest, _ = prefill(params, TOKENS[:, 3:], config, cache, **more)
        padded, _ = prefill(
            params, TOKENS, config, config.init_cache(B, T), padding_mask=is_token, **more
        )
        short = model.apply({"params": params}, TOKENS[1:, 2:], source=SOURCE[1:, :4]).logits
        return whole, jnp.concatenate([logits, rest], axis=1), padded, short

    whole, pieces, padded, short = run(params)
    assert_close(pieces, whole.logits, loosen=1000)
    assert_close(padded[1:, 2:], short, loosen=1000)  # as it would be alone
    probs = whole.captured["probs"]
    assert probs.shape == (3, B, 4, T, T + S)
    if not config.heads.extras:
        assert_close(jnp.sum(probs, axis=-1), jnp.ones((3, B, 4, T)), loosen=10)
        assert not np.any(probs[:, 1, ..., T + 4 :])


# Gemma 2 2B on both sides, as T5Gemma 2 (arXiv 2512.14856, section 4) compares; sizes of the model
# card.
GEMMA = ModelConfig(
    kind="encoder_decoder", vocab_size=256_000, width=2304, num_layers=26,
    heads=heads.Standard(num_heads=8, num_kv_heads=4, head_dim=256),
    ffn=FFN(width=9216, activation="gated_gelu_tanh", bias=False), norm=Norm(kind="rms"),
    positions=Rotary(), output=OutputHead(kind="own"),
)  # fmt: skip


def test_published_differences():
    merged = dataclasses.replace(GEMMA, encoder=EncoderConfig(cross="merged"))
    norms = 26 * 2304  # one before every cross-attention
    assert num_parameters(GEMMA) - num_parameters(merged) == 368_050_176 + norms
    half = [dataclasses.replace(c, num_layers=13) for c in (GEMMA, merged)]
    assert np.diff([*map(num_parameters, half)]) == -(184_025_088 + 13 * 2304)
    tied = dataclasses.replace(GEMMA, output=OutputHead())
    assert 2 * (num_parameters(GEMMA) - num_parameters(tied)) == 1_179_648_000
    # W_Q and W_O are applied once to a token of the target, not twice.
    saved = flops_per_token(GEMMA, 64) - flops_per_token(merged, 64)
    assert saved == 26 * 2 * (2 * 2304 * 8 * 256)


def test_refused():
    with pytest.raises(ValueError, match="no sublayer 'cross'"):
        dataclasses.replace(CONFIG, sharing="attention=0,1,2 cross=0,0,0 ffn=0,1,2")
    with pytest.raises(ValueError, match=r"unknown encoder\.cross 'both': known: own, merged"):
        EncoderConfig(cross="both")
    model, params = CONFIG.build(), random_params(CONFIG)
    with pytest.raises(ValueError, match=r"unknown value 'cross\.probs'"):
        model.apply({"params": params}, TOKENS, source=SOURCE, capture=("cross.probs",))


@pytest.mark.parity
def test_against_t5gemma2(x64):
    """transformers' own layer of merged attention, live, in float64."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.t5gemma2.modeling_t5gemma2")
    config = theirs.T5Gemma2DecoderConfig(
        hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        num_hidden_layers=1, layer_types=["full_attention"], query_pre_attn_scalar=5,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    peer = theirs.T5Gemma2MergedAttention(config, 0).double().eval()
    with torch.no_grad():
        for a in peer.parameters():
            a.normal_(std=0.4)
    t = {name: a.detach().numpy() for name, a in peer.named_parameters()}
    params = {n: t[f"{n}_proj.weight"].T.reshape(12, -1, 6) for n in "qkv"}
    params |= {"o": t["o_proj.weight"].T.reshape(4, 6, 12)}
    params |= {f"{n}_norm": 1 + t[f"{n}_norm.weight"] for n in "qk"}
    layout = heads.Standard(
        width=12, num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=heads.HeadNorm("rms"),
        scale=5**-0.5, norm_eps=config.rms_norm_eps,
    )  # fmt: skip
    _, _, x, source, is_token, angles = heads_case()
    mask = np.concatenate(
        [np.broadcast_to(np.tri(T, dtype=bool), (B, T, T)),
         np.broadcast_to(is_token[:, None], (B, T, S))], axis=2,
    )  # fmt: skip
    cos_sin = [
        torch.tensor(np.concatenate([f(angles)] * 2, axis=1))[None] for f in (np.cos, np.sin)
    ]
    with torch.no_grad():
        added = torch.tensor(np.where(mask, 0.0, -1e30))[:, None]
        expected = peer(torch.tensor(x), tuple(cos_sin), added, torch.tensor(source))[0].numpy()
    inputs = HeadInputs(
        source=source, source_mask=is_token[:, None, None], rotary=jnp.asarray(angles)
    )
    got = attend_heads(params, jnp.asarray(x), layout, inputs, is_causal=True).output
    assert np.abs(got - expected).max() < 1e-6 * np.abs(expected).max()
