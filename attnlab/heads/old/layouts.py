"""Head layouts: one row of `LAYOUTS` says how heads get q, k and v and become one output.

One letter per axis, everywhere in attnlab:

    B batch    T query positions    S key positions    D width    O output width
    N query heads    K key/value heads    H head width    V value width of a head
    C = D/N, the chunk of x that belongs to a head    E, W widths of the key and value input
    R shared key width    F feed-forward width    L layers    G slots (sets of shared weights)
    M width of the latent of keys and values    Q of the latent of queries (D without one)
    P width of the rotary part of a head that keeps it apart
    X, Y, Z ranks of the queries, keys and values of a token, as matrices N x H
    A keys and values that no input has

Two questions that seeds and blogs mix are kept apart: *what a head reads* (all of x, or its own
chunk: the layout) and *how wide it is* (`head_dim`).

The scores are a product of four matrices, x W_Q W_K^T x^T, and the values of two, W_V W_O. Each
row's `absorb` multiplies a pair of neighbours out and so arrives at another row that is the same
function: narrow_tied -> narrow -> standard -> bilinear -> absorbed, and latent -> latent_absorbed.
Which row of a chain is cheapest depends on sizes alone; it is how `multi_head_attention` chooses
its order of contraction, and half of the exact maps of `convert`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.old import absorb, bilinear, latent, tensor, tied
from attnlab.heads.old.absorb import Absorbed
from attnlab.heads.old.maps import (
    Held,
    Weights,
    biases,
    merge_all,
    normalise,
    over_tokens,
    parse,
    qk_norms,
    read_all,
    read_chunk,
    read_tied,
)


class Layout(NamedTuple):
    """One way to make heads, and all that is particular to it: what it stores, what its weights
    are and when each is applied. A new layout is `maps`, `cache` and three functions.

    `turn` rotates [B, T, ..., H] by position, over the last axis (`positions.rotate`); a row hands
    it what positions turn, all of q and k or a part of them. Without rotary positions it does
    nothing.

    Along a chain of `absorb` one name in a cache stands for the same numbers: a row may read what
    another one stored where the names agree.
    """

    maps: dict[str, str]
    """Weight name -> when it is applied, what it reads, what it makes (`maps.py`): gives its shape,
    sharding axes, initial scale, parameters, FLOPs, and whether it makes keys and values."""
    cache: dict[str, str]
    """Name -> axes of what decoding stores for a token."""
    query: Callable[..., Array]
    """(w, x, spec, turn) -> q [B, T, N, Hq]"""
    store: Callable[..., Held]
    """(w, key_input, value_input, spec, turn) -> {name: [B, S, ...]}: the names of `cache`"""
    merge: Callable[..., Array]
    """(w, heads [B, T, N, Vv], spec) -> [B, T, O]"""
    read: Callable[..., tuple[Array, Array]] = lambda w, held, spec: (
        held["k"],
        held.get("v", held["k"]),
    )
    """(w, held, spec) -> k [B, S, Kk, Hq], v [B, S, Kv, Vv]"""
    prepare: Callable[..., Array] = lambda w, x: x
    """(w, input) -> input: done once to whatever is read."""
    sizes: dict[str, Callable] = {  # noqa: RUF012
        "H": lambda spec, s: s["C"],
        "V": lambda spec, s: s["H"],
    }
    """Letter -> (spec, sizes so far) -> its size where the spec leaves it out."""
    scores: str = "H"
    """Hq, what a score sums over: letters whose sizes are added, as in "H + P"."""
    values: str = "V"
    """Vv, what a head gets for a query, likewise."""
    turned: str | None = "H"
    """The axis that rotary positions turn; None where what is cached cannot be turned."""
    products: tuple[str, ...] = ()
    """What is multiplied beside the maps, as in "read: Y N H": when, multiply-adds for a token."""
    check: Callable[[str, dict[str, int]], None] = lambda layout, sizes: None
    """(its name, sizes) -> raises ValueError, saying what to change, where they do not fit."""
    absorb: Callable[[Any], Absorbed | None] | None = None
    """spec -> the same function as another row, with fewer or wider weights; None = last."""
    equation: str = ""
    """q_n, k_n and v_n, where x asks, y gives the keys and z the values, x_n is chunk n of x."""
    rank: str = ""
    """Sizes, or sums of them, of which the smallest bounds the rank of the scores of a head."""
    source: str = ""
    """Where the layout comes from."""

    @property
    def letters(self) -> str:
        """Of the axes of all weights that a spec may have."""
        return "".join(parse(name, text).axes for name, text in self.maps.items())

    @property
    def asks(self) -> set[str]:
        """The fields of a spec that decide which weights are there."""
        return {field for name, text in self.maps.items() for field in parse(name, text).fields}


def _row(
    read: Callable, qkv: str, outer: dict[str, str] | None = None, tied: str = "qkv", **fields: Any
) -> Layout:
    """A layout whose q, k and v all read their input with `read`, and which knows biases, q/k
    norms and `ties` between the maps of these letters; `outer` maps come before them.
    """
    q, k, v = qkv.split(", ")
    k_own = " if ties lacks q" if "q" in tied else ""
    maps = {
        "q": f"query: {q}",
        "k": f"store: {k}{k_own}",
        "v": f"store: {v} if ties lacks v",
        "o": OUTPUT,
    }

    def query(w, x, spec, turn):
        return turn(normalise(w, "q_norm", read(w, "q", x), spec.qk_norm, spec.norm_eps))

    def store(w, x, y, spec, turn):
        by = spec.tied
        kept = read(w, by["k"], x)
        v = kept if by["v"] == by["k"] and y is x else read(w, by["v"], y)
        k = turn(normalise(w, "k_norm", kept, spec.qk_norm, spec.norm_eps))
        return {"k": k} if k is v else {"k": k, "v": v}

    cache = fields.get("cache", {"k": "K H", "v": "K V"})
    extra = {f"extra_{n}": f"read: A {cache[n]} ~ 1 if extra_keys" for n in "kv"}
    parts: dict[str, Any] = {
        "maps": (outer or {}) | maps | biases(maps) | qk_norms("H") | extra,
        "cache": cache,
        "query": query,
        "store": store,
        "merge": merge_all,
        "rank": f"{parse('q', maps['q']).reads}, H",
    }
    return Layout(**parts | fields)


OUTPUT = "merge: N V -> O if output"


def _read_two_stage(w: Weights, name: str, x: Array) -> Array:
    return read_all(w, name, read_all(w, f"{name}_outer", x))


def _query_low_rank(w: Weights, x: Array, spec: Any, turn: Callable) -> Array:
    """norm(x U) Q_n"""
    q = read_all(w, "q", latent.compress(w, "q_down", x, spec))
    return turn(normalise(w, "q_norm", q, spec.qk_norm, spec.norm_eps))


def _query_collaborative(w: Weights, x: Array, spec: Any, turn: Callable) -> Array:
    """Every head weighs the same R query dimensions: (x W_Q) * m_n."""
    q = over_tokens(jnp.multiply, read_all(w, "q", x)[..., None, :], w["m"])
    return turn(normalise(w, "q_norm", q, spec.qk_norm, spec.norm_eps))


def _store_collaborative(w: Weights, x: Array, y: Array, spec: Any, turn: Callable) -> Held:
    k = normalise(w, "k_norm", read_all(w, "k", x), spec.qk_norm, spec.norm_eps)
    return {"k": turn(k), "v": read_all(w, "v", y)}


def _one_key_head(key: str) -> Callable:
    """The `read` of rows whose query heads all look at one key, which has no axis for heads."""
    return lambda w, held, spec: (held[key][..., None, :], held["v"])


PER_HEAD = {"k": "N H", "v": "N V"}
COLLABORATIVE = {"q": "query: D -> R", "k": "store: E -> R", "v": "store: W -> K V", "o": OUTPUT}
BILINEAR = {"qk": "query: D -> N E", "v": "store: W -> K V", "o": OUTPUT}

LAYOUTS: dict[str, Layout] = {
    # Every head reads all of x. Sizes make it canonical, multi-query, grouped or V != H.
    "standard": _row(
        read_all,
        "D -> N H, E -> K H, W -> K V",
        absorb=absorb.multiply_scores,
        equation="q_n = x Q_n,  k_n = y K_n,  v_n = z V_n",
        source="Vaswani et al. 2017, section 3.2.2, arXiv 1706.03762",
    ),
    # The same function with heads as wide as x.
    "wide": _row(
        read_all,
        "D -> N H, E -> K H, W -> K V",
        sizes={"H": lambda spec, s: s["D"], "V": lambda spec, s: s["H"]},
        absorb=absorb.multiply_scores,
        equation="q_n = x Q_n,  k_n = y K_n,  v_n = z V_n,  H = V = D",
        source="pbloem/former, SelfAttentionWide",
    ),
    # Every head reads its own chunk of x, with its own weights.
    "narrow": _row(
        read_chunk,
        "[N] C -> H, [N] C -> H, [N] C -> V",
        cache=PER_HEAD,
        absorb=absorb.spread,
        equation="q_n = x_n Q_n,  k_n = y_n K_n,  v_n = z_n V_n",
        source="peterbloem.nl/blog/transformers, text of 2019 to 2023",
    ),
    # One projection for the chunks of all heads. Published with an output map and scale
    # 1/sqrt(D) (2019), and without one (2021); `output` and `scale` tell which.
    "narrow_tied": _row(
        read_tied,
        "(N) C -> H, (N) C -> H, (N) C -> V",
        cache=PER_HEAD,
        absorb=absorb.untie,
        equation="q_n = x_n Q,  k_n = y_n K,  v_n = z_n V",
        source="pbloem/former, SelfAttentionNarrow",
    ),
    # One D x D matrix for all heads, then chunks.
    "alt": _row(
        read_chunk,
        "[N] C -> H, [N] C -> H, [N] C -> V",
        outer={"down": "prepare: D -> N C"},
        cache=PER_HEAD,
        prepare=lambda w, x: read_all(w, "down", x),
        absorb=absorb.fold_down,
        equation="q_n = (x down)_n Q_n,  k_n = (y down)_n K_n,  v_n = (z down)_n V_n",
        source="pbloem/former, SelfAttentionAlt",
    ),
    # One query and one key map for all heads; each head weighs their R dimensions.
    "collaborative": Layout(
        maps={
            "q": COLLABORATIVE["q"],
            "k": COLLABORATIVE["k"],
            "m": "query: N R ~ 1",
            "v": COLLABORATIVE["v"],
            "o": OUTPUT,
            **biases(COLLABORATIVE),
            **qk_norms("R"),
        },
        cache={"k": "R", "v": "K V"},
        query=_query_collaborative,
        store=_store_collaborative,
        read=_one_key_head("k"),
        merge=merge_all,
        sizes={"H": lambda spec, s: s["R"], "V": lambda spec, s: s["C"]},
        scores="R",
        turned="R",
        absorb=absorb.multiply_shared,
        rank="D, R",
        equation="q_n = (x Q) * m_n,  k_n = y K,  v_n = z V_n",
        source="Cordonnier et al. 2020, arXiv 2006.16362",
    ),
    # One D x E matrix per head in place of the pair W_Q, W_K. Its keys are the input.
    "bilinear": Layout(
        maps={
            **BILINEAR,
            "q_bias": "query: N E = 0 if biases has q",
            **biases(BILINEAR, "vo"),
        },
        cache={"x": "E", "v": "K V"},
        query=bilinear.query,
        store=bilinear.store,
        read=_one_key_head("x"),
        merge=merge_all,
        sizes={"H": lambda spec, s: s["E"], "V": lambda spec, s: s["C"]},
        scores="E",
        turned="E",
        absorb=absorb.multiply_values,
        rank="D, E",
        equation="q_n = x A_n,  k_n = y,  v_n = z V_n",
        source="Luong et al. 2015, section 3.1 (general score), arXiv 1508.04025",
    ),
    # And one W x O matrix per head in place of W_V, W_O: keys and values are the inputs.
    "absorbed": Layout(
        maps={
            "qk": "query: D -> N E",
            "vo": "merge: N W -> O",
            "q_bias": "query: N E = 0 if biases has q",
            "v_bias": "merge: N -> O = 0 if biases has v",
            "o_bias": "merge: O = 0 if biases has o",
        },
        cache={"x": "E"},
        query=bilinear.query,
        store=bilinear.store_absorbed,
        read=bilinear.read_absorbed,
        merge=bilinear.merge_absorbed,
        # A value bias rides on one more column, of ones.
        sizes={"H": lambda spec, s: s["E"], "V": lambda spec, s: s["W"] + ("v" in spec.biases)},
        scores="E",
        turned=None,
        rank="D, E",
        equation="q_n = x A_n,  k_n = y,  v_n W_O,n = z B_n",
        source="Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (QK and OV)",
    ),
    # W^Q, W^K, W^V before the maps of each head, as one reads the paper's Q W_i^Q.
    "two_stage": _row(
        _read_two_stage,
        "D -> N H, E -> K H, W -> K V",
        outer={
            "q_outer": "query: D -> D",
            "k_outer": "store: E -> E if ties lacks q",
            "v_outer": "store: W -> W if ties lacks v",
        },
        absorb=absorb.fold_outer,
        equation="q_n = x Q Q_n,  k_n = y K K_n,  v_n = z V V_n",
        source="Vaswani et al. 2017, section 3.2.2, with Q = X W^Q read into it",
    ),
    # Queries through few numbers, so that the heads, which share one key and value, may be wide.
    "low_rank_q": _row(
        read_all,
        "Q -> N H, E -> K H, W -> K V",
        outer={"q_down": "query: D -> Q", "q_down_norm": "query: Q = 1 if latent_norm"},
        tied="kv",
        query=_query_low_rank,
        sizes={
            "K": lambda spec, s: 1,
            "H": lambda spec, s: 2 * s["C"],
            "V": lambda spec, s: s["H"],
            "Q": lambda spec, s: -(-s["D"] // 2),
        },
        absorb=absorb.multiply_queries,
        rank="D, Q, H",
        equation="q_n = norm(x U) Q_n,  k_n = y K_n,  v_n = z V_n",
        source="Hu et al. 2024, Multi-matrix Factorization Attention, arXiv 2412.19255",
    ),
    # Queries, keys and values of a token are matrices N x H of low rank.
    "tensor": Layout(
        maps=tensor.MAPS | latent.OUTPUT,
        cache=tensor.CACHE,
        query=tensor.query,
        store=tensor.store,
        read=tensor.read,
        merge=merge_all,
        sizes=tensor.SIZES,
        products=tensor.PRODUCTS,
        rank="H",
        equation="q_n = 1/X sum_r (x A_r)_n turn(x B_r),  k_n = 1/Y sum_r (y A'_r)_n turn(y B'_r),"
        "  v_n = 1/Z sum_r (z A''_r)_n (z B''_r)",
        source="Zhang et al. 2025, Tensor Product Attention, arXiv 2501.06425",
    ),
    # One state per key/value head is the value and half of the key.
    "grouped_tied": Layout(
        maps=tied.MAPS | latent.OUTPUT,
        cache=tied.CACHE,
        query=tied.query,
        store=tied.store,
        read=tied.read,
        merge=merge_all,
        sizes=tied.SIZES,
        check=tied.check,
        scores="H + P",
        turned="P",
        absorb=tied.untie,
        rank="D, H + P",
        equation="q_n = [x Q_n ; turn(x P_n)],  k_n = [first H of y T_n ; turn(y R)],  v_n = z T_n",
        source="Zadouri et al. 2025, Hardware-Efficient Attention, arXiv 2505.21487",
    ),
    # Keys and values of all heads are read from one latent; a part apart has the positions.
    "latent": Layout(
        maps=latent.MAPS,
        cache=latent.CACHE,
        query=latent.query,
        store=latent.store,
        read=latent.read,
        merge=merge_all,
        sizes=latent.SIZES,
        scores="H + P",
        turned="P",
        rank="D, Q, H + P",
        absorb=latent.absorb,
        equation="q_n = [u Q_n ; turn(u P_n)],  k_n = [c(y) K_n ; turn(y R)],  v_n = c(z) V_n,  "
        "c(y) = norm(y C),  u = x or norm(x U)",
        source="DeepSeek-AI 2024, DeepSeek-V2, section 2.1, arXiv 2405.04434",
    ),
    # The same function, its keys and values the latent itself: the form that decodes.
    "latent_absorbed": Layout(
        maps=latent.MAPS_ABSORBED,
        cache=latent.CACHE,
        query=latent.query_absorbed,
        store=latent.store,
        read=latent.read_absorbed,
        merge=latent.merge_absorbed,
        sizes=latent.SIZES,
        scores="M + P",
        values="M",
        turned="P",
        rank="D, Q, H + P",
        equation="q_n = [u Q_n K_n ; turn(u P_n)],  k_n = [c(y) ; turn(y R)],  "
        "v_n W_O,n = c(z) V_n O_n,  c(y) = norm(y C),  u = x or norm(x U)",
        source="DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2, arXiv 2405.04434",
    ),
}
"""Every layout by its name, as in `HeadSpec.layout`."""
