"""One transformer layer as a pure function: norms, attention, feed-forward, dropout, residuals."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from attnlab.heads.old.maps import Weights
from attnlab.heads.old.multihead import attend_heads
from attnlab.heads.old.project import init_heads, make_memory, split_memory
from attnlab.heads.old.spec import HeadSpec
from attnlab.model.pointwise import dropout, feed_forward, init_feed_forward
from attnlab.names import find
from attnlab.norms import NORM_KINDS, init_norm
from attnlab.observe import (
    NOTHING,
    OF_CROSS,
    OF_LAYER,
    Given,
    Look,
    Ran,
    Value,
    check_names,
    values_of_heads,
)
from attnlab.remat import save_for_backward
from attnlab.sharing.low_rank_delta import add_delta, init_delta
from attnlab.sharing.plan import MIXTURE_SUFFIX

DROPOUT_PLACES = ("embeddings", "attention", "ffn", "final")
Sublayer = tuple[Weights, Callable, float]
"""The weights of its norms by name, what it computes, and how often x goes past it."""


class BlockSpec(NamedTuple):
    """What one layer does, apart from its weights.

    With `ffn_width` 0 there is no feed-forward part, nor its norm; what attention writes is
    multiplied by `attention_gain`. `dropout_rate` is that of the outputs of the sublayers that
    `dropout_places` names; `layer_scales` is read by the stack, a number for each of its layers;
    `cross` are the heads that read a second text, None where there is none; with `merged` the
    heads of the layer read it beside their own, in one softmax.
    With `kv_apart` the maps to keys and values are a part `kv` of their own; with `delta_rank`
    there is a part `delta`, a difference of that rank to each matrix of the other parts
    (`sharing.low_rank_delta`). `mixed` names the parts whose groups are mixed, each with their
    number: there is a part of coefficients beside each (`sharing.mixing`).
    """

    heads: HeadSpec
    ffn_width: int
    norm: str = "pre"
    norm_kind: str = "layer"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    activation: str = "gelu"
    ffn_bias: bool = True
    ffn_skip: float = 1.0
    attention_gain: float = 1.0
    is_causal: bool = False
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    ffn_dropout_rate: float = 0.0
    dropout_places: tuple[str, ...] = ("embeddings", "attention", "ffn")
    cross: HeadSpec | None = None
    merged: bool = False
    kv_apart: bool = False
    delta_rank: int | None = None
    mixed: tuple[tuple[str, int], ...] = ()
    window: int | None = None
    talking_heads: bool = False
    layer_scales: tuple[float, ...] | None = None
    order: str | None = None
    implementation: str | None = None

    @property
    def drops(self) -> bool:
        """Does training need a random stream?"""
        return any((self.dropout_rate, self.attention_dropout_rate, self.ffn_dropout_rate))


def check_scales(scales: tuple[float, ...] | None, num_layers: int, kind: str) -> None:
    """Raises ValueError for `layer_scales` that are not one number for each layer of one stack."""
    if scales is None:
        return
    if kind == "encoder_decoder":
        raise ValueError("layer_scales are for one stack, an encoder_decoder has two; leave it out")
    if len(scales) != num_layers or not all(0 < s < math.inf for s in scales):
        raise ValueError(
            f"layer_scales {scales} must be {num_layers} numbers above 0, one for each layer"
        )


def init_mix(num_heads: int) -> Weights:
    """Talking heads that say nothing yet: both mixing matrices the identity."""
    return {"before": jnp.eye(num_heads), "after": jnp.eye(num_heads)}


def init_block(
    spec: BlockSpec, *, std: float | None = None, residual_scale: float = 1.0
) -> dict[str, Callable]:
    """part -> (key -> one slot of its weights). Each part owns the norm that goes with it, the
    attention also the matrices of talking heads.

    `residual_scale` multiplies the matrices that write into the residual stream;
    GPT-2 takes 1/sqrt(2 L) (Radford et al. 2019, section 2.3).
    """

    def part(init: Callable) -> Callable:
        one = lambda: init_norm(spec.heads.width, bias=spec.norm_bias, kind=spec.norm_kind)
        return lambda key: init(key) | {name: one() for name in NORMS[spec.norm].names}

    def heads(key: Array, heads: HeadSpec) -> Weights:
        return init_heads(key, heads, std=std, residual_scale=residual_scale)

    def ffn(key: Array) -> Weights:
        return init_feed_forward(
            key,
            spec.heads.width,
            spec.ffn_width,
            activation=spec.activation,
            bias=spec.ffn_bias,
            std=std,
            residual_scale=residual_scale,
        )

    def attention(key: Array) -> Weights:
        w = heads(key, spec.heads)
        return w | ({"mix": init_mix(spec.heads.num_heads)} if spec.talking_heads else {})

    whole = part(attention)
    parts: dict[str, Callable] = {"attention": whole, "ffn": lambda key: {}}
    if spec.ffn_width:
        parts["ffn"] = part(ffn)
    if spec.cross is not None:
        parts["cross"] = part(functools.partial(heads, heads=spec.cross))
    if spec.kv_apart:
        parts["attention"] = lambda key: split_memory(whole(key), spec.heads)[0]
        parts["kv"] = lambda key: split_memory(whole(key), spec.heads)[1]
    if (rank := spec.delta_rank) is not None:
        others = dict(parts)
        like = lambda key: {name: make(key) for name, make in others.items()}
        parts["delta"] = lambda key: init_delta(key, jax.eval_shape(like, key), rank)
    for name, count in spec.mixed:
        parts[name + MIXTURE_SUFFIX] = functools.partial(_coefficients, parts[name], count)
    return parts


def _coefficients(make: Callable, count: int, key: Array) -> Weights:
    """[S] for every weight of a slot; a stack begins with one 1 among them."""
    return jax.tree.map(lambda a: jnp.zeros(count, a.dtype), jax.eval_shape(make, key))


def transformer_block(
    w: dict[str, Weights],
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    given: Given = NOTHING,
    *,
    spec: BlockSpec,
    return_probs: bool = False,
    **fields: Any,
) -> Ran:
    """x + f(norm(x)) for pre-norm, norm(x + f(x)) for post-norm; f is attention, then, where
    `spec.cross` has heads for it, attention to `context`, then the FFN, past which x goes
    `spec.ffn_skip` times. With `spec.merged` attention reads x and `context` in one softmax. The
    norm "sandwich" is x + norm_after(f(norm(x))); "parallel" adds what each f makes of the same x,
    each behind a norm of its own.

    `given` is all that surrounds the layer, `fields` are fields of it (`mask`, `dropout_key`,
    `cache`, `show`, `edit`, ...; see `observe.Given`). Where `memory` holds the keys and values of
    an earlier layer they are read again where `reuse` is true, else made of x.

    Returns the new x, the cache with x added, the keys and values read, and what was asked to be
    shown; `return_probs` asks for "probs", with a context also for "cross.probs".

    >>> spec = BlockSpec(HeadSpec("narrow", width=6, num_heads=2), ffn_width=8)
    >>> w = {part: make(jax.random.key(0)) for part, make in init_block(spec).items()}
    >>> ran = transformer_block(w, jnp.ones((1, 5, 6)), spec=spec, show=("probs", "outputs"))
    >>> ran.x.shape, {name: a.shape for name, a in ran.shown.items()}
    ((1, 5, 6), {'probs': (1, 2, 5, 5), 'outputs': (1, 2, 5, 6)})
    """
    given = given._replace(**fields)
    known = values_of(spec)
    if return_probs:
        given = given.showing(n for n in PROBS if n in known)
    given = given._replace(show=check_names(given.show, given.edit, known))
    look = Look(given.show, given.edit, given.layer)
    if "delta" in w:
        w = add_delta({part: a for part, a in w.items() if part != "delta"}, w["delta"])
    heads = w["attention"] | w.get("kv", {})
    ran: list[Ran] = []
    # Without a context the first four keys are those of a layer that has none.
    dropout_key = given.dropout_key
    keys = (None,) * 6 if dropout_key is None else jax.random.split(dropout_key, 6)
    mix = w["attention"].get("mix")
    drop = lambda place, out, key: dropout(
        out, spec.dropout_rate if place in spec.dropout_places else 0.0, key
    )
    attend = functools.partial(attend_heads, order=spec.order, implementation=spec.implementation)
    rate = 0.0 if dropout_key is None else spec.attention_dropout_rate

    def attention(x):
        x, memory = look("attention_in", x), given.memory
        if memory is not None:
            make = lambda: make_memory(heads, x, spec=spec.heads, rotary=given.rotary)
            memory = lax.cond(given.reuse, lambda: given.memory, make)
        own = given._replace(
            memory=memory,
            source=context if spec.merged else None,
            dropout_key=keys[0],
            told=given.tell("self"),
            **given.of(values_of_heads(spec.heads)),
        )
        ran[:] = [
            attend(
                heads,
                x,
                None,
                own,
                spec=spec.heads,
                is_causal=spec.is_causal,
                local_window_size=_window(spec),
                mix=mix and (mix["before"], mix["after"]),
                dropout_rate=rate,
            )
        ]
        look.seen |= ran[0].shown
        out = look("attention_out", ran[0].x)
        out = out if spec.attention_gain == 1 else spec.attention_gain * out
        return drop("attention", out, keys[1])

    def cross(x):
        assert spec.cross is not None
        own = Given(
            mask=given.context_mask,
            dropout_key=keys[4],
            layer=given.layer,
            told=given.tell("cross"),
            **given.of(values_of_heads(spec.cross), "cross."),
        )
        x = look("cross.attention_in", x)
        got = attend(w["cross"], x, context, own, spec=spec.cross, dropout_rate=rate)
        look.seen |= {f"cross.{name}": a for name, a in got.shown.items()}
        return drop("attention", look("cross.attention_out", got.x), keys[5])

    def ffn(x):
        out = feed_forward(
            w["ffn"],
            look("ffn_in", x),
            activation=spec.activation,
            dropout_rate=spec.ffn_dropout_rate,
            dropout_key=keys[2],
            look=look,
        )
        return drop("ffn", look("ffn_out", out), keys[3])

    sublayers: list[Sublayer] = [(w["attention"], attention, 1.0)]
    if spec.cross is not None:
        sublayers.append((w["cross"], cross, 1.0))
    if spec.ffn_width:
        sublayers.append((w["ffn"], ffn, spec.ffn_skip))
    normalise = functools.partial(find("norm_kind", spec.norm_kind, NORM_KINDS), eps=spec.norm_eps)
    x = find("norm", spec.norm, NORMS).run(sublayers, x, normalise)
    return Ran(look("residual", x), ran[0].cache, ran[0].memory, look.seen)


def values_of(spec: BlockSpec) -> dict[str, Value]:
    """What such a layer can show and take edits of."""
    known = OF_LAYER | values_of_heads(spec.heads)
    if spec.cross is not None:
        known = known | OF_CROSS | {f"cross.{n}": v for n, v in values_of_heads(spec.cross).items()}
    return known if spec.ffn_width else {n: v for n, v in known.items() if n[:4] != "ffn_"}


PROBS = ("probs", "cross.probs")


def _window(spec: BlockSpec) -> tuple[int, int] | None:
    """So many tokens back, and as many ahead where the layer may look ahead."""
    if spec.window is None:
        return None
    return spec.window, 0 if spec.is_causal else spec.window


class Residual(NamedTuple):
    """Where the norms stand, and what the sublayers add to. A new one is a row of `NORMS`."""

    run: Callable[[list[Sublayer], Array, Callable], Array]
    """(sublayers, x, (weights of a norm, x) -> x) -> x"""
    final: bool
    """Is there one more norm behind the last layer?"""
    names: tuple[str, ...] = ("norm",)
    """The norms that a part has"""


def _pre(sublayers: list[Sublayer], x: Array, normalise: Callable) -> Array:
    for w, f, skip in sublayers:
        x = save_for_backward(skip * x + f(normalise(w["norm"], x)))
    return x


def _sandwich(sublayers: list[Sublayer], x: Array, normalise: Callable) -> Array:
    for w, f, skip in sublayers:
        wrote = normalise(w["norm_after"], f(normalise(w["norm"], x)))
        x = save_for_backward(skip * x + wrote)
    return x


def _post(sublayers: list[Sublayer], x: Array, normalise: Callable) -> Array:
    for w, f, skip in sublayers:
        x = normalise(w["norm"], save_for_backward(skip * x + f(x)))
    return x


def _parallel(sublayers: list[Sublayer], x: Array, normalise: Callable) -> Array:
    added = sum(f(normalise(w["norm"], x)) for w, f, _ in sublayers)
    return save_for_backward(math.prod(skip for _, _, skip in sublayers) * x + added)


NORMS = {
    "pre": Residual(_pre, final=True),
    "post": Residual(_post, final=False),
    # torch.nn.Transformer has both; an encoder of torch without a norm of its own is the other.
    "post_final": Residual(_post, final=True),
    "pre_open": Residual(_pre, final=False),
    # Before and behind each part (Ding et al. 2021, arXiv 2105.13290; Gemma).
    "sandwich": Residual(_sandwich, final=True, names=("norm", "norm_after")),
    # All sublayers read the same x (Wang and Komatsuzaki 2021, GPT-J).
    "parallel": Residual(_parallel, final=True),
}
