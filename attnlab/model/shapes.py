"""The tree of weights that a config has."""

import functools
from typing import Any

import jax

from attnlab.model.block import BlockSpec, init_block
from attnlab.model.config import ModelConfig
from attnlab.model.outer import init_outer
from attnlab.sharing.plan import Plan
from attnlab.sharing.stack import init_sublayer


@functools.lru_cache(maxsize=64)
def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """The tree of a model's weights as `jax.ShapeDtypeStruct`s; nothing is computed.

    >>> shapes = param_shapes(ModelConfig(width=8, num_heads=2, plan="albert"))
    >>> shapes["layers"]["attention"]["q"].shape
    (1, 8, 2, 4)
    """
    stacks = {name: (c.block, c.layer_plan) for name, c in config.stacks.items()}
    if config.kind == "encoder_decoder" and not config.share_encoder:
        stacks["encoder_layers"] = (config.encoder_block, config.encoder_layer_plan)

    def init(key: jax.Array) -> dict[str, Any]:
        params: dict[str, Any] = {name: make(key) for name, make in init_outer(config).items()}
        return params | {name: _init_stack(*stack, key) for name, stack in stacks.items()}

    shapes: dict[str, Any] = jax.eval_shape(init, jax.random.key(0))
    return shapes


def _init_stack(block: BlockSpec, plan: Plan, key: jax.Array) -> dict[str, Any]:
    makers = init_block(block)
    parts = [part for part in plan if block.ffn_width or not part.startswith("ffn")]
    return {part: init_sublayer(makers[part], key, plan, part) for part in parts}
