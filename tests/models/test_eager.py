"""Calls outside of `jit`: compiled once, the bits of the jitted call, nothing kept for ever."""

import gc
import weakref

import jax
import numpy as np
import pytest
from conftest import assert_close
from jax.extend import backend
from random_models import random_params
from test_models import SMALL, change

from attnlab import FFN, capture, dot_product_attention, generate
from attnlab.heads import Standard, init, multi_head_attention
from attnlab.models import Dropout, Experts, feed_forward, param_shapes
from attnlab.models.ffn import init_ffn
from attnlab.models.generate import prefill

CONFIG = change(SMALL, max_len=12)
LAYOUT = Standard(width=8, num_heads=2)
TOKENS = np.arange(10).reshape(2, 5)
DROPS = {"deterministic": False, "rngs": {"dropout": jax.random.key(2)}}


def apply(config=CONFIG, tokens=TOKENS, **inputs):
    return config.build().apply({"params": random_params(config)}, tokens, **inputs)


def decode():
    cache = prefill(random_params(CONFIG), TOKENS, CONFIG, CONFIG.init_cache(2, 7)).cache
    return apply(tokens=TOKENS[:, :1], cache=cache)


def attention(length, **options):
    q = np.ones((1, length, 2, 4), "float32")
    return dot_product_attention(q, q, q, **options)


def experts():
    ffn = FFN(width=6, experts=Experts(num_experts=3, top_k=2))
    params = init_ffn(jax.random.key(0), 4, ffn)
    return jax.grad(lambda x: feed_forward(params, x, ffn).sum())(np.ones((2, 5, 4), "float32"))


PACKED = np.array([[1, 1, 1, 2, 2, 3, 0]])
CALLS = {
    "apply": apply,
    "apply_capture": lambda: apply(capture=("probs", "q")),
    "a padding mask": lambda: apply(padding_mask=[[1, 1, 1, 1, 0], [1] * 5]),
    "dropout": lambda: apply(change(CONFIG, dropout=Dropout(rate=0.3)), **DROPS),
    "generate": lambda: generate(random_params(CONFIG), TOKENS, CONFIG, 3),
    "prefill and decode": decode,
    "heads": lambda: capture(
        multi_head_attention, init(jax.random.key(0), LAYOUT), np.ones((2, 5, 8), "float32"),
        LAYOUT, names=("probs",),
    ),
    "blockwise": lambda: attention(40, is_causal=True, implementation="blockwise"),
    "packed texts": lambda: attention(7, segments=PACKED, implementation="dense"),
    "packed texts, blockwise": lambda: attention(7, segments=PACKED, implementation="blockwise"),
    "experts": experts,
    "lists for arrays": lambda: apply(
        mask=np.tri(5).astype(bool).tolist(), head_mask=[[1.0, 0.5, 2.0]] * 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_compiles_nothing(name, caplog):
    jax.block_until_ready(CALLS[name]())
    caplog.clear()
    with jax.log_compiles():
        CALLS[name]()
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]


def test_values_are_checked_before_a_kept_program_runs():
    apply()
    with pytest.raises(ValueError, match="19"):
        apply(tokens=TOKENS + 10)
    with pytest.raises(ValueError, match="12"):
        apply(positions=np.arange(5) + 9)
    params = random_params(change(CONFIG, vocab_size=9))
    with pytest.raises(ValueError, match="embedding"):
        CONFIG.build().apply({"params": params}, TOKENS)


def test_a_patch_is_called_every_time_and_not_kept():
    class Scale:
        by = 2.0

        def __call__(self, value, layer):
            return self.by * value

    scale = Scale()
    first = apply(patch={"heads": scale}).logits
    scale.by = 1.0
    assert_close(apply(patch={"heads": scale}).logits, apply().logits)
    assert np.abs(first - apply().logits).max() > 0.1
    alive = weakref.ref(scale)
    del scale
    gc.collect()
    assert alive() is None


def test_traced_calls_are_part_of_the_callers_program():
    """Also where nothing that they are given is traced: its scan is not inside a call."""
    program = jax.make_jaxpr(lambda: apply().logits)()
    assert "scan" in {equation.primitive.name for equation in program.eqns}


@pytest.mark.slow
def test_programs_of_many_configs_are_dropped():
    before = len(backend.get_backend().live_executables())
    for number in range(80):
        config = change(CONFIG, max_len=12 + number, num_layers=1)
        params = jax.tree.map(lambda a: np.ones(a.shape, "float32"), param_shapes(config))
        config.build().apply({"params": params}, TOKENS)
        attention(3, scale=0.1 + number, implementation="blockwise")
    gc.collect()
    assert len(backend.get_backend().live_executables()) - before < 150
