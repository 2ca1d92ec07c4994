"""Plans change under a model; what must not move does not, and what moves is measured."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from contract import SPECS
from contract import make as make_heads
from test_models import SMALL, TOKENS, make

from attnlab import Plan, multi_head_attention
from attnlab.sharing.named_plans import parse_plan
from attnlab.transforms import (
    align_heads,
    change_plan,
    detect_sharing,
    output_difference,
    reorder_heads,
    share,
    tie_encoder,
    unshare,
    untie_encoder,
)

DEEP = dataclasses.replace(SMALL, num_layers=4)
SHARING = ["albert", "attention_only", "sandwich", "cycle:2", "cycle_rev:3"]


@pytest.mark.parametrize("plan", deep(SHARING, "cycle:2"))
def test_unshared_weights_give_the_same_logits(plan):
    before = dataclasses.replace(DEEP, plan=plan)
    _, params = make(before)
    after = unshare(before, params)
    assert after[0].plan == "separate"
    assert output_difference((before, params), after, TOKENS) == 0
    again = change_plan(*after, plan)
    jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_sharing_is_found_in_weights_that_were_copied():
    """Each part by itself; one bit of one weight, and a set stands alone."""
    for plan in SHARING:
        before = dataclasses.replace(DEEP, plan=plan)
        _, params = make(before)
        found, once = detect_sharing(*unshare(before, params))
        assert found == before
        jax.tree.map(np.testing.assert_array_equal, once, params)
    alone, copied = unshare(before, params)  # cycle_rev:3, which is 0 1 2 2
    up = np.array(copied["layers"]["ffn"]["up"])
    up[3, 1, 2] = np.nextafter(up[3, 1, 2], 9, dtype=np.float32)
    copied["layers"]["ffn"]["up"] = jnp.asarray(up)
    found, once = detect_sharing(alone, copied)
    assert found.plan == "attention=0,1,2,2 ffn=0,1,2,3"
    assert output_difference((alone, copied), (found, once), TOKENS) == 0


def test_sharing_is_found_beside_pointers_to_keys():
    config = dataclasses.replace(DEEP, plan="attention=0,1,2,3 kv=0,1,@0,- ffn=0,1,2,3")
    _, params = make(config)
    for part in ("attention", "ffn"):
        params["layers"][part] = jax.tree.map(lambda a: a.at[3].set(a[1]), params["layers"][part])
    found, once = detect_sharing(config, params)
    assert found.plan == "attention=0,1,2,1 kv=0,1,@0,- ffn=0,1,2,1"
    assert output_difference((config, params), (found, once), TOKENS) == 0


@pytest.mark.parametrize("plan", deep(SHARING, "cycle:2"))
def test_the_gradient_of_a_group_is_the_sum_over_its_layers(plan, x64):
    config = dataclasses.replace(DEEP, plan=plan, dtype="float64")
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), make(config)[1])
    alone, copied = unshare(config, params)

    def grad(config, params):
        loss = lambda p: jnp.sum(config.build().apply({"params": p}, TOKENS) ** 2)
        return jax.jit(jax.grad(loss))(params)

    shared, separate = grad(config, params), grad(alone, copied)
    for part, slots in parse_plan(plan, 4).items():
        for slot in set(slots):
            uses = [i for i, s in enumerate(slots) if s == slot]
            total = jax.tree.map(lambda a, u=uses: a[np.array(u)].sum(0), separate["layers"][part])
            assert_close(jax.tree.map(lambda a, s=slot: a[s], shared["layers"][part]), total)


def test_sharing_takes_the_mean_and_says_what_it_changed():
    _, params = make(DEEP)
    config, shared = change_plan(DEEP, params, "cycle:2")
    up = params["layers"]["ffn"]["up"]
    assert_close(
        shared["layers"]["ffn"]["up"], jnp.stack([(up[0] + up[2]) / 2, (up[1] + up[3]) / 2])
    )
    assert output_difference((DEEP, params), (config, shared), TOKENS) > 0.1
    told = share(DEEP, params, "cycle:2", TOKENS)
    assert told[0] == config
    assert told[2] == output_difference((DEEP, params), (config, shared), TOKENS)
    by_hand = Plan(attention=(0, 0, 1, 1), ffn=(0, 1, 1, 2))
    config, shared = change_plan(DEEP, params, by_hand)
    assert config.layer_plan == by_hand
    assert shared["layers"]["ffn"]["up"].shape[0] == 3


def test_the_difference_is_relative_to_the_model_before():
    _, params = make(SMALL)
    louder = dataclasses.replace(SMALL, readout_scale=3.0)
    assert abs(output_difference((SMALL, params), (louder, params), TOKENS) - 2) < 1e-5


def test_three_equal_layers_merge_without_a_changed_bit():
    config = dataclasses.replace(SMALL, num_layers=3, plan="albert")
    _, params = make(config)
    jax.tree.map(
        np.testing.assert_array_equal, change_plan(*unshare(config, params), "albert")[1], params
    )


def test_layers_with_renamed_heads_merge_without_loss_once_aligned():
    """Both layers the same function, the second with its heads in another order and basis."""
    config = dataclasses.replace(DEEP, num_layers=2, talking_heads=True)
    _, params = make(config)
    attention = jax.tree.map(lambda a: a[0], params["layers"]["attention"])
    renamed = reorder_heads(attention, [2, 0, 1], config.heads)
    both = jax.tree.map(lambda *a: jnp.stack(a), attention, renamed)
    ffn = jax.tree.map(lambda a: jnp.stack([a[0], a[0]]), params["layers"]["ffn"])
    params = params | {"layers": {"attention": both, "ffn": ffn}}
    aligned = change_plan(config, params, "albert", merge="aligned")
    assert output_difference((config, params), aligned, TOKENS) < 1e-5
    plain = change_plan(config, params, "albert")
    assert output_difference((config, params), plain, TOKENS) > 0.1
    # Nothing is left over for a delta, once the layers are written in one order.
    low = dataclasses.replace(config, delta_rank=1)
    aligned = change_plan(low, params, "relaxed:1", merge="aligned")
    assert output_difference((config, params), aligned, TOKENS) < 1e-5


@pytest.mark.parametrize("name", ["standard", "free sizes", "wide", "collaborative", "bilinear"])
def test_reordered_heads_are_the_same_function_and_are_found_again(name, x64):
    spec = SPECS[name].spec(num_kv_heads=None)
    w, x, context, values = make_heads(spec, jnp.float64)
    order = np.random.default_rng(0).permutation(spec.num_heads)
    moved = reorder_heads(w, order, spec)
    run = jax.jit(lambda w: multi_head_attention(w, x, context, value_context=values, spec=spec))
    assert_close(run(moved), run(w))
    np.testing.assert_array_equal(align_heads(moved, w, spec), np.argsort(order))


@pytest.mark.parametrize(("name", "order"), [("alt", [2, 0, 1]), ("grouped", [5, 4, 3, 0, 2, 1])])
def test_heads_with_chunks_or_shared_keys_move_with_what_is_theirs(name, order, x64):
    spec = SPECS[name].spec()
    w, x, *_ = make_heads(spec, jnp.float64)
    run = jax.jit(lambda w: multi_head_attention(w, x, spec=spec))
    moved = reorder_heads(w, order, spec)
    assert_close(run(moved), run(w))
    assert_close(moved["o"], w["o"][np.array(order)])


def test_heads_that_look_alike_are_told_apart_by_what_they_write():
    spec, order = SPECS["standard"].spec(), [2, 0, 3, 1]
    w, *_ = make_heads(spec)
    w |= {name: jnp.broadcast_to(w[name][:, :1], w[name].shape) for name in "qk"}
    found = align_heads(reorder_heads(w, order, spec), w, spec)
    np.testing.assert_array_equal(found, np.argsort(order))


def test_what_cannot_be_done_says_why():
    _, params = make(SMALL)
    with pytest.raises(ValueError, match="a plan has the parts"):
        change_plan(SMALL, params, Plan(attention=(0,) * SMALL.num_layers))
    normed = dataclasses.replace(SMALL, qk_norm="rms")
    with pytest.raises(ValueError, match="q/k norms do not allow"):
        change_plan(normed, make(normed)[1], "albert", merge="aligned")
    with pytest.raises(ValueError, match="they must be the same"):
        change_plan(SMALL, params, parse_plan("albert", 2))
    with pytest.raises(ValueError, match="unknown merge 'median'"):
        change_plan(SMALL, params, "albert", merge="median")
    narrow = dataclasses.replace(SMALL, layout="narrow")
    with pytest.raises(ValueError, match="reads its own slice of x"):
        change_plan(narrow, make(narrow)[1], "albert", merge="aligned")
    narrow_heads = SPECS["narrow"].spec()
    with pytest.raises(ValueError, match="its chunk of x"):
        reorder_heads(make_heads(narrow_heads)[0], [1, 0, 2], narrow_heads)
    grouped = dataclasses.replace(SMALL, num_kv_heads=1)
    with pytest.raises(ValueError, match="heads that share keys"):
        change_plan(grouped, make(grouped)[1], "albert", merge="aligned")


@pytest.mark.parametrize("merge", deep(["mean", "aligned"], "aligned"))
def test_a_delta_of_full_rank_takes_any_layers_up_without_loss(merge, x64):
    config = dataclasses.replace(DEEP, delta_rank=99, dtype="float64")
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), make(config)[1])
    relaxed = change_plan(config, params, "relaxed:2", merge=merge)
    assert relaxed[1]["layers"]["attention"]["q"].shape[0] == 2
    assert output_difference((config, params), relaxed, TOKENS) < 1e-10
    alone = unshare(*relaxed)
    assert set(alone[1]["layers"]) == {"attention", "ffn"}
    assert output_difference(relaxed, alone, TOKENS) < 1e-10


@pytest.mark.slow
def test_more_rank_is_nearer():
    _, params = make(DEEP)
    errors = []
    for rank in (1, 4, 8):
        config = dataclasses.replace(DEEP, delta_rank=rank)
        relaxed = change_plan(config, params, "relaxed:1")
        apart = unshare(*relaxed)[1]["layers"]["ffn"]["up"] - params["layers"]["ffn"]["up"]
        errors.append(float(jnp.sum(jnp.square(apart))))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 4


@pytest.mark.slow
def test_keys_of_neighbours_become_one():
    """Cut into parts and joined again is exact; taken from a neighbour it is another function."""
    _, params = make(DEEP)
    four = (0, 1, 2, 3)
    apart = change_plan(DEEP, params, Plan(attention=four, kv=four, ffn=four))
    assert output_difference((DEEP, params), apart, TOKENS) == 0
    jax.tree.map(np.testing.assert_array_equal, unshare(*apart)[1], params)
    pairs = change_plan(DEEP, params, "cla:2")
    keys = params["layers"]["attention"]["k"]
    assert_close(
        pairs[1]["layers"]["kv"]["k"], jnp.stack([(keys[0] + keys[1]), (keys[2] + keys[3])]) / 2
    )
    assert output_difference((DEEP, params), pairs, TOKENS) > 0.1
    albert = change_plan(*pairs, "attention=0,0,0,0 kv=0,-,0,- ffn=0,0,0,0")
    assert albert[0].layer_plan.kv_indices == (0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"needs the same sublayer kv, .0, None, 1, None."):
        unshare(*pairs)
    with pytest.raises(ValueError, match=r"its own delta, in order; got .0, 0, 1, 1."):
        change_plan(DEEP, params, Plan(attention=four, ffn=four, delta=(0, 0, 1, 1)))
    with pytest.raises(ValueError, match="under a plan with the sublayer kv"):
        change_plan(DEEP, params, "cla:2", merge="aligned")


BOTH = dataclasses.replace(DEEP, kind="encoder_decoder", encoder_layers=4, positions="relative")


def both(config):
    """Random weights of an encoder-decoder, and a function of them."""
    model = config.build()
    init = jax.eval_shape(model.init, jax.random.key(0), TOKENS[:, :5], TOKENS)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), init)
    return params, jax.jit(lambda p: model.apply({"params": p}, TOKENS[:, :5], TOKENS))


@pytest.mark.parametrize(
    "plan", deep(["albert", "cycle:2", "relaxed:2", "dictionary:2"], "relaxed:2")
)
def test_both_stacks_change_together(plan):
    config = dataclasses.replace(BOTH, plan=plan, delta_rank=3)
    params, run = both(config)
    alone, copied = unshare(config, params)
    assert_close(both(alone)[1](copied), run(params), loosen=10)
    with pytest.raises(ValueError, match="its own parameters already"):
        untie_encoder(config, params)


@pytest.mark.parametrize(
    "plan", deep(["separate", "cycle:2", "relaxed:2", "dictionary:2"], "cycle:2")
)
def test_an_encoder_is_taken_apart_and_tied_again(plan):
    config = dataclasses.replace(BOTH, plan=plan, share_encoder=True)
    params, run = both(config)
    alone, copied = untie_encoder(config, params)
    assert_close(both(alone)[1](copied), run(params))
    if plan not in ("relaxed:2", "dictionary:2"):
        tied, again = tie_encoder(alone, copied)
        assert tied == config
        jax.tree.map(np.testing.assert_array_equal, again, params)
        found, once = detect_sharing(*unshare(alone, copied))
        assert found.share_encoder
        assert (found.layer_plan, found.encoder_layer_plan) == (
            config.layer_plan, config.encoder_layer_plan,
        )  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, once, params)
    apart, more = unshare(config, params)
    assert apart.share_encoder
    assert_close(both(apart)[1](more), run(params), loosen=10)


@pytest.mark.slow
def test_layers_without_a_feed_forward_part():
    config = dataclasses.replace(BOTH, ffn_width=0, plan="cycle:2", share_encoder=True)
    params, run = both(config)
    alone, copied = untie_encoder(config, params)
    assert_close(both(alone)[1](copied), run(params))
    apart = unshare(alone, copied)
    assert set(apart[1]["layers"]) == {"attention", "cross"}
    found, once = detect_sharing(*apart)
    assert found.share_encoder
    assert found.layer_plan["attention"] == (0, 1, 0, 1)
    jax.tree.map(np.testing.assert_array_equal, once, params)


def test_tying_takes_the_mean_of_the_stacks():
    params, _ = both(BOTH)
    tied, merged = tie_encoder(BOTH, params)
    for part, name in (("attention", "q"), ("ffn", "up")):
        ours, encoder = (params[s][part][name] for s in ("layers", "encoder_layers"))
        assert_close(merged["layers"][part][name], (ours + encoder) / 2)
    assert_close(
        merged["final_norm"]["scale"],
        (params["final_norm"]["scale"] + params["encoder_final_norm"]["scale"]) / 2,
    )
    np.testing.assert_array_equal(merged["layers"]["cross"]["q"], params["layers"]["cross"]["q"])
    assert jax.tree.structure(merged) == jax.tree.structure(both(tied)[0])
    other = dataclasses.replace(BOTH, encoder_plan="albert")
    with pytest.raises(ValueError, match="encoder and decoder need the same plan"):
        tie_encoder(other, both(other)[0])
