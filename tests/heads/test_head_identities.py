"""Identities between layouts, published sizes and counts, initial values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from layout_cases import make

from attnlab import heads, multi_head_attention
from attnlab.heads import cache_bytes_per_token, num_parameters
from attnlab.models import ModelConfig
from attnlab.models import num_parameters as num_model_parameters

QKVO = ("q", "k", "v", "o")


def outputs(params, x, layout, **options):
    return jax.jit(functools.partial(multi_head_attention, layout=layout, **options))(params, x)


# Identities ---------------------------------------------------------------------------------------


def test_a_head_mask_of_zero_removes_a_head(x64):
    layout = heads.Standard(width=12, num_heads=4, biases=QKVO)
    params, x, *_ = make(layout, jnp.float64)
    without = params | {"o": params["o"].at[1].set(0)}
    mask = jnp.array([1.0, 0.0, 1.0, 1.0])

    def run(params, mask):
        return multi_head_attention(params, x, layout, head_mask=mask)

    masks = mask, jnp.stack([mask, jnp.ones(4)]), None
    all_of_them = jax.jit(lambda p, q: (*(run(p, m) for m in masks), run(q, None)))
    got, mixed, plain, removed = all_of_them(params, without)
    assert_close(got, removed)
    assert_close(mixed[1], plain[1])
    assert_close(mixed[0], got[0])


def test_it_is_what_flax_calls_attention():
    nn = pytest.importorskip("flax.linen")
    layout = heads.Standard(width=12, num_heads=3, biases=QKVO)
    params, x, *_ = make(layout)
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    flax = {f: {"kernel": params[n], "bias": params[f"{n}_bias"]} for n, f in names.items()}
    module = nn.MultiHeadDotProductAttention(num_heads=3)
    theirs = jax.jit(lambda p: module.apply(p, x, mask=np.tri(7, dtype=bool)[None, None]))
    assert_close(outputs(params, x, layout, is_causal=True), theirs({"params": flax}))


# Published numbers --------------------------------------------------------------------------------

SIZED = functools.partial(dict, width=512, num_heads=8)


@pytest.mark.parametrize(
    ("layout", "flops", "parameters"),
    [  # D = 512, N = 8, T = 512
        (heads.Standard(**SIZED()), 3_145_728, 1_048_576),
        (heads.Wide(**SIZED()), 25_165_824, 8_388_608),
        (heads.Narrow(**SIZED()), 1_769_472, 360_448),
        (heads.NarrowTied(**SIZED()), 1_769_472, 274_432),
        (heads.Standard(**SIZED(num_kv_heads=1)), 2_228_224, 589_824),
        (heads.Bilinear(**SIZED()), 9_961_472, 2_621_440),
    ],
)
def test_published_flops_and_parameters(layout, flops, parameters):
    assert (heads.flops_per_token(layout, 512), num_parameters(layout)) == (flops, parameters)


@pytest.mark.parametrize(
    ("layout", "count"),
    [  # `former` at HEAD and of 2019, the tutorial code, the variants of papers
        (heads.Standard(**SIZED(biases=("o",))), 1_048_576 + 512),
        (heads.Wide(**SIZED(biases=("o",))), 8_389_120),
        (heads.NarrowTied(**SIZED(output_projection=False)), 12_288),
        (heads.NarrowTied(**SIZED(biases=("o",))), 274_944),
        (heads.Alt(**SIZED(biases=("o",))), 623_104),
        (heads.Standard(**SIZED(head_dim=16, value_dim=64)), 512 * 8 * (2 * 16 + 2 * 64)),
        (heads.Collaborative(**SIZED(head_dim=256)), 2 * 512 * 256 + 8 * 256 + 2 * 512**2),
    ],
)
def test_parameters_of_one_attention(layout, count):
    assert num_parameters(layout) == count


@pytest.mark.parametrize(
    ("width", "counts"),
    [  # pbloem/former, attention of one layer with 8 heads, bias on the output projection alone
        (128, (524_416, 65_664, 39_040, 22_656, 17_280)),
        (256, (2_097_408, 262_400, 155_904, 90_368, 68_864)),
    ],
)
def test_parameters_of_former(width, counts):
    kinds = heads.Wide, heads.Standard, heads.Alt, heads.Narrow, heads.NarrowTied
    layouts = [kind(width=width, num_heads=8, biases=("o",)) for kind in kinds]
    assert tuple(map(num_parameters, layouts)) == counts


DEEPSEEK = functools.partial(
    heads.Latent, head_dim=128, value_dim=128, latent_dim=512, rotary_dim=64
)
V3 = DEEPSEEK(width=7168, num_heads=128, query_latent_dim=1536)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (DEEPSEEK(width=2048, num_heads=16), 13_763_072),
        (DEEPSEEK(width=5120, num_heads=128, query_latent_dim=1536), 149_227_520),
        (V3, 187_107_328),
    ],
)
def test_published_latent_attention(layout, count):
    """Of one layer, the norms of both latents included; 512 + 64 numbers a token in the cache."""
    assert num_parameters(layout) == count
    assert cache_bytes_per_token(layout, bytes_per_number=1) == 576
    assert 61 * num_parameters(V3) == 11_413_547_008


def test_published_caches():
    """TPA: 304 numbers a token for 1536 (12 heads of 64, ranks 2). GTA: K V + P for 2 K V. MFA: one
    key and value of 256 for 24 of 128."""
    expected = {
        heads.TensorProduct(width=768, num_heads=12): (2 + 2) * (12 + 64),
        heads.Standard(width=768, num_heads=12): 1536,
        heads.GroupedTied(width=3072, num_heads=24, num_kv_heads=6): 6 * 128 + 64,
        heads.Standard(width=3072, num_heads=24, num_kv_heads=6): 2 * 6 * 128,
        heads.LowRankQuery(width=3072, num_heads=24): 2 * 256,
    }
    assert {a: cache_bytes_per_token(a, bytes_per_number=1) for a in expected} == expected


def test_parameters_of_the_papers():
    """TPA: D (R_Q + R_K + R_V) (N + H) and the output projection. MFA: D Q + Q N H + D 2 H + N H D.
    GTA: D N 2 H + D (K V + P) + N V D. Gates: D N or D N V a layer (arXiv 2505.06708)."""
    assert num_parameters(heads.TensorProduct(width=768, num_heads=12)) == 768 * 10 * 76 + 768**2
    mfa = heads.LowRankQuery(width=512, num_heads=8, head_dim=96, query_latent_dim=160)
    assert num_parameters(mfa) - 160 == 512 * 160 + 160 * 768 + 512 * 192 + 768 * 512
    gta = heads.GroupedTied(width=512, num_heads=8, num_kv_heads=2)
    assert num_parameters(gta) == 2 * 512**2 + 512 * (2 * 64 + 32)
    plain = heads.Standard(num_heads=32, head_dim=128)
    for by, more in (("head", 2048 * 32), ("element", 2048 * 32 * 128)):
        gated = dataclasses.replace(plain, extras=(heads.Gate(by),))
        counts = [
            num_model_parameters(ModelConfig(width=2048, num_layers=3, heads=layout))
            for layout in (gated, plain)
        ]
        assert counts[0] - counts[1] == 3 * more


def test_cost_chooses_the_form_of_latent_attention():
    """DeepSeek-V3: keys and values of a text are made once, of a cache at every token."""
    text = heads.contraction_orders(V3, heads.CallSizes(1, 4096, 4096))
    token = heads.contraction_orders(
        V3, heads.CallSizes(1, 1, 4096, num_new=1, entries=frozenset({"c", "r"}))
    )
    n, h, p, m, v = 128, 128, 64, 512, 128
    expand, scores, over_latent = m * n * (h + v), n * (h + p + v), n * (m + p + m)
    each = num_parameters(V3) - 1536 - 512  # norms are no products
    assert text["factored"] == 2 * 4096 * (each + 4096 * scores)
    assert text["latent_absorbed"] == 2 * 4096 * (each + 4096 * over_latent)
    assert token["factored"] == 2 * (each - expand + 4096 * (expand + scores))
    assert token["latent_absorbed"] == 2 * (each + 4096 * over_latent)
    assert min(text, key=text.get) == "factored"
    assert min(token, key=token.get) == "latent_absorbed"


@pytest.mark.parametrize("kind", [heads.Latent, heads.Bilinear, heads.Standard])
def test_no_form_multiplies_out_what_extra_keys_are_added_to(kind):
    """Their keys and values stand beside W_K x and W_V x, which the other forms do not make. One
    query and many keys are where those forms cost least."""
    layout = kind(width=8, num_heads=2, extras=(heads.ExtraKeys(3),))
    params, x = make(layout)[0], jnp.ones((1, 1, 8))
    context = jnp.asarray(np.random.default_rng(0).normal(size=(1, 256, 8)), jnp.float32)
    run = functools.partial(multi_head_attention, x=x, layout=layout, context=context)
    assert_close(*jax.jit(lambda p: (run(p), run(p, order="factored")))(params))
    orders = heads.contraction_orders(layout, heads.CallSizes(1, 1, 256))
    assert [name for name, flops in orders.items() if isinstance(flops, int)] == ["factored"]
