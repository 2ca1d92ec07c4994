"""One transformer layer as a pure function: norms, attention, FFN, dropout, residual connections.

params = {name: init(key) for name, init in init_layer(spec).items()}
outputs = transformer_layer(params, x, spec, LayerInputs(layer=3))
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

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
from attnlab.heads.attention import explaining_heads
from attnlab.heads.layout import Entries
from attnlab.heads.weights import without
from attnlab.models.dense import dropout
from attnlab.models.ffn import feed_forward, ffn_losses, ffn_values, init_ffn
from attnlab.models.norm import init_normalize, normalize
from attnlab.models.specs import DropoutPlace, LayerSpec, Norm
from attnlab.remat import save_for_backward
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

Report = dict[str, dict[str, dict[str, object]]]
"""Attention of the layer ("self" or "cross") -> result of `explain_heads`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInputs:
    """Inputs of all layers of one type, apart from x.

    Attributes:
      mask: True = may attend: [T, S], [N, T, S] or [B, N, T, S], each axis 1 or as long.
      padding_mask: [B, T], True = a token. Padding is attended to by none and is not kept in a
        cache.
      bias: added to the scores; broadcasts to [B, N, T, S].
      rotary: angles of `positions.rotary_angles`.
      source: a second text [B, S, D], for cross-attention.
      source_mask: as `mask`, of the second text.

    >>> from attnlab import capture
    >>> from attnlab.heads import Standard
    >>> heads, text = Standard(width=6, num_heads=2), TextInputs(source=jnp.ones((1, 7, 6)))
    >>> spec, inputs = LayerSpec(heads=heads, cross=heads), LayerInputs(text=text)
    >>> def run(x):
    ...     params = {name: init(jax.random.key(0)) for name, init in init_layer(spec).items()}
    ...     return capture(transformer_layer, params, x, spec, inputs, names=("cross.probs",))[1]
    >>> jax.eval_shape(run, jnp.ones((1, 5, 6)))["cross.probs"].shape  # 7 tokens of the source
    (1, 2, 5, 7)
    """

    mask: Bool[Array, "..."] | Edges | None = None
    padding_mask: Bool[Array, "B T"] | None = None
    bias: Float[Array, "..."] | None = None
    rotary: Float[Array, "*B T half"] | None = None
    source: Float[Array, "B S D"] | None = None
    source_mask: Bool[Array, "..."] | None = None


NO_TEXT_INPUTS = TextInputs()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of one layer, apart from params, x and its spec.

    Attributes:
      text: inputs that are the same for all layers.
      layer: index of the layer, counted from 0; may be traced.
      cache: of self-attention; x are the next tokens.
      shared_kv: keys and values of an earlier layer, of `LayerOutputs.entries`.
      use_shared_kv: attend to `shared_kv` instead of the keys and values of x; may be traced.
      head_mask: multiplies each head of self-attention, [N] or [B, N].
      query_scale: multiplies q of self-attention.
      dropout_key: random key; None: no dropout.
      report: filled, while JAX traces, with how attention is computed.

    >>> from attnlab.heads import Standard
    >>> spec = LayerSpec(heads=Standard(width=6, num_heads=2))
    >>> def two_layers(x):  # the second attends to the keys and values of the first
    ...     params = {name: init(jax.random.key(0)) for name, init in init_layer(spec).items()}
    ...     first = transformer_layer(params, x, spec)
    ...     inputs = LayerInputs(layer=1, shared_kv=first.entries, use_shared_kv=True)
    ...     return transformer_layer(params, first.x, spec, inputs).x
    >>> jax.eval_shape(two_layers, jnp.ones((1, 5, 6))).shape
    (1, 5, 6)
    """

    text: TextInputs = NO_TEXT_INPUTS
    layer: ArrayLike = 0
    cache: Cache | None = None
    shared_kv: Entries | None = None
    use_shared_kv: ArrayLike = False
    head_mask: Float[Array, "*B N"] | None = None
    query_scale: ArrayLike | None = None
    dropout_key: Array | None = None
    report: Report | None = None


NO_INPUTS = LayerInputs()


class LayerOutputs(NamedTuple):
    """Result of `transformer_layer`.

    >>> from attnlab.heads import Standard
    >>> spec = LayerSpec(heads=Standard(width=6, num_heads=2, num_kv_heads=1))
    >>> def run(x):
    ...     params = {name: init(jax.random.key(0)) for name, init in init_layer(spec).items()}
    ...     return transformer_layer(params, x, spec).entries
    >>> {name: a.shape for name, a in jax.eval_shape(run, jnp.ones((1, 5, 6))).items()}
    {'k': (1, 5, 1, 3), 'v': (1, 5, 1, 3)}
    """

    x: Float[Array, "B T D"]
    cache: Cache | None
    """The cache with the new tokens, if one was given."""
    entries: Entries
    """The cache entries that self-attention used: `LayerInputs.shared_kv` of a later layer."""
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
        made: Params = {name: init_normalize(width, norm) for name in names}
        if norm.layer_scale is not None:
            made[LAYER_SCALE] = {"scale": jnp.full(width, float(norm.layer_scale))}
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


def layer_values(spec: LayerSpec) -> dict[str, str]:
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
    inputs: LayerInputs = NO_INPUTS,
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
      TypeError, ValueError: inputs that do not fit the layer, such as a missing `TextInputs.source`
        for cross-attention.

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
    layer = _Layer(params, spec, inputs, tap)
    sublayers = [Sublayer(params["attention"], layer.self_attention, 1.0)]
    if spec.cross is not None:
        sublayers.append(Sublayer(params["cross"], layer.cross_attention, 1.0))
    if spec.ffn.width:
        sublayers.append(Sublayer(params["ffn"], layer.ffn, spec.ffn.residual_scale))
    x = tap("residual", NORM_POSITIONS[spec.norm.position](sublayers, x, spec.norm))
    heads = layer.heads
    assert heads is not None
    return LayerOutputs(x, heads.cache, heads.kv, layer.losses)


class _DropoutKeys(NamedTuple):
    """One key for each place of dropout in a layer."""

    probs: Array | None = None
    attention: Array | None = None
    ffn_hidden: Array | None = None
    ffn: Array | None = None
    cross_probs: Array | None = None
    cross: Array | None = None


@dataclasses.dataclass
class _Layer:
    """The sublayers of one call; keeps what self-attention returns apart from its output."""

    params: Params
    spec: LayerSpec
    inputs: LayerInputs
    tap: Tap
    heads: HeadAux | None = None
    losses: dict[str, Array] = dataclasses.field(default_factory=dict)
    keys: _DropoutKeys = _DropoutKeys()

    def __post_init__(self) -> None:
        key = self.inputs.dropout_key
        if key is not None:
            self.keys = _DropoutKeys(*jax.random.split(key, len(_DropoutKeys._fields)))

    def self_attention(self, x: Array) -> Array:
        """Output of self-attention for its input, which is normalized with pre-norm."""
        spec, text = self.spec, self.inputs.text
        x = self.tap("attention_in", x)
        params = self.params["attention"] | self.params.get("kv", {})
        out, self.heads = self._attend(
            params,
            x,
            spec.heads,
            "",
            rotary=text.rotary,
            cache=self.inputs.cache,
            kv=self._shared_kv(params, x),
            head_mask=self.inputs.head_mask,
            query_scale=self.inputs.query_scale,
            mask=text.mask,
            bias=text.bias,
            is_causal=spec.is_causal,
            local_window_size=attention_window(spec),
        )
        out = self.tap("attention_out", out)
        scale = spec.attention.output_scale
        out = out if scale == 1 else scale * out
        return self._dropout("attention", out, self.keys.attention)

    def cross_attention(self, x: Array) -> Array:
        """Output of cross-attention to the second text."""
        spec, text = self.spec, self.inputs.text
        assert spec.cross is not None
        if text.source is None:
            raise ValueError("the layer has cross-attention: give TextInputs.source")
        x = self.tap(f"{CROSS}attention_in", x)
        out, _ = self._attend(
            self.params["cross"], x, spec.cross, CROSS, context=text.source, mask=text.source_mask
        )
        return self._dropout("attention", self.tap(f"{CROSS}attention_out", out), self.keys.cross)

    def ffn(self, x: Array) -> Array:
        """Output of the FFN."""
        x, ffn = self.tap("ffn_in", x), self.spec.ffn
        tap = self.tap.restricted(ffn_values(ffn))
        tap.capture |= set(ffn_losses(ffn))
        out = feed_forward(
            self.params["ffn"],
            x,
            ffn,
            dropout_rate=self.spec.dropout.ffn,
            dropout_key=self.keys.ffn_hidden,
            token_mask=self.inputs.text.padding_mask,
            tap=tap,
        )
        self.losses |= {name: tap.captured.pop(name) for name in ffn_losses(ffn)}
        self.tap.merge(tap)
        out = self.tap("ffn_out", out)
        out = out if ffn.output_scale == 1 else ffn.output_scale * out
        return self._dropout("ffn", out, self.keys.ffn)

    def _attend(
        self, params: Params, x: Array, layout: Layout, prefix: str, **call: Any
    ) -> tuple[Array, HeadAux]:
        """The heads of one sublayer, with the options that both have."""
        key = self.keys.cross_probs if prefix else self.keys.probs
        tap, report = self.tap.restricted(head_values(layout), prefix), self.inputs.report
        notes: contextlib.AbstractContextManager[list[Any]] = contextlib.nullcontext([])
        if report is not None:
            notes = explaining_heads()
        with notes as explained:
            out, aux = multi_head_attention(
                params,
                x,
                layout,
                **call,
                padding_mask=self.inputs.text.padding_mask,
                layer=self.inputs.layer,
                order=self.spec.attention.order,
                dropout_rate=0.0 if key is None else self.spec.dropout.attention,
                dropout_key=key,
                implementation=self.spec.attention.implementation,
                tap=tap,
                return_aux=True,
            )
        if report is not None:
            report["cross" if prefix else "self"] = explained[-1]
        self.losses |= {prefix + name: loss for name, loss in aux.losses.items()}
        self.tap.merge(tap, prefix)
        return out, aux

    def _shared_kv(self, params: Params, x: Array) -> Entries | None:
        """The keys and values to attend to, if an earlier layer may have made them."""
        shared = self.inputs.shared_kv
        if shared is None:
            return None

        def own() -> Entries:
            return project_kv(params, x, self.spec.heads, self.inputs.text.rotary)

        chosen: Entries = lax.cond(self.inputs.use_shared_kv, lambda: shared, own)
        return chosen

    def _dropout(self, place: DropoutPlace, out: Array, key: Array | None) -> Array:
        rate = self.spec.dropout.rate if place in self.spec.dropout.places else 0.0
        return dropout(out, rate, key)


def attention_window(spec: LayerSpec) -> tuple[int, int] | None:
    """So many tokens back, and as many ahead where the layer is not causal.

    >>> from attnlab.heads import Standard
    >>> from attnlab.models.specs import Attention
    >>> attention_window(LayerSpec(heads=Standard(num_heads=2), attention=Attention(window=3)))
    (3, 3)
    """
    window = spec.attention.window
    if window is None:
        return None
    return window, 0 if spec.is_causal else window


# Positions of norms -------------------------------------------------------------------------------


class Sublayer(NamedTuple):
    """One sublayer as the norms and residual connections around it see it."""

    params: Params
    """Holds the parameters of its norms by name, if they have any."""
    function: Callable[[Array], Array]
    residual_scale: float
    """Multiplies the residual connection."""

    def normalized(self, name: str, x: Array, norm: Norm) -> Array:
        """x after the norm of this name."""
        return normalize(self.params.get(name, {}), x, norm)

    def written(self, x: Array) -> Array:
        """What it adds to the residual stream, for its input."""
        out, scale = self.function(x), self.params.get(LAYER_SCALE)
        return out if scale is None else out * scale["scale"].astype(out.dtype)


def sequential_norm(
    sublayers: list[Sublayer], x: Array, norm: Norm, *, before: bool = True, after: bool = False
) -> Array:
    """x + norm_after(f(norm(x))), sublayer after sublayer, with the norm before f, after it, or
    both."""
    for one in sublayers:
        out = one.written(one.normalized("norm", x, norm) if before else x)
        out = one.normalized("norm_after", out, norm) if after else out
        x = save_for_backward(one.residual_scale * x + out)
    return x


def pre_ffn_norm(sublayers: list[Sublayer], x: Array, norm: Norm) -> Array:
    """x + f(norm(x)) without a norm before the first sublayer."""
    first, *rest = sublayers
    x = save_for_backward(first.residual_scale * x + first.written(x))
    return sequential_norm(rest, x, norm)


def post_norm(sublayers: list[Sublayer], x: Array, norm: Norm) -> Array:
    """norm(x + f(x)), sublayer after sublayer."""
    for one in sublayers:
        x = save_for_backward(one.residual_scale * x + one.written(x))
        x = one.normalized("norm", x, norm)
    return x


def parallel_norm(sublayers: list[Sublayer], x: Array, norm: Norm) -> Array:
    """x + sum of f(norm(x)) over sublayers, which all read the same x."""
    out = sum(one.written(one.normalized("norm", x, norm)) for one in sublayers)
    return save_for_backward(math.prod(s.residual_scale for s in sublayers) * x + out)


def parallel_one_norm(sublayers: list[Sublayer], x: Array, norm: Norm) -> Array:
    """x + sum of f(norm(x)) over sublayers, with the norm of the first for all."""
    read = sublayers[0].normalized("norm", x, norm)
    out = sum(one.written(read) for one in sublayers)
    return save_for_backward(math.prod(s.residual_scale for s in sublayers) * x + out)


NORM_POSITIONS: Mapping[str, Callable[[list[Sublayer], Array, Norm], Array]] = {
    "pre": sequential_norm,
    "pre_open": sequential_norm,
    "pre_ffn": pre_ffn_norm,
    "post": post_norm,
    "post_final": post_norm,
    "after": functools.partial(sequential_norm, before=False, after=True),
    "sandwich": functools.partial(sequential_norm, after=True),
    "parallel": parallel_norm,
    "parallel_one": parallel_one_norm,
}
"""`Norm.position` -> the layer around its sublayers."""
