"""Remove heads: a smaller model that computes the same as with a head mask of 0."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.fields import as_count, check_choice
from attnlab.heads import Layout, TalkingHeads
from attnlab.models.config import ModelConfig
from attnlab.models.params import check_params, owned_stacks
from attnlab.names import lookup
from attnlab.sharing import Params, Plan
from attnlab.transforms.permute import check_head_order, take_heads

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
    """Heads of one parameter group that are kept, by their old numbers."""

    kv_heads: tuple[int, ...]
    """Key/value heads"""
    heads: tuple[int, ...]
    zeroed: tuple[int, ...]
    """Those of `heads` that are removed but stay as padding: their output projection is zero"""


def remove_heads(
    config: ModelConfig,
    params: Params,
    heads: Removed,
    *,
    by: By = "group",
    cross: Removed | None = None,
    encoder: Removed | None = None,
) -> tuple[ModelConfig, Params, dict[str, dict[int, tuple[int, ...]]]]:
    """A smaller model that computes what this one computes with `head_mask` 0 for these heads.

    A model has one number of heads, so every parameter group keeps as many as the one that keeps
    most. With grouped-query attention that holds for key/value heads and for the query heads of
    each. A group that would keep fewer fills up with removed heads whose output projection is zero:
    they add nothing to the output, but still cost time and memory.

    Args:
      config: of the model as it is.
      params: its parameters.
      heads: parameter group -> numbers of heads to remove; with by="layer" layer -> numbers, equal
        for all layers of a group.
      by: what the keys of `heads`, `cross` and `encoder` count.
      cross: the same for cross-attention.
      encoder: the same for the encoder.

    Returns:
      (config, params, zeroed): the smaller model, and the removed heads that stay as padding, as
      "heads", "cross" or "encoder" -> group -> old numbers. Compare `num_parameters` of both
      configs.

    Raises:
      ValueError: a head, group or layer that is no whole number or that the model does not have;
        the model becomes no smaller (use `head_mask`); the layout ties a head to a slice of x; or
        layers would lose different heads that belong together: heads that attend to shared keys, or
        that have a row in a shared table of relative positions. Or an encoder shares the heads.

    >>> import jax
    >>> config = ModelConfig(width=8, num_layers=3, sharing="albert")
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> small, weights, zeroed = remove_heads(config, params, {0: [1, 3]})
    >>> small.heads.num_heads, weights["layers"]["attention"]["q"].shape, zeroed
    (2, (1, 8, 2, 2), {})
    """
    params, layout = check_params(config, params), config.layout
    _check_can_remove(config)
    plans = {name: stack.plan for name, stack in owned_stacks(config).items()}
    removed = {
        name: _by_group(name, plans[LOCATIONS[name][0]], requested, by, layout.num_heads)
        for name, requested in _requested(config, heads, cross, encoder).items()
    }
    counts = _kept_counts(layout, removed)
    made, zeroed = dict(params), {}
    for name, groups in removed.items():
        kept = [_kept(lost, layout, *counts) for lost in groups]
        stack, sublayer = LOCATIONS[name]
        layers = {**made[stack], sublayer: _sliced(made[stack][sublayer], layout, kept)}
        if sublayer == "attention":
            if "kv" in layers:
                layers["kv"] = _sliced(layers["kv"], layout, _kept_in_kv(plans[stack], kept))
            if (table := f"{stack.removesuffix('layers')}relative_bias") in made:
                made[table] = _sliced_table(made[table], kept)
        made[stack] = layers
        if filled := {group: one.zeroed for group, one in enumerate(kept) if one.zeroed}:
            zeroed[name] = filled
    return _smaller(config, *counts), made, zeroed


def scale_heads(
    config: ModelConfig, params: Params, gate: Mapping[str, Float[Array, "G N"]]
) -> Params:
    """The function that the model computes with this `head_mask`, in the output projections.

    Args:
      config: of the model.
      params: its parameters.
      gate: "heads", "cross" or "encoder" -> a factor for every head of every parameter group. For
        factors that differ between layers of a group use `head_mask`.

    Returns:
      The parameters.

    Raises:
      ValueError: the model has no output projection, no such heads, or several layer types; its
        groups have deltas, or an encoder shares them; or factors of another shape.

    >>> import jax
    >>> config = ModelConfig(width=8, num_layers=3, sharing="albert")
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> half = scale_heads(config, params, {"heads": jnp.array([[1.0, 0.5, 1.0, 1.0]])})
    >>> before, after = (tree["layers"]["attention"]["o"][0, 1] for tree in (params, half))
    >>> bool((after == before / 2).all())
    True
    """
    params = check_params(config, params)
    if not isinstance(gate, Mapping):
        raise ValueError(f'gate must be a dict such as {{"heads": factors}}, not {gate!r}')
    if not config.layout.output_projection:
        raise ValueError("output_projection is False: heads are the output; use head_mask")
    _check_plain_groups(config)
    made, locations = dict(params), _locations(config)
    for name, factors in gate.items():
        stack, sublayer = lookup(locations, name, what=f"heads of this {config.kind}")
        stacked = dict(made[stack][sublayer])
        for weight in output_weights(config.layout):
            a = stacked[weight]  # [G, N, ...]
            if np.shape(factors) != a.shape[:2]:
                raise ValueError(
                    f"gate {name!r} {np.shape(factors)} must be [groups, heads] = {a.shape[:2]}"
                )
            shaped = jnp.expand_dims(jnp.asarray(factors), range(2, a.ndim))
            stacked[weight] = a * shaped.astype(a.dtype)
        made[stack] = {**made[stack], sublayer: stacked}
    return made


def _requested(
    config: ModelConfig, heads: Removed, cross: Removed | None, encoder: Removed | None
) -> dict[str, Removed]:
    """Name in `LOCATIONS`, of those that the model has -> the heads to remove."""
    locations = _locations(config)
    requested = {"heads": heads, "cross": cross, "encoder": encoder}
    for name in (name for name, removed in requested.items() if removed):
        lookup(locations, name, what=f"heads of this {config.kind}")
    return {name: requested[name] or {} for name in locations}


def _locations(config: ModelConfig) -> Mapping[str, tuple[str, str]]:
    """The entries of `LOCATIONS` that the model has.

    Raises:
      ValueError: it has several layer types.
    """
    if config.layer_types:
        raise ValueError("layers of several types have no heads in common; use head_mask")
    plans = {stack: owned.plan for stack, owned in owned_stacks(config).items()}
    found = {name: at for name, at in LOCATIONS.items() if at[1] in plans.get(at[0], ())}
    return MappingProxyType(found)


def _kept_counts(layout: Layout, removed: Mapping[str, list[frozenset[int]]]) -> tuple[int, int]:
    """(key/value heads that every group keeps, query heads of each)."""
    lost = [one for groups in removed.values() for one in groups]
    kept = np.array([[n not in one for n in range(layout.num_heads)] for one in lost])
    counts = kept.reshape(len(lost), layout.size("num_kv_heads"), -1).sum(2)
    num_kv_heads = max(1, int(np.count_nonzero(counts, axis=1).max()))
    per_kv_head = max(1, int(counts.max()))
    if num_kv_heads * per_kv_head == layout.num_heads:
        raise ValueError(
            "this makes the model no smaller: all groups keep as many heads as the one that keeps "
            f"most, {layout.num_heads}; remove heads of every group, or use head_mask"
        )
    return num_kv_heads, per_kv_head


def output_weights(layout: Layout) -> list[str]:
    """The weights [N, ..., O] by which each head adds to the output.

    >>> from attnlab.heads import Standard
    >>> output_weights(Standard(width=8, num_heads=2, biases=("v", "o")))
    ['o']
    """
    return [
        name
        for name, weight in layout.all_weights.items()
        if "project_out" in weight.stages
        and (weight.axes[0], weight.axes[-1]) == ("num_heads", "out_width")
    ]


def _check_can_remove(config: ModelConfig) -> None:
    """Raises ValueError unless every head is computed apart from the others."""
    layout, encoder, norm = config.layout, config.encoder, config.layout.qk_norm
    check_head_order(layout)
    own_number = encoder is not None and encoder.num_heads is not None
    sliced = any("slice_width" in weight.axes for weight in layout.all_weights.values())
    talking = any(isinstance(extra, TalkingHeads) for extra in layout.extras)
    over_all = norm is not None and norm.over == "all"
    alibi = config.positions.name == "alibi"
    for holds, reason in (
        (own_number, "the encoder has another number of heads than the decoder; use head_mask"),
        (sliced, "each head reads its own slice of x; convert the layout to 'standard' first"),
        (not layout.output_projection, "without output_projection each is a part of the output"),
        (talking, "talking_heads mixes the heads: one uses the scores of the others"),
        (alibi, "positions 'alibi': slopes depend on the number of heads; use scale_heads"),
        (over_all, "qk_norm over 'all' heads: each depends on the others; use scale_heads"),
    ):
        if holds:
            raise ValueError(f"heads cannot be removed: {reason}")
    _check_plain_groups(config)


def _check_plain_groups(config: ModelConfig) -> None:
    """Raises ValueError if layers of one group have different parameters, or are in two stacks."""
    if any("delta" in stack.plan for stack in owned_stacks(config).values()):
        raise ValueError("the plan has a delta: use change_plan to one without a delta first")
    if config.encoder is not None and config.encoder.shares_decoder:
        raise ValueError(
            "encoder.shares_decoder: the encoder has these heads too, which head_mask "
            "leaves as they are; use untie_encoder first"
        )


def _by_group(
    name: str, plan: Plan, removed: Removed, by: By, num_heads: int
) -> list[frozenset[int]]:
    """The heads to remove, of every parameter group."""
    check_choice("by", by, get_args(By))
    sublayer = LOCATIONS[name][1]
    groups = plan.indices(sublayer) if by == "layer" else range(plan.num_groups[sublayer])
    if not isinstance(removed, Mapping):
        raise ValueError(f"{name} must be a dict such as {{0: [1, 3]}}, not {removed!r}")
    sets: dict[int, frozenset[int]] = dict.fromkeys(range(len(groups)), frozenset())
    for key, lost in removed.items():
        n = as_count(f"{name}: a {by}", key)
        if n not in sets:
            raise ValueError(f"{name}: no {by} {n}; there are {len(groups)}")
        sets[n] |= {as_count(f"{name}: heads of {by} {n}", head) for head in lost}
        if unknown := sorted(sets[n] - set(range(num_heads))):
            raise ValueError(f"{name}: {by} {n} has no head {unknown[0]}; it has {num_heads}")
    found: dict[int, frozenset[int]] = {}
    for key, group in enumerate(groups):
        if found.setdefault(group, sets[key]) != sets[key]:
            layers = ", ".join(str(i) for i, one in enumerate(groups) if one == group)
            raise ValueError(
                f"{name}: layers {layers} share group {group} and would lose different heads; name "
                "the same for each, or unshare the model first"
            )
    return [found[group] for group in range(len(found))]


def _kept(removed: frozenset[int], layout: Layout, num_kv_heads: int, per_kv_head: int) -> Kept:
    """`num_kv_heads` times `per_kv_head` heads: those not removed, filled up."""
    groups = layout.size("num_kv_heads")
    size = layout.num_heads // groups
    heads_of = [range(k * size, (k + 1) * size) for k in range(groups)]
    used = [k for k, heads in enumerate(heads_of) if set(heads) - removed]
    rest = [k for k in range(len(heads_of)) if k not in used]
    chosen = sorted(used + rest[: num_kv_heads - len(used)])
    heads: list[int] = []
    for k in chosen:
        kept_first = sorted(heads_of[k], key=lambda n: (n in removed, n))
        heads += sorted(kept_first[:per_kv_head])
    return Kept(tuple(chosen), tuple(heads), tuple(n for n in heads if n in removed))


def _sliced_table(table: Array, kept: Sequence[Kept]) -> Array:
    """A table of relative positions [..., buckets, N]."""
    if len({one.heads for one in kept}) > 1:
        raise ValueError("relative positions have one table: remove the same heads of every group")
    return table[..., np.array(kept[0].heads)]


def _kept_in_kv(plan: Plan, kept: Sequence[Kept]) -> list[Kept]:
    """Heads that are kept of the groups of the sublayer "kv"."""
    found: dict[int, Kept] = {}
    for group, attention in zip(plan.indices("kv"), plan.indices("attention"), strict=True):
        if found.setdefault(group, kept[attention]).kv_heads != kept[attention].kv_heads:
            raise ValueError("remove the same heads of all layers that attend to the same keys")
    return [found[group] for group in range(len(found))]


def _sliced(stacked: Params, layout: Layout, kept: Sequence[Kept]) -> Params:
    """The parameters [G, ...] of one attention with the heads that are kept."""
    own = [name for name in layout.all_weights if name in stacked]
    groups = []
    for group, stays in enumerate(kept):
        params = {name: jnp.asarray(stacked[name][group]) for name in own}
        for name in set(output_weights(layout)) & set(own):
            params[name] = params[name].at[np.array(stays.zeroed, int)].set(0)
        groups.append(take_heads(params, layout, stays.heads, stays.kv_heads))
    return {**stacked, **{name: jnp.stack([group[name] for group in groups]) for name in own}}


def _smaller(config: ModelConfig, num_kv_heads: int, per_kv_head: int) -> ModelConfig:
    """The config with fewer heads; sizes that default to a function of their number stay."""
    layout = config.layout
    known = {field.name for field in dataclasses.fields(layout)}
    names = "head_dim", "value_dim", "latent_dim", "rotary_dim"
    sizes = {name: layout.size(name) for name in names if name in known}
    if "num_kv_heads" in known:
        sizes = {**sizes, "num_kv_heads": num_kv_heads}
    heads = config.heads.to(type(config.heads), num_heads=num_kv_heads * per_kv_head, **sizes)
    return dataclasses.replace(config, heads=heads)
