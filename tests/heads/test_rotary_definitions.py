"""Layouts that rotate a part of their heads, against their definitions head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from layout_cases import make, norm

from attnlab import heads, multi_head_attention, positions
from attnlab.heads import decode, init_cache
from attnlab.tap import Tap

LAYOUTS = {
    "latent": heads.Latent(
        width=12, num_heads=3, head_dim=6, value_dim=5, latent_dim=7, rotary_dim=4
    ),
    "latent queries": heads.Latent(
        width=12, num_heads=3, query_latent_dim=5, rotary_dim=4, norm_eps=1e-3
    ),
    "low-rank queries": heads.LowRankQuery(
        width=12, num_heads=6, num_kv_heads=2, head_dim=4, query_latent_dim=5, norm_eps=1e-2
    ),
    "tensor product": heads.TensorProduct(
        width=12, num_heads=3, head_dim=4, value_dim=5, key_rank=3, biases=("factors",)
    ),
    "grouped and tied": heads.GroupedTied(
        width=12, num_heads=6, num_kv_heads=2, value_dim=7, head_dim=3, rotary_dim=4
    ),
}
LATENT = ["latent", "latent queries"]
run = jax.jit(multi_head_attention, static_argnames=("layout", "is_causal", "order"))


def qkv(layout, w, x, rotated):
    """q [T, N, Hq], k [T, N, Hq], v [T, N, V] of one text."""

    def project(a, name):
        return np.einsum("td,d...->t...", a, w[name])

    def repeated(a):
        return np.repeat(a, layout.num_heads // a.shape[1], axis=1)

    def beside(a, shared):
        shared = np.repeat(shared[:, None], a.shape[1], axis=1) if shared.ndim == 2 else shared
        return np.concatenate([a, shared], axis=-1)

    eps = layout.norm_eps
    u = norm(x @ w["q_down"], w["q_down_norm"], eps=eps) if "q_down" in w else x
    if isinstance(layout, heads.Latent):
        c = norm(x @ w["kv_down"], w["kv_down_norm"], eps=eps)
        q = beside(project(u, "q"), rotated(project(u, "q_rotary")))
        return q, beside(project(c, "k"), rotated(project(x, "k_rotary"))), project(c, "v")
    if isinstance(layout, heads.LowRankQuery):
        k, v = rotated(project(x, "k")), project(x, "v")
        return rotated(project(u, "q")), repeated(k), repeated(v)
    if isinstance(layout, heads.TensorProduct):
        factors = {n: project(x, f"{n}_heads") + w[f"{n}_heads_bias"] for n in "qkv"}
        others = {n: rotated(project(x, n)) if n != "v" else project(x, n) for n in "qkv"}
        ranks = {"q": 6, "k": 3, "v": 2}
        return tuple(np.einsum("trn,trh->tnh", factors[n], others[n]) / ranks[n] for n in "qkv")
    state = project(x, "kv")
    key = beside(state[..., :3], rotated(project(x, "k_rotary")))
    q = beside(project(x, "q"), rotated(project(x, "q_rotary")))
    return q, repeated(key), repeated(state)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_definition_with_positions(name, x64):
    """Pairs (i, i + half) as complex numbers, times e^(i angle); causal; every form."""
    layout = LAYOUTS[name]
    params, x, *_ = make(layout, jnp.float64)
    assert layout.rotary_size == 4
    angles = positions.rotary_angles(jnp.arange(7), 4)

    def rotated(a):
        turn = np.exp(1j * np.asarray(angles))[(slice(None),) + (None,) * (a.ndim - 2)]
        z = (a[..., :2] + 1j * a[..., 2:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    w, texts = {n: np.asarray(a) for n, a in params.items()}, []
    for text in np.asarray(x):
        q, k, v = qkv(layout, w, text, rotated)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(7, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        texts.append(np.einsum("nts,snv,nvo->to", p / p.sum(-1, keepdims=True), v, w["o"]))
    for order in ("factored", "latent_absorbed") if name in LATENT else ("factored",):
        options = dict(rotary=angles, is_causal=True, order=order)
        got = run(params, x, layout=layout, **options)
        assert_close(got, jnp.asarray(np.stack(texts)))


def test_queries_and_keys_may_stand_at_other_positions(x64):
    """The last 3 of 7 tokens are queries, all 7 are keys."""
    layout = heads.Standard(width=12, num_heads=3)
    params, x, *_ = make(layout, jnp.float64)
    angles = positions.rotary_angles(jnp.arange(7), 4)
    got = multi_head_attention(params, x[:, 4:], layout, x, rotary=(angles[4:], angles))
    assert_close(got, multi_head_attention(params, x, layout, rotary=angles)[:, 4:])


@pytest.mark.parametrize("name", ["latent", "low-rank queries", "tensor product"])
def test_shared_keys_of_another_text_are_attention_to_it(name, x64):
    """What would make keys and values of x is not used: it may hold NaN."""
    layout = LAYOUTS[name]
    params, x, context, _ = make(layout, jnp.float64)
    entries = heads.project_kv(params, context, layout)
    unused = {n for n, w in layout.weights().items() if set(w.stages) == {"project_kv"}}
    spoilt = {n: a * jnp.nan if n in unused else a for n, a in params.items()}
    got = multi_head_attention(spoilt, x, layout, kv=entries, order="factored")
    assert_close(got, multi_head_attention(params, x, layout, context, order="factored"))


def test_a_cache_of_another_form_says_what_it_cannot_record():
    layout = heads.Standard(width=12, num_heads=4)
    params, x, *_ = make(layout)
    cache = init_cache(layout, 2, 8, order="absorbed")
    assert set(cache) == {"x", "length"}
    with pytest.raises(ValueError, match="the cache"):
        decode(params, x, layout, cache, tap=Tap(("q",)))
    got, after = decode(params, x, layout, cache)
    assert set(after) == {"x", "length"}
    assert_close(got, multi_head_attention(params, x, layout, is_causal=True), loosen=10)
