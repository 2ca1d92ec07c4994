"""The attention scores of a head as a sum over terms of the query and terms of the key.

    score[t, s] = scale q_t . k_s + bias,  q = Q(sum of terms),  k = K(sum of terms)

Q and K are linear in the residual stream once the statistics of the norms on the way (of the layer,
of a latent, of queries and keys) are held at their own values.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.fields import check_choice
from attnlab.heads import Layout
from attnlab.heads.attention import project_kv, rotated
from attnlab.interpret.linearize import linearize_at
from attnlab.interpret.residual import (
    Recording,
    TermName,
    Terms,
    check_unpatched,
    decompose_final,
    decompose_input,
    flatten_terms,
    sum_terms,
)
from attnlab.models.embed import position_bias, position_scale, rotary_embedding
from attnlab.models.layer import CROSS
from attnlab.models.specs import Attention
from attnlab.sharing import Params

AttentionName: TypeAlias = Literal["self", "encoder", "cross"]
"""Self-attention of the decoder or of the only stack, of the encoder, and cross-attention."""
Side: TypeAlias = Literal["query", "key", "both"]
CHANGES_SCORES = ("talking_heads", "soft_cap", "learnt_soft_cap")
"""Extras with which scores are not q k^T."""


class ScoreTerms(NamedTuple):
    """Scores as a sum over the first axes of `terms`."""

    queries: list[TermName]
    """Terms of the query, the first axis; empty where the query is not split. The bias of the norm
    is ("input_norm_bias",), that of the projection ("projection_bias",)."""
    keys: list[TermName]
    """Terms of the key, the next axis."""
    terms: Float[Array, "*M B T S"]
    """[Mq, Mk, B, T, S], or [M, B, T, S] where one side is split."""
    bias: Array | None
    """Bias of relative positions [.., T, S]; the last term of the sum."""


def decompose_scores(
    recording: Recording,
    layer: int,
    head: int,
    *,
    attention: AttentionName = "self",
    split: Side = "both",
) -> ScoreTerms:
    """The scores of one head before the mask, over pairs of terms.

    A layer that attends to the keys of an earlier layer has the key terms of that layer. The sum of
    all terms and the bias is the captured value "scores", but for keys that are masked everywhere.

    Args:
      recording: of `record`.
      layer, head: counted from 0; where a head has several softmax distributions (layout
        `differential`), of these distributions.
      attention: which attention; in "cross" the keys are made of the encoder's terms.
      split: "both" gives [Mq, Mk, B, T, S]; "query" or "key" splits that side only, [M, B, T, S].

    Raises:
      ValueError: no such layer, head or attention; a query or key is not linear in the residual
        stream (layout `tensor_product`); scores are mixed between heads or capped; or a patch of
        the input of this attention, its q, k or scores.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from attnlab.interpret import record
    >>> from attnlab.models import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> recording = record(config, params, tokens)
    >>> decompose_scores(recording, layer=1, head=0)._fields
    ('queries', 'keys', 'terms', 'bias')
    """
    check_choice("attention", attention, get_args(AttentionName))
    check_choice("split", split, get_args(Side))
    is_cross = attention == "cross"
    for_q = recording.of_encoder() if attention == "encoder" else recording
    for_k = recording.of_encoder() if is_cross else for_q
    layout = _check(for_q, attention, layer, head)
    check_unpatched(for_q, *((CROSS if is_cross else "") + name for name in ("q", "k", "scores")))
    source = layer if is_cross else for_q.config.plan.kv_sources[layer]
    q_params, k_params = (head_params(for_q.layer_weights(i), is_cross) for i in (layer, source))
    query_terms = decompose_input(for_q, layer, "cross" if is_cross else "attention")
    if is_cross:
        key_terms = decompose_final(for_k)
    elif source == layer:
        key_terms = query_terms
    else:
        key_terms = decompose_input(for_k, source)
    scheme = recording.config.positions
    angles = None if is_cross else rotary_embedding(scheme, layout, for_k.positions)

    def query(x: Array) -> Array:
        ready = layout.prepare(q_params, x)
        return layout.project_q(q_params, ready, functools.partial(rotated, angles))[:, :, head]

    def key(x: Array) -> Array:
        entries = project_kv(k_params, x, layout, angles)
        k = layout.keys_values(q_params, entries)[0]  # a delta of this layer is in its weights
        return k[:, :, head // (layout.num_score_maps // k.shape[2])]

    label = f"of layout {layout.name!r}"
    queries, q = _project(query, query_terms, f"a query {label}", split != "key")
    keys, k = _project(key, key_terms, f"a key {label}", split != "query")
    scale = 1.0 if is_cross else query_scale(for_q.config.attention, layer, for_q.positions)
    terms = layout.score_scale * scale * jnp.einsum("mbth,nbsh->mnbts", q, k)
    if split != "both":
        terms = terms[:, 0] if split == "query" else terms[0]
    return ScoreTerms(queries, keys, terms, None if is_cross else _bias(for_q, layer, head))


def query_scale(attention: Attention, layer: int, positions: Array) -> Array | float:
    """What multiplies the scores of self-attention in a layer: a number, or [..., T, 1]."""
    by_layer = attention.layer_scales[layer] if attention.layer_scales else 1.0
    by_position = position_scale(attention, positions)
    return by_layer if by_position is None else by_layer * by_position[..., 0]


def _check(stack: Recording, attention: AttentionName, layer: int, head: int) -> Layout:
    """The heads. Raises ValueError if their scores are not q k^T."""
    config = stack.config
    layout = config.layer.cross if attention == "cross" else config.layout
    if layout is None:
        raise ValueError(f"a {config.kind} with these settings has no cross-attention sublayer")
    for extra in layout.extras:
        if extra.name in CHANGES_SCORES:
            raise ValueError(f"extra {extra.name!r}: the scores of a head are not its q k^T")
    layers, heads = config.num_layers, layout.num_score_maps
    if not (0 <= layer < layers and 0 <= head < heads):
        raise ValueError(f"layer {layer}, head {head}: there are {layers} layers of {heads} heads")
    return layout


def head_params(weights: dict[str, Params], is_cross: bool) -> Params:
    """Of the weights of a layer those of its heads, with keys and values of another layer."""
    return weights["cross"] if is_cross else weights["attention"] | weights.get("kv", {})


def _project(
    f: Callable[[Array], Array], terms: Terms, what: str, split: bool
) -> tuple[list[TermName], Array]:
    """Names and values [M, B, T, H] of the terms after f; one without a name if not `split`."""
    affine = linearize_at(f, sum_terms(terms), what=what)
    if not split:
        return [], affine.value[None]
    names, rows = flatten_terms(terms)
    rows = affine.apply(rows)
    if affine.constant is None:
        return names, rows
    return [*names, ("projection_bias",)], jnp.concatenate([rows, affine.constant[None]])


def _bias(stack: Recording, layer: int, head: int) -> Array | None:
    """Bias of relative positions in the scores of this head."""
    config, table, at = stack.config, stack.params.get("relative_bias"), stack.positions
    two_sided, num_heads = config.kind == "encoder", config.heads.num_heads
    bias = position_bias(
        config.positions, table, num_heads, at, at, two_sided=two_sided, layer=layer
    )
    return None if bias is None else bias[..., config.layout.head_of_map[head], :, :]
