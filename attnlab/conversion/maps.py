"""Exact maps between head layouts: one row of `MAPS` each. `convert` finds the way through them.

A map takes the weights of one spec to the weights of another that is the same function of x, the
context and the value context, head by head and at any mask. What a map needs is of two kinds. The
*spec* decides most (`specs.py`). Some also need *weights* with a structure, such as a low rank
(`weights.py`).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

from attnlab.conversion import fields, specs, ties, weights
from attnlab.heads.old.absorb import FREE_SCORES
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec


class Map(NamedTuple):
    """One exact map: which specs it leads to, and the weights there."""

    reach: Callable[[HeadSpec, HeadSpec], Iterable[HeadSpec]]
    """(spec, goal) -> the specs that it reaches on the way to the goal"""
    weights: Callable[[Weights, HeadSpec, HeadSpec], Weights]
    """(w, spec, reached) -> weights there, or raises `Refused`"""
    takes: str
    """What it takes, in words."""
    breaks: tuple[str, ...] = ()
    """What makes it inexact: of "rotary", "qk_norm", "cap" (a soft cap, a sink or extra keys
    together with key biases), "element" (a gate of each) and "extra" (keys)"""
    conditional: bool = False
    """Do the values of the weights decide whether it applies?"""
    changes: tuple[str, ...] = ()
    """The fields beside the row that it changes; no other map changes any."""


FREE_WIDTH = ("rotary", "qk_norm")  # needs a head width that nothing looks at


def _along(*layouts: str) -> dict[str, Any]:
    """The step of the row's own `absorb`."""
    step: Callable[[HeadSpec], Any] = lambda spec: LAYOUTS[spec.layout].absorb(spec)  # type: ignore

    def reach(spec, goal):
        if spec.layout in layouts and step(spec):
            yield specs.settled(step(spec).spec)

    def weights(w, spec, reached):
        return step(spec).weights({name: jnp.asarray(a) for name, a in w.items()})

    return {"reach": reach, "weights": weights}


MAPS: dict[str, Map] = {
    "untie_maps": Map(
        ties.apart, ties.copies, "copies of the maps that are one", changes=("ties",)
    ),
    "rename": Map(specs.renamed, weights.keep, "`wide` and `standard` of the same sizes"),
    "untie": Map(takes="a copy of the one projection per head", **_along("narrow_tied")),
    "spread": Map(takes="chunks as block-diagonal matrices", **_along("narrow")),
    "fold_down": Map(takes="the shared matrix multiplied into each head", **_along("alt")),
    "fold_outer": Map(takes="the outer maps multiplied into each head", **_along("two_stage")),
    "multiply_scores": Map(
        takes="A_n = W_Q W_K^T; the key bias cancels, the query bias becomes a vector",
        breaks=FREE_SCORES,
        **_along("standard", "wide"),
    ),
    "multiply_shared": Map(
        takes="A_n = W_Q diag(m_n) W_K^T", breaks=FREE_SCORES, **_along("collaborative")
    ),
    "multiply_values": Map(
        takes="W_V W_O per head; the value bias carries the row mass",
        breaks=("element",),
        **_along("bilinear"),
    ),
    "absorb_latent": Map(
        takes="the maps out of the latent applied to the query and to the output",
        **_along("latent"),
    ),
    "expand_latent": Map(
        specs.becomes("latent_absorbed", "latent"),
        weights.expand_latent,
        "the maps out of the latent applied to the latent",
    ),
    "multiply_queries": Map(
        takes="the two maps of the queries, without a norm between them, multiplied",
        **_along("low_rank_q"),
    ),
    "multiply_latent": Map(
        specs.multiplied_latent,
        weights.multiply_latent,
        "the maps into and out of a latent without a norm multiplied; all of q and k is one part",
        breaks=("rotary",),
    ),
    "side_by_side": Map(
        specs.side_by_side,
        weights.side_by_side,
        "latent_dim = K (H + V), no norm: keys and values of all heads beside each other, the maps "
        "out of it 0 and 1",
        breaks=("rotary",),
    ),
    "untie_states": Map(
        takes="keys and values apart, the turned part of the key a copy per head",
        breaks=("rotary",),
        **_along("grouped_tied"),
    ),
    "constant_factors": Map(
        specs.constant_factors,
        weights.constant_factors,
        "ranks N and K: factors of the heads that are constants, 1 for one head or group",
    ),
    "identity_outer": Map(
        specs.becomes("standard", "two_stage"),
        weights.identity_outer,
        "outer maps that are identities",
    ),
    "identity_down": Map(
        specs.becomes("narrow", "alt"),
        weights.identity_down,
        "a shared matrix that is the identity",
    ),
    "identity_output": Map(
        specs.output, weights.identity_output, "an output map that is the identity"
    ),
    "identity_keys": Map(
        specs.identity_keys, weights.identity_keys, "head_dim = width of the key input"
    ),
    "identity_values": Map(
        specs.identity_values,
        weights.identity_values,
        "value_dim = width of the value input, one more with a value bias",
    ),
    "repeat_heads": Map(
        specs.repeated, weights.repeat, "a key/value head copied for its query heads"
    ),
    "repeat_keys": Map(
        specs.repeated_keys, weights.repeat_keys, "head_dim = shared_dim, one key head copied"
    ),
    "block_indicators": Map(
        specs.indicators,
        weights.indicators,
        "shared_dim = N H: m_n is 1 at the columns of head n",
        breaks=FREE_WIDTH,
    ),
    "pad_head_dim": Map(
        specs.size("H"), weights.pad("H"), "zero columns in q and k", breaks=FREE_WIDTH
    ),
    "pad_rotary_pairs": Map(
        specs.interleaved,
        weights.interleave,
        "head_dim times a whole number: zero pairs between the turning pairs of q and k",
        breaks=("qk_norm",),
    ),
    "pad_value_dim": Map(specs.size("V"), weights.pad("V"), "zero columns in v, zero rows in o"),
    "pad_shared_dim": Map(
        specs.size("R"), weights.pad("R"), "zero columns in q, k and m", breaks=FREE_WIDTH
    ),
    "pad_latent_dim": Map(
        specs.latent_size, weights.pad("M"), "a latent without a norm, more numbers that are zero"
    ),
    "pad_ranks": Map(
        specs.ranks, weights.pad_ranks, "more factors, all zero; their mean as it was"
    ),
    "pad_heads": Map(specs.heads, weights.pad("NK"), "more heads, all zero"),
    "drop_key_bias": Map(
        specs.no_bias("k"), weights.keep, "it adds the same to a whole row", breaks=FREE_SCORES
    ),
    "add_zero_bias": Map(specs.finish("biases"), weights.add_zeros, "a bias of zeros"),
    "rescale": Map(specs.finish("scale"), weights.rescale, "the ratio of the scales goes into q"),
    "half_gate": Map(
        specs.finish("gate", lambda old, new: old is None),
        fields.half_gate,
        "a gate of weights 0, which is 1/2; what it multiplies doubled",
        changes=("gate",),
    ),
    "spread_gate": Map(
        specs.finish("gate", lambda old, new: (old, new) == ("head", "element")),
        fields.spread_gate,
        "the gate of a head for each of its numbers",
        changes=("gate",),
    ),
    "zero_sink": Map(
        specs.finish("sink", lambda old, new: (old, new) == ("one", "learnt")),
        weights.add_zeros,
        "a sink of 0 for each head",
        changes=("sink",),
    ),
    "never_sink": Map(
        fields.never,
        fields.never_sink,
        "a sink of -1e30: its share is 0 in every dtype, not in exact numbers; it never learns",
        changes=("sink",),
    ),
    "zero_key": Map(
        fields.one_more_key,
        fields.zero_key,
        "the sink of 0 as a key and a value of zeros",
        changes=("sink", "extra_keys"),
    ),
    "add_norm_bias": Map(
        specs.finish("qk_norm_bias", lambda old, new: new),
        weights.add_zeros,
        "norms of q and k with biases of zeros",
        changes=("qk_norm_bias",),
    ),
    "rescale_norms": Map(
        fields.other_eps,
        fields.rescale_norms,
        "the root of the ratio of the epsilons goes into what is normalised",
    ),
    # From here on the weights decide.
    "factor_keys": Map(
        specs.factored_keys,
        weights.factor_keys,
        "stacked score matrices of a key head of rank <= head_dim (SVD)",
        breaks=("rotary",),
        conditional=True,
    ),
    "factor_values": Map(
        specs.factored_values,
        weights.factor_values,
        "value maps of a value head side by side of rank <= value_dim (SVD)",
        breaks=("element",),
        conditional=True,
    ),
    "factor_latent": Map(
        specs.factored_latent,
        weights.factor_latent,
        "[k v] of all heads beside each other of rank <= latent_dim, no norm (SVD)",
        breaks=("rotary",),
        conditional=True,
    ),
    "factor_queries": Map(
        specs.factored_queries,
        weights.factor_queries,
        "q of all heads beside each other of rank <= query_latent_dim, no norm (SVD)",
        conditional=True,
    ),
    "tie_states": Map(
        specs.tied_states,
        weights.tie_states,
        "keys whose first H numbers are those of the values, the rest the same in all heads",
        breaks=("rotary",),
        conditional=True,
    ),
    "mix_constants": Map(
        specs.constants,
        weights.mix_constants,
        "factors of the heads that do not look at the text",
        conditional=True,
    ),
    "diagonalise": Map(
        specs.diagonal,
        weights.diagonalise,
        "score matrices that are diagonal in one pair of bases (eigenvectors)",
        breaks=("rotary",),
        conditional=True,
    ),
    "share_down": Map(
        specs.becomes("standard", "alt"),
        weights.share_down,
        "[q k v] of each head of rank <= D/N (SVD)",
        conditional=True,
    ),
    "cut_chunks": Map(
        specs.becomes("standard", "narrow", "narrow", "narrow_tied"),
        weights.cut,
        "block-diagonal q, k and v",
        conditional=True,
    ),
    "tie": Map(
        specs.becomes("narrow", "narrow_tied"), weights.tie, "equal heads", conditional=True
    ),
    "tie_products": Map(
        specs.becomes("narrow", "narrow_tied"),
        weights.tie_products,
        "heads of equal q k^T whose values have a basis in common",
        breaks=(*FREE_SCORES, "element", "extra"),
        conditional=True,
    ),
    "share_heads": Map(
        specs.shared,
        weights.share,
        "key and value heads that are equal in groups",
        conditional=True,
    ),
    "drop_output": Map(
        specs.no_output,
        weights.drop_output,
        "an o that keeps each head in its own chunk of the output",
        breaks=("element",),
        conditional=True,
    ),
    "drop_zero_bias": Map(
        specs.no_bias("qkvoa"), weights.drop_zero_bias, "a bias that is zero", conditional=True
    ),
    "drop_gate": Map(
        fields.no_gate,
        fields.drop_gate,
        "a gate of weights 0; what it multiplied halved",
        conditional=True,
        changes=("gate",),
    ),
    "gather_gate": Map(
        fields.loses("gate", "element", "head"),
        fields.gather_gate,
        "gates that are equal in a head",
        conditional=True,
        changes=("gate",),
    ),
    "drop_sink": Map(
        fields.loses("sink", "learnt", None, "one"),
        fields.drop_sink,
        "learnt sinks of 0 (to one) or of -1e30 (to none)",
        conditional=True,
        changes=("sink",),
    ),
    "drop_zero_key": Map(
        fields.one_key_less,
        fields.drop_zero_key,
        "an extra key that is zero, and its value: a sink of 0",
        conditional=True,
        changes=("sink", "extra_keys"),
    ),
    "drop_norm_bias": Map(
        fields.loses("qk_norm_bias", True, False),
        fields.drop_norm_bias("q_norm_bias", "k_norm_bias"),
        "biases of the norms of q and k that are zero",
        conditional=True,
        changes=("qk_norm_bias",),
    ),
    "drop_key_norm_bias": Map(
        fields.loses("qk_norm_bias", True, False),
        fields.drop_norm_bias("q_norm_bias"),
        "a zero bias of the norm of q; that of k adds the same to a whole row",
        breaks=("rotary", "cap"),
        conditional=True,
        changes=("qk_norm_bias",),
    ),
    "tie_queries": Map(
        ties.tied({"": "qk"}),
        ties.tie_queries,
        "q that is a positive multiple of k, number by number (pair by pair)",
        conditional=True,
        changes=("ties",),
    ),
    "tie_squares": Map(
        ties.tied({"": "qk"}),
        ties.tie_squares,
        "score matrices that are symmetric without a negative eigenvalue: W W^T",
        breaks=(*FREE_SCORES, "extra"),
        conditional=True,
        changes=("ties",),
    ),
    "tie_values": Map(
        ties.tied({"": "kv", "qk": "qkv"}),
        ties.tie_values,
        "values that are a product of the keys, which goes into o",
        conditional=True,
        changes=("ties",),
    ),
    "tie_ranges": Map(
        ties.tied({"": "kv"}),
        ties.tie_ranges,
        "[A^T, W_V W_O] of a key head of rank <= head_dim (SVD)",
        breaks=(*FREE_SCORES, "element", "extra"),
        conditional=True,
        changes=("ties",),
    ),
}
