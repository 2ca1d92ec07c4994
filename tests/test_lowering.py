"""Every backend, order, plan and decoding lowers for GPUs and TPUs, or says why not: no device."""

import contextlib
import dataclasses
import functools
import re
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from conftest import shape
from jax import export

import attnlab
import attnlab.contrib
from attnlab import BACKENDS, FFN, LAYOUTS, ModelConfig, heads, masks
from attnlab.attention.jax_nn import assume_device
from attnlab.data import DataSizes
from attnlab.models import Attention, Compute
from attnlab.training import TrainConfig, make_optimizer
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.step import init_state, map_over_seeds, train_step

DEVICES = {"gpu": "cuda", "tpu": "tpu"}
"""What JAX calls a backend -> what a program is lowered for. A GPU here has no cuDNN, whose version
JAX asks of the device before it lowers."""
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture
def seen_from(monkeypatch):
    """Choices are made for the device of the process: pretend that this one has another."""

    def pretend(device):
        monkeypatch.setattr(jax, "default_backend", lambda: device)
        assumed.enter_context(assume_device(device))
        return DEVICES[device]

    jax.clear_caches()  # what was traced for one device is not for the next
    with contextlib.ExitStack() as assumed:
        yield pretend
    jax.clear_caches()


def few(cases, *kept):
    """All but those `kept` are slow."""
    of = lambda case: () if case in kept else pytest.mark.slow
    return [pytest.param(*case, marks=of(case)) for case in cases]


def lowered(platform, f, *args):
    """The program for a device that is not here."""
    return export.export(jax.jit(f), platforms=[platform])(*args).mlir_module()


SIZES = {"heads": (4, 2, 2), "lengths": (6, 10), "widths": (16, 24)}
"""N, K, Kv; T, S; H, V of a call of `dot_product_attention` that says nothing else."""
CALLS = {
    "causal": {"is_causal": True},
    "plain, one head of keys": {"heads": (4, 1, 1), "widths": (5, 5)},
    "other value heads": {"heads": (4, 2, 1)},
    "heads of 200": {"widths": (200, 200)},
    "heads of 320": {"widths": (320, 320)},
    "heads of 192 and 128": {"is_causal": True, "widths": (192, 128)},
    "heads of 1024": {"bias": shape(4, 1, 10), "heads": (4, 1, 1), "widths": (1024, 576)},
    "mask": {"mask": shape(2, 1, 6, 10, dtype="bool")},
    "an odd number of queries": {"lengths": (5, 10)},
    "an odd number of keys": {"mask": shape(1, 7, dtype="bool"), "lengths": (6, 7)},
    "bias": {"bias": shape(4, 6, 10)},
    "lengths": {f"{of}_seq_lengths": shape(2, dtype="int32") for of in ("query", "key_value")},
    "window": {"local_window_size": (2, 1)},
    "causal window": {"local_window_size": 3, "is_causal": True},
    "soft cap": {"logits_soft_cap": 5.0},
    "residual": {"return_residual": True},
    "dropout": {"dropout_key": shape(2, dtype="uint32"), "dropout_rate": 0.2},
    "sink": {"sink": shape(4, 1, 1)},
    "talking heads": {"talking_heads": (shape(4, 4), shape(4, 4))},
    "edges": {"mask": masks.Edges(shape(9, dtype="int32"), shape(9, dtype="int32"))},
    "blocks": {"is_causal": True, "lengths": (1100, 1300)},
}


@pytest.mark.parametrize(
    ("call", "dtype", "device"),
    few(
        product(CALLS, DTYPES, DEVICES),
        ("causal", "bfloat16", "gpu"),
        ("causal", "bfloat16", "tpu"),
    ),
)
def test_a_backend_lowers_or_says_why(call, dtype, device, seen_from):
    """Forward and backward; what says that it could run is not refused by the compiler."""
    platform, options = seen_from(device), SIZES | CALLS[call]
    (n, k, kv), (t, s), (h, v) = (options.pop(name) for name in SIZES)
    qkv = [shape(2, *a, dtype=dtype) for a in ((t, n, h), (s, k, h), (s, kv, v))]
    is_shape = lambda a: isinstance(a, jax.ShapeDtypeStruct)
    arrays = {name: a for name, a in options.items() if all(map(is_shape, jax.tree.leaves(a)))}

    def gradient(name, qkv, arrays):
        def loss(qkv):
            out = attnlab.dot_product_attention(*qkv, **(options | arrays), implementation=name)
            return sum(jnp.sum(a.astype(jnp.float32)) for a in jax.tree.leaves(out))

        return jax.value_and_grad(loss)(qkv)

    reasons = attnlab.explain(*qkv, **options)
    can = [name for name in BACKENDS if reasons[name].startswith(("chosen", "could run"))]
    text = lowered(platform, lambda *a: [gradient(name, *a) for name in can], qkv, arrays)
    assert ("tpu_custom_call" in text) == ("splash" in can)
    assert "cudnn" not in can
    assert can[0] == "dense"
    for name in set(BACKENDS) - set(can):
        with pytest.raises(ValueError, match=re.escape(reasons[name])):
            jax.eval_shape(functools.partial(gradient, name), qkv, arrays)


@pytest.mark.parametrize(
    ("layout", "rotary", "device"),
    few(
        product(LAYOUTS, [False, True], DEVICES),
        ("wide", False, "tpu"),
    ),
)
def test_an_order_lowers_or_says_why(layout, rotary, device, seen_from):
    """Forward and backward in bfloat16, and a step behind a cache."""
    platform = seen_from(device)
    made = LAYOUTS[layout](width=24, num_heads=3, biases=LAYOUTS[layout].bias_names)
    x, new = shape(2, 8, 24, dtype="bfloat16"), shape(2, 1, 24, dtype="bfloat16")
    w = {name: shape(*sizes) for name, sizes in heads.weight_shapes(made).items()}

    def angles(a):
        return jnp.ones((a.shape[1], (made.rotary_size or 0) // 2)) if rotary else None

    def gradient(order, w, x):
        def loss(w, x):
            options = dict(order=order, rotary=angles(x), is_causal=True)
            return jnp.sum(attnlab.multi_head_attention(w, x, made, **options).astype(jnp.float32))

        return jax.value_and_grad(loss, (0, 1))(w, x)

    def step(order, w, x):
        cache = heads.init_cache(made, 2, 6, jnp.bfloat16, order=order)
        return heads.decode(w, x, made, cache, rotary=angles(x), order=order)[0]

    sizes = heads.CallSizes(batch=2, num_queries=8, num_keys=8, rotary=rotary)
    orders = heads.contraction_orders(made, sizes)
    can = [order for order, cost in orders.items() if isinstance(cost, int)]
    if not (rotary and made.rotary_size is None):
        assert can[0] == "factored"
        lowered(platform, lambda *a: [gradient(order, *a) for order in can], w, x)
        lowered(platform, lambda *a: [step(order, *a) for order in can], w, new)
    for order in set(orders) - set(can):
        with pytest.raises(ValueError, match=re.escape(str(orders[order]))):
            jax.eval_shape(functools.partial(gradient, order), w, x)


MODEL = ModelConfig(
    vocab_size=19, max_len=12, width=16, num_layers=4, heads=heads.Standard(num_heads=2),
    ffn=FFN(width=20), compute=Compute(dtype="bfloat16"),
)  # fmt: skip
KINDS = {
    "decoder": ({}, "causal_lm"),
    "encoder": ({"kind": "encoder", "vocab_size": 20}, "masked_lm"),
    "encoder_decoder": ({"kind": "encoder_decoder", "vocab_size": 119}, "span_corruption"),
}


STEPS = [  # every plan, with kinds and devices in turn
    (plan, list(KINDS)[i % 3], list(DEVICES)[i % 2]) for i, plan in enumerate(attnlab.plan_names(2))
]


@pytest.mark.parametrize(("plan", "kind", "device"), few(STEPS, ("albert", "encoder", "tpu")))
def test_a_training_step_lowers(plan, kind, device, seen_from):
    """Of two seeds side by side, as on an accelerator."""
    platform, (changes, objective) = seen_from(device), KINDS[kind]
    model = dataclasses.replace(MODEL, sharing=plan, **changes).build()
    objective = OBJECTIVES[objective].bind(DataSizes(19, 12))
    transform = make_optimizer(TrainConfig()).transform
    batch = {"tokens": shape(4, 13, dtype="int32")}

    def run(batch, seeds):
        first = functools.partial(init_state, model, objective, transform, batch)
        step = lambda state, seed: train_step(model, objective, transform, state, batch, seed)
        return map_over_seeds(step)(map_over_seeds(first)(seeds), seeds)

    lowered(platform, run, batch, shape(2, dtype="int32"))


@pytest.mark.parametrize(("layout", "device"), few(product(LAYOUTS, DEVICES)))
def test_decoding_lowers(layout, device, seen_from):
    """The whole loop: rows of lengths of their own, a window, drawn tokens."""
    platform = seen_from(device)
    layers = dict(heads=LAYOUTS[layout](num_heads=2), attention=Attention(window=3))
    config, prompt = dataclasses.replace(MODEL, **layers), shape(2, 5, dtype="int32")
    params = jax.eval_shape(config.build().init, jax.random.key(0), prompt)["params"]
    sampling = attnlab.Sampling(temperature=0.7, top_k=5, top_p=0.9)

    def write(params, prompt, real, key):
        key = jax.random.wrap_key_data(key)
        return attnlab.generate(
            params, prompt, config, 4, key=key, sampling=sampling, end=3, padding_mask=real
        )

    args = params, prompt, shape(2, 5, dtype="bool"), shape(2, dtype="uint32")
    lowered(platform, write, *args)
