"""Contract over every row of LAYOUTS and one that is not in it: see `contract.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, diagonal, product_flops
from contract import ALONE, DEFINITIONS, FIRST, SPECS, attend, by_hand, make

from attnlab import (
    LAYOUTS,
    HeadSpec,
    dot_product_attention,
    init_cache,
    init_heads,
    merge_heads,
    multi_head_attention,
    project_heads,
)
from attnlab.heads.old.cost import (
    cache_bytes_per_token,
    call_flops,
    decode_flops,
    head_flops,
    head_parameters,
)
from attnlab.heads.old.project import make_memory
from attnlab.heads.old.spec import absorption

pytestmark = pytest.mark.usefixtures("outside_row")


def test_every_layout_has_a_spec_and_a_definition():
    assert {one.layout for one in SPECS.values()} == set(LAYOUTS) == set(DEFINITIONS)


@pytest.mark.parametrize("name", SPECS)
def test_heads_equal_the_definition(name, x64):
    spec = SPECS[name].spec()
    w, x, context, values = make(spec, jnp.float64)
    got = attend(w, x, context, values, spec=spec)
    assert got.shape == (2, 7, spec.sizes["O"])
    assert_close(got, by_hand(w, x, context, values, spec))


@pytest.mark.parametrize(("name", "dtype"), diagonal(SPECS, [jnp.float32, jnp.bfloat16], of=FIRST))
def test_jit_vmap_scan_and_gradient(name, dtype):
    spec = SPECS[name].spec()
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
    spec = SPECS["standard"].spec()
    arrays = make(spec)
    plain = multi_head_attention(*arrays[:3], value_context=arrays[3], spec=spec)
    assert_close(plain, attend(*arrays, spec=spec))


HAVE_KEYS = [
    n
    for n, one in SPECS.items()
    if "k_bias" in one.row.maps and not {"qk_norm", "ties", "extra_keys"} & set(one.fields)
]


@pytest.mark.parametrize("name", HAVE_KEYS)
def test_key_bias_cancels(name, x64):
    spec = SPECS[name].spec(biases="k")
    w, x, context, values = make(spec, jnp.float64)
    without = {n: a for n, a in w.items() if n != "k_bias"}
    got = attend(w, x, context, value_context=values, spec=spec)
    bare = dataclasses.replace(spec, biases="")
    assert_close(got, attend(without, x, context, value_context=values, spec=bare))


@pytest.mark.parametrize("name", SPECS)
def test_parameters_and_flops_by_formula(name):
    spec = SPECS[name].spec()
    w, x, context, values = make(spec)
    assert head_parameters(spec) == sum(a.size for a in w.values())
    run = functools.partial(multi_head_attention, spec=spec, order="factored")
    # Else of the text of keys.
    values = values if "W" in LAYOUTS[spec.layout].letters and not spec.ties else None
    cross = jax.make_jaxpr(lambda *a: run(*a[:3], value_context=a[3]))(w, x, context, values)
    assert product_flops(cross.jaxpr) == call_flops(spec, 2, 7, 8, cross=True)
    if spec.key_width is None:
        alone = jax.make_jaxpr(run)(w, x).jaxpr
        assert product_flops(alone) == call_flops(spec, 2, 7, 7) == 2 * 7 * head_flops(spec, 7)


@pytest.mark.parametrize("name", ALONE)
def test_flops_of_a_decoding_step_by_formula(name):
    """One token of each of two texts, beside 8 that are held, in every order."""
    spec = SPECS[name].spec()
    for one in [spec, *(step.spec for step in absorption(spec))]:
        w, x, *_ = make(one, length=1)
        run = functools.partial(multi_head_attention, spec=one, order="factored")
        step = jax.make_jaxpr(lambda w, x, c, run=run: run(w, x, cache=c))
        assert product_flops(step(w, x, init_cache(one, 2, 9)).jaxpr) == 2 * decode_flops(one, 9)


@pytest.mark.parametrize("name", ALONE)
def test_a_cache_is_what_the_row_says(name):
    """As many bytes as counted; what `store` makes has its names and shapes."""
    spec = SPECS[name].spec()
    cache = init_cache(spec, 2, 9)
    del cache["length"]
    assert sum(a.nbytes for a in cache.values()) == 2 * 9 * cache_bytes_per_token(spec)
    w, x, *_ = make(spec, length=9)
    held = jax.eval_shape(functools.partial(make_memory, spec=spec), w, x)
    assert {n: a.shape for n, a in held.items()} == {n: a.shape for n, a in cache.items()}


def scales_at_the_start(layout, width, num_heads, draws):
    """Standard deviations of q, k, v, scores and output for unit-variance x, over many draws."""
    spec = HeadSpec(layout, width, num_heads)

    def measure(key):
        w_key, x_key = jax.random.split(key)
        w = init_heads(w_key, spec)
        q, k, v = project_heads(w, jax.random.normal(x_key, (2, 32, width)), spec=spec)
        k_of_each = jnp.repeat(k, num_heads // k.shape[2], axis=2)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k_of_each) * spec.score_scale
        out = merge_heads(w, dot_product_attention(q, k, v), spec=spec)
        return jnp.stack([jnp.var(a) for a in (q, k, v, scores, out)])

    keys = jax.random.split(jax.random.key(1), draws)
    return np.sqrt(np.mean(jax.jit(jax.vmap(measure))(keys), axis=0))


def test_initial_scale_is_the_same_in_every_layout():
    """q, k, v, scores: 1 in every layout. The output: that of `standard`, but for small chunks.

    A head that reads a chunk of 16 inputs has unit scores with heavier tails (their variance
    given the query varies more), so a sharper softmax and an output 20 to 25 % larger. With chunks
    of 128 that is gone. In `tensor` q, k and v are means of few products of two normal numbers:
    unit size, heavy tails at any width, an output 35 % larger. In `grouped_tied` a large value is a
    large key.
    """
    small = {layout: scales_at_the_start(layout, 64, 4, 48) for layout in LAYOUTS}
    ratio = {"narrow": 1.2, "narrow_tied": 1.2, "alt": 1.25, "tensor": 1.35, "grouped_tied": 1.15}
    for layout, scales in small.items():
        np.testing.assert_allclose(scales[:4], 1, rtol=0.05, err_msg=layout)
        expected = small["standard"][4] * ratio.get(layout, 1)
        np.testing.assert_allclose(scales[4], expected, rtol=0.05, err_msg=layout)
    standard, narrow = (
        scales_at_the_start(layout, 256, 2, 12) for layout in ("standard", "narrow")
    )
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
