"""Heads against modules of transformers and torch, live; see `-m parity` in the README. Latent
attention and sinks are checked with the models of `tests/pretrained/parity`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import heads, multi_head_attention

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
