"""Plans change under a model; what must not move does not, and what moves is measured."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import heads, models
from attnlab.models import FFN, Compute, ModelConfig
from attnlab.models.config import EncoderConfig
from attnlab.sharing import Plan, parse_plan
from attnlab.transforms import (
    change_plan,
    detect_sharing,
    output_difference,
    remove_heads,
    scale_heads,
    share,
    tie_encoder,
    unshare,
    untie_encoder,
)

SMALL = ModelConfig(
    vocab_size=19, max_len=9, width=12, num_layers=3, heads=heads.Standard(num_heads=3),
    ffn=FFN(width=10),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 19, (2, 7)))
DEEP = dataclasses.replace(SMALL, num_layers=4)
FLOAT64 = Compute(dtype="float64")
SHARING = ["albert", "attention_only", "sandwich", "cycle:2", "cycle_rev:3"]


def draw(config, dtype=jnp.float32):
    """Large random parameters."""
    rng = np.random.default_rng(1)
    shapes = models.param_shapes(config)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), dtype), shapes)


@pytest.mark.parametrize("plan", deep(SHARING, "cycle:2"))
def test_unshared_weights_give_the_same_logits(plan):
    before = dataclasses.replace(DEEP, sharing=plan)
    params = draw(before)
    after = unshare(before, params)
    assert after[0].sharing == "separate"
    assert output_difference((before, params), after, TOKENS) == 0
    again = change_plan(*after, plan)
    jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_sharing_is_found_in_weights_that_were_copied():
    """Each sublayer by itself; one bit of one weight differs, and a group is separate."""
    for plan in SHARING:
        before = dataclasses.replace(DEEP, sharing=plan)
        params = draw(before)
        found, once = detect_sharing(*unshare(before, params))
        assert found == before
        jax.tree.map(np.testing.assert_array_equal, once, params)
    alone, copied = unshare(before, params)  # cycle_rev:3, which is 0 1 2 2
    up = np.array(copied["layers"]["ffn"]["up"])
    up[3, 1, 2] = np.nextafter(up[3, 1, 2], 9, dtype=np.float32)
    copied["layers"]["ffn"]["up"] = jnp.asarray(up)
    found, once = detect_sharing(alone, copied)
    assert found.sharing == "attention=0,1,2,2 ffn=0,1,2,3"
    assert output_difference((alone, copied), (found, once), TOKENS) == 0


def test_sharing_is_found_beside_pointers_to_keys():
    config = dataclasses.replace(DEEP, sharing="attention=0,1,2,3 kv=0,1,@0,@1 ffn=0,1,2,3")
    params = draw(config)
    for part in ("attention", "ffn"):
        params["layers"][part] = jax.tree.map(lambda a: a.at[3].set(a[1]), params["layers"][part])
    found, once = detect_sharing(config, params)
    assert found.sharing == "attention=0,1,2,1 kv=0,1,@0,@1 ffn=0,1,2,1"
    assert output_difference((config, params), (found, once), TOKENS) == 0


def test_sharing_takes_the_mean_and_says_what_it_changed():
    params = draw(DEEP)
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
    assert config.plan == by_hand
    assert shared["layers"]["ffn"]["up"].shape[0] == 3


def test_the_first_layer_of_a_group_is_kept():
    config = dataclasses.replace(SMALL, num_layers=3)
    params = draw(config)
    kept = change_plan(config, params, "cycle:2", merge="first")[1]["layers"]
    jax.tree.map(
        lambda new, old: np.testing.assert_array_equal(new, old[:2]), kept, params["layers"]
    )


def test_params_of_another_model_are_refused():
    """JAX takes the last group for every later one."""
    params = draw(SMALL)
    deeper = dataclasses.replace(SMALL, num_layers=SMALL.num_layers + 1)
    for call in (
        lambda: change_plan(deeper, params, "groups:2"),
        lambda: unshare(deeper, params),
        lambda: detect_sharing(deeper, params),
        lambda: scale_heads(deeper, params, {"heads": jnp.ones((4, 3))}),
        lambda: remove_heads(deeper, params, {i: [0] for i in range(4)}),
    ):
        with pytest.raises(ValueError, match="params are not those of this model"):
            call()


def test_what_cannot_be_done_says_why():
    params = draw(SMALL)
    with pytest.raises(ValueError, match="a plan has the sublayers"):
        change_plan(SMALL, params, Plan(attention=(0,) * SMALL.num_layers))
    with pytest.raises(ValueError, match="is one for 2 layers, not for 3"):
        change_plan(SMALL, params, parse_plan("albert", 2))
    with pytest.raises(ValueError, match=r"unknown merge 'median'.*mean, first"):
        change_plan(SMALL, params, "albert", merge="median")
    for function in (tie_encoder, untie_encoder):
        with pytest.raises(ValueError, match="encoder"):
            function(SMALL, params)


def test_layer_types_change_together():
    """Every layer a copy of what it used; the types stay."""
    types = ((2, models.LayerOverrides(window=1, sharing="albert")), (1, models.LayerOverrides()))
    config = dataclasses.replace(SMALL, num_layers=6, sharing="cycle:2", layer_types=types)
    params = draw(config)
    alone, copied = unshare(config, params)
    assert copied["layers_0"]["ffn"]["up"].shape[0] == 4
    assert [o.window for _, o in alone.layer_types] == [1, None]
    assert output_difference((config, params), (alone, copied), TOKENS) < 1e-6
    with pytest.raises(ValueError, match="give the name of a plan"):
        change_plan(config, params, config.plan)
    only = ((1, models.LayerOverrides(sharing="albert")), (2, models.LayerOverrides()))
    config = dataclasses.replace(config, layer_types=only)
    with pytest.raises(ValueError, match="differ only in their plans"):
        unshare(config, draw(config))
    with pytest.raises(ValueError, match="one layer type"):
        detect_sharing(config, params)


@pytest.mark.slow
@pytest.mark.parametrize("merge", deep(["mean", "first"], "first"))
def test_a_delta_of_full_rank_takes_any_layers_up_without_loss(merge, x64):
    config = dataclasses.replace(DEEP, delta_rank=99, compute=FLOAT64)
    params = draw(config, jnp.float64)
    relaxed = change_plan(config, params, "relaxed:2", merge=merge)
    assert relaxed[1]["layers"]["attention"]["q"].shape[0] == 2
    assert output_difference((config, params), relaxed, TOKENS) < 1e-10
    alone = unshare(*relaxed)
    assert set(alone[1]["layers"]) == {"attention", "ffn"}
    assert output_difference(relaxed, alone, TOKENS) < 1e-10


@pytest.mark.slow
def test_keys_of_neighbours_become_one():
    """Cut into parts and joined again is exact; taken from a neighbour it is another function."""
    params = draw(DEEP)
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
    albert = change_plan(*pairs, "attention=0,0,0,0 kv=0,@0,0,@2 ffn=0,0,0,0")
    assert albert[0].plan.kv_indices == (0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"needs the same sublayer kv, .0, None, 1, None."):
        unshare(*pairs)
    with pytest.raises(ValueError, match=r"its own delta, in order; got .0, 0, 1, 1."):
        change_plan(DEEP, params, Plan(attention=four, ffn=four, delta=(0, 0, 1, 1)))


BOTH = dataclasses.replace(
    DEEP, kind="encoder_decoder", encoder=EncoderConfig(num_layers=4), positions=models.Relative()
)
SHARED = EncoderConfig(num_layers=4, shares_decoder=True)


def both(config):
    """Random weights of an encoder-decoder, and its logits as a function of them."""
    model = config.build()
    run = lambda p: model.apply({"params": p}, TOKENS, source=TOKENS[:, :5]).logits
    return draw(config), jax.jit(run)


@pytest.mark.slow
@pytest.mark.parametrize("plan", deep(["albert", "cycle:2", "relaxed:2"], "relaxed:2"))
def test_both_stacks_change_together(plan):
    config = dataclasses.replace(BOTH, sharing=plan, delta_rank=3)
    params, run = both(config)
    alone, copied = unshare(config, params)
    assert_close(both(alone)[1](copied), run(params), loosen=10)
    with pytest.raises(ValueError, match="its own parameters already"):
        untie_encoder(config, params)


@pytest.mark.slow
@pytest.mark.parametrize("plan", deep(["separate", "cycle:2", "relaxed:2"], "cycle:2"))
def test_an_encoder_is_taken_apart_and_tied_again(plan):
    config = dataclasses.replace(BOTH, sharing=plan, encoder=SHARED)
    params, run = both(config)
    alone, copied = untie_encoder(config, params)
    assert_close(both(alone)[1](copied), run(params))
    if plan != "relaxed:2":
        tied, again = tie_encoder(alone, copied)
        assert tied == config
        jax.tree.map(np.testing.assert_array_equal, again, params)
        found, once = detect_sharing(*unshare(alone, copied))
        assert found.encoder.shares_decoder
        assert (found.plan, found.encoder_model.plan) == (config.plan, config.encoder_model.plan)
        jax.tree.map(np.testing.assert_array_equal, once, params)
    apart, more = unshare(config, params)
    assert apart.encoder.shares_decoder
    assert_close(both(apart)[1](more), run(params), loosen=10)


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
    other = dataclasses.replace(BOTH, encoder=EncoderConfig(num_layers=4, sharing="albert"))
    with pytest.raises(ValueError, match="encoder and decoder need the same plan"):
        tie_encoder(other, both(other)[0])
