"""Removes heads for good: a smaller model that computes the same as with gates of 0."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.spec import HeadSpec
from attnlab.model.config import ModelConfig
from attnlab.names import lookup
from attnlab.sharing.mixing import Params
from attnlab.sharing.plan import Plan, mixtures

Removed: TypeAlias = Mapping[int, Iterable[int]]
"""Parameter group, or layer -> numbers of the heads to remove."""

By: TypeAlias = Literal["group", "layer"]

LOCATIONS = {
    "heads": ("layers", "attention"),
    "cross": ("layers", "cross"),
    "encoder": ("encoder_layers", "attention"),
}
"""Name of some heads -> (stack, sublayer) of their parameters."""


class Kept(NamedTuple):
    """What stays of the heads of one parameter group, by their old numbers."""

    kv_heads: tuple[int, ...]
    """Key/value heads"""
    heads: tuple[int, ...]
    zeroed: tuple[int, ...]
    """Those of `heads` that are removed but fill up a place: their output projection is zero"""


def remove_heads(
    config: ModelConfig,
    params: Params,
    heads: Removed,
    *,
    by: By = "group",
    cross: Removed | None = None,
    encoder: Removed | None = None,
) -> tuple[ModelConfig, Params, dict[str, dict[int, tuple[int, ...]]]]:
    """The function that the model computes with `head_gate` 0 for these heads, with fewer weights.

    A model has one number of heads, so every parameter group keeps as many as the one that keeps
    most. With grouped-query attention that holds for key/value heads and for the query heads of
    each. A group that would keep fewer fills up with removed heads whose output projection is zero:
    they write nothing, but still cost time and memory.

    Args:
      config: of the model as it is.
      params: its parameters.
      heads: parameter group -> numbers of heads to remove; with by="layer" layer -> numbers, equal
        for all layers of a group.
      by: what the keys of `heads`, `cross` and `encoder` count.
      cross: the same for cross-attention.
      encoder: the same for the encoder.

    Returns:
      (config, params, zeroed): of the smaller model, and the heads that fill up places, as "heads",
      "cross" or "encoder" -> group -> old numbers. `unique_parameters` of both configs gives what
      was saved.

    Raises:
      ValueError: nothing would be saved (use `head_gate`); the layout ties a head to a slice of x;
        or layers would lose different heads that belong together: heads that attend to shared keys,
        or that have a row in a shared table of relative positions.

    >>> import jax
    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=3, num_heads=4, plan="albert")
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> small, weights, zeroed = remove_heads(config, params, {0: [1, 3]})
    >>> small.num_heads, weights["layers"]["attention"]["q"].shape, zeroed
    (2, (1, 8, 2, 2), {})
    """
    _check_can_remove(config)
    plans = {"layers": config.layer_plan, "encoder_layers": config.encoder_layer_plan}
    removed = {
        name: _by_group(name, plans[LOCATIONS[name][0]], asked, by, config.heads)
        for name, asked in _requested(config, heads, cross, encoder).items()
    }
    counts = _kept_counts(config.heads, removed)
    made, zeroed = dict(params), {}
    for name, groups in removed.items():
        kept = [_kept(lost, config.heads, *counts) for lost in groups]
        stack, sublayer = LOCATIONS[name]
        made[stack] = _sliced_layers(made[stack], sublayer, kept, plans[stack], config.heads)
        table = f"{stack.removesuffix('layers')}relative_bias"
        if sublayer == "attention" and table in made:
            made[table] = _sliced_table(made[table], kept)
        if filled := {group: one.zeroed for group, one in enumerate(kept) if one.zeroed}:
            zeroed[name] = filled
    return _smaller(config, *counts), made, zeroed


def scale_heads(
    config: ModelConfig, params: Params, gate: Mapping[str, Float[Array, "G N"]]
) -> Params:
    """The function that the model computes with these gates, which go into output projections.

    Args:
      config: of the model.
      params: its parameters.
      gate: "heads", "cross" or "encoder" -> a factor for every head of every parameter group. For
        factors that differ between layers of a group use `head_gate`.

    Returns:
      The parameters.

    Raises:
      ValueError: the model has no output projection, or its groups have deltas or are mixed.

    >>> import jax
    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=3, num_heads=2, plan="albert")
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> half = scale_heads(config, params, {"heads": jnp.array([[1.0, 0.5]])})
    >>> of = lambda w: w["layers"]["attention"]["o"][0]
    >>> bool((of(half)[0] == of(params)[0]).all()), bool((of(half)[1] == of(params)[1] / 2).all())
    (True, True)
    """
    if not config.attention_output:
        raise ValueError(
            "attention_output is False: each head is a part of the output; use head_gate"
        )
    _check_plain_groups(config)
    spec, made = config.heads, dict(params)
    for name, factors in gate.items():
        stack, sublayer = lookup(LOCATIONS, name, what="heads")
        layers = dict(made[stack])
        stacked = dict(layers[sublayer])
        for weight, axes in _output_weights(spec, stacked).items():
            a = jnp.moveaxis(stacked[weight], 1 + axes.index("N"), -1)
            a = a * jnp.expand_dims(factors, range(1, a.ndim - 1)).astype(a.dtype)
            stacked[weight] = jnp.moveaxis(a, -1, 1 + axes.index("N"))
        made[stack] = {**layers, sublayer: stacked}
    return made


def _requested(
    config: ModelConfig, heads: Removed, cross: Removed | None, encoder: Removed | None
) -> dict[str, Removed]:
    """The heads that the model has, by the names of LOCATIONS -> those to remove."""
    requested = {"heads": heads}
    if "cross" in config.layer_plan:
        requested["cross"] = cross or {}
    if config.kind == "encoder_decoder" and not config.share_encoder:
        requested["encoder"] = encoder or {}
    for name, given in (("cross", cross), ("encoder", encoder)):
        if given and name not in requested:
            raise ValueError(f"this {config.kind} has no separate {name} heads; leave {name} out")
    return requested


def _kept_counts(spec: HeadSpec, removed: Mapping[str, list[frozenset[int]]]) -> tuple[int, int]:
    """(key/value heads that every group keeps, query heads of each)."""
    size = spec.num_heads // spec.sizes["K"]
    kept = [
        np.bincount([n // size for n in range(spec.num_heads) if n not in lost], minlength=1)
        for groups in removed.values()
        for lost in groups
    ]
    num_kv_heads = max(1, *(int(np.count_nonzero(a)) for a in kept))
    per_kv_head = max(1, *(int(a.max(initial=0)) for a in kept))
    if num_kv_heads * per_kv_head == spec.num_heads:
        raise ValueError(
            "nothing would be saved: every parameter group keeps as many heads as the one that "
            f"keeps most, which keeps all {spec.num_heads} (of query heads that share keys, the "
            "largest number counts); remove heads of every group, or use head_gate"
        )
    return num_kv_heads, per_kv_head


def _output_weights(spec: HeadSpec, params: Params) -> dict[str, str]:
    """The weights by which each head writes -> their axes (without G)."""
    return {
        name: one.axes
        for name, one in spec.maps.items()
        if name in params and one.runs == "merge" and {"N", "O"} <= set(one.axes)
    }


def _check_can_remove(config: ModelConfig) -> None:
    if config.encoder_heads is not None:
        raise ValueError(
            f"the encoder has {config.encoder_heads} heads, the decoder {config.num_heads}, and "
            "both would have to keep as many; use head gates (inspect.gates_of)"
        )
    if "C" in LAYOUTS[config.layout].letters:
        raise ValueError(
            f"layout {config.layout!r}: each head reads its own slice of x, so none can be "
            "removed; convert it to 'standard' first"
        )
    if not config.attention_output:
        raise ValueError(
            "attention_output is False: each head is a part of the output, so none can be removed"
        )
    if config.talking_heads:
        raise ValueError(
            "talking_heads mixes the heads: one uses the scores of the others, so none can be "
            "removed"
        )
    _check_plain_groups(config)


def _check_plain_groups(config: ModelConfig) -> None:
    for what, found in (
        ("delta", "delta" in config.layer_plan),
        ("mixture", mixtures(config.layer_plan)),
    ):
        if found:
            raise ValueError(
                f"the plan has a {what}, so layers of one group have different parameters; use "
                f"change_plan to a plan without a {what} first"
            )


def _by_group(
    name: str, plan: Plan, removed: Removed, by: By, spec: HeadSpec
) -> list[frozenset[int]]:
    """The heads to remove, of every parameter group."""
    lookup({"group": 1, "layer": 1}, by, what="by")
    sublayer = LOCATIONS[name][1]
    groups, num_groups = plan.indices(sublayer), plan.num_groups[sublayer]
    count = plan.num_layers if by == "layer" else num_groups
    if unknown := sorted(set(removed) - set(range(count))):
        raise ValueError(f"{name}: no {by} {unknown[0]}; there are {count}")
    sets = {n: frozenset(map(int, removed.get(n, ()))) for n in range(count)}
    for n, numbers in sets.items():
        if unknown := sorted(numbers - set(range(spec.num_heads))):
            raise ValueError(f"{name}: {by} {n} has no head {unknown[0]}; it has {spec.num_heads}")
    if by == "group":
        return [sets[group] for group in range(count)]
    for group in range(num_groups):
        members = [layer for layer, one in enumerate(groups) if one == group]
        if len({sets[layer] for layer in members}) > 1:
            raise ValueError(
                f"{name}: layers {', '.join(map(str, members))} share group {group} and would lose "
                "different heads; name the same for each, or unshare the model first"
            )
    return [sets[groups.index(group)] for group in range(num_groups)]


def _kept(removed: frozenset[int], spec: HeadSpec, num_kv_heads: int, per_kv_head: int) -> Kept:
    """`num_kv_heads` times `per_kv_head` heads: those not removed, filled up."""
    size = spec.num_heads // spec.sizes["K"]
    heads_of = [range(k * size, (k + 1) * size) for k in range(spec.sizes["K"])]
    used = [k for k, heads in enumerate(heads_of) if set(heads) - removed]
    rest = [k for k in range(len(heads_of)) if k not in used]
    chosen = sorted(used + rest[: num_kv_heads - len(used)])
    heads: list[int] = []
    for k in chosen:
        kept_first = sorted(heads_of[k], key=lambda n: (n in removed, n))
        heads += sorted(kept_first[:per_kv_head])
    return Kept(tuple(chosen), tuple(heads), tuple(n for n in heads if n in removed))


def _sliced_layers(
    layers: Params, sublayer: str, kept: Sequence[Kept], plan: Plan, spec: HeadSpec
) -> Params:
    """The stacked parameters of one stack with fewer heads in one of its attentions."""
    made = dict(layers)
    made[sublayer] = _sliced(made[sublayer], spec, kept)
    if sublayer == "attention" and "kv" in made:
        made["kv"] = _sliced(made["kv"], spec, _kept_in_kv(plan, kept))
    return made


def _sliced_table(table: Array, kept: Sequence[Kept]) -> Array:
    """A table of relative positions [buckets, N]."""
    if len({one.heads for one in kept}) > 1:
        raise ValueError(
            "relative positions have one row for head n of all layers; remove the same heads of "
            "every group"
        )
    return table[:, np.array(kept[0].heads)]


def _kept_in_kv(plan: Plan, kept: Sequence[Kept]) -> list[Kept]:
    """What stays of the groups of the sublayer "kv"."""
    found: dict[int, Kept] = {}
    for group, attention in zip(plan.indices("kv"), plan.indices("attention"), strict=True):
        if found.setdefault(group, kept[attention]).kv_heads != kept[attention].kv_heads:
            raise ValueError(
                "layers that attend to the same keys would keep different heads; remove the same "
                "heads of all of them"
            )
    return [found[group] for group in range(len(found))]


def _sliced(stacked: Params, spec: HeadSpec, kept: Sequence[Kept]) -> Params:
    """The parameters [G, ...] of one attention with the heads that are kept."""
    made = dict(stacked)
    for name, one in spec.maps.items():
        if name not in stacked:
            continue
        groups = []
        for a, stays in zip(stacked[name], kept, strict=True):
            if one.runs == "merge" and "N" in one.axes:
                a = jnp.moveaxis(a, one.axes.index("N"), 0)
                a = a.at[np.array(stays.zeroed, int)].set(0)
                a = jnp.moveaxis(a, 0, one.axes.index("N"))
            for letter, numbers in (("N", stays.heads), ("K", stays.kv_heads)):
                if letter in one.axes:
                    a = jnp.take(a, np.array(numbers), axis=one.axes.index(letter))
            groups.append(a)
        made[name] = jnp.stack(groups)
    return made


def _smaller(config: ModelConfig, num_kv_heads: int, per_kv_head: int) -> ModelConfig:
    """The config with fewer heads; sizes that would follow their number are written out."""
    letters, sizes = LAYOUTS[config.layout].letters, config.heads.sizes
    fields = {"H": "head_dim", "V": "value_dim", "M": "latent_dim", "P": "rotary_dim"}
    own: dict[str, Any] = {field: sizes[a] for a, field in fields.items() if a in letters}
    own |= {"num_kv_heads": num_kv_heads} if "K" in letters else {}
    return dataclasses.replace(config, num_heads=num_kv_heads * per_kv_head, **own)
