"""Whatever sizes are asked for: either heads that work, or one error that names what to change."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import ModelConfig, contraction_orders, generate, heads, multi_head_attention
from attnlab.heads.rewrites import CallSizes

FIELDS = {
    "num_kv_heads": st.none() | st.integers(-1, 6),
    "head_dim": st.none() | st.integers(0, 5),
    "value_dim": st.none() | st.integers(0, 5),
    "key_width": st.none() | st.sampled_from([5, 12]),
    "value_width": st.none() | st.sampled_from([7, 12]),
    "out_width": st.none() | st.integers(0, 9),
    "shared_dim": st.none() | st.integers(0, 9),
    "biases": st.sampled_from([(), ("q",), ("q", "k", "v", "o"), ("k", "k"), ("x",), "q"]),
    "output_projection": st.booleans(),
    "qk_norm": st.none() | st.sampled_from([heads.HeadNorm(), "l2"]),
}


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([*heads.LAYOUTS, "narow"]),
    width=st.sampled_from([-1, 7, 12]),
    num_heads=st.integers(0, 6),
    fields=st.fixed_dictionaries({}, optional=FIELDS),
)
def test_any_layout_works_or_says_what_to_change(name, width, num_heads, fields):
    words, said = ["layout", "width", "num_heads", *FIELDS], ""
    try:
        layout = heads.make_layout(name, width=width, num_heads=num_heads, **fields)
    except (ValueError, TypeError) as error:
        said = str(error)
    if said:
        assert any(word in said for word in words)
        return
    shapes = heads.weight_shapes(layout)
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x, y, z = (jax.ShapeDtypeStruct((2, 3, width), "float32") for width in layout.input_widths)
    for order, cost in contraction_orders(layout, CallSizes(2, 3, 3, cross=True)).items():
        run = lambda w, x, y, z, order=order: multi_head_attention(
            w, x, layout, (y, z), order=order
        )
        if isinstance(cost, int):
            assert jax.eval_shape(run, params, x, y, z).shape == (2, 3, layout.size("out_width"))
        else:
            with pytest.raises(ValueError, match=r"use order='factored'|cannot run"):
                jax.eval_shape(run, params, x, y, z)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (2, 5, 7)}, r"x \(2, 5, 7\).* 6"),
        ({"x": (5, 6)}, r"x \(5, 6\)"),
        ({"context": (2, 4, 7)}, r"\(2, 4, 7\).* 6"),
        ({"context": (3, 4, 6)}, r"\(3, 4, 6\).*batch"),
        ({"values": (2, 3, 6)}, r"\(2, 3, 6\).*as long"),
        ({"q": (6, 2, 4)}, r"weight .q. .*\(6, 2, 4\).*\(6, 2, 3\)"),
        ({"k_bias": (2, 3)}, "k_bias"),
    ],
)
def test_arrays_that_do_not_fit(changes, message):
    layout = heads.Standard(width=6, num_heads=2)
    params = {name: jnp.ones(shape) for name, shape in heads.weight_shapes(layout).items()}
    arrays = {"x": jnp.ones((2, 5, 6)), "context": jnp.ones((2, 5, 6)), "values": None}
    for name, shape in changes.items():
        (arrays if name in arrays else params)[name] = jnp.ones(shape)
    context = arrays["context"]
    if arrays["values"] is not None:
        context = context, arrays["values"]
    with pytest.raises((ValueError, TypeError), match=message):
        multi_head_attention(params, arrays["x"], layout, context)


CONFIG = ModelConfig(vocab_size=19, width=12, num_layers=1, heads=heads.Standard(num_heads=3))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("To be", "ids, not the text 'To be'"),
        (["To", "be"], "ids, not the text 'To'"),
        (b"To be", "ids, not the text"),
        ([3, 1, 4], r"tokens \(3,\) must be \[batch, length\]"),
        (jnp.ones((2, 3, 4), int), r"tokens \(2, 3, 4\) must be \[batch, length\]"),
        ([[3.0, 1.0]], r"float32 and shape \(1, 2\): ids are integers"),
        ([[True, False]], r"tokens of dtype bool and shape \(1, 2\): ids are integers"),
        (jnp.ones((1, 2, 18)), r"float32 and shape \(1, 2, 18\)"),
        (jnp.ones((1, 2, 19)), "mixtures"),
    ],
)
def test_a_prompt_of_no_ids(tokens, message):
    params = CONFIG.build().init(jax.random.key(0), jnp.array([[3, 1]]))["params"]
    with pytest.raises((ValueError, TypeError), match=message):
        generate(params, tokens, CONFIG, 2)


def test_a_model_is_given_no_ids():
    model = dataclasses.replace(CONFIG, num_layers=1).build()
    variables = model.init(jax.random.key(0), jnp.array([[3, 1]]))
    with pytest.raises(ValueError, match=r"tokens \(2,\) must be \[batch, length\]"):
        model.apply(variables, jnp.array([3, 1]))
    with pytest.raises(ValueError, match=r"float32 and shape \(1, 2\): ids are integers"):
        model.apply(variables, jnp.array([[3.0, 1.0]]))


def test_params_may_stand_in_variables():
    variables = CONFIG.build().init(jax.random.key(0), jnp.array([[3, 1]]))
    texts = [generate(p, [[3, 1]], CONFIG, 2).tolist() for p in (variables, variables["params"])]
    assert texts[0] == texts[1]
