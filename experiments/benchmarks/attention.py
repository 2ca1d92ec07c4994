"""Suite attention: layers and bare functions beside their peers.

Ours and every peer get the same weights and inputs, and their outputs and gradients are compared
before anything is timed. Gradients are those with respect to all arguments (weights and x, or
q, k and v) for one random cotangent, and come with the output, as in a training step.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from attnlab import heads
from attnlab.attention import dot_product_attention, explain
from attnlab.sharing import PyTree
from experiments.benchmarks.measure import Case, Entry, compile_program, refuse, tried
from experiments.benchmarks.peers import attention as peers
from experiments.benchmarks.peers import on_torch
from experiments.benchmarks.peers.attention import Peer

OURS = "attnlab"
# Largest difference allowed, relative to the largest value: sums of 4096 terms in another order.
TOLERANCE = {"float32": 5e-4, "bfloat16": 5e-2}
MODES = ("forward", "with gradient")


class Size(NamedTuple):
    """N heads of width H on inputs of width D (a bare function has no D)."""

    B: int
    T: int
    N: int
    H: int
    D: int = 0
    is_causal: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        sizes = " ".join(f"{a}{getattr(self, a)}" for a in "BTDNH" if getattr(self, a))
        return sizes + ", causal" * self.is_causal + f", {self.dtype}" * (self.dtype != "float32")


LAYERS = (
    Size(4, 512, 8, 64, 512),
    Size(4, 512, 8, 64, 512, is_causal=True),
    Size(16, 128, 8, 32, 256),
    Size(16, 128, 8, 32, 256, is_causal=True),
    Size(16, 256, 8, 32, 256),
    Size(16, 256, 8, 32, 256, is_causal=True),
    Size(1, 4096, 8, 64, 512),
    Size(1, 4096, 8, 64, 512, is_causal=True),
    Size(16, 256, 8, 256, 256),  # wide heads
    Size(16, 128, 8, 512, 512),
)
FUNCTIONS = (
    Size(4, 512, 8, 64, is_causal=True),
    Size(16, 128, 8, 32),
    Size(1, 4096, 8, 64, is_causal=True),
)
TINY = (Size(2, 5, 3, 2, 6, is_causal=True), Size(2, 5, 3, 4, 4)), (Size(2, 5, 3, 4),)


def cases(tiny: bool) -> Iterator[Case]:
    """What there is to time on a CPU; the cases for a GPU are those of suite accelerator."""
    layers, functions = TINY if tiny else (LAYERS, FUNCTIONS)
    for size in layers:
        for mode in MODES:
            yield layer_case(size, mode, peers.LAYERS, twin="Linen")
    for size in functions:
        for mode in MODES:
            yield function_case(size, mode, peers.FUNCTIONS, twin="jax.nn")


def layer_case(size: Size, mode: str, names: Iterable[str], twin: str = "") -> Case:
    """Self-attention with its projections, without biases: `multi_head_attention` in every
    contraction order and with every backend, and peers."""
    layout = heads.Standard(width=size.D, num_heads=size.N, head_dim=size.H)

    def build() -> list[Entry]:
        w = heads.init(quick_key(0), layout, dtype=size.dtype)
        x = jax.random.normal(quick_key(1), (size.B, size.T, size.D), size.dtype)
        call = functools.partial(
            heads.multi_head_attention, layout=layout, is_causal=size.is_causal
        )
        would = heads.explain_heads(layout, x, is_causal=size.is_causal)
        order = would["chosen"]["order"]
        ordered = functools.partial(call, order=order)
        own, refused = by_backend(would["implementation"], ordered, f"{OURS} {order},")
        for other, cost in would["order"].items():
            if other != order and isinstance(cost, int):
                own[f"{OURS} {other}, as chosen"] = functools.partial(call, order=other)
        others = {n: functools.partial(peers.LAYERS[n], layout, size.is_causal) for n in names}
        return entries(own, others, (w, x), mode, twin) + refused

    return _case("layer", size, mode, build)


def function_case(size: Size, mode: str, names: Iterable[str], twin: str = "") -> Case:
    """q, k, v -> output: `dot_product_attention` with each of its backends, and peers."""

    def build() -> list[Entry]:
        shape = (3, size.B, size.T, size.N, size.H)
        q, k, v = jax.random.normal(quick_key(0), shape, size.dtype)
        call = functools.partial(dot_product_attention, is_causal=size.is_causal)
        own, refused = by_backend(explain(q, k, v, is_causal=size.is_causal), call, OURS)
        others = {n: functools.partial(peers.FUNCTIONS[n], size.is_causal) for n in names}
        return entries(own, others, (q, k, v), mode, twin) + refused

    return _case("function", size, mode, build)


def _case(word: str, size: Size, mode: str, build: Callable[[], list[Entry]]) -> Case:
    about = size._asdict() | {"word": word, "mode": mode}
    if word == "function":
        about["flops"] = attention_flops(size, mode)
    return Case(f"{word} {size}, {mode}", size.B * size.T, build, about)


def attention_flops(size: Size, mode: str) -> float:
    """Of scores and values alone, as FlashAttention counts (Dao 2023, arXiv 2307.08691, section
    4.1): a causal mask halves them, a backward pass takes 2.5 times the forward one."""
    forward = 4.0 * size.B * size.N * size.T**2 * size.H / (1 + size.is_causal)
    return forward * (3.5 if mode == "with gradient" else 1.0)


def by_backend(
    would: Mapping[str, str], call: Callable, title: str
) -> tuple[dict[str, Callable], list[Entry]]:
    """What `explain` returns -> our calls by name, the chosen one first, and those that refuse."""
    own: dict[str, Callable] = {}
    refused = []
    for name, answer in sorted(would.items(), key=lambda item: not item[1].startswith("chosen")):
        if answer.startswith(("chosen", "could run")):
            own[f"{title} {name}"] = functools.partial(call, implementation=name)
        else:
            refused.append(refuse(f"{title} {name}", answer, ours=True))
    return own, refused


def quick_key(seed: int) -> Array:
    """A key of the device's own generator, whose programs compile in no time."""
    return jax.random.key(seed, impl="rbg")


def entries(
    own: Mapping[str, Callable],
    others: Mapping[str, Callable[[], Peer]],
    args: tuple,
    mode: str,
    twin: str = "",
) -> list[Entry]:
    """Ours and the peers, compiled, run once and found equal to the first of ours that runs.

    `twin` is entered twice. An entry that raises, needs too much memory or computes something else
    is a row with the reason; a peer whose library is not installed is left out.
    """
    out = jax.eval_shape(next(iter(own.values())), *args)
    cotangent = jax.random.normal(quick_key(1), out.shape, out.dtype)
    first: list[PyTree] = []

    def build(make: Callable[[], Peer]) -> Entry:
        peer = make()
        entry = (torch_entry if peer.torch else jax_entry)(peer, args, cotangent, mode)
        result = jax.tree.map(on_torch.array, entry.run()) if peer.torch else entry.run()
        out, grads = first[0] if first else result
        expected = peer.arrange_output(out), peer.arrange(*grads) if grads else ()
        check_equal(result, expected)
        if not first:  # others need not stay on the device
            first.append(result)
        return entry

    made: list[Entry] = []
    for name, call in own.items():
        peer = functools.partial(Peer, call)
        made += tried(name, functools.partial(build, peer), ours=True)
    for name, make in others.items():
        made += tried(name, functools.partial(build, make))
        if name == twin:
            made += tried(f"{name}, again", functools.partial(build, make), again=True)
    return made


def check_equal(got: PyTree, expected: PyTree) -> None:
    """Raises AssertionError unless all is finite and agrees up to rounding: the times of entries
    that do not compute the same mean nothing."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    shapes = [[a.shape for a in arrays] for arrays in (got, expected)]
    assert shapes[0] == shapes[1], f"has shapes {shapes[0]}, not {shapes[1]}"
    for a, b in zip(got, expected, strict=True):
        worst = float(_worst(jnp.asarray(a), jnp.asarray(b)))
        assert worst <= TOLERANCE[str(b.dtype)], f"computes something else: {worst:.2g} off"


@jax.jit
def _worst(a: Array, b: Array) -> Array:
    """The largest difference, relative to the largest value, computed where the arrays are."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def jax_entry(peer: Peer, args: tuple, cotangent: Array, mode: str) -> Entry:
    """Compiled for these arguments."""

    def work(args, cotangent):
        if mode == "forward":
            return peer.call(*args), ()
        out, pull = jax.vjp(peer.call, *args)
        return out, pull(cotangent)

    given = peer.arrange(*args), peer.arrange_output(cotangent)
    program, numbers = compile_program(work, *given)
    return Entry("", lambda: jax.block_until_ready(program(*given)), numbers=numbers)


def torch_entry(peer: Peer, args: tuple, cotangent: Array, mode: str) -> Entry:
    """Eager, in tensors of its own."""
    torch = on_torch.load()
    given = [on_torch.trained(a) for a in peer.arrange(*args)]
    cotangent = on_torch.tensor(peer.arrange_output(cotangent))

    def run():
        if mode == "forward":
            with torch.inference_mode():
                result = peer.call(*given), ()
        else:
            out = peer.call(*given)
            result = out, torch.autograd.grad(out, given, cotangent)
        on_torch.wait()
        return result

    return Entry("", run)
