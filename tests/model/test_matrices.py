"""What is told of a weight's axes is what the model does with it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import LAYOUTS, ModelConfig, training
from attnlab.model.matrices import weight_axes

SIZES = dict(width=24, num_heads=3, ffn_width=40, vocab_size=31, max_len=7, num_layers=2)


def drawn(config):
    tokens = jnp.zeros((1, 3), jnp.int32)
    texts = {"source": tokens} if config.kind == "encoder_decoder" else {}
    return config.build().init(jax.random.key(0), tokens=tokens, **texts)["params"]


def named(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda a: isinstance(a, tuple))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_what_the_fan_counts(layout):
    """Initial weights have a deviation of 1/sqrt(rows): rows are what an output sums over."""
    config = ModelConfig(layout=layout, **SIZES, plan="separate", attention_biases="")
    params = drawn(config)
    axes = named(weight_axes(config)(params))
    heads = {n: a for n, a in named(params).items() if n.startswith("layers.attention")}
    matrices = {n: a for n, a in heads.items() if axes[n][0] and not n.endswith("mix")}
    assert matrices
    for name, a in matrices.items():
        reads, makes = axes[name]
        rows = math.prod(a.shape[a.ndim - reads - makes : a.ndim - makes])
        mean = config.heads.maps[name.rpartition(".")[2]].mean  # taken later, it makes up for it
        rows /= math.prod(config.heads.sizes[letter] for letter in mean)
        assert np.std(a) * rows**0.5 == pytest.approx(1, rel=0.25), name


def test_by_hand():
    config = ModelConfig(
        **SIZES, kind="encoder_decoder", layout="narrow", positions="relative", qk_norm="rms"
    )
    found = named(weight_axes(config)(drawn(config)))
    part = "layers.attention"
    expected = {
        f"{part}.q": (1, 1), f"{part}.o": (2, 1), f"{part}.q_bias": (0, 2),
        f"{part}.q_norm": (0, 1), f"{part}.norm.scale": (0, 1), "layers.ffn.down": (1, 1),
        "layers.cross.k": (1, 1), "encoder_layers.ffn.up": (1, 1), "embedding": (1, 1),
        "relative_bias": (0, 2), "final_norm.bias": (0, 1),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    standard = named(weight_axes(ModelConfig(**SIZES))(drawn(ModelConfig(**SIZES))))
    assert [standard[f"{part}.{name}"] for name in "qkvo"] == [(1, 2)] * 3 + [(2, 1)]


@pytest.mark.parametrize("plan", ["albert", "cla:2", "relaxed:1", "dictionary:2"])
@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
def test_optimizers_that_ask_take_every_weight(name, plan):
    """Shapes come back as they were, under plans with parts of their own."""
    config = ModelConfig(**SIZES, plan=plan, talking_heads=True, layout="narrow")
    trains = training.TrainConfig(optimizer=name)
    transform = training.make_optimizer(trains, weight_axes(config)).transform
    params = jax.eval_shape(lambda: drawn(config))
    updates, _ = jax.eval_shape(lambda p: transform.update(p, transform.init(p), p), params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
