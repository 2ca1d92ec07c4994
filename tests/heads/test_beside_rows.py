"""Gates, sinks and ties: what heads of any row may have beside its maps, or fewer of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from contract import SPECS, attend, make

from attnlab import (
    LAYOUTS,
    HeadSpec,
    ModelConfig,
    contraction_orders,
    dot_product_attention,
    merge_heads,
    multi_head_attention,
    pretrained,
    project_heads,
    regauge,
    unique_parameters,
)
from attnlab.adapters import heads_to_linen
from attnlab.heads.old.cost import cache_bytes_per_token, call_flops
from attnlab.model.accounting import model_cache_bytes

FIELDS = {"gate": ("head", "element"), "sink": ("learnt", "one")}


def test_every_layout_takes_the_fields_or_says_why():
    """Two rows have no V between two matrices: one number per element cannot stand there."""
    refused = set()
    for layout in LAYOUTS:
        for field, values in FIELDS.items():
            for value in values:
                try:
                    HeadSpec(layout, 12, 4, **{field: value})
                except ValueError:
                    refused.add((layout, value))
    assert refused == {("absorbed", "element"), ("latent_absorbed", "element")}
    with pytest.raises(ValueError, match="unknown gate 'heads': did you mean 'head'"):
        HeadSpec("standard", 12, 4, gate="heads")


def test_a_gate_in_every_order(x64):
    """One number per head goes through any product of matrices; one per element stops W_V W_O."""
    spec = dataclasses.replace(SPECS["grouped"].spec(), gate="head", biases="qvo")
    w, x, *_ = make(spec, jnp.float64)
    expected = attend(w, x, spec=spec, order="factored")
    orders = contraction_orders(spec, 2, 7)
    assert [*orders] == ["factored", "bilinear", "absorbed"]
    for order in ("bilinear", "absorbed"):
        assert_close(attend(w, x, spec=spec, order=order), expected)
    per_element = dataclasses.replace(spec, gate="element")
    orders = contraction_orders(per_element, 2, 7)
    assert "between W_V and W_O" in orders["absorbed"]
    w, x, *_ = make(per_element, jnp.float64)
    per_order = [attend(w, x, spec=per_element, order=o) for o in ("factored", "bilinear")]
    assert_close(*per_order)
    orders = contraction_orders(HeadSpec("latent", 12, 3, gate="element"), 2, 7)
    assert "between W_V and W_O" in orders["latent_absorbed"]


def test_a_gate_can_be_seen_and_changed(x64):
    """Its values are the sigmoids; ones in their place are heads without a gate."""
    spec = SPECS["gated elements"].spec()
    w, x, *_ = make(spec, jnp.float64)
    bare = dataclasses.replace(spec, gate=None)
    plain = {n: a for n, a in w.items() if n != "gate"}
    shown = attend(w, x, spec=spec, show=("gate", "heads"))[1]
    assert_close(shown["gate"], 1 / (1 + np.exp(-np.einsum("btd,dnv->btnv", x, w["gate"]))))
    heads = attend(plain, x, spec=bare, show=("heads",))[1]["heads"]
    assert_close(shown["heads"], heads * shown["gate"])
    opened = attend(w, x, spec=spec, edit={"gate": lambda a, layer: jnp.ones_like(a)})
    assert_close(opened, attend(plain, x, spec=bare))
    with pytest.raises(ValueError, match="unknown value 'gate'"):
        attend(plain, x, spec=bare, show=("gate",))


def test_what_knows_rows_alone_says_so():
    spec = HeadSpec("standard", 12, 3, gate="element")
    w, *_ = make(spec)
    with pytest.raises(ValueError, match="sees the basis of v"):
        regauge(w, spec, vo=np.eye(4))
    with pytest.raises(ValueError, match="has no gate='element'"):
        heads_to_linen(w, spec)


TIES = {"kv": ({"q", "k", "o"}, 6), "qk": ({"q", "v", "o"}, 12), "qkv": ({"q", "o"}, 6)}


@pytest.mark.parametrize("ties", deep(TIES, "qkv"))
def test_tied_maps(ties, x64):
    """Fewer weights, the same function as with copies of them, in every order; a cache of half the
    numbers where a value is its key, but for what positions turn."""
    names, cached = TIES[ties]
    spec = HeadSpec("narrow", 12, 3, head_dim=2, value_dim=2, ties=ties)
    w, x, *_ = make(spec, jnp.float64)
    assert set(w) == names
    assert cache_bytes_per_token(spec, 1) == cached
    assert cache_bytes_per_token(spec, 1, rotary=True) == 12
    untied = dataclasses.replace(spec, ties="")
    copies = w | {ours: w[theirs] for ours, theirs in spec.tied.items()}
    expected = attend(copies, x, spec=untied, order="factored")
    for order, cost in contraction_orders(spec, 2, 7).items():
        assert isinstance(cost, int)
        assert_close(attend(w, x, spec=spec, order=order), expected)


def test_the_compiler_makes_queries_that_are_keys_once():
    """As FLOPs are counted: one product less than two maps need."""
    counted, compiled = [], []
    for ties in ("", "qk"):
        spec = HeadSpec("standard", 12, 3, ties=ties)
        run = functools.partial(attend, spec=spec, order="factored", implementation="dense")
        w, x, *_ = make(spec)
        made = jax.jit(run).lower(w, x).compile()
        counted.append(call_flops(spec, 2, 7, 7))
        compiled.append(made.cost_analysis()["flops"])
    assert counted[0] - counted[1] == 2 * 2 * 7 * 12 * 12
    assert compiled[0] - compiled[1] == counted[0] - counted[1]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("plan", deep(["albert", "cla:2"], "cla:2"))
def test_all_at_once_in_a_model_that_writes(positions, plan, x64):
    """A text from a cache, token by token, and whole: the same logits."""
    config = ModelConfig(
        width=12, num_heads=3, num_layers=3, vocab_size=17, max_len=9, ffn_width=8, plan=plan,
        positions=positions, gate="element", sink="learnt", ties="kv", extra_keys=2,
        dtype="float64",
    )  # fmt: skip
    model, rng = config.build(), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(17, size=(2, 9)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), shapes)
    cache = config.empty_cache(2, 9)
    layers = cache["k"].shape[0]
    assert ("v" in cache) == (positions == "rotary")
    assert sum(a[0, 0, 0].nbytes for a in cache.values() if a.ndim > 2) * layers == (
        model_cache_bytes(config, 8)
    )

    @jax.jit
    def run(params, tokens, cache):
        whole = model.apply(params, tokens)
        first, cache = model.apply(params, tokens[:, :5], cache=cache)
        step = lambda cache, token: model.apply(params, token[:, None], cache=cache)[::-1]
        _, rest = jax.lax.scan(step, cache, tokens[:, 5:].T)
        return whole, jnp.concatenate([first, rest[:, :, 0].swapaxes(0, 1)], axis=1)

    whole, stepped = run(params, tokens, cache)
    assert_close(stepped, whole, loosen=100)


def test_extra_keys_are_keys_behind_the_others(x64):
    """In blocks too, and what dropout takes."""
    spec = HeadSpec("standard", 12, 6, 2, head_dim=4, value_dim=5, extra_keys=3)
    w, x, *_ = make(spec, jnp.float64)
    key, mask = jax.random.key(1), jnp.tri(7, dtype=bool).at[2].set(False)
    options = dict(dropout_rate=0.3, dropout_key=key)

    @jax.jit
    def run(w, x):
        plain = {n: a for n, a in w.items() if n[:5] != "extra"}
        q, k, v = project_heads(plain, x, spec=dataclasses.replace(spec, extra_keys=None))
        behind = lambda a, more: jnp.concatenate([a, jnp.stack([more] * len(a))], axis=1)
        heads = dot_product_attention(
            q, behind(k, w["extra_k"]), behind(v, w["extra_v"]), **options,
            mask=jnp.concatenate([mask, jnp.ones((7, 3), bool)], axis=1),
        )  # fmt: skip
        expected = merge_heads(plain, heads, spec=spec)
        call = lambda name: multi_head_attention(
            w, x, spec=spec, mask=mask, implementation=name, **options
        )
        return expected, call("dense"), call("blockwise")

    expected, *got = run(w, x)
    for a in got:
        assert_close(a, expected, loosen=10)
    with pytest.raises(ValueError, match="leave extra_keys out"):
        attend(w, x, spec=spec, mix=(jnp.eye(6), None))
    assert "basis" in contraction_orders(spec, 2, 7)["bilinear"]
    with pytest.raises(ValueError, match="talking_heads mix no extra_keys"):
        ModelConfig(extra_keys=1, talking_heads=True)


PUBLISHED = [("head", 2048 * 32), ("element", 2048 * 32 * 128)]


@pytest.mark.parametrize(("gate", "more"), PUBLISHED)
def test_parameters_of_a_gate(gate, more):
    """D N or D N V a layer: 32 heads of 128 in a model 2048 wide."""
    config = ModelConfig(width=2048, num_heads=32, head_dim=128, num_layers=3)
    gated = dataclasses.replace(config, gate=gate)
    assert unique_parameters(gated) - unique_parameters(config) == 3 * more


@pytest.mark.parity
def test_the_gate_of_qwen3_next():
    """transformers' Qwen3-Next attention, live: a gate per element, q/k norms, grouped heads."""
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
        x = torch.randn(2, 9, 12)
        none = torch.ones(2, 9, 4), torch.zeros(2, 9, 4)  # no positions
        hidden = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        expected = module(x, none, hidden)[0].numpy()
    spec = HeadSpec("standard", 12, 6, 2, head_dim=4, gate="element", qk_norm="rms", norm_eps=0.05)
    p = {n: a.detach().numpy() for n, a in module.named_parameters()}
    read = lambda name: p[f"{name}_proj.weight"].T.reshape(12, -1, 4)
    q, gate = np.split(p["q_proj.weight"].T.reshape(12, 6, 8), 2, axis=-1)
    w = {
        "q": q, "k": read("k"), "v": read("v"), "o": p["o_proj.weight"].T.reshape(6, 4, 12),
        "gate": gate, "q_norm": 1 + p["q_norm.weight"], "k_norm": 1 + p["k_norm.weight"],
    }  # fmt: skip
    got = attend(jax.tree.map(jnp.asarray, w), jnp.asarray(x.numpy()), spec=spec, is_causal=True)
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parity
def test_the_sinks_of_gpt_oss():
    """transformers' gpt-oss attention, live: biases, grouped heads, a window."""
    import torch
    from transformers import GptOssConfig
    from transformers.models.gpt_oss import modeling_gpt_oss as peer

    config = GptOssConfig(
        hidden_size=12, num_attention_heads=6, num_key_value_heads=2, head_dim=4,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    module = peer.GptOssAttention(config, 0).eval()
    with torch.no_grad():
        for a in module.parameters():
            a.normal_(std=0.7)
        x = torch.randn(2, 9, 12)
        none = torch.ones(1, 9, 2), torch.zeros(1, 9, 2)  # no positions
        hidden = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        expected = module(x, none, hidden)[0].numpy()
    spec = HeadSpec("standard", 12, 6, 2, head_dim=4, biases="qkvo", sink="learnt")
    p = {n: a.detach().numpy() for n, a in module.named_parameters()}
    w = {n: p[f"{n}_proj.weight"].T.reshape(12, -1, 4) for n in "qkv"}
    w |= {f"{n}_bias": p[f"{n}_proj.bias"].reshape(-1, 4) for n in "qkv"}
    w |= {"o": p["o_proj.weight"].T.reshape(6, 4, 12), "o_bias": p["o_proj.bias"]}
    w = jax.tree.map(jnp.asarray, w | {"sink": p["sinks"]})
    got = attend(w, jnp.asarray(x.numpy()), spec=spec, is_causal=True)
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parity
@pytest.mark.parametrize("zero", [False, True])
def test_the_extra_keys_of_torch(zero):
    """torch.nn.MultiheadAttention(add_bias_kv=True), live, under a mask."""
    import torch

    torch.manual_seed(0)
    config = dict(embed_dim=12, num_heads=3, add_bias_kv=True, add_zero_attn=zero)
    module = torch.nn.MultiheadAttention(**config, batch_first=True).eval()
    with torch.no_grad():
        for a in module.parameters():
            a.normal_()
        x, hidden = torch.randn(2, 5, 12), torch.ones(5, 5, dtype=bool).triu(1)
        expected = module(x, x, x, attn_mask=hidden)[0].numpy()
    w = {n: a.detach().numpy() for n, a in module.named_parameters()}
    model, params = pretrained.from_variables("torch_mha", config, w)
    x = jnp.asarray(x.numpy())
    got = model.apply({"params": params}, x, mask=jnp.asarray(~hidden.numpy()))
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
