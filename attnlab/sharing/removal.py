"""Taking heads away for good: a smaller model that is the same function as with gates of 0."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.spec import HeadSpec
from attnlab.model.config import ModelConfig
from attnlab.names import find
from attnlab.sharing.plan import Plan, mixtures

Params = dict[str, Any]
Lost = Mapping[int, Iterable[int]]
"""Slot, or layer -> the numbers of the heads that go."""


class Stay(NamedTuple):
    """What stays of the heads of one slot, by their old numbers."""

    groups: tuple[int, ...]
    """Of heads that share keys; where none do, each is a group"""
    heads: tuple[int, ...]
    idle: tuple[int, ...]
    """Those of them that went: they fill up a place and write nothing"""


def remove_heads(
    config: ModelConfig,
    params: Params,
    heads: Lost,
    *,
    by: str = "slot",
    cross: Lost | None = None,
    encoder: Lost | None = None,
) -> tuple[ModelConfig, Params, dict[str, dict[int, tuple[int, ...]]]]:
    """The same function as with `head_gate` 0 for these heads, with fewer weights.

    `heads` says which go: slot -> their numbers or, with `by="layer"`, layer -> their numbers, the
    same for all layers of a slot. `cross` and `encoder` say it of the other heads of an
    encoder-decoder. A model has one number of heads, so as many stay everywhere as the fullest slot
    keeps; of heads that share keys, as many groups as some slot keeps, each as full as the fullest.
    A slot that keeps fewer fills up with heads that went, whose output map is zero: they write
    nothing, and cost what they cost.

    Returns the new config, its params, and the heads that fill up, by their old numbers: "heads",
    "cross" or "encoder" -> slot -> numbers. `unique_parameters` of both configs is what is saved.

    Raises ValueError where nothing would be saved (use `head_gate`); where a head has a place of
    its own (a chunk of x); and where layers would lose different heads that look at one thing for
    each head: keys that layers share, the table of relative positions.

    >>> import jax
    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=3, num_heads=4, plan="albert")
    >>> params = jax.jit(config.build().init)(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> small, weights, idle = remove_heads(config, params, {0: [1, 3]})
    >>> small.num_heads, weights["layers"]["attention"]["q"].shape, idle
    (2, (1, 8, 2, 2), {})
    """
    _check(config)
    spec, both = config.heads, config.kind == "encoder_decoder"
    plans = {"layers": config.layer_plan, "encoder_layers": config.encoder_layer_plan}
    asked = {"heads": ("layers", "attention", heads)}
    if "cross" in config.layer_plan:
        asked["cross"] = ("layers", "cross", cross or {})
    if both and not config.share_encoder:
        asked["encoder"] = ("encoder_layers", "attention", encoder or {})
    if (cross and "cross" not in asked) or (encoder and "encoder" not in asked):
        raise ValueError(f"a {config.kind} has no such heads of its own; leave cross, encoder out")
    gone = {
        name: _by_slot(name, plans[stack], part, lost, by, spec)
        for name, (stack, part, lost) in asked.items()
    }
    size = spec.num_heads // spec.sizes["K"]
    kept = [
        np.bincount([n // size for n in range(spec.num_heads) if n not in lost], minlength=1)
        for slots in gone.values()
        for lost in slots
    ]
    count = max(1, *(int(np.count_nonzero(a)) for a in kept))
    full = max(1, *(int(a.max(initial=0)) for a in kept))
    if count * full == spec.num_heads:
        raise ValueError(
            "nothing would be saved: all slots have as many heads as the fullest, and one keeps "
            f"all of its {spec.num_heads} (heads that share keys count as the fullest group); take "
            "heads of every slot, or use head_gate"
        )
    made, idle = dict(params), {}
    for name, (stack, part, _) in asked.items():
        stays = [_stay(lost, spec, count, full) for lost in gone[name]]
        layers = dict(made[stack])
        layers[part] = _cut(layers[part], spec, stays)
        if part == "attention" and "kv" in layers:
            layers["kv"] = _cut(layers["kv"], spec, _of_keys(plans[stack], stays))
        made[stack] = layers
        table = f"{stack.removesuffix('layers')}relative_bias"
        if part == "attention" and table in made:
            if len({one.heads for one in stays}) > 1:
                raise ValueError(
                    "relative positions have one number for head n of all layers: take the same "
                    "heads of every slot"
                )
            made[table] = made[table][:, np.array(stays[0].heads)]
        if filled := {slot: one.idle for slot, one in enumerate(stays) if one.idle}:
            idle[name] = filled
    return _smaller(config, count, full), made, idle


def scale_heads(
    config: ModelConfig, params: Params, gate: Mapping[str, Float[Array, "G N"]]
) -> Params:
    """The same function as with these gates on heads, which go into their output maps.

    `gate`: "heads", "cross" or "encoder" -> a number for every head of every slot. A head that has
    another gate in another use of its slot needs `head_gate`, or an edit.

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
        raise ValueError("without an output map each head is a part of the output; use head_gate")
    _check_slots(config)
    spec, made = config.heads, dict(params)
    for name, one in gate.items():
        stack, part = find("heads", name, POOLS)
        layers = dict(made[stack])
        pool = dict(layers[part])
        for weight, axes in _written(spec, pool).items():
            a = jnp.moveaxis(pool[weight], 1 + axes.index("N"), -1)
            a = a * jnp.expand_dims(one, range(1, a.ndim - 1)).astype(a.dtype)
            pool[weight] = jnp.moveaxis(a, -1, 1 + axes.index("N"))
        made[stack] = {**layers, part: pool}
    return made


POOLS = {
    "heads": ("layers", "attention"),
    "cross": ("layers", "cross"),
    "encoder": ("encoder_layers", "attention"),
}
"""Heads -> where their weights lie."""


def _written(spec: HeadSpec, pool: Params) -> dict[str, str]:
    """The maps [G, ...] by which each head writes, and their axes without G."""
    return {
        name: one.axes
        for name, one in spec.maps.items()
        if name in pool and one.runs == "merge" and {"N", "O"} <= set(one.axes)
    }


def _check(config: ModelConfig) -> None:
    if config.encoder_heads is not None:
        raise ValueError(
            f"the encoder has {config.encoder_heads} heads, the decoder {config.num_heads}, and "
            "both would have to keep as many; use head gates (inspect.gates_of)"
        )
    if "C" in LAYOUTS[config.layout].letters:
        raise ValueError(
            f"layout {config.layout!r}: each head reads its own chunk of x, so none can go; "
            "convert it to 'standard' first"
        )
    if not config.attention_output:
        raise ValueError("without an output map each head is a part of the output; none can go")
    if config.talking_heads:
        raise ValueError("talking heads mix: what one scores the others use, so none can go alone")
    _check_slots(config)


def _check_slots(config: ModelConfig) -> None:
    if "delta" in config.layer_plan:
        raise ValueError("layers have deltas of their slots; replan without a part delta first")
    if mixtures(config.layer_plan):
        raise ValueError("layers mix their slots; replan without a part that ends in mixture first")


def _by_slot(
    name: str, plan: Plan, part: str, lost: Lost, by: str, spec: HeadSpec
) -> list[frozenset[int]]:
    """The heads that go, of every slot."""
    find("way to count", by, {"slot": 1, "layer": 1})
    slots = plan.indices(part)
    count = plan.num_layers if by == "layer" else plan.num_slots[part]
    if odd := sorted(set(lost) - set(range(count))):
        raise ValueError(f"{name}: no {by} {odd[0]}; there are {count}")
    sets = {n: frozenset(map(int, lost.get(n, ()))) for n in range(count)}
    for n, these in sets.items():
        if odd := sorted(these - set(range(spec.num_heads))):
            raise ValueError(f"{name}: {by} {n} has no head {odd[0]}; it has {spec.num_heads}")
    if by == "slot":
        return [sets[slot] for slot in range(count)]
    for slot in range(plan.num_slots[part]):
        users = [layer for layer, one in enumerate(slots) if one == slot]
        if len({sets[layer] for layer in users}) > 1:
            raise ValueError(
                f"{name}: layers {', '.join(map(str, users))} share slot {slot} and would lose "
                "different heads; name the same, or unshare first"
            )
    return [sets[slots.index(slot)] for slot in range(plan.num_slots[part])]


def _stay(lost: frozenset[int], spec: HeadSpec, count: int, full: int) -> Stay:
    """`count` groups of `full` heads: those that did not go, filled up."""
    size = spec.num_heads // spec.sizes["K"]
    groups = [range(g * size, (g + 1) * size) for g in range(spec.sizes["K"])]
    used = [g for g, heads in enumerate(groups) if set(heads) - lost]
    rest = [g for g in range(len(groups)) if g not in used]
    chosen = sorted(used + rest[: count - len(used)])
    heads: list[int] = []
    for g in chosen:
        ordered = sorted(groups[g], key=lambda n: (n in lost, n))
        heads += sorted(ordered[:full])
    return Stay(tuple(chosen), tuple(heads), tuple(n for n in heads if n in lost))


def _of_keys(plan: Plan, stays: list[Stay]) -> list[Stay]:
    """What stays of the slots of a part `kv` apart."""
    found: dict[int, Stay] = {}
    for slot, own in zip(plan.indices("kv"), plan.indices("attention"), strict=True):
        if found.setdefault(slot, stays[own]).groups != stays[own].groups:
            raise ValueError(
                "layers that look at one set of keys would keep different heads; take the same "
                "heads of all of them"
            )
    return [found[slot] for slot in range(len(found))]


def _cut(pool: Params, spec: HeadSpec, stays: list[Stay]) -> Params:
    """The weights [G, ...] of a part of which these heads stay."""
    made = dict(pool)
    for name, one in spec.maps.items():
        if name not in pool:
            continue
        slots = []
        for a, stay in zip(pool[name], stays, strict=True):
            if one.runs == "merge" and "N" in one.axes:
                a = jnp.moveaxis(a, one.axes.index("N"), 0)
                a = a.at[np.array(stay.idle, int)].set(0)
                a = jnp.moveaxis(a, 0, one.axes.index("N"))
            for letter, numbers in (("N", stay.heads), ("K", stay.groups)):
                if letter in one.axes:
                    a = jnp.take(a, np.array(numbers), axis=one.axes.index(letter))
            slots.append(a)
        made[name] = jnp.stack(slots)
    return made


def _smaller(config: ModelConfig, count: int, full: int) -> ModelConfig:
    """Sizes that would follow the number of heads, spelled out."""
    letters, sizes = LAYOUTS[config.layout].letters, config.heads.sizes
    fields = {"H": "head_dim", "V": "value_dim", "M": "latent_dim", "P": "rotary_dim"}
    own: dict[str, Any] = {field: sizes[a] for a, field in fields.items() if a in letters}
    own |= {"num_kv_heads": count} if "K" in letters else {}
    return dataclasses.replace(config, num_heads=count * full, **own)
