"""The loss of routed heads, published sizes and counts, a scale, and a sink that is no number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from head_definitions import routed_gates, softmax
from layout_cases import make

from attnlab import heads, models, multi_head_attention
from attnlab.attention import AttentionOptions
from attnlab.heads import HeadCall, Standard, num_parameters


def test_the_balance_of_a_mixture_of_heads_counts_no_padding():
    """By hand on the first 4 tokens, in self- and in cross-attention; the others hold NaN."""
    extra = heads.MixtureOfHeads(top=2, shared=1, balance=0.5)
    layout = Standard(width=12, num_heads=6, extras=(extra,))
    params, x, *_ = make(layout)
    real = np.arange(7) < 4
    probs = softmax(np.asarray(x[:, :4] @ params["router"])).reshape(-1, 5)
    expected = 0.5 * 5 * np.sum(probs.mean(0) * (routed_gates(probs, 2) > 0).mean(0))
    spec = models.LayerSpec(
        heads=layout, cross=layout, ffn=models.FFN(width=0), norm=models.Norm(scale=False)
    )

    @jax.jit
    def losses(x, mask):
        _, aux = multi_head_attention(params, x, layout, padding_mask=mask, return_aux=True)
        inputs = models.LayerInputs(padding_mask=mask, source=models.Source(x[:, :3]))
        both = {"attention": params, "cross": params}
        return aux.losses["head_balance"], models.transformer_layer(both, x, spec, inputs).losses

    mask = jnp.broadcast_to(real, x.shape[:2])
    padded = losses(jnp.where(real[:, None], x, jnp.nan), mask)
    np.testing.assert_allclose(padded[0], expected, rtol=1e-5)
    assert_close(padded, losses(x[:, :4], None))
    packed = {"segments": mask.astype(int), "padding_mask": jnp.ones((2, 7), bool)}
    _, aux = multi_head_attention(params, x, layout, **packed, return_aux=True)
    np.testing.assert_allclose(aux.losses["head_balance"], expected, rtol=1e-5)


def test_the_balance_of_a_mixture_of_heads_sums_many_float16_tokens():
    """70,000 of them, all of the first of 3 routed heads; float16 ends at 65,504."""
    extra = heads.MixtureOfHeads(top=1, balance=1.0)
    params = make(Standard(width=4, num_heads=4, extras=(extra,)))[0]
    x = jnp.zeros((70, 1000, 4), "float16")
    call = HeadCall(x, AttentionOptions())
    losses = extra.after_attention(params, x[..., None], call)[1]
    np.testing.assert_allclose(losses["head_balance"], 3 * 1 * 1 / 3, rtol=1e-3)


# Published numbers --------------------------------------------------------------------------------

SIZED = functools.partial(dict, width=512, num_heads=8)
DEEPSEEK = dict(head_dim=128, value_dim=128, latent_dim=512, rotary_dim=64)
V3 = heads.Latent(width=7168, num_heads=128, query_latent_dim=1536, **DEEPSEEK)
FORMER = dict(width=256, num_heads=8, biases=("o",))
MFA = heads.LowRankQuery(**SIZED(head_dim=96, query_latent_dim=160))
COUNTS = [
    (Standard(**SIZED(head_dim=16, value_dim=64)), 512 * 8 * (2 * 16 + 2 * 64)),
    (heads.Collaborative(**SIZED(head_dim=256)), 2 * 512 * 256 + 8 * 256 + 2 * 512**2),
    # TPA: D (R_Q + R_K + R_V) (N + H) and the output projection
    (heads.TensorProduct(width=768, num_heads=12), 768 * 10 * 76 + 768**2),
    # MFA: D Q + Q N H + D 2 H + N H D, and a norm of Q
    (MFA, 512 * 160 + 160 * 768 + 512 * 192 + 768 * 512 + 160),
    # GTA: D N 2 H + D (K V + P) + N V D
    (heads.GroupedTied(**SIZED(num_kv_heads=2)), 2 * 512**2 + 512 * (2 * 64 + 32)),
    (heads.GroupedTied(width=12, num_heads=2), 12 * (2 * (3 + 4) + 2 * 6 + 4 + 2 * 6)),
    # DeepSeek-V2 Lite and V3, a layer, with the norms of both latents
    (heads.Latent(width=2048, num_heads=16, **DEEPSEEK), 13_763_072),
    (V3, 187_107_328),
    # pbloem/former, a bias on the output projection alone
    (heads.Wide(**FORMER), 2_097_408),
    (Standard(**FORMER), 262_400),
    (heads.Alt(**FORMER), 155_904),
    (heads.Narrow(**FORMER), 90_368),
    (heads.NarrowTied(**FORMER), 68_864),
    (heads.NarrowTied(**SIZED(output_projection=False)), 12_288),
]


@pytest.mark.parametrize(("layout", "count"), COUNTS, ids=str)
def test_published_parameters(layout, count):
    assert num_parameters(layout) == count


def test_published_caches():
    """TPA: 304 numbers a token for 1536 (12 heads of 64, ranks 2). GTA: K V + P for 2 K V. MFA: one
    key and value of 256 for 24 of 128. DeepSeek: 512 + 64."""
    expected = {
        heads.TensorProduct(width=768, num_heads=12): (2 + 2) * (12 + 64),
        Standard(width=768, num_heads=12): 1536,
        heads.GroupedTied(width=3072, num_heads=24, num_kv_heads=6): 6 * 128 + 64,
        Standard(width=3072, num_heads=24, num_kv_heads=6): 2 * 6 * 128,
        heads.LowRankQuery(width=3072, num_heads=24): 2 * 256,
        V3: 576,
    }
    assert {a: heads.cache_bytes_per_token(a, bytes_per_number=1) for a in expected} == expected


def test_a_latent_that_is_multiplied_out_keeps_its_scale_on_the_way_back():
    absorbed = heads.LatentAbsorbed(width=8, num_heads=2)
    assert absorbed.general().layout.score_scale == absorbed.score_scale


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_sink_that_is_no_number_shows_beside_extra_keys(value):
    layout = Standard(width=8, num_heads=2, extras=(heads.Sink(), heads.ExtraKeys(count=1)))
    params = heads.init(jax.random.key(0), layout)
    broken = params | {"sink": jnp.full(2, value)}
    assert np.isnan(multi_head_attention(broken, jnp.ones((1, 3, 8)), layout)).all()
