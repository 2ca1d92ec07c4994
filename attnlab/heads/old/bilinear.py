"""Heads whose keys, or keys and values, are the input itself: the rows `bilinear` (the general
score of Luong et al. 2015, arXiv 1508.04025) and `absorbed`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.old.maps import Held, Weights, add_bias, merge_all, read_all


def query(w: Weights, x: Array, spec: Any, turn: Callable) -> Array:
    """x A_n + b_n: the rest of the score is the key input itself."""
    return turn(add_bias(read_all(w, "qk", x), w, "q"))


def store(w: Weights, x: Array, y: Array, spec: Any, turn: Callable) -> Held:
    """The input for keys, values by a map of their own."""
    return {"x": turn(x), "v": read_all(w, "v", y)}


def store_absorbed(w: Weights, x: Array, y: Array, spec: Any, turn: Callable) -> Held:
    """One text that nothing turned is kept once."""
    keys = turn(x)
    return {"x": x} if keys is x is y else {"x": keys, "y": y}


def read_absorbed(w: Weights, held: Held, spec: Any) -> tuple[Array, Array]:
    """Keys and values are the inputs. A column of ones carries the mass of each row of
    probabilities to the value bias: less than 1 in empty rows, under dropout and under mixing.
    """
    x, y = held["x"], held.get("y", held["x"])
    if "v_bias" in w:
        y = jnp.concatenate([y, jnp.ones_like(y[..., :1])], axis=-1)
    keys = x[..., None, :]
    return keys, keys if y is x else y[..., None, :]  # one array stays one: see `attend`


def merge_absorbed(w: Weights, heads: Array, spec: Any) -> Array:
    """heads_n B_n, and the value bias times the mass that its column carries."""
    kernel = w["vo"]
    if "v_bias" in w:
        kernel = jnp.concatenate([kernel, w["v_bias"][:, None].astype(kernel.dtype)], axis=1)
    return merge_all({"o": kernel} | {n: w[n] for n in w if n == "o_bias"}, heads, spec)
