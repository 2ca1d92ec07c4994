"""Contract over every row of LAYOUTS, and identities between rows."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, product_flops

from attnlab import (
    LAYOUTS,
    HeadSpec,
    dot_product_attention,
    init_heads,
    merge_heads,
    multi_head_attention,
    project_heads,
)
from attnlab.heads.cost import call_flops, head_flops, head_parameters
from attnlab.heads.spec import weight_axes

# Every axis its own size, so that a swapped one cannot pass. B=2, T=7.
SPECS = {
    "standard": HeadSpec("standard", width=12, num_heads=4, biases="qkvo", out_width=10),
    "free sizes": HeadSpec("standard", width=11, num_heads=4, head_dim=5, value_dim=3, biases="kv"),
    "grouped": HeadSpec("standard", width=12, num_heads=6, num_kv_heads=2, head_dim=5),
    "multi-query": HeadSpec("standard", width=12, num_heads=3, num_kv_heads=1, biases="q"),
    "cross": HeadSpec("standard", width=12, num_heads=3, key_width=5, value_width=9),
    "wide": HeadSpec("wide", width=6, num_heads=5, biases="qo"),
    "narrow": HeadSpec("narrow", width=12, num_heads=3, value_dim=5, biases="qkvo"),
    "tied": HeadSpec("narrow_tied", width=12, num_heads=3, value_dim=5, biases="qkvo", scale=0.3),
    "tied, no output": HeadSpec("narrow_tied", width=12, num_heads=3, value_dim=5, output=False),
    "alt": HeadSpec("alt", width=12, num_heads=3, head_dim=6, value_dim=5, biases="qkvo"),
    "two stages": HeadSpec(
        "two_stage", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9, biases="kv"
    ),
    "collaborative": HeadSpec(
        "collaborative", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9,
        shared_dim=8, value_dim=3, biases="qkvo", out_width=10,
    ),
    "bilinear": HeadSpec(
        "bilinear", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9,
        value_dim=3, biases="qvo", out_width=10,
    ),
    "absorbed": HeadSpec(
        "absorbed", width=12, num_heads=3, key_width=5, value_width=9, biases="qvo", out_width=10
    ),
    "absorbed, no bias": HeadSpec("absorbed", width=7, num_heads=3),
    "layer norm of q and k": HeadSpec(
        "standard", width=12, num_heads=6, num_kv_heads=2, head_dim=5, biases="q", qk_norm="layer"
    ),
    "rms norm of q and k": HeadSpec("narrow", width=12, num_heads=3, qk_norm="rms"),
}  # fmt: skip


def make(spec, dtype=jnp.float32, batch=2, length=7):
    """Large random weights (biases too) and inputs. NumPy: JAX would compile each of them."""
    rng, s = np.random.default_rng(0), spec.sizes
    draw = lambda *shape: jnp.asarray(2 * rng.normal(size=shape), dtype)
    w = {name: draw(*shape) for name, shape in spec.shapes.items()}
    x, longer = draw(batch, length, s["D"]), (batch, length + 1)
    return w, x, draw(*longer, s["E"]), draw(*longer, s["W"])


def attend(w, x, context=None, value_context=None, *, spec, **options):
    """`multi_head_attention` under jit."""
    run = functools.partial(multi_head_attention, spec=spec, **options)
    return jax.jit(run)(w, x, context, value_context=value_context)


def by_hand(w, x, context, values, spec):
    """Head by head in NumPy, straight from the definition."""
    s = spec.sizes
    w = {n: np.asarray(a, np.float64) for n, a in w.items()}
    x, context, values = (np.asarray(a, np.float64) for a in (x, context, values))

    def norm(a, scale):
        if spec.qk_norm == "layer":
            a = a - a.mean(-1, keepdims=True)
        return a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * scale

    total = []
    for n in range(s["N"]):
        g = n // (s["N"] // s["K"])
        q, k, v, o = MAPS[spec.layout](w, n, g, x, context, values, s)
        if spec.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        scale = spec.scale or 1 / math.sqrt(q.shape[-1])
        scores = q @ k.swapaxes(1, 2) * scale
        p = np.exp(scores - scores.max(-1, keepdims=True))
        total.append((p / p.sum(-1, keepdims=True)) @ v @ o)
    out = sum(total) if spec.output else np.concatenate(total, axis=-1)
    return out + w.get("o_bias", 0)


def _chunk(a, n, s):
    return a[..., n * s["C"] : (n + 1) * s["C"]]


def _bias(w, letter, *head):
    return w[f"{letter}_bias"][head] if f"{letter}_bias" in w else 0


# layout -> (w, head, its key/value head, x, key input, value input, sizes) -> q, k, v, o
MAPS = {
    "standard": lambda w, n, g, x, y, z, s: (
        x @ w["q"][:, n] + _bias(w, "q", n),
        y @ w["k"][:, g] + _bias(w, "k", g),
        z @ w["v"][:, g] + _bias(w, "v", g),
        w["o"][n],
    ),
    "narrow": lambda w, n, g, x, y, z, s: (
        _chunk(x, n, s) @ w["q"][n] + _bias(w, "q", n),
        _chunk(y, n, s) @ w["k"][n] + _bias(w, "k", n),
        _chunk(z, n, s) @ w["v"][n] + _bias(w, "v", n),
        w["o"][n],
    ),
    "narrow_tied": lambda w, n, g, x, y, z, s: (
        _chunk(x, n, s) @ w["q"] + _bias(w, "q"),
        _chunk(y, n, s) @ w["k"] + _bias(w, "k"),
        _chunk(z, n, s) @ w["v"] + _bias(w, "v"),
        w["o"][n] if "o" in w else np.eye(s["V"]),
    ),
    "alt": lambda w, n, g, x, y, z, s: MAPS["narrow"](
        w, n, g, x @ w["down"], y @ w["down"], z @ w["down"], s
    ),
    "two_stage": lambda w, n, g, x, y, z, s: MAPS["standard"](
        w, n, g, x @ w["q_outer"], y @ w["k_outer"], z @ w["v_outer"], s
    ),
    "collaborative": lambda w, n, g, x, y, z, s: (
        (x @ w["q"] + _bias(w, "q")) @ np.diag(w["m"][n]),
        y @ w["k"] + _bias(w, "k"),
        z @ w["v"][:, g] + _bias(w, "v", g),
        w["o"][n],
    ),
    "bilinear": lambda w, n, g, x, y, z, s: (
        x @ w["qk"][:, n] + _bias(w, "q", n),
        y,
        z @ w["v"][:, g] + _bias(w, "v", g),
        w["o"][n],
    ),
    "absorbed": lambda w, n, g, x, y, z, s: (
        x @ w["qk"][:, n] + _bias(w, "q", n),
        y,
        z @ w["vo"][n] + _bias(w, "v", n),
        np.eye(s["O"]),
    ),
}
MAPS["wide"] = MAPS["standard"]


def test_every_layout_has_a_spec_here():
    assert {s.layout for s in SPECS.values()} == set(LAYOUTS)


@pytest.mark.parametrize("name", SPECS)
def test_heads_equal_the_definition(name, x64):
    spec = SPECS[name]
    w, x, context, values = make(spec, jnp.float64)
    got = attend(w, x, context, values, spec=spec)
    assert got.shape == (2, 7, spec.sizes["O"])
    assert_close(got, by_hand(w, x, context, values, spec))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_jit_vmap_scan_and_gradient(name, dtype):
    spec = SPECS[name]
    arrays = make(spec, dtype)

    def run(w, x, context, values):
        return multi_head_attention(w, x, context, value_context=values, spec=spec)

    def loss(w, *inputs):
        return jnp.sum(jnp.square(run(w, *inputs).astype(jnp.float32)))

    @jax.jit
    def all_at_once(*arrays):
        many = jax.tree.map(lambda a: jnp.stack([a, -a]), arrays)
        scanned = jax.lax.scan(lambda carry, row: (carry, run(*row)), None, many)[1]
        return run(*arrays), jax.vmap(run)(*many), scanned, jax.grad(loss)(*arrays)

    plain, mapped, scanned, grads = all_at_once(*arrays)
    assert plain.dtype == dtype
    if dtype == jnp.float32:  # bfloat16 flips the winner of scores this large
        assert_close(plain, jnp.asarray(by_hand(*arrays, spec), dtype))
    assert_close(mapped, scanned)
    assert_close(mapped[0], plain)
    for weight, grad in grads.items():
        assert grad.dtype == dtype
        # A key bias adds the same to all scores of a row: the softmax cannot see it.
        if weight != "k_bias":
            reached = np.abs(np.asarray(grad, np.float32)).reshape(grad.shape[0], -1).max(axis=1)
            assert reached.min() > 0


def test_without_jit():
    spec = SPECS["standard"]
    arrays = make(spec)
    plain = multi_head_attention(*arrays[:3], value_context=arrays[3], spec=spec)
    assert_close(plain, attend(*arrays, spec=spec))


HAVE_KEYS = [n for n, s in SPECS.items() if "k" in LAYOUTS[s.layout].biases and not s.qk_norm]


@pytest.mark.parametrize("name", HAVE_KEYS)
def test_key_bias_cancels(name, x64):
    spec = dataclasses.replace(SPECS[name], biases="k")
    w, x, context, values = make(spec, jnp.float64)
    without = {n: a for n, a in w.items() if n != "k_bias"}
    got = attend(w, x, context, value_context=values, spec=spec)
    bare = dataclasses.replace(spec, biases="")
    assert_close(got, attend(without, x, context, value_context=values, spec=bare))


@pytest.mark.parametrize("name", SPECS)
def test_parameters_and_flops_by_formula(name):
    spec = SPECS[name]
    w, x, context, values = make(spec)
    assert head_parameters(spec) == sum(a.size for a in w.values())
    run = functools.partial(multi_head_attention, spec=spec, order="factored")
    cross = jax.make_jaxpr(lambda *a: run(*a[:3], value_context=a[3]))(w, x, context, values)
    if spec.layout != "alt":  # which reads three inputs here, and two in the formula
        assert product_flops(cross.jaxpr) == call_flops(spec, 2, 7, 8, cross=True)
    if spec.key_width is None:
        alone = jax.make_jaxpr(run)(w, x).jaxpr
        assert product_flops(alone) == call_flops(spec, 2, 7, 7) == 2 * 7 * head_flops(spec, 7)


@pytest.mark.parametrize(
    ("spec", "flops", "parameters"),
    [  # the reference table: d=512, h=8, n=512
        (HeadSpec("standard", 512, 8), 3_145_728, 1_048_576),
        (HeadSpec("wide", 512, 8), 25_165_824, 8_388_608),
        (HeadSpec("narrow", 512, 8), 1_769_472, 360_448),
        (HeadSpec("narrow_tied", 512, 8), 1_769_472, 274_432),
        (HeadSpec("standard", 512, 8, num_kv_heads=1), 2_228_224, 589_824),
        (HeadSpec("bilinear", 512, 8), 9_961_472, 2_621_440),
    ],
)
def test_published_flops_and_parameters(spec, flops, parameters):
    assert (head_flops(spec, 512), head_parameters(spec)) == (flops, parameters)


@pytest.mark.parametrize(
    ("width", "counts"),
    [  # pbloem/former, attention of one layer with 8 heads, bias on the output map alone
        (128, (524_416, 65_664, 39_040, 22_656, 17_280, 768)),
        (256, (2_097_408, 262_400, 155_904, 90_368, 68_864, 3_072)),
    ],
)
def test_parameters_of_former(width, counts):
    specs = [HeadSpec(name, width, 8, biases="o") for name in (
        "wide", "standard", "alt", "narrow", "narrow_tied",
    )]  # fmt: skip
    specs.append(HeadSpec("narrow_tied", width, 8, output=False))
    assert tuple(map(head_parameters, specs)) == counts


def test_collaborative_parameters():
    """2 d R + h R + 2 d^2 (Cordonnier et al. 2020, section 3)."""
    spec = HeadSpec("collaborative", 512, 8, shared_dim=256)
    assert head_parameters(spec) == 2 * 512 * 256 + 8 * 256 + 2 * 512**2


def test_narrow_is_standard_with_block_diagonal_weights(x64):
    narrow = HeadSpec("narrow", width=12, num_heads=3, biases="qkvo")
    w, x, *_ = make(narrow, jnp.float64)
    chunk = narrow.sizes["C"]
    block = dict(w)
    for name in "qkv":
        full = np.zeros((12, 3, chunk))
        for n in range(3):
            full[n * chunk : (n + 1) * chunk, n] = w[name][n]
        block[name] = jnp.asarray(full)
    standard = dataclasses.replace(narrow, layout="standard")
    expected = attend(w, x, spec=narrow)
    assert_close(attend(block, x, spec=standard), expected)


def test_wide_is_standard_with_head_dim_equal_to_width():
    wide = HeadSpec("wide", width=6, num_heads=5)
    standard = HeadSpec("standard", width=6, num_heads=5, head_dim=6)
    assert wide.shapes == standard.shapes == dict.fromkeys("qkv", (6, 5, 6)) | {"o": (5, 6, 6)}


def test_grouped_is_standard_with_repeated_keys_and_values(x64):
    grouped = HeadSpec("standard", width=12, num_heads=6, num_kv_heads=2)
    w, x, *_ = make(grouped, jnp.float64)
    copied = w | {n: jnp.repeat(w[n], 3, axis=1) for n in "kv"}
    got = attend(w, x, spec=grouped)
    standard = dataclasses.replace(grouped, num_kv_heads=None)
    assert_close(got, attend(copied, x, spec=standard))


def test_a_gate_of_zero_removes_a_head(x64):
    spec = SPECS["standard"]
    w, x, *_ = make(spec, jnp.float64)
    gate = jnp.array([1.0, 0.0, 1.0, 1.0])
    without = w | {"o": w["o"].at[1].set(0)}
    got = attend(w, x, spec=spec, head_gate=gate)
    assert_close(got, attend(without, x, spec=spec))
    per_row = jnp.stack([gate, jnp.ones(4)])
    mixed = attend(w, x, spec=spec, head_gate=per_row)
    assert_close(mixed[1], attend(w, x, spec=spec)[1])
    assert_close(mixed[0], got[0])


def scales_at_the_start(layout, width, num_heads):
    """Standard deviations of q, k, v, scores and output for unit-variance x, over 96 draws."""
    spec = HeadSpec(layout, width, num_heads)

    def measure(key):
        w_key, x_key = jax.random.split(key)
        w = init_heads(w_key, spec)
        q, k, v = project_heads(w, jax.random.normal(x_key, (2, 32, width)), spec=spec)
        k_of_each = jnp.repeat(k, num_heads // k.shape[2], axis=2)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k_of_each) * spec.sizes["H"] ** -0.5
        out = merge_heads(w, dot_product_attention(q, k, v), spec=spec)
        return jnp.stack([jnp.var(a) for a in (q, k, v, scores, out)])

    draws = jax.jit(lambda keys: jax.lax.map(measure, keys))(
        jax.random.split(jax.random.key(1), 96)
    )
    return np.sqrt(np.mean(draws, axis=0))


def test_initial_scale_is_the_same_in_every_layout():
    """q, k, v, scores: 1 in every layout. The output: that of `standard`, but for small chunks.

    A head that reads a chunk of 16 inputs has unit scores with heavier tails (their variance
    given the query varies more), so a sharper softmax and an output 20 to 25 % larger. With chunks
    of 128 that is gone.
    """
    small = {layout: scales_at_the_start(layout, 64, 4) for layout in LAYOUTS}
    ratio = {"narrow": 1.2, "narrow_tied": 1.2, "alt": 1.25}
    for layout, scales in small.items():
        np.testing.assert_allclose(scales[:4], 1, rtol=0.05, err_msg=layout)
        expected = small["standard"][4] * ratio.get(layout, 1)
        np.testing.assert_allclose(scales[4], expected, rtol=0.05, err_msg=layout)
    standard, narrow = (scales_at_the_start(layout, 256, 2) for layout in ("standard", "narrow"))
    np.testing.assert_allclose(narrow, standard, rtol=0.05)


def test_initial_std_can_be_told():
    w = init_heads(jax.random.key(0), HeadSpec("standard", 256, 4, biases="qkvo"), std=0.02)
    for name, a in w.items():
        if name.endswith("_bias"):
            assert not a.any()
        else:
            np.testing.assert_allclose(jnp.std(a), 0.02, rtol=0.02)


def test_default_initialisers_would_take_the_wrong_fan():
    """Why init_heads exists: the library default sees N*H, not D, in the last two axes."""
    spec = HeadSpec("standard", 256, 8, head_dim=16)
    default = jax.nn.initializers.lecun_normal()(jax.random.key(0), spec.shapes["q"])
    ours = init_heads(jax.random.key(0), spec)["q"]
    np.testing.assert_allclose(jnp.std(ours), 256**-0.5, rtol=0.05)
    assert jnp.std(default) < 0.6 * jnp.std(ours)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(layout="wid"), "unknown layout 'wid': did you mean 'wide'"),
        (dict(num_heads=5), "width 12 is not divisible by 5 heads; set head_dim"),
        (dict(layout="narrow", num_heads=5, head_dim=4), "divisible by 5 heads; change one"),
        (dict(width=0), "width must be at least 1"),
        (dict(head_dim=-3), "head_dim must be at least 1"),
        (dict(num_kv_heads=3), "not divisible by num_kv_heads 3"),
        (dict(layout="narrow", num_kv_heads=2), "use layout 'standard'"),
        (dict(layout="narrow", key_width=6), "must equal width"),
        (dict(layout="bilinear", head_dim=6), "takes no head_dim"),
        (dict(layout="absorbed", value_dim=6), "takes no value_dim"),
        (dict(shared_dim=6), "only 'collaborative' has one"),
        (dict(layout="bilinear", biases="k"), "no map for bias 'k'; use letters of 'oqv'"),
        (dict(output=False, biases="o"), "without output has no map for bias 'o'"),
        (dict(output=False, out_width=5), "leave out_width out"),
        (dict(layout="absorbed", output=False), "output must be True"),
        (dict(qk_norm="rsm"), "did you mean 'rms'"),
        (dict(layout="bilinear", qk_norm="rms"), "leave qk_norm out"),
        (dict(layout="collaborative", num_heads=5), "divisible by 5 heads; set value_dim"),
        (dict(biases="qq"), "letters of 'qkvo'"),
        (dict(biases="x"), "letters of 'qkvo'"),
    ],
)
def test_impossible_specs_say_what_to_change(fields, message):
    with pytest.raises(ValueError, match=message):
        HeadSpec(**{"layout": "standard", "width": 12, "num_heads": 4} | fields)


def test_wide_needs_no_divisible_width():
    assert HeadSpec("wide", width=7, num_heads=3).shapes["q"] == (7, 3, 7)


def test_axes_name_every_weight():
    spec = HeadSpec("narrow", width=12, num_heads=3, biases="qkvo")
    assert dict(weight_axes(spec)) == {
        "q": "NCH", "q_bias": "NH", "k": "NCH", "k_bias": "NH",
        "v": "NCV", "v_bias": "NV", "o": "NVO", "o_bias": "O",
    }  # fmt: skip
