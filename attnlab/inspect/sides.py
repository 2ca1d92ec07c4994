"""A model and one text -> what a page shows of it: maps, statistics, and what each head is for."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.inspect.importance import ablations, gates_of
from attnlab.inspect.statistics import STATISTICS, head_statistics
from attnlab.inspect.viewer import Maps, Side
from attnlab.model.config import Model, ModelConfig
from attnlab.model.kinds import heads_in_a_layer
from attnlab.sharing.named_plans import plan_name
from attnlab.sharing.plan import Groups, Plan, mixtures


class Attention(NamedTuple):
    """One of the attentions of a model."""

    name: str
    asks: str
    """The argument of the model's call that holds the tokens that look"""
    asked: str
    """... and those that are looked at"""
    parts: tuple[str, ...]
    """Parts of a plan whose weights it uses"""


OWN = ("attention", "kv", "delta")
ATTENTIONS = {
    "encoder.": Attention("encoder", "source", "source", OWN),
    "": Attention("decoder", "tokens", "tokens", OWN),
    "cross.": Attention("decoder to encoder", "tokens", "source", ("cross", "delta")),
}
"""Prefix of `observe.NAMES` -> what it is."""


class Worth(NamedTuple):
    """What a model loses with a head, as a number and in words."""

    name: str
    meaning: str
    answer: Callable[[Any, Any], Any]
    """(weights, edits of the model's call) -> what is compared"""
    lost: Callable[[Any, Any], Array]
    """(such an answer, that of the whole model) -> the number"""


def side_of(
    model: Model,
    params: Any,
    inputs: Mapping[str, Any],
    written: Mapping[str, Sequence[str]],
    *,
    worth: Worth | None = None,
    ablate: bool = True,
    name: str = "",
) -> Side:
    """One model on one text, for `view_sides`.

    `inputs` are the arguments of the model's call, of one text: "tokens", and "source" where an
    encoder reads another; `written` the same names -> how each token is written. Shorter ones cut
    the maps: behind a text stands filling. With `ablate` every head, and where layers share weights
    every head of a set in all its layers, is gated to 0 once; `worth` says what is lost then, by
    default `worth_of`.

    >>> model = ModelConfig(width=8, num_layers=2, num_heads=2, plan="albert").build()
    >>> tokens = jnp.array([[104, 101, 108, 108, 111]])
    >>> params = model.init(jax.random.key(0), tokens)["params"]
    >>> side = side_of(model, params, {"tokens": tokens}, {"tokens": "h e l l o".split()})
    >>> side.maps[0].probs.shape, list(side.maps[0].statistics)[-2:]
    ((2, 2, 5, 5), ['loss without it', 'loss without it in its set'])
    """
    config, params = model.config, jax.tree.map(jnp.asarray, params)
    # Any order gives the same values; the gated heads are those of the factored one.
    model = dataclasses.replace(config, order=None).build()
    both = config.kind == "encoder_decoder"
    heads_in_a_layer(config)
    count = len(inputs["tokens"])
    if count != 1:
        raise ValueError(f"a page shows one text, not {count}: give inputs of one row")
    shown = {prefix: ATTENTIONS[prefix] for prefix in (ATTENTIONS if both else ("",))}
    merged = config.cross == "merged"  # the same heads read both texts
    if merged:
        shown["cross."] = shown["cross."]._replace(parts=OWN)
    apply = lambda params, inputs: model.apply({"params": params}, **inputs, return_probs=True)[1]
    found = jax.jit(apply)(params, dict(inputs))
    probs = dict(zip(("", "cross.", "encoder."), found, strict=True)) if both else {"": found}
    if merged:
        own = np.shape(inputs["tokens"])[1]
        probs |= {"": found[0][..., :own], "cross.": found[0][..., own:]}
    worth = worth or worth_of(model, inputs)
    plans = {
        prefix: config.encoder_layer_plan if prefix == "encoder." else config.layer_plan
        for prefix in shown
    }
    its_heads = {prefix: "" if merged and prefix == "cross." else prefix for prefix in shown}
    lost = _lost(worth, config, params, dict.fromkeys(its_heads.values())) if ablate else {}
    maps = []
    for prefix, row in shown.items():
        asks, asked = written[row.asks], written[row.asked]
        p = probs[prefix][..., : len(asks), : len(asked)]
        ids = [_ids(inputs[text], len(written[text])) for text in (row.asks, row.asked)]
        found = head_statistics(p, ids[0], key_tokens=ids[1])
        statistics = {n: np.asarray(a) for n, a in found.items()}
        meanings = {n: f"{s.formula} ({s.unit}), mean over rows" for n, s in STATISTICS.items()}
        for told, (meaning, values) in lost.get(its_heads[prefix], {}).items():
            statistics[told], meanings[told] = values, meaning
        maps.append(
            Maps(
                probs=np.asarray(p[:, 0], np.float32),
                tokens=asks,
                keys=None if row.asks == row.asked else asked,
                statistics=statistics,
                plan=_sets(plans[prefix], row.parts),
                meanings=meanings,
                name=row.name if both else config.kind,
            )
        )
    return Side(tuple(maps), name=name, about=about(config))


def _sets(plan: Plan, parts: Iterable[str]) -> dict[str, Groups]:
    """What layers share of these parts: slots or, where they mix them, nothing but coefficients."""
    mixed = mixtures(plan)
    return {part: plan[mixed.get(part, part)] for part in parts if part in plan}


def about(config: ModelConfig) -> str:
    """A model in a line.

    >>> about(ModelConfig(num_kv_heads=2, plan="cycle:2"))
    'decoder of 4 layers of width 64, 4 standard heads of width 16, 2 key heads, plan cycle:2'
    """
    other = [config.as_encoder] if config.encoder_heads else []
    heads = [_heads(c) for c in (*other, *config.stacks.values())]
    kinds = f", kinds {config.kinds}" if config.kinds else ""
    encoder = config.encoder_layers or config.num_layers
    depth = f"{encoder} and {config.num_layers}" if "_" in config.kind else f"{config.num_layers}"
    shared = ", one pool of weights for both stacks" if config.share_encoder else ""
    return (
        f"{config.kind.replace('_', '-')} of {depth} layers of width {config.width}, "
        f"{' or '.join(dict.fromkeys(heads))}, plan {plan_name(config.plan)}{shared}{kinds}"
    )


def _heads(config: ModelConfig) -> str:
    size = config.heads.sizes
    keys = f", {size['K']} key heads" if size["K"] != size["N"] else ""
    return f"{config.num_heads} {config.layout} heads of width {size['H']}{keys}"


def worth_of(model: Model, inputs: Mapping[str, Any]) -> Worth:
    """What is lost without a head, for a text of which nothing but its tokens is known.

    Of a decoder the code length of every next token grows; of an encoder with a readout it is the
    divergence KL(p || q) of its predictions q from p of the whole model; both in bits per token.
    Without a readout |y - x| / |x| of the last layer's outputs y from x of the whole model.
    """
    config = model.config
    texts = {name: jnp.asarray(a) for name, a in inputs.items()}
    tokens = texts["tokens"]

    def call(params: Any, edit: Any) -> Any:
        return model.apply({"params": params}, **texts, edit=edit, return_outputs=True)

    def predicted(params: Any, edit: Any) -> Array:
        logits = call(params, edit).logits
        return jax.nn.log_softmax(logits.astype(jnp.float32)) / math.log(2)

    def next_token(params: Any, edit: Any) -> Array:
        p = predicted(params, edit)[:, :-1]
        return -jnp.mean(jnp.take_along_axis(p, tokens[:, 1:, None], axis=-1))

    if config.readout == "none":
        return Worth(
            "change without it",
            "how far the outputs move, of their size, when this head writes nothing",
            lambda params, edit: call(params, edit).last,
            lambda y, x: jnp.linalg.norm(y - x) / jnp.linalg.norm(x),
        )
    if config.kind == "encoder" or tokens.ndim != 2 or tokens.shape[1] < 2:
        return Worth(
            "change without it",
            "bits per token by which predictions diverge when this head writes nothing: KL(p || q)",
            predicted,
            lambda q, p: jnp.mean(jnp.sum(jnp.exp2(p) * (p - q), axis=-1)),
        )
    return Worth(
        "loss without it",
        "bits per token that the next token costs more when this head writes nothing",
        next_token,
        jnp.subtract,
    )


def _lost(
    worth: Worth, config: ModelConfig, params: Any, prefixes: Iterable[str]
) -> dict[str, dict[str, tuple[str, np.ndarray]]]:
    """Prefix -> name -> (meaning, [L, N]) of what each head is worth: in one layer, and where
    layers share weights in all of its set."""
    gates = {
        (prefix, by): gates_of(config, f"{prefix}heads", by=by)
        for prefix in prefixes
        for by in ("layer", "group")
    }
    gates = {key: g for key, g in gates.items() if key[1] == "layer" or g.shape[0] < len(g.rows)}

    def every(params: Any) -> Any:
        whole = worth.answer(params, {})
        loss = lambda edit: worth.lost(worth.answer(params, edit), whole)
        return {key: ablations(loss, some) for key, some in gates.items()}

    found: dict[str, dict[str, tuple[str, np.ndarray]]] = {}
    for (prefix, by), values in jax.jit(every)(params).items():
        more = ("", "") if by == "layer" else (" in its set", ", in all layers of its set")
        told = worth.meaning + more[1], np.asarray(values)[list(gates[prefix, by].rows)]
        found.setdefault(prefix, {})[worth.name + more[0]] = told
    return found


def _ids(tokens: Any, count: int) -> Array | None:
    """Tokens that can be equal to each other; features cannot."""
    tokens = jnp.asarray(tokens)[:, :count]
    return tokens if jnp.issubdtype(tokens.dtype, jnp.integer) else None
