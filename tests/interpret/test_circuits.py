"""Circuits and composition scores: against NumPy, and independent of the basis of a head."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from interpreted_models import TOKENS, config_of, random_params

from attnlab import heads, interpret
from attnlab.interpret import circuit, composition_scores, record
from attnlab.models import Attention, Compute, EncoderConfig, ModelInputs, Norm, Rotary, run_model
from attnlab.sharing import Plan, layer_params
from attnlab.transforms.reparametrize import reparametrize

WITHOUT_NORMS = {"latent_norm": False}


def by_hand(w, norm, kind):
    """(scale A, B) [N, D, D] of standard heads behind the scale and centring of a norm."""
    w = jax.tree.map(np.float64, w)
    before = np.eye(12) if norm is None else np.diag(np.float64(norm["scale"]))
    if norm is not None and kind == "layer":
        before = (np.eye(12) - 1 / 12) @ before
    q, k, v = (np.einsum("cd,dnh->nch", before, w[name]) for name in "qkv")
    k, v = (np.repeat(a, len(q) // len(a), axis=0) for a in (k, v))
    return q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), v @ w["o"]


SCALES = (0.5, 1.0, 2.0)
ORDERS = [("pre", "layer"), ("pre", "rms"), ("sandwich", "rms"), ("post", "layer")]


@pytest.mark.parametrize("order", deep(ORDERS, ("post", "layer")), ids="-".join)
def test_matrices_and_how_they_fit_are_those_of_elhage(order):
    """Q-, K- and V-composition as |.| of whole D x D matrices."""
    norm, kind = order
    config = config_of(
        norm=Norm(position=norm, kind=kind), sharing="attention_only", num_kv_heads=1,
        attention=Attention(output_scale=0.5, layer_scales=SCALES),
    )  # fmt: skip
    params = jax.tree.map(np.asarray, random_params(config))
    layers = [layer_params(params["layers"], config.plan, i) for i in range(3)]
    pairs = []
    for w, scale in zip((layer["attention"] for layer in layers), SCALES, strict=True):
        a, b = by_hand(w, None if norm == "post" else w["norm"], kind)
        after = w["norm_after"]["scale"] if norm == "sandwich" else 1
        pairs.append((scale * a, 0.5 * b * after))
    found = {name: circuit(config, params, name) for name in ("qk", "ov")}
    for i, (a, b) in enumerate(pairs):
        for n in range(3):
            assert_close(found["qk"].matrix(i, n), a[n].astype(np.float64))
            np.testing.assert_allclose(found["ov"].matrix(i, n), b[n], rtol=1e-4, atol=1e-5)
        sizes = np.linalg.svd(b, compute_uv=False)[:, :4]
        np.testing.assert_allclose(found["ov"].singular_values[i], sizes, rtol=1e-5)
        sums = [np.sum(abs(a), -1) for a in (found["ov"].eigenvalues[i], np.linalg.eigvals(b))]
        np.testing.assert_allclose(*sums, rtol=1e-4)
    size = lambda a: np.linalg.norm(a, axis=(-2, -1))
    wrote = pairs[0][1]
    if norm == "post":
        for i in range(2):
            for part in ("attention", "ffn"):
                wrote = wrote @ (np.eye(12) - 1 / 12) @ np.diag(layers[i][part]["norm"]["scale"])
    a, b = pairs[2]
    for by, reads in {"q": a, "k": a.swapaxes(1, 2), "v": b}.items():
        got = composition_scores(config, params, by)
        expected = size(wrote[:, None] @ reads) / (size(wrote)[:, None] * size(reads))
        np.testing.assert_allclose(got[0, :, 2], expected, rtol=1e-4)
        assert np.isnan(got[2, :, 0]).all()
        assert np.isnan(got[1, :, 1]).all()


def test_a_head_of_zeros_has_rank_0_and_composes_with_none():
    config = config_of(num_layers=2, sharing="separate")
    params = random_params(config)
    attention = params["layers"]["attention"]
    attention |= {name: attention[name].at[0].set(0) for name in "qo"}
    with np.errstate(all="raise"):
        ranks = [circuit(config, params, name).effective_rank for name in ("qk", "ov")]
        scores = composition_scores(config, params, "q")
    for rank in ranks:
        assert not rank[0].any()
        assert (rank[1] > 1).all()
    assert not scores[0, :, 1].any()


@pytest.mark.slow
def test_keys_of_an_earlier_layer_and_of_another_text():
    config = config_of(num_layers=4, sharing="cla:2", positions=Rotary())
    params = random_params(config)
    by_key, by_query = (composition_scores(config, params, by) for by in "kq")
    # Layer 3 attends to the keys of layer 2, which layer 2 does not write into, and layer 1 does.
    assert np.isnan(by_key[2, :, 3]).all()
    assert not np.isnan(by_query[2, :, 3]).any()
    assert not np.isnan(by_key[1, :, 3]).any()
    near, far = (circuit(config, params, "qk", distance=d).singular_values for d in (0, 3))
    assert not np.allclose(near, far)
    # A score is x A x^T of what the heads read, at the distance of the two, without biases.
    layers = {name: dict(params["layers"][name]) for name in ("attention", "kv")}
    for name, bias in (("attention", "q_bias"), ("kv", "k_bias")):
        layers[name][bias] = 0 * layers[name][bias]
    norm = layers["attention"]["norm"]
    layers["attention"]["norm"] = {"scale": norm["scale"], "bias": 0 * norm["bias"]}
    params = params | {"layers": params["layers"] | layers}
    inputs = ModelInputs(capture=("attention_in", "scores"))
    captured = run_model(params, TOKENS, config, inputs).captured
    x = np.asarray(captured["attention_in"][2, 0]) / np.asarray(norm["scale"][2])
    a = circuit(config, params, "qk", distance=2).matrix(2, 1)
    assert_close(np.float32(x[5] @ a @ x[3]), captured["scores"][2, 0, 1, 5, 3], loosen=3)


def test_a_shared_latent_under_deltas():
    """A layer makes keys and values of it with its own delta; without biases, at any positions."""
    plan = Plan(attention=(0, 1), kv=(0, "@0"), ffn=(0, 1), delta=(0, 1))
    norm = Norm(kind="rms")
    config = config_of(
        "latent", num_layers=2, sharing=plan, delta_rank=2, biases=(), norm=norm, **WITHOUT_NORMS
    )
    params = random_params(config)
    qk, ov = (circuit(config, params, name) for name in ("qk", "ov"))
    inputs = ModelInputs(capture=("attention_in", "scores", "probs", "outputs"))
    captured = run_model(params, TOKENS, config, inputs).captured
    layers = [layer_params(params["layers"], plan, i)["attention"] for i in range(2)]
    y, x = (captured["attention_in"][i, 0] / layers[i]["norm"]["scale"] for i in range(2))
    for n in range(3):
        assert_close(x @ qk.matrix(1, n) @ y.T, captured["scores"][1, 0, n], loosen=10)
        written = captured["probs"][1, 0, n] @ y @ ov.matrix(1, n)
        assert_close(written, captured["outputs"][1, 0, n], loosen=10)


@pytest.mark.parametrize("position", ["pre", "pre_ffn"])
def test_circuits_of_an_encoder_and_of_cross_attention(position):
    """Its keys are behind the final norm of the encoder, its queries behind their own norm."""
    encoder = EncoderConfig(num_layers=2, shares_decoder=position == "pre")
    if position == "pre_ffn":
        encoder = dataclasses.replace(encoder, num_heads=4)
    config = config_of(kind="encoder_decoder", encoder=encoder, norm=Norm(position=position))
    params, count = random_params(config), config.encoder_model.heads.num_heads
    found = circuit(config, params, "ov", attention="encoder")
    assert found.singular_values.shape == (2, count, 12 // count)
    norms = circuit(config, params, "qk", attention="cross").norms
    before = params["final_norm"] if position == "pre" else params["layers"]["cross"]["norm"]
    before["scale"] *= 2
    assert_close(circuit(config, params, "qk", attention="cross").norms, 2 * norms)


def in_other_bases(config, params, seed=1):
    """The same heads: W_Q G, W_K G^-T, W_V A, A^-1 W_O."""
    rng, layout = np.random.default_rng(seed), config.layout
    layers = jax.tree.map(jnp.asarray, params["layers"])
    sizes = {"qk": layout.score_width, "vo": layout.head_width}
    groups = []
    for i in range(config.plan.num_groups["attention"]):
        w = jax.tree.map(lambda a, i=i: a[i], layers["attention"])
        for pair, size in sizes.items():
            basis = np.eye(size) + 0.4 * rng.normal(size=(size, size))
            heads_only = {n: a for n, a in w.items() if n in heads.weight_shapes(layout)}
            with contextlib.suppress(ValueError):  # a layout without this freedom
                w |= reparametrize(heads_only, layout, **{pair: basis})
        groups.append(w)
    moved = jax.tree.map(lambda *a: jnp.stack(a), *groups)
    return params | {"layers": layers | {"attention": moved}}


LINEAR = [name for name in heads.LAYOUTS if name not in ("tensor_product", "differential")]


@pytest.mark.parametrize("layout", deep(LINEAR, "standard"))
def test_nothing_depends_on_the_basis_of_a_head(layout, x64):
    known = heads.LAYOUTS[layout].__dataclass_fields__
    fields = {n: a for n, a in WITHOUT_NORMS.items() if n in known}
    config = config_of(layout, sharing="ffn_only", compute=Compute(dtype="float64"), **fields)
    params = random_params(config)
    other = in_other_bases(config, params)

    @jax.jit
    def of_text(params):
        recording = record(config, params, TOKENS)
        scores = interpret.decompose_scores(recording, 2, 1, split="query")
        return interpret.direct_logit_attribution(recording, TOKENS), scores.terms

    assert_close(of_text(other), of_text(params), loosen=100)
    for name in ("qk", "ov"):
        one, two = (circuit(config, p, name) for p in (params, other))
        assert_close(tuple(two), tuple(one), loosen=1e4)
        assert_close(np.sort(abs(two.eigenvalues)), np.sort(abs(one.eigenvalues)), loosen=1e4)
    for by in "qkv":
        one, two = (composition_scores(config, p, by) for p in (params, other))
        assert_close(np.nan_to_num(two), np.nan_to_num(one), loosen=1e4)
    if layout == "standard":
        changed = [p["layers"]["attention"]["v"] for p in (params, other)]
        assert not np.allclose(*changed)


REFUSED = [
    ({"qk_norm": heads.HeadNorm("rms")}, "qk", "query of layout 'standard' is not linear"),
    ({"layout": "latent"}, "ov", "value of layout 'latent' is not linear"),
    ({"layout": "tensor_product", "biases": ()}, "qk", "query of .* is not linear"),
    ({"extras": (heads.Gate("element"),)}, "ov", "'gate' per element"),
    ({"extras": (heads.TalkingHeads(),)}, "qk", "talking heads mix"),
    ({"layout": "differential"}, "qk", "has 6 softmax distributions for 3 heads"),
    ({"layout": "differential"}, "ov", "has 6 softmax distributions for 3 heads"),
]


@pytest.mark.parametrize(("fields", "name", "message"), REFUSED)
def test_what_is_not_a_matrix_raises(fields, name, message):
    config = config_of(num_layers=1, **fields)
    params = random_params(config)
    for given, attention, said in (
        (config, "self", message),
        (config, "encoder", "no attention 'encoder'"),
        (config_of(**fields), "self", "params are not those of this model"),
    ):
        with pytest.raises(ValueError, match=said):
            circuit(given, params, name, attention=attention)
    with pytest.raises(ValueError, match="unknown attention 'cross'"):
        composition_scores(config, params, "k", attention="cross")
