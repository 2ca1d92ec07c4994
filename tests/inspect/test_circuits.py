"""Circuits and composition: the matrices themselves in NumPy, and no number of a basis that the
function does not know."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from test_sums_of_writes import draw

from attnlab import LAYOUTS, ModelConfig, regauge
from attnlab.inspect import circuit, composition, logits_by_term, split_scores, watch
from attnlab.inspect.circuits import STANDS
from attnlab.model.block import NORMS
from attnlab.sharing.low_rank_delta import layer_params

BASE = dict(vocab_size=11, max_len=8, width=12, num_layers=3, num_heads=3, ffn_width=10)
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8]])
LINEAR = {
    "latent": dict(latent_norm=False), "latent_absorbed": dict(latent_norm=False),
    "low_rank_q": dict(latent_norm=False),
}  # fmt: skip


def by_hand(w, norm, kind):
    """(scale A, B) [N, D, D] of standard heads behind the scale and centring of a norm."""
    w = jax.tree.map(np.float64, w)
    before = np.eye(12) if norm is None else np.diag(np.float64(norm["scale"]))
    if norm is not None and kind == "layer":
        before = (np.eye(12) - 1 / 12) @ before
    q, k, v = (np.einsum("cd,dnh->nch", before, w[name]) for name in "qkv")
    k, v = (np.repeat(a, len(q) // len(a), axis=0) for a in (k, v))
    return q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), v @ w["o"]


ORDERS = [("pre", "layer"), ("pre", "rms"), ("sandwich", "rms"), ("post", "layer")]


@pytest.mark.parametrize("order", deep(ORDERS, ("post", "layer")), ids="-".join)
def test_matrices_and_how_they_fit_are_those_of_elhage(order):
    """Q-, K- and V-composition as |.| of whole D x D matrices."""
    norm, kind = order
    config = ModelConfig(
        **BASE | dict(norm=norm, norm_kind=kind, norm_bias=kind == "layer", plan="attention_only"),
        num_kv_heads=1, attention_gain=0.5,
    )  # fmt: skip
    params = jax.tree.map(np.asarray, draw(config))
    layers = [layer_params(params["layers"], config.layer_plan, i) for i in range(3)]
    pairs = [
        by_hand(w["attention"], None if norm == "post" else w["attention"]["norm"], kind)
        for w in layers
    ]
    if norm == "sandwich":  # what a head writes is scaled again
        pairs = [
            (a, b * w["attention"]["norm_after"]["scale"])
            for (a, b), w in zip(pairs, layers, strict=True)
        ]
    found = {name: circuit(config, params, name) for name in ("qk", "ov")}
    for i, (a, b) in enumerate(pairs):
        for n in range(3):
            assert_close(found["qk"].matrix(i, n), a[n].astype(np.float64))
            np.testing.assert_allclose(found["ov"].matrix(i, n), b[n] / 2, rtol=1e-4, atol=1e-5)
        sizes = np.linalg.svd(b / 2, compute_uv=False)[:, :4]
        np.testing.assert_allclose(found["ov"].sizes[i], sizes, rtol=1e-5)
        eigenvalues = np.linalg.eigvals(b / 2)
        np.testing.assert_allclose(
            np.sum(abs(found["ov"].eigenvalues[i]), -1), np.sum(abs(eigenvalues), -1), rtol=1e-4
        )
    size = lambda a: np.linalg.norm(a, axis=(-2, -1))
    wrote = pairs[0][1]
    if norm == "post":
        for i in range(2):
            for part in ("attention", "ffn"):
                wrote = wrote @ (np.eye(12) - 1 / 12) @ np.diag(layers[i][part]["norm"]["scale"])
    a, b = pairs[2]
    for by, reads in {"q": a, "k": a.swapaxes(1, 2), "v": b}.items():
        got = composition(config, params, by)
        expected = size(wrote[:, None] @ reads) / (size(wrote)[:, None] * size(reads))
        np.testing.assert_allclose(got[0, :, 2], expected, rtol=1e-4)
        assert np.isnan(got[2, :, 0]).all()
        assert np.isnan(got[1, :, 1]).all()


def test_keys_of_an_earlier_layer_and_of_another_text():
    config = ModelConfig(**BASE | dict(num_layers=4, plan="cla:2", positions="rotary"))
    params = draw(config)
    by_key, by_query = (composition(config, params, by) for by in "kq")
    # Layer 3 reads the keys of layer 2, which layer 2 does not write into, and layer 1 does.
    assert np.isnan(by_key[2, :, 3]).all()
    assert not np.isnan(by_query[2, :, 3]).any()
    assert not np.isnan(by_key[1, :, 3]).any()
    near, far = (circuit(config, params, "qk", distance=d).sizes for d in (0, 3))
    assert not np.allclose(near, far)
    # A score is x A x^T of what the heads read, at the distance of the two: biases are left out.
    bare = {part: dict(params["layers"][part]) for part in ("attention", "kv")}
    for part, names in {"attention": ("q_bias",), "kv": ("k_bias",)}.items():
        bare[part] |= {n: 0 * bare[part][n] for n in names}
    norm = bare["attention"]["norm"]
    bare["attention"]["norm"] = {"scale": norm["scale"], "bias": 0 * norm["bias"]}
    bare = params | {"layers": params["layers"] | bare}
    run = jax.jit(lambda p: config.build().apply(p, TOKENS, show=("attention_in", "scores"))[-1])
    shown = run({"params": bare})
    x = np.asarray(shown["attention_in"][2, 0]) / np.asarray(norm["scale"][2])
    a = circuit(config, bare, "qk", distance=2).matrix(2, 1)
    assert_close(np.float32(x[5] @ a @ x[3]), np.asarray(shown["scores"][2, 0, 1, 5, 3]), loosen=3)

    both = ModelConfig(**BASE | dict(kind="encoder_decoder", encoder_layers=2, share_encoder=True))
    params = jax.tree.map(jnp.asarray, draw(both))
    assert circuit(both, params, "ov", encoder=True).sizes.shape == (2, 3, 4)
    norms = circuit(both, params, "qk", cross=True).norms
    params["final_norm"] |= {"scale": 2 * params["final_norm"]["scale"]}
    assert_close(circuit(both, params, "qk", cross=True).norms, 2 * norms)


def in_other_bases(config, params, seed=1):
    """The same heads: W_Q G, W_K G^-T, W_V A, A^-1 W_O, and each norm's scale moved behind it."""
    rng, spec = np.random.default_rng(seed), config.heads
    draw = lambda size: np.eye(size) + 0.4 * rng.normal(size=(size, size))
    layers = jax.tree.map(jnp.asarray, params["layers"])
    slots = []
    for i in range(len(layers["attention"]["o" if "o" in layers["attention"] else "vo"])):
        w = jax.tree.map(lambda a, i=i: a[i], layers["attention"])
        for names in ({"qk": spec.sizes.get("H")}, {"vo": spec.sizes.get("V")}):
            ((name, size),) = names.items()
            with contextlib.suppress(ValueError):  # a layout without this freedom
                w |= regauge({n: w[n] for n in spec.shapes}, spec, **{name: draw(size)})
        slots.append(w)
    moved = jax.tree.map(lambda *a: jnp.stack(a), *slots)
    return params | {"layers": layers | {"attention": moved}}


EVERY = [name for name in LAYOUTS if name != "tensor"]


@pytest.mark.parametrize("layout", deep(EVERY, "standard"))
def test_nothing_shown_depends_on_the_basis_of_a_head(layout, x64):
    fields = {"layout": layout, "plan": "ffn_only", "dtype": "float64"} | LINEAR.get(layout, {})
    config = ModelConfig(**BASE | fields)
    params = jax.tree.map(lambda a: a.astype(jnp.float64), draw(config))
    other = in_other_bases(config, params)

    @jax.jit
    def of_text(params):
        seen = watch(config, params, TOKENS)
        return logits_by_term(seen, TOKENS), split_scores(seen, 2, 1, side="query").terms

    assert_close(of_text(other), of_text(params), loosen=100)
    for name in ("qk", "ov"):
        one, two = (circuit(config, p, name) for p in (params, other))
        assert_close(tuple(two), tuple(one), loosen=1e4)
        assert_close(np.sort(abs(two.eigenvalues)), np.sort(abs(one.eigenvalues)), loosen=1e4)
    for by in "qkv":
        one, two = (composition(config, p, by) for p in (params, other))
        assert_close(np.nan_to_num(two), np.nan_to_num(one), loosen=1e4)
    if layout == "standard":
        changed = [p["layers"]["attention"]["v"] for p in (params, other)]
        assert not np.allclose(*changed)


def test_every_order_of_norms_is_known():
    assert set(STANDS) == set(NORMS)


REFUSED = {
    "a norm of q and k": (dict(qk_norm="rms"), "qk", "query of layout 'standard' is not linear"),
    "a norm of a latent": (dict(layout="latent"), "ov", "value of layout 'latent' is not linear"),
    "a product": (dict(layout="tensor"), "qk", "query of layout 'tensor' is not linear"),
    "a gate": (dict(gate="element"), "ov", "a gate per element stands between"),
    "mixed": (dict(talking_heads=True), "qk", "talking heads mix"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_matrix_is_refused(case):
    fields, name, message = REFUSED[case]
    config = ModelConfig(**BASE | dict(num_layers=1) | fields)
    params = draw(config)
    with pytest.raises(ValueError, match=message):
        circuit(config, params, name)
    if name == "qk" and case != "a product":
        assert circuit(config, params, "ov").sizes.shape == (1, 3, 4)
    with pytest.raises(ValueError, match="a decoder has one stack"):
        circuit(config, params, name, encoder=True)
