"""Every plan and every pattern of layer types, at every depth: one program, the outputs and
gradients of a loop over the layers."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, diagonal
from random_models import random_params

from attnlab import Plan, capture, layer_norm, models, run_layers, transformer_layer
from attnlab.heads import Standard
from attnlab.heads.positions import rotary_angles
from attnlab.models import FFN, Attention, Compute, LayerInputs, LayerOverrides, NoPositions, Rotary
from attnlab.sharing import layer_params
from attnlab.sharing.plan import PLANS, all_shared, inner_groups, parse_plan, separate

QVO = ("q", "v", "o")  # without a bias of keys, whose gradient is zero
SMALL = models.ModelConfig(
    width=6, vocab_size=11, max_len=9, ffn=FFN(width=5), positions=Rotary(), delta_rank=2,
    heads=Standard(num_heads=3, num_kv_heads=1, head_dim=4, biases=QVO),
)  # fmt: skip
NAMES = [*PLANS, "inner_groups", "pointers", "scaled"]
FEW = ("albert", "cla", "relaxed", "inner_groups", "pointers", "scaled")
LOCAL = LayerOverrides(
    window=2, positions=Rotary(base=50.0),
    heads=Standard(num_heads=4, num_kv_heads=2, head_dim=4, biases=QVO, scale=0.3),
)  # fmt: skip
BELOW = LayerOverrides(
    heads=Standard(num_heads=1, head_dim=6, biases=QVO), ffn=FFN(width=7), positions=NoPositions()
)
ABOVE = LayerOverrides(sharing="cla:3")
PATTERNS = {  # depth -> layer types
    "in turn": lambda n: ((1, LOCAL), (1, LayerOverrides(sharing="albert"))),
    "one behind the other": lambda n: (
        (n // 2, BELOW), (n // 2, dataclasses.replace(ABOVE, sharing=f"cla:{n // 2 - 1}"))
    ),
    "five to one": lambda n: ((5, LayerOverrides(window=2)), (1, LayerOverrides())),
}  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 9)))


def plan_of(name, depth):
    if name == "pointers":  # 0 1 0 3 ... : the first layer's keys are read all the way up
        groups = [f"@{0 if i // 2 % 2 == 0 else i - 1}" if i % 2 else i // 2 for i in range(depth)]
        return Plan(attention=separate(depth), kv=groups, ffn=all_shared(depth))
    if name == "inner_groups":
        groups = inner_groups(depth // 2, 1, 2)
        return Plan(attention=groups, ffn=groups)
    if name == "scaled":
        name = "cycle"
    if PLANS[name].takes_count:
        name += f":{depth // 2}" if name == "cla" else ":2"  # neighbours share keys, two by two
    return parse_plan(name, depth)


def config_of(name, depth, **compute):
    own = {"sharing": plan_of(name, depth)} if name in NAMES else {}
    own |= {"layer_types": PATTERNS[name](depth)} if name in PATTERNS else {}
    if name == "scaled":  # the scores of each layer
        own["attention"] = Attention(layer_scales=(1 + np.arange(depth) / depth).tolist())
    return dataclasses.replace(SMALL, num_layers=depth, compute=Compute(**compute), **own)


def loop(config, params, head_masks):
    """Logits and probabilities, layer after layer, of weights that are taken out by hand."""
    x, probs, made, seen = params["embedding"][TOKENS], [], {}, collections.Counter()
    for i, name in enumerate(config.layer_names):
        c, number = config.stacks[name], seen[name]
        seen[name] += 1
        w = layer_params(params[name], c.plan, number)
        w["attention"] |= w.pop("kv", {})
        positions, source = c.positions, c.plan.kv_sources[number]
        angles = None
        if isinstance(positions, Rotary):
            size = c.layout.size("head_dim")
            angles = rotary_angles(jnp.arange(9), size, base=positions.base)
        inputs = LayerInputs(
            layer=i, head_mask=head_masks[i], rotary=angles,
            shared_kv=(made[name, source], True) if source != number else None,
        )  # fmt: skip
        if (scales := c.attention.layer_scales) is not None:
            w["attention"] |= {q: scales[number] * w["attention"][q] for q in ("q", "q_bias")}
        options = dataclasses.replace(c.attention, layer_scales=None)
        spec = dataclasses.replace(c.layer, separate_kv=False, delta_rank=None, attention=options)
        outputs, values = capture(transformer_layer, w, x, spec, inputs, names=("probs",))
        x, made[name, number] = outputs.x, outputs.kv
        probs.append(values["probs"])
    return layer_norm(params["final_norm"], x) @ params["embedding"].T, probs


@pytest.mark.parametrize("depth", deep([2, 6, 12], 6))
@pytest.mark.parametrize("name", deep([*NAMES, *PATTERNS], *FEW, "in turn", "one behind the other"))
def test_equals_a_loop_over_the_layers(name, depth, x64):
    """Logits, probabilities and gradients, with head masks."""
    if name in PATTERNS and depth == 2:
        pytest.skip("a pattern of more layers")
    config, rng = config_of(name, depth, dtype="float64"), np.random.default_rng(2)
    params, seed = random_params(config, scale=0.5), rng.normal(size=(2, 9, 11))
    heads = [config.stacks[stack].heads.num_heads for stack in config.layer_names]
    head_masks = [jnp.asarray(rng.normal(size=n)) for n in heads]
    model = config.build()

    def ours(params):
        outputs = model.apply({"params": params}, TOKENS, head_mask=head_masks, capture=("probs",))
        probs = models.captured_per_layer(outputs.captured, "probs", config.layer_names)
        return jnp.sum(outputs.logits * seed), (outputs.logits, probs)

    def theirs(params):
        logits, probs = loop(config, params, head_masks)
        return jnp.sum(logits * seed), (logits, probs)

    both = jax.jit(lambda params: [jax.grad(f, has_aux=True)(params) for f in (ours, theirs)])
    got, expected = both(params)
    assert_close(got, expected, loosen=100)
    for a in jax.tree.leaves(expected[0]):
        assert np.abs(a).max() > 1e-9  # nothing here is zero by accident


def test_layer_types_are_configs_of_their_own():
    config = config_of("in turn", 5)
    assert config.layer_names == ("layers_0", "layers_1") * 2 + ("layers_0",)
    local, everywhere = config.stacks.values()
    assert local.layer == models.LayerSpec(
        heads=LOCAL.heads.with_width(6), ffn=SMALL.ffn, attention=Attention(window=2),
        is_causal=True,
    )  # fmt: skip
    assert everywhere.layer == dataclasses.replace(SMALL.layer, is_causal=True)
    assert (local.positions, everywhere.positions) == (LOCAL.positions, SMALL.positions)
    assert (local.plan["ffn"], everywhere.plan["ffn"]) == ((0, 1, 2), (0, 0))
    assert config.plan["attention"] == config.plan["ffn"] == (0, 3, 1, 3, 2)
    config = config_of("one behind the other", 6)
    assert config.plan["kv"] == (0, 1, 2, 3, "@3", 4)


@pytest.mark.parametrize(("name", "remat"), diagonal([*FEW, *PATTERNS], [True, False]))
def test_one_program_at_every_depth(name, remat):
    def lines(depth):
        config = config_of(name, depth, remat=remat)

        def loss(params):
            return jnp.sum(config.build().apply({"params": params}, TOKENS).logits)

        return jax.jit(jax.grad(loss)).lower(models.param_shapes(config)).as_text().count("\n")

    depths = (12, 48, 96) if name in PATTERNS else (2, 12, 96)
    assert len({lines(depth) for depth in depths}) == 1


@pytest.mark.parametrize(
    "compute", deep([{"remat": False}, {"unroll": 4}, {"unroll": 6}], {"unroll": 4})
)
@pytest.mark.parametrize("name", ["cla", "relaxed"])
def test_remat_and_unroll_change_no_gradient(name, compute, x64):
    def gradients(**compute):
        config = config_of(name, 6, dtype="float64", **compute)
        run = lambda params: config.build().apply({"params": params}, TOKENS).logits
        return jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(run(params)))))(params)

    params = random_params(config_of(name, 6, dtype="float64"))
    assert_close(gradients(**compute), gradients())


def saved_for_backward(config):
    """How often which shape is kept for the backward pass, beside the params themselves."""
    params = random_params(config, scale=0.5)["layers"]
    compute = Compute(remat=False)

    def forward(params, x):
        layers = {"layers": models.LayersOfType(params=params, plan=config.plan, spec=config.layer)}
        return run_layers(layers, config.layer_names, x, compute=compute).x

    saved = jax.tree.leaves(jax.vjp(forward, params, jnp.ones((2, 4, 6)))[1])
    shapes = lambda leaves: collections.Counter(np.shape(a) for a in leaves)
    return shapes(a for a in saved if a.dtype == jnp.float32) - shapes(jax.tree.leaves(params))


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", ["albert", "relaxed"])
def test_no_layer_keeps_a_copy_of_its_weights(name, precision):
    """Without remat the products of tokens are saved, once, and none that makes weights."""
    with jax.default_matmul_precision(precision):
        saved = saved_for_backward(config_of(name, 6))
    assert saved == {
        (6, 2, 4, 6): 2,  # what attention and the FFN of the 6 layers read
        (6, 2, 4, 3, 4): 2,  # q and heads
        (6, 2, 4, 1, 4): 2,  # k and v
        (6, 2, 3, 4, 4): 1,  # exp(scores)
        (6, 8, 5): 1,  # x W_up
    }


def test_no_layer_keeps_weights_that_it_multiplied_out():
    config = dataclasses.replace(config_of("albert", 6), positions=NoPositions())
    config = dataclasses.replace(config, attention=Attention(order="absorbed"))
    assert all(shape[:2] in ((6, 2), (6, 8)) for shape in saved_for_backward(config))
