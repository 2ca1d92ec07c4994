"""Products of a bfloat16 model: which dtypes they have, forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import FFN, ModelConfig, dot_product_attention
from attnlab.data import DataSizes
from attnlab.heads import Narrow, Standard, Wide
from attnlab.models import Attention, Compute, OutputHead
from attnlab.training import TrainConfig, make_optimizer
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.step import init_state, train_step

MODEL = ModelConfig(
    vocab_size=19, max_len=12, width=8, num_layers=2, heads=Standard(num_heads=2),
    ffn=FFN(width=10), compute=Compute(dtype="bfloat16"),
)  # fmt: skip
MODELS = {
    "standard": {},
    "wide": {"heads": Wide(num_heads=3)},
    "narrow": {"heads": Narrow(num_heads=2)},
    "untied": {"output": OutputHead(kind="own", bias=True, soft_cap=5.0)},
    "blockwise": {"attention": Attention(implementation="blockwise")},
}


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("name", MODELS)
def test_no_product_of_a_training_step_mixes_dtypes(name):
    model = dataclasses.replace(MODEL, **MODELS[name]).build()
    objective = OBJECTIVES["causal_lm"].bind(DataSizes(19, 11))
    transform = make_optimizer(TrainConfig()).transform
    batch = {"tokens": jax.ShapeDtypeStruct((3, 12), "int32")}
    state = jax.eval_shape(lambda: init_state(model, objective, transform, batch, 0))
    step = jax.make_jaxpr(lambda *a: train_step(model, objective, transform, *a, 0))(state, batch)
    found = [
        tuple(str(v.aval.dtype) for v in equation.invars)
        for equation in equations(step.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert len(found) > 20
    assert {a for a, b in found if a != b} == set()
    assert ("bfloat16", "bfloat16") in found


def test_loss_and_logits_stay_float32():
    tokens = jnp.arange(10).reshape(2, 5)
    variables = jax.eval_shape(MODEL.build().init, jax.random.key(0), tokens)
    assert jax.eval_shape(MODEL.build().apply, variables, tokens).logits.dtype == "float32"


def test_derivatives_of_every_kind_in_bfloat16():
    """Forward-mode, reverse-mode and second ones, beside those of float32."""
    q, k, v = (np.random.default_rng(i).normal(size=(2, 5, 3, 4)) for i in range(3))

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, implementation="dense")
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    def all_of(q, k, v):
        ones = tuple(map(jnp.ones_like, (q, k, v)))
        slope = lambda *a: jnp.sum(jax.grad(loss)(*a).astype(jnp.float32))
        return (
            jax.grad(loss, (0, 1, 2))(q, k, v),
            jax.jvp(loss, (q, k, v), ones)[1],
            jax.grad(slope)(q, k, v),
        )

    narrow, wide = (
        jax.jit(all_of)(*(jnp.asarray(a, jnp.bfloat16).astype(dtype) for a in (q, k, v)))
        for dtype in ("bfloat16", "float32")
    )
    rounded = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    assert_close(rounded(narrow), rounded(wide))
