"""Layers of several types: equal to a loop over them, one program at every depth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from test_models import random_params

from attnlab import capture, heads, layer_norm
from attnlab.heads.positions import rotary_angles
from attnlab.models import (
    FFN,
    Compute,
    LayerInputs,
    LayerOverrides,
    LayerSpec,
    ModelConfig,
    NoPositions,
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
