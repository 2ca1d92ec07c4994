"""The same function in another layout: chains of steps, errors, dtypes, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep
from conversions import difference, random_params, sized, small

from attnlab import heads
from attnlab.attention import ALiBi
from attnlab.heads import LAYOUTS, ExtraKeys, Gate, HeadNorm, Sink, init, weight_shapes
from attnlab.transforms import Conversion, NotEquivalent, Undecided, convert
from attnlab.transforms.convert import error_bound


def plain(name, **fields):
    """Inputs of one width, and no bias but that of the output."""
    known = {f.name for f in dataclasses.fields(LAYOUTS[name])}
    widths = {n: None for n in ("key_width", "value_width") if n in known}
    return sized(name, **dict(biases=("o",)) | widths | fields)


def checked(params, layout, target, key=None, **options):
    """Converted, exact as measured and as seen by these tests: (params, steps)."""
    found = convert(params, layout, target, key=key, **options)
    assert isinstance(found, Conversion), found
    assert max(found.forward_error, found.gradient_error) < 1e-11
    shapes = {name: a.shape for name, a in found.params.items()}
    assert shapes == weight_shapes(target)
    assert all(type(a) is np.ndarray and a.dtype == np.float64 for a in found.params.values())
    assert difference(found.params, target, params, layout, **options) < 1e-11
    return dict(found.params), found.steps


EACH = dict(num_kv_heads=6)
plain_keys = sized(**EACH, head_dim=10, biases=("q", "v", "o"))
SCALED = dict(scale=0.3, query_latent_dim=None)
LATENT = dict(latent_norm=False, query_latent_dim=None)
CASES = {
    "tied": (small(num_heads=3, tie="kv"), small(num_heads=3)),
    "wider heads": (sized(scale=0.5), sized(head_dim=6, value_dim=8)),
    "a key head each": (sized(), sized(**EACH)),
    "outer matrices": (sized(), sized("two_stage")),
    "a shared matrix": (sized("narrow"), sized("alt")),
    "an output projection": (
        sized(output_projection=False, out_width=None, biases=("q", "v")),
        sized(out_width=30, biases=("q", "v")),
    ),
    "keys of the input": (sized("bilinear"), plain_keys),
    "values of the input": (sized("absorbed"), sized("bilinear", **EACH, value_dim=10)),
    "shared dimensions": (sized("collaborative"), sized(head_dim=8)),
    "dimensions of one head": (sized(**EACH), sized("collaborative", **EACH, head_dim=24)),
    "an absorbed latent": (sized("latent_absorbed", **SCALED), sized("latent", **SCALED)),
    "a latent multiplied": (
        sized("latent", latent_norm=False),
        plain("standard", head_dim=6, value_dim=5, **EACH),
    ),
    "a latent": (plain("standard"), sized("latent", latent_dim=18, **LATENT)),
    "few queries": (sized("low_rank_query", latent_norm=False), sized()),
    "score matrices": (sized(biases=("v",)), sized("bilinear", biases=("v",))),
    "value matrices": (sized("bilinear", **EACH), sized("absorbed")),
    "slices": (sized("narrow"), plain("standard", **EACH, biases=("q", "k", "v", "o"))),
    "equal heads": (sized("narrow_tied"), sized("narrow")),
    "a key bias": (sized(), sized(biases=("q", "v", "o"))),
    "a bias of zeros": (sized(biases=("k",)), sized()),
    "another scale": (sized(), sized(scale=0.3)),
    "ties": (
        small("narrow", num_heads=3, tie="qk", biases=("q",)),
        small("narrow", num_heads=3, biases=("q", "k")),
    ),
}  # fmt: skip


ONE_WAY = ("shared dimensions",)
"""Back they would have to be found among all heads."""
QUICK = (
    "a key head each", "wider heads", "score matrices", "ties", "outer matrices", "slices",
    "dimensions of one head", "an absorbed latent", "values of the input", "equal heads",
)  # fmt: skip


@pytest.mark.parametrize("name", deep(CASES, *QUICK))
def test_there_and_back(name):
    """Random weights of the first layout, to the second, which then has their structure, and
    back."""
    layout, target = CASES[name]
    params, _ = checked(random_params(layout), layout, target)
    if name not in ONE_WAY:
        checked(params, target, layout)


def test_rotary_positions_see_head_dim():
    two, four = (
        small(width=4, num_heads=2, head_dim=h, value_dim=3, biases=("q", "k")) for h in (2, 4)
    )
    for target in (four, small("bilinear", width=4, num_heads=2, biases=("q",), value_dim=3)):
        assert isinstance(convert(random_params(two), two, target, rotary=True), Undecided)
    wider = dataclasses.replace(two, value_dim=5)
    assert checked(random_params(two), two, wider, rotary=True)[1] == ("resize",)
    grouped = dataclasses.replace(two, num_kv_heads=1)
    new, _ = checked(random_params(grouped), grouped, two, rotary=True)
    np.testing.assert_array_equal(new["k"][:, 0], new["k"][:, 1])
    checked(new, two, grouped, rotary=True)


def test_zero_padding_rescales_q_by_the_root_of_the_head_widths():
    """Bhojanapalli et al. 2020: a head_dim above D/N only adds functions."""
    one, two = small(), small(head_dim=7)
    params = random_params(one)
    new, _ = checked(params, one, two)
    np.testing.assert_allclose(new["q"][..., :3], params["q"] * np.sqrt(7 / 3), rtol=1e-14)
    np.testing.assert_array_equal(new["k"][..., 3:], 0)


def gradients(params, layout, steps):
    """Those of so many steps of gradient descent to a random output."""
    rng = np.random.default_rng(4)
    x, expected = (jnp.asarray(rng.normal(size=(3, 7, 12)), jnp.float32) for _ in range(2))

    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.mean(
            (heads.multi_head_attention(params, x, layout, order="factored") - expected) ** 2
        )

    params, found = {n: jnp.asarray(a, jnp.float32) for n, a in params.items()}, []
    for _ in range(steps):
        found.append(gradient(params))
        params = {n: a - 0.1 * found[-1][n] for n, a in params.items()}
    return found


# (layout, target, weights whose new columns have no gradient in the first step).
GROWN = {
    "wide": (small(), small("wide"), {"q", "v"}),
    "heads": (small(num_heads=3), small(num_heads=5, head_dim=4), {"q", "k", "v"}),
    "slices": (small("narrow"), small("narrow", head_dim=5), {"q", "v"}),
    "absorbed": (small(num_heads=3), small("absorbed", num_heads=5), {"qk"}),
    "a latent": (
        small(), small("latent", latent_dim=30, latent_norm=False), {"kv_down", "q_rotary"},
    ),
    "extra keys and groups": (
        small(num_kv_heads=2, extras=(ExtraKeys(2),)),
        small(num_kv_heads=2, extras=(ExtraKeys(2),), head_dim=5),
        {"q", "v", "extra_v"},
    ),
    "tied": (small(tie="kv"), small(tie="kv", head_dim=5), {"q", "o"}),
}  # fmt: skip


@pytest.mark.parametrize("name", deep(GROWN, "wide", "heads"))
def test_what_conversion_adds_can_learn(name):
    """The other one of each pair, such as k and o, has a gradient at once; after one step all
    weights have."""
    layout, target, later = GROWN[name]
    params = random_params(layout)
    new, _ = checked(params, layout, target)
    first, second = gradients(new, target, 2)
    assert {n for n, a in first.items() if np.any(a == 0)} == later
    assert not [n for n, a in second.items() if np.any(a == 0)]
    other, _ = checked(params, layout, target, key=jax.random.key(1))
    chosen = {n for n in new if np.any(new[n] != other[n])}
    assert chosen <= later
    for key, made in enumerate((new, other)):
        drawn = init(jax.random.key(key), target)
        for n in chosen:
            np.testing.assert_array_equal(made[n], np.where(new[n] != other[n], drawn[n], made[n]))


def test_heads_that_write_nothing_are_dropped():
    """And no others: three live heads have no place in two."""
    params, two = random_params(small()), small(num_heads=2, head_dim=3)
    params["o"][[0, 2]] = 0
    new, _ = checked(params, small(), two)
    np.testing.assert_allclose(new["o"], params["o"][[1, 3]])
    params["o"][0] = 1
    assert not isinstance(convert(params, small(), two), Conversion)


def test_projections_that_differ_are_not_tied():
    layout, target = small(biases=("v",)), small(biases=("v",), tie="qk")
    params = random_params(layout)
    params["k"] = params["q"].copy()
    checked(params, layout, target)
    params["k"] = params["q"] + 1e-6 * random_params(layout, seed=1)["q"]
    assert isinstance(convert(params, layout, target), Undecided)


@pytest.mark.parametrize(
    ("extras", "options"),
    [
        ((), {"score_mods": (ALiBi(np.full(4, 0.1)),)}),
        ((), {"logits_soft_cap": 2.0}),
        ((Sink(learnt=False),), {}),
    ],
    ids=str,
)
def test_what_sees_a_key_bias(extras, options):
    """A constant added to the scores of a query changes nothing without them."""
    target, plain = small("bilinear", biases=("q",), extras=extras), small(extras=extras)
    checked(random_params(plain), plain, target, **options)
    biased = small(biases=("k",), extras=extras)
    params = random_params(biased)
    assert isinstance(convert(params, biased, target, **options), Undecided)
    assert isinstance(convert(params, small(biases=("k",)), small("bilinear")), Conversion)


@pytest.mark.parametrize("size", [1e160, 1e200])
def test_huge_weights_are_not_exact(size):
    """An error of NaN is not exact."""
    params = {n: a * size for n, a in random_params(small()).items()}
    for target in (small(head_dim=5), small("bilinear")):
        found = convert(params, small(), target)
        assert not isinstance(found, NotEquivalent)
        if isinstance(found, Conversion):
            assert difference(found.params, target, params, small()) < 1e-9


def test_a_norm_of_zeros_without_epsilon_is_not_exact():
    """0 / sqrt(0) in a padded head."""
    norm = dict(qk_norm=HeadNorm(), norm_eps=0.0)
    layout, target = small(num_heads=3, head_dim=4, **norm), small(head_dim=4, **norm)
    found = convert(random_params(layout), layout, target)
    assert isinstance(found, Undecided)
    assert np.isnan(found.forward_error)


def test_integer_weights_are_refused():
    """o = 0.5 would become 0, with an error of 0."""
    params = {n: np.ones(shape, int) for n, shape in weight_shapes(small()).items()}
    with pytest.raises(TypeError, match=r"weight 'q' has dtype int64.*convert params to a float"):
        convert(params, small(), small(extras=(Gate(),)))


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_weights_as_returned_are_finite_and_measured(dtype):
    """In float16 some would be inf."""
    params = {n: jnp.asarray(a, dtype) for n, a in random_params(small(), size=1.0).items()}
    found = convert(params, small(), small(scale=1e-6))
    assert isinstance(found, Undecided if dtype == np.float16 else Conversion)
    for target in (small(), small("bilinear")):
        found = convert(params, small(), target, key=jax.random.key(3))
        assert isinstance(found, Conversion)
        assert all(isinstance(a, jax.Array) and a.dtype == dtype for a in found.params.values())
    assert 1e-9 < found.forward_error < error_bound(dtype)
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("name", ["width", "key_width", "value_width", "out_width"])
def test_layouts_of_other_inputs(name):
    other = small(**{"head_dim": 3, name: 8})
    with pytest.raises(ValueError, match=f"layout has {name} 12, target 8"):
        convert(random_params(small()), small(), other)
