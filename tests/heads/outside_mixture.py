"""Mixture-of-heads (Jin et al. 2024, arXiv 2410.11842) from a file outside the package.

python -m experiments.run --config=outside_mixture.py:tiny \
    --config.model.heads.extras.my_mixture.on=True --workdir=DIR
"""

import dataclasses

import jax
import jax.numpy as jnp

from attnlab.heads import Extra, Weight, register_extra
from experiments.configs import byte_lm

get_config = byte_lm.get_config


@register_extra("my_mixture")
@dataclasses.dataclass(frozen=True)
class MyMixture(Extra):
    """Head 0 always, and `top` of the other heads, weighed by a router; with a balance loss."""

    between = ""
    losses = ("my_balance",)
    depends_on_head_order = True
    top: int = 1
    balance: float = 0.01

    def check(self, layout):
        if not 1 <= self.top < layout.num_heads:
            raise ValueError(f"top must be from 1 to {layout.num_heads - 1}, not {self.top}")

    def weights(self, layout):
        return {
            "my_router": Weight("attend", ("width",), (layout.num_heads - 1,)),
            "my_groups": Weight("attend", ("width",), (2,)),
        }

    def values(self, layout):
        return {"my_balance": ""}

    def after_attention(self, params, x, heads, call):
        shared, routed = jnp.split(2 * jax.nn.softmax(x @ params["my_groups"]), 2, axis=-1)
        probs = jax.nn.softmax(x @ params["my_router"])
        used = jax.nn.one_hot(jax.lax.top_k(probs, self.top)[1], probs.shape[-1]).sum(-2)
        share, mean = used.mean((0, 1)), probs.mean((0, 1))
        balance = self.balance * probs.shape[-1] * jnp.sum(share * mean)
        balance = call.tap("my_balance", balance)
        weighed = self.top * probs * used / jnp.sum(probs * used, axis=-1, keepdims=True)
        gates = jnp.concatenate([shared, routed * weighed], axis=-1)
        return heads * gates[..., None].astype(heads.dtype), {"my_balance": balance}
