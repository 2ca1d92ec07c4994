"""L transformer layers of one or several types, under any sharing plan, in one scan."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.attention.blocks import same_varying_axes
from attnlab.heads import Cache, init_cache
from attnlab.heads.cache import with_own_lengths
from attnlab.models.layer import LayerInputs, layer_values, transformer_layer
from attnlab.models.specs import Compute, LayerSpec
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
      inputs: masks, positions and second text of these layers. Its cache is [K, ...], one for each
        layer that makes keys and values; what differs between layers is not read.

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
    inputs: LayerInputs = LayerInputs()


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
    *,
    head_mask: HeadMask | None = None,
    dropout_key: Array | None = None,
    capture: Sequence[str] = (),
    patch: Patches | None = None,
    compute: Compute = Compute(),  # noqa: B008  # frozen
) -> StackOutputs:
    """x after all layers.

    Layers are counted from 0 in the order in which they run, in `head_mask`, in what is captured
    and for patches and layouts that depend on the layer index. Layers that share parameters still
    have a cache, a head mask and a random key of their own.

    Args:
      layer_types: name -> the layers of one type.
      order: the type of every layer.
      x: input of the first layer.
      head_mask: multiplies each head of each layer, also where layers share parameters.
      dropout_key: random key; None: no dropout.
      capture: names of values to return, of `stack_values`.
      patch: name -> f(value, layer index), which replaces the value.
      compute: whether activations are computed again in the backward pass (`remat`), and how many
        layers an iteration of the scan has (`unroll`).

    Raises:
      ValueError: a head mask that does not fit.

    >>> from attnlab.heads import Standard
    >>> from attnlab.models.layer import init_layer
    >>> from attnlab.sharing import init_stacked
    >>> spec = LayerSpec(heads=Standard(width=6, num_heads=2))
    >>> plan = Plan(attention=(0, 0, 0), ffn=(0, 1, 0))
    >>> params = init_stacked(init_layer(spec), jax.random.key(0), plan)
    >>> layers = {"layers": LayersOfType(params=params, plan=plan, spec=spec)}
    >>> outputs = run_layers(layers, ["layers"] * 3, jnp.ones((1, 5, 6)), capture=("probs",))
    >>> outputs.x.shape, outputs.captured["probs"].shape
    ((1, 5, 6), (3, 1, 2, 5, 5))
    """
    numbers = {name: np.flatnonzero([n == name for n in order]) for name in layer_types}
    per_layer: dict[str, Any] = {}
    if head_mask is not None:
        _check_head_mask(head_mask, layer_types, len(order), x.shape[0])
        per_layer["head_mask"] = head_mask
    if dropout_key is not None:
        per_layer["dropout_key"] = jax.random.split(dropout_key, len(order))
    stacks, state = {}, {}
    for name, layers in layer_types.items():
        own: dict[str, Any] = {"layer": numbers[name]}
        own |= {n: _of_layers(a, numbers[name], len(order)) for n, a in per_layer.items()}
        if (scales := layers.spec.attention.layer_scales) is not None:
            by_position = layers.inputs.query_scale
            own["query_scale"] = (
                np.array(scales)
                if by_position is None
                else jnp.stack([scale * by_position for scale in scales])
            )
        state[name], given = initial_state(layers, x)
        block = _block(layers, state[name]["cache"], tuple(capture), patch)
        stacks[name] = Stack(block, layers.params, layers.plan, (own, given))
    (x, state), made = run_stacks(
        stacks, order, x, state, remat=compute.remat, unroll=compute.unroll
    )
    caches = {name: final["cache"] for name, final in state.items()}
    captured = {name: values for name, (values, _) in made.items()}
    losses: dict[str, Array] = {}
    for _, found in made.values():
        for name, a in found.items():
            total = jnp.sum(a, axis=0)
            losses[name] = losses[name] + total if name in losses else total
    return StackOutputs(x, caches, _in_order(captured, numbers), losses)


def initial_state(
    layers: LayersOfType, x: Array
) -> tuple[dict[str, Cache | None], dict[str, np.ndarray]]:
    """What layers pass on to the next apart from x, the cache [K, ...] and buffers [buffers, ...]
    of keys and values that later layers attend to; and for each layer where its own stand there.

    All get the mesh axes of x, since inside `shard_map` a new array has none, but for a length
    [K] of all rows."""
    cache, plan, at = layers.inputs.cache, layers.plan, {}
    buffers: Cache | None = None
    batch, length = x.shape[:2]
    if cache is not None:
        at["kv_index"] = np.array(plan.kv_indices)
        if layers.inputs.padding_mask is not None:
            cache = with_own_lengths(cache, batch)
        _, varying = same_varying_axes((x, cache))
        cache = cache | {name: a for name, a in varying.items() if a.ndim > 1}
    if any(plan.reuses_kv):
        at |= {"kv_buffer": np.array(plan.kv_buffers), "reuses": np.array(plan.reuses_kv)}
        rotary, count = layers.inputs.rotary is not None, max(plan.kv_buffers) + 1
        one = init_cache(layers.spec.heads, batch, length, x.dtype, rotary=rotary)
        del one["length"]
        zeros = {name: jnp.zeros((count, *a.shape), a.dtype) for name, a in one.items()}
        _, buffers = same_varying_axes((x, zeros))
    return {"cache": cache, "buffers": buffers}, at


def _block(
    layers: LayersOfType, cache: Cache | None, capture: tuple[str, ...], patch: Patches | None
) -> Callable[..., Any]:
    """One layer as `run_stacks` takes it."""
    # A layer that attends to the keys of an earlier one writes them to that one's cache again:
    # hence the lengths from before the call.
    lengths = {} if cache is None else {"length": cache["length"]}

    def block(params: Params, x: Array, state: dict[str, Any], per_layer: Any) -> Any:
        own, at = per_layer
        given, cache, buffers = dict(own), state["cache"], state["buffers"]
        if cache is not None:
            given["cache"] = {n: a[at["kv_index"]] for n, a in (cache | lengths).items()}
        if buffers is not None:
            shared = {name: a[at["kv_buffer"]] for name, a in buffers.items()}
            given["shared_kv"] = shared, at["reuses"]
        inputs = dataclasses.replace(layers.inputs, **given)
        tap = Tap(capture, patch, own["layer"])
        out = transformer_layer(params, x, layers.spec, inputs, tap=tap)
        if cache is not None:
            assert out.cache is not None
            cache = {n: a.at[at["kv_index"]].set(out.cache[n]) for n, a in cache.items()}
        if buffers is not None:
            index = at["kv_buffer"]
            buffers = {n: a.at[index].set(out.kv[n]) for n, a in buffers.items()}
        return out.x, {"cache": cache, "buffers": buffers}, (tap.captured, out.losses)

    return block


def _of_layers(a: HeadMask, numbers: np.ndarray, num_layers: int) -> Array:
    """Of [L, ...], or of L arrays, those of these layers."""
    if isinstance(a, list | tuple):
        return jnp.stack([jnp.asarray(a[i]) for i in numbers])
    whole: Array = jnp.asarray(a)
    return whole if len(numbers) == num_layers else whole[numbers]


def _check_head_mask(
    head_mask: HeadMask, layer_types: Mapping[str, LayersOfType], num_layers: int, batch: int
) -> None:
    heads = sorted({layers.spec.heads.num_heads for layers in layer_types.values()})
    if isinstance(head_mask, list | tuple):
        if (count := len(head_mask)) != num_layers:
            raise ValueError(f"head_mask has {count} arrays for {num_layers} layers")
        return
    shape = jnp.asarray(head_mask).shape
    one, each = (num_layers, heads[0]), (num_layers, batch, heads[0])
    if len(heads) > 1:
        numbers = " or ".join(map(str, heads))
        raise ValueError(f"layers have {numbers} heads: give head_mask as {num_layers} arrays")
    if shape not in (one, each, (num_layers, 1, heads[0])):
        raise ValueError(
            f"head_mask {shape} must be [layers, heads] = {one} or [layers, batch, heads] = {each}"
        )


# Captured values ----------------------------------------------------------------------------------


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
    if not isinstance(patch, Mapping | None) or not all(map(callable, (patch or {}).values())):
        raise TypeError(f"patch must be a dict, name -> function (value, layer), not {patch!r:.80}")
    for name in (*names, *(patch or {})):
        lookup(MappingProxyType(known), name, what="value")
    return names, dict(patch or {})


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


def _in_order(
    captured: Mapping[str, dict[str, Array]], numbers: Mapping[str, np.ndarray]
) -> dict[str, Array]:
    """`StackOutputs.captured` of what the layers of each type captured."""
    first, *others = captured.values()
    if not others:
        return first
    order = np.argsort(np.concatenate([numbers[name] for name in captured]))
    found: dict[str, Array] = {}
    for value in first:
        each = {name: values[value] for name, values in captured.items()}
        if len({(a.shape[1:], a.dtype) for a in each.values()}) == 1:
            found[value] = jnp.concatenate(list(each.values()))[order]
        else:
            found |= {f"{name}.{value}": a for name, a in each.items()}
    return found
