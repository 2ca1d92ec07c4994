"""`latent` is the attention of transformers' DeepSeek-V3, live; its own command, see README."""

import jax.numpy as jnp
import numpy as np
import pytest
from contract import attend

from attnlab import HeadSpec, positions

pytestmark = pytest.mark.parity

SIZES = dict(head_dim=6, value_dim=5, latent_dim=7, rotary_dim=4)


def pairs(a, interleaved):
    """Pairs (2i, 2i+1) of the last axis -> (i, i + P/2), as attnlab turns them."""
    return np.concatenate([a[..., 0::2], a[..., 1::2]], axis=-1) if interleaved else a


def weights(module, spec, interleaved):
    """torch's [out, in] by name -> those of the row."""
    p = {n: a.detach().numpy() for n, a in module.named_parameters()}
    s = spec.sizes
    cut = lambda a, widths: np.split(a.T.reshape(a.shape[1], s["N"], -1), widths, axis=-1)
    name = "q_b_proj" if spec.query_latent_dim else "q_proj"
    q, q_turned = cut(p[f"{name}.weight"], [s["H"]])
    k, v = cut(p["kv_b_proj.weight"], [s["H"]])
    down, k_turned = np.split(p["kv_a_proj_with_mqa.weight"].T, [s["M"]], axis=1)
    w = {
        "q": q, "q_turned": pairs(q_turned, interleaved), "kv_down": down,
        "kv_down_norm": p["kv_a_layernorm.weight"], "k_turned": pairs(k_turned, interleaved),
        "k": k, "v": v, "o": p["o_proj.weight"].T.reshape(s["N"], s["V"], -1),
    }  # fmt: skip
    if spec.query_latent_dim:
        w |= {"q_down": p["q_a_proj.weight"].T, "q_down_norm": p["q_a_layernorm.weight"]}
    return {n: jnp.asarray(a) for n, a in w.items()}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("queries", [None, 8])
@pytest.mark.parametrize("order", ["factored", "latent_absorbed"])
def test_the_same_output(interleaved, queries, order):
    """Large random weights, causal, rotary positions; within 1e-4, in both orders."""
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
    with torch.no_grad():
        for a in module.parameters():
            a.normal_(std=0.7)
        x = torch.randn(2, 9, 12)
        angles = peer.DeepseekV3RotaryEmbedding(config)(x, torch.arange(9)[None])
        hidden = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        expected = module(x, angles, hidden)[0].numpy()
    spec = HeadSpec("latent", 12, 3, query_latent_dim=queries, **SIZES)
    got = attend(
        weights(module, spec, interleaved), jnp.asarray(x.numpy()), spec=spec, is_causal=True,
        rotary=positions.rotary_angles(jnp.arange(9), 4), order=order,
    )  # fmt: skip
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
