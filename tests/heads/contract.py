"""The table that every contract test runs over: a spec of every row, and its definition by hand.

A new row needs an entry in SPECS and one in DEFINITIONS. The row `outside` is none of attnlab's: a
test registers it (`outside.py`), and it passes what the others pass.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from outside import OUTSIDE

from attnlab.heads.old.layouts import LAYOUTS, Layout
from attnlab.heads.old.multihead import multi_head_attention
from attnlab.heads.old.spec import HeadSpec


class Case(NamedTuple):
    """A spec that may be of a row which is registered later."""

    layout: str
    fields: dict[str, Any]

    @property
    def row(self) -> Layout:
        """Asked before any row is registered."""
        return {**LAYOUTS, "outside": OUTSIDE}[self.layout]

    def spec(self, **changes: Any) -> HeadSpec:
        return HeadSpec(self.layout, **self.fields | changes)


def case(layout, **fields):
    return Case(layout, fields)


# Every axis its own size, so that a swapped one cannot pass. B=2, T=7.
SPECS = {
    "standard": case("standard", width=12, num_heads=4, biases="qkvo", out_width=10),
    "free sizes": case("standard", width=11, num_heads=4, head_dim=5, value_dim=3, biases="kv"),
    "grouped": case("standard", width=12, num_heads=6, num_kv_heads=2, head_dim=5),
    "multi-query": case("standard", width=12, num_heads=3, num_kv_heads=1, biases="q"),
    "cross": case("standard", width=12, num_heads=3, key_width=5, value_width=9),
    "wide": case("wide", width=6, num_heads=5, biases="qo"),
    "narrow": case("narrow", width=12, num_heads=3, value_dim=5, biases="qkvo"),
    "tied": case("narrow_tied", width=12, num_heads=3, value_dim=5, biases="qkvo", scale=0.3),
    "tied, no output": case("narrow_tied", width=12, num_heads=3, value_dim=5, output=False),
    "alt": case("alt", width=12, num_heads=3, head_dim=6, value_dim=5, biases="qkvo"),
    "two stages": case(
        "two_stage", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9, biases="kv"
    ),
    "collaborative": case(
        "collaborative", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9,
        shared_dim=8, value_dim=3, biases="qkvo", out_width=10,
    ),
    "bilinear": case(
        "bilinear", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9,
        value_dim=3, biases="qvo", out_width=10,
    ),
    "absorbed": case(
        "absorbed", width=12, num_heads=3, key_width=5, value_width=9, biases="qvo", out_width=10
    ),
    "absorbed, no bias": case("absorbed", width=7, num_heads=3),
    "layer norm of q and k": case(
        "standard", width=12, num_heads=6, num_kv_heads=2, head_dim=5, biases="q", qk_norm="layer",
        qk_norm_bias=True,
    ),
    "rms norm of q and k": case("narrow", width=12, num_heads=3, qk_norm="rms"),
    "latent": case(
        "latent", width=12, num_heads=3, head_dim=4, value_dim=5, latent_dim=7, rotary_dim=2,
        biases="o", out_width=10,
    ),
    "latent for queries too": case(
        "latent", width=12, num_heads=3, head_dim=5, value_dim=3, latent_dim=7, rotary_dim=4,
        query_latent_dim=6, norm_eps=1e-2,
    ),
    "absorbed latent": case(
        "latent_absorbed", width=12, num_heads=3, head_dim=4, value_dim=5, latent_dim=7,
        rotary_dim=2, query_latent_dim=6, biases="o", out_width=10,
    ),
    "latent without norms": case(
        "latent", width=12, num_heads=3, head_dim=4, value_dim=5, latent_dim=7, rotary_dim=2,
        query_latent_dim=6, latent_norm=False,
    ),
    "low-rank queries": case(
        "low_rank_q", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9,
        query_latent_dim=7, head_dim=4, value_dim=3, biases="qkvo", out_width=10, norm_eps=1e-2,
    ),
    "low-rank queries without a norm": case(
        "low_rank_q", width=12, num_heads=3, head_dim=7, latent_norm=False, qk_norm="rms"
    ),
    "tensor": case(
        "tensor", width=12, num_heads=3, key_width=5, value_width=9, head_dim=4, value_dim=7,
        query_rank=6, key_rank=2, value_rank=8, biases="ao", out_width=10,
    ),
    "tensor, its own text": case("tensor", width=12, num_heads=3, key_rank=5),
    "grouped and tied": case(
        "grouped_tied", width=12, num_heads=6, num_kv_heads=2, head_dim=3, value_dim=5,
        rotary_dim=4, biases="o", out_width=10,
    ),
    "tied to all of the value": case(
        "grouped_tied", width=12, num_heads=3, head_dim=5, value_dim=5, rotary_dim=2
    ),
    "keys are values": case(
        "standard", width=12, num_heads=6, num_kv_heads=2, head_dim=5, biases="qk", ties="kv"
    ),
    "one map for all": case(
        "two_stage", width=12, num_heads=3, head_dim=5, biases="qo", ties="qkv", qk_norm="rms"
    ),
    "keys that no input has": case(
        "narrow", width=12, num_heads=3, head_dim=2, value_dim=5, biases="ko", extra_keys=4,
        sink="learnt", gate="element",
    ),
    "gated heads": case(
        "absorbed", width=12, num_heads=3, biases="qvo", gate="head", sink="learnt"
    ),
    "gated elements": case(
        "tensor", width=12, num_heads=3, head_dim=4, value_dim=7, biases="ao", gate="element",
        sink="one",
    ),
    "a row from outside": case(
        "outside", width=12, num_heads=6, num_kv_heads=2, key_width=5, value_width=9, head_dim=4,
        value_dim=3, shared_dim=8, biases="o", out_width=10,
    ),
    "a row from outside, its own text": case(
        "outside", width=12, num_heads=6, num_kv_heads=2, head_dim=4, value_dim=3, shared_dim=8
    ),
}  # fmt: skip
# Of every layout the first.
FIRST = list({one.layout: name for name, one in reversed(SPECS.items())}.values())
# Those that may attend to their own text.
ALONE = [name for name, one in SPECS.items() if "key_width" not in one.fields]


def make(spec, dtype=jnp.float32, batch=2, length=7):
    """Large random weights (biases too) and inputs. NumPy: JAX would compile each of them."""
    rng, s = np.random.default_rng(0), spec.sizes
    draw = lambda *shape: jnp.asarray(2 * rng.normal(size=shape), dtype)
    w = {name: draw(*shape) for name, shape in spec.shapes.items()}
    x, longer = draw(batch, length, s["D"]), (batch, length + 1)
    return w, x, draw(*longer, s["E"]), draw(*longer, s["W"])


def attend(w, x, context=None, value_context=None, *, spec, **options):
    """`multi_head_attention` under jit."""
    run = functools.partial(multi_head_attention, spec=spec, **options)
    return jax.jit(run)(w, x, context, value_context=value_context)


def by_hand(w, x, context, values, spec):
    """Head by head in NumPy, straight from the definition."""
    s = spec.sizes | {"eps": spec.norm_eps}
    w = {n: np.asarray(a, np.float64) for n, a in w.items()}
    for ours, theirs in spec.tied.items():
        w |= {f"{ours}{end}": w[f"{theirs}{end}"] for end in ("", "_outer", "_bias")
              if f"{theirs}{end}" in w}  # fmt: skip
    x, context, values = (np.asarray(a, np.float64) for a in (x, context, values))
    total = []
    for n in range(s["N"]):
        g = n // (s["N"] // s["K"])
        q, k, v, o = DEFINITIONS[spec.layout](w, n, g, x, context, values, s)
        if spec.extra_keys:
            more = lambda a, name, g=g: np.concatenate(
                [a, np.broadcast_to(w[name][:, g], (len(a), *w[name][:, g].shape))], axis=1
            )
            k, v = more(k, "extra_k"), more(v, "extra_v")
        if spec.qk_norm:
            q = norm(q, w["q_norm"], spec.qk_norm) + w.get("q_norm_bias", 0)
            k = norm(k, w["k_norm"], spec.qk_norm) + w.get("k_norm_bias", 0)
        scale = spec.scale or 1 / math.sqrt(q.shape[-1])
        scores = q @ k.swapaxes(1, 2) * scale
        sink = w["sink"][n] if spec.sink == "learnt" else 0 if spec.sink else -np.inf
        top = np.maximum(scores.max(-1, keepdims=True), sink)
        p = np.exp(scores - top)
        p = p / (p.sum(-1, keepdims=True) + np.exp(sink - top))
        total.append(gated(w, n, x, p @ v) @ o)
    out = sum(total) if spec.output else np.concatenate(total, axis=-1)
    return out + w.get("o_bias", 0)


def norm(a, scale, kind="rms", eps=1e-6):
    a = a - a.mean(-1, keepdims=True) if kind == "layer" else a
    return a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * scale


def gated(w, n, x, head):
    """Times 1 / (1 + exp(-x G_n)), one number or one for each column."""
    g = w["gate"][:, n] if "gate" in w else w["head_gate"][:, n, None] if "head_gate" in w else None
    return head if g is None else head / (1 + np.exp(-(x @ g)))


def _chunk(a, n, s):
    return a[..., n * s["C"] : (n + 1) * s["C"]]


def _bias(w, letter, *head):
    return w[f"{letter}_bias"][head] if f"{letter}_bias" in w else 0


def _beside(a, b):
    return np.concatenate([a, b], axis=-1)


def _latent(w, name, a, s):
    scale = w.get(f"{name}_norm")
    return a @ w[name] if scale is None else norm(a @ w[name], scale, eps=s.get("eps", 1e-6))


def _factored(w, name, n, a):
    """One outer product for each rank, their mean, and of that matrix row n."""
    heads = np.einsum("btd,drn->btrn", a, w[f"{name}_heads"]) + w.get(f"{name}_heads_bias", 0)
    parts = [
        heads[:, :, r, :, None] * (a @ w[name][:, r])[:, :, None] for r in range(heads.shape[2])
    ]
    return sum(parts)[:, :, n] / len(parts)


def _queries(w, x, s):
    return _latent(w, "q_down", x, s) if "q_down" in w else x


def _down(w, a):
    return a @ w["down"].reshape(a.shape[-1], -1)


# layout -> (w, head, its key/value head, x, key input, value input, sizes) -> q, k, v, o
DEFINITIONS = {
    "standard": lambda w, n, g, x, y, z, s: (
        x @ w["q"][:, n] + _bias(w, "q", n),
        y @ w["k"][:, g] + _bias(w, "k", g),
        z @ w["v"][:, g] + _bias(w, "v", g),
        w["o"][n],
    ),
    "narrow": lambda w, n, g, x, y, z, s: (
        _chunk(x, n, s) @ w["q"][n] + _bias(w, "q", n),
        _chunk(y, n, s) @ w["k"][n] + _bias(w, "k", n),
        _chunk(z, n, s) @ w["v"][n] + _bias(w, "v", n),
        w["o"][n],
    ),
    "narrow_tied": lambda w, n, g, x, y, z, s: (
        _chunk(x, n, s) @ w["q"] + _bias(w, "q"),
        _chunk(y, n, s) @ w["k"] + _bias(w, "k"),
        _chunk(z, n, s) @ w["v"] + _bias(w, "v"),
        w["o"][n] if "o" in w else np.eye(s["V"]),
    ),
    "alt": lambda w, n, g, x, y, z, s: DEFINITIONS["narrow"](
        w, n, g, _down(w, x), _down(w, y), _down(w, z), s
    ),
    "two_stage": lambda w, n, g, x, y, z, s: DEFINITIONS["standard"](
        w, n, g, x @ w["q_outer"], y @ w["k_outer"], z @ w["v_outer"], s
    ),
    "collaborative": lambda w, n, g, x, y, z, s: (
        (x @ w["q"] + _bias(w, "q")) @ np.diag(w["m"][n]),
        y @ w["k"] + _bias(w, "k"),
        z @ w["v"][:, g] + _bias(w, "v", g),
        w["o"][n],
    ),
    "bilinear": lambda w, n, g, x, y, z, s: (
        x @ w["qk"][:, n] + _bias(w, "q", n),
        y,
        z @ w["v"][:, g] + _bias(w, "v", g),
        w["o"][n],
    ),
    "absorbed": lambda w, n, g, x, y, z, s: (
        x @ w["qk"][:, n] + _bias(w, "q", n),
        y,
        z @ w["vo"][n] + _bias(w, "v", n),
        np.eye(s["O"]),
    ),
    "latent": lambda w, n, g, x, y, z, s: (
        _beside(_queries(w, x, s) @ w["q"][:, n], _queries(w, x, s) @ w["q_turned"][:, n]),
        _beside(_latent(w, "kv_down", y, s) @ w["k"][:, n], y @ w["k_turned"]),
        _latent(w, "kv_down", z, s) @ w["v"][:, n],
        w["o"][n],
    ),
    "latent_absorbed": lambda w, n, g, x, y, z, s: (
        _beside(
            _queries(w, x, s) @ w["q"][:, n] @ w["k"][n], _queries(w, x, s) @ w["q_turned"][:, n]
        ),
        _beside(_latent(w, "kv_down", y, s), y @ w["k_turned"]),
        _latent(w, "kv_down", z, s) @ w["v"][n],
        w["o"][n],
    ),
    "low_rank_q": lambda w, n, g, x, y, z, s: DEFINITIONS["standard"](
        w, n, g, _latent(w, "q_down", x, s), y, z, s
    ),
    "tensor": lambda w, n, g, x, y, z, s: (
        _factored(w, "q", n, x),
        _factored(w, "k", n, y),
        _factored(w, "v", n, z),
        w["o"][n],
    ),
    "grouped_tied": lambda w, n, g, x, y, z, s: (
        _beside(x @ w["q"][:, n], x @ w["q_turned"][:, n]),
        _beside(y @ w["kv"][:, g, : s["H"]], y @ w["k_turned"]),
        z @ w["kv"][:, g],
        w["o"][n],
    ),
    "outside": lambda w, n, g, x, y, z, s: DEFINITIONS["standard"](
        w, n, g, norm(x @ w["down"], w["down_norm"]), y, z, s
    ),
}
DEFINITIONS["wide"] = DEFINITIONS["standard"]
