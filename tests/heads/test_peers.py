"""Heads against a module of transformers, live; see `-m parity` in the README. Others are checked
with the models of `tests/pretrained/parity`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import heads, multi_head_attention

pytestmark = pytest.mark.parity


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
    with torch.no_grad():
        for a in module.parameters():
            a.normal_(std=0.7)
    p = {name: a.detach().numpy() for name, a in module.named_parameters()}
    x, no_positions = torch.randn(2, 9, 12), (torch.ones(2, 9, 4), torch.zeros(2, 9, 4))
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    expected = module(x, no_positions, causal)[0].detach().numpy()
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
    params = jax.tree.map(jnp.asarray, params)
    got = multi_head_attention(params, jnp.asarray(x.numpy()), layout, is_causal=True)
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
