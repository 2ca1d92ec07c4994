"""Options that any layout may have, such as `Gate`, `Sink` and `MixtureOfHeads`."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.attention import attend, score_mods
from attnlab.attention.dense import scaled_scores, weighted_sum
from attnlab.attention.dropout import drop
from attnlab.fields import bounded
from attnlab.heads.layout import Extra, HeadCall, Layout
from attnlab.heads.linear import project_all
from attnlab.heads.registry import register_extra
from attnlab.heads.weights import Params, Weight
from attnlab.ops import with_rank


@register_extra("gate")
@dataclasses.dataclass(frozen=True)
class Gate(Extra):
    """heads_n * sigmoid(x G_n), before the output projection (Qiu et al. 2025, arXiv 2505.06708).

    Attributes:
      by: one number per "head", or one per "element" of its value.

    >>> from attnlab.heads import Standard, weight_shapes
    >>> weight_shapes(Standard(width=8, num_heads=2, extras=(Gate("element"),)))["gate"]
    (8, 2, 4)
    """

    by: Literal["head", "element"] = "head"

    @property
    def between(self) -> Literal["", "vo"]:  # type: ignore[override]  # it depends on a field
        return "vo" if self.by == "element" else ""

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return "head_gate" if self.by == "head" else "gate"

    def check(self, layout: Layout) -> None:
        if self.by == "element" and layout.merges_values:
            raise ValueError(f"layout {layout.name!r} merges W_V and W_O; use Gate(by='head')")

    def weights(self, layout: Layout) -> dict[str, Weight]:
        makes = ("num_heads",) if self.by == "head" else ("num_heads", "head_width")
        return {self.weight: Weight("attend", ("width",), makes, changes=("heads",))}

    def values(self, layout: Layout) -> dict[str, str]:
        return {"gate": "B T N 1" if self.by == "head" else "B T N V"}

    def after_attention(
        self, params: Params, heads: Float[Array, "B T N V"], call: HeadCall
    ) -> tuple[Float[Array, "B T N V"], dict[str, Array]]:
        gate = project_all(params, self.weight, call.x)
        gate = gate[..., None] if self.by == "head" else gate
        return heads * call.tap("gate", jax.nn.sigmoid(gate)), {}


@register_extra("sink")
@dataclasses.dataclass(frozen=True)
class Sink(Extra):
    """One more score in every softmax, whose probability is not used.

        p_ns = exp(a_ns) / (exp(sink_n) + sum_s' exp(a_ns'))

    So a head need not attend to anything. Learnt per head in gpt-oss (Agarwal et al. 2025, arXiv
    2508.10925); a constant 0 adds one to the sum (Miller 2023, "Attention is off by one").

    Attributes:
      learnt: a number per head; else 0.

    >>> from attnlab.heads import Standard, num_parameters
    >>> plain, sink = (Standard(width=8, num_heads=2, extras=e) for e in ((), (Sink(),)))
    >>> num_parameters(sink) - num_parameters(plain)
    2
    """

    between = ""
    shift_invariant = False
    learnt: bool = True

    def weights(self, layout: Layout) -> dict[str, Weight]:
        learnt = {
            "sink": Weight("attend", out_axes=("num_score_maps",), constant=0.0, changes=("probs",))
        }
        return learnt if self.learnt else {}

    def before_attention(self, params: Params, call: HeadCall) -> HeadCall:
        sink = params["sink"][:, None, None] if self.learnt else jnp.zeros((1, 1, 1))
        return call.with_new(sink=sink)


@register_extra("soft_cap")
@dataclasses.dataclass(frozen=True)
class SoftCap(Extra):
    """c tanh(scores / c), before the mask (Gemma 2, arXiv 2408.00118).

    Attributes:
      cap: c, above 0.

    >>> from attnlab.heads import Standard
    >>> Standard(width=6, num_heads=2, biases=("k",), extras=(SoftCap(),)).rewritten().reason
    'a soft cap or a sink sees the key bias, which this form drops'
    """

    between = ""
    shift_invariant = False
    cap: float = bounded(50.0, above=0.0)

    def before_attention(self, params: Params, call: HeadCall) -> HeadCall:
        return call.with_new(logits_soft_cap=self.cap)


@register_extra("learnt_soft_cap")
@dataclasses.dataclass(frozen=True)
class LearntSoftCap(Extra):
    """c_n tanh(scores / c_n), before the mask, with a learnt c_n = exp(log_soft_cap_n) per head.

    `SoftCap`, the cap of Gemma 2 (arXiv 2408.00118), as a parameter.

    Attributes:
      start: c of all heads at first, above 0.

    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=8, num_heads=2, extras=(LearntSoftCap(start=1.0),))
    >>> init(jax.random.key(0), layout)["log_soft_cap"].tolist()
    [0.0, 0.0]
    """

    between = ""
    shift_invariant = False
    start: float = bounded(3.0, above=0.0)

    def weights(self, layout: Layout) -> dict[str, Weight]:
        start = math.log(self.start)
        return {"log_soft_cap": Weight("attend", out_axes=("num_score_maps",), constant=start)}

    def before_attention(self, params: Params, call: HeadCall) -> HeadCall:
        cap = score_mods.SoftCap(jnp.exp(params["log_soft_cap"]))
        return call.bind(score_mods=(*call.options.score_mods, cap))


@register_extra("mixture_of_heads")
@dataclasses.dataclass(frozen=True)
class MixtureOfHeads(Extra):
    """Each token uses the first `shared` heads and `top` of the others, weighed by a router.

        heads_n * 2 g_1 shared softmax(x W_s)_n            of shared heads
        heads_n * 2 g_2 top p_n / (sum of the chosen p)    of chosen heads, 0 of others
        g = softmax(x W_h), p = softmax(x W_r)

    Jin et al. 2024, arXiv 2410.11842, section 3.2; scaled as in its code, so that gates are 1 on
    average. The loss "head_balance" is balance * R * sum_n f_n P_n over the R routed heads, with
    f_n the share of tokens, without padding, that use head n and P_n its mean p (section 3.3).

    Attributes:
      top: routed heads that a token uses.
      shared: heads that every token uses.
      balance: weight of the loss.

    Raises:
      ValueError: `top` is below 1 or above the number of routed heads.

    >>> from attnlab.heads import Standard, loss_names, weight_shapes
    >>> layout = Standard(width=8, num_heads=4, extras=(MixtureOfHeads(top=1),))
    >>> loss_names(layout), weight_shapes(layout)["router"]  # 3 of the 4 heads are routed
    (('head_balance',), (8, 3))
    """

    between = ""
    losses = ("head_balance",)
    depends_on_head_order = True  # the first heads are shared
    top: int = 2
    shared: int = bounded(1, least=1)
    balance: float = bounded(0.01, least=0.0)

    def check(self, layout: Layout) -> None:
        most = layout.num_heads - self.shared
        if not 1 <= self.top <= most:
            raise ValueError(f"mixture_of_heads.top {self.top} must be from 1 to {most} heads")

    def weights(self, layout: Layout) -> dict[str, Weight]:
        return {
            "router": Weight("attend", ("width",), (layout.num_heads - self.shared,)),
            "router_shared": Weight("attend", ("width",), (self.shared,)),
            "router_groups": Weight("attend", ("width",), (2,)),
        }

    def values(self, layout: Layout) -> dict[str, str]:
        return {"head_gates": "B T N", "head_balance": ""}

    def after_attention(
        self, params: Params, heads: Float[Array, "B T N V"], call: HeadCall
    ) -> tuple[Float[Array, "B T N V"], dict[str, Array]]:
        x = call.x
        groups = 2 * jax.nn.softmax(x @ params["router_groups"])
        shared = self.shared * jax.nn.softmax(x @ params["router_shared"])
        probs = jax.nn.softmax(x @ params["router"])
        routed = probs.shape[-1]
        used = jax.nn.one_hot(jax.lax.top_k(probs, self.top)[1], routed, dtype=x.dtype).sum(-2)
        real = jnp.ones(x.shape[:2], bool) if call.padding_mask is None else call.padding_mask
        count = jnp.maximum(jnp.sum(real), 1)
        tokens = (jnp.where(real[..., None], a, 0) for a in (used, probs))
        wide = jnp.promote_types(x.dtype, jnp.float32)  # in float16 a sum may be infinite
        shares, means = (jnp.sum(a, axis=(0, 1), dtype=wide) / count for a in tokens)
        balance = call.tap("head_balance", self.balance * (routed * jnp.sum(shares * means)))
        weighed = self.top * probs * used / jnp.sum(probs * used, axis=-1, keepdims=True)
        gates = jnp.concatenate([groups[..., :1] * shared, groups[..., 1:] * weighed], axis=-1)
        return heads * call.tap("head_gates", gates)[..., None], {"head_balance": balance}


@register_extra("talking_heads")
@dataclasses.dataclass(frozen=True)
class TalkingHeads(Extra):
    """Learnt matrices mix the heads' scores before the softmax and their probabilities after it.

    Shazeer et al. 2020, arXiv 2003.02436. Both matrices are initially the identity.

    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=8, num_heads=2, extras=(TalkingHeads(),))
    >>> init(jax.random.key(0), layout)["mix_scores"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    between = ""
    excludes = ("extra_keys",)

    def weights(self, layout: Layout) -> dict[str, Weight]:
        heads = ("num_score_maps",)
        mix = Weight("attend", in_axes=heads, out_axes=heads, identity=True, per_score=True)
        after = dataclasses.replace(mix, changes=("probs",))
        return {"mix_scores": mix, "mix_probs": after}

    def before_attention(self, params: Params, call: HeadCall) -> HeadCall:
        return call.with_new(talking_heads=(params["mix_scores"], params["mix_probs"]))


@register_extra("extra_keys")
@dataclasses.dataclass(frozen=True)
class ExtraKeys(Extra):
    """Learnt keys and values that every query attends to, whatever the input.

    `bias_k` and `bias_v` of torch.nn.MultiheadAttention, where `count` is 1. No mask hides them.
    They have no position: rotary embedding does not rotate them.

    Attributes:
      count: keys and values per key head.

    >>> from attnlab.heads import Standard, weight_shapes
    >>> layout = Standard(width=8, num_heads=2, extras=(ExtraKeys(count=3),))
    >>> weight_shapes(layout)["extra_k"]
    (3, 2, 4)
    """

    # Their keys are in the basis that W_Q and W_K share.
    between = "qk"
    shift_invariant = False
    excludes = ("talking_heads", "learnt_soft_cap")
    count: int = bounded(1, least=1)

    @property
    def num_keys(self) -> int:
        return self.count

    def weights(self, layout: Layout) -> dict[str, Weight]:
        k_axes, v_axes = ("num_key_heads", "score_width"), ("num_value_heads", "head_width")
        return {
            "extra_k": Weight("attend", (), (self.count, *k_axes), std=1.0, changes=("probs",)),
            "extra_v": Weight("attend", (), (self.count, *v_axes), std=1.0, changes=("heads",)),
        }

    def before_attention(self, params: Params, call: HeadCall) -> HeadCall:
        softmax = functools.partial(attend_with_extra_keys, params)
        return dataclasses.replace(call, softmax=softmax)


def attend_with_extra_keys(params: Params, call: HeadCall, q: Array, k: Array, v: Array) -> Array:
    """Attention whose softmax also has the extra keys: they are a sink with values.

    Raises:
      ValueError: the call has options that need the scores of all keys at once.
    """
    options = call.options
    if options.talking_heads is not None or options.score_mods:
        raise ValueError("extra_keys do not combine with talking_heads or score_mods; drop one")

    def per_row(name: str) -> Array:
        a = params[name].astype(q.dtype if name == "extra_k" else v.dtype).swapaxes(0, 1)
        return jnp.broadcast_to(a, (q.shape[0], *a.shape))

    extra = scaled_scores(
        q.swapaxes(1, 2), per_row("extra_k"), None, options.scale, options.logits_soft_cap
    )
    total = jax.nn.logsumexp(extra, axis=-1, keepdims=True)
    total = jnp.where(jnp.isfinite(total), total, 0)  # NaN of one packed text stays in it
    if options.sink is not None:
        sink = with_rank(jnp.asarray(options.sink, total.dtype), total.ndim)
        total = jnp.logaddexp(total, sink)
    options = dataclasses.replace(options, sink=total)
    heads, logsumexp = attend(q, k, v, options, tap=call.tap, return_residual=True)
    assert logsumexp is not None
    probs = jnp.exp(extra - logsumexp.swapaxes(1, 2)[..., None])
    # As if they stood behind the other keys.
    probs = drop(probs, options.dropout_rate, options.dropout_key, first_key=k.shape[1])
    values = weighted_sum(probs, per_row("extra_v").astype(probs.dtype)).swapaxes(1, 2)
    return heads + values.astype(heads.dtype)
