"""Flax Linen modules: they own weights and call the pure functions."""

from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from attnlab.heads.old.multihead import multi_head_attention
from attnlab.heads.old.project import init_heads
from attnlab.heads.old.spec import HeadSpec
from attnlab.model.block import BlockSpec, init_block
from attnlab.model.layers import run_layers
from attnlab.model.pointwise import feed_forward, init_feed_forward
from attnlab.observe import NOTHING, Given, Ran
from attnlab.sharing.plan import MIXTURE_SUFFIX, Plan
from attnlab.sharing.stack import init_sublayer


class MultiHeadAttention(nn.Module):
    """`multi_head_attention` with weights of its own (the tree {"heads": {q, k, v, o, ...}})."""

    spec: HeadSpec
    dropout_rate: float = 0.0
    init_std: float | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(
        self, x: Array, context: Array | None = None, *, deterministic: bool = True, **options: Any
    ) -> Any:
        """Dropout takes the "dropout" random stream; `options` go to `multi_head_attention`."""
        w = self.param("heads", lambda key: init_heads(key, self.spec, std=self.init_std))
        drops = self.dropout_rate > 0 and not deterministic
        return multi_head_attention(
            w,
            x,
            context,
            spec=self.spec,
            dropout_rate=self.dropout_rate if drops else 0.0,
            dropout_key=self.make_rng("dropout") if drops else None,
            implementation=self.implementation,
            **options,
        )


class FeedForward(nn.Module):
    """`feed_forward` with weights of its own (the tree {"ffn": {up, down, ...}})."""

    ffn_width: int
    activation: str = "gelu"
    bias: bool = True
    dropout_rate: float = 0.0
    init_std: float | None = None

    @nn.compact
    def __call__(self, x: Array, *, deterministic: bool = True) -> Array:
        """Dropout takes the "dropout" random stream."""
        width = x.shape[-1]
        w = self.param(
            "ffn",
            lambda key: init_feed_forward(
                key,
                width,
                self.ffn_width,
                activation=self.activation,
                bias=self.bias,
                std=self.init_std,
            ),
        )
        drops = self.dropout_rate > 0 and not deterministic
        return feed_forward(
            w,
            x,
            activation=self.activation,
            dropout_rate=self.dropout_rate,
            dropout_key=self.make_rng("dropout") if drops else None,
        )


class LayerStack(nn.Module):
    """L layers under a sharing plan. Each part's weights are one tree, stacked [G, ...]."""

    block: BlockSpec
    plan: Plan
    init_std: float | None = None
    residual_scale: float = 1.0
    remat: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        given: Given = NOTHING,
        *,
        deterministic: bool = True,
        **options: Any,
    ) -> Ran:
        """`run_layers` with weights of its own. Dropout takes the "dropout" random stream."""
        pool = init_stack(self, self.block, self.plan, self.init_std, self.residual_scale)
        drops = self.block.drops and not deterministic
        return run_layers(
            pool,
            self.plan,
            x,
            None,
            given,
            spec=self.block,
            dropout_key=self.make_rng("dropout") if drops else None,
            remat=self.remat,
            **options,
        )


def init_stack(
    module: nn.Module, block: BlockSpec, plan: Plan, std: float | None, residual_scale: float
) -> dict[str, Any]:
    """The pool of `plan` as parameters of `module`: part -> [G, ...]."""
    makers = init_block(block, std=std, residual_scale=residual_scale)
    empty: dict[str, Any] = {} if block.ffn_width else {"ffn": {}, f"ffn{MIXTURE_SUFFIX}": {}}
    return empty | {
        part: module.param(
            part,
            lambda key, part=part: init_sublayer(
                makers[part], jax.random.split(key, 1)[0], plan, part
            ),
        )
        for part in plan
        if part not in empty
    }


class Pool(nn.Module):
    """The weights of a `LayerStack` alone, for models in which several stacks read one pool."""

    block: BlockSpec
    plan: Plan
    init_std: float | None = None
    residual_scale: float = 1.0

    @nn.compact
    def __call__(self) -> dict[str, Any]:
        """part -> [G, ...]"""
        return init_stack(self, self.block, self.plan, self.init_std, self.residual_scale)
