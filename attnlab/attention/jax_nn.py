"""`jax.nn.dot_product_attention` on XLA and on cuDNN, behind our rules."""

import contextlib
import contextvars
import functools
from collections.abc import Collection, Iterator
from typing import NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnlab.attention.call import AttentionCall, AttentionOutput
from attnlab.attention.masks import MaskSpec
from attnlab.ops import save_for_backward


class NativeMask(TypedDict, total=False):
    """The keywords of jax.nn that say which keys a query attends to."""

    mask: Array | None
    is_causal: bool
    local_window_size: tuple[int, int] | None
    query_seq_lengths: Array | None
    key_value_seq_lengths: Array | None


def xla(call: AttentionCall) -> AttentionOutput:
    """jax.nn's own composition of XLA operations."""
    key, value, sink = call.key, call.value, call.options.sink
    query, scale = _query_and_scale(call)
    width = value.shape[-1]
    if sink is not None:
        query, key, value = _with_sink(query, key, value, sink / scale)
    size = max(query.shape[-1], width)
    q, k, v = _pad_widths(size, query, key, value)
    if _is_elementwise_in_bfloat16(call, size):
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    bias, allowed = call.options.bias, call.mask.allowed()
    attending = None
    if bias is not None:
        # jax.nn hides by a finite score, which a bias can go below, and a row of -inf is NaN there.
        shown = bias > -jnp.inf
        allowed = shown if allowed is None else allowed & shown
        attending = jnp.any(allowed, axis=3, keepdims=True)
        bias = jnp.where(allowed, bias, jnp.where(attending, -jnp.inf, 0))
        allowed = None
    if sink is not None:
        keys = call.scores_shape[3]
        bias = None if bias is None else _before_keys(bias, keys, 0)
        allowed = None if allowed is None else _before_keys(allowed, keys, True)
    out = jax.nn.dot_product_attention(q, k, v, bias, allowed, scale=scale, implementation="xla")[
        ..., :width
    ]
    if attending is not None:
        out = jnp.where(attending.swapaxes(1, 2), out, 0)
    return AttentionOutput(save_for_backward(out.astype(value.dtype)))


def _query_and_scale(call: AttentionCall) -> tuple[Array, float]:
    """What jax.nn multiplies. A sink is divided by the scale, so a traced one, which may be 0,
    multiplies the query instead."""
    query, scale = call.query, call.options.scale
    if call.options.sink is not None and isinstance(scale, jax.core.Tracer):
        return (query * scale).astype(query.dtype), 1.0
    return query, cast(float, scale)  # it may be an array; jax.nn has another annotation


def _with_sink(query: Array, key: Array, value: Array, sink: Array) -> list[Array]:
    """Arrays with one more key in front, whose product with a query is the sink and whose value is
    0, for kernels that have none.

    Two more columns of q hold the sink, rounded, and the rest, so that bfloat16 has 16 bits of it.

    Args:
      sink: of each query, divided by the scale: broadcasts to [B, N, T, 1].
    """
    info = jnp.finfo(query.dtype)  # type: ignore[no-untyped-call]
    sink = sink.astype(jnp.promote_types(query.dtype, jnp.float32))
    sink = jnp.maximum(sink, float(info.min) / 4)  # -inf * 0 is NaN
    rounded = jax.lax.reduce_precision(sink, info.nexp, info.nmant)
    columns = jnp.concatenate([rounded, sink - rounded], -1).swapaxes(1, 2).astype(query.dtype)
    columns = jnp.broadcast_to(columns, (*query.shape[:3], 2))
    key = jnp.pad(key, ((0, 0), (1, 0), (0, 0), (0, 2))).at[:, 0, :, -2:].set(1)
    value = jnp.pad(value, ((0, 0), (1, 0), (0, 0), (0, 0)))
    return [jnp.concatenate([query, columns], -1), key, value]


def _before_keys(array: Array, keys: int, fill: float) -> Array:
    """A bias or mask with a column of this value in front of the keys."""
    array = jnp.broadcast_to(array, (*array.shape[:3], keys))
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=fill)


def refuse_jax_nn(call: AttentionCall) -> str | None:
    """Why jax.nn cannot run the call."""
    sink, scale = call.options.sink, call.options.scale
    if sink is not None and not isinstance(scale, jax.core.Tracer) and scale == 0:
        return "a sink needs a scale other than 0"
    return refuse_options("jax.nn", call, supported=("sink",))


def refuse_options(
    library: str, call: AttentionCall, supported: Collection[str] = ()
) -> str | None:
    """What the kernels of other libraries cannot do, but for the `supported` options."""
    options = call.options
    used = {
        "sink": options.sink is not None,
        "logits_soft_cap": options.logits_soft_cap is not None,
        "score_mods": bool(options.score_mods),
        "dropout_rate": bool(options.dropout_rate),
        "talking_heads": options.talking_heads != (None, None),
        "return_residual": call.return_residual,
    }
    for name, is_used in used.items():
        if is_used and name not in supported:
            return f"the backend of {library} has no {name}"
    query, key, value = call.query, call.key, call.value
    if key.shape[-2] != value.shape[-2]:
        return f"it needs as many key heads ({key.shape[-2]}) as value heads ({value.shape[-2]})"
    if not query.dtype == key.dtype == value.dtype:
        return f"it needs one dtype, not {query.dtype}, {key.dtype}, {value.dtype}"
    if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
        return f"{library} has no float16 on a CPU"
    return None


def native_mask(mask: MaskSpec) -> NativeMask | None:
    """Causal rule, window and lengths as keywords of cuDNN, or None if they need a mask array.

    cuDNN has a left window only with the causal rule, and gives NaN in an empty row: so lengths are
    at least 1 (what is hidden is zero by then, and empty rows are set to zero afterwards).
    """
    window, lengths = mask.window, (mask.query_lengths, mask.key_lengths)
    causal = mask.is_causal or (window is not None and window[1] == 0)
    if mask.mask is not None or mask.edges is not None or mask.segments is not None:
        return None
    if window is not None:
        ranges = mask._replace(query_lengths=None, key_lengths=None).ranges()
        empty = ranges is not None and bool(np.any(ranges[0] >= ranges[1]))
        if not causal or empty or lengths != (None, None):
            return None
    query_lengths, key_lengths = (
        None if a is None else jnp.clip(a, 1, size)
        for a, size in zip(lengths, (mask.num_queries, mask.num_keys), strict=True)
    )
    return {
        "is_causal": causal,
        "local_window_size": None if window is None else (window[0], 0),
        "query_seq_lengths": query_lengths,
        "key_value_seq_lengths": key_lengths,
    }


def cudnn(call: AttentionCall) -> AttentionOutput:
    """cuDNN's flash attention; widths are padded to one multiple of 8."""
    key, value, mask = call.key, call.value, call.mask
    query, scale = _query_and_scale(call)
    shape, width, sink = query.shape[:3], value.shape[-1], call.options.sink
    if mask.segments is not None:  # of one length: each is a batch row
        length = mask.segments.length
        assert length is not None  # refused otherwise
        query, key, value = (a.reshape(-1, length, *a.shape[2:]) for a in (query, key, value))
        mask = MaskSpec(length, length, is_causal=mask.is_causal, window=mask.window)
    t, options, before, after = query.shape[1], native_mask(mask), 0, (0, 0)
    if sink is not None:
        query, key, value = _with_sink(query, key, value, sink / scale)
        options = _native_with_sink(options, mask)
        if options is not None:  # a row in front keeps the causal rule in place; lengths stay even
            before, after = 1, (1, 1)
    if options is None:
        options, after = _mask_array(mask, has_sink=sink is not None)
    query = jnp.pad(query, ((0, 0), (before, after[0]), (0, 0), (0, 0)))
    key, value = (jnp.pad(a, ((0, 0), (0, after[1]), (0, 0), (0, 0))) for a in (key, value))
    q, k, v = _pad_widths(-(-max(query.shape[-1], width) // 8) * 8, query, key, value)
    out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", scale=scale, **options)
    out = out[:, before : before + t, :, :width]
    return AttentionOutput(save_for_backward(out.reshape(*shape, width)))


def _native_with_sink(options: NativeMask | None, mask: MaskSpec) -> NativeMask | None:
    """The keywords of cuDNN with one more query and key in front, or None if they need an array.

    The causal rule hides one more key behind the others, which makes their number even again.
    """
    if options is None or not options["is_causal"] or options["local_window_size"] is not None:
        return None
    if mask.num_queries > mask.num_keys:
        return None
    query_lengths, key_lengths = (
        None if a is None else a + 1
        for a in (options["query_seq_lengths"], options["key_value_seq_lengths"])
    )
    return {
        "is_causal": True,
        "query_seq_lengths": query_lengths,
        "key_value_seq_lengths": key_lengths,
    }


def _mask_array(mask: MaskSpec, *, has_sink: bool) -> tuple[NativeMask, tuple[int, int]]:
    """A mask array of multiples of 128, in whose blocks cuDNN reads it, and how many queries and
    keys these are more."""
    found = mask.allowed()
    t, s = mask.num_queries, mask.num_keys
    allowed = jnp.ones((1, 1, t, s), bool) if found is None else found
    allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], t, s))
    if has_sink:
        allowed = _before_keys(allowed, s, True)
    after = (-t % 128, -(s + has_sink) % 128)
    return {"mask": jnp.pad(allowed, ((0, 0), (0, 0), (0, after[0]), (0, after[1])))}, after


class Device(NamedTuple):
    """What decides whether cuDNN can run."""

    platform: str
    compute_capability: float = 0.0
    """of an NVIDIA GPU with cuDNN, else 0"""


ASSUMED: contextvars.ContextVar[Device | None] = contextvars.ContextVar("assumed", default=None)


@contextlib.contextmanager
def assume_device(platform: str, compute_capability: float = 0.0) -> Iterator[None]:
    """Inside, "cudnn" accepts and refuses calls as on this device: to explain or lower for it.

    Args:
      platform: "gpu", "tpu" or "cpu".
      compute_capability: of an NVIDIA GPU, as 8.0 or 9.0.

    >>> from attnlab import explain
    >>> x = jax.ShapeDtypeStruct((1, 4, 2, 8), "bfloat16")
    >>> with assume_device("gpu", 9.0):
    ...     explain(x, x, x)["cudnn"].startswith("chosen")
    True
    """
    before = ASSUMED.set(Device(platform, compute_capability))
    try:
        yield
    finally:
        ASSUMED.reset(before)


def this_device() -> Device:
    """The default device, or the one of `assume_device`."""
    if (assumed := ASSUMED.get()) is not None:
        return assumed
    device = jax.devices()[0]
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):
        return Device(device.platform)
    problem = _cudnn_problem()
    return Device(device.platform, capability) if problem is None else Device(problem)


@functools.cache
def _cudnn_problem() -> str | None:
    """Why jax.nn refuses the plainest call of cuDNN: it is missing or too old."""
    a = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(
            functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), a, a, a
        )
    except (RuntimeError, NotImplementedError) as error:
        return f"GPU for which jax.nn raises {str(error)!r}"
    return None


def refuse_cudnn(call: AttentionCall) -> str | None:
    """Why cuDNN cannot run the call."""
    device, (_, _, t, s) = this_device(), call.scores_shape
    if device.platform != "gpu" or not device.compute_capability:
        return f"cuDNN needs an NVIDIA GPU, this is a {device.platform}"
    sink, mask = call.options.sink, call.mask
    size = max(call.query.shape[-1] + 2 * (sink is not None), call.value.shape[-1])
    most = 256 if device.compute_capability >= 9 else 128
    if call.query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN needs float16 or bfloat16, not {call.query.dtype}"
    if size > most:
        return f"cuDNN on this GPU needs head widths of at most {most}, not {size}"
    if call.options.bias is not None:
        shape = call.options.bias.shape
        return f"cuDNN has a bias gradient for batch 1 alone, bias has shape {shape}"
    if (segments := mask.segments) is not None:
        if segments.length is None:
            return "cuDNN takes segments of one length in a NumPy array, which is known to JAX"
        others = (mask.mask, mask.edges, mask.query_lengths, mask.key_lengths, sink)
        if any(a is not None for a in others):
            return "cuDNN takes segments without a mask, lengths and a sink"
        t = s = segments.length
    if t % 2 or s % 2:  # jax.nn asks it of every gradient, as if there always were a bias
        return f"the gradient of cuDNN needs even lengths, not T={t} and S={s}"
    return refuse_jax_nn(call)


def _pad_widths(size: int, *arrays: Array) -> list[Array]:
    """jax.nn wants V = H; zero columns change no product."""
    return [jnp.pad(a, [(0, 0)] * 3 + [(0, size - a.shape[-1])]) for a in arrays]


def _is_elementwise_in_bfloat16(call: AttentionCall, size: int) -> bool:
    """Does XLA fail to compile this call on a CPU?

    It turns products with two axes of size 1 into elementwise ones, which cannot have the precision
    that jax.nn asks for in bfloat16 (openxla: "Algorithm not supported by the ElementalIrEmitter").
    """
    _, _, t, s = call.scores_shape
    small = (t, s, size).count(1) >= 2
    return small and call.query.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
