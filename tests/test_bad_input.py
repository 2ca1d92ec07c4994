"""Whatever sizes are asked for: either heads that work, or one error that names what to change."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import (
    LAYOUTS,
    HeadSpec,
    ModelConfig,
    contraction_orders,
    generate,
    init_heads,
    multi_head_attention,
)
from attnlab.heads.old.project import check_arrays
from attnlab.model.decode import check_ids

FIELDS = {
    "num_kv_heads": st.none() | st.integers(-1, 6),
    "head_dim": st.none() | st.integers(0, 5),
    "value_dim": st.none() | st.integers(0, 5),
    "key_width": st.none() | st.sampled_from([5, 12]),
    "value_width": st.none() | st.sampled_from([7, 12]),
    "out_width": st.none() | st.integers(0, 9),
    "shared_dim": st.none() | st.integers(0, 9),
    "biases": st.sampled_from(["", "q", "qkvo", "qvo", "kk", "x"]),
    "output": st.booleans(),
    "qk_norm": st.none() | st.sampled_from(["rms", "layer", "l2"]),
}


@settings(max_examples=300, deadline=None)
@given(
    layout=st.sampled_from([*LAYOUTS, "narow"]),
    width=st.sampled_from([0, 7, 12]),
    num_heads=st.integers(0, 6),
    fields=st.fixed_dictionaries({}, optional=FIELDS),
)
def test_any_spec_works_or_says_what_to_change(layout, width, num_heads, fields):
    names, said = ["layout", "width", "num_heads", *FIELDS], ""
    try:
        spec = HeadSpec(layout, width, num_heads, **fields)
    except ValueError as error:
        said = str(error)
    if said:
        assert any(name in said for name in names)
        return
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in spec.shapes.items()}
    sizes = spec.sizes
    x, y, z = (jax.ShapeDtypeStruct((2, 3, sizes[a]), "float32") for a in "DEW")
    for order, cost in contraction_orders(spec, 2, 3, cross=True).items():
        run = lambda w, x, y, z, order=order: multi_head_attention(
            w, x, y, value_context=z, spec=spec, order=order
        )
        if isinstance(cost, int):
            assert jax.eval_shape(run, shapes, x, y, z).shape == (2, 3, sizes["O"])
        else:
            with pytest.raises(ValueError, match="use 'factored'"):
                jax.eval_shape(run, shapes, x, y, z)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (2, 5, 7)}, "x .2, 5, 7. must end in width 6"),
        ({"x": (5, 6)}, "x .5, 6. must be .batch, length, width."),
        ({"context": (2, 4, 7)}, "context .2, 4, 7. must end in key_width 6"),
        ({"context": (3, 4, 6)}, "context .3, 4, 6. and x .2, 5, 6. must have one batch size"),
        ({"value_context": (2, 3, 6)}, "value_context .2, 3, 6. must be as long as"),
        ({"q": (6, 2, 4)}, r"weight q has shape \(6, 2, 4\), the spec asks for \(6, 2, 3\)"),
        ({"k_bias": (2, 3)}, "weights .*k_bias.* are not those of the spec"),
    ],
)
def test_arrays_that_do_not_fit(changes, message):
    spec = HeadSpec("standard", 6, 2)
    w = {name: jnp.ones(shape) for name, shape in spec.shapes.items()}
    arrays = {"x": jnp.ones((2, 5, 6)), "context": None, "value_context": None}
    for name, shape in changes.items():
        (arrays if name in arrays else w)[name] = jnp.ones(shape)
    with pytest.raises(ValueError, match=message):  # where it is on, jaxtyping is first
        check_arrays(w, spec=spec, **arrays)


CONFIG = ModelConfig(vocab_size=19, width=12, num_heads=3)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("To be", "ids, not the text 'To be': encode it, for a model of bytes by jnp.array"),
        (["To", "be"], "ids, not the text 'To'"),
        (b"To be", "ids, not the text"),
        ([3, 1, 4], r"tokens \(3,\) must be \[batch, length\]; one text is tokens\[None\]"),
        (jnp.ones((2, 3, 4), int), r"tokens \(2, 3, 4\) must be \[batch, length\]$"),
        (
            [[3.0, 1.0]],
            r"float32 \(1, 2\): ids are integers .*, mixtures of .* 19\]",
        ),
        ([[True, False]], r"tokens of bool \(1, 2\): ids are integers"),
        (jnp.ones((1, 2, 18)), r"tokens of float32 \(1, 2, 18\)"),
        (jnp.ones((1, 2, 19)), "mixtures of words; text goes on from ids"),
    ],
)
def test_tokens_that_are_none(tokens, message):
    with pytest.raises(ValueError, match=message):
        check_ids(CONFIG.build(), tokens)


def test_what_a_user_sees():
    model = dataclasses.replace(CONFIG, num_layers=1).build()
    tokens, key = jnp.array([[3, 1]]), jax.random.key(0)
    variables = jax.jit(model.init)(key, tokens)
    calls = {
        r"tokens \(2,\) must be \[batch, length\]; one text is tokens\[None\]": (
            lambda: model.apply(variables, tokens[0])
        ),
        r"tokens of float32 \(1, 2\): ids are integers": (
            lambda: model.apply(variables, tokens.astype(float))
        ),
        "tokens are ids, not the text 'To be'": (
            lambda: generate(model, variables["params"], "To be", 1)
        ),
        r"init_heads\(key, spec\): the key comes first; spec is a PRNGKeyArray": (
            lambda: init_heads(HeadSpec("standard", 6, 2), key)
        ),
    }
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    texts = [generate(model, p, [[3, 1]], 2).tolist() for p in (variables, variables["params"])]
    assert texts[0] == texts[1]
