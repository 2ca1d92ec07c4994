"""Changes the sharing plan of a model that has its parameters already.

`params` are those of `config.build()`. A plan with fewer groups averages the parameters that become
one; `share` measures by how much this changes the outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from attnlab.conversion.measure import difference
from attnlab.heads.old.project import split_memory
from attnlab.heads.old.spec import HeadSpec
from attnlab.model.config import ModelConfig
from attnlab.model.kinds import read_kinds, write_kinds
from attnlab.names import lookup
from attnlab.sharing.bits import same_bits
from attnlab.sharing.low_rank_delta import fit_delta, layer_params
from attnlab.sharing.mixing import Params, PyTree, fit_mixture
from attnlab.sharing.named_plans import as_plan, plan_name
from attnlab.sharing.plan import Plan, mixtures, separate
from attnlab.transforms.head_alignment import align_heads, reorder_heads

Merge: TypeAlias = Literal["mean", "aligned"]

PER_STACK = ("final_norm", "relative_bias")
"""The parameters of an encoder or decoder outside its layers."""


def unshare(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function with plan "separate": every layer gets a copy of the parameters it used.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=3, num_heads=2, plan="albert")
    >>> params = config.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> separate, copied = unshare(config, params)
    >>> separate.plan, copied["layers"]["ffn"]["up"].shape[0]
    ('separate', 3)
    """
    return change_plan(config, params, "separate")


def share(
    config: ModelConfig,
    params: Params,
    plan: str | Plan,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    merge: Merge = "mean",
) -> tuple[ModelConfig, Params, float]:
    """`change_plan`, and the `output_difference` that it causes on `tokens`.

    >>> from attnlab import ModelConfig
    >>> config, tokens = ModelConfig(width=8, num_layers=3, num_heads=2), jnp.ones((1, 2), int)
    >>> params = config.build().init(jax.random.key(0), tokens)["params"]
    >>> shared, _, difference = share(config, params, "albert", tokens)
    >>> shared.plan, difference > 0.01
    ('albert', True)
    """
    after = change_plan(config, params, plan, merge=merge)
    return *after, output_difference((config, params), after, tokens)


def change_plan(
    config: ModelConfig, params: Params, plan: str | Plan, *, merge: Merge = "mean"
) -> tuple[ModelConfig, Params]:
    """The model under another sharing plan with as many layers.

    The parameters of a new group are the mean over its layers of what these used before. Exact
    where those are equal, so always if the new plan only splits groups (`unshare`).

    - Low-rank deltas of the old plan are added to the parameters they belong to. Those of the new
      plan are fitted to what the new groups lack, with rank `config.delta_rank` (`fit_delta`).
    - Mixed groups of the old plan are summed; those of the new plan are fitted (`fit_mixture`).
    - Layers that attend to the keys and values of an earlier layer must continue to; others may
      start to.

    Args:
      config: of the model as it is.
      params: its parameters.
      plan: a name stands for the plan of every stack and every layer type. A `Plan` is that of the
        decoder alone if there is an encoder too.
      merge: "mean", or "aligned" to first permute the heads of each layer so that they agree best
        with those of the group's first layer (`align_heads`). Heads have no order, so the plain
        mean mixes heads that compute different things.

    Returns:
      (config, params) under the new plan.

    Raises:
      ValueError: the plan has another number of layers, or cannot be reached from the old one; or
        merge="aligned" and heads of this layout cannot be permuted.
    """
    merge_groups = lookup(MERGES, merge, what="merge")
    if config.kinds:
        return _change_layer_types(config, params, plan, merge_groups)
    given = as_plan(plan, config.num_layers)
    if given.num_layers != config.num_layers:
        raise ValueError(
            f"the new plan has {given.num_layers} layers, the model has {config.num_layers}; they "
            "must be the same"
        )
    changes: dict[str, Any] = {"plan": plan}
    if config.kind == "encoder_decoder":
        changes["encoder_plan"] = None if isinstance(plan, str) else config.encoder_layer_plan
    after = dataclasses.replace(config, **changes)
    stacked = dict(params)
    pair = config.layer_plan, after.layer_plan
    stacked["layers"] = _reshare(params["layers"], *pair, config, merge_groups)
    if config.kind == "encoder_decoder":
        encoder = config.encoder_layer_plan, after.encoder_layer_plan
        if not config.share_encoder:
            stacked["encoder_layers"] = _reshare(
                params["encoder_layers"], *encoder, config.as_encoder, merge_groups
            )
        elif not all(_agree(e, d) for e, d in zip(encoder, pair, strict=True)):
            raise ValueError(
                "the encoder shares the decoder's parameters under another plan; separate them "
                "with untie_encoder first"
            )
    return after, stacked


def untie_encoder(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function with `share_encoder=False`: the encoder gets copies of what it used.

    Raises:
      ValueError: the encoder has its own parameters already.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(kind="encoder_decoder", width=8, num_heads=2, share_encoder=True)
    >>> tokens = jnp.ones((1, 2), int)
    >>> params = config.build().init(jax.random.key(0), tokens, tokens)["params"]
    >>> sorted(set(untie_encoder(config, params)[1]) - set(params))
    ['encoder_final_norm', 'encoder_layers']
    """
    if not config.share_encoder:
        raise ValueError("share_encoder is False: the encoder has its own parameters already")
    untied = dataclasses.replace(config, share_encoder=False)
    stacked: Params = {
        name: jax.tree.map(lambda a, n=count: a[:n], params["layers"][name])
        for name, count in config.encoder_layer_plan.num_groups.items()
        if name in params["layers"]  # a layer may have no FFN
    }
    if "delta" in stacked:
        stacked["delta"] = {name: a for name, a in stacked["delta"].items() if name != "cross"}
    outside = {f"encoder_{name}": params[name] for name in PER_STACK if name in params}
    return untied, params | outside | {"encoder_layers": stacked}


def tie_encoder(
    config: ModelConfig, params: Params, *, merge: Merge = "mean"
) -> tuple[ModelConfig, Params]:
    """Encoder and decoder with `share_encoder=True`: the mean of what both have.

    Raffel et al. 2020 (T5, arXiv 1910.10683), section 3.2.2. Cross-attention stays the decoder's.

    Args:
      config: of an encoder-decoder.
      params: its parameters.
      merge: as in `change_plan`.

    Raises:
      ValueError: the plans of the two differ, or have deltas or mixtures.
    """
    plan = config.encoder_layer_plan
    tied = dataclasses.replace(config, share_encoder=True)
    if not _agree(plan, config.layer_plan) or "delta" in plan or mixtures(plan):
        raise ValueError(
            "encoder and decoder need the same plan, without deltas and mixtures; see change_plan"
        )
    merge_groups = lookup(MERGES, merge, what="merge")
    layers = dict(params["layers"])
    for name in (name for name in plan if name in layers):
        groups = []
        for group in range(plan.num_groups[name]):
            pair = [_select(params[s][name], group) for s in ("layers", "encoder_layers")]
            groups.append(merge_groups(pair, name, config.heads)[1])
        layers[name] = _stack(groups)
    rest = {name: a for name, a in params.items() if not name.startswith("encoder_")}
    for name in PER_STACK:
        if name in params:
            pair = [params[name], params[f"encoder_{name}"]]
            rest[name] = _mean(pair, name, config.heads)[1]
    return tied, rest | {"layers": layers}


def detect_sharing(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function under the plan that the parameters show.

    Groups of a sublayer that are equal bit for bit become one, and an encoder equal to its decoder
    is shared with it. Finds the plan of a file that stores shared layers one by one (an ALBERT
    written as a BERT, a tied encoder).

    Raises:
      ValueError: the model has several layer types, or mixed groups.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(width=8, num_layers=3, num_heads=2, plan="ffn_only")
    >>> params = config.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> detect_sharing(*unshare(config, params))[0].plan
    'ffn_only'
    """
    if config.kinds:
        raise ValueError("detect_sharing needs a model with one layer type; this one has several")
    if mixtures([*config.layer_plan, *config.encoder_layer_plan]):
        raise ValueError("detect_sharing cannot compare mixed groups; unshare the model first")
    has_encoder = config.kind == "encoder_decoder"
    plan, layers = _detected(config.layer_plan, params["layers"])
    params = params | {"layers": layers}
    if not has_encoder or config.share_encoder:
        named = plan if has_encoder else plan_name(plan)
        return dataclasses.replace(config, plan=named), params
    encoder_plan, encoder = _detected(config.encoder_layer_plan, params["encoder_layers"])
    params["encoder_layers"] = encoder
    config = dataclasses.replace(config, plan=plan, encoder_plan=encoder_plan)
    outside = [name for name in PER_STACK if name in params]
    ours = {name: layers[name] for name in encoder_plan if name in layers}
    ours |= {name: params[name] for name in outside}
    theirs = encoder | {name: params.get(f"encoder_{name}") for name in outside}
    can_tie = (
        _agree(encoder_plan, plan) and "delta" not in encoder_plan and config.encoder_heads is None
    )
    return tie_encoder(config, params) if can_tie and _equal(ours, theirs) else (config, params)


def output_difference(
    before: tuple[ModelConfig, Params],
    after: tuple[ModelConfig, Params],
    tokens: Int[Array | np.ndarray, "B T"],
) -> float:
    """Largest difference of the logits of two (config, params), relative to the largest logit.

    An encoder-decoder reads `tokens` as source and as target.
    """

    def logits(config: ModelConfig, params: Params) -> np.ndarray:
        texts = (tokens, tokens) if config.kind == "encoder_decoder" else (tokens,)
        return np.asarray(_apply(config)({"params": params}, *texts), np.float64)

    return difference(logits(*after), logits(*before))


@functools.lru_cache(maxsize=4)
def _apply(config: ModelConfig) -> Callable[..., Array]:
    """Compiled once for all parameters."""
    return jax.jit(config.build().apply)


MergeGroups: TypeAlias = Callable[[list[PyTree], str, HeadSpec], tuple[list[PyTree], PyTree]]
"""(parameters of each layer of a group, sublayer, heads) -> (these as merged, their mean)"""


def _mean(layers: list[PyTree], sublayer: str, heads: HeadSpec) -> tuple[list[PyTree], PyTree]:
    first, *rest = layers
    if all(_equal(first, other) for other in rest):
        return layers, first  # the mean of equal numbers may differ from them in the last bit
    return layers, jax.tree.map(lambda *a: jnp.mean(jnp.stack(a), axis=0), *layers)


def _aligned(layers: list[PyTree], sublayer: str, heads: HeadSpec) -> tuple[list[PyTree], PyTree]:
    if sublayer == "attention":
        first, *rest = layers
        layers = [first, *(reorder_heads(w, align_heads(w, first, heads), heads) for w in rest)]
    return _mean(layers, sublayer, heads)


MERGES: dict[str, MergeGroups] = {"mean": _mean, "aligned": _aligned}


def _change_layer_types(
    config: ModelConfig, params: Params, plan: str | Plan, merge_groups: MergeGroups
) -> tuple[ModelConfig, Params]:
    """`change_plan` of a model with several layer types."""
    if not isinstance(plan, str):
        raise ValueError(
            "a Plan counts all layers, and layers of several types share none; give the name of a "
            "plan"
        )
    runs = read_kinds(config.kinds, type(config))
    for run in runs:
        run.fields.pop("plan", None)
    after = dataclasses.replace(config, plan=plan, kinds=write_kinds(runs))
    if after.layer_names != config.layer_names:
        raise ValueError(
            f"the layer types {config.kinds} differ only in their plans; under one plan they would "
            "be one"
        )
    layers = {
        name: _reshare(
            params[name], old.layer_plan, after.stacks[name].layer_plan, old, merge_groups
        )
        for name, old in config.stacks.items()
    }
    return after, params | layers


def _reshare(
    stacked: Params, old: Plan, new: Plan, config: ModelConfig, merge_groups: MergeGroups
) -> Params:
    """The stacked parameters of one stack under another plan."""
    _check_reachable(old, new, merge_groups)
    used = [layer_params(stacked, old, i) for i in range(old.num_layers)]
    targets: list[Params] = [{} for _ in used]
    layers: Params = {}
    mixed, known = mixtures(new), {"kv", *used[0]}
    for name in (name for name in new if name in known):
        groups = []
        for group in range(new.num_groups[name]):
            members = [i for i, g in enumerate(new.indices(name)) if g == group]
            before = [_sublayer(used[i], name, new, config.heads) for i in members]
            before, merged = merge_groups(before, name, config.heads)
            groups.append(merged)
            for i, params in zip(members, before, strict=True):
                targets[i][name] = params
        if name in mixed:
            wanted = [target[name] for target in targets]
            layers[name], layers[mixed[name]] = fit_mixture(wanted, groups, new.indices(name))
        else:
            layers[name] = _stack(groups)
    if "delta" in new:
        have = [layer_params(layers, new, i) for i in range(new.num_layers)]
        pairs = zip(targets, have, strict=True)
        layers["delta"] = _stack([fit_delta(a, b, config.delta_rank) for a, b in pairs])
    return layers


def _check_reachable(old: Plan, new: Plan, merge_groups: MergeGroups) -> None:
    if any(old.reuses_kv) and old.kv_sources != new.kv_sources:
        raise ValueError(
            "layers that attend to the keys and values of an earlier layer have no projections of "
            f"their own; the new plan needs the same sublayer kv, {old['kv']}"
        )
    if merge_groups is _aligned and "kv" in new:
        raise ValueError(
            "heads cannot be permuted under a plan with the sublayer kv; use merge='mean'"
        )
    for name in {"delta", *mixtures(new).values()} & {*new}:
        if new[name] != separate(new.num_layers):
            raise ValueError(f"every layer needs its own {name}, in order; got {new[name]}")


def _sublayer(params: Params, name: str, plan: Plan, heads: HeadSpec) -> Params:
    """A sublayer of one layer as the plan divides it: with the projections of kv, or without."""
    attention: Params = params["attention"] | params.get("kv", {})
    if name in ("attention", "kv") and "kv" in plan:
        return split_memory(attention, heads)[name == "kv"]
    found: Params = attention if name == "attention" else params[name]
    return found


def _detected(plan: Plan, stacked: Params) -> tuple[Plan, Params]:
    """The plan in which equal groups are one, and its stacked parameters."""
    sublayers, once = dict(plan.items()), {}
    for name in (name for name in plan if name in stacked):
        groups = [_select(stacked[name], group) for group in range(plan.num_groups[name])]
        first = [next(i for i, a in enumerate(groups) if _equal(a, b)) for b in groups]
        kept = sorted(set(first))
        sublayers[name] = tuple(
            kept.index(first[group]) if isinstance(group, int) else group for group in plan[name]
        )
        once[name] = _stack([groups[i] for i in kept])
    return Plan(**sublayers), once


def _equal(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have equal paths, dtypes, shapes and bits."""
    a, b = (jax.tree_util.tree_leaves_with_path(tree) for tree in (one, other))
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(x[0] == y[0] and same_bits(x[1], y[1]) for x, y in pairs)


def _agree(encoder: Plan, decoder: Plan) -> bool:
    return all(encoder[name] == decoder[name] for name in encoder)


def _select(stacked: PyTree, group: int) -> PyTree:
    return jax.tree.map(lambda a: a[group], stacked)


def _stack(groups: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *a: jnp.stack(a), *groups)
