"""Flax Linen modules: they own weights and call the pure functions."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.block import BlockSpec, feed_forward, init_block, init_feed_forward, transformer_block
from attnlab.heads import HeadSpec, init_heads
from attnlab.multihead import multi_head_attention
from attnlab.sharing import Plan
from attnlab.stack import init_slots, run_stack


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
                key, width, self.ffn_width, bias=self.bias, std=self.init_std
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
        *,
        mask: Array | None = None,
        rotary: Array | None = None,
        head_gate: Float[Array, "L N"] | Float[Array, "L B N"] | None = None,
        cache: Any = None,
        deterministic: bool = True,
        return_probs: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "L B N T S"] | None, Any]:
        """x after all layers, the probabilities of every layer where asked, the cache if given.

        `head_gate` multiplies each head of each application, also where layers share weights.
        `cache` holds one cache per application, stacked [L, ...]: layers that share weights still
        have keys of their own.
        """
        makers = init_block(self.block, std=self.init_std, residual_scale=self.residual_scale)
        slots = {
            part: self.param(
                part,
                lambda key, part=part, count=count: init_slots(
                    {part: makers[part]}, key, Plan(**{part: range(count)})
                )[part],
            )
            for part, count in self.plan.num_slots.items()
        }
        keys = None
        if self._drops() and not deterministic:
            keys = jax.random.split(self.make_rng("dropout"), self.plan.num_layers)

        def block(w, x, state, own, shared):
            index, own = own
            mine = jax.tree.map(lambda a: a[index], state)
            x, probs, mine = transformer_block(
                w, x, spec=self.block, cache=mine, return_probs=return_probs, **own, **shared
            )
            return x, jax.tree.map(lambda a, new: a.at[index].set(new), state, mine), probs

        (x, cache), probs = run_stack(
            block,
            slots,
            self.plan,
            x,
            layer=(
                jnp.arange(self.plan.num_layers),
                {"head_gate": head_gate, "dropout_key": keys},
            ),
            shared={"mask": mask, "rotary": rotary},
            state=cache,
            remat=self.remat,
        )
        return x, probs, cache

    def _drops(self) -> bool:
        block = self.block
        return any((block.dropout_rate, block.attention_dropout_rate, block.ffn_dropout_rate))
