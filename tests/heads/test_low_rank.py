"""Low-rank queries, tensor products and tied states: with positions, published sizes, by flag."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import assert_close
from contract import SPECS, attend, by_hand, make, norm

from attnlab import HeadSpec, ModelConfig, init_heads, positions
from attnlab.heads.old.cost import cache_bytes_per_token, call_flops, head_parameters
from attnlab.model.accounting import model_cache_bytes

ROWS = {
    "low_rank_q": HeadSpec("low_rank_q", 12, 6, 2, head_dim=4, query_latent_dim=5, norm_eps=1e-2),
    "tensor": HeadSpec("tensor", 12, 3, head_dim=4, value_dim=5, key_rank=3, biases="a"),
    "grouped_tied": HeadSpec("grouped_tied", 12, 6, 2, value_dim=7, head_dim=3, rotary_dim=4),
}


def heads_by_hand(w, x, turned, spec):
    """q [T, N, Hq], k [T, N, Hq], v [T, N, V] of one text, `turned` turning the last axis."""
    each = lambda a: np.repeat(a, spec.num_heads // a.shape[1], axis=1)
    read = lambda a, name: np.einsum("td,d...->t...", a, w[name])
    if spec.layout == "low_rank_q":
        u = norm(x @ w["q_down"], w["q_down_norm"], eps=spec.norm_eps)
        return turned(read(u, "q")), each(turned(read(x, "k"))), each(read(x, "v"))
    if spec.layout == "tensor":
        a = {n: read(x, f"{n}_heads") + w[f"{n}_heads_bias"] for n in "qkv"}
        b = {n: turned(read(x, n)) if n != "v" else read(x, n) for n in "qkv"}
        ranks = {"q": 6, "k": 3, "v": 2}
        return tuple(np.einsum("trn,trh->tnh", a[n], b[n]) / ranks[n] for n in "qkv")
    state, r = read(x, "kv"), turned(read(x, "k_turned"))
    key = np.concatenate([state[..., :3], np.repeat(r[:, None], 2, axis=1)], axis=-1)
    q = np.concatenate([read(x, "q"), turned(read(x, "q_turned"))], axis=-1)
    return q, each(key), each(state)


@pytest.mark.parametrize("layout", ROWS)
def test_the_definition_with_positions(layout, x64):
    """Pairs (i, i + half) as complex numbers, times e^(i angle); causal; 1e-10 and far less."""
    spec = ROWS[layout]
    w, x, *_ = make(spec, jnp.float64)
    angles = positions.rotary_angles(jnp.arange(7), spec.turned)
    assert spec.turned == 4

    def turned(a):
        z = (a[..., :2] + 1j * a[..., 2:]) * np.exp(1j * np.asarray(angles))[
            (slice(None),) + (None,) * (a.ndim - 2)
        ]
        return np.concatenate([z.real, z.imag], axis=-1)

    numbers = {n: np.asarray(a) for n, a in w.items()}
    rows = []
    for text in np.asarray(x):
        q, k, v = heads_by_hand(numbers, text, turned, spec)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(7, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        rows.append(np.einsum("nts,snv,nvo->to", p / p.sum(-1, keepdims=True), v, numbers["o"]))
    got = attend(w, x, spec=spec, rotary=angles, is_causal=True, order="factored")
    assert_close(got, jnp.asarray(np.stack(rows)))
    if layout == "low_rank_q":  # all of it is turned; two numbers are not, in other rows
        assert np.abs(got - attend(w, x, spec=spec, is_causal=True)).max() > 0.1


def test_published_caches():
    """TPA: 304 numbers a token for 1536 (12 heads of 64, ranks 2). GTA: K V + P for 2 K V; one key
    and value of 256 (MFA) for 24 of 128.
    """
    count = lambda *a, **sizes: cache_bytes_per_token(HeadSpec(*a, **sizes), 1)
    assert count("tensor", 768, 12) == (2 + 2) * (12 + 64) == 304
    assert count("standard", 768, 12) == 1536
    assert count("grouped_tied", 3072, 24, 6) == 6 * 128 + 64
    assert count("standard", 3072, 24, 6) == 2 * 6 * 128
    assert count("low_rank_q", 3072, 24) == 2 * 256


def test_sizes_left_out():
    sizes = lambda *a: HeadSpec(*a).sizes
    assert [sizes("low_rank_q", 256, 4)[a] for a in "KHVQ"] == [1, 128, 128, 128]
    assert [sizes("tensor", 256, 4)[a] for a in "HVXYZ"] == [64, 64, 6, 2, 2]
    assert [sizes("grouped_tied", 256, 4)[a] for a in "KHVP"] == [4, 32, 64, 32]
    assert [sizes("grouped_tied", 12, 4)[a] for a in "HVP"] == [2, 3, 2]


def test_parameters_of_the_papers():
    """TPA: D (R_Q + R_K + R_V) (N + H) and the output map. MFA: D Q + Q N H + D 2 H +
    N H D. GTA: D N 2 H + D (K V + P) + N V D.
    """
    assert head_parameters(HeadSpec("tensor", 768, 12)) == 768 * 10 * 76 + 768**2
    mfa = HeadSpec("low_rank_q", 512, 8, head_dim=96, query_latent_dim=160)
    assert head_parameters(mfa) - 160 == 512 * 160 + 160 * 768 + 512 * 192 + 768 * 512
    gta = HeadSpec("grouped_tied", 512, 8, 2)
    assert head_parameters(gta) == 2 * 512**2 + 512 * (2 * 64 + 32)


def test_products_of_factors_are_counted():
    """Of a decoding step: factors once a token, keys and values of every token that is held."""
    spec = HeadSpec("tensor", 768, 12, value_dim=32, key_rank=3)
    new, held = head_parameters(spec) + 6 * 12 * 64, 12 * (3 * 64 + 2 * 32)
    assert call_flops(spec, 1, 1, 100, num_new=1) == 2 * (new + 100 * (held + 12 * (64 + 32)))


def test_factors_of_the_heads_start_larger_by_their_rank():
    """So that the mean of X products is of size 1."""
    w = init_heads(jax.random.key(0), HeadSpec("tensor", 512, 64, query_rank=16))
    np.testing.assert_allclose(np.std(w["q_heads"]), (16 / 512) ** 0.5, rtol=0.02)
    np.testing.assert_allclose(np.std(w["q"]), 512**-0.5, rtol=0.02)


def test_constant_factors_do_not_look_at_the_text(x64):
    """With no weights but the constants every head is the same sum of b_r: (1/X) sum alpha b."""
    spec = SPECS["tensor"].spec()
    w, x, context, values = make(spec, jnp.float64)
    w |= {f"{n}_heads": 0 * w[f"{n}_heads"] for n in "qkv"}
    plain = HeadSpec("standard", 12, 3, key_width=5, value_width=9, head_dim=4, value_dim=7,
                     biases="o", out_width=10)  # fmt: skip
    mixed = {n: jnp.einsum("drh,rn->dnh", w[n], w[f"{n}_heads_bias"]) for n in "qkv"}
    mixed = {n: a / w[n].shape[1] for n, a in mixed.items()} | {n: w[n] for n in ("o", "o_bias")}
    got = attend(w, x, context, values, spec=spec)
    assert_close(got, jnp.asarray(by_hand(mixed, x, context, values, plain)))


FLAGS = {
    "low_rank_q": ["--config.model.query_latent_dim=6"],
    "tensor": ["--config.model.query_rank=3", "--config.model.attention_biases=ao"],
    "grouped_tied": ["--config.model.num_kv_heads=1", "--config.model.positions=rotary"],
}


@pytest.mark.slow  # test_outside_row.py: a row that the package does not know
@pytest.mark.parametrize("layout", FLAGS)
def test_it_trains_by_flag(layout, tmp_path):
    done = command(
        "experiments.run",
        f"--config=experiments/configs/byte_lm.py:{layout},tiny",
        *FLAGS[layout],
        f"--workdir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["layout"], result["status"]) == (layout, "complete")
    bits = result["heldout_bits_per_byte"]
    assert np.isfinite(bits).all()


def test_flags_reach_the_heads():
    config = ModelConfig(
        layout="tensor", query_rank=4, key_rank=3, value_rank=1, attention_biases="ao", width=12,
        num_heads=3,
    )  # fmt: skip
    assert config.heads == HeadSpec(
        "tensor", 12, 3, query_rank=4, key_rank=3, value_rank=1, biases="ao"
    )
    assert model_cache_bytes(config, 1) == 4 * (3 + 1) * (3 + 4)
    assert not ModelConfig(layout="latent", latent_norm=False).heads.latent_norm
    with pytest.raises(ValueError, match="no map for bias 'a'"):
        ModelConfig(attention_biases="a")
