"""Contract of every head layout and extra, of the package and of `outside_layouts.py`."""

import contextlib
import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import layout_cases
import numpy as np
import pytest
from conftest import assert_close, deep, product_flops
from head_definitions import DEFINITIONS, by_hand
from layout_cases import CASES, SELF, make

from attnlab import heads
from attnlab.heads import EXTRAS, HEAD_VALUES, LAYOUTS, Gate, multi_head_attention, positions
from attnlab.heads.params import normal
from attnlab.heads.weights import Stage
from attnlab.models import FFN, Attention, ModelConfig
from attnlab.models.ffn import init_ffn
from attnlab.tap import capture

FACTORED = functools.partial(multi_head_attention, order="factored")


def context(layout, arrays):
    """The value input is a second text only where a layout has a projection for it."""
    two_texts = hasattr(layout, "value_width") and not getattr(layout, "tie", "")
    return (arrays.y, arrays.z) if two_texts else arrays.y


def test_every_layout_and_extra_has_a_case_and_a_definition():
    assert {layout.name for layout in CASES.values()} == LAYOUTS.keys() == DEFINITIONS.keys()
    used = {type(extra) for layout in CASES.values() for extra in layout.extras}
    assert used == set(EXTRAS.values())


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradient_equal_the_definition(name, x64):
    """Under vmap without positions, under scan with rotary ones, in a layer whose index is traced.
    The gradient is checked along one direction."""
    layout = CASES[name]
    arrays = make(layout, jnp.float64)
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=(2, 7, layout.size("out_width")))
    direction = {n: rng.normal(size=a.shape) for n, a in arrays.params.items()}
    rotary, half = None, (layout.rotary_size or 0) // 2
    if half:
        rotary = tuple(positions.rotary_angles(3 + jnp.arange(n), 2 * half) for n in (7, 8))

    @jax.jit
    def all_at_once(layer, *arrays):
        def run(params, x, y, z, rotary=None):
            return FACTORED(params, x, layout, (y, z), layer=layer, rotary=rotary)

        many = jax.tree.map(lambda a: jnp.stack([a, -a]), arrays)
        scanned = jax.lax.scan(lambda carry, one: (carry, run(*one, rotary)), None, many)[1]
        _, pull = jax.vjp(lambda params: run(params, *arrays[1:], rotary), arrays[0])
        slope = sum(jnp.sum(g * direction[n]) for n, g in pull(jnp.asarray(cotangent))[0].items())
        return jax.vmap(run)(*many), scanned, slope

    def definition(step):
        moved = {n: a + step * direction[n] for n, a in arrays.params.items()}
        return by_hand(layout, moved, *arrays[1:], layer=2, rotary=rotary)

    mapped, scanned, slope = all_at_once(2, *arrays)
    for i, inputs in enumerate((arrays, jax.tree.map(jnp.negative, arrays))):
        assert_close(mapped[i], by_hand(layout, *inputs, layer=2))
        assert_close(scanned[i], by_hand(layout, *inputs, layer=2, rotary=rotary))
    expected = np.sum(cotangent * (definition(1e-6) - definition(-1e-6))) / 2e-6
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["bias", "mask", "sink"])
@pytest.mark.parametrize("name", ["grouped", "differential", "differential with extras"])
def test_an_option_of_each_head_is_what_this_head_has(name, option, x64):
    """In both softmax distributions of a differential head."""
    layout, rng = CASES[name], np.random.default_rng(1)
    if option == "sink":
        layout = dataclasses.replace(layout, extras=())
    arrays, bias = make(layout, jnp.float64), rng.normal(size=(layout.num_heads, 7, 8))
    sink = 20 * np.arange(float(layout.num_heads))[:, None, None] - 30
    given = {option: {"bias": bias, "mask": bias < 0.2, "sink": sink}[option]}
    got = jax.jit(lambda p, x, *context: FACTORED(p, x, layout, context, **given))(*arrays)
    assert_close(got, by_hand(layout, *arrays, **given))


ONE_WIDTH = heads.Bilinear(width=12, num_heads=3)
MADE_BEFORE = [
    "latent", "grouped and tied", "absorbed", "keys are values", "low-rank queries",
    "tensor product, one text", "bilinear",
]  # fmt: skip


@pytest.mark.parametrize("name", MADE_BEFORE)
def test_keys_and_values_that_were_made_before(name, x64):
    """Of one input, or of two, in every form that reads them; None takes one of these. What would
    make keys and values of x is not used: it may hold NaN."""
    layout = ONE_WIDTH if name == "bilinear" else CASES[name]
    params, x, y, z = make(layout, jnp.float64)
    unused = {n for n, w in layout.weights().items() if set(w.stages) == {"project_kv"}}
    spoilt = {n: a * jnp.nan if n in unused else a for n, a in params.items()}

    @jax.jit
    def run(params, spoilt, x, context):
        kv = heads.project_kv(params, context, layout)
        sizes = heads.CallSizes(2, 7, 8, num_new=0, entries=tuple(kv))
        costs = heads.contraction_orders(layout, sizes)
        orders = [order for order, cost in costs.items() if not isinstance(cost, str)]
        call = functools.partial(multi_head_attention, spoilt, x, layout, kv=kv)
        return [call(order=order) for order in (None, *orders)]

    for context, of_values in [((y, z), z)] + [(y, y)] * (name in SELF):
        made = run(params, spoilt, x, context)
        assert len(made) >= 2
        for got in made:
            assert_close(got, by_hand(layout, params, x, y, of_values), loosen=100)


def test_keys_that_were_made_before_need_no_angles():
    params, x, y, _ = make(layout := CASES["grouped"])
    rotary = tuple(positions.rotary_angles(jnp.arange(n), 4) for n in (7, 8))
    kv = heads.project_kv(params, y, layout, rotary[1])
    got = FACTORED(params, x, layout, kv=kv, rotary=rotary)
    np.testing.assert_array_equal(got, FACTORED(params, x, layout, y, rotary=rotary))


def test_a_standard_deviation_of_zero_is_zero():
    """Of the matrices; norm scales are 1, and a weight with a deviation of its own keeps it."""
    layout = heads.Differential(width=12, num_heads=3, biases=("q", "o"))
    params = heads.init(jax.random.key(0), layout, std=0.0)
    zeros = {name for name, a in params.items() if not np.any(a)}
    assert zeros == {"q", "k", "v", "o", "q_bias", "o_bias"}
    ffn = init_ffn(jax.random.key(0), 4, FFN(width=6), std=0.0)
    assert not any(np.any(a) for a in ffn.values())


@pytest.mark.unchecked  # the annotation says array
def test_a_head_mask_may_be_a_list():
    params, x, y, z = make(layout := CASES["free sizes"])
    gates = [1.0, 0.0, 0.5, -2.0]
    call = functools.partial(multi_head_attention, params, x, layout, (y, z))
    np.testing.assert_array_equal(call(head_mask=gates), call(head_mask=jnp.array(gates)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_output_has_the_dtype_of_x(name, dtype):
    layout = CASES[name]
    arrays = make(layout)
    inputs = (a.astype(dtype) for a in arrays[1:])
    out = jax.eval_shape(lambda x, y, z: FACTORED(arrays.params, x, layout, (y, z)), *inputs)
    assert (out.dtype, out.shape) == (dtype, (2, 7, layout.size("out_width")))


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_flops_by_formula_are_those_of_the_program(name):
    layout = CASES[name]
    arrays = make(layout)
    params = arrays.params
    assert heads.num_parameters(layout) == sum(a.size for a in params.values())
    run = functools.partial(FACTORED, layout=layout, implementation="dense")

    traced = jax.make_jaxpr(run)(params, arrays.x, context=context(layout, arrays)).jaxpr
    assert product_flops(traced) == heads.call_flops(layout, 2, 7, 8, cross=True)
    if name not in SELF:
        return
    traced = jax.make_jaxpr(run)(params, arrays.x).jaxpr
    flops = heads.call_flops(layout, 2, 7, 7)
    assert product_flops(traced) == flops == 2 * 7 * heads.flops_per_token(layout, 7)
    for one in [layout, *(step.layout for step in layout.chain[0])]:
        assert decoding_flops(one) == 2 * heads.call_flops(one, 1, 1, 9, num_new=1), one


def decoding_flops(layout):
    """Of one token of each of two texts, with 8 others in the cache."""

    def step(params, x, cache):
        options = {"order": "factored", "implementation": "dense"}
        return heads.decode(params, x, layout, cache, is_causal=False, **options)[0]

    params, x, *_ = make(layout, length=1)
    return product_flops(jax.make_jaxpr(step)(params, x, heads.init_cache(layout, 2, 9)).jaxpr)


FORMS = [name for name in CASES if CASES[name].chain[0]]


@pytest.mark.parametrize("name", deep(FORMS, *FORMS[::2]))
def test_every_form_is_the_same_function(name, x64):
    """With the same values of heads, and gradients in the weights of the layout; those of latents
    with positions."""
    layout, rotary = CASES[name], None
    arrays = make(layout, jnp.float64)
    if layout.name == "latent":
        rotary = tuple(positions.rotary_angles(jnp.arange(n), layout.rotary_size) for n in (7, 8))
    sizes = heads.CallSizes(2, 7, 8, cross=True, rotary=rotary is not None)
    orders = heads.contraction_orders(layout, sizes)
    names = [order for order, cost in orders.items() if isinstance(cost, int)]
    assert len(names) == 1 + len(layout.chain[0])

    @jax.jit
    def all_forms(params, *inputs):
        def loss(params, order):
            call = functools.partial(
                multi_head_attention, order=order, is_causal=True, rotary=rotary
            )
            made = capture(call, params, inputs[0], layout, inputs[1:], names=tuple(HEAD_VALUES))
            return jnp.sum(jnp.sin(made[0])), made

        return [jax.grad(loss, has_aux=True)(params, order) for order in names]

    (grad, made), *others = all_forms(*arrays)
    assert_close(made[0], by_hand(layout, *arrays, mask=np.tri(7, 8)[None] > 0, rotary=rotary))
    for other_grad, other in others:
        assert_close(other, made, loosen=100)
        # The gradient of a key bias is zero up to rounding: the softmax does not depend on it.
        largest = max(np.abs(a).max() for a in grad.values())
        for weight, a in grad.items():
            assert np.abs(a - other_grad[weight]).max() <= 1e-9 * largest, weight


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("batch", "num_queries", "num_keys", "order"),
    [(16, 64, 64, "absorbed"), (1, 2, 2, "factored"), (16, 1, 64, "absorbed")],
)
def test_the_cheapest_form_is_chosen(batch, num_queries, num_keys, order):
    layout = heads.Wide(width=64, num_heads=4)
    params, x, *_ = make(layout, batch=batch, length=num_queries)
    y = jnp.ones((batch, num_keys, 64))
    found = heads.explain_heads(layout, x, context=y)
    costs = {name: cost for name, cost in found["order"].items() if type(cost) is int}
    assert found["chosen"] == {"order": order}
    assert min(costs, key=costs.get) == order
    call = functools.partial(multi_head_attention, layout=layout, implementation="dense")
    assert product_flops(jax.make_jaxpr(call)(params, x, context=y).jaxpr) == costs[order]


def test_heads_without_a_softmax_are_explained_without_a_backend():
    kind = type("Own", (heads.Standard,), {"attend": lambda self, params, q, k, v, call: q})
    found = heads.explain_heads(kind(width=12, num_heads=3), jnp.ones((2, 5, 12)))
    assert (found["chosen"], found["implementation"]) == ({"order": "factored"}, {})
    attention = Attention(implementation="xla")
    assert ModelConfig(width=12, heads=kind(num_heads=3), attention=attention).layout.num_heads == 3


BIASED = heads.Standard(width=8, num_heads=2, biases=("k",))


@pytest.mark.parametrize(
    ("kind", "changes", "orders", "reason"),
    [
        (heads.Standard, {"qk_norm": heads.HeadNorm()}, ["factored"], "qk_norm"),
        (heads.Standard, {"biases": ("k",), "extras": (heads.Sink(),)}, ["factored"], "sink"),
        (heads.Standard, {"extras": (Gate("element"),)}, ["factored", "bilinear"], "gate"),
        # Their keys and values stand beside W_K x and W_V x, which the other forms do not make.
        *(
            (kind, {"extras": (heads.ExtraKeys(3),)}, ["factored"], "extra_keys")
            for kind in (heads.Latent, heads.Bilinear, heads.Standard)
        ),
    ],
)
def test_what_keeps_a_form_from_running_is_named(kind, changes, orders, reason):
    """Also with one query and many keys, where those forms cost least."""
    layout = kind(width=8, num_heads=2, **changes)
    assert reason in layout.chain[1].reason
    found = heads.contraction_orders(layout, heads.CallSizes(1, 1, 256))
    assert [name for name, cost in found.items() if isinstance(cost, int)] == orders


def test_options_of_a_call_that_keep_a_form_from_running():
    params, x = make(BIASED)[:2]
    rotary = positions.rotary_angles(jnp.arange(7), 4)
    for options, reason in (({"logits_soft_cap": 2.0}, "soft cap"), ({"rotary": rotary}, "rotary")):
        with pytest.raises(ValueError, match=f"'bilinear' cannot run: .*{reason}"):
            multi_head_attention(params, x, BIASED, order="bilinear", **options)


def accepted(kind, extras, **fields):
    """The layout with each of these extras that construction accepts beside the others."""
    layout = kind(width=12, num_heads=6, **fields)
    for extra in extras:
        with contextlib.suppress(ValueError):
            layout = dataclasses.replace(layout, extras=(*layout.extras, extra))
    return layout


@pytest.mark.parametrize("kind", LAYOUTS.values(), ids=LAYOUTS)
def test_what_construction_accepts_can_be_called(kind):
    """All extras beside each other, and norms of q and k over every set of numbers."""
    extras = [extra() for extra in EXTRAS.values()] + [Gate("element")]
    layouts = [accepted(kind, order) for order in (extras, extras[::-1])]
    for over in ("head", "own_head", "all"):
        with contextlib.suppress(TypeError, ValueError):
            layouts.append(accepted(kind, (), qk_norm=heads.HeadNorm("layer", True, over)))
    for layout in layouts:
        params = jax.eval_shape(functools.partial(heads.init, layout=layout), jax.random.key(0))
        x = jax.ShapeDtypeStruct((2, 5, 12), "float32")
        call = functools.partial(multi_head_attention, layout=layout)
        assert jax.eval_shape(call, params, x).shape == (2, 5, layout.size("out_width"))


# Subclasses ---------------------------------------------------------------------------------------


def overriding(kind, method):
    """A subclass with a method of its own, which does the same."""
    return type("Own", (kind,), {method: lambda *args: getattr(kind, method)(*args)})


@pytest.mark.parametrize("kind", LAYOUTS.values(), ids=LAYOUTS)
def test_only_default_sizes_leave_a_subclass_its_forms(kind):
    mixin = type("Mixin", (), {"project_out": lambda *args: kind.project_out(*args) / 2})
    mixed = type("Mixed", (mixin, kind), {})
    for other in (mixed, *(overriding(kind, name) for name in (*get_args(Stage), "weights"))):
        assert not other(width=12, num_heads=2).chain[0]
    sized = type("Sized", (kind,), {"default_head_dim": property(lambda self: 3)})
    layout, plain = (a(width=12, num_heads=2, extras=(heads.Sink(),)) for a in (sized, kind))
    assert len(layout.chain[0]) == len(plain.chain[0])
    params = make(layout).params | {"norm": {"scale": jnp.ones(12)}}  # what else a layer keeps
    for step in layout.chain[0]:
        params = jax.eval_shape(step.params, params)
        shapes = jax.tree.map(jnp.shape, params, is_leaf=lambda a: hasattr(a, "shape"))
        assert shapes == heads.weight_shapes(step.layout) | {"norm": {"scale": (12,)}}


# With extra keys there is no form to lose.
@pytest.mark.parametrize(
    "kind", [heads.Extra, *(kind for kind in EXTRAS.values() if kind is not heads.ExtraKeys)]
)
def test_an_extra_that_does_not_state_where_it_acts_keeps_the_form(kind):
    extra = overriding(kind, "after_attention")()
    assert not heads.Standard(width=4, num_heads=4, head_dim=16, extras=(extra,)).chain[0]


# Initial values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_initial_scale_of_q_k_v_and_scores_is_1(name):
    """Root mean squares over many draws, for x of unit variance."""
    layout = LAYOUTS[name](width=64, num_heads=4)

    def measure(key):
        w_key, x_key = jax.random.split(key)
        params, x = heads.init(w_key, layout), jax.random.normal(x_key, (2, 32, 64))
        q = layout.project_q(params, layout.prepare(params, x), lambda a: a)
        k, v = layout.keys_values(params, heads.project_kv(params, x, layout))
        each = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, each) * layout.score_scale
        return jnp.stack([jnp.mean(a**2) for a in (q, k, v, scores)])

    keys = jax.random.split(jax.random.key(1), 48)
    means = np.mean(jax.jit(jax.vmap(measure))(keys), axis=0)
    np.testing.assert_allclose(np.sqrt(means), 1, rtol=0.05)


def test_init_options():
    layout = heads.Standard(width=256, num_heads=4, biases=("q", "k", "v", "o"))
    sizes = {"std": np.float64(0.02), "residual_scale": np.float64(0.5)}
    params = heads.init(jax.random.key(0), layout, dtype="bfloat16", **sizes)
    for name, a in params.items():
        assert a.dtype == jnp.bfloat16
        expected = 0 if name.endswith("_bias") else 0.01 if name == "o" else 0.02
        np.testing.assert_allclose(jnp.std(a.astype(jnp.float32)), expected, rtol=0.03)


# Layouts as values --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_hashable_and_its_repr_makes_it_again(name):
    layout = CASES[name]
    again = eval(repr(layout), vars(heads) | vars(layout_cases) | vars(layout_cases.outside))
    assert again == layout
    assert hash(again) == hash(layout)
    bare = dataclasses.replace(layout, extras=())
    for field in dataclasses.fields(bare):
        changed = getattr(bare, field.name) != field.default
        assert (f"{field.name}=" in repr(bare)) == changed


@pytest.mark.parametrize("name", LAYOUTS)
def test_replace_resolves_default_sizes_again(name):
    small, large = (LAYOUTS[name](width=width, num_heads=2) for width in (16, 32))
    replaced = dataclasses.replace(small, width=32)
    assert replaced == large
    assert heads.weight_shapes(replaced) == heads.weight_shapes(large)
    assert heads.cache_shapes(replaced) == heads.cache_shapes(large)
    assert heads.num_parameters(large) > 2 * heads.num_parameters(small)
    assert repr(large) == f"{type(large).__name__}(width=32, num_heads=2)"


@pytest.mark.parametrize("shape", [(3, 2, 4), (), (2, 300, 128)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_initial_values_are_the_bits_of_jax_random_normal(shape, dtype):
    keys = jax.random.split(jax.random.key(1), 2)
    of = lambda draw: jax.jit(jax.vmap(lambda key: draw(key, shape, dtype)))(keys)
    np.testing.assert_array_equal(of(normal), of(jax.random.normal))
