"""Heads against the attention modules of transformers, live; see `-m parity` in the README."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import heads, multi_head_attention, positions

pytestmark = pytest.mark.parity


def filled(module, std=0.7):
    """The module with random parameters, and they as arrays by name."""
    import torch

    with torch.no_grad():
        for a in module.parameters():
            a.normal_(std=std)
    return {n: a.detach().numpy() for n, a in module.named_parameters()}


def check(expected, params, x, layout, **options):
    expected = expected.detach().numpy()
    params = jax.tree.map(jnp.asarray, params)
    got = multi_head_attention(params, jnp.asarray(x.numpy()), layout, is_causal=True, **options)
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


def causal():
    import torch

    return torch.full((9, 9), float("-inf")).triu(1)[None, None]


def split_pairs(a, interleaved):
    """Pairs (2i, 2i+1) of the last axis -> (i, i + P/2), as attnlab rotates them."""
    return np.concatenate([a[..., 0::2], a[..., 1::2]], axis=-1) if interleaved else a


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("queries", [None, 8])
@pytest.mark.parametrize("order", ["factored", "latent_absorbed"])
def test_latent_attention_of_deepseek_v3(interleaved, queries, order):
    import torch
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as peer

    config = DeepseekV3Config(
        hidden_size=12, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=queries,
        kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        rope_interleave=interleaved, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    module = peer.DeepseekV3Attention(config, 0).eval()
    p, x = filled(module), torch.randn(2, 9, 12)
    angles = peer.DeepseekV3RotaryEmbedding(config)(x, torch.arange(9)[None])
    expected = module(x, angles, causal())[0]
    layout = heads.Latent(
        width=12, num_heads=3, head_dim=6, value_dim=5, latent_dim=7, rotary_dim=4,
        query_latent_dim=queries,
    )  # fmt: skip

    def split(a, at):
        return np.split(a.T.reshape(a.shape[1], 3, -1), [at], axis=-1)

    q, q_rotary = split(p["q_b_proj.weight" if queries else "q_proj.weight"], 6)
    k, v = split(p["kv_b_proj.weight"], 6)
    down, k_rotary = np.split(p["kv_a_proj_with_mqa.weight"].T, [7], axis=1)
    params = {
        "q": q, "q_rotary": split_pairs(q_rotary, interleaved), "kv_down": down,
        "kv_down_norm": p["kv_a_layernorm.weight"],
        "k_rotary": split_pairs(k_rotary, interleaved), "k": k, "v": v,
        "o": p["o_proj.weight"].T.reshape(3, 5, -1),
    }  # fmt: skip
    if queries:
        params |= {"q_down": p["q_a_proj.weight"].T, "q_down_norm": p["q_a_layernorm.weight"]}
    rotary = positions.rotary_angles(jnp.arange(9), 4)
    check(expected, params, x, layout, rotary=rotary, order=order)


def test_the_gate_of_qwen3_next():
    """A gate per element, q/k norms, grouped heads."""
    import torch
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    config = Qwen3NextConfig(
        hidden_size=12, num_attention_heads=6, num_key_value_heads=2, head_dim=4,
        rms_norm_eps=0.05, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    module = peer.Qwen3NextAttention(config, 0).eval()
    p, x = filled(module), torch.randn(2, 9, 12)
    no_positions = torch.ones(2, 9, 4), torch.zeros(2, 9, 4)
    expected = module(x, no_positions, causal())[0]
    layout = heads.Standard(
        width=12, num_heads=6, num_kv_heads=2, head_dim=4, norm_eps=0.05,
        qk_norm=heads.HeadNorm("rms"), extras=(heads.Gate("element"),),
    )  # fmt: skip
    k, v = (p[f"{name}_proj.weight"].T.reshape(12, -1, 4) for name in "kv")
    q, gate = np.split(p["q_proj.weight"].T.reshape(12, 6, 8), 2, axis=-1)
    params = {
        "q": q, "k": k, "v": v, "o": p["o_proj.weight"].T.reshape(6, 4, 12), "gate": gate,
        "q_norm": 1 + p["q_norm.weight"], "k_norm": 1 + p["k_norm.weight"],
    }  # fmt: skip
    check(expected, params, x, layout)


def test_the_sinks_of_gpt_oss():
    """Biases and grouped heads."""
    import torch
    from transformers import GptOssConfig
    from transformers.models.gpt_oss import modeling_gpt_oss as peer

    config = GptOssConfig(
        hidden_size=12, num_attention_heads=6, num_key_value_heads=2, head_dim=4,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    module = peer.GptOssAttention(config, 0).eval()
    p, x = filled(module), torch.randn(2, 9, 12)
    no_positions = torch.ones(1, 9, 2), torch.zeros(1, 9, 2)
    expected = module(x, no_positions, causal())[0]
    layout = heads.Standard(
        width=12, num_heads=6, num_kv_heads=2, head_dim=4, biases=("q", "k", "v", "o"),
        extras=(heads.Sink(),),
    )  # fmt: skip
    params = {n: p[f"{n}_proj.weight"].T.reshape(12, -1, 4) for n in "qkv"}
    params |= {f"{n}_bias": p[f"{n}_proj.bias"].reshape(-1, 4) for n in "qkv"}
    params |= {"o": p["o_proj.weight"].T.reshape(6, 4, 12), "o_bias": p["o_proj.bias"]}
    check(expected, params | {"sink": p["sinks"]}, x, layout)


@pytest.mark.parametrize("zero", [False, True])
def test_the_extra_keys_of_torch(zero):
    """torch.nn.MultiheadAttention(add_bias_kv=True, add_zero_attn=zero)."""
    import torch

    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(
        12, 3, add_bias_kv=True, add_zero_attn=zero, batch_first=True
    ).eval()
    p, x = filled(module), torch.randn(2, 9, 12)
    expected = module(x, x, x, attn_mask=torch.ones(9, 9, dtype=bool).triu(1))[0]
    extras = (heads.ExtraKeys(1), *([heads.Sink(learnt=False)] if zero else []))
    layout = heads.Standard(width=12, num_heads=3, biases=("q", "k", "v", "o"), extras=extras)
    params = {}
    for i, name in enumerate("qkv"):
        rows = slice(12 * i, 12 * (i + 1))
        params[name] = p["in_proj_weight"][rows].T.reshape(12, 3, 4)
        params[f"{name}_bias"] = p["in_proj_bias"][rows].reshape(3, 4)
    params |= {"o": p["out_proj.weight"].T.reshape(3, 4, 12), "o_bias": p["out_proj.bias"]}
    params |= {f"extra_{n}": p[f"bias_{n}"].reshape(1, 3, 4) for n in "kv"}
    check(expected, params, x, layout)
