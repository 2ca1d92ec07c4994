"""A row that is not attnlab's: maps, a cache and three functions, as anyone would write them.

Queries go through R numbers and a norm before they become heads, as in multi-matrix factorization
attention (Hu et al. 2024, arXiv 2412.19255).
"""

import jax.numpy as jnp

from attnlab.heads.old.layouts import LAYOUTS, Layout
from attnlab.norms import rms_norm


def query(w, x, spec, turn):
    few = rms_norm({"scale": w["down_norm"]}, x @ w["down"].astype(x.dtype), eps=spec.norm_eps)
    return turn(jnp.einsum("BTR,RNH->BTNH", few, w["q"].astype(x.dtype)))


def store(w, x, y, spec, turn):
    k = jnp.einsum("BSE,EKH->BSKH", x, w["k"].astype(x.dtype))
    return {"k": turn(k), "v": jnp.einsum("BSW,WKV->BSKV", y, w["v"].astype(y.dtype))}


def merge(w, heads, spec):
    out = jnp.einsum("BTNV,NVO->BTO", heads, w["o"].astype(heads.dtype))
    return out + w["o_bias"].astype(out.dtype) if "o_bias" in w else out


OUTSIDE = Layout(
    maps={
        "down": "query: D -> R",
        "down_norm": "query: R = 1",
        "q": "query: R -> N H",
        "k": "store: E -> K H",
        "v": "store: W -> K V",
        "o": "merge: N V -> O",
        "o_bias": "merge: O = 0 if biases has o",
    },
    cache={"k": "K H", "v": "K V"},
    query=query,
    store=store,
    merge=merge,
)


def register():
    """What a user's file does on import."""
    LAYOUTS["outside"] = OUTSIDE
