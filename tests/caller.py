"""What a caller's type checker sees: never run, but checked by `mypy --strict` and by pyright.

A mistake at the end that they did not find would be an ignored error that is not there, which both
report.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import jax.numpy as jnp
from jax import Array

import attnlab
from attnlab import HeadSpec, ModelConfig, Plan, pretrained, transforms
from attnlab.attention import AttentionOutput, attend
from attnlab.conversion import Certificate, Truncation, Witness
from attnlab.model.config import Model

key, x = jax.random.key(0), jnp.ones((1, 5, 6))
spec = HeadSpec("wide", width=6, num_heads=2)
w = attnlab.init_heads(key, spec)
assert_type(w, dict[str, Array])
assert_type(spec.num_heads, int)
assert_type(spec.shapes, dict[str, tuple[int, ...]])
assert_type(attnlab.project_heads(w, x, spec=spec), tuple[Array, Array, Array])
assert_type(attnlab.merge_heads(w, x[:, :, None], spec=spec), Array)
assert_type(attnlab.init_cache(spec, 1, 4), dict[str, Array])
assert_type(attnlab.explain(x, x, x), dict[str, str])
assert_type(attnlab.layer_norm(w, x), Array)
assert_type(attnlab.multi_head_attention(w, x, spec=spec, is_causal=True), Array)
assert_type(attnlab.dot_product_attention(x, x, x, is_causal=True), Array)
assert_type(attnlab.multi_head_attention(w, x, spec=spec, return_probs=True), Any)
assert_type(attnlab.dot_product_attention(x, x, x, return_residual=True), tuple[Array, Array])
assert_type(attend(x, x, x, is_causal=True), AttentionOutput)
assert_type(attnlab.feed_forward(w, x), Array)

config = ModelConfig(plan="cycle:2")
assert_type(config.num_layers, int)
assert_type(config.plan, str | Plan)
assert_type(config.layer_plan, Plan)
assert_type(config.layer_plan["ffn"], tuple[int | str | None, ...])
assert_type(config.layer_plan.num_groups, dict[str, int])
assert_type(config.build(), Model)
assert_type(config.build().config, ModelConfig)
assert_type(attnlab.plan_names(2), list[str])
assert_type(attnlab.unique_parameters(config), int)
assert_type(attnlab.flops_per_token(config, 64), int)
assert_type(attnlab.generate(config.build(), {}, jnp.ones((1, 2), int), 3), Array)

params: dict[str, Any] = {}
assert_type(transforms.unshare(config, params), tuple[ModelConfig, dict[str, Any]])
assert_type(pretrained.load("folder")[0], Model)
assert_type(pretrained.load_config("folder"), ModelConfig)
assert_type(attnlab.load_run("folder", seed=1), tuple[Model, dict[str, Any]])
assert_type(attnlab.truncate(w, spec, 2)[1], Truncation)
assert_type(attnlab.convert(w, spec, spec)[1], Certificate | Witness)

# Mistakes that people make.
HeadSpec("wide", width=6, num_heads=2, layotu="wide")  # type: ignore[call-arg]
ModelConfig(layotu="wide")  # type: ignore[call-arg]
print(config.layotu)  # type: ignore[attr-defined]
attnlab.init_heads(spec, key)  # type: ignore[arg-type]
attnlab.unique_parameters("bert_base")  # type: ignore[arg-type]
attnlab.generate(config.build(), {}, "To be", 3)  # type: ignore[arg-type]
attnlab.dot_product_attention(x, x)  # type: ignore[call-overload]
attend(x, x, x, causal=True)  # type: ignore[call-arg]
attnlab.multihead_attention(w, x, spec=spec)  # type: ignore[attr-defined]
