"""Changing which layers share weights, of a model that has its weights already.

`params` are the weights of `config.build()`. A coarser plan averages the slots that become one;
`share` says how that changes the outputs. `remove_heads` for good stands in `removal.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.conversion import permute_heads
from attnlab.conversion.measure import difference
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.project import split_memory
from attnlab.heads.old.spec import HeadSpec, absorption
from attnlab.model.config import ModelConfig
from attnlab.model.kinds import read_kinds, write_kinds
from attnlab.names import find
from attnlab.sharing.delta import applied, fit_delta
from attnlab.sharing.dictionary import fit_mixture
from attnlab.sharing.named import name_of, named
from attnlab.sharing.plan import Plan, mixtures, own
from attnlab.sharing.removal import remove_heads as remove_heads
from attnlab.sharing.removal import scale_heads as scale_heads

Params = dict[str, Any]


def unshare(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function with plan "separate": every layer gets a copy of what it used.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=3, num_heads=2, plan="albert")
    >>> params = config.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> alone, copied = unshare(config, params)
    >>> alone.plan, copied["layers"]["ffn"]["up"].shape[0]
    ('separate', 3)
    """
    return replan(config, params, "separate")


def share(
    config: ModelConfig, params: Params, plan: str | Plan, tokens: Any, *, merge: str = "mean"
) -> tuple[ModelConfig, Params, float]:
    """`replan`, and the `output_difference` that it causes on `tokens`.

    >>> from attnlab import ModelConfig
    >>> config, tokens = ModelConfig(width=8, num_layers=3, num_heads=2), jnp.ones((1, 2), int)
    >>> params = config.build().init(jax.random.key(0), tokens)["params"]
    >>> shared, _, difference = share(config, params, "albert", tokens)
    >>> shared.plan, difference > 0.01
    ('albert', True)
    """
    after = replan(config, params, plan, merge=merge)
    return *after, output_difference((config, params), after, tokens)


def replan(
    config: ModelConfig, params: Params, plan: str | Plan, *, merge: str = "mean"
) -> tuple[ModelConfig, Params]:
    """(config, params) under another plan of as many layers.

    A new slot is the mean of what its layers used before. `merge="aligned"` first renames the
    heads of each layer so that they agree best with those of the slot's first layer: heads have no
    order, so the plain mean mixes heads that do different things. Exact where all those weights
    are equal, above all where a plan is refined (`unshare`).

    A part `delta` of the old plan is added to the weights that it belongs to; one of the new plan
    gets what the new slots lack, as near as `config.delta_rank` allows (`delta.fit_delta`); slots
    that are mixed are summed, or the nearest to what the layers had (`dictionary.fit_mixture`).
    Layers that reuse keys and values (`kv`) go on doing so; others may begin to.

    A name is the plan of both stacks of an encoder-decoder, a `Plan` that of the decoder alone. Of
    several kinds of layer a name is the plan of each kind.

    Raises ValueError for a plan of another length or that takes a part away which cannot be, and
    for `aligned` where a head is tied to a place.
    """
    average = find("merge", merge, MERGES)
    if config.kinds:
        return _replan_kinds(config, params, plan, average)
    given = named(plan, config.num_layers) if isinstance(plan, str) else plan
    if given.num_layers != config.num_layers:
        raise ValueError(
            f"the new plan has {given.num_layers} layers, the model has {config.num_layers}; they "
            "must be the same"
        )
    changes: dict[str, Any] = {"plan": plan}
    if config.kind == "encoder_decoder":
        changes["encoder_plan"] = None if isinstance(plan, str) else config.encoder_layer_plan
    after = dataclasses.replace(config, **changes)
    stacks = {"layers": (config.layer_plan, after.layer_plan)}
    if config.kind == "encoder_decoder":
        pairs = (config.encoder_layer_plan, after.encoder_layer_plan)
        if not config.share_encoder:
            stacks["encoder_layers"] = pairs
        elif any(not _agree(*both) for both in zip(pairs, stacks["layers"], strict=True)):
            raise ValueError(
                "the encoder shares the decoder's weights under another plan; take them apart with "
                "untie_encoder first"
            )
    layers = {
        name: _replan(
            params[name], old, new, config if name == "layers" else config.as_encoder, average
        )
        for name, (old, new) in stacks.items()
    }
    return after, params | layers


def _replan_kinds(
    config: ModelConfig, params: Params, plan: str | Plan, average: Callable
) -> tuple[ModelConfig, Params]:
    """Each kind under a plan of this name."""
    if not isinstance(plan, str):
        raise ValueError("a Plan counts all layers, and kinds share none: give the name of a plan")
    runs = read_kinds(config.kinds, type(config))
    for run in runs:
        run.fields.pop("plan", None)
    after = dataclasses.replace(config, plan=plan, kinds=write_kinds(runs))
    if after.layer_names != config.layer_names:
        raise ValueError(f"the kinds {config.kinds} differ in their plans alone; they would be one")
    pairs = {name: (c, after.stacks[name]) for name, c in config.stacks.items()}
    layers = {
        name: _replan(params[name], old.layer_plan, new.layer_plan, old, average)
        for name, (old, new) in pairs.items()
    }
    return after, params | layers


def untie_encoder(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function with `share_encoder=False`: the encoder gets copies of what it used.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(kind="encoder_decoder", width=8, num_heads=2, share_encoder=True)
    >>> tokens = jnp.ones((1, 2), int)
    >>> params = config.build().init(jax.random.key(0), tokens, tokens)["params"]
    >>> sorted(set(untie_encoder(config, params)[1]) - set(params))
    ['encoder_final_norm', 'encoder_layers']
    """
    if not config.share_encoder:
        raise ValueError("the encoder has weights of its own; there is nothing to take apart")
    alone = dataclasses.replace(config, share_encoder=False)
    pool = {
        part: jax.tree.map(lambda a, n=count: a[:n], params["layers"][part])
        for part, count in config.encoder_layer_plan.num_slots.items()
        if part in params["layers"]  # a layer may have no FFN
    }
    if "delta" in pool:
        pool["delta"] = {name: a for name, a in pool["delta"].items() if name != "cross"}
    outer = {f"encoder_{name}": params[name] for name in OF_A_STACK if name in params}
    return alone, params | outer | {"encoder_layers": pool}


def tie_encoder(
    config: ModelConfig, params: Params, *, merge: str = "mean"
) -> tuple[ModelConfig, Params]:
    """`share_encoder=True`: what both stacks have becomes the mean of the two, merged as in
    `replan` (Raffel et al. 2020, section 3.2.2). Cross-attention stays the decoder's own.

    Raises ValueError where the stacks have other plans, deltas or mixtures.
    """
    plan = config.encoder_layer_plan
    tied = dataclasses.replace(config, share_encoder=True)
    if not _agree(plan, config.layer_plan) or "delta" in plan or mixtures(plan):
        raise ValueError("both stacks need one plan, without deltas and mixtures; see replan")
    average = find("merge", merge, MERGES)
    layers = dict(params["layers"])
    for part in (name for name in plan if name in layers):
        slots = []
        for slot in range(plan.num_slots[part]):
            pair = [_slot(params[stack][part], slot) for stack in ("layers", "encoder_layers")]
            slots.append(average(pair, part, config.heads)[1])
        layers[part] = _stacked(slots)
    rest = {name: a for name, a in params.items() if not name.startswith("encoder_")}
    for name in OF_A_STACK:
        if name in params:
            pair = [params[name], params[f"encoder_{name}"]]
            rest[name] = _mean(pair, name, config.heads)[1]
    return tied, rest | {"layers": layers}


OF_A_STACK = ("final_norm", "relative_bias")
"""What each stack has outside its layers."""


def detect(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function under the plan that the weights show: slots of a part that are equal bit
    for bit become one, and an encoder equal to its decoder is shared.

    What a file stores layer by layer (an ALBERT written as a BERT, a tied encoder) is shared again.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=3, num_heads=2, plan="ffn_only")
    >>> params = config.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> detect(*unshare(config, params))[0].plan
    'ffn_only'
    """
    if config.kinds:
        raise ValueError("several kinds of layer keep their plans: detect is for one kind")
    if mixtures([*config.layer_plan, *config.encoder_layer_plan]):
        raise ValueError("layers that mix slots have none whole; unshare first, then detect")
    both = config.kind == "encoder_decoder" and not config.share_encoder
    plan, pool = _shown(config.layer_plan, params["layers"])
    params = params | {"layers": pool}
    if not both:
        fits = config.kind != "encoder_decoder"
        return dataclasses.replace(config, plan=name_of(plan) if fits else plan), params
    encoder, params["encoder_layers"] = _shown(config.encoder_layer_plan, params["encoder_layers"])
    config = dataclasses.replace(config, plan=plan, encoder_plan=encoder)
    ours = {n: pool[n] for n in encoder if n in pool} | {
        n: params[n] for n in OF_A_STACK if n in params
    }
    theirs = params["encoder_layers"] | {n: params.get(f"encoder_{n}") for n in ours if n in params}
    tied = _agree(encoder, plan) and "delta" not in encoder and config.encoder_heads is None
    tied = tied and _equal(ours, theirs)
    return tie_encoder(config, params) if tied else (config, params)


def _shown(plan: Plan, pool: Params) -> tuple[Plan, Params]:
    """The plan in which every set of weights stands once, and its pool."""
    parts, once = dict(plan.items()), {}
    for part, slots in ((name, plan[name]) for name in plan if name in pool):
        sets = [_slot(pool[part], slot) for slot in range(plan.num_slots[part])]
        first = [next(i for i, a in enumerate(sets) if _equal(a, w)) for w in sets]
        kept = sorted({*first})
        parts[part] = tuple(kept.index(first[s]) if isinstance(s, int) else s for s in slots)
        once[part] = _stacked([sets[i] for i in kept])
    return Plan(**parts), once


def _equal(one: Any, other: Any) -> bool:
    """Bit for bit, in shape and in value."""
    a, b = (jax.tree_util.tree_leaves_with_path(tree) for tree in (one, other))
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(x[0] == y[0] and np.array_equal(x[1], y[1]) for x, y in pairs)


def _agree(encoder: Plan, decoder: Plan) -> bool:
    return all(encoder[part] == decoder[part] for part in encoder)


def _replan(params: Any, old: Plan, new: Plan, config: Any, average: Callable) -> Any:
    """The pool of one stack under another plan."""
    _check(old, new, average)
    used = [applied(params, old, i) for i in range(old.num_layers)]
    layers: dict[str, Any] = {}
    wanted: list[Weights] = [{} for _ in used]
    mixed, known = mixtures(new), {"kv", *used[0]}
    for part in (name for name in new if name in known):
        slots = []
        for slot in range(new.num_slots[part]):
            users = [i for i, s in enumerate(new.indices(part)) if s == slot]
            together = [_part(used[i], part, new, config.heads) for i in users]
            together, merged = average(together, part, config.heads)
            slots.append(merged)
            for i, w in zip(users, together, strict=True):
                wanted[i][part] = w
        if part in mixed:
            targets = [w[part] for w in wanted]
            layers[part], layers[mixed[part]] = fit_mixture(targets, slots, new.indices(part))
        else:
            layers[part] = _stacked(slots)
    if "delta" in new:
        have = [applied(layers, new, i) for i in range(new.num_layers)]
        pairs = zip(wanted, have, strict=True)
        layers["delta"] = _stacked([fit_delta(a, b, config.delta_rank) for a, b in pairs])
    return layers


def _check(old: Plan, new: Plan, average: Callable) -> None:
    if any(old.reuses) and old.reads != new.reads:
        raise ValueError(
            "layers that reuse keys and values have no maps of their own to give back; the new "
            f"plan needs a part kv that reuses where the old one does, {old['kv']}"
        )
    if average is _aligned and "kv" in new:
        raise ValueError("heads whose keys are a part of their own have no order; use merge='mean'")
    for part in {"delta", *mixtures(new).values()} & {*new}:
        if new[part] != own(new.num_layers):
            raise ValueError(f"each layer needs its own {part}, in order; got {new[part]}")


def _slot(stacked: Any, slot: int) -> Any:
    return jax.tree.map(lambda a: a[slot], stacked)


def _stacked(slots: list[Any]) -> Any:
    return jax.tree.map(lambda *a: jnp.stack(a), *slots)


def _part(w: dict[str, Weights], part: str, plan: Plan, heads: HeadSpec) -> Weights:
    """The part of one layer as the plan cuts it: the maps to keys and values apart, or not."""
    whole = w["attention"] | w.get("kv", {})
    if part in ("attention", "kv") and "kv" in plan:
        return split_memory(whole, heads)[part == "kv"]
    return whole if part == "attention" else w[part]


def output_difference(before: tuple[Any, Any], after: tuple[Any, Any], tokens: Any) -> float:
    """Largest difference of the logits of two (config, params), relative to the largest logit.

    An encoder-decoder reads `tokens` [B, T] as both its texts.
    """
    texts = lambda c: (tokens, tokens) if c.kind == "encoder_decoder" else (tokens,)
    one, two = (
        np.asarray(_apply(c)({"params": p}, *texts(c)), np.float64) for c, p in (before, after)
    )
    return difference(two, one)


@functools.lru_cache(maxsize=4)
def _apply(config: ModelConfig) -> Callable:
    """Compiled once for all weights that it is called with."""
    return jax.jit(config.build().apply)


def align_heads(w: Weights, target: Weights, spec: HeadSpec) -> np.ndarray:
    """The order of the heads of `w` that agrees best with those of `target`: w's head order[n]
    stands for target's head n.

    Two heads agree as far as their matrices W_Q W_K^T and W_V W_O point the same way (cosine):
    what a head does, whatever basis its q, k and v are written in. The best order is found
    exactly (Hungarian method).
    """
    if "C" in LAYOUTS[spec.layout].letters:
        raise ValueError(
            f"layout {spec.layout!r}: each head reads its own chunk of x, so heads cannot change "
            "places; use merge='mean'"
        )
    if spec.sizes["K"] != spec.num_heads or not spec.output or spec.qk_norm:
        raise ValueError(
            "heads are aligned one by one: groups of heads that share keys, heads without an "
            "output map and q/k norms have no such order; use merge='mean'"
        )
    from scipy.optimize import linear_sum_assignment

    steps = absorption(spec)
    last = steps[-1].spec if steps else spec
    axes = {name: one.axes for name, one in last.maps.items() if "N" in one.axes and one.drawn}
    if any(set(letters) & set("HVMPQR") for letters in axes.values()):
        raise ValueError(
            f"layout {spec.layout!r} leads to no form in which a head is its matrices alone, "
            "whatever basis they are written in; use merge='mean'"
        )
    agreement: Any = 0
    whole = [_per_head(a, steps) for a in (target, w)]
    for name, letters in axes.items():
        both = [np.asarray(a[name], np.float64) for a in whole]
        rows = [np.moveaxis(a, letters.index("N"), 0) for a in both]
        flat = [a.reshape(spec.num_heads, -1) for a in rows]
        flat = [a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-30) for a in flat]
        agreement = agreement + flat[0] @ flat[1].T
    return linear_sum_assignment(-agreement)[1]


def reorder_heads(w: Weights, order: Any, spec: HeadSpec) -> Weights:
    """Head order[n] becomes head n, with its row and column of talking heads; the layer's norm
    stays. The errors are those of `permute_heads`, which does it.
    """
    order = [int(n) for n in order]
    moved = permute_heads({name: w[name] for name in spec.shapes}, spec, order)
    if "mix" in w:
        places = np.asarray(order)
        moved["mix"] = jax.tree.map(lambda a: a[places][:, places], w["mix"])
    return w | moved


def _per_head(w: Weights, steps: list[Any]) -> Weights:
    for step in steps:
        w = step.weights(w)
    return w


def _mean(together: list[Any], part: str, spec: HeadSpec) -> tuple[list[Any], Any]:
    first, *rest = together
    equal = all(_equal(first, w) for w in rest)
    # The mean of equal numbers may differ from them in the last bit.
    mean = lambda *a: jnp.mean(jnp.stack(a), axis=0)
    return together, first if equal else jax.tree.map(mean, *together)


def _aligned(together: list[Any], part: str, spec: HeadSpec) -> tuple[list[Any], Any]:
    if part == "attention":
        first = together[0]
        together = [first] + [
            reorder_heads(w, align_heads(w, first, spec), spec) for w in together[1:]
        ]
    return _mean(together, part, spec)


MERGES: dict[str, Callable] = {"mean": _mean, "aligned": _aligned}
"""Name -> (weights of the layers of a slot, part, heads) -> (them as they are merged, the slot)."""
