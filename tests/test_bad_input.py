"""Whatever sizes are asked for: either heads that work, or one error that names what to change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import ModelConfig, contraction_orders, generate, heads, models, multi_head_attention
from attnlab.attention import dot_product_attention
from attnlab.heads import CallSizes
from attnlab.models import LayerOverrides, flops_per_token, prefill
from attnlab.models.forward import ModelInputs, run_model
from attnlab.sharing import Plan

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


@pytest.mark.parametrize(
    "plan", ["attention=0,0,0 ffn=0,1,2", "0,1,1", Plan(attention=(0, 1), ffn=(0, 1))]
)
def test_a_plan_for_another_number_of_layers(plan):
    """Its parameters and FLOPs would be those of layers that do not run."""
    with pytest.raises(ValueError, match=r"plan is one for \d layers, not for 4"):
        dataclasses.replace(CONFIG, num_layers=4, sharing=plan)
    types = tuple((1, LayerOverrides(window=w, sharing=plan)) for w in (2, 3))
    with pytest.raises(ValueError, match=r"plan is one for \d layers, not for 5"):
        dataclasses.replace(CONFIG, num_layers=10, layer_types=types)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_cache_of_another_number_of_layers(num_layers):
    """JAX takes the last layer of the cache for every later one."""
    config = dataclasses.replace(CONFIG, num_layers=2)
    tokens = jnp.array([[3, 1]])
    variables = config.build().init(jax.random.key(0), tokens)
    cache = dataclasses.replace(config, num_layers=num_layers).init_cache(1, 5)
    for call in (config.build().apply, lambda p, t, cache: prefill(p, t, config, cache)):
        with pytest.raises(ValueError, match="that of another model: it needs 2 layers"):
            call(variables, tokens, cache=cache)


def test_parameters_of_another_plan():
    config = dataclasses.replace(CONFIG, num_layers=2)
    variables = config.build().init(jax.random.key(0), jnp.array([[3, 1]]))
    shared = dataclasses.replace(config, sharing="albert")
    with pytest.raises(ValueError, match="params are not those of this model"):
        run_model(variables["params"], [[3, 1]], shared)
    ours = [run_model(p, [[3, 1]], config).logits for p in (variables, variables["params"])]
    assert jnp.array_equal(*ours)


@pytest.mark.parametrize("positions", [models.Learned(), models.Sinusoidal()])
def test_positions_outside_the_table(positions):
    """A negative one would be counted from the end of the table."""
    config = dataclasses.replace(CONFIG, positions=positions, max_len=7)
    variables, tokens = config.build().init(jax.random.key(0), jnp.array([[3, 1]])), [[3, 1]]
    with pytest.raises(ValueError, match=r"position -1 at \[1\] is out of range: .* 0 to 6"):
        run_model(variables, tokens, config, ModelInputs(positions=jnp.array([0, -1])))
    with pytest.raises(ValueError, match=r"position 7 at \[0, 0\] is out of range: .* 0 to 6"):
        run_model(variables, tokens, config, ModelInputs(positions=jnp.array([[7, 0]])))


@pytest.mark.parametrize("positions", [models.Relative(), models.specs.Alibi()])
def test_positions_of_tokens_in_a_cache_are_not_known(positions):
    config = dataclasses.replace(CONFIG, positions=positions, max_len=7)
    inputs = ModelInputs(positions=jnp.arange(2), cache=config.init_cache(1, 4))
    shapes = models.param_shapes(config)
    with pytest.raises(ValueError, match=r"distances from the tokens of the cache.* leave pos"):
        jax.eval_shape(lambda params: run_model(params, [[3, 1]], config, inputs), shapes)


def test_is_causal_is_true_or_false():
    q = jnp.ones((1, 3, 2, 4))
    for wrong in ("False", 1.0, jnp.array([True])):
        with pytest.raises(TypeError, match="is_causal must be True or False"):
            dot_product_attention(q, q, q, is_causal=wrong)
    with pytest.raises(TypeError, match="is_causal must be True or False, which jit keeps static"):
        jax.jit(lambda c: dot_product_attention(q, q, q, is_causal=c))(True)
    assert dot_product_attention(q, q, q, is_causal=np.True_).shape == q.shape


def test_arguments_in_another_order():
    variables = CONFIG.build().init(jax.random.key(0), jnp.array([[3, 1]]))
    for call in (
        lambda: run_model([[3, 1]], variables, CONFIG),
        lambda: generate([[3, 1]], variables, CONFIG, 2),
        lambda: generate(variables, [[3, 1]], CONFIG.build(), 2),
    ):
        with pytest.raises(TypeError, match=r"the arguments are \(params, tokens, config\)"):
            call()
    with pytest.raises(TypeError, match=r"Sampling\(temperature=0\), not 'greedy'"):
        generate(variables, [[3, 1]], CONFIG, 2, sampling="greedy")
    with pytest.raises(ValueError, match="length must be a whole number of at least 1, not 0"):
        flops_per_token(CONFIG, 0)


@pytest.mark.parametrize("name", ["num_parameters", "flops_per_token"])
def test_costs_of_heads_and_of_models(name):
    lengths = (5,) * (name == "flops_per_token")
    with pytest.raises(TypeError, match=f"takes a ModelConfig.* attnlab.heads.{name}"):
        getattr(models, name)(STANDARD, *lengths)
    with pytest.raises(TypeError, match=f"takes a head layout.* attnlab.{name}"):
        getattr(heads, name)(CONFIG, *lengths)


NARROW_TIED = heads.NarrowTied(width=6, num_heads=2)
STANDARD = heads.Standard(width=6, num_heads=2)
X = jnp.ones((2, 5, 6))
WRONG_INPUTS = {
    "no batch": (
        NARROW_TIED,
        jnp.ones((0, 5, 6)),
        {},
        r"x \(0, 5, 6\) must be .* no axis of size 0",
    ),
    "no tokens": (
        heads.Differential(width=6, num_heads=2),
        jnp.ones((2, 0, 6)),
        {},
        r"x \(2, 0, 6\) must be .* no axis of size 0",
    ),
    "three contexts": (STANDARD, X, {"context": (X, X, X)}, "or a pair .*, not 3 arrays"),
    "angles of other tokens": (
        STANDARD,
        X,
        {"rotary": jnp.ones((4, 1))},
        r"rotary \(4, 1\) must be angles .* of the 5 tokens",
    ),
    "no angles": (STANDARD, X, {"rotary": True}, r"rotary \(\) must be angles"),
}


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_inputs_that_no_layout_takes(case):
    layout, x, inputs, message = WRONG_INPUTS[case]
    params = heads.init(jax.random.key(0), layout)
    with pytest.raises(ValueError, match=message):
        multi_head_attention(params, x, layout, **inputs)


def test_caches_that_are_none():
    params = heads.init(jax.random.key(0), STANDARD)
    cache = heads.init_cache(STANDARD, 2, 7)
    for wrong in (None, {name: a for name, a in cache.items() if name != "length"}):
        with pytest.raises(ValueError, match=r"must be that of init_cache\(layout, batch, size\)"):
            heads.decode(params, X, STANDARD, wrong)
    with pytest.raises(ValueError, match="batch 2 and size -1: both must be at least 1"):
        heads.init_cache(STANDARD, 2, -1)


def test_weights_as_lists():
    params = heads.init(jax.random.key(0), STANDARD)
    with pytest.raises(TypeError, match="weight 'q' must be an array, not a list"):
        multi_head_attention(params | {"q": params["q"].tolist()}, X, STANDARD)
