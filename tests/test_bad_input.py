"""Whatever sizes are asked for: either heads that work, or one error that names what to change."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import ModelConfig, contraction_orders, generate, heads, models, multi_head_attention
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


STANDARD = heads.Standard(width=6, num_heads=2)
X = jnp.ones((2, 5, 6))
ONES = lambda *shape: jnp.ones(shape)
WRONG_CALLS = [
    # (arguments and weights, exception, what the message has)
    ({"x": ONES(2, 5, 7)}, ValueError, r"x \(2, 5, 7\).* 6"),
    ({"x": ONES(5, 6)}, ValueError, r"x \(5, 6\)"),
    ({"x": ONES(0, 5, 6)}, ValueError, r"x \(0, 5, 6\) must be .* no axis of size 0"),
    ({"x": ONES(2, 0, 6)}, ValueError, r"x \(2, 0, 6\) must be .* no axis of size 0"),
    ({"context": ONES(2, 4, 7)}, ValueError, r"\(2, 4, 7\).* 6"),
    ({"context": ONES(3, 4, 6)}, ValueError, r"\(3, 4, 6\).*batch"),
    ({"context": (X, ONES(2, 3, 6))}, ValueError, r"\(2, 3, 6\).*as long"),
    ({"context": (X, X, X)}, ValueError, "or a pair .*, not 3 arrays"),
    ({"rotary": ONES(4, 1)}, ValueError, r"rotary \(4, 1\) must be angles .* of the 5 tokens"),
    ({"rotary": True}, ValueError, r"rotary \(\) must be angles"),
    ({"q": ONES(6, 2, 4)}, ValueError, r"weight .q. .*\(6, 2, 4\).*\(6, 2, 3\)"),
    ({"k_bias": ONES(2, 3)}, ValueError, "k_bias"),
    ({"q": [1.0]}, TypeError, "weight 'q' must be an array, not a list"),
    ({"masks": None}, TypeError, "unknown keyword 'masks': did you mean 'mask'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_CALLS)
def test_arrays_that_do_not_fit(changes, error, message):
    weights = {name: jnp.ones(shape) for name, shape in heads.weight_shapes(STANDARD).items()}
    weights |= {name: a for name, a in changes.items() if name in ("q", "k_bias")}
    inputs = {"x": X} | {name: a for name, a in changes.items() if name not in weights}
    with pytest.raises(error, match=message):
        multi_head_attention(weights, inputs.pop("x"), STANDARD, **inputs)


def test_caches_that_are_none():
    params = heads.init(jax.random.key(0), STANDARD)
    cache = heads.init_cache(STANDARD, 2, 7)
    for wrong in (None, {name: a for name, a in cache.items() if name != "length"}):
        with pytest.raises(ValueError, match=r"must be that of init_cache\(layout, batch, size\)"):
            heads.decode(params, X, STANDARD, wrong)
    with pytest.raises(ValueError, match="batch 2 and size -1: both must be at least 1"):
        heads.init_cache(STANDARD, 2, -1)


CONFIG = ModelConfig(vocab_size=19, width=12, num_layers=2, heads=heads.Standard(num_heads=3))
TOKENS = jnp.array([[3, 1]])


@pytest.fixture(scope="module")
def variables():
    return CONFIG.build().init(jax.random.key(0), TOKENS)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("To be", "To be"),
        (["To", "be"], "not a valid JAX array type"),
        ([3, 1, 4], r"tokens \(3,\) must be \[batch, length\]"),
        (jnp.ones((2, 3, 4), int), r"tokens \(2, 3, 4\) must be \[batch, length\]"),
        ([[3.0, 1.0]], r"float32 and shape \(1, 2\): ids are integers"),
        ([[True, False]], r"tokens of dtype bool and shape \(1, 2\): ids are integers"),
        (jnp.ones((1, 2, 18)), r"float32 and shape \(1, 2, 18\)"),
        (jnp.ones((1, 2, 19)), "mixtures"),
    ],
)
def test_tokens_that_are_no_ids(tokens, message, variables):
    with pytest.raises((ValueError, TypeError), match=message):
        generate(variables, tokens, CONFIG, 2)
    if isinstance(tokens, jax.Array) and message != "mixtures":
        with pytest.raises(ValueError, match=message):
            CONFIG.build().apply(variables, tokens)


def test_params_may_stand_in_variables(variables):
    both = variables, variables["params"]
    texts = [generate(p, TOKENS, CONFIG, 2).tolist() for p in both]
    assert texts[0] == texts[1]
    assert jnp.array_equal(*(run_model(p, TOKENS, CONFIG).logits for p in both))


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
def test_a_cache_of_another_number_of_layers(num_layers, variables):
    """JAX takes the last layer of the cache for every later one."""
    cache = dataclasses.replace(CONFIG, num_layers=num_layers).init_cache(1, 5)
    for call in (CONFIG.build().apply, lambda p, t, cache: prefill(p, t, CONFIG, cache)):
        with pytest.raises(ValueError, match="that of another model: it needs 2 layers"):
            call(variables, TOKENS, cache=cache)


def test_parameters_of_another_plan(variables):
    shared = dataclasses.replace(CONFIG, sharing="albert")
    with pytest.raises(ValueError, match="params are not those of this model"):
        run_model(variables["params"], TOKENS, shared)


@pytest.mark.parametrize("positions", [models.Learned(), models.Sinusoidal()])
def test_positions_outside_the_table(positions):
    """A negative one would be counted from the end of the table."""
    config = dataclasses.replace(CONFIG, positions=positions, max_len=7)
    variables = config.build().init(jax.random.key(0), TOKENS)
    for wrong, words in (([0, -1], r"-1 at \[1\]"), ([[7, 0]], r"7 at \[0, 0\]")):
        with pytest.raises(ValueError, match=f"position {words} is out of range: .* 0 to 6"):
            run_model(variables, TOKENS, config, ModelInputs(positions=jnp.array(wrong)))


@pytest.mark.parametrize("positions", [models.Relative(), models.specs.Alibi()])
def test_positions_of_tokens_in_a_cache_are_not_known(positions):
    config = dataclasses.replace(CONFIG, positions=positions, max_len=7)
    inputs = ModelInputs(positions=jnp.arange(2), cache=config.init_cache(1, 4))
    shapes = models.param_shapes(config)
    with pytest.raises(ValueError, match=r"distances from the tokens of the cache.* leave pos"):
        jax.eval_shape(lambda params: run_model(params, TOKENS, config, inputs), shapes)


def test_arguments_in_another_order(variables):
    for call in (
        lambda: run_model([[3, 1]], variables, CONFIG),
        lambda: generate([[3, 1]], variables, CONFIG, 2),
        lambda: generate(variables, [[3, 1]], CONFIG.build(), 2),
    ):
        with pytest.raises(TypeError, match=r"the arguments are \(params, tokens, config\)"):
            call()
    with pytest.raises(TypeError, match=r"Sampling\(temperature=0\), not 'greedy'"):
        generate(variables, TOKENS, CONFIG, 2, sampling="greedy")
    with pytest.raises(ValueError, match="length must be a whole number of at least 1, not 0"):
        flops_per_token(CONFIG, 0)


@pytest.mark.parametrize("name", ["num_parameters", "flops_per_token"])
def test_costs_of_heads_and_of_models(name):
    lengths = (5,) * (name == "flops_per_token")
    with pytest.raises(TypeError, match=f"takes a ModelConfig.* attnlab.heads.{name}"):
        getattr(models, name)(STANDARD, *lengths)
    with pytest.raises(TypeError, match=f"takes a head layout.* attnlab.{name}"):
        getattr(heads, name)(CONFIG, *lengths)
