"""Layers of several types: equal to a loop over them, one program at every depth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from test_models import random_params

from attnlab import capture, heads, layer_norm, prefill
from attnlab.heads.positions import rotary_angles
from attnlab.models import (
    FFN,
    Attention,
    Compute,
    LayerInputs,
    LayerOverrides,
    LayerSpec,
    ModelConfig,
    NoPositions,
    Relative,
    Rotary,
    captured_per_layer,
    param_shapes,
    transformer_layer,
)

QVO = ("q", "v", "o")
SMALL = ModelConfig(
    width=6, vocab_size=11, max_len=16, num_layers=5, ffn=FFN(width=5), positions=Rotary(),
    heads=heads.Standard(num_heads=3, head_dim=2, biases=QVO),
)  # fmt: skip
GROUPED = heads.Standard(num_heads=4, num_kv_heads=2, head_dim=4, biases=QVO)
CONFIGS = {
    # As Gemma 3: a window and a rotary base of its own in most layers.
    "local and global": dataclasses.replace(
        SMALL, heads=GROUPED,
        layer_types=(
            (1, LayerOverrides(
                window=2, positions=Rotary(base=50.0), heads=dataclasses.replace(GROUPED, scale=0.3)
            )),
            (1, LayerOverrides(sharing="albert")),
        ),
    ),
    "one head below, three above": dataclasses.replace(
        SMALL,
        layer_types=(
            (2, LayerOverrides(heads=heads.Standard(num_heads=1, head_dim=6, biases=QVO),
                               ffn=FFN(width=7))),
            (3, LayerOverrides(sharing="cla:2", positions=NoPositions())),
        ),
    ),
}  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 9)))


def in_float64(config):
    return dataclasses.replace(config, compute=Compute(dtype="float64"))


def params_of(config):
    return jax.tree.map(lambda a: 0.7 * a.astype(jnp.float64), random_params(config))


def layers_by_hand(name):
    """(spec, rotary base, mask, stack, group, group of keys, reuses them) of every layer."""
    near = jnp.asarray(~np.tri(9, k=-3, dtype=bool))  # two tokens back, and what is masked anyway
    spec = functools.partial(LayerSpec, is_causal=True)
    if name == "local and global":
        layout = GROUPED.with_width(6)
        local = spec(heads=dataclasses.replace(layout, scale=0.3), ffn=FFN(width=5))
        everywhere = spec(heads=layout, ffn=FFN(width=5))
        return [
            (local, 50.0, near, "layers_0", i // 2, None, False) if i % 2 == 0
            else (everywhere, 1e4, None, "layers_1", 0, None, False)
            for i in range(5)
        ]  # fmt: skip
    below = spec(
        heads=heads.Standard(width=6, num_heads=1, head_dim=6, biases=QVO), ffn=FFN(width=7)
    )
    above = spec(heads=SMALL.layout, ffn=FFN(width=5))
    kv = [(0, 0, False), (1, 0, True), (2, 1, False)]
    return [(below, 1e4, None, "layers_0", i, None, False) for i in (0, 1)] + [
        (above, None, None, "layers_1", i, group, reuses) for i, group, reuses in kv
    ]


def by_hand(name, params, head_masks):
    """Logits and probabilities."""
    x, probs, entries = params["embedding"][TOKENS], [], None
    for i, (spec, base, mask, stack, group, kv, reuses) in enumerate(layers_by_hand(name)):
        weights = {
            p: jax.tree.map(lambda a, g=group: a[g], params[stack][p]) for p in ("attention", "ffn")
        }
        if kv is not None:
            own = jax.tree.map(lambda a, k=kv: a[k], params[stack]["kv"])
            weights["attention"] = weights["attention"] | own
        rotary = None
        if base is not None:
            rotary = rotary_angles(jnp.arange(9), spec.heads.size("head_dim"), base=base)
        inputs = LayerInputs(
            mask=mask, rotary=rotary, layer=i, head_mask=head_masks[i],
            shared_kv=(entries, True) if reuses else None,
        )  # fmt: skip
        outputs, values = capture(transformer_layer, weights, x, spec, inputs, names=("probs",))
        x, entries = outputs.x, outputs.kv
        probs.append(values["probs"])
    return layer_norm(params["final_norm"], x) @ params["embedding"].T, probs


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_loop_over_the_layers(name, x64):
    """Logits, probabilities and gradients, with head masks, to 1e-10."""
    config, rng = in_float64(CONFIGS[name]), np.random.default_rng(2)
    params, seed = params_of(config), rng.normal(size=(2, 9, 11))
    counts = [config.stacks[stack].heads.num_heads for stack in config.layer_names]
    head_masks = [jnp.asarray(rng.normal(size=n)) for n in counts]
    model = config.build()

    def ours(params):
        outputs = model.apply({"params": params}, TOKENS, head_mask=head_masks, capture=("probs",))
        probs = captured_per_layer(outputs.captured, "probs", config.layer_names)
        return jnp.sum(outputs.logits * seed), (outputs.logits, list(probs))

    def theirs(params):
        logits, probs = by_hand(name, params, head_masks)
        return jnp.sum(logits * seed), (logits, probs)

    got, expected = jax.jit(lambda p: [jax.grad(f, has_aux=True)(p) for f in (ours, theirs)])(
        params
    )
    assert_close(got, expected, loosen=100)
    for a in jax.tree.leaves(expected[0]):
        assert np.abs(a).max() > 1e-9  # nothing here is zero by accident


def turns(first, second):
    return ((1, first), (1, second))


PATTERNS = {
    "in turn": lambda n: turns(
        LayerOverrides(window=2),
        LayerOverrides(heads=heads.Standard(num_heads=2, head_dim=2)),
    ),
    "one behind the other": lambda n: (
        (n // 2, LayerOverrides(ffn=FFN(width=7))), (n // 2, LayerOverrides())
    ),
    "five to one": lambda n: ((5, LayerOverrides(window=2)), (1, LayerOverrides())),
}  # fmt: skip


@pytest.mark.parametrize("name", deep(list(PATTERNS), "in turn"))
def test_the_program_is_as_long_at_every_depth(name):
    def lines(depth):
        config = dataclasses.replace(SMALL, num_layers=depth, layer_types=PATTERNS[name](depth))
        model = config.build()

        def loss(params):
            return jnp.sum(model.apply({"params": params}, TOKENS).logits)

        text = jax.jit(jax.grad(loss)).lower(param_shapes(config)).as_text().splitlines()
        # Some versions of JAX write one constant less where the pattern does not repeat.
        return sum("stablehlo.constant" not in line for line in text)

    depths = (12, 48, 96) if name == "five to one" else (2, 12, 48, 96)
    assert len({lines(depth) for depth in depths}) == 1


def test_a_window_needs_a_small_ring(x64):
    """Token by token, with room for the window alone in the layers that have one."""
    config = in_float64(CONFIGS["local and global"])
    params, model = params_of(config), config.build()
    cache = config.init_cache(2, 9, piece=2)
    assert cache["layers_0"]["k"].shape == (3, 2, 4, 2, 4)
    assert cache["layers_1"]["k"].shape == (2, 2, 9, 2, 4)

    @jax.jit
    def both(params, cache):
        first, cache = prefill(params, TOKENS[:, :5], config, cache)

        def step(cache, token):
            outputs = model.apply({"params": params}, token[:, None], cache=cache)
            return outputs.cache, outputs.logits[:, 0]

        _, rest = jax.lax.scan(step, cache, TOKENS[:, 5:].T)
        return jnp.concatenate([first, rest.swapaxes(0, 1)], axis=1)

    whole = jax.jit(lambda p: model.apply({"params": p}, TOKENS).logits)(params)
    assert_close(both(params, cache), whole, loosen=100)
    with pytest.raises(ValueError, match="do not fit a cache of size 4"):
        prefill(params, TOKENS, config, config.init_cache(2, 4))


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (((2, LayerOverrides(window=3)), 1), r"pairs \(count, LayerOverrides"),
        (((0, LayerOverrides(window=3)), (1, LayerOverrides())), "number of layers"),
        (((2, LayerOverrides(window=3)),), "has one type of layer; set its fields in the config"),
        (((5, LayerOverrides(window=3)), (1, LayerOverrides())), "has 6 layers, num_layers is 5"),
        (
            turns(LayerOverrides(heads=heads.Standard(num_heads=2, head_dim=3)), LayerOverrides()),
            "the 3 layers of type .*rotary positions rotate pairs",
        ),
        (turns(LayerOverrides(sharing="cla:9"), LayerOverrides()), "of type .*'cla:9' needs a"),
        (turns(LayerOverrides(positions=Relative()), LayerOverrides()), "'relative' and 'rot"),
    ],
)
def test_layer_types_that_are_no_model(types, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, layer_types=types)


def test_what_needs_one_number_of_heads():
    two = LayerOverrides(heads=heads.Standard(num_heads=2))
    with pytest.raises(ValueError, match="relative positions are one table for 4 heads"):
        ModelConfig(positions=Relative(), layer_types=turns(two, LayerOverrides()))
    config = CONFIGS["one head below, three above"]
    model, params = config.build(), {"params": random_params(config)}
    for mask, message in (
        ([np.ones(3)] * 3, "head_mask"),
        (np.ones((5, 3)), "layers have 1 or 3 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply(params, TOKENS, head_mask=mask)
    with pytest.raises(ValueError, match="another model"):
        model.apply(params, TOKENS, cache=SMALL.init_cache(2, 9))
    with pytest.raises(ValueError, match="not for an encoder_decoder"):
        ModelConfig(
            kind="encoder_decoder",
            layer_types=turns(LayerOverrides(window=2), LayerOverrides()),
        )
    with pytest.raises(ValueError, match="give window or full_attention=True, not both"):
        LayerOverrides(window=3, full_attention=True)
    windows = dataclasses.replace(SMALL, attention=Attention(window=3))
    types = turns(LayerOverrides(full_attention=True), LayerOverrides())
    stacks = dataclasses.replace(windows, layer_types=types).stacks
    assert [c.attention.window for c in stacks.values()] == [None, 3]
