"""Options that any layout may have: `Gate`, `Sink`, `SoftCap`, `ExtraKeys`, `TalkingHeads`."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.attention.dropout import dropout_seed, keep_mask
from attnlab.attention.scores import scaled_scores, weighted_sum
from attnlab.heads.call import Call
from attnlab.heads.layout import Extra, Layout, check_size
from attnlab.heads.linear import project_all
from attnlab.heads.registry import register_extra
from attnlab.heads.weights import Params, Weight


@register_extra("gate")
@dataclasses.dataclass(frozen=True)
class Gate(Extra):
    """heads_n * sigmoid(x G_n), before the output projection (Qiu et al. 2025, arXiv 2505.06708).

    Attributes:
      by: one number per "head", or one per "element" of its value.
    """

    by: Literal["head", "element"] = "head"

    def __post_init__(self) -> None:
        if self.by not in ("head", "element"):
            raise ValueError(f"by must be 'head' or 'element', not {self.by!r}")

    @property
    def between(self) -> Literal["", "qk", "vo"]:
        return "vo" if self.by == "element" else ""

    def check(self, layout: Layout) -> None:
        if self.by == "element" and layout.merges_values:
            raise ValueError(
                f"layout {layout.name!r} multiplies W_V and W_O out, so it cannot have a gate per "
                "element between them; use Gate(by='head')"
            )

    def weights(self, layout: Layout) -> dict[str, Weight]:
        if self.by == "head":
            return {"head_gate": Weight("attend", ("width",), ("num_heads",))}
        return {"gate": Weight("attend", ("width",), ("num_heads", "head_width"))}

    def values(self, layout: Layout) -> dict[str, str]:
        return {"gate": "B T N 1" if self.by == "head" else "B T N V"}

    def after_attention(
        self, params: Params, x: Array, heads: Float[Array, "B T N V"], call: Call
    ) -> Float[Array, "B T N V"]:
        if self.by == "head":
            gate = project_all(params, "head_gate", x)[..., None]
        else:
            gate = project_all(params, "gate", x)
        return heads * call.tap("gate", jax.nn.sigmoid(gate))


@register_extra("sink")
@dataclasses.dataclass(frozen=True)
class Sink(Extra):
    """One more score in every softmax, whose probability goes nowhere.

        p_ns = exp(a_ns) / (exp(sink_n) + sum_s' exp(a_ns'))

    So a head need not attend to anything. Learnt per head in gpt-oss (Agarwal et al. 2025, arXiv
    2508.10925); a constant 0 adds one to the sum (Miller 2023, "Attention is off by one").

    Attributes:
      learnt: a number per head; else 0.
    """

    shift_invariant: ClassVar[bool] = False
    learnt: bool = True

    def weights(self, layout: Layout) -> dict[str, Weight]:
        learnt = {"sink": Weight("attend", makes=("num_score_maps",), constant=0.0)}
        return learnt if self.learnt else {}

    def before_attention(self, params: Params, call: Call) -> Call:
        sink = params["sink"][:, None, None] if self.learnt else jnp.zeros((1, 1, 1))
        return call.with_new(sink=sink)


@register_extra("soft_cap")
@dataclasses.dataclass(frozen=True)
class SoftCap(Extra):
    """c tanh(scores / c), before the mask (Gemma 2, arXiv 2408.00118).

    Attributes:
      cap: c, above 0.
    """

    shift_invariant: ClassVar[bool] = False
    cap: float = 50.0

    def __post_init__(self) -> None:
        if not isinstance(self.cap, int | float) or not 0 < self.cap < float("inf"):
            raise ValueError(f"cap must be a finite number above 0, not {self.cap!r}")

    def before_attention(self, params: Params, call: Call) -> Call:
        return call.with_new(logits_soft_cap=self.cap)


@register_extra("talking_heads")
@dataclasses.dataclass(frozen=True)
class TalkingHeads(Extra):
    """Learnt matrices mix the heads' scores before the softmax and their probabilities after it.

    Shazeer et al. 2020, arXiv 2003.02436. Both matrices are initially the identity.
    """

    excludes: ClassVar[tuple[str, ...]] = ("extra_keys",)

    def weights(self, layout: Layout) -> dict[str, Weight]:
        heads = ("num_score_maps",)
        mix = Weight("attend", reads=heads, makes=heads, identity=True, per_score=True)
        return {"mix_scores": mix, "mix_probs": mix}

    def before_attention(self, params: Params, call: Call) -> Call:
        return call.with_new(talking_heads=(params["mix_scores"], params["mix_probs"]))


@register_extra("extra_keys")
@dataclasses.dataclass(frozen=True)
class ExtraKeys(Extra):
    """Learnt keys and values that no input has and every query attends to.

    `bias_k` and `bias_v` of torch.nn.MultiheadAttention, where `count` is 1. No mask hides them.
    They have no position: rotary embedding does not rotate them.

    Attributes:
      count: keys and values per key head.
    """

    shift_invariant: ClassVar[bool] = False
    excludes: ClassVar[tuple[str, ...]] = ("talking_heads", "learnt_soft_cap")
    count: int = 1

    def __post_init__(self) -> None:
        check_size("count", self.count)

    @property
    def between(self) -> Literal["", "qk", "vo"]:
        return "qk"  # their keys are in the basis that W_Q and W_K share

    @property
    def num_keys(self) -> int:
        return self.count

    def weights(self, layout: Layout) -> dict[str, Weight]:
        k_axes, v_axes = ("num_key_heads", "score_width"), ("num_value_heads", "head_width")
        return {
            "extra_k": Weight("attend", makes=(self.count, *k_axes), std=1.0),
            "extra_v": Weight("attend", makes=(self.count, *v_axes), std=1.0),
        }

    def before_attention(self, params: Params, call: Call) -> Call:
        def attention(inner: Call, q: Array, k: Array, v: Array) -> Array:
            return attend_with_extra_keys(params, inner, q, k, v)

        return call.wrap(attention)


def attend_with_extra_keys(params: Params, call: Call, q: Array, k: Array, v: Array) -> Array:
    """Attention whose softmax also has the extra keys: they are a sink with values.

    Raises:
      ValueError: the call has options that need the scores of all keys at once.
    """
    options = call.options
    if options.get("talking_heads") is not None or options.get("score_mods"):
        raise ValueError(
            "extra_keys are computed apart from the other keys, so they do not combine with "
            "talking_heads and score_mods; leave one out"
        )

    scale = options["scale"]
    assert scale is not None

    def per_row(name: str) -> Array:
        a = params[name].astype(q.dtype if name == "extra_k" else v.dtype).swapaxes(0, 1)
        return jnp.broadcast_to(a, (q.shape[0], *a.shape))

    extra = scaled_scores(
        q.swapaxes(1, 2), per_row("extra_k"), None, scale, options.get("logits_soft_cap")
    )
    total = jax.nn.logsumexp(extra, axis=-1, keepdims=True)
    sink = options.get("sink")
    if sink is not None:
        total = jnp.logaddexp(total, jnp.asarray(sink).astype(total.dtype))
    heads, residual = call.bind(sink=total).softmax(q, k, v, return_residual=True)
    assert residual is not None
    probs = jnp.exp(extra - residual.swapaxes(1, 2)[..., None])
    rate = options.get("dropout_rate", 0.0)
    if rate:
        # As if they stood behind the other keys.
        seed = dropout_seed(rate, options["dropout_key"])
        shape = (*extra.shape[:3], k.shape[1])
        assert seed is not None
        kept = keep_mask(seed, rate, (0, 0, 0, k.shape[1]), extra.shape, shape)
        probs = jnp.where(kept, probs / (1 - rate), 0)
    values = weighted_sum(probs, per_row("extra_v").astype(probs.dtype)).swapaxes(1, 2)
    return heads + values.astype(heads.dtype)
