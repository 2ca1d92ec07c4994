"""Several kinds of layer in one model: what `ModelConfig.kinds` says, and the model of each kind.

`config` is a `ModelConfig`. Layers of one kind have their own weights, heads and plan; the first
layers of the config with 5 local and 1 global one in turn are 0, 1, 2, 3, 4 of the kind "layers_0",
0 of "layers_1", 5, 6, ... of "layers_0" again.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from attnlab.heads.old.cache import Cache
from attnlab.model.outer import POSITIONS
from attnlab.names import find
from attnlab.sharing.named_plans import plan_name
from attnlab.sharing.plan import Group, Plan

# What a model has once, whatever its layers are.
OF_THE_MODEL = frozenset(
    """
    kind vocab_size max_len width num_layers kinds cross
    encoder_layers encoder_heads encoder_plan share_encoder
    norm norm_kind norm_eps norm_bias pad_token relative_buckets relative_distance embedding_width
    embedding_scale images zero_token token_types embedding_norm readout readout_bias readout_scale
    readout_transform pooler pooled_classes dropout_rate embedding_dropout_rate dropout_places
    init_std init_residual dtype remat layer_scales
    """.split()  # noqa: SIM905
)
RUN = re.compile(r"\s*(\d+)\(((?:[^()]|\([^()]*\))*)\)")


class Run(NamedTuple):
    """So many layers in a row, with these fields in the place of the config's."""

    layers: int
    fields: dict[str, Any]


def read_kinds(text: Any, config: type) -> list[Run]:
    """The runs that `ModelConfig.kinds` says: "5(window=511; rotary_base=1e4) 1()", or pairs of a
    number and a dict of fields. `config` is `ModelConfig`, whose fields have types.

    >>> from attnlab import ModelConfig
    >>> read_kinds("5(window=511; rotary_base=1e4) 1()", ModelConfig)[0]
    Run(layers=5, fields={'window': 511, 'rotary_base': 10000.0})
    """
    known = {f.name: f.type for f in dataclasses.fields(config) if f.name not in OF_THE_MODEL}
    way_out = (
        f"kinds {text!r} is not read; write it as '5(window=511; rotary_base=1e4) 1()', or "
        "[(5, dict(window=511, rotary_base=1e4)), (1, {})]"
    )
    pairs: Any = text
    if isinstance(text, str):
        found = list(RUN.finditer(text))
        if "".join(one.group() for one in found) != text.rstrip():
            raise ValueError(way_out)
        pairs = [(int(one[1]), one[2]) for one in found]
    try:
        runs = [Run(count, _fields(said)) for count, said in pairs]
    except (TypeError, ValueError):
        raise ValueError(way_out) from None
    for run in runs:
        if not isinstance(run.layers, int) or run.layers < 1:
            raise ValueError(f"kinds: a run has at least 1 layer, not {run.layers!r}")
        for name, value in run.fields.items():
            if name in OF_THE_MODEL:
                raise ValueError(f"kinds: {name} is of the whole model; set it in the config")
            find("field of a kind", name, known)
            if isinstance(text, str):
                run.fields[name] = _value(name, value, known[name])
    return runs


def _fields(said: Any) -> dict[str, Any]:
    if isinstance(said, Mapping):
        return dict(said)
    words = [word.partition("=") for word in said.split(";") if word.strip()]
    if not all(equals for _, equals, _ in words):
        raise ValueError
    return {name.strip(): value.strip() for name, _, value in words}


def _value(name: str, text: str, kind: Any) -> Any:
    """What a word says of a field of this type."""
    kinds = typing.get_args(kind) or (kind,)
    words: dict[str, Any] = {"None": None} if types.NoneType in kinds else {}
    words |= {"True": True, "False": False} if bool in kinds else {}
    if text in words:
        return words[text]
    for one in (one for one in (int, float, str) if one in kinds):
        try:
            return one(text)
        except ValueError:
            continue
    names = {types.NoneType: "None"}
    told = " or ".join(names.get(one, getattr(one, "__name__", str(one))) for one in kinds)
    raise ValueError(f"kinds: {name}={text} should be {told}")


def write_kinds(runs: list[Run]) -> str:
    """What `read_kinds` reads as these runs.

    >>> write_kinds([Run(2, {"window": 511, "plan": Plan(attention=(0, 0), ffn=(0, 1))})])
    '2(window=511; plan=attention_only)'
    """
    word = lambda value: plan_name(value) if isinstance(value, Plan) else str(value)
    told = lambda fields: "; ".join(f"{name}={word(value)}" for name, value in fields.items())
    return " ".join(f"{count}({told(fields)})" for count, fields in runs)


@functools.lru_cache(maxsize=512)
def stacks_of(config: Any) -> Mapping[str, Any]:
    """Name of its weights -> the config of the layers of one kind, with their number and plan; of a
    model without kinds "layers" -> itself.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(kinds="2(num_heads=2) 1()", num_layers=8)
    >>> {name: (c.num_layers, c.num_heads) for name, c in stacks_of(config).items()}
    {'layers_0': (6, 2), 'layers_1': (2, 4)}
    """
    if not config.kinds:
        return {"layers": config}
    made, names = {}, layer_names(config)
    for name, fields in _kinds(config).items():
        count, own = names.count(name), fields
        if scales := config.layer_scales:
            mine = tuple(a for a, other in zip(scales, names, strict=True) if other == name)
            own = fields | {"layer_scales": mine}
        try:
            made[name] = dataclasses.replace(config, kinds="", num_layers=count, **own)
        except ValueError as error:
            told = write_kinds([Run(count, fields)])
            raise ValueError(f"the {count} layers of the kind {told}: {error}") from None
    return types.MappingProxyType(made)


def layer_names(config: Any) -> tuple[str, ...]:
    """The name of the weights of every layer, in their order.

    >>> from attnlab import ModelConfig
    >>> layer_names(ModelConfig(kinds="2(num_heads=2) 1()", num_layers=4))
    ('layers_0', 'layers_0', 'layers_1', 'layers_0')
    """
    if not config.kinds:
        return ("layers",) * config.num_layers
    kinds = {_same(fields): name for name, fields in _kinds(config).items()}
    runs = read_kinds(config.kinds, type(config))
    turn = [kinds[_same(fields)] for count, fields in runs for _ in range(count)]
    return tuple(turn[i % len(turn)] for i in range(config.num_layers))


def layers_of(config: Any) -> dict[str, list[int]]:
    """Name of its weights -> the layers of a kind."""
    found: dict[str, list[int]] = {name: [] for name in stacks_of(config)}
    for i, name in enumerate(layer_names(config)):
        found[name].append(i)
    return found


def whole_plan(config: Any) -> Plan:
    """The plans of all kinds as one: slots are counted kind by kind, in `kv` also where a kind has
    no such part, and layers as in the model.

    >>> from attnlab import ModelConfig
    >>> whole_plan(ModelConfig(kinds="2(plan=albert) 1(window=3)", num_layers=6))["ffn"]
    (0, 0, 1, 0, 0, 2)
    """
    parts = [{*c.layer_plan} | {"kv"} for c in stacks_of(config).values()]
    shared = set.intersection(*parts) - (set() if _keys_apart(config) else {"kv"})
    made: dict[str, list[Group]] = {part: [None] * config.num_layers for part in sorted(shared)}
    used = dict.fromkeys(made, 0)
    for name, layers in layers_of(config).items():
        plan = stacks_of(config)[name].layer_plan
        for part, slots in made.items():
            own = plan[part] if part in plan else plan["attention"]
            for i, slot, source in zip(layers, own, plan.kv_sources, strict=True):
                slots[i] = slot + used[part] if isinstance(slot, int) else f"@{layers[source]}"
            used[part] += 1 + max(slot for slot in own if isinstance(slot, int))
    return Plan(**made)


def _keys_apart(config: Any) -> bool:
    return any("kv" in c.layer_plan for c in stacks_of(config).values())


def heads_in_a_layer(config: Any) -> int:
    """The number of heads of every layer. Raises ValueError where kinds or stacks differ in it."""
    counts = {c.num_heads for c in stacks_of(config).values()}
    if config.encoder_heads is not None:
        counts.add(config.encoder_heads)
    if len(counts) > 1:
        where = config.kinds or "decoder and encoder"
        raise ValueError(
            f"layers have {' or '.join(map(str, sorted(counts)))} heads ({where}), and this "
            "needs one number for all: look at one kind, or at values by `show` and `edit`"
        )
    return counts.pop()


def by_stack(config: Any, cache: Cache | None) -> dict[str, Any]:
    """Name of its weights -> the cache of the layers of a kind, None without a cache. Of several
    kinds a cache is such a dict, of one it is that kind's own.
    """
    names = stacks_of(config)
    if cache is None:
        return dict.fromkeys(names)
    if (config.kinds and set(cache) != set(names)) or (not config.kinds and "length" not in cache):
        raise ValueError(
            f"the cache holds {', '.join(cache)}, which is that of another model; make it with "
            "config.empty_cache(batch, size) of this one"
        )
    return dict(cache) if config.kinds else dict.fromkeys(names, cache)


def check_kinds(config: Any) -> None:
    """Raises ValueError, saying what to change, for kinds that are no model together."""
    if config.kind == "encoder_decoder":
        raise ValueError(
            "kinds are of the one stack of a decoder or an encoder, not of an encoder_decoder"
        )
    runs, kinds = read_kinds(config.kinds, type(config)), _kinds(config)
    if len(kinds) < 2:
        raise ValueError(
            f"kinds {config.kinds!r} names one kind of layer; set its fields in the config"
        )
    if (count := sum(run.layers for run in runs)) > config.num_layers:
        raise ValueError(
            f"kinds {config.kinds!r} names {count} layers, num_layers is {config.num_layers}; it "
            "is what comes again and again until all layers are there"
        )
    ours = POSITIONS[config.positions]
    for c in stacks_of(config).values():
        if POSITIONS[c.positions]._replace(rotary=ours.rotary) != ours:
            raise ValueError(
                f"kinds: positions are 'rotary' in some layers and 'none' in others, not "
                f"{c.positions!r} beside {config.positions!r}: those are added once, to all"
            )
        if ours.relative and c.num_heads != config.num_heads:
            raise ValueError(
                f"kinds: relative positions are one table for {config.num_heads} heads of every "
                f"layer, not for {c.num_heads}; use positions='rotary'"
            )


def _kinds(config: Any) -> dict[str, dict[str, Any]]:
    """Name of its weights -> the fields of every kind, in the order of its first layer."""
    kinds: dict[frozenset[Any], dict[str, Any]] = {}
    for run in read_kinds(config.kinds, type(config)):
        kinds.setdefault(_same(run.fields), run.fields)
    return {f"layers_{i}": fields for i, fields in enumerate(kinds.values())}


def _same(fields: dict[str, Any]) -> frozenset[Any]:
    return frozenset(fields.items())
