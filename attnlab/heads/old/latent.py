"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): keys and values of
all heads are read from one small latent, which is all that decoding stores.

    c = norm(y W_DKV) [M],  r = turn(y W_KR) [P],  k_n = [c W_UK,n ; r],  v_n = c W_UV,n
    q_n = [u W_Q,n ; turn(u W_QR,n)],  u = norm(x W_DQ) [Q], or x where there is no Q

The part of P numbers alone has positions; its key is the same for all heads. Scores are scaled by
1/sqrt(H + P). `latent_norm=False` leaves both norms out (none is published without; grouped heads
are such latents). Two rows are this function: `latent` makes k_n and v_n of every token held,
`latent_absorbed` moves W_UK to the query and W_UV to the output, so that every head looks at
[c ; r] and gets c. Which is cheaper depends on the call: `latent` for a text, the other to decode.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.old.absorb import Absorbed
from attnlab.heads.old.maps import Held, Weights, merge_all, normalise, read_all, read_chunk

# Left out, M and P are to H as in the paper (Table 1): 4 H and H/2, here made even.
SIZES: dict[str, Callable] = {
    "H": lambda spec, s: s["C"],
    "V": lambda spec, s: s["H"],
    "M": lambda spec, s: 4 * s["H"],
    "P": lambda spec, s: 2 * -(-s["H"] // 4),
    "Q": lambda spec, s: s["D"],
}

DOWN = {
    "q_down": "query: D -> Q if query_latent_dim",
    "q_down_norm": "query: Q = 1 if query_latent_dim and latent_norm",
    "q": "query: Q -> N H",
    "q_turned": "query: Q -> N P",
    "kv_down": "store: D -> M",
    "kv_down_norm": "store: M = 1 if latent_norm",
    "k_turned": "store: D -> P",
}
CACHE = {"c": "M", "r": "P"}
OUTPUT = {"o": "merge: N V -> O if output", "o_bias": "merge: O = 0 if biases has o"}
MAPS = DOWN | {"k": "read: M -> N H", "v": "read: M -> N V"} | OUTPUT
MAPS_ABSORBED = DOWN | {"k": "query: [N] H -> M", "v": "merge: [N] M -> V"} | OUTPUT


def query(w: Weights, x: Array, spec: Any, turn: Callable) -> Array:
    """[u W_Q,n ; turn(u W_QR,n)]"""
    without, turned = _queries(w, x, spec, turn)
    return jnp.concatenate([without, turned], axis=-1)


def query_absorbed(w: Weights, x: Array, spec: Any, turn: Callable) -> Array:
    """[u W_Q,n W_UK,n^T ; turn(u W_QR,n)]"""
    without, turned = _queries(w, x, spec, turn)
    return jnp.concatenate([read_chunk(w, "k", without), turned], axis=-1)


def _queries(w: Weights, x: Array, spec: Any, turn: Callable) -> tuple[Array, Array]:
    if spec.query_latent_dim:
        x = compress(w, "q_down", x, spec)
    return read_all(w, "q", x), turn(read_all(w, "q_turned", x))


def compress(w: Weights, name: str, x: Array, spec: Any) -> Array:
    """x -> its latent, normalised where the spec says so."""
    kind = "rms" if spec.latent_norm else None
    return normalise(w, f"{name}_norm", read_all(w, name, x), kind, spec.norm_eps)


def store(w: Weights, x: Array, y: Array, spec: Any, turn: Callable) -> Held:
    """The latent, and the one key that has positions; for values of another text its latent too."""
    latent = lambda a: compress(w, "kv_down", a, spec)
    held = {"c": latent(x), "r": turn(read_all(w, "k_turned", x))}
    return held if y is x else held | {"y": latent(y)}


def read(w: Weights, held: Held, spec: Any) -> tuple[Array, Array]:
    """Keys and values of every head."""
    k, turned = read_all(w, "k", held["c"]), held["r"][..., None, :]
    turned = jnp.broadcast_to(turned, (*k.shape[:-1], turned.shape[-1]))
    return jnp.concatenate([k, turned], axis=-1), read_all(w, "v", held.get("y", held["c"]))


def read_absorbed(w: Weights, held: Held, spec: Any) -> tuple[Array, Array]:
    """One key head [c ; r], one value head c."""
    key = jnp.concatenate([held["c"], held["r"]], axis=-1)
    return key[..., None, :], held.get("y", held["c"])[..., None, :]


def merge_absorbed(w: Weights, heads: Array, spec: Any) -> Array:
    """(heads_n W_UV,n) W_O,n"""
    return merge_all(w, read_chunk(w, "v", heads), spec)


def absorb(spec: Any) -> Absorbed | None:
    """latent -> latent_absorbed: the same matrices, applied to the other side of the product."""
    if spec.gate == "element":  # it stands between W_UV and W_O
        return None
    return Absorbed(
        dataclasses.replace(spec, layout="latent_absorbed", scale=spec.score_scale),
        lambda w: w | {"k": w["k"].transpose(1, 2, 0), "v": w["v"].transpose(1, 0, 2)},
        0,
        ("gate",),
    )
