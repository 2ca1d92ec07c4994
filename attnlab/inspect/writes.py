"""Who wrote the residual stream? A sum over every head, every bias, every feed-forward part and
the embeddings; and from there the logits.

Layer by layer the stream becomes what a row of `model.block.NORMS` makes of it and of what a part
writes. Once the statistics of the norms are held at their own values this is linear in both
(`linear.py`), so what was written before goes through it term by term, and what the norm adds is a
term of its own. Pre-norm, post-norm and `ffn_skip` are this one sum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from attnlab.inspect.linear import linear_at
from attnlab.model.block import NORMS, BlockSpec
from attnlab.model.config import ModelConfig
from attnlab.model.outer import check_tokens, number_positions, read_out
from attnlab.names import find
from attnlab.norms import NORM_KINDS
from attnlab.sharing.low_rank_delta import layer_params
from attnlab.sharing.plan import Plan

Terms = dict[str, Array]
"""Name -> terms [*X, B, T, D]: X is () for the embeddings, (L, N) for heads, else (L,)."""

KEPT = (
    "q", "k", "scores", "attention_in", "outputs", "attention_out", "ffn_out", "residual",
    "cross.q", "cross.k", "cross.scores", "cross.attention_in", "cross.outputs",
    "cross.attention_out",
)  # fmt: skip
"""What a decomposition reads of a call."""


class Watched(NamedTuple):
    """A call, its model, and what was seen of it."""

    config: ModelConfig
    params: Any
    texts: tuple[Array, ...]
    options: dict[str, Any]
    outputs: Any
    """`model.models.Outputs`: logits, last, first, shown, ..."""


def watch(config: ModelConfig, params: Any, *texts: Array, **options: Any) -> Watched:
    """Runs the model on its texts and keeps what the functions of this room read.

    `options` go into the call (padding_mask, head_gate, token_types, ...). An edit may change what
    a part reads or writes, but not the stream itself, which must stay the sum of what was written.
    Memory is that of "outputs", [L, B, N, T, D].

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_heads=2, num_layers=3, ffn_width=12, plan="albert")
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> terms = decompose(watch(config, params, tokens))
    >>> {name: a.shape for name, a in terms.items() if name != "ffn"}
    {'embedding': (1, 3, 8), 'heads': (3, 2, 1, 3, 8), 'attention_bias': (3, 1, 3, 8)}
    """
    if odd := [n for n in options.get("edit") or {} if n.rpartition(".")[2] == "residual"]:
        raise ValueError(
            f"an edit of {odd[0]!r} makes the stream no sum of what was written; edit what a part "
            "writes (outputs, attention_out, ffn_out) instead"
        )
    if options.get("cache") is not None:
        raise ValueError("a cache holds keys of tokens that are not seen; give the whole text")
    both = config.kind == "encoder_decoder"
    kept = [n for n in KEPT if config.ffn_width or n != "ffn_out"]
    crosses = "cross" in config.layer_plan
    kept = [n for n in kept if crosses or not n.startswith("cross.")]
    kept += [f"encoder.{n}" for n in kept if not n.startswith("cross.")] if both else []
    outputs = config.build().apply(
        {"params": params}, *texts, show=tuple(kept), return_outputs=True, **options
    )
    read = tuple(check_tokens(config, text) for text in texts)
    return Watched(config, params, read, options, outputs)


class Stack(NamedTuple):
    """One stack of layers of a call."""

    seen: Watched
    prefix: str
    """Of its names in `observe.NAMES`."""
    pool: Any
    plan: Plan
    block: BlockSpec
    first: Array
    """What its first layer reads"""
    outer: str
    """Of its own names among the weights outside the layers."""
    tokens: Array

    def shown(self, name: str) -> Array:
        return self.seen.outputs.shown[self.prefix + name]

    @property
    def parts(self) -> list[str]:
        """In the order in which they write."""
        cross = ["cross"] if self.block.cross is not None else []
        return ["attention", *cross, *(["ffn"] if self.block.ffn_width else [])]

    @property
    def numbers(self) -> Array:
        """The position of each token."""
        given = self.seen.options.get("positions")
        found = number_positions(self.seen.config, self.tokens) if given is None else given
        return jnp.arange(self.tokens.shape[1]) if found is None else found

    def weights(self, layer: int) -> Any:
        """part -> what this layer computes with, its delta added."""
        return layer_params(self.pool, self.plan, layer)


def stack_of(seen: Watched, *, encoder: bool = False) -> Stack:
    """The decoder's stack, the only one of a model with one; or the encoder's beside it."""
    c, outputs = seen.config, seen.outputs
    if not encoder:
        args = c.layer_plan, c.block, outputs.first, "", seen.texts[-1]
        return Stack(seen, "", seen.params["layers"], *args)
    if c.kind != "encoder_decoder":
        raise ValueError(f"a {c.kind} has one stack; leave encoder=True out")
    if outputs.encoder_first is None:
        raise ValueError("the call had `encoded`, so its encoder did not run; leave it out")
    own = "" if c.share_encoder else "encoder_"
    args = c.encoder_layer_plan, c.encoder_block, outputs.encoder_first, own, seen.texts[0]
    return Stack(seen, "encoder.", seen.params[f"{own}layers"], *args)


def normalising(block: BlockSpec) -> Callable:
    """(weights of a norm, x) -> x normed."""
    return functools.partial(find("norm_kind", block.norm_kind, NORM_KINDS), eps=block.norm_eps)


def decompose(
    seen: Watched, *, encoder: bool = False, layer: int | None = None
) -> dict[str, Float[Array, "*X B T D"]]:
    """The residual stream before the last norm, as a sum of what was written; with `layer`, as that
    layer finds it. All terms together are the stream.

    "embedding" [B, T, D], "heads" [L, N, B, T, D], "attention_bias" and "ffn" [L, B, T, D], in a
    decoder with an encoder also "cross.heads" and "cross.attention_bias"; where norms stand in the
    stream (post-norm), what those of a layer add is "norm" [L, B, T, D]. Terms are as they stand at
    that place: in a post-norm model every norm behind a term has centred and scaled it. Only layers
    that wrote before are there. `encoder`: of the encoder's stack. Direct effects alone: what a
    head changes by being read is in the reader's term.
    """
    stack = stack_of(seen, encoder=encoder)
    if layer is not None and not 0 <= layer < stack.plan.num_layers:
        raise ValueError(f"layer {layer} must be one of 0 to {stack.plan.num_layers - 1}")
    count = stack.plan.num_layers if layer is None else layer
    writes = {p: _writes(stack, p) for p in stack.parts}
    terms = {"embedding": stack.first}
    empty = lambda *shape: jnp.zeros((count, *shape), stack.first.dtype)
    for wrote in writes.values():
        terms |= {n: empty(*a.shape[1:]) for n, a in wrote.items()}
    if _adds(stack):
        terms |= {"norm": empty(*stack.first.shape)}

    def body(carry: tuple[Array, Terms], step: Any) -> tuple[tuple[Array, Terms], None]:
        (x, terms), (i, norms, writes) = carry, step
        after = linear_at(_layer(stack, norms), x, *map(summed, writes.values()))
        terms = {n: after.of(a) for n, a in terms.items()}
        for number, wrote in enumerate(writes.values()):
            for n, a in wrote.items():
                terms[n] = terms[n].at[i].set(after.of(a, argument=number + 1))
        if after.constant is not None:
            terms["norm"] = terms["norm"].at[i].set(after.constant)
        return (after.value, terms), None

    if count:
        norms = jax.tree.map(lambda *a: jnp.stack(a), *(_norms(stack, i) for i in range(count)))
        first = jax.tree.map(lambda a: a[:count], writes)
        # In the order of the parts, which a dict does not keep on its way through a scan.
        every = [first[p] for p in stack.parts]
        steps = jnp.arange(count), norms, {str(n): a for n, a in enumerate(every)}
        (_, made), _ = lax.scan(body, (stack.first, terms), steps)
        terms = {name: made[name] for name in terms}
    return terms


def read_by(
    seen: Watched, layer: int, part: str = "attention", *, encoder: bool = False
) -> dict[str, Float[Array, "*X B T D"]]:
    """What a part ("attention", "cross", "ffn") of a layer reads, as a sum: the terms of
    `decompose` behind the norm before that part, if it has one, whose bias is "norm_before".
    """
    stack = stack_of(seen, encoder=encoder)
    find("part", part, dict.fromkeys(stack.parts))
    terms = decompose(seen, encoder=encoder, layer=layer)
    before = stack.parts[: stack.parts.index(part)]
    wrote = {p: jax.tree.map(lambda a: a[layer], _writes(stack, p)) for p in before}
    zeros = [jnp.zeros_like(stack.first)] * (len(stack.parts) - len(before))
    read: list[Array] = []

    def f(x: Array, *writes: Array) -> Array:
        _layer(stack, _norms(stack, layer), {part: read.append})(x, *writes, *zeros)
        return read.pop()

    after = linear_at(f, summed(terms), *map(summed, wrote.values()))
    terms = {n: after.of(a) for n, a in terms.items()}
    for number, own in enumerate(wrote.values()):
        for n, a in own.items():
            new = after.of(a, argument=number + 1)[None]
            terms[n] = jnp.concatenate([terms[n], new])
    return terms | ({} if after.constant is None else {"norm_before": after.constant})


def _writes(stack: Stack, part: str) -> Terms:
    """Name -> what the part wrote in every layer, [L, ...]."""
    if part == "ffn":
        return {"ffn": stack.shown("ffn_out")}
    prefix, gain = ("", stack.block.attention_gain) if part == "attention" else ("cross.", 1.0)
    heads = stack.shown(f"{prefix}outputs")
    bias = stack.shown(f"{prefix}attention_out") - jnp.sum(heads, axis=2)
    return {
        f"{prefix}heads": gain * jnp.moveaxis(heads, 2, 1),
        f"{prefix}attention_bias": gain * bias,
    }


def _norms(stack: Stack, layer: int) -> dict[str, Any]:
    """part -> the weights of its norms, by name."""
    w, names = stack.weights(layer), NORMS[stack.block.norm].names
    return {part: {name: w[part][name] for name in names} for part in stack.parts}


def _layer(stack: Stack, norms: Any, told: dict[str, Callable] | None = None) -> Callable:
    """(x, what each part writes) -> x after the layer, by its row of `NORMS`; told[part] is called
    with what that part reads."""
    row, normalise = find("norm", stack.block.norm, NORMS), normalising(stack.block)

    def f(x: Array, *writes: Array) -> Array:
        def part(name: str, wrote: Array) -> Callable:
            def run(read: Array) -> Array:
                if told and name in told:
                    told[name](read)
                return wrote

            return run

        skips = {"ffn": stack.block.ffn_skip}
        sublayers = [
            (norms[p], part(p, a), skips.get(p, 1.0))
            for p, a in zip(stack.parts, writes, strict=True)
        ]
        return row.run(sublayers, x, normalise)

    return f


def _adds(stack: Stack) -> bool:
    """Do the norms in the stream add something?"""
    x = jnp.ones_like(stack.first)
    f = _layer(stack, _norms(stack, 0))
    return linear_at(f, x, *[x] * len(stack.parts)).constant is not None


def summed(terms: Terms, ndim: int = 3) -> Array:
    """The sum of all terms, whose last `ndim` axes are no numbers of terms.

    >>> float(summed({"embedding": jnp.ones((1, 1, 1)), "ffn": jnp.ones((4, 1, 1, 1))})[0, 0, 0])
    5.0
    """
    each = [jnp.sum(a, axis=tuple(range(a.ndim - ndim))) for a in terms.values()]
    return functools.reduce(jnp.add, each)


def final_norm(seen: Watched, *, encoder: bool = False) -> dict[str, Float[Array, "*X B T D"]]:
    """`decompose`, behind the norm that follows the last layer: what the readout reads, or, of an
    encoder, what cross-attention reads. That norm is linear, divided by the deviation of its own
    input; its bias is the term "final_norm". Without such a norm these are the terms themselves.
    """
    stack, terms = stack_of(seen, encoder=encoder), decompose(seen, encoder=encoder)
    w = seen.params.get(f"{stack.outer}final_norm")
    if w is None:
        return terms
    norm = linear_at(lambda x: normalising(stack.block)(w, x), summed(terms))
    terms = {name: norm.of(a) for name, a in terms.items()}
    return terms | ({} if norm.constant is None else {"final_norm": norm.constant})


def logits_by_term(
    seen: Watched, tokens: Int[Array, "B T"] | None = None
) -> dict[str, Float[Array, "..."]]:
    """What each term says for each word: direct logit attribution (nostalgebraist 2020; Elhage et
    al. 2021). All terms together are the logits; the bias of the readout is "readout_bias".

    With `tokens` [B, T] only the logit of that word at each place, [*X, B, T]: a call for the word
    that came and one for another give what spoke for it. A logit alone means little: the softmax
    sees differences.

    Raises ValueError for a model that has no logits, or a transform before them, which is not
    linear: `final_norm` gives what that reads.
    """
    c = seen.config
    if c.readout == "none":
        raise ValueError("readout='none' has no logits; final_norm gives what pooling reads")
    if c.readout_transform:
        raise ValueError(
            f"the readout has a dense layer with {c.readout_transform!r} before it, which is no "
            "sum; final_norm gives its input as a sum"
        )
    terms = final_norm(seen)
    w = {n: seen.params[n] for n in ("embedding", "readout", "readout_bias") if n in seen.params}
    if tokens is None:
        out = linear_at(lambda x: read_out(w, x, config=c), summed(terms))
        bias = out.constant
    else:
        table = (w["readout"].T if c.readout == "own" else w["embedding"])[jnp.asarray(tokens)]
        out = linear_at(lambda x: c.readout_scale * jnp.sum(x * table, axis=-1), summed(terms))
        bias = w["readout_bias"][jnp.asarray(tokens)] if c.readout_bias else None
    terms = {name: out.of(a) for name, a in terms.items()}
    return terms | ({} if bias is None else {"readout_bias": bias})


def flatten(terms: dict[str, Array], ndim: int = 3) -> tuple[list[tuple], Array]:
    """([name, layer and head of each term], all of them [M, ...]); `ndim` as in `summed`.

    >>> names, a = flatten({"embedding": jnp.ones((1, 1, 1)), "heads": jnp.ones((1, 2, 1, 1, 1))})
    >>> names, a.shape
    ([('embedding',), ('heads', 0, 0), ('heads', 0, 1)], (3, 1, 1, 1))
    """
    names: list[tuple] = []
    for name, a in terms.items():
        names += [(name, *map(int, place)) for place in np.ndindex(a.shape[: a.ndim - ndim])]
    return names, jnp.concatenate(
        [a.reshape(-1, *a.shape[a.ndim - ndim :]) for a in terms.values()]
    )
