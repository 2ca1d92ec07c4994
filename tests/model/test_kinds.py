"""Layers of several kinds in turn: equal to a loop over them, one program at every depth."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import HeadSpec, ModelConfig, generate, pretrained, training, transformer_block
from attnlab.heads.positions import rotary_angles
from attnlab.model import accounting
from attnlab.model.block import BlockSpec
from attnlab.model.decode import prefill
from attnlab.model.explain import explain_model
from attnlab.model.matrices import weight_axes
from attnlab.norms import layer_norm
from attnlab.transforms import change_plan, remove_heads, unshare

SMALL = ModelConfig(
    width=6,
    vocab_size=11,
    max_len=16,
    num_heads=3,
    ffn_width=5,
    positions="rotary",
    attention_biases="qvo",
)
CONFIGS = {
    # What Gemma 3 does: a window and a rotary base of its own in most layers.
    "local and global": dataclasses.replace(
        SMALL,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        kinds="1(window=2; rotary_base=50; attention_scale=0.3) 1(plan=albert)",
    ),
    "wide below, narrow above": dataclasses.replace(
        SMALL,
        num_layers=5,
        kinds=[
            (2, dict(num_heads=1, head_dim=6, ffn_width=7)),
            (3, dict(num_heads=3, head_dim=2, plan="cla:2", positions="none")),
        ],
    ),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 9)))


def weights(config):
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), TOKENS)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: rng.normal(size=a.shape) * 0.7, shapes)


def in_float64(config):
    return dataclasses.replace(config, dtype="float64")


def by_hand(name, params, tokens, gates):
    """The layers one by one, by what the strings above say of each; logits and probabilities."""
    near = jnp.asarray(~np.tri(9, k=-3, dtype=bool))  # two tokens back, and what is hidden anyway
    angles = lambda base: rotary_angles(jnp.arange(9), 4 if "global" in name else 6, base=base)
    heads = functools.partial(HeadSpec, "standard", 6, biases="qvo")
    if name == "local and global":
        narrow, wide = heads(4, 2, 4, scale=0.3), heads(4, 2, 4)
        one = lambda i: (narrow, 5, angles(50.0), near, "layers_0", i, None)
        two = lambda i: (wide, 5, angles(1e4), None, "layers_1", i, None)
        layers = [one(0), two(0), one(1), two(0), one(2)]
    else:
        narrow = heads(3, head_dim=2)
        layers = [(heads(1, head_dim=6), 7, angles(1e4), None, "layers_0", i, None) for i in (0, 1)]
        # Neighbours read the keys and values of the first of them.
        layers += [(narrow, 5, None, None, "layers_1", i, k) for i, k in ((0, 0), (1, 0), (2, 1))]
    x, seen, memory = params["embedding"][tokens], [], None
    for i, (spec, width, rotary, mask, stack, slot, keys) in enumerate(layers):
        w = {
            p: jax.tree.map(lambda a, s=slot: a[s], params[stack][p]) for p in ("attention", "ffn")
        }
        block = BlockSpec(spec, width, is_causal=True)
        if keys is not None:
            w["attention"] = w["attention"] | jax.tree.map(
                lambda a, k=keys: a[k], params[stack]["kv"]
            )
            reuse = slot == 1
            block = block._replace(kv_apart=False)
            memory = memory if reuse else store(w["attention"], x)
        given = dict(mask=mask, rotary=rotary, head_gate=gates[i], show=("probs",))
        ran = transformer_block(w, x, spec=block, memory=memory, reuse=True, **given)
        x = ran.x
        seen.append(ran.shown["probs"])
    return layer_norm(params["final_norm"], x) @ params["embedding"].T, seen


def store(w, x):
    """k and v of a layer, written out."""
    x = layer_norm(w["norm"], x)
    k, v = (jnp.einsum("btd,dnh->btnh", x, w[n]) for n in "kv")
    return {"k": k, "v": v + w["v_bias"]}


@pytest.mark.parametrize("name", deep(list(CONFIGS), "local and global"))
def test_equals_a_loop_over_the_layers(name, x64):
    """Outputs, probabilities and gradients, with gates, to 1e-10."""
    config, rng = in_float64(CONFIGS[name]), np.random.default_rng(2)
    params, seed = weights(config), rng.normal(size=(2, 9, 11))
    counts = [config.stacks[stack].num_heads for stack in config.layer_names]
    gates = [rng.normal(size=n) for n in counts]

    def ours(params):
        logits, shown = config.build().apply(
            {"params": params}, TOKENS, head_gate=gates, show=("probs",)
        )
        return jnp.sum(logits * seed), (logits, list(shown["probs"]))

    def theirs(params):
        logits, probs = by_hand(name, params, TOKENS, gates)
        return jnp.sum(logits * seed), (logits, probs)

    (got, dgot), (expected, dexpected) = jax.jit(
        lambda p: [jax.grad(f, has_aux=True)(p)[::-1] for f in (ours, theirs)]
    )(params)
    assert_close(got, expected, loosen=100)
    assert_close(dgot, dexpected, loosen=100)
    for a in jax.tree.leaves(dexpected):
        assert np.abs(a).max() > 1e-9  # nothing here is zero by accident


KINDS = {
    "in turn": lambda depth: "1(window=2) 1(num_heads=2)",
    "one behind the other": lambda depth: f"{depth // 2}(num_heads=1) {depth // 2}(num_heads=6)",
    "five to one": lambda depth: "5(window=2) 1()",
}


@pytest.mark.parametrize("name", deep(list(KINDS), "in turn"))
def test_one_program_at_every_depth(name):
    def lines(depth):
        config = dataclasses.replace(SMALL, head_dim=2, num_layers=depth, kinds=KINDS[name](depth))
        model = config.build()
        shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
        loss = lambda p: jnp.sum(model.apply({"params": p}, TOKENS))
        text = jax.jit(jax.grad(loss)).lower(shapes).as_text().splitlines()
        # JAX 0.7 writes a constant less where there is one turn alone.
        return sum("stablehlo.constant" not in line for line in text)

    depths = (12, 48, 96) if name == "five to one" else (2, 12, 48, 96)
    assert len({lines(depth) for depth in depths}) == 1


@pytest.mark.slow
def test_caches_of_windows_go_round(x64):
    """Token by token, with room for a window alone where there is one, as the whole text says."""
    config = in_float64(CONFIGS["local and global"])
    model, params = config.build(), weights(config)
    cache = config.empty_cache(2, 9, piece=2)
    assert cache["layers_0"]["k"].shape == (3, 2, 4, 2, 4)
    assert cache["layers_1"]["k"].shape == (2, 2, 9, 2, 4)

    @jax.jit
    def both(params, cache):
        first, cache = prefill(model, params, TOKENS[:, :5], cache)
        step = lambda c, token: model.apply({"params": params}, token[:, None], cache=c)[::-1]
        _, rest = jax.lax.scan(step, cache, TOKENS[:, 5:].T)
        return jnp.concatenate([first, rest[:, :, 0].swapaxes(0, 1)], axis=1)

    assert_close(both(params, cache), jax.jit(model.apply)({"params": params}, TOKENS), loosen=100)
    with pytest.raises(ValueError, match="do not fit a cache of size 4"):
        prefill(model, params, TOKENS, config.empty_cache(2, 4))


@pytest.mark.slow
def test_text_goes_on_as_without_a_cache():
    config = CONFIGS["local and global"]
    model, params = config.build(), jax.tree.map(jnp.asarray, weights(config))
    text = TOKENS
    for _ in range(5):
        text = jnp.concatenate([text, model.apply({"params": params}, text)[:, -1:].argmax(-1)], 1)
    np.testing.assert_array_equal(generate(model, params, TOKENS, 5), text[:, 9:])


def test_what_is_counted():
    config = CONFIGS["wide below, narrow above"]
    leaves = jax.tree.leaves(weights(config))
    assert accounting.unique_parameters(config) == sum(a.size for a in leaves)
    outer = 11 * 6 + 2 * 6
    stacks = config.stacks.values()
    alone = [accounting.unique_parameters(c) - outer for c in stacks]
    assert accounting.unique_parameters(config) == outer + sum(alone)
    # Keys and values of float32: two layers of one head of 6, two of three layers with 3 of 2.
    assert accounting.model_cache_bytes(config) == 4 * 2 * (2 * 6 + 2 * 3 * 2)
    readout = 2 * 6 * 11
    flops = [accounting.flops_per_token(c, 7) - readout for c in stacks]
    assert accounting.flops_per_token(config, 7) == readout + sum(flops)
    told = accounting.applied_parameters(CONFIGS["local and global"])
    plan_less = dataclasses.replace(
        CONFIGS["local and global"], kinds="1(window=2; rotary_base=50) 1()"
    )
    assert told == accounting.unique_parameters(plan_less)


@pytest.mark.slow
def test_plans_of_kinds_are_taken_apart():
    """Every layer a copy of what it used; kinds stay."""
    config = dataclasses.replace(
        SMALL, num_layers=6, head_dim=2, plan="albert", kinds="2(window=1) 1()"
    )
    params = jax.tree.map(jnp.asarray, weights(config))
    alone, copied = unshare(config, params)
    assert alone.kinds == config.kinds
    assert copied["layers_0"]["ffn"]["up"].shape[0] == 4
    got, expected = (
        c.build().apply({"params": p}, TOKENS) for c, p in ((alone, copied), (config, params))
    )
    assert_close(got, expected)
    with pytest.raises(ValueError, match="give the name of a plan"):
        change_plan(config, params, config.layer_plan)


@pytest.mark.slow
def test_what_looks_at_a_model():
    """Maps where every layer has as many heads; where not, and for what reads weights, a reason."""
    config = CONFIGS["local and global"]
    params = jax.tree.map(jnp.asarray, weights(config))
    told = explain_model(config, {"tokens": TOKENS})
    assert set(told) == {"layers_0", "layers_1"}
    assert "chosen" in told["layers_0"]
    # Muon sees matrices of heads, whose names say in what.
    assert weight_axes(config)(params)["layers_1"]["attention"]["k"] == (1, 2)
    with pytest.raises(ValueError, match="have no heads in common"):
        remove_heads(config, params, {0: [0]})
    other = dataclasses.replace(SMALL, head_dim=2, kinds="1(num_heads=1) 1()")
    with pytest.raises(ValueError, match="no published format can say this model"):
        pretrained.save("unused", other.build(), weights(other))


def test_one_way_to_write_them():
    """A string, or pairs: equal configs, of one hash, that JSON keeps."""
    pairs = [(2, dict(window=3, rotary_base=50.0, plan="cycle:2")), (1, {})]
    config = dataclasses.replace(SMALL, num_layers=6, kinds=pairs)
    text = " 2(window=3 ;rotary_base=5e1; plan=cycle:2) 1()"
    assert dataclasses.replace(SMALL, num_layers=6, kinds=text) == config
    assert len({config, dataclasses.replace(SMALL, num_layers=6, kinds=text)}) == 1
    assert config.kinds == "2(window=3; rotary_base=50.0; plan=cycle:2) 1()"
    assert dataclasses.replace(config, kinds=json.loads(json.dumps(config.kinds))) == config
    by_part = "2(plan=attention=0,1,0,1 ffn=0,0,0,0; rotary_scaling=llama3:8,1,4,8192) 1()"
    one = dataclasses.replace(SMALL, num_layers=6, kinds=by_part).stacks["layers_0"]
    assert (one.layer_plan["ffn"], one.rotary_scaling) == ((0,) * 4, "llama3:8,1,4,8192")
    # A word may be empty.
    bare = [(1, dict(attention_biases="")), (1, {})]
    one = dataclasses.replace(SMALL, num_layers=2, kinds=bare)
    assert (one.kinds, one.stacks["layers_0"].heads.biases) == ("1(attention_biases=) 1()", "")
    # The same fields twice are one kind.
    turns = dataclasses.replace(SMALL, num_layers=4, kinds="1(window=1) 2() 1(window=1)")
    assert turns.layer_names == ("layers_0", "layers_1", "layers_1", "layers_0")
    plans = training.checkpoint.describe_model(turns.build())["plans"]
    assert plans["layer_plan"]["ffn"] == [0, 2, 3, 1]


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ("2(window=3) 1", r"is not read; write it as '5\(window=511; rotary_base=1e4\) 1\(\)'"),
        ("2(window) 1()", "is not read; write it as"),
        (3, "is not read; write it as"),
        ("2(windw=3) 1()", "unknown field of a kind 'windw': did you mean 'window'"),
        ("2(window=wide) 1()", "kinds: window=wide should be int or None$"),
        ("2(window=) 1()", "kinds: window= should be int or None$"),
        ("2(norm=post) 1()", "norm is of the whole model; set it in the config"),
        ("0(window=3) 1()", "a run has at least 1 layer, not 0"),
        ("2(window=3)", "names one kind of layer; set its fields in the config"),
        ("4(window=3) 1()", "names 5 layers, num_layers is 4"),
        (
            "1(head_dim=3) 1()",
            r"the 2 layers of the kind 2\(head_dim=3\): rotary positions turn pai",
        ),
        ("1(plan=cla:3) 1()", r"of the kind 2\(plan=cla:3\): plan 'cla:3' needs a number of"),
        ("1(positions=learned) 1()", "'rotary' in some layers and 'none' in others"),
    ],
)
def test_kinds_that_are_no_model(kinds, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(SMALL, num_heads=3, head_dim=2, kinds=kinds)


def test_where_one_kind_is_meant():
    with pytest.raises(ValueError, match="relative positions are one table for 4 heads"):
        ModelConfig(positions="relative", kinds="1(num_heads=2) 1()")
    with pytest.raises(ValueError, match="not of an encoder_decoder"):
        ModelConfig(kind="encoder_decoder", kinds="1(window=2) 1()")
    config = CONFIGS["wide below, narrow above"]
    with pytest.raises(ValueError, match="have no heads in common; each model of config"):
        _ = config.heads
    params = {"params": weights(config)}
    for model, cache in ((config, SMALL.empty_cache(2, 9)), (SMALL, config.empty_cache(2, 9))):
        call = functools.partial(model.build().apply, cache=cache)
        with pytest.raises(ValueError, match="is that of another model; make it with config"):
            jax.eval_shape(call, {"params": weights(model)}, TOKENS)
    call = functools.partial(config.build().apply, head_gate=[np.ones(3)] * 3)
    with pytest.raises(ValueError, match="3 gates for 5 layers"):
        jax.eval_shape(call, params, TOKENS)
    call = functools.partial(config.build().apply, head_gate=np.ones((5, 3)))
    with pytest.raises(ValueError, match="layers have 1 or 3 heads: give head_gate as 5 arrays"):
        jax.eval_shape(call, params, TOKENS)
