"""Change the sharing plan of a model that has its parameters already.

`params` are those of `config.build()`. A plan with fewer groups averages the parameters that become
one; `output_difference` measures by how much this changes the outputs.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnlab.fields import check_choice
from attnlab.heads import Layout, kv_weight_names
from attnlab.models.config import EncoderConfig, ModelConfig
from attnlab.models.embed import OWN_INPUTS
from attnlab.models.params import check_params, encoder_params, owned_stacks, same_bits
from attnlab.sharing import Params, Plan, PyTree, fit_delta, layer_params, plan_name, separate

Merge: TypeAlias = Literal["mean", "first"]

PER_STACK = ("final_norm", "relative_bias")
"""Parameters of an encoder or decoder outside its layers."""


def unshare(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function with plan "separate": every layer gets a copy of the parameters it used.

    >>> config = ModelConfig(width=8, num_layers=3, sharing="albert")
    >>> params = config.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> separate, copied = unshare(config, params)
    >>> separate.sharing, copied["layers"]["ffn"]["up"].shape[0]
    ('separate', 3)
    """
    return change_plan(config, params, "separate")


def change_plan(
    config: ModelConfig,
    params: Params,
    plan: str | Plan,
    *,
    merge: Merge = "mean",
    delta_rank: int | None = None,
) -> tuple[ModelConfig, Params]:
    """The model under another sharing plan with as many layers.

    The parameters of a new group are the mean over its layers of what these used before. Exact
    where those are equal, so always if the new plan only splits groups (`unshare`).

    - Low-rank deltas of the old plan are added to the parameters they belong to. Those of the new
      plan are fitted to what the new groups lack (`fit_delta`).
    - Layers that attend to the keys and values of an earlier layer must continue to; others may
      start to.

    Args:
      config: of the model as it is.
      params: its parameters.
      plan: a name applies to every stack and every layer type. A `Plan` applies to the decoder
        alone if there is an encoder too.
      merge: "mean", or "first" to take the parameters of the group's first layer. Heads have no
        order, so the mean mixes heads that compute different things.
      delta_rank: rank of the deltas of the new plan; None is that of `config`.

    Returns:
      (config, params) under the new plan.

    Raises:
      ValueError: the plan has another number of layers, or cannot be reached from the old one.

    >>> config, tokens = ModelConfig(width=8, num_layers=3), jnp.ones((1, 2), int)
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> changed, merged = change_plan(config, params, "cycle:2")
    >>> changed.sharing, merged["layers"]["ffn"]["up"].shape[0]
    ('cycle:2', 2)
    """
    check_choice("merge", merge, get_args(Merge))
    params = check_params(config, params)
    rank = config.delta_rank if delta_rank is None else delta_rank
    after = dataclasses.replace(_with_plan(config, plan), delta_rank=rank)
    return after, reshared(config, params, after, merge)


def reshared(config: ModelConfig, params: Params, after: ModelConfig, merge: Merge) -> Params:
    """The parameters of `config` for `after`, which differs in its plans and `delta_rank` alone."""
    new, rank, stacked = owned_stacks(after), after.delta_rank, dict(params)
    for name, old in owned_stacks(config).items():
        stacked[name] = _reshare(params[name], old.plan, new[name].plan, old.layout, rank, merge)
    if config.encoder is not None and config.encoder.shares_decoder:
        encoders = config.encoder_model.plan, after.encoder_model.plan
        if not all(map(_agree, encoders, (config.plan, after.plan))):
            raise ValueError("encoder.shares_decoder has another plan: use untie_encoder first")
    return stacked


def _with_plan(config: ModelConfig, plan: str | Plan) -> ModelConfig:
    """The config under another sharing plan."""
    if config.layer_types:
        if not isinstance(plan, str):
            raise ValueError("layers of several types share none: give the name of a plan")
        types = tuple((n, dataclasses.replace(o, sharing=None)) for n, o in config.layer_types)
        if len({o for _, o in types}) < len({o for _, o in config.layer_types}):
            raise ValueError("some layer_types differ only in their plans, so they would be one")
        return dataclasses.replace(config, sharing=plan, layer_types=types)
    encoder = config.encoder
    if encoder is not None:
        encoder_plan = None if isinstance(plan, str) else config.encoder_model.plan
        encoder = dataclasses.replace(encoder, sharing=encoder_plan)
    return dataclasses.replace(config, sharing=plan, encoder=encoder)


def untie_encoder(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function with `shares_decoder=False`: the encoder gets copies of what it used.

    Raises:
      ValueError: the encoder has its own parameters already.

    >>> config = ModelConfig(kind="encoder_decoder", encoder=EncoderConfig(shares_decoder=True))
    >>> tokens = jnp.ones((1, 2), int)
    >>> params = config.build().init(jax.random.key(0), tokens, source=tokens)["params"]
    >>> sorted(set(untie_encoder(config, params)[1]) - set(params))
    ['encoder_final_norm', 'encoder_layers']
    """
    params = check_params(config, params)
    if config.encoder is None or not config.encoder.shares_decoder:
        raise ValueError("encoder.shares_decoder is False: it has its own parameters already")
    untied = _with_encoder(config, shares_decoder=False)
    layers = encoder_params(config, params)["layers"]
    stacked: Params = {
        name: jax.tree.map(lambda a, n=count: a[:n], layers[name])
        for name, count in config.encoder_model.plan.num_groups.items()
        if name in layers  # a layer may have no FFN
    }
    outside = {f"encoder_{name}": params[name] for name in PER_STACK if name in params}
    return untied, params | outside | {"encoder_layers": stacked}


def tie_encoder(
    config: ModelConfig, params: Params, *, merge: Merge = "mean"
) -> tuple[ModelConfig, Params]:
    """Encoder and decoder with `shares_decoder=True`: the mean of what both have.

    Raffel et al. 2020 (T5, arXiv 1910.10683), section 3.2.2. Cross-attention stays the decoder's.

    Args:
      config: of an encoder-decoder.
      params: its parameters.
      merge: as in `change_plan`.

    Raises:
      ValueError: no encoder_decoder; or the plans of the two differ, or have deltas.

    >>> config = ModelConfig(kind="encoder_decoder", width=8, num_layers=1)
    >>> tokens = jnp.ones((1, 2), int)
    >>> init = jax.jit(config.build().init)
    >>> params = init(jax.random.key(0), tokens, source=tokens)["params"]
    >>> tied, merged = tie_encoder(config, params)
    >>> tied.encoder, sorted(set(params) - set(merged))
    (EncoderConfig(shares_decoder=True), ['encoder_final_norm', 'encoder_layers'])
    """
    check_choice("merge", merge, get_args(Merge))
    params = check_params(config, params)
    tied = _with_encoder(config, shares_decoder=True)
    plan = config.encoder_model.plan
    if not _agree(plan, config.plan) or "delta" in plan:
        raise ValueError("encoder and decoder need the same plan, without deltas; see change_plan")
    layers = dict(params["layers"])
    for name in (name for name in plan if name in layers):
        layers[name] = _merged([layers[name], params["encoder_layers"][name]], merge)
    rest = {name: a for name, a in params.items() if not name.startswith("encoder_")}
    for name in (*PER_STACK, *OWN_INPUTS):
        if f"encoder_{name}" in params:
            rest[name] = _merged([params[name], params[f"encoder_{name}"]], merge)
    return tied, rest | {"layers": layers}


def _with_encoder(config: ModelConfig, *, shares_decoder: bool) -> ModelConfig:
    if config.encoder is None:
        raise ValueError(f"this {config.kind} is not an encoder_decoder")
    encoder: EncoderConfig = dataclasses.replace(
        config.encoder,
        shares_decoder=shares_decoder,
        own_inputs=config.encoder.own_inputs and not shares_decoder,
    )
    return dataclasses.replace(config, encoder=encoder)


def detect_sharing(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same function under the plan that the parameters show.

    Groups of a sublayer that are equal bit for bit become one, and an encoder equal to its decoder
    is shared with it. Finds the plan of a file that stores shared layers one by one (an ALBERT
    written as a BERT, a tied encoder).

    Raises:
      ValueError: the model has several layer types.

    >>> config = ModelConfig(width=8, num_layers=3, sharing="ffn_only")
    >>> params = config.build().init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    >>> detect_sharing(*unshare(config, params))[0].sharing
    'ffn_only'
    """
    params = check_params(config, params)
    if config.layer_types:
        raise ValueError("detect_sharing needs a model with one layer type; this one has several")
    plan, layers = _detected(config.plan, params["layers"])
    params = params | {"layers": layers}
    if config.encoder is None:
        return dataclasses.replace(config, sharing=plan_name(plan)), params
    if config.encoder.shares_decoder:
        groups = dict(config.encoder_model.plan.items())
        for name in groups:  # those of the decoder have other numbers now
            now = dict(zip(config.plan[name], plan[name], strict=True))
            groups[name] = tuple(now.get(group, group) for group in groups[name])
        encoder = dataclasses.replace(config.encoder, sharing=Plan(**groups))
        return dataclasses.replace(config, sharing=plan, encoder=encoder), params
    encoder_plan, encoder_layers = _detected(config.encoder_model.plan, params["encoder_layers"])
    params["encoder_layers"] = encoder_layers
    encoder = dataclasses.replace(config.encoder, sharing=encoder_plan)
    config = dataclasses.replace(config, sharing=plan, encoder=encoder)
    outside = [name for name in PER_STACK if name in params]
    outside += [name for name in OWN_INPUTS if f"encoder_{name}" in params]
    ours = {name: layers[name] for name in encoder_plan if name in layers}
    ours |= {name: params[name] for name in outside}
    theirs = encoder_layers | {name: params.get(f"encoder_{name}") for name in outside}
    alike = _agree(encoder_plan, plan) and encoder.num_heads is None
    per_layer = getattr(config.positions, "per_layer", False)
    can_tie = alike and "delta" not in encoder_plan and not per_layer
    return tie_encoder(config, params) if can_tie and _equal(ours, theirs) else (config, params)


def output_difference(
    before: tuple[ModelConfig, Params],
    after: tuple[ModelConfig, Params],
    tokens: Int[Array | np.ndarray, "B T"] | Float[Array | np.ndarray, "B H W C"],
) -> float:
    """Largest difference of the outputs of two (config, params), relative to the largest output.

    The outputs are the logits. Of a model without an LM head they are its last hidden states and,
    if it has a classifier, the logits of the classes; the larger difference counts.

    Args:
      before, after: (config, params) of the two models.
      tokens: ids, or images [B, height, width, channels] for a model of images. An encoder-decoder
        reads the ids as source and as target.

    Returns:
      max |outputs' - outputs| / max |outputs|, over texts, positions and the last axis. NaN if an
      output is NaN.

    Raises:
      ValueError: the models have different output heads.

    >>> config, tokens = ModelConfig(width=8, num_layers=1), jnp.ones((1, 2), int)
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> output_difference((config, params), (config, params), tokens)
    0.0
    """
    errors = [
        np.max(np.abs(got - expected), initial=0) / max(np.max(np.abs(expected), initial=0), 1e-300)
        for expected, got in zip(*(_outputs(*one, tokens) for one in (before, after)), strict=True)
    ]
    return float(np.max(errors))


def _outputs(config: ModelConfig, params: Params, tokens: Any) -> list[np.ndarray]:
    """The logits, else the hidden states and the logits of the classes."""
    source = {} if config.encoder is None else {"source": tokens}
    found = config.build().apply({"params": params}, tokens, **source)
    outputs = (found.hidden, found.classes) if found.logits is None else (found.logits,)
    return [np.asarray(a, np.float64) for a in outputs if a is not None]


def _merged(layers: Sequence[PyTree], merge: Merge) -> PyTree:
    """The mean, or the parameters of the first layer; in the encoder and decoder, the decoder's."""
    first, *rest = layers
    if merge == "first" or all(_equal(first, other) for other in rest):
        return first  # the mean of equal numbers may differ from them in the last bit
    return jax.tree.map(lambda *a: jnp.mean(jnp.stack(a), axis=0), *layers)


def _reshare(
    stacked: Params, old: Plan, new: Plan, heads: Layout, delta_rank: int, merge: Merge
) -> Params:
    """The stacked parameters of one stack under another plan."""
    if any(old.reuses_kv) and old.kv_sources != new.kv_sources:
        raise ValueError(
            f"layers attend to earlier keys: the plan needs the same sublayer kv, {old['kv']}"
        )
    if "delta" in new and new["delta"] != separate(new.num_layers):
        raise ValueError(f"every layer needs its own delta, in order; got {new['delta']}")
    used = [layer_params(stacked, old, i) for i in range(new.num_layers)]
    own = {n for n, weight in heads.all_weights.items() if "keys_values" in weight.stages}
    for i in (i for i, reuses in enumerate(old.reuses_kv) if reuses):
        # The entries are those of the source; what makes keys and values of them has its own delta.
        kept = {n: a for n, a in used[i]["kv"].items() if n in own}
        used[i]["kv"] = used[old.kv_sources[i]]["kv"] | kept
    targets: list[Params] = [{} for _ in used]
    layers: Params = {}
    known = {"kv", *used[0]}
    for name in (name for name in new if name in known):
        groups = []
        for group in range(new.num_groups[name]):
            members = [i for i, g in enumerate(new.indices(name)) if g == group]
            before = [_sublayer(used[i], name, new, heads) for i in members]
            groups.append(_merged(before, merge))
            for i, params in zip(members, before, strict=True):
                targets[i][name] = params
        layers[name] = _stack(groups)
    if "delta" in new:
        have = [layer_params(layers, new, i) for i in range(new.num_layers)]
        pairs = zip(targets, have, strict=True)
        layers["delta"] = _stack([fit_delta(a, b, delta_rank) for a, b in pairs])
    return layers


def _sublayer(params: Params, name: str, plan: Plan, heads: Layout) -> Params:
    """A sublayer of one layer as the plan divides it: with the projections of kv, or without."""
    if name not in ("attention", "kv"):
        found: Params = params[name]
        return found
    attention: Params = params["attention"] | params.get("kv", {})
    of_kv = set(kv_weight_names(heads)) if "kv" in plan else set()
    return {n: a for n, a in attention.items() if (n in of_kv) == (name == "kv")}


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
    """Does the encoder use the groups that the decoder uses, in the same sublayers?"""
    return dict(encoder.items()) == {n: a for n, a in decoder.items() if n != "cross"}


def _select(stacked: PyTree, group: int) -> PyTree:
    return jax.tree.map(lambda a: a[group], stacked)


def _stack(groups: Iterable[PyTree]) -> PyTree:
    return jax.tree.map(lambda *a: jnp.stack(a), *groups)
