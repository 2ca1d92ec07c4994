"""Grouped-tied attention (Zadouri et al. 2025, arXiv 2505.21487): each key/value head has one
state, which is its value and, but for positions, its key.

    s_n = y T_n [V],   r = turn(y R) [P],   k_n = [first H of s_n ; r],   v_n = s_n
    q_n = [x Q_n ; turn(x P_n)]

No number of the state is turned: positions are in a part of P numbers whose key is the same for
all heads. In the paper H = P = V/2, so a key is as wide as a value, and K V + P numbers a token
are cached where grouped heads have 2 K V. Scores are scaled by 1/sqrt(H + P).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.old.absorb import Absorbed
from attnlab.heads.old.maps import Held, Weights, read_all

# Half of a value each, P even; both round up.
SIZES: dict[str, Callable] = {
    "V": lambda spec, s: s["C"],
    "H": lambda spec, s: -(-s["V"] // 2),
    "P": lambda spec, s: 2 * -(-s["V"] // 4),
}

MAPS = {
    "q": "query: D -> N H",
    "q_turned": "query: D -> N P",
    "kv": "store: D -> K V",
    "k_turned": "store: D -> P",
}
CACHE = {"kv": "K V", "r": "P"}


def check(layout: str, sizes: dict[str, int]) -> None:
    """The part of the key that is tied is a part of the value."""
    if sizes["H"] > sizes["V"]:
        raise ValueError(
            f"layout {layout!r}: head_dim {sizes['H']} numbers of a value of {sizes['V']} are the "
            "key; set a smaller head_dim or a larger value_dim"
        )


def query(w: Weights, x: Array, spec: Any, turn: Callable) -> Array:
    """[x Q_n ; turn(x P_n)]"""
    return jnp.concatenate([read_all(w, "q", x), turn(read_all(w, "q_turned", x))], axis=-1)


def store(w: Weights, x: Array, y: Array, spec: Any, turn: Callable) -> Held:
    """The states, and the one key that has positions; for values of another text its states too."""
    held = {"kv": read_all(w, "kv", x), "r": turn(read_all(w, "k_turned", x))}
    return held if y is x else held | {"y": read_all(w, "kv", y)}


def read(w: Weights, held: Held, spec: Any) -> tuple[Array, Array]:
    """[first H of the state ; the turned part], the state."""
    k, turned = held["kv"][..., : spec.sizes["H"]], held["r"][..., None, :]
    turned = jnp.broadcast_to(turned, (*k.shape[:-1], turned.shape[-1]))
    return jnp.concatenate([k, turned], axis=-1), held.get("y", held["kv"])


def untie(spec: Any) -> Absorbed:
    """grouped_tied -> standard: keys and values apart, the turned part a copy per head."""
    s = spec.sizes

    def weights(w: Weights) -> Weights:
        turned = jnp.broadcast_to(w["k_turned"][:, None], (s["D"], s["K"], s["P"]))
        made = {
            "q": jnp.concatenate([w["q"], w["q_turned"]], axis=-1),
            "k": jnp.concatenate([w["kv"][..., : s["H"]], turned], axis=-1),
            "v": w["kv"],
        }
        return made | {n: a for n, a in w.items() if n not in MAPS}

    reached = dataclasses.replace(
        spec, layout="standard", head_dim=s["H"] + s["P"], value_dim=s["V"], rotary_dim=None
    )
    return Absorbed(reached, weights, 0, ("rotary",))
