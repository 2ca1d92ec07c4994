"""Weights of Flax's attention modules as weights of a layout and back, and its page."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, assert_close
from flax import nnx
from flax_modules import (
    HAS,
    LINEN,
    NNX,
    draw,
    linen_params,
    nnx_module,
    random_like,
    value_and_grads,
)

import attnlab
from attnlab import heads, multi_head_attention
from attnlab.adapters import heads_from_linen, heads_from_nnx, heads_to_linen

SIZES = {
    "plain": ((LINEN, (3,), {}), (6,)),
    "no bias, wide, cross": (
        (LINEN, (4,), {"qkv_features": 12, "out_features": 11, "use_bias": False}),
        (6, 10, 9),
    ),
    "normalised": ((LINEN, (3,), {"qkv_features": 12, "normalize_qk": True}), (6, 10)),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_heads_from_linen_and_back(sizes):
    (build, args, options), widths = SIZES[sizes]
    module = build(*args, **options)
    params = linen_params(module, *widths)
    inputs = [draw(2, 5 if i == 0 else 7, w) for i, w in enumerate(widths)]
    w, layout = heads_from_linen(params)
    assert type(layout) is heads.Standard
    assert sum(a.size for a in w.values()) == sum(a.size for a in jax.tree.leaves(params))

    def ours(params, x, *context):
        w, layout = heads_from_linen(params)
        return multi_head_attention(
            w, x, layout, context[0] if len(context) == 1 else context or None
        )

    got = value_and_grads(ours, params, *inputs)
    expected = value_and_grads(lambda p, *x: module.apply({"params": p}, *x), params, *inputs)
    assert_close(got, expected, loosen=5)
    back = heads_to_linen(w, layout)
    jax.tree.map(np.testing.assert_array_equal, back, dict(params))


def test_heads_from_nnx_and_back():
    grouped = {"num_kv_heads": 2} if "num_kv_heads" in HAS else {}
    for options in ({"normalize_qk": True, "dropout_rate": 0.1}, {"use_bias": False, **grouped}):
        module = nnx_module(in_kv_features=10, **options)
        w, layout = heads_from_nnx(nnx.state(module))
        sizes = (layout.num_heads, layout.head_dim, layout.key_width, layout.out_width)
        assert sizes == (4, 3, 10, 11)
        assert layout.num_kv_heads == options.get("num_kv_heads")
        x, y = draw(2, 5, 6), draw(2, 7, 10)
        expected = module(x, y, deterministic=True)
        run = jax.jit(lambda w, x, y, layout=layout: multi_head_attention(w, x, layout, y))
        assert_close(run(w, x, y), expected)
        fresh = NNX(in_kv_features=10, **options, rngs=nnx.Rngs(1))
        nnx.update(fresh, heads_to_linen(w, layout))
        np.testing.assert_array_equal(fresh(x, y, deterministic=True), expected)
    module.init_cache((2, 5, 6))
    assert heads_from_nnx(nnx.state(module))[1] == layout


def test_our_weights_in_flax():
    """Wide heads with one bias: Flax has all four, so the others are zeros."""
    layout = heads.Wide(width=6, num_heads=3, biases=("q",))
    w = random_like(jax.eval_shape(lambda k: heads.init(k, layout), jax.random.key(0)))
    x, module = draw(2, 5, 6), LINEN(3, qkv_features=18)
    got = jax.jit(module.apply)({"params": heads_to_linen(w, layout)}, x)
    assert_close(got, jax.jit(lambda w, x: multi_head_attention(w, x, layout))(w, x))


PARAMS, ONE = linen_params(LINEN(3), 6), jnp.ones(3)
TREES = [
    ({}, "found nothing; expected key.kernel, out.kernel, query.kernel, value.kernel"),
    ({"params": {"query": {"kernel": ONE}}}, "found params.query.kernel; expected key.kernel"),
    ({"q": ONE}, "found q; expected"),
    ({"kernel": {"shape": ONE, "none": None}}, "found kernel.shape; expected"),
    ([PARAMS], "not the parameters of one attention module of Flax: a l|expected nnx.state"),
    (jax.tree.map(lambda a: jnp.stack([a, a]), PARAMS), "takes one of a stack"),
    (PARAMS | {"value": {"kernel": jnp.ones((6, 3, 5))}}, "do not fit together"),
    (nnx_module(), "not the parameters of one .*Flax: a M|expected nnx.state.*not MultiHeadAttent"),
]


@pytest.mark.parametrize(("tree", "message"), TREES)
def test_other_trees_are_refused(tree, message):
    for read in (heads_from_linen, heads_from_nnx):
        with pytest.raises(ValueError, match=message):
            getattr(read, "__wrapped__", read)(tree)


STANDARD = functools.partial(heads.Standard, num_heads=3)
NOT_FLAX = [
    (heads.Narrow(num_heads=3), "no layout 'narrow'"),
    (STANDARD(value_dim=5), "no value_dim 5 beside head_dim 2"),
    (STANDARD(scale=1.0), "no scale 1.0"),
    (STANDARD(output_projection=False), "no output_projection=False"),
    (STANDARD(qk_norm=heads.HeadNorm("rms")), "no qk_norm HeadNorm"),
    (STANDARD(qk_norm=heads.HeadNorm("layer", bias=True)), "no qk_norm"),
    (STANDARD(qk_norm=heads.HeadNorm("layer"), norm_eps=0.5), "norm_eps 0.5"),
    (STANDARD(tie="kv"), "no tie='kv'"),
    (STANDARD(extras=(heads.Sink(),)), "no extra 'sink'"),
]


@pytest.mark.parametrize(("layout", "message"), NOT_FLAX)
def test_what_flax_cannot_be(layout, message):
    layout = layout.with_width(6)
    with pytest.raises(ValueError, match=message):
        heads_to_linen(heads.init(jax.random.key(0), layout), layout)


def test_our_linen_module_in_nnx():
    """`nnx.bridge.ToNNX`: the same output, and dropout from its random streams."""
    layout = heads.Narrow(width=6, num_heads=3, biases=("q", "o"))
    linen, x = attnlab.MultiHeadAttention(layout, dropout_rate=0.5), draw(2, 5, 6)
    module = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(params=0, dropout=1))
    nnx.bridge.lazy_init(module, x)
    nnx.update(module, random_like(nnx.state(module, nnx.Param)))
    pure = jax.tree.map(jnp.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    assert_close(module(x), linen.apply({"params": pure}, x))
    loud = [np.asarray(module(x, deterministic=False)) for _ in range(2)]
    assert not np.array_equal(*loud)


PAGE = (ROOT / "docs" / "howto" / "coming_from.md").read_text()


@pytest.mark.slow
def test_the_page_for_newcomers_runs():
    """Its blocks, one after the other, as a reader would paste them."""
    blocks, names = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), {}
    assert len(blocks) == 7
    for block in blocks:
        exec(block, names)


def test_the_page_for_newcomers_names_fields_that_exist():
    table = PAGE.split("## Names")[1].split("## Calls")[0]
    named = set(re.findall(r"`(\w+)", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))))
    assert len(named) > 10
    assert named - {"Standard"} <= {field.name for field in dataclasses.fields(heads.Standard)}
