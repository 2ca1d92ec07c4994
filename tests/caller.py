"""What a caller's type checker sees: never run, but checked by `mypy --strict` and by pyright.

A mistake at the end that they did not find would be an ignored error that is not there, which both
report.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax
import jax.numpy as jnp
from jax import Array

import attnlab
from attnlab import ModelConfig, Outputs, Plan, heads, pretrained, transforms
from attnlab.attention import AttentionOptions, AttentionOutput, attend
from attnlab.models.config import FlaxModel
from attnlab.sharing import Params

key, x = jax.random.key(0), jnp.ones((1, 5, 6))
layout = heads.Wide(width=6, num_heads=2)
params = heads.init(key, layout)
assert_type(params, dict[str, Array])
assert_type(heads.weight_shapes(layout), dict[str, tuple[int, ...]])
assert_type(attnlab.project_kv(params, x, layout), dict[str, Array])
assert_type(attnlab.multi_head_attention(params, x, layout, is_causal=True), Array)
assert_type(
    attnlab.multi_head_attention(params, x, layout, return_aux=True), tuple[Array, heads.HeadAux]
)
cache = attnlab.init_cache(layout, 1, 4)
assert_type(attnlab.decode(params, x, layout, cache), tuple[Array, dict[str, Array]])
assert_type(attnlab.explain(x, x, x), dict[str, str])
assert_type(attnlab.dot_product_attention(x, x, x, is_causal=True), Array)
assert_type(attnlab.dot_product_attention(x, x, x, return_residual=True), tuple[Array, Array])
assert_type(attend(x, x, x, AttentionOptions(is_causal=True)), AttentionOutput)

config = ModelConfig(heads=heads.Standard(num_heads=4), sharing="cycle:2")
assert_type(config.sharing, str | Plan)
assert_type(config.plan, Plan)
assert_type(config.plan.num_groups, dict[str, int])
assert_type(config.build(), FlaxModel)
assert_type(attnlab.num_parameters(config), int)
assert_type(attnlab.flops_per_token(config, 64), int)
weights: Params = {}
assert_type(attnlab.generate(weights, jnp.ones((1, 2), int), config, 3), Array)
assert_type(attnlab.run_model(weights, jnp.ones((1, 2), int), config), Outputs)
assert_type(transforms.unshare(config, weights)[0], ModelConfig)
assert_type(pretrained.load("org/name", revision="main")[0], FlaxModel)
assert_type(pretrained.load_config("folder"), ModelConfig)
converted = attnlab.convert(params, layout, layout)
assert_type(converted, attnlab.Conversion | attnlab.NotEquivalent | attnlab.Undecided)

# Mistakes that people make.
heads.Wide(width=6, num_heads=2, layotu="wide")  # type: ignore[call-arg]
heads.Wide(width=6, num_heads="2")  # type: ignore[arg-type]
ModelConfig(layotu="wide")  # type: ignore[call-arg]
print(config.layotu)  # type: ignore[attr-defined]
heads.init(layout, key)  # type: ignore[arg-type]
attnlab.num_parameters("bert_base")  # type: ignore[arg-type]
attnlab.generate(weights, "To be", config, 3)  # type: ignore[arg-type]
attnlab.dot_product_attention(x, x)  # type: ignore[call-overload]
AttentionOptions(causal=True)  # type: ignore[call-arg]
attnlab.multihead_attention(params, x, layout)  # type: ignore[attr-defined]
