"""From row to row: each step multiplies two neighbours in x W_Q W_K^T x^T W_V W_O out, and so
reaches another row that is the same function.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.old.maps import Weights


class Absorbed(NamedTuple):
    """One step along the chain of rows that are the same function."""

    spec: Any
    """The `HeadSpec` that is reached."""
    weights: Callable[[Weights], Weights]
    """The weights there."""
    flops: int
    """What multiplying them out costs, once per call."""
    breaks: tuple[str, ...] = ()
    """What makes it another function: of "rotary", "qk_norm", "cap" (a soft cap or a sink together
    with key biases), "gate" (one per element) and "extra" (keys that no input has)."""


FREE_SCORES = ("rotary", "qk_norm", "cap")
"""Holds for the product q k^T alone."""


def _rest(w: Weights, *used: str) -> Weights:
    """The weights that a step leaves as they are."""
    return {name: a for name, a in w.items() if name not in used}


def untie(spec: Any) -> Absorbed:
    """narrow_tied -> narrow: every head a copy of the one projection."""
    names = {"q", "k", "v", "q_bias", "k_bias", "v_bias"}
    copy = lambda a: jnp.broadcast_to(a, (spec.num_heads, *a.shape))
    return Absorbed(
        dataclasses.replace(spec, layout="narrow"),
        lambda w: {n: copy(a) if n in names else a for n, a in w.items()},
        0,
    )


def untie_maps(spec: Any) -> Absorbed:
    """ties -> none, the same row: every map of its own, copies where there was one."""
    copies = {ours: theirs for ours, theirs in spec.tied.items() if ours != theirs}

    def weights(w: Weights) -> Weights:
        return w | {
            f"{ours}{end}": w[f"{theirs}{end}"]
            for ours, theirs in copies.items()
            for end in ("", "_outer", "_bias")
            if f"{theirs}{end}" in w
        }

    more = "".join(ours for ours, theirs in copies.items() if theirs in spec.biases)
    return Absorbed(dataclasses.replace(spec, ties="", biases=spec.biases + more), weights, 0)


def block_diagonal(kernel: Array) -> Array:
    """[N, C, H] -> [N*C, N, H]: head n keeps its own chunk of the rows, zeros elsewhere."""
    n, _, h = kernel.shape
    return (jnp.eye(n, dtype=kernel.dtype)[:, None, :, None] * kernel[:, :, None]).reshape(-1, n, h)


def spread(spec: Any) -> Absorbed:
    """narrow -> standard: the chunks as block-diagonal matrices."""
    return Absorbed(
        dataclasses.replace(spec, layout="standard", **_sizes(spec, "HV")),
        lambda w: {n: block_diagonal(a) if n in ("q", "k", "v") else a for n, a in w.items()},
        0,
    )


def fold_down(spec: Any) -> Absorbed:
    """alt -> standard: head n reads x through its own C columns of the shared matrix."""
    s = spec.sizes
    fold = lambda down, a: jnp.einsum("DNC,NCH->DNH", down, a)
    return Absorbed(
        dataclasses.replace(spec, layout="standard", **_sizes(spec, "HV")),
        lambda w: _rest(w, "down") | {n: fold(w["down"], w[n]) for n in "qkv"},
        2 * s["D"] ** 2 * (2 * s["H"] + s["V"]),
    )


def fold_outer(spec: Any) -> Absorbed:
    """two_stage -> standard: W^Q W_i^Q is one matrix per head."""
    s = spec.sizes
    fold = lambda outer, a: jnp.tensordot(outer, a, 1)
    flops = s["D"] ** 2 * s["N"] * s["H"] + s["K"] * (s["E"] ** 2 * s["H"] + s["W"] ** 2 * s["V"])
    return Absorbed(
        dataclasses.replace(spec, layout="standard"),
        lambda w: (
            _rest(w, "q_outer", "k_outer", "v_outer")
            | {n: fold(w[f"{n}_outer"], w[n]) for n in "qkv"}
        ),
        2 * flops,
    )


def multiply_queries(spec: Any) -> Absorbed | None:
    """low_rank_q -> standard, where no norm stands between the two maps of the queries."""
    if spec.latent_norm:
        return None
    reached = dataclasses.replace(
        spec, layout="standard", query_latent_dim=None, latent_norm=True, **_sizes(spec, "HVK")
    )
    return Absorbed(
        reached,
        lambda w: _rest(w, "q_down") | {"q": jnp.tensordot(w["q_down"], w["q"], 1)},
        2 * spec.width * spec.size("Q") * spec.num_heads * spec.size("H"),
    )


def multiply_scores(spec: Any) -> Absorbed | None:
    """standard -> bilinear: A_n = W_Q,n W_K,n^T. The key bias cancels in the softmax, the query
    bias becomes a vector per head.
    """
    s = spec.sizes

    def weights(w: Weights) -> Weights:
        # Each key head serves N/K query heads, next to each other.
        k = jnp.repeat(w["k"], s["N"] // s["K"], axis=1)
        made = {"qk": jnp.einsum("DNH,ENH->DNE", w["q"], k)}
        if "q_bias" in w:
            made["q_bias"] = jnp.einsum("NH,ENH->NE", w["q_bias"], k)
        return _rest(w, "q", "k", "q_bias", "k_bias") | made

    return _bilinear(spec, weights)


def multiply_shared(spec: Any) -> Absorbed | None:
    """collaborative -> bilinear: A_n = W_Q diag(m_n) W_K^T."""

    def weights(w: Weights) -> Weights:
        keys = jnp.einsum("NR,ER->NER", w["m"], w["k"])
        made = {"qk": jnp.einsum("DR,NER->DNE", w["q"], keys)}
        if "q_bias" in w:
            made["q_bias"] = jnp.einsum("R,NER->NE", w["q_bias"], keys)
        return _rest(w, "q", "k", "m", "q_bias", "k_bias") | made

    return _bilinear(spec, weights)


def _bilinear(spec: Any, weights: Callable) -> Absorbed | None:
    if spec.qk_norm or spec.extra_keys:  # between W_Q and W_K, in the basis that they share
        return None
    s = spec.sizes
    reached = dataclasses.replace(
        spec,
        layout="bilinear",
        head_dim=None,
        shared_dim=None,
        scale=spec.score_scale,
        biases=spec.biases.replace("k", ""),
        **_sizes(spec, "V"),
    )
    return Absorbed(
        reached, weights, 2 * s["D"] * s["N"] * s["E"] * s["H"], (*FREE_SCORES, "extra")
    )


def multiply_values(spec: Any) -> Absorbed | None:
    """bilinear -> absorbed: W_V,n W_O,n is one matrix, the value bias a vector per head."""
    s = spec.sizes

    def weights(w: Weights) -> Weights:
        v = jnp.repeat(w["v"], s["N"] // s["K"], axis=1)
        made = {"vo": jnp.einsum("WNV,NVO->NWO", v, w["o"])}
        if "v_bias" in w:
            bias = jnp.repeat(w["v_bias"], s["N"] // s["K"], axis=0)
            made["v_bias"] = jnp.einsum("NV,NVO->NO", bias, w["o"])
        return _rest(w, "v", "o", "v_bias") | made

    if not spec.output or spec.gate == "element":
        return None
    reached = dataclasses.replace(spec, layout="absorbed", num_kv_heads=None, value_dim=None)
    return Absorbed(reached, weights, 2 * s["N"] * s["W"] * s["V"] * s["O"], ("gate",))


def _sizes(spec: Any, letters: str) -> dict[str, int]:
    """Sizes that the next layout would take another default for, spelled out."""
    names = {"H": "head_dim", "V": "value_dim", "K": "num_kv_heads"}
    return {names[a]: spec.sizes[a] for a in letters}
