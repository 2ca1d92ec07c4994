"""Suite attention: layers, bare functions, long sequences and wide heads beside their peers.

Ours and every peer get the same weights and inputs, and their outputs and gradients are compared
before anything is timed. Gradients are those with respect to all arguments (weights and x, or
q, k and v) for one random cotangent, and come with the output, as in a training step.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from attnlab import heads
from attnlab.attention import dot_product_attention, explain
from attnlab.sharing import PyTree
from experiments.benchmarks.flops import matmul_flops
from experiments.benchmarks.measure import Bar, Case, Entry, refuse
from experiments.benchmarks.peers import attention as peers
from experiments.benchmarks.peers import on_torch
from experiments.benchmarks.peers.attention import Peer

OURS = "attnlab"
# Largest difference allowed, relative to the largest value: sums of 4096 terms in another order.
TOLERANCE = {"float32": 5e-4, "bfloat16": 5e-2}
# An entry may take this share of the memory that is free; the rest is for its neighbours.
SHARE_OF_MEMORY = 0.7
MODES = ("forward", "with gradient")


class Size(NamedTuple):
    """Of one case. N heads of width H on inputs of width D (a bare function has no D)."""

    B: int
    T: int
    N: int
    H: int
    D: int = 0
    is_causal: bool = False
    dtype: str = "float32"

    def labels(self) -> list[str]:
        """B T, D N H, then what is particular."""
        sizes = [f"{a}{getattr(self, a)}" for a in "BTDNH" if getattr(self, a)]
        causal = ("causal",) if self.is_causal else ()
        dtype = () if self.dtype == "float32" else (self.dtype,)
        return [" ".join(sizes[:2]), " ".join(sizes[2:]), *causal, *dtype]


LAYERS = (
    Size(4, 512, 8, 64, 512),
    Size(4, 512, 8, 64, 512, is_causal=True),
    Size(16, 128, 8, 32, 256),
    Size(16, 128, 8, 32, 256, is_causal=True),
    Size(16, 256, 8, 32, 256),
    Size(16, 256, 8, 32, 256, is_causal=True),
    Size(1, 4096, 8, 64, 512),
    Size(1, 4096, 8, 64, 512, is_causal=True),
)
WIDE_LAYERS = (Size(16, 256, 8, 256, 256), Size(16, 128, 8, 512, 512))
WIDE_PEERS = ("Linen", "torch sdpa")
FUNCTIONS = (
    Size(4, 512, 8, 64, is_causal=True),
    Size(16, 128, 8, 32),
    Size(1, 4096, 8, 64, is_causal=True),
)
PEER_FUNCTIONS = ("Linen", "NNX", "Equinox", "jax.nn", "torch sdpa")
LONG = Size(1, 16384, 8, 64, is_causal=True)


def cases() -> Iterator[Case]:
    """What there is to time on a CPU; the cases for a GPU are those of suite accelerator."""
    for size in LAYERS:
        for mode in MODES:
            yield layer_case("layer", size, mode, tuple(peers.LAYERS))
    for size in WIDE_LAYERS:
        # Half the products of the projections fall away (see `order`), so ours must gain.
        for mode, share in zip(MODES, (0.80, 0.90), strict=True):
            yield layer_case("wide layer", size, mode, WIDE_PEERS, (Bar("Linen", share),))
    for size in FUNCTIONS:
        for mode in MODES:
            long = size.T >= 4096 and mode == "with gradient"
            bars = (Bar("jax.nn", 0.5, memory=0.1),) if long else ()
            yield function_case(size, mode, PEER_FUNCTIONS, bars)
    yield function_case(LONG, "with gradient", ("jax.nn",), twin="", most_rounds=1)


def layer_case(
    what: str,
    size: Size,
    mode: str,
    names: Iterable[str],
    bars: tuple[Bar, ...] = (),
) -> Case:
    """Self-attention with its projections, without biases: `multi_head_attention` and peers."""
    layout = heads.Standard(width=size.D, num_heads=size.N, head_dim=size.H)

    def build() -> list[Entry]:
        w, x = jax.jit(
            lambda key: (
                heads.init(key, layout, dtype=size.dtype),
                _normal(key, (size.B, size.T, size.D), size),
            )
        )(jax.random.key(0))
        ours = functools.partial(
            heads.multi_head_attention, layout=layout, is_causal=size.is_causal
        )
        would = heads.explain_heads(layout, x, is_causal=size.is_causal)
        order, backend = would["chosen"]["order"], chosen_in(would["implementation"])
        own: dict[str, Callable] = {f"{OURS} ({order}, {backend})": ours}
        for other, cost in would["order"].items() if what == "wide layer" else ():
            if other != order and isinstance(cost, int):
                own[f"{OURS}, {other}"] = functools.partial(ours, order=other)
        others = {n: functools.partial(peers.LAYERS[n], layout, size.is_causal) for n in names}
        return entries(own, others, (w, x), mode, "Linen")

    return _case(what, size, mode, build)._replace(bars=bars)


def function_case(
    size: Size,
    mode: str,
    names: Iterable[str],
    bars: tuple[Bar, ...] = (),
    twin: str = "Linen",
    most_rounds: int | None = None,
) -> Case:
    """q, k, v -> output: `dot_product_attention` with each of its backends, and peers."""

    def build() -> list[Entry]:
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (_normal(key, (size.B, size.T, size.N, size.H), size) for key in keys)
        ours = functools.partial(dot_product_attention, is_causal=size.is_causal)
        would = explain(q, k, v, is_causal=size.is_causal)
        own: dict[str, Callable] = {f"{OURS} ({chosen_in(would)})": ours}
        for backend, word in would.items() if most_rounds is None else ():
            if word == "could run":
                own[f"{OURS}, {backend}"] = functools.partial(ours, implementation=backend)
        others = {n: functools.partial(peers.FUNCTIONS[n], size.is_causal) for n in names}
        return entries(own, others, (q, k, v), mode, twin)

    case = _case("function", size, mode, build)
    return case._replace(bars=bars, most_rounds=most_rounds, warm=most_rounds is None)


def chosen_in(backends: Mapping[str, object]) -> str:
    """The backend that `explain` says would run."""
    return next(name for name, word in backends.items() if str(word).startswith("chosen"))


def _case(what: str, size: Size, mode: str, build: Callable[[], list[Entry]]) -> Case:
    sizes, *marks = size.labels()
    name = ", ".join([f"{what} {sizes} {marks[0]}", *marks[1:], mode])
    return Case(name, size.B * size.T, build)


def _normal(key: Array, shape: tuple[int, ...], size: Size) -> Array:
    return jax.random.normal(key, shape, size.dtype)


def quick_key(seed: int) -> Array:
    """Of the generator that the device has itself: its programs compile in no time."""
    return jax.random.key(seed, impl="rbg")


class DifferentResultsError(AssertionError):
    """Two entries of a case do not compute the same, so their times mean nothing."""


def entries(
    own: Mapping[str, Callable],
    others: Mapping[str, Callable[[], Peer]],
    args: tuple,
    mode: str,
    twin: str,
    *,
    lenient: bool = False,
) -> list[Entry]:
    """Ours and the peers, compiled, run once and found equal. `twin` is entered twice.

    A peer whose library is missing is left out, one that fails says why in its row. Raises
    DifferentResultsError where results differ, and what ours raises; `lenient`: these are rows too.
    """
    out = jax.eval_shape(next(iter(own.values())), *args)
    cotangent = jax.random.normal(quick_key(1), out.shape, out.dtype)
    made: list[Entry] = []
    expected = None
    for name, call in own.items():
        try:
            entry, expected = _entry(name, Peer(call), args, cotangent, mode, expected)
        except Exception as error:
            if not lenient:
                raise
            entry = refuse(name, reason_of(error))
        made.append(entry._replace(ours=True))
    for name, build in others.items():
        for again in (False, True) if name == twin else (False,):
            label = f"{name}, again" if again else name
            try:
                entry, _ = _entry(label, build(), args, cotangent, mode, expected)
            except ImportError as error:
                _left_out(error.name or name)
                continue
            except Exception as error:  # whatever a library raises for what it cannot do
                if isinstance(error, DifferentResultsError) and not lenient:
                    raise
                entry = refuse(label, reason_of(error))
            made.append(entry._replace(twin=again))
    return made


def reason_of(error: Exception) -> str:
    """What an error says, in one line that fits a table."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{reason[:157]}..." if len(reason) > 160 else reason


def _entry(name, peer, args, cotangent, mode, expected) -> tuple[Entry, PyTree]:
    """The entry and the results that all have to equal: its own where there are none yet."""
    entry = (torch_entry if peer.torch else jax_entry)(name, peer, args, cotangent, mode)
    if entry.refusal:
        return entry, expected
    before = peak_bytes()
    result = entry.run()
    if (peak := peak_bytes()) is not None and peak > (before or 0) and not peer.torch:
        entry = entry._replace(peak_bytes=peak)
    if peer.torch:
        result = jax.tree.map(on_torch.array, result)
    if expected is None:
        check_equal(name, result, result)  # finite
        return entry, result
    out, grads = expected
    check_equal(name, result, (peer.arrange_output(out), peer.arrange(*grads) if grads else ()))
    return entry, expected


@functools.cache
def _left_out(package: str) -> None:
    print(f"{package} is left out: it is not installed; pip install attnlab[bench]", flush=True)


def check_equal(name: str, got: PyTree, expected: PyTree) -> None:
    """Raises DifferentResultsError unless all is finite and agrees up to rounding."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    if [a.shape for a in got] != [b.shape for b in expected]:
        shapes = f"{[a.shape for a in got]}, not {[b.shape for b in expected]}"
        raise DifferentResultsError(f"{name}: shapes {shapes}")
    for a, b in zip(got, expected, strict=True):
        worst = float(_worst(jnp.asarray(a), jnp.asarray(b)))
        if not worst <= TOLERANCE[str(b.dtype)]:  # NaN too
            raise DifferentResultsError(f"{name} computes something else: {worst:.2g} off")


@jax.jit
def _worst(a: Array, b: Array) -> Array:
    """The largest difference, relative to the largest value: where the arrays are."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def jax_entry(name: str, peer: Peer, args: tuple, cotangent: Array, mode: str) -> Entry:
    """Compiled for these arguments; refuses what would not fit in memory."""

    def work(args, cotangent):
        if mode == "forward":
            return peer.call(*args), ()
        out, pull = jax.vjp(peer.call, *args)
        return out, pull(cotangent)

    given = peer.arrange(*args), peer.arrange_output(cotangent)
    began = time.perf_counter()
    traced = jax.jit(work).trace(*given)
    compiled = traced.lower().compile()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    temp = memory.temp_size_in_bytes if memory else None
    need, free = (temp or 0) + (memory.output_size_in_bytes if memory else 0), free_bytes()
    entry = Entry(
        name,
        lambda: jax.block_until_ready(compiled(*given)),
        temp_bytes=temp,
        flops=matmul_flops(traced.jaxpr),
        compile_seconds=seconds,
    )
    if free is not None and need > SHARE_OF_MEMORY * free:
        reason = f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        return entry._replace(refusal=reason)
    return entry


def torch_entry(name: str, peer: Peer, args: tuple, cotangent: Array, mode: str) -> Entry:
    """Eager, in tensors of its own."""
    torch = on_torch.load()
    given = [on_torch.tensor(a).requires_grad_() for a in peer.arrange(*args)]
    cotangent = on_torch.tensor(peer.arrange_output(cotangent))

    def forward():
        with torch.inference_mode():
            return peer.call(*given), ()

    def with_gradient():
        out = peer.call(*given)
        return out, torch.autograd.grad(out, given, cotangent)

    work = forward if mode == "forward" else with_gradient

    def run():
        result = work()
        on_torch.wait()
        return result

    return Entry(name, run)


def peak_bytes() -> int | None:
    """The most that JAX's device has held in this process; None where it does not tell."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def free_bytes() -> int | None:
    """Memory that a program may still take on JAX's device; None where it is not known."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    linux = Path("/proc/meminfo")
    if not linux.exists():
        return None
    return 1024 * int(re.findall(r"MemAvailable:\s+(\d+) kB", linux.read_text())[0])
