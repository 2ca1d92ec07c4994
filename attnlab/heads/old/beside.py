"""What heads of any row may have beside the maps of the row.

A gate multiplies what each head gives by a sigmoid of x, before the output map (Qiu et al. 2025,
arXiv 2505.06708): one number per head, or one for each of its V numbers.

    heads_n = sigmoid(x G_n) * sum_s p_ns v_ns

A sink is one more score of every row of the softmax, whose probability goes nowhere, so a head need
not look at anything: a learnt number per head (Agarwal et al. 2025, gpt-oss, arXiv 2508.10925), or
0, which adds one to the sum of the softmax (Miller 2023, "Attention is off by one").

    p_ns = exp(a_ns) / (exp(sink_n) + sum_s' exp(a_ns'))

Extra keys are a sink with values: their scores stand in the same sum, and what they give is added.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.attention.dropout import dropout_seed, keep_mask
from attnlab.attention.scores import scaled_scores, weighted_sum
from attnlab.heads.old.maps import Weights, read_all
from attnlab.observe import Look

MAPS = {
    "head_gate": "query: D -> N if gate is head",
    "gate": "query: D -> N V if gate is element",
    "sink": "query: N = 0 if sink is learnt",
}
WORDS = {"gate": ("head", "element"), "sink": ("learnt", "one")}
"""Field of a spec -> what it may be, beside None."""


def told(spec: Any) -> str:
    """The fields of a spec that put something beside its row or tie its maps, as "gate='head'"; ""
    for none."""
    set_fields = {n: getattr(spec, n) for n in (*WORDS, "ties", "extra_keys") if getattr(spec, n)}
    return ", ".join(f"{name}={value!r}" for name, value in set_fields.items())


def gate(
    look: Look, w: Weights, x: Float[Array, "B T D"], heads: Float[Array, "B T N V"], spec: Any
) -> Float[Array, "B T N V"]:
    """What the heads gave, times their gate; as it is where they have none."""
    if spec.gate is None:
        return heads
    made = (
        read_all(w, "gate", x) if spec.gate == "element" else read_all(w, "head_gate", x)[..., None]
    )
    return heads * look("gate", jax.nn.sigmoid(made))


def sink(w: Weights, spec: Any) -> Float[Array, "#N 1 1"] | None:
    """What the softmax of each head has in its sum beside the keys."""
    if spec.sink is None:
        return None
    return jnp.zeros((1, 1, 1)) if spec.sink == "one" else w["sink"][:, None, None]


def extra_scores(
    w: Weights, q: Float[Array, "B T N H"], spec: Any, soft_cap: float | None
) -> Float[Array, "B N T A"] | None:
    """Those of the keys that no input has, which nothing hides."""
    if not spec.extra_keys:
        return None
    keys = w["extra_k"].astype(q.dtype).swapaxes(0, 1)
    keys = jnp.broadcast_to(keys, (q.shape[0], *keys.shape))
    return scaled_scores(q.swapaxes(1, 2), keys, None, spec.score_scale, soft_cap)


def beside_extra(
    extra: Float[Array, "B N T A"], sink: Float[Array, "#N 1 1"] | None
) -> Float[Array, "B N T 1"]:
    """What extra keys, and a sink where there is one, are in the sum of the softmax."""
    rest = jax.nn.logsumexp(extra, axis=-1, keepdims=True)
    return rest if sink is None else jnp.logaddexp(rest, sink.astype(rest.dtype))


def of_extra(
    w: Weights,
    extra: Float[Array, "B N T A"],
    residual: Float[Array, "B T N"],
    num_keys: int,
    rate: float,
    key: Any,
) -> Float[Array, "B T N V"]:
    """What extra keys give, where `residual` is log sum exp of all scores; dropout takes them as if
    they stood behind the `num_keys` others."""
    probs = jnp.exp(extra - residual.swapaxes(1, 2)[..., None])
    if rate:
        shape = (*extra.shape[:3], num_keys)
        seed: Any = dropout_seed(rate, key)
        drawn = keep_mask(seed, rate, (0, 0, 0, num_keys), extra.shape, shape)
        probs = jnp.where(drawn, probs / (1 - rate), 0)
    values = w["extra_v"].astype(probs.dtype).swapaxes(0, 1)
    values = jnp.broadcast_to(values, (extra.shape[0], *values.shape))
    return weighted_sum(probs, values).swapaxes(1, 2)
