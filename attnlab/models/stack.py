"""L transformer layers of one or several types, under any sharing plan, in one scan."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.heads import Cache, init_cache
from attnlab.heads.cache import with_own_lengths
from attnlab.heads.layout import Entries
from attnlab.models.layer import (
    NO_TEXT_INPUTS,
    LayerInputs,
    Report,
    TextInputs,
    layer_values,
    transformer_layer,
)
from attnlab.models.specs import LayerSpec
from attnlab.names import lookup
from attnlab.sharing import Params, Plan, Stack, run_stacks
from attnlab.tap import Patch, Patches, Tap

HeadMask = Float[Array, "..."] | Sequence[Array]
"""[L, N] or [L, B, N]; where layers differ in their number of heads, L arrays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersOfType:
    """All layers of one type.

    Attributes:
      params: sublayer -> parameters [G, ...], of `sharing.init_stacked(init_layer(spec), ...)`.
      plan: which layer uses which group.
      spec: one layer.
      text: masks, positions and second text of these layers.
      cache: stacked [K, ...], one for each layer that makes keys and values.
      report: filled, while JAX traces, with how attention is computed.

    >>> from attnlab.heads import Standard
    >>> from attnlab.models.layer import init_layer
    >>> from attnlab.models.specs import Attention
    >>> from attnlab.sharing import init_stacked
    >>> def layers(plan, window):
    ...     heads, attention = Standard(width=6, num_heads=2), Attention(window=window)
    ...     spec = LayerSpec(heads=heads, attention=attention, is_causal=True)
    ...     params = init_stacked(init_layer(spec), jax.random.key(0), plan)
    ...     return LayersOfType(params=params, plan=plan, spec=spec)
    >>> def run(x):
    ...     one, two = Plan(attention=(0,), ffn=(0,)), Plan(attention=(0, 1), ffn=(0, 1))
    ...     layer_types = {"local": layers(two, 7), "full": layers(one, None)}
    ...     return run_layers(layer_types, ["local", "full", "local"], x).x
    >>> jax.eval_shape(run, jnp.ones((1, 5, 6))).shape
    (1, 5, 6)
    """

    params: Params
    plan: Plan
    spec: LayerSpec
    text: TextInputs = NO_TEXT_INPUTS
    cache: Cache | None = None
    report: Report | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackInputs:
    """Inputs of the layers of all types.

    Attributes:
      head_mask: multiplies each head of each layer, also where layers share parameters.
      dropout_key: random key; None: no dropout.
      capture: names of values to return.
      patch: name -> f(value, layer index), which replaces the value.
      remat: compute activations again in the backward pass.

    >>> head_mask = jnp.ones((3, 2)).at[1, 0].set(0)  # removes head 0 of layer 1
    >>> zeros_in_2 = lambda heads, layer: jnp.where(layer == 2, 0, heads)  # traced: no `if`
    >>> inputs = StackInputs(head_mask=head_mask, patch={"heads": zeros_in_2})
    """

    head_mask: HeadMask | None = None
    dropout_key: Array | None = None
    capture: Sequence[str] = ()
    patch: Patches | None = None
    remat: bool = True


NO_STACK_INPUTS = StackInputs()


class StackOutputs(NamedTuple):
    """What `run_layers` returns.

    >>> from attnlab.heads import MixtureOfHeads, Standard
    >>> from attnlab.models.layer import init_layer
    >>> from attnlab.sharing import init_stacked
    >>> spec = LayerSpec(heads=Standard(width=6, num_heads=3, extras=(MixtureOfHeads(top=1),)))
    >>> def run(x):
    ...     plan = Plan(attention=(0, 0), ffn=(0, 0))
    ...     params = init_stacked(init_layer(spec), jax.random.key(0), plan)
    ...     layers = {"layers": LayersOfType(params=params, plan=plan, spec=spec)}
    ...     return run_layers(layers, ["layers"] * 2, x).losses
    >>> jax.eval_shape(run, jnp.ones((1, 5, 6)))
    {'head_balance': ShapeDtypeStruct(shape=(), dtype=float32)}
    """

    x: Float[Array, "B T D"]
    caches: dict[str, Cache | None]
    """Layer type -> its cache with the new tokens, if one was given."""
    captured: dict[str, Array]
    """Value -> [L, ...], in the order of the layers. A value whose shape differs between layer
    types has one entry per type, "<type>.<value>", with the layers of that type."""
    losses: dict[str, Array]
    """Auxiliary loss -> its sum over layers."""


def run_layers(
    layer_types: Mapping[str, LayersOfType],
    order: Sequence[str],
    x: Float[Array, "B T D"],
    inputs: StackInputs = NO_STACK_INPUTS,
) -> StackOutputs:
    """x after all layers.

    Layers are counted from 0 in the order in which they run, in `head_mask`, in what is captured
    and for patches and layouts that depend on the layer index. Layers that share parameters still
    have a cache, a head mask and a random key of their own.

    Args:
      layer_types: name -> the layers of one type.
      order: the type of every layer.
      x: input of the first layer.
      inputs: head mask, dropout key, values to capture or patch.

    Raises:
      ValueError: an unknown value, or a head mask that does not fit.

    >>> from attnlab.heads import Standard
    >>> from attnlab.models.layer import init_layer
    >>> from attnlab.sharing import init_stacked
    >>> spec = LayerSpec(heads=Standard(width=6, num_heads=2))
    >>> plan = Plan(attention=(0, 0, 0), ffn=(0, 1, 0))
    >>> params = init_stacked(init_layer(spec), jax.random.key(0), plan)
    >>> layers = {"layers": LayersOfType(params=params, plan=plan, spec=spec)}
    >>> inputs = StackInputs(capture=("probs",))
    >>> outputs = run_layers(layers, ["layers"] * 3, jnp.ones((1, 5, 6)), inputs)
    >>> outputs.x.shape, outputs.captured["probs"].shape
    ((1, 5, 6), (3, 1, 2, 5, 5))
    """
    known = stack_values([layers.spec for layers in layer_types.values()])
    capture, patch = check_values(inputs.capture, inputs.patch, known)
    inputs = dataclasses.replace(inputs, capture=capture, patch=patch)
    indices = {name: [i for i, n in enumerate(order) if n == name] for name in layer_types}
    _check_head_mask(inputs.head_mask, layer_types, len(order), x.shape[0])
    keys = None
    if inputs.dropout_key is not None:
        keys = jax.random.split(inputs.dropout_key, len(order))
    stacks, state = {}, {}
    for name, layers in layer_types.items():
        per_layer = _per_layer(layers, np.array(indices[name]), len(order), inputs.head_mask, keys)
        stacks[name], state[name] = _stack(layers, x, per_layer, inputs)
    (x, state), collected = run_stacks(stacks, order, x, state=state, remat=inputs.remat)
    caches = {name: final.cache for name, final in state.items()}
    captured = {name: found.captured for name, found in collected.items()}
    losses = [found.losses for found in collected.values()]
    return StackOutputs(x, caches, _in_order(captured, indices), _total(losses))


def stack_values(specs: Sequence[LayerSpec]) -> dict[str, str]:
    """Names of the values that layers of all these types have -> their axes."""
    first, *others = map(layer_values, specs)
    return {n: axes for n, axes in first.items() if all(n in values for values in others)}


def check_values(
    capture: Iterable[str], patch: Patches | None, known: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Patch]]:
    """`capture` and `patch`, checked, as a tuple and a dict.

    Args:
      capture: names of values to record.
      patch: name -> f(value, layer index).
      known: name -> axes of the existing values.

    Raises:
      TypeError: `capture` is not a collection of names, or `patch` not a dict of functions.
      ValueError: an unknown name; the message lists the known ones.

    >>> check_values(("prob",), None, {"scores": "B N T S", "probs": "B N T S"})
    Traceback (most recent call last):
    ValueError: unknown value 'prob': did you mean 'probs'? known: scores, probs
    """
    if isinstance(capture, str) or not isinstance(capture, Iterable):
        raise TypeError(f"capture must be a tuple of names such as ('probs',), not {capture!r}")
    names = tuple(dict.fromkeys(capture))
    if patch is not None and not isinstance(patch, Mapping):
        raise TypeError(f"patch must be a dict, name -> f(value, layer), not {patch!r:.80}")
    patches = dict(patch or {})
    for name in (*names, *patches):
        lookup(known, name, what="value")
    for name, function in patches.items():
        if not callable(function):
            raise TypeError(
                f"patch of {name!r} must be a function (value, layer), not {function!r:.80}"
            )
    return names, patches


def captured_per_layer(
    captured: Mapping[str, Array], value: str, order: Sequence[str]
) -> list[Array]:
    """The captured value of each layer, also where its shape differs between layer types.

    Args:
      captured: of `StackOutputs` or of a model.
      value: its name.
      order: the type of every layer, `config.layer_names`.

    >>> captured = {"a.q": jnp.zeros((2, 3)), "b.q": jnp.zeros((1, 5))}
    >>> [q.shape for q in captured_per_layer(captured, "q", ["a", "b", "a"])]
    [(3,), (5,), (3,)]
    """
    if value in captured:
        return list(captured[value])
    values = {name: iter(captured[f"{name}.{value}"]) for name in dict.fromkeys(order)}
    return [next(values[name]) for name in order]


class _PerLayer(NamedTuple):
    """What differs from layer to layer; of a stack, arrays [L, ...]."""

    layer: np.ndarray
    head_mask: Array | None
    dropout_key: Array | None
    query_scale: np.ndarray | None
    kv_index: np.ndarray | None
    """Which cache it uses."""
    kv_buffer: np.ndarray | None
    """Where keys and values stand that later layers attend to."""
    use_shared_kv: np.ndarray | None


class _State(NamedTuple):
    """What layers pass on to the next, apart from x."""

    cache: Cache | None
    shared_kv: Entries | None
    """Keys and values that later layers attend to, [buffers, ...]."""


class _Collected(NamedTuple):
    """What leaves the scan: arrays [L, ...]."""

    captured: dict[str, Array]
    losses: dict[str, Array]


def _per_layer(
    layers: LayersOfType,
    indices: np.ndarray,
    num_layers: int,
    head_mask: HeadMask | None,
    keys: Array | None,
) -> _PerLayer:
    plan, scales = layers.plan, layers.spec.attention.layer_scales
    reuses = any(plan.reuses_kv)
    return _PerLayer(
        layer=indices,
        head_mask=_of_layers(head_mask, indices, num_layers),
        dropout_key=_of_layers(keys, indices, num_layers),
        query_scale=None if scales is None else np.array(scales),
        kv_index=None if layers.cache is None else np.array(plan.kv_indices),
        kv_buffer=np.array(plan.kv_buffers) if reuses else None,
        use_shared_kv=np.array(plan.reuses_kv) if reuses else None,
    )


def _of_layers(a: HeadMask | None, indices: np.ndarray, num_layers: int) -> Array | None:
    """Of [L, ...], or of L arrays, those of these layers."""
    if a is None:
        return None
    if isinstance(a, list | tuple):
        return jnp.stack([jnp.asarray(a[i]) for i in indices])
    whole: Array = jnp.asarray(a)
    return whole if len(indices) == num_layers else whole[indices]


def _check_head_mask(
    head_mask: HeadMask | None, layer_types: Mapping[str, LayersOfType], num_layers: int, batch: int
) -> None:
    if head_mask is None:
        return
    heads = sorted({layers.spec.heads.num_heads for layers in layer_types.values()})
    if not isinstance(head_mask, list | tuple):
        if len(heads) > 1:
            raise ValueError(
                f"layers have {' or '.join(map(str, heads))} heads: give head_mask as {num_layers} "
                "arrays, one for each layer"
            )
        shape = jnp.asarray(head_mask).shape
        num_heads = heads[0]
        allowed = [(num_layers, num_heads), *((num_layers, b, num_heads) for b in (1, batch))]
        if shape not in allowed:
            raise ValueError(
                f"head_mask {shape} must be [layers, heads] = {allowed[0]} or [layers, batch, "
                f"heads] = {allowed[2]}"
            )
    elif len(head_mask) != num_layers:
        raise ValueError(
            f"head_mask has {len(head_mask)} arrays for {num_layers} layers; give one for each"
        )


def _stack(
    layers: LayersOfType, x: Array, per_layer: _PerLayer, inputs: StackInputs
) -> tuple[Stack[Array, _State, _Collected], _State]:
    """The layers of one type as `run_stacks` takes them, and what they hand on at first."""
    cache = layers.cache
    if cache is not None and layers.text.padding_mask is not None:
        cache = with_own_lengths(cache, x.shape[0])
    # A layer that attends to the keys of an earlier one writes them to that one's cache again:
    # hence the lengths from before the call.
    lengths = {} if cache is None else {"length": cache["length"]}

    def block(
        params: Params, x: Array, state: _State, own: _PerLayer, shared: None
    ) -> tuple[Array, _State, _Collected]:
        tap = Tap(inputs.capture, inputs.patch, own.layer)
        reuse = {} if own.use_shared_kv is None else {"use_shared_kv": own.use_shared_kv}
        outputs = transformer_layer(
            params,
            x,
            layers.spec,
            LayerInputs(
                text=layers.text,
                layer=own.layer,
                cache=_take(state.cache and state.cache | lengths, own.kv_index),
                shared_kv=_take(state.shared_kv, own.kv_buffer),
                head_mask=own.head_mask,
                query_scale=own.query_scale,
                dropout_key=own.dropout_key,
                report=layers.report,
                **reuse,
            ),
            tap=tap,
        )
        state = _State(
            _put(state.cache, outputs.cache, own.kv_index),
            _put(state.shared_kv, outputs.entries, own.kv_buffer),
        )
        return outputs.x, state, _Collected(tap.captured, outputs.losses)

    stack = Stack(block, layers.params, layers.plan, per_layer)
    return stack, _State(cache, _kv_buffers(layers, x))


def _kv_buffers(layers: LayersOfType, x: Array) -> Entries | None:
    """Empty buffers for the keys and values that later layers attend to."""
    if not any(layers.plan.reuses_kv):
        return None
    batch, length = x.shape[:2]
    rotary = layers.text.rotary is not None
    one = init_cache(layers.spec.heads, batch, length, x.dtype, rotary=rotary)
    del one["length"]
    count = max(layers.plan.kv_buffers) + 1
    return {name: jnp.zeros((count, *a.shape), a.dtype) for name, a in one.items()}


def _take(stacked: dict[str, Array] | None, index: np.ndarray | None) -> dict[str, Array] | None:
    return None if stacked is None else {name: a[index] for name, a in stacked.items()}


def _put(
    stacked: dict[str, Array] | None, new: dict[str, Array] | None, index: np.ndarray | None
) -> dict[str, Array] | None:
    if stacked is None or new is None:
        return None
    return {name: a.at[index].set(new[name]) for name, a in stacked.items()}


def _in_order(
    captured: Mapping[str, dict[str, Array]], indices: Mapping[str, list[int]]
) -> dict[str, Array]:
    """`StackOutputs.captured` of what the layers of each type captured."""
    if len(captured) == 1:
        return next(iter(captured.values()))
    order = np.argsort(np.concatenate([indices[name] for name in captured]))
    found: dict[str, Array] = {}
    for value in next(iter(captured.values())):
        each = {name: values[value] for name, values in captured.items()}
        if len({(a.shape[1:], a.dtype) for a in each.values()}) == 1:
            found[value] = jnp.concatenate(list(each.values()))[order]
        else:
            found |= {f"{name}.{value}": a for name, a in each.items()}
    return found


def _total(losses: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Loss -> its sum over the layers of all types."""
    total: dict[str, Array] = {}
    for found in losses:
        for name, a in found.items():
            of_type = jnp.sum(a, axis=0)
            total[name] = total[name] + of_type if name in total else of_type
    return total
