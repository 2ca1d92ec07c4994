"""Merged attention: a decoder that reads its own text and the source in one softmax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from contract import SPECS

from attnlab import HeadSpec, ModelConfig, pretrained, unique_parameters
from attnlab.heads.old.multihead import attend_heads
from attnlab.heads.positions import rotary_angles
from attnlab.model.accounting import flops_per_token
from attnlab.model.decode import prefill
from attnlab.observe import Given

B, T, S = 2, 5, 7
CONFIG = ModelConfig(
    kind="encoder_decoder", cross="merged", width=12, num_heads=4, num_kv_heads=2, head_dim=6,
    value_dim=3, num_layers=3, encoder_layers=2, vocab_size=17, max_len=9, ffn_width=8,
    positions="rotary", dtype="float64",
)  # fmt: skip


def weights(config, seed=0):
    rng, tokens = np.random.default_rng(seed), jnp.zeros((1, 2), int)
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), tokens, tokens)["params"]
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), shapes)


def texts(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, 17, (B, S))), jnp.asarray(rng.integers(0, 17, (B, T)))


def by_hand(w, x, source, real, angles):
    """[B, T, O] of standard heads, key by key: own ones turned up to the query's place, then those
    of the source that are `real`."""
    bias = lambda a, name: a + w[f"{name}_bias"]
    q, k, v = (bias(np.einsum("btd,dnh->btnh", x, w[n]), n) for n in "qkv")
    ck, cv = (bias(np.einsum("bsd,dnh->bsnh", source, w[n]), n) for n in "kv")

    def turn(a):
        first, second = np.split(a, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    q, k = turn(q), turn(k)
    out = np.zeros((*x.shape[:2], w["o"].shape[-1])) + w["o_bias"]
    for b, t, n in np.ndindex(q.shape[:3]):
        g = n // (q.shape[2] // k.shape[2])
        keys = np.concatenate([k[b, : t + 1, g], ck[b, real[b], g]])
        values = np.concatenate([v[b, : t + 1, g], cv[b, real[b], g]])
        scores = np.exp(keys @ q[b, t, n] / np.sqrt(q.shape[-1]))
        out[b, t] += (scores / scores.sum()) @ values @ w["o"][n]
    return out


def test_the_definition(x64):
    spec = HeadSpec(
        "standard", width=12, num_heads=4, num_kv_heads=2, head_dim=6, value_dim=3, out_width=10,
        biases="qkvo",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    w = {name: rng.normal(size=shape) for name, shape in spec.shapes.items()}
    x, source = rng.normal(size=(B, T, 12)), rng.normal(size=(B, S, 12))
    real = rng.random((B, S)) < 0.6
    angles = np.asarray(rotary_angles(jnp.arange(T), 6))

    @jax.jit
    def run(w, x, source, mask):
        given = Given(source=source, context_mask=mask, rotary=jnp.asarray(angles))
        call = lambda given: attend_heads(w, x, None, given, spec=spec, is_causal=True).x
        hidden = given._replace(context_mask=jnp.zeros((1, S), bool))
        empty = given._replace(source=source[:, :0], context_mask=None)
        return call(given), [call(g) for g in (hidden, empty, given._replace(source=None))]

    got, (hidden, empty, alone) = run(w, x, source, real[:, None, None])
    expected = by_hand(w, x, source, real, angles)
    assert np.abs(got - expected).max() < 1e-10 * np.abs(expected).max()
    # A source that is hidden, or of no token, leaves self-attention.
    assert_close(hidden, alone)
    assert_close(empty, alone)


ALIKE = [name for name, case in SPECS.items() if not {"key_width", "value_width"} & {*case.fields}]


@pytest.mark.parametrize("name", deep(ALIKE, "latent"))
def test_every_row_and_order_is_a_call_on_both_texts(name, outside_row, x64):
    """Without positions: attention of x to [x; source], with a mask."""
    spec = SPECS[name].spec()
    width = spec.width
    rng = np.random.default_rng(1)
    w = {name: rng.normal(size=shape) for name, shape in spec.shapes.items()}
    x, source = rng.normal(size=(B, T, width)), rng.normal(size=(B, S, width))
    mask = np.concatenate([np.tri(T, dtype=bool), np.ones((T, S), bool)], axis=1)
    told = {}

    def merged(w, x, source, order=None, told=None):
        given = Given(source=source, told=told)
        return attend_heads(w, x, None, given, spec=spec, is_causal=True, order=order).x

    jax.eval_shape(lambda *a: merged(*a, told=told), w, x, source)
    orders = [n for n, cost in told["order"].items() if isinstance(cost, int)]

    @jax.jit
    def run(w, x, source):
        both = jnp.concatenate([x, source], axis=1)
        expected = attend_heads(w, x, both, Given(mask=mask), spec=spec, order="factored").x
        return expected, [merged(w, x, source, order) for order in orders]

    expected, each = run(w, x, source)
    for got in each:
        assert_close(got, expected, loosen=1000)


@pytest.mark.parametrize(
    "fields",
    deep(
        [
            dict(plan="cla:2"),
            dict(plan="albert", positions="relative", share_encoder=True, encoder_layers=3),
            dict(layout="latent", num_kv_heads=None, rotary_dim=4, latent_dim=5, window=2),
            dict(ties="kv", value_dim=None),
            dict(layout="wide", positions="none", num_kv_heads=None, head_dim=None,
                 value_dim=None, norm="post", talking_heads=True),
        ],
    ),
)  # fmt: skip
def test_decoding_piece_by_piece(fields, x64):
    """With a cache, and a target whose rows are padded on the left: the logits of the whole."""
    config = dataclasses.replace(CONFIG, **fields)
    model, params, (source, tokens) = config.build(), weights(config), texts()
    in_source = jnp.arange(S)[None] < jnp.array([[S], [4]])
    real = jnp.arange(T)[None] >= jnp.array([[0], [2]])

    @jax.jit
    def run(params, source, tokens):
        whole = model.apply(
            {"params": params},
            source,
            tokens,
            padding_mask=in_source,
            return_probs=True,
            return_outputs=True,
        )
        given = dict(source=source, encoded=whole.encoded, source_mask=in_source)
        logits, cache = prefill(model, params, tokens[:, :3], config.empty_cache(B, T), **given)
        more, _ = prefill(model, params, tokens[:, 3:], cache, **given)
        padded, _ = prefill(
            model, params, tokens, config.empty_cache(B, T), padding_mask=real, **given
        )
        short = model.apply({"params": params}, source[1:, :4], tokens[1:, 2:])
        return whole, jnp.concatenate([logits, more], axis=1), padded, short

    whole, pieces, padded, short = run(params, source, tokens)
    assert_close(pieces, whole.logits, loosen=1000)
    assert_close(padded[1:, 2:], short, loosen=1000)  # as it would be alone
    assert whole.probs.shape == (3, B, 4, T, T + S)
    assert whole.cross_probs is None
    if not config.talking_heads:
        assert_close(jnp.sum(whole.probs, axis=-1), jnp.ones((3, B, 4, T)), loosen=10)
        assert not np.any(whole.probs[:, 1, ..., T + 4 :])


@pytest.mark.slow
def test_what_is_seen_and_changed(x64):
    model, params, given = CONFIG.build(), weights(CONFIG), texts()

    @jax.jit
    def run(params, source, tokens):
        apply = lambda **options: model.apply({"params": params}, source, tokens, **options)
        logits, shown = apply(show=("probs", "k"))
        deaf = lambda probs, layer: probs.at[..., T:].set(0)
        return logits, shown, apply(edit={"probs": deaf}), apply(show=("k",))[1]["k"]

    logits, shown, changed, k = run(params, *given)
    assert shown["probs"].shape == (3, B, 4, T, T + S)
    assert k.shape == (3, B, T + S, 2, 6)
    assert np.abs(changed - logits).max() > 1e-3


# Gemma 2 2B on both sides, as T5Gemma 2 (arXiv 2512.14856, section 4) compares; sizes of the model
# card.
GEMMA = ModelConfig(
    kind="encoder_decoder", vocab_size=256_000, width=2304, num_layers=26, num_heads=8,
    num_kv_heads=4, head_dim=256, ffn_width=9216, activation="gated_gelu_tanh", norm_kind="rms",
    norm_bias=False, attention_biases="", ffn_bias=False, positions="rotary", readout="own",
)  # fmt: skip


def test_published_differences():
    merged = dataclasses.replace(GEMMA, cross="merged")
    norms = 26 * 2304  # one stands before every cross-attention
    assert unique_parameters(GEMMA) - unique_parameters(merged) == 368_050_176 + norms
    half = [dataclasses.replace(c, num_layers=13) for c in (GEMMA, merged)]
    assert np.diff([*map(unique_parameters, half)]) == -(184_025_088 + 13 * 2304)
    tied = dataclasses.replace(GEMMA, readout="tied")
    assert 2 * (unique_parameters(GEMMA) - unique_parameters(tied)) == 1_179_648_000
    # A token of the target is asked and merged once, where it was twice: W_Q and W_O.
    saved = flops_per_token(GEMMA, 64) - flops_per_token(merged, 64)
    assert saved == 26 * 2 * (2 * 2304 * 8 * 256)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(kind="decoder", encoder_layers=None), "is of a decoder beside an encoder"),
        (dict(plan="attention=0,1,2 cross=0,0,0 ffn=0,1,2"), "leaves no part 'cross' to a plan"),
        (dict(cross="both"), "unknown cross 'both'"),
    ],
)
def test_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(CONFIG, **fields)


def test_there_is_no_cross_attention_to_look_at(x64):
    model, params = CONFIG.build(), weights(CONFIG)
    with pytest.raises(ValueError, match=r"unknown value 'cross\.probs'"):
        jax.eval_shape(lambda: model.apply({"params": params}, *texts(), show=("cross.probs",)))


def test_a_family_without_it_refuses(tmp_path):
    t5 = pretrained.published_config(
        "t5_v1_1_base", width=16, num_layers=2, num_heads=2, head_dim=8, ffn_width=24,
        vocab_size=40, cross="merged", encoder_layers=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="t5: cross would be 'own', not 'merged'"):
        pretrained.save(tmp_path / "t5", t5.build(), {})


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
    heads = lambda name, n: t[f"{name}_proj.weight"].T.reshape(12, n, 6)
    w = {"q": heads("q", 4), "k": heads("k", 2), "v": heads("v", 2)}
    w |= {"o": t["o_proj.weight"].T.reshape(4, 6, 12)}
    w |= {f"{n}_norm": 1 + t[f"{n}_norm.weight"] for n in "qk"}
    spec = HeadSpec(
        "standard", width=12, num_heads=4, num_kv_heads=2, head_dim=6, qk_norm="rms",
        scale=5**-0.5, norm_eps=config.rms_norm_eps,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    x, source = rng.normal(size=(B, T, 12)), rng.normal(size=(B, S, 12))
    real = rng.random((B, S)) < 0.6
    angles = np.asarray(rotary_angles(jnp.arange(T), 6))
    mask = np.concatenate(
        [np.broadcast_to(np.tri(T, dtype=bool), (B, T, T)),
         np.broadcast_to(real[:, None], (B, T, S))], axis=2,
    )  # fmt: skip
    as_torch = lambda a: torch.tensor(np.asarray(a))
    turns = [as_torch(np.concatenate([f(angles)] * 2, axis=1))[None] for f in (np.cos, np.sin)]
    with torch.no_grad():
        added = as_torch(np.where(mask, 0.0, -1e30))[:, None]
        expected = peer(as_torch(x), tuple(turns), added, as_torch(source))[0].numpy()
    given = Given(source=source, context_mask=real[:, None, None], rotary=jnp.asarray(angles))
    got = jax.jit(lambda w: attend_heads(w, x, None, given, spec=spec, is_causal=True).x)(w)
    assert np.abs(got - expected).max() < 1e-6 * np.abs(expected).max()
