"""One transformer layer as a pure function: norms, attention, FFN, dropout, residual connections.

params = {name: init(key) for name, init in init_layer(spec).items()}
outputs = transformer_layer(params, x, spec, LayerInputs(layer=3))
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Inexact, Int

from attnlab.attention.masks import Edges
from attnlab.heads import (
    Cache,
    HeadAux,
    Layout,
    head_values,
    kv_weight_names,
    multi_head_attention,
    project_kv,
)
from attnlab.heads import init as init_heads
from attnlab.heads.layout import Entries
from attnlab.heads.weights import without
from attnlab.models.ffn import apply_ffn, dropout, ffn_values, init_ffn, init_norm, normalize
from attnlab.models.specs import LayerSpec, SublayerName
from attnlab.ops import save_for_backward
from attnlab.sharing import Params, PyTree, add_delta, init_delta
from attnlab.tap import Tap

LAYER_VALUES = {
    "attention_in": "B T D",
    "attention_out": "B T D",
    "ffn_in": "B T D",
    "ffn_out": "B T D",
    "residual": "B T D",
}
"""Value -> axes: inputs of self-attention and of the FFN, and their outputs before dropout; x after
the layer. A layer also has the values of its heads and of its FFN (`ffn_values`), and those of
cross-attention with the prefix "cross."."""
LAYER_SCALE = "layer_scale"
"""A weight of each sublayer: see `Norm.layer_scale`."""
CROSS = "cross."
CROSS_VALUES = {f"{CROSS}{name}": LAYER_VALUES[name] for name in ("attention_in", "attention_out")}
DROPOUTS = ("probs", "attention", "ffn_hidden", "ffn", "cross_probs", "cross")
"""Where a layer drops values, each with a key of its own."""


class Source(NamedTuple):
    """The second text of a layer, which cross-attention attends to."""

    x: Float[Array, "B S D"]
    mask: Bool[Array, "..."] | None = None
    """which of its tokens each token may attend to: as `LayerInputs.mask`"""
    segments: Int[Array, "B S"] | None = None
    """numbers of its texts: a token attends to those of its own number"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of one layer, apart from params, x and its spec.

    Attributes:
      layer: index of the layer, counted from 0; may be traced.
      mask: True = may attend: [T, S], [N, T, S] or [B, N, T, S], each axis 1 or as long.
      padding_mask: [B, T], True = a token. Padding is attended to by none and is not kept in a
        cache.
      segments: numbers of packed texts [B, T], 0 = padding; then `padding_mask` hides no key.
      bias: added to the scores; broadcasts to [B, N, T, S]. Or a function that returns
        such a bias for the keyword `layer`, an index.
      rotary: angles of `positions.rotary_angles`.
      source: the second text, for cross-attention.
      cache: of self-attention; x are the next tokens.
      shared_kv: (keys and values of an earlier layer, of `LayerOutputs.kv`; whether to attend
        to them instead of those of x, which may be traced).
      head_mask: multiplies each head of self-attention, [N] or [B, N].
      query_scale: multiplies q of self-attention.
      dropout_key: random key; None: no dropout.

    >>> from attnlab import capture
    >>> from attnlab.heads import Standard
    >>> heads = Standard(width=6, num_heads=2)
    >>> spec = LayerSpec(heads=heads, cross=heads)
    >>> inputs = LayerInputs(source=Source(jnp.ones((1, 7, 6))))
    >>> def run(x):
    ...     params = {name: init(jax.random.key(0)) for name, init in init_layer(spec).items()}
    ...     return capture(transformer_layer, params, x, spec, inputs, names=("cross.probs",))[1]
    >>> jax.eval_shape(run, jnp.ones((1, 5, 6)))["cross.probs"].shape  # 7 tokens of the source
    (1, 2, 5, 7)
    """

    layer: ArrayLike = 0
    mask: Bool[Array, "..."] | Edges | None = None
    padding_mask: Bool[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None
    bias: Float[Array, "..."] | Callable[..., Array | None] | None = None
    rotary: Inexact[Array, "*B T half"] | None = None
    source: Source | None = None
    cache: Cache | None = None
    shared_kv: tuple[Entries, ArrayLike] | None = None
    head_mask: Float[Array, "*B N"] | None = None
    query_scale: ArrayLike | None = None
    dropout_key: Array | None = None


class LayerOutputs(NamedTuple):
    """Result of `transformer_layer`.

    >>> from attnlab.heads import Standard
    >>> spec = LayerSpec(heads=Standard(width=6, num_heads=2, num_kv_heads=1))
    >>> def run(x):
    ...     params = {name: init(jax.random.key(0)) for name, init in init_layer(spec).items()}
    ...     return transformer_layer(params, x, spec).kv
    >>> {name: a.shape for name, a in jax.eval_shape(run, jnp.ones((1, 5, 6))).items()}
    {'k': (1, 5, 1, 3), 'v': (1, 5, 1, 3)}
    """

    x: Float[Array, "B T D"]
    cache: Cache | None
    """The cache with the new tokens, if one was given."""
    kv: Entries
    """Keys and values that self-attention used: for `LayerInputs.shared_kv` of a later layer."""
    losses: dict[str, Array]
    """Auxiliary losses of heads and experts by name; of cross-attention with prefix "cross."."""


# Parameters ---------------------------------------------------------------------------------------

Init = Callable[[Array], PyTree]
"""key -> the parameters of one sublayer"""


def init_layer(
    spec: LayerSpec, *, std: float | None = None, residual_scale: float = 1.0
) -> dict[str, Init]:
    """Sublayer -> (key -> its initial parameters). A sublayer includes its norms.

    Args:
      spec: the layer.
      std: one standard deviation for all matrices in place of 1/sqrt(fan-in).
      residual_scale: multiplies the matrices that write into the residual stream; GPT-2 takes
        1/sqrt(2 L) (Radford et al. 2019, section 2.3).

    >>> from attnlab.heads import Standard
    >>> sorted(init_layer(LayerSpec(heads=Standard(width=6, num_heads=2))))
    ['attention', 'ffn']
    """
    width, norm = spec.heads.width, spec.norm

    def norms(sublayer: str) -> Params:
        names = norm.names_in(sublayer) if norm.scale else ()
        made: Params = {name: init_norm(width, norm) for name in names}
        if norm.layer_scale is not None:
            made[LAYER_SCALE] = {"scale": jnp.full(width, norm.layer_scale, float)}
        return made

    def heads(layout: Layout, sublayer: str, key: Array) -> Params:
        return init_heads(key, layout, std=std, residual_scale=residual_scale) | norms(sublayer)

    def ffn(key: Array) -> Params:
        params = init_ffn(key, width, spec.ffn, std=std, residual_scale=residual_scale)
        return params | norms("ffn") if spec.ffn.width else {}

    attention = functools.partial(heads, spec.heads, "attention")
    inits: dict[str, Init] = {"attention": attention, "ffn": ffn}
    if spec.cross is not None:
        inits["cross"] = functools.partial(heads, spec.cross, "cross")
    if spec.separate_kv:
        names = kv_weight_names(spec.heads)
        inits["attention"] = lambda key: without(attention(key), *names)
        inits["kv"] = lambda key: {name: attention(key)[name] for name in names}
    if spec.delta_rank is not None:
        inits["delta"] = _delta_init(dict(inits), spec.delta_rank)
    return inits


def _delta_init(inits: dict[str, Init], rank: int) -> Init:
    def shapes(key: Array) -> Params:
        return {name: init(key) for name, init in inits.items()}

    return lambda key: init_delta(key, jax.eval_shape(shapes, key), rank)


# Values -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def layer_values(spec: LayerSpec) -> Mapping[str, str]:
    """Names of the values that such a layer has -> their axes.

    >>> from attnlab.heads import Standard
    >>> layer_values(LayerSpec(heads=Standard(width=6, num_heads=2)))["probs"]
    'B N T S'
    """
    values = LAYER_VALUES | ffn_values(spec.ffn) | head_values(spec.heads)
    if not spec.ffn.width:
        values = {name: axes for name, axes in values.items() if not name.startswith("ffn_")}
    if spec.cross is not None:
        cross = {CROSS + name: axes for name, axes in head_values(spec.cross).items()}
        values = values | CROSS_VALUES | cross
    return values


# The layer ----------------------------------------------------------------------------------------


def transformer_layer(
    params: Params,
    x: Float[Array, "B T D"],
    spec: LayerSpec,
    inputs: LayerInputs = LayerInputs(),  # frozen
    *,
    tap: Tap | None = None,
) -> LayerOutputs:
    """x + f(norm(x)) with pre-norm, norm(x + f(x)) with post-norm; see `Norm.position`.

    f is self-attention, then cross-attention where the spec has heads for it, then the FFN.

    Args:
      params: sublayer -> its parameters, of `init_layer`.
      x: [B, T, D].
      spec: the layer.
      inputs: masks, positions, cache, dropout key, ...
      tap: records or replaces the values of `layer_values(spec)`; see `attnlab.capture`.

    Raises:
      TypeError, ValueError: inputs that do not fit the layer, such as a missing source for
        cross-attention.

    >>> from attnlab.heads import Narrow
    >>> from attnlab.models.specs import FFN
    >>> spec = LayerSpec(heads=Narrow(width=6, num_heads=2), ffn=FFN(width=8))
    >>> params = {name: init(jax.random.key(0)) for name, init in init_layer(spec).items()}
    >>> transformer_layer(params, jnp.ones((1, 5, 6)), spec).x.shape
    (1, 5, 6)
    """
    tap = tap or Tap()
    tap.layer = inputs.layer
    if "delta" in params:
        params = add_delta(without(params, "delta"), params["delta"])
    keys: dict[str, Array] = {}
    if inputs.dropout_key is not None:
        split = jax.random.split(inputs.dropout_key, len(DROPOUTS))
        keys = dict(zip(DROPOUTS, split, strict=True))
    output_scales = {"attention": spec.attention.output_scale, "ffn": spec.ffn.output_scale}
    ran: dict[str, Ran] = {}

    def run(name: SublayerName, x: Array) -> Array:
        ran[name] = SUBLAYERS[name](params, x, spec, inputs, keys, tap)
        out, scale = ran[name].output, output_scales.get(name, 1.0)
        place = "ffn" if name == "ffn" else "attention"
        rate = spec.dropout.rate if place in spec.dropout.places else 0.0
        return dropout(out if scale == 1 else scale * out, rate, keys.get(name))

    x = tap("residual", add_sublayers(params, x, spec, run))
    heads = ran["attention"].heads
    losses: dict[str, Array] = {}
    for one in ran.values():
        losses |= one.losses
    assert heads is not None
    return LayerOutputs(x, heads.cache, heads.kv, losses)


class Ran(NamedTuple):
    """What a sublayer returns."""

    output: Float[Array, "B T D"]
    losses: dict[str, Array]
    heads: HeadAux | None = None


def attention(
    params: Params,
    x: Array,
    spec: LayerSpec,
    inputs: LayerInputs,
    keys: Mapping[str, Array],
    tap: Tap,
    *,
    cross: bool = False,
) -> Ran:
    """Self-attention, or cross-attention to the source, of its input x, which is normalized with
    pre-norm."""
    layout, prefix = spec.heads, ""
    weights = params["attention"] | params.get("kv", {})
    if cross:
        if inputs.source is None:
            raise ValueError("the layer has cross-attention: give LayerInputs.source")
        assert spec.cross is not None
        layout, prefix, weights = spec.cross, CROSS, params["cross"]
    x = tap(f"{prefix}attention_in", x)
    keywords = attention_keywords(spec, inputs, cross=cross)
    if not cross and inputs.shared_kv is not None:
        shared, use = inputs.shared_kv
        own = functools.partial(project_kv, weights, x, layout, inputs.rotary)
        keywords["kv"] = lax.cond(use, lambda: shared, own)
    key = keys.get("cross_probs" if cross else "probs")
    rate = 0.0 if key is None else spec.dropout.attention
    inner = tap.restricted(head_values(layout), prefix)
    out, aux = multi_head_attention(
        weights, x, layout, dropout_rate=rate, dropout_key=key, tap=inner, return_aux=True,
        **keywords,
    )  # fmt: skip
    tap.merge(inner, prefix)
    losses = {prefix + name: a for name, a in aux.losses.items()}
    return Ran(tap(f"{prefix}attention_out", out), losses, aux)


def ffn(
    params: Params,
    x: Array,
    spec: LayerSpec,
    inputs: LayerInputs,
    keys: Mapping[str, Array],
    tap: Tap,
) -> Ran:
    """The FFN."""
    out, losses = apply_ffn(
        params["ffn"],
        tap("ffn_in", x),
        spec.ffn,
        dropout_rate=spec.dropout.ffn,
        dropout_key=keys.get("ffn_hidden"),
        token_mask=inputs.padding_mask,
        tap=tap,
    )
    return Ran(tap("ffn_out", out), losses)


SUBLAYERS: Mapping[SublayerName, Callable[..., Ran]] = {
    "attention": attention,
    "cross": functools.partial(attention, cross=True),
    "ffn": ffn,
}


def attention_keywords(spec: LayerSpec, inputs: LayerInputs, *, cross: bool) -> dict[str, Any]:
    """What self-attention, or cross-attention, of a layer passes to `multi_head_attention`, apart
    from dropout and shared keys and values."""
    keywords: dict[str, Any] = {
        # Segments have their own padding.
        "padding_mask": inputs.padding_mask if inputs.segments is None else None,
        "layer": inputs.layer,
        "order": spec.attention.order,
        "implementation": spec.attention.implementation,
    }
    if cross:
        source = inputs.source
        assert source is not None  # `attention` raises
        packed = None if inputs.segments is None else (inputs.segments, source.segments)
        return keywords | {"context": source.x, "mask": source.mask, "segments": packed}
    window = spec.attention.window
    return keywords | {
        "rotary": inputs.rotary,
        "cache": inputs.cache,
        "head_mask": inputs.head_mask,
        "query_scale": inputs.query_scale,
        "mask": inputs.mask,
        "segments": inputs.segments,
        "bias": inputs.bias(layer=inputs.layer) if callable(inputs.bias) else inputs.bias,
        "is_causal": spec.is_causal,
        # So many tokens back, and as many ahead where the layer is not causal.
        "local_window_size": None if window is None else (window, window * (not spec.is_causal)),
    }


# Norms and residual connections -------------------------------------------------------------------


def add_sublayers(
    params: Mapping[str, Params],
    x: Array,
    spec: LayerSpec,
    run: Callable[[SublayerName, Array], Array],
) -> Array:
    """x + f(x) for each sublayer in turn, or for all of the same x, with norms at `norm.places`.

    Args:
      params: sublayer -> its parameters, of which the norms and the layer scale are read.
      x: [B, T, D].
      spec: the layer.
      run: (name of a sublayer, its input) -> its output f.
    """
    places, scales = spec.norm.places, spec.sublayers

    def normed(name: SublayerName, x: Array, norm: str = "norm") -> Array:
        return normalize(params[name].get(norm, {}), x, spec.norm)

    def written(name: SublayerName, x: Array) -> Array:
        out, scale = run(name, x), params[name].get(LAYER_SCALE)
        return out if scale is None else out * scale["scale"].astype(out.dtype)

    if places.parallel:
        first, *rest = scales
        inputs = {first: normed(first, x)}
        for name in rest:
            inputs[name] = normed(name, x) if name in places.before else inputs[first]
        out = sum(written(name, a) for name, a in inputs.items())
        return save_for_backward(math.prod(scales.values()) * x + out)
    for name, scale in scales.items():
        out = written(name, normed(name, x) if name in places.before else x)
        out = normed(name, out, "norm_after") if places.after else out
        x = save_for_backward(scale * x + out)
        x = normed(name, x) if places.after_sum else x
    return x
