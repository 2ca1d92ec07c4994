"""Multi-head latent attention: published counts, the definition with positions, orders, flags."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from contract import attend, make, norm

from attnlab import HeadSpec, ModelConfig, contraction_orders, init_cache, positions
from attnlab.heads.old.cost import cache_bytes_per_token, head_parameters
from attnlab.heads.old.multihead import explain_heads, multi_head_attention
from attnlab.model.accounting import flops_per_token, model_cache_bytes

DEEPSEEK = functools.partial(
    HeadSpec, "latent", head_dim=128, value_dim=128, latent_dim=512, rotary_dim=64
)
V2_LITE = DEEPSEEK(width=2048, num_heads=16)
V2 = DEEPSEEK(width=5120, num_heads=128, query_latent_dim=1536)
V3 = DEEPSEEK(width=7168, num_heads=128, query_latent_dim=1536)


@pytest.mark.parametrize(
    ("spec", "count"), [(V2_LITE, 13_763_072), (V2, 149_227_520), (V3, 187_107_328)]
)
def test_published_parameters_and_cache(spec, count):
    """Of one layer, the norms of both latents included; 512 + 64 numbers a token."""
    assert head_parameters(spec) == count
    assert cache_bytes_per_token(spec, bytes_per_number=1) == 576
    equal_heads = HeadSpec("standard", spec.width, spec.num_heads, head_dim=128)
    assert cache_bytes_per_token(equal_heads, 1) == 2 * spec.num_heads * 128


def test_published_parameters_of_61_layers():
    assert 61 * head_parameters(V3) == 11_413_547_008


def test_sizes_left_out_are_those_of_the_paper():
    """M = 4 H and P = H / 2 (DeepSeek-V2, Table 1)."""
    sizes = HeadSpec("latent", width=256, num_heads=4).sizes
    assert [sizes[a] for a in "HVMPQ"] == [64, 64, 256, 32, 256]


def by_hand(w, x, angles, spec):
    """Head by head, the rotary part turned pair by pair (i, i + P/2); causal."""
    w, x = ({n: np.asarray(a) for n, a in w.items()}, np.asarray(x))
    turn = np.exp(1j * np.asarray(angles))

    def turned(a):
        half = a.shape[-1] // 2
        z = (a[..., :half] + 1j * a[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    u = norm(x @ w["q_down"], w["q_down_norm"], eps=spec.norm_eps) if "q_down" in w else x
    c = norm(x @ w["kv_down"], w["kv_down_norm"], eps=spec.norm_eps)
    out = 0
    for n in range(spec.num_heads):
        scores = (u @ w["q"][:, n]) @ (c @ w["k"][:, n]).swapaxes(1, 2)
        scores += turned(u @ w["q_turned"][:, n]) @ turned(x @ w["k_turned"]).swapaxes(1, 2)
        scores /= np.sqrt(spec.sizes["H"] + spec.sizes["P"])
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out += p / p.sum(-1, keepdims=True) @ (c @ w["v"][:, n]) @ w["o"][n]
    return out


SMALL = HeadSpec("latent", 12, 3, head_dim=6, value_dim=5, latent_dim=7, rotary_dim=4)
SPECS = {"without": SMALL, "with": HeadSpec("latent", 12, 3, query_latent_dim=5, norm_eps=1e-3)}


@pytest.mark.parametrize("queries", SPECS)
def test_the_definition_with_positions(queries, x64):
    """And both orders are it to rounding; positions turn P numbers and no more."""
    spec = SPECS[queries]
    w, x, *_ = make(spec, jnp.float64)
    angles = positions.rotary_angles(jnp.arange(7), spec.sizes["P"])
    expected = by_hand(w, x, angles, spec)
    for order in ("factored", "latent_absorbed"):
        assert_close(attend(w, x, spec=spec, rotary=angles, is_causal=True, order=order), expected)


@pytest.mark.parametrize("queries", SPECS)
def test_decoding_from_the_latent_is_the_expanded_form(queries, x64):
    """Token by token, each order, and one after the other on one cache; 1e-10."""
    spec = SPECS[queries]
    w, x, *_ = make(spec, jnp.float64)
    angles = positions.rotary_angles(jnp.arange(7), spec.sizes["P"])
    run = functools.partial(multi_head_attention, spec=spec, is_causal=True)
    whole = attend(w, x, spec=spec, rotary=angles, is_causal=True, order="factored")

    def decode(orders):
        cache, outs = init_cache(spec, 2, 7, x.dtype), []
        for i in range(7):
            out, cache = run(
                w, x[:, i : i + 1], rotary=angles[i : i + 1], cache=cache, order=orders[i % 2]
            )
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    two = "factored", "latent_absorbed"
    for orders in ((two[0], two[0]), (two[1], two[1]), two, (None, None)):
        got = jax.jit(decode, static_argnums=0)(orders)
        assert np.abs(got - whole).max() < 1e-10 * np.abs(whole).max()


def test_cost_chooses_the_form():
    """DeepSeek-V3: keys and values of a text are made once, of a cache at every token."""
    text = contraction_orders(V3, 1, 4096)
    token = contraction_orders(V3, 1, 1, 4096, num_new=1)
    n, h, p, m, v = 128, 128, 64, 512, 128
    expand, scores = m * n * (h + v), n * (h + p + v)
    over_latent = n * (m + p + m)
    each = head_parameters(V3) - 1536 - 512  # norms are no products
    assert text["factored"] == 2 * 4096 * (each + 4096 * scores)
    assert text["latent_absorbed"] == 2 * 4096 * (each + 4096 * over_latent)
    assert token["factored"] == 2 * (each - expand + 4096 * (expand + scores))
    assert token["latent_absorbed"] == 2 * (each + 4096 * over_latent)
    assert min(text, key=text.get) == "factored"
    assert min(token, key=token.get) == "latent_absorbed"
    x = jax.ShapeDtypeStruct((1, 4096, 7168), "float32")
    assert explain_heads(V3, x, rotary=True)["chosen"] == {"order": "factored"}


def test_decoding_runs_what_costs_least():
    """With a cache the program of the absorbed form is taken, without one the other's."""
    w, x = jax.eval_shape(lambda: make(SMALL)[0]), jnp.ones((2, 1, 12))
    cache = init_cache(SMALL, 2, 64)
    text = lambda order: str(
        jax.make_jaxpr(functools.partial(multi_head_attention, spec=SMALL, order=order))(
            w, x, cache=cache
        )
    )
    assert text(None) == text("latent_absorbed") != text("factored")


@pytest.mark.slow  # test_outside_row.py: the same of another row
def test_a_model_by_its_flags(x64):
    """Its own sizes, rotary positions on the part apart; written token by token = at once."""
    config = ModelConfig(
        layout="latent", width=12, num_heads=3, head_dim=6, latent_dim=7, query_latent_dim=5,
        rotary_dim=2, head_norm_eps=1e-4, positions="rotary", vocab_size=17, max_len=9,
        num_layers=2, ffn_width=16, dtype="float64",
    )  # fmt: skip
    assert config.heads == HeadSpec(
        "latent", 12, 3, head_dim=6, latent_dim=7, query_latent_dim=5, rotary_dim=2, biases="o",
        norm_eps=1e-4,
    )  # fmt: skip
    assert model_cache_bytes(config, 1) == 2 * (7 + 2)
    plain = ModelConfig(layout="latent", width=12, num_heads=3, num_layers=2)
    assert flops_per_token(plain, 8) > 0
    model, tokens = config.build(), jnp.array([[3, 1, 4, 1, 5, 9]])
    params = jax.tree.map(
        lambda a: 2.0 * a.astype(jnp.float64), model.init(jax.random.key(0), tokens)["params"]
    )

    @jax.jit
    def both(params):
        cache, logits = config.empty_cache(1, 6), []
        for i in range(6):
            one, cache = model.apply({"params": params}, tokens[:, i : i + 1], cache=cache)
            logits.append(one)
        return jnp.concatenate(logits, axis=1), model.apply({"params": params}, tokens)

    assert_close(*both(params))
    with pytest.raises(ValueError, match="rotary_dim 3 must be even"):
        ModelConfig(layout="latent", rotary_dim=3, positions="rotary")
    with pytest.raises(ValueError, match=r"'standard' takes no rotary_dim: only '.*, 'latent' and"):
        ModelConfig(layout="standard", rotary_dim=4)
