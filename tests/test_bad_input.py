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
from attnlab.pretrained import load as load_pretrained
from attnlab.pretrained import published_config
from attnlab.sharing import Plan
from experiments import config

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
        run = lambda w, x, *yz, order=order: multi_head_attention(w, x, layout, yz, order=order)
        if isinstance(cost, int):
            assert jax.eval_shape(run, params, x, y, z).shape == (2, 3, layout.size("out_width"))
        else:
            with pytest.raises(ValueError, match=r"use order='factored'|cannot run"):
                jax.eval_shape(run, params, x, y, z)


STANDARD = heads.Standard(width=6, num_heads=2)
X = jnp.ones((2, 5, 6))
WEIGHTS = {name: jnp.ones(shape) for name, shape in heads.weight_shapes(STANDARD).items()}
ONES = lambda *shape: jnp.ones(shape)
WRONG_CALLS = [
    # (arguments and weights, exception, what the message has)
    ({"x": ONES(2, 5, 7)}, ValueError, r"x \(2, 5, 7\).* 6"),
    ({"x": ONES(5, 6)}, ValueError, r"x \(5, 6\)"),
    ({"x": ONES(0, 5, 6)}, ValueError, r"x \(0, 5, 6\) must be .* no axis of size 0"),
    ({"context": ONES(2, 4, 7)}, ValueError, r"\(2, 4, 7\).* 6"),
    ({"context": ONES(3, 4, 6)}, ValueError, r"\(3, 4, 6\).*batch"),
    ({"context": (X, ONES(2, 3, 6))}, ValueError, r"\(2, 3, 6\).*as long"),
    ({"context": (X, X, X)}, ValueError, "or a pair .*, not 3 arrays"),
    ({"rotary": ONES(4, 1)}, ValueError, r"rotary \(4, 1\) must be angles .* of the 5 tokens"),
    ({"rotary": True}, ValueError, r"rotary \(\) must be angles"),
    ({"q": ONES(6, 2, 4)}, ValueError, r"weight .q. .*\(6, 2, 4\).*\(6, 2, 3\)"),
    ({"k_bias": ONES(2, 3)}, ValueError, "k_bias"),
    ({"q": [1.0]}, ValueError, "weight 'q' must be an array, not a list"),
    ({"masks": None}, TypeError, "unknown keyword 'masks': did you mean 'mask'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_CALLS)
def test_arrays_that_do_not_fit(changes, error, message):
    weights = WEIGHTS | {name: a for name, a in changes.items() if name in ("q", "k_bias")}
    inputs = {"x": X} | {name: a for name, a in changes.items() if name not in weights}
    with pytest.raises(error, match=message):
        multi_head_attention(weights, inputs.pop("x"), STANDARD, **inputs)


CONFIG = ModelConfig(vocab_size=19, width=12, num_layers=2, heads=heads.Standard(num_heads=3))
TOKENS = jnp.array([[3, 1]])
IDS = [
    # tokens that are no ids
    ("To be", "ids, not the text 'To be'"),
    (["To", "be"], "ids, not the text 'To'"),
    (b"To be", "ids, not the text"),
    ([3, 1, 4], r"tokens \(3,\) must be \[batch, length\]"),
    (jnp.ones((2, 3, 4), int), r"tokens \(2, 3, 4\) must be \[batch, length\]"),
    ([[3.0, 1.0]], r"float32 and shape \(1, 2\): ids are integers"),
    ([[True, False]], r"tokens of dtype bool and shape \(1, 2\): ids are integers"),
    (jnp.ones((1, 2, 18)), r"float32 and shape \(1, 2, 18\)"),
    (jnp.ones((1, 2, 19)), "mixtures"),
]
ORDER = r"the arguments are \(params, tokens, config\)"


def other(**fields):
    return dataclasses.replace(CONFIG, **fields)


def at(positions, place, **inputs):
    """Runs a model whose tokens are at this place; in a cache if `inputs` says so."""
    config = other(positions=positions, max_len=7)
    params = jax.tree.map(lambda a: jnp.ones(a.shape), models.param_shapes(config))
    cache = config.init_cache(1, 4) if inputs else None
    return run_model(params, TOKENS, config, ModelInputs(positions=jnp.array(place), cache=cache))


def types(plan):
    return tuple((1, LayerOverrides(window=window, sharing=plan)) for window in (2, 3))


def prefill_cache(variables, num_layers):
    """The last layer of the cache would be that of every later one."""
    return prefill(variables, TOKENS, CONFIG, other(num_layers=num_layers).init_cache(1, 5))


def deeper(plan):
    """Parameters and FLOPs would be those of layers that do not run."""
    return other(num_layers=4, sharing=plan)


ANOTHER_MODEL = "that of another model: it needs 2 layers"
THREE_LAYERS = "plan is one for 3 layers, not for 4"
NO_CACHE = r"must be that of init_cache\(layout, batch, size\)"
A_CONFIG = "takes a ModelConfig.*attnlab.heads."
A_LAYOUT = "takes a head layout.* attnlab."
CALLS = [
    (lambda v: prefill_cache(v, 1), ANOTHER_MODEL),
    (lambda v: prefill_cache(v, 3), ANOTHER_MODEL),
    (lambda v: deeper("attention=0,0,0 ffn=0,1,2"), THREE_LAYERS),
    (lambda v: deeper("0,1,1"), THREE_LAYERS),
    (lambda v: deeper(Plan(attention=(0, 1, 0), ffn=(0, 1, 0))), THREE_LAYERS),
    (lambda v: other(num_layers=10, layer_types=types("0,1,1")), "for 3 layers, not for 5"),
    # A negative one would be counted from the end of the table.
    (lambda v: at(models.Learned(), [0, -1]), r"position -1 at \[1\] is out of range: .* 0 to 6"),
    (lambda v: at(models.Sinusoidal(), [[7, 0]]), r"position 7 at \[0, 0\] is out of range"),
    (lambda v: at(models.Relative(), [0, 1], cache=True), r"tokens of the cache.* leave pos"),
    (lambda v: at(models.specs.Alibi(), [0, 1], cache=True), r"tokens of the cache.* leave pos"),
    (lambda v: run_model([[3, 1]], v, CONFIG), ORDER),
    (lambda v: generate([[3, 1]], v, CONFIG, 2), ORDER),
    (lambda v: generate(v, [[3, 1]], CONFIG.build(), 2), ORDER),
    (lambda v: generate(v, TOKENS, CONFIG, 2, sampling="greedy"), r"temperature=0\), not 'greedy'"),
    (lambda v: flops_per_token(CONFIG, 0), "length must be a whole number of at least 1, not 0"),
    (lambda v: flops_per_token(STANDARD, 5), f"{A_CONFIG}flops_per_token"),
    (lambda v: models.num_parameters(STANDARD), f"{A_CONFIG}num_parameters"),
    (lambda v: heads.flops_per_token(CONFIG, 5), f"{A_LAYOUT}flops_per_token"),
    (lambda v: heads.num_parameters(CONFIG), f"{A_LAYOUT}num_parameters"),
    (lambda v: heads.init_cache(STANDARD, 2, -1), "batch 2 and size -1: both must be at least 1"),
    (lambda v: heads.decode(WEIGHTS, X, STANDARD, None), NO_CACHE),
    # Where names are fixed a reference to Python is unknown.
    (lambda v: published_config("math:pi"), "math:pi.*known"),
    (lambda v: load_pretrained("no/folder", param_dtype="math:pi"), "math:pi.*known"),
    (lambda v: config.parse("math:pi", {"tiny": False}), "math:pi.*known"),
    (lambda v: config.parse("model=math:pi", {"model": ("small", "large")}), "math:pi.*known"),
]


@pytest.fixture(scope="module")
def variables():
    return CONFIG.build().init(jax.random.key(0), TOKENS)


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_calls_that_do_not_fit(call, message, variables):
    with pytest.raises((ValueError, TypeError), match=message):
        call(variables)


@pytest.mark.parametrize(("tokens", "message"), IDS)
def test_tokens_that_are_no_ids(tokens, message, variables):
    with pytest.raises((ValueError, TypeError), match=message):
        generate(variables, tokens, CONFIG, 2)


def test_params_may_stand_in_variables(variables):
    """Also in `generate`: see `test_decoding.py`."""
    both = variables, variables["params"]
    assert jnp.array_equal(*(run_model(p, TOKENS, CONFIG).logits for p in both))
