"""Positions of queries and keys that differ, of other forms and of keys that were made before."""

import jax.numpy as jnp
import pytest
from conftest import assert_close
from layout_cases import make

from attnlab import heads, multi_head_attention, positions

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


@pytest.mark.parametrize("name", LATENT)
def test_the_absorbed_form_has_the_same_positions(name, x64):
    layout = LAYOUTS[name]
    params, x, *_ = make(layout, jnp.float64)
    rotary = positions.rotary_angles(jnp.arange(7), layout.rotary_size)
    one, two = (
        multi_head_attention(params, x, layout, rotary=rotary, is_causal=True, order=order)
        for order in ("factored", "latent_absorbed")
    )
    assert_close(one, two, loosen=100)


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
