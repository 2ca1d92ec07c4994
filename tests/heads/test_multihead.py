"""Orders of contraction are one function, whatever else the call asks for; caches; explanations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, diagonal, product_flops
from contract import ALONE, FIRST, SPECS, attend, by_hand, make
from jax.flatten_util import ravel_pytree

from attnlab import (
    HeadSpec,
    contraction_orders,
    explain_heads,
    init_cache,
    multi_head_attention,
    positions,
)
from attnlab.heads.old.project import make_memory
from attnlab.heads.old.spec import absorption

pytestmark = pytest.mark.usefixtures("outside_row")

MASK = jnp.asarray(np.random.default_rng(5).random((2, 1, 7, 8)) < 0.6).at[1, 0, 3].set(False)
# What may stand between weights and output; T=7, S=8. Row 3 of batch row 1 sees nothing.
CALLS = {
    "gate and a mask with an empty row": lambda n, rng: {
        "mask": MASK,
        "head_gate": jnp.asarray(rng.normal(size=(2, n))),
    },
    "bias, causal and dropout": lambda n, rng: {
        "bias": jnp.asarray(rng.normal(size=(n, 7, 8))),
        "is_causal": True,
        "dropout_rate": 0.4,
        "dropout_key": jax.random.key(1),
    },
    "talking heads": lambda n, rng: {
        "mix": (jnp.asarray(rng.normal(size=(n, n))), jnp.asarray(rng.normal(size=(n, n)))),
        "mask": MASK,
    },
}


@pytest.mark.parametrize(("name", "call"), diagonal(SPECS, CALLS, of=FIRST))
def test_every_order_is_the_same_function(name, call, x64):
    spec = SPECS[name].spec()
    arrays = make(spec, jnp.float64)
    options = CALLS[call](spec.num_heads, np.random.default_rng(6))
    target = jnp.asarray(np.random.default_rng(7).normal(size=(2, 7, spec.sizes["O"])))

    def run(order, w, x, context, values):
        out = multi_head_attention(
            w, x, context, value_context=values, spec=spec, order=order, **options
        )
        return jnp.sum((out - target) ** 2), out

    @jax.jit
    def all_orders(*arrays):
        return {
            order: jax.value_and_grad(functools.partial(run, order), (0, 1, 2, 3), has_aux=True)(
                *arrays
            )
            for order, cost in contraction_orders(spec, 2, 7, 8, cross=True).items()
            if isinstance(cost, int)
        }

    results = all_orders(*arrays)
    assert set(results) == {"factored", *(step.spec.layout for step in absorption(spec))}
    for (_, out), grads in results.values():
        (_, expected), expected_grads = results["factored"]
        assert_close(out, expected)
        # As one vector: the gradient of a key bias is rounding alone where it cancels.
        assert_close(ravel_pytree(grads)[0], ravel_pytree(expected_grads)[0], loosen=10)


def test_a_soft_cap_and_rotary_refuse_what_they_break():
    spec = HeadSpec("narrow", width=12, num_heads=3, biases="qkvo")
    refused = contraction_orders(spec, 2, 7, logits_soft_cap=5.0)
    assert {n: isinstance(c, int) for n, c in refused.items()} == {
        "factored": True, "standard": True, "bilinear": False, "absorbed": False,
    }  # fmt: skip
    assert "key bias" in refused["bilinear"]
    without = dataclasses.replace(spec, biases="qvo")
    assert all(
        isinstance(c, int) for c in contraction_orders(without, 2, 7, logits_soft_cap=5.0).values()
    )
    assert "rotary" in contraction_orders(spec, 2, 7, rotary=True)["absorbed"]
    normed = dataclasses.replace(spec, qk_norm="rms")
    assert "qk_norm" in contraction_orders(normed, 2, 7)["bilinear"]
    w, x, *_ = make(normed)
    with pytest.raises(ValueError, match="qk_norm stands between W_Q and W_K; use 'factored'"):
        multi_head_attention(w, x, spec=normed, order="bilinear")
    with pytest.raises(ValueError, match="unknown order of layout 'narrow' 'absorb': did you mean"):
        multi_head_attention(w, x, spec=normed, order="absorb")


def test_a_sink_sees_the_key_bias(x64):
    """What it adds to a whole row is no longer the same for all that stands in the sum."""
    spec = HeadSpec("wide", 6, 2, biases="qkvo", sink="learnt")
    w, x, *_ = make(spec, jnp.float64)
    assert_close(attend(w, x, spec=spec), by_hand(w, x, x, x, spec))
    assert "key bias" in contraction_orders(spec, 2, 7)["absorbed"]
    without = dataclasses.replace(spec, biases="qvo")
    assert isinstance(contraction_orders(without, 2, 7)["absorbed"], int)


def test_a_soft_cap_without_key_bias_allows_every_order(x64):
    spec = SPECS["standard"].spec(biases="qvo")
    w, x, context, values = make(spec, jnp.float64)
    run = jax.jit(
        lambda order: multi_head_attention(
            w, x, context, value_context=values, spec=spec, logits_soft_cap=3.0, order=order
        ),
        static_argnums=0,
    )
    assert_close(run("absorbed"), run("factored"))


def test_the_cheapest_order_is_chosen_and_is_what_runs():
    wide = HeadSpec("wide", width=16, num_heads=3)
    x, w = jnp.ones((8, 16, 16)), jax.eval_shape(lambda: make(wide)[0])
    flops = contraction_orders(wide, 8, 16)
    run = lambda order: jax.make_jaxpr(
        functools.partial(multi_head_attention, spec=wide, order=order)
    )(w, x)
    counted = {order: product_flops(run(order).jaxpr) for order in flops}
    assert counted == flops
    assert product_flops(run(None).jaxpr) == min(flops.values()) == flops["absorbed"]
    assert explain_heads(wide, x)["chosen"] == {"order": "absorbed"}
    assert explain_heads(wide, x, order="bilinear")["chosen"] == {"order": "bilinear"}
    # One short text: multiplying the weights out costs more than it saves.
    assert explain_heads(wide, jnp.ones((1, 8, 16)))["chosen"] == {"order": "factored"}
    standard = HeadSpec("standard", width=16, num_heads=4)
    assert explain_heads(standard, x)["chosen"] == {"order": "factored"}
    assert explain_heads(standard, x)["implementation"]["dense"]


def test_an_explanation_is_of_the_very_call():
    spec = HeadSpec("wide", width=16, num_heads=3, biases="k")
    x, longer = (jax.ShapeDtypeStruct((8, t, 16), "float32") for t in (16, 40))
    told = lambda *arrays, **options: explain_heads(spec, *arrays, **options)["order"]
    both = HeadSpec("alt", width=16, num_heads=4)  # a second text goes through `down` as well
    orders = contraction_orders(both, 8, 16, 40, cross=True)
    assert explain_heads(both, x, longer)["order"] == orders
    assert orders != contraction_orders(both, 8, 16, 40)
    assert told(x, rotary=True) == contraction_orders(spec, 8, 16, rotary=True)
    assert told(x, logits_soft_cap=5.0) == contraction_orders(spec, 8, 16, logits_soft_cap=5.0)


def test_steps_keep_the_shapes_of_their_spec():
    for spec in (one.spec() for one in SPECS.values()):
        w = make(spec)[0]
        for step in absorption(spec):
            w = jax.eval_shape(step.weights, w)
            assert {name: a.shape for name, a in w.items()} == step.spec.shapes


@pytest.mark.parametrize(("name", "window"), diagonal(ALONE, [None, 2], of=FIRST))
def test_a_cache_gives_what_the_whole_text_gives(name, window, x64):
    """In pieces of 3, 1 and 3 tokens, in every order, and in that which costs least of those that
    read the last one's; with a window in a cache that goes round."""
    spec = SPECS[name].spec()
    w, x, *_ = make(spec, jnp.float64)
    options = {"is_causal": True, "local_window_size": None if window is None else (window, 0)}

    def pieces(made_for, order):
        cache = init_cache(spec, 2, 7 if window is None else 5, x.dtype, order=made_for)
        outs = []
        for start, end in ((0, 3), (3, 4), (4, 7)):
            out, cache = multi_head_attention(
                w, x[:, start:end], spec=spec, cache=cache, order=order, **options
            )
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    orders = contraction_orders(spec, 2, 7)
    taken = [order for order, cost in orders.items() if isinstance(cost, int)]
    got, whole = jax.jit(
        lambda: (
            [*(pieces(order, order) for order in taken), pieces(taken[-1], None)],
            multi_head_attention(w, x, spec=spec, order="factored", **options),
        )
    )()
    for out in got:
        assert_close(out, whole)


def test_queries_and_keys_may_stand_at_other_positions(x64):
    """The last 3 of 7 tokens ask, all 7 are looked at."""
    spec = HeadSpec("standard", width=12, num_heads=3)
    w, x, *_ = make(spec, jnp.float64)
    angles = positions.rotary_angles(jnp.arange(7), 4)
    run = jax.jit(functools.partial(multi_head_attention, spec=spec))
    got = run(w, x[:, 4:], x, rotary=(angles[4:], angles))
    assert_close(got, run(w, x, rotary=angles)[:, 4:])


EVEN = [
    "grouped, even", "wide", "rms norm of q and k", "alt", "bilinear, its own text", "latent",
    "latent for queries too", "absorbed latent", "a row from outside, its own text",
]  # fmt: skip


@pytest.mark.parametrize("name", EVEN)
def test_rotary_keys_are_cached_turned(name, x64):
    own = {
        "grouped, even": HeadSpec("standard", width=12, num_heads=6, num_kv_heads=2, head_dim=4),
        "bilinear, its own text": HeadSpec("bilinear", width=12, num_heads=3),
    }
    spec = own.get(name) or SPECS[name].spec()
    w, x, *_ = make(spec, jnp.float64)
    angles = positions.rotary_angles(jnp.arange(7), spec.turned)
    run = jax.jit(functools.partial(multi_head_attention, spec=spec, is_causal=True))
    first, cache = run(w, x[:, :4], rotary=angles[:4], cache=init_cache(spec, 2, 7, x.dtype))
    second, _ = run(w, x[:, 4:], rotary=angles[4:], cache=cache)
    assert_close(jnp.concatenate([first, second], axis=1), run(w, x, rotary=angles))
    assert np.abs(run(w, x) - run(w, x, rotary=angles)).max() > 0.01


def test_a_cache_takes_a_mask_and_need_not_be_causal(x64):
    """All its places filled by one call; places are positions until it goes round."""
    spec = SPECS["grouped"].spec()
    w, x, *_ = make(spec, jnp.float64)
    run = jax.jit(
        functools.partial(multi_head_attention, spec=spec, mask=MASK[..., :7]),
        static_argnames="is_causal",
    )
    for is_causal in (False, True):
        got, _ = run(w, x, is_causal=is_causal, cache=init_cache(spec, 2, 7, x.dtype))
        assert_close(got, run(w, x, is_causal=is_causal))


def test_a_full_cache_gives_nan_and_keeps_what_it_holds():
    spec = SPECS["grouped"].spec()
    w, x, *_ = make(spec)
    run = jax.jit(functools.partial(multi_head_attention, spec=spec, is_causal=True))
    _, full = run(w, x[:, :5], cache=init_cache(spec, 2, 6))
    out, after = run(w, x[:, 5:], cache=full)
    assert np.isnan(out).all()
    jax.tree.map(np.testing.assert_array_equal, after, full)
    out, after = run(w, x[:, 5:6], cache=full)
    assert np.isfinite(out).all()
    assert int(after["length"]) == 6


def test_bad_caches_say_what_to_do():
    spec = HeadSpec("wide", width=6, num_heads=2)
    w, x, *_ = make(spec)
    call = functools.partial(multi_head_attention, w, spec=spec)
    with pytest.raises(ValueError, match="7 tokens do not fit a cache of size 4"):
        call(x, cache=init_cache(spec, 2, 4))
    with pytest.raises(ValueError, match=r"init_cache\(spec, batch=2"):
        call(x, cache=init_cache(spec, 3, 9))
    with pytest.raises(ValueError, match="the cache holds k, v, this order of contraction needs x"):
        call(x, cache=init_cache(spec, 2, 9), order="absorbed")
    with pytest.raises(ValueError, match="leave context out"):
        call(x, x, cache=init_cache(spec, 2, 9))
    with pytest.raises(ValueError, match="must be equal"):
        init_cache(HeadSpec("absorbed", 6, 2, key_width=5), 2, 9)
    kept = HeadSpec("absorbed", width=6, num_heads=2)
    with pytest.raises(ValueError, match="cannot turn inputs that are cached"):
        multi_head_attention(
            make(kept)[0], x, spec=kept, cache=init_cache(kept, 2, 9), rotary=jnp.ones((7, 3))
        )


def test_the_absorbed_cache_holds_the_inputs_alone():
    spec = HeadSpec("wide", width=6, num_heads=5)
    numbers = lambda order: sum(a.size for a in init_cache(spec, 1, 10, order=order).values()) - 1
    assert numbers("factored") == 10 * 2 * 5 * 6
    assert numbers("absorbed") == 10 * 6


@pytest.mark.parametrize("name", deep(ALONE, *FIRST))
def test_memory_of_the_same_text_changes_nothing(name, x64):
    """And that of another text is attention to that text, what stores its own unread."""
    spec = SPECS[name].spec()
    w, x, context, _ = make(spec, jnp.float64)
    memory = make_memory(w, context, spec=spec)
    spoilt = {n: a * jnp.nan if spec.maps[n].runs == "store" else a for n, a in w.items()}
    call = functools.partial(multi_head_attention, spec=spec, order="factored")
    got = jax.jit(lambda w, x, m: call(w, x, memory=m))(spoilt, x, memory)
    assert_close(got, jax.jit(call)(w, x, context))


def test_a_call_takes_the_order_that_its_cache_was_made_for():
    spec = SPECS["wide"].spec()
    w, x, *_ = make(spec)
    run = jax.jit(functools.partial(multi_head_attention, spec=spec, is_causal=True))
    got, cache = run(w, x, cache=init_cache(spec, 2, 7, order="absorbed"))
    assert set(cache) == {"x", "length"}
    assert_close(got, run(w, x), loosen=10)
