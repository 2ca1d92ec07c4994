"""Head layouts: one row of `LAYOUTS` says how heads get q, k and v and become one output.

One letter per axis, everywhere in attnlab:

    B batch    T query positions    S key positions    D width    O output width
    N query heads    K key/value heads    H head width    V value width of a head
    C = D/N, the chunk of x that belongs to a head    E, W widths of the key and value input
    R shared key width    F feed-forward width    L layers    G slots (sets of shared weights)

Two questions that seeds and blogs mix are kept apart: *what a head reads* (all of x, or its own
chunk: the layout) and *how wide it is* (`head_dim`).

The scores are a product of four matrices, x W_Q W_K^T x^T, and the values of two, W_V W_O. Each
row's `absorb` multiplies a pair of neighbours out and so arrives at another row that is the same
function: narrow_tied -> narrow -> standard -> bilinear -> absorbed. Which row of that chain is
cheapest depends on sizes alone; it is how `multi_head_attention` chooses its order of
contraction, and half of the exact maps of `convert`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.remat import save_for_backward

Weights = dict[str, Any]
"""The weights of one set of heads: arrays named q, k, v, o and q_bias, k_bias, ..."""

# The axes that a weight sums over; the rest are what it makes. They give the fan.
INPUT_AXES = {
    "q": "DC", "k": "EC", "v": "WC", "o": "NV", "qk": "D", "vo": "NW", "m": "",
    "down": "D", "q_outer": "D", "k_outer": "E", "v_outer": "W",
}  # fmt: skip


class Absorbed(NamedTuple):
    """One step along the chain of rows that are the same function."""

    spec: Any
    """The `HeadSpec` that is reached."""
    weights: Callable[[Weights], Weights]
    """The weights there."""
    flops: int
    """What multiplying them out costs, once per call."""


class Layout(NamedTuple):
    """One way to make heads. A new layout is three functions and a row of `LAYOUTS`."""

    axes: dict[str, str]
    """Weight name -> axis letters: gives its shape, fan, parameter count and FLOPs."""
    query: Callable
    """(w, x, spec) -> [B, T, N, H]"""
    memory: Callable
    """(w, key_input, value_input, spec) -> k [B, S, K, H], v [B, S, K, V]: what a cache stores"""
    merge: Callable
    """(w, heads [B, T, N, V], spec) -> [B, T, O]"""
    biases: dict[str, str] = {"q": "NH", "k": "KH", "v": "KV", "o": "O"}  # noqa: RUF012
    """Letter of a map -> the axes of its bias."""
    head_dim: str = "C"
    """The axis whose size H takes where a spec leaves `head_dim` out."""
    value_dim: str = "H"
    """The axis whose size V takes where a spec leaves `value_dim` out."""
    prepare: Callable = lambda w, x: x
    """(w, input) -> input: done once to whatever is read."""
    one_key_head: bool = False
    """Do all query heads read the same keys?"""
    reads_inputs: bool = False
    """Are keys and values the inputs themselves? Then a cache holds x alone."""
    absorb: Callable[[Any], Absorbed | None] | None = None
    """spec -> the same function as another row, with fewer or wider weights; None = last."""
    source: str = ""
    """Where the layout comes from."""


def _add_bias(y: Array, w: Weights, name: str) -> Array:
    bias = f"{name}_bias"
    return y + w[bias].astype(y.dtype) if bias in w else y


def _read_all(w: Weights, name: str, x: Array) -> Array:
    """[B, T, D] x [D, N, H] -> [B, T, N, H] as one flat matmul (1.6 times as fast on a CPU)."""
    kernel = w[name].astype(x.dtype)
    flat = save_for_backward(x.reshape(-1, x.shape[-1]) @ kernel.reshape(kernel.shape[0], -1))
    return _add_bias(flat.reshape(*x.shape[:-1], *kernel.shape[1:]), w, name)


def _read_chunk(w: Weights, name: str, x: Array) -> Array:
    """Head n reads x[..., n*C:(n+1)*C] alone: [B, T, N*C] x [N, C, H] -> [B, T, N, H]."""
    kernel = w[name].astype(x.dtype)
    chunks = x.reshape(*x.shape[:-1], *kernel.shape[:2])
    made = save_for_backward(jnp.einsum("BTNC,NCH->BTNH", chunks, kernel))
    return _add_bias(made, w, name)


def _read_tied(w: Weights, name: str, x: Array) -> Array:
    """The same [C, H] for every chunk: [B, T, N*C] -> [B, T, N, H]."""
    chunks = x.reshape(*x.shape[:-1], -1, w[name].shape[0])
    return _read_all(w, name, chunks)


def _merge_all(w: Weights, heads: Array, spec: Any) -> Array:
    """[B, T, N, V] x [N, V, O] -> [B, T, O]; without an output map the heads side by side."""
    flat = heads.reshape(-1, heads.shape[-2] * heads.shape[-1])
    if spec.output:
        kernel = w["o"].astype(heads.dtype)
        flat = flat @ kernel.reshape(-1, kernel.shape[2])
    return _add_bias(flat.reshape(*heads.shape[:2], -1), w, "o")


def _row(read: Callable, axes: str, outer: dict[str, str] | None = None, **fields: Any) -> Layout:
    """A layout whose q, k and v all read their input with `read`; `outer` maps come before them."""
    parts: dict[str, Any] = {
        "axes": (outer or {}) | dict(zip("qkvo", axes.split(", "), strict=True)),
        "query": lambda w, x, spec: read(w, "q", x),
        "memory": lambda w, x, y, spec: (read(w, "k", x), read(w, "v", y)),
        "merge": _merge_all,
    }
    return Layout(**parts | fields)


def _query_two_stage(w: Weights, x: Array, spec: Any) -> Array:
    return _read_all(w, "q", _read_all(w, "q_outer", x))


def _memory_two_stage(w: Weights, x: Array, y: Array, spec: Any) -> tuple[Array, Array]:
    k, v = _read_all(w, "k_outer", x), _read_all(w, "v_outer", y)
    return _read_all(w, "k", k), _read_all(w, "v", v)


def _query_collaborative(w: Weights, x: Array, spec: Any) -> Array:
    """Every head weighs the same R query dimensions: (x W_Q) * m_n."""
    return _read_all(w, "q", x)[..., None, :] * w["m"].astype(x.dtype)


def _memory_collaborative(w: Weights, x: Array, y: Array, spec: Any) -> tuple[Array, Array]:
    return _read_all(w, "k", x)[..., None, :], _read_all(w, "v", y)


def _query_bilinear(w: Weights, x: Array, spec: Any) -> Array:
    """x A_n + b_n: the rest of the score is the key input itself."""
    q = _read_all(w, "qk", x)
    return _add_bias(q, w, "q")


def _memory_bilinear(w: Weights, x: Array, y: Array, spec: Any) -> tuple[Array, Array]:
    return x[..., None, :], _read_all(w, "v", y)


def _memory_absorbed(w: Weights, x: Array, y: Array, spec: Any) -> tuple[Array, Array]:
    """Keys and values are the inputs. A column of ones carries the mass of each row of
    probabilities to the value bias: less than 1 in empty rows, under dropout and under mixing.
    """
    if "v_bias" in w:
        y = jnp.concatenate([y, jnp.ones_like(y[..., :1])], axis=-1)
    return x[..., None, :], y[..., None, :]


def _merge_absorbed(w: Weights, heads: Array, spec: Any) -> Array:
    kernel = w["vo"]
    if "v_bias" in w:
        kernel = jnp.concatenate([kernel, w["v_bias"][:, None].astype(kernel.dtype)], axis=1)
    return _merge_all({"o": kernel} | {n: w[n] for n in w if n == "o_bias"}, heads, spec)


def _rest(w: Weights, *used: str) -> Weights:
    """The weights that a step leaves as they are."""
    return {name: a for name, a in w.items() if name not in used}


def _untie(spec: Any) -> Absorbed:
    """narrow_tied -> narrow: every head a copy of the one projection."""
    names = {"q", "k", "v", "q_bias", "k_bias", "v_bias"}
    copy = lambda a: jnp.broadcast_to(a, (spec.num_heads, *a.shape))
    return Absorbed(
        dataclasses.replace(spec, layout="narrow"),
        lambda w: {n: copy(a) if n in names else a for n, a in w.items()},
        0,
    )


def block_diagonal(kernel: Array) -> Array:
    """[N, C, H] -> [N*C, N, H]: head n keeps its own chunk of the rows, zeros elsewhere."""
    n, _, h = kernel.shape
    return (jnp.eye(n, dtype=kernel.dtype)[:, None, :, None] * kernel[:, :, None]).reshape(-1, n, h)


def _spread(spec: Any) -> Absorbed:
    """narrow -> standard: the chunks as block-diagonal matrices."""
    return Absorbed(
        dataclasses.replace(spec, layout="standard", **_sizes(spec, "HV")),
        lambda w: {n: block_diagonal(a) if n in ("q", "k", "v") else a for n, a in w.items()},
        0,
    )


def _fold_down(spec: Any) -> Absorbed:
    """alt -> standard: head n reads x through its own C columns of the shared matrix."""
    s = spec.sizes
    fold = lambda down, a: jnp.einsum("DNC,NCH->DNH", down.reshape(s["D"], s["N"], s["C"]), a)
    return Absorbed(
        dataclasses.replace(spec, layout="standard", **_sizes(spec, "HV")),
        lambda w: _rest(w, "down") | {n: fold(w["down"], w[n]) for n in "qkv"},
        2 * s["D"] ** 2 * (2 * s["H"] + s["V"]),
    )


def _fold_outer(spec: Any) -> Absorbed:
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


def _multiply_scores(spec: Any) -> Absorbed | None:
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


def _multiply_shared(spec: Any) -> Absorbed | None:
    """collaborative -> bilinear: A_n = W_Q diag(m_n) W_K^T."""

    def weights(w: Weights) -> Weights:
        keys = jnp.einsum("NR,ER->NER", w["m"], w["k"])
        made = {"qk": jnp.einsum("DR,NER->DNE", w["q"], keys)}
        if "q_bias" in w:
            made["q_bias"] = jnp.einsum("R,NER->NE", w["q_bias"], keys)
        return _rest(w, "q", "k", "m", "q_bias", "k_bias") | made

    return _bilinear(spec, weights)


def _bilinear(spec: Any, weights: Callable) -> Absorbed | None:
    if spec.qk_norm:  # it stands between W_Q and W_K
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
    return Absorbed(reached, weights, 2 * s["D"] * s["N"] * s["E"] * s["H"])


def _multiply_values(spec: Any) -> Absorbed | None:
    """bilinear -> absorbed: W_V,n W_O,n is one matrix, the value bias a vector per head."""
    s = spec.sizes

    def weights(w: Weights) -> Weights:
        v = jnp.repeat(w["v"], s["N"] // s["K"], axis=1)
        made = {"vo": jnp.einsum("WNV,NVO->NWO", v, w["o"])}
        if "v_bias" in w:
            bias = jnp.repeat(w["v_bias"], s["N"] // s["K"], axis=0)
            made["v_bias"] = jnp.einsum("NV,NVO->NO", bias, w["o"])
        return _rest(w, "v", "o", "v_bias") | made

    if not spec.output:
        return None
    reached = dataclasses.replace(spec, layout="absorbed", num_kv_heads=None, value_dim=None)
    return Absorbed(reached, weights, 2 * s["N"] * s["W"] * s["V"] * s["O"])


def _sizes(spec: Any, letters: str) -> dict[str, int]:
    """Sizes that the next layout would take another default for, spelled out."""
    names = {"H": "head_dim", "V": "value_dim"}
    return {names[a]: spec.sizes[a] for a in letters}


LAYOUTS: dict[str, Layout] = {
    # Every head reads all of x. Sizes make it canonical, multi-query, grouped or V != H.
    "standard": _row(
        _read_all,
        "D N H, E K H, W K V, N V O",
        absorb=_multiply_scores,
        source="Vaswani et al. 2017, section 3.2.2, arXiv 1706.03762",
    ),
    # The same function with heads as wide as x.
    "wide": _row(
        _read_all,
        "D N H, E K H, W K V, N V O",
        head_dim="D",
        absorb=_multiply_scores,
        source="pbloem/former, SelfAttentionWide",
    ),
    # Every head reads its own chunk of x, with its own weights.
    "narrow": _row(
        _read_chunk,
        "N C H, N C H, N C V, N V O",
        biases={"q": "NH", "k": "NH", "v": "NV", "o": "O"},
        absorb=_spread,
        source="peterbloem.nl/blog/transformers, text of 2019 to 2023",
    ),
    # One projection for the chunks of all heads. Published with an output map and scale
    # 1/sqrt(D) (2019), and without one (2021); `output` and `scale` tell which.
    "narrow_tied": _row(
        _read_tied,
        "C H, C H, C V, N V O",
        biases={"q": "H", "k": "H", "v": "V", "o": "O"},
        absorb=_untie,
        source="pbloem/former, SelfAttentionNarrow",
    ),
    # One D x D matrix for all heads, then chunks.
    "alt": _row(
        _read_chunk,
        "N C H, N C H, N C V, N V O",
        outer={"down": "D D"},
        biases={"q": "NH", "k": "NH", "v": "NV", "o": "O"},
        prepare=lambda w, x: _read_all(w, "down", x),
        absorb=_fold_down,
        source="pbloem/former, SelfAttentionAlt",
    ),
    # One query and one key map for all heads; each head weighs their R dimensions.
    "collaborative": Layout(
        axes={"q": "D R", "k": "E R", "m": "N R", "v": "W K V", "o": "N V O"},
        query=_query_collaborative,
        memory=_memory_collaborative,
        merge=_merge_all,
        biases={"q": "R", "k": "R", "v": "KV", "o": "O"},
        head_dim="R",
        value_dim="C",
        one_key_head=True,
        absorb=_multiply_shared,
        source="Cordonnier et al. 2020, arXiv 2006.16362",
    ),
    # One D x E matrix per head in place of the pair W_Q, W_K. Its keys are the input.
    "bilinear": Layout(
        axes={"qk": "D N E", "v": "W K V", "o": "N V O"},
        query=_query_bilinear,
        memory=_memory_bilinear,
        merge=_merge_all,
        biases={"q": "NE", "v": "KV", "o": "O"},
        head_dim="E",
        value_dim="C",
        one_key_head=True,
        absorb=_multiply_values,
        source="Luong et al. 2015, section 3.1 (general score), arXiv 1508.04025",
    ),
    # And one W x O matrix per head in place of W_V, W_O: keys and values are the inputs.
    "absorbed": Layout(
        axes={"qk": "D N E", "vo": "N W O"},
        query=_query_bilinear,
        memory=_memory_absorbed,
        merge=_merge_absorbed,
        biases={"q": "NE", "v": "NO", "o": "O"},
        head_dim="E",
        value_dim="W",
        one_key_head=True,
        reads_inputs=True,
        source="Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (QK and OV)",
    ),
    # W^Q, W^K, W^V before the maps of each head, as one reads the paper's Q W_i^Q.
    "two_stage": _row(
        _read_all,
        "D N H, E K H, W K V, N V O",
        outer={"q_outer": "D D", "k_outer": "E E", "v_outer": "W W"},
        query=_query_two_stage,
        memory=_memory_two_stage,
        absorb=_fold_outer,
        source="Vaswani et al. 2017, section 3.2.2, with Q = X W^Q read into it",
    ),
}
